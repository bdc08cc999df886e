"""One request: counters, statuses and the order of its stop checks."""

from __future__ import annotations

import pytest

from mini_vllm.config import SamplingParams
from mini_vllm.request import Request, RequestStatus

EOS = 256


def ended(outputs: list[int], max_model_len: int | None = None, **params) -> str | None:
    """Finish reason of a two-token request after these outputs, checked once at the end."""
    request = Request("r", [1, 2], SamplingParams(**params), eos_token_id=EOS)
    for token in outputs:
        request.append_output_token(token)
    assert request.maybe_finish(max_model_len) == request.is_finished
    return request.finish_reason


@pytest.mark.parametrize(
    ("outputs", "params", "reason"),
    [
        ([5], {"max_tokens": 3}, None),
        ([5, 6, 7], {"max_tokens": 3}, "length"),
        ([5, EOS], {"max_tokens": 3}, "stop"),
        ([5, 6, EOS], {"max_tokens": 3}, "stop"),
        ([5, EOS], {"max_tokens": 3, "ignore_eos": True}, None),
        ([5, 6, EOS], {"max_tokens": 3, "ignore_eos": True}, "length"),
        ([9], {"max_tokens": 3, "stop_token_ids": (9,)}, "stop"),
        ([9], {"max_tokens": 3, "stop_token_ids": (9,), "ignore_eos": True}, "stop"),
        ([EOS], {"max_tokens": 3, "min_tokens": 2}, None),
        ([5, 6, 7], {"max_tokens": 3, "min_tokens": 3}, "length"),
    ],
)
def test_stop_checks_run_in_upstream_order(outputs, params, reason):
    """min_tokens first, then EOS, stop ids, and the caps; EOS at the cap reports "stop"."""
    assert ended(outputs, **params) == reason


def test_the_length_of_the_model_ends_a_request_too():
    """Two prompt tokens and two outputs reach a length of 4."""
    assert ended([5], max_model_len=4, max_tokens=9) is None
    assert ended([5, 6], max_model_len=4, max_tokens=9) == "length"
    assert ended([5, EOS], max_model_len=4, max_tokens=9) == "stop"


def test_a_request_without_outputs_is_never_finished():
    assert ended([]) is None


def test_a_new_request_waits_with_nothing_computed():
    request = Request("r", [1, 2, 3], SamplingParams())
    assert request.status == RequestStatus.WAITING
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 0)


def test_appending_moves_num_tokens_ahead_of_num_computed_tokens():
    request = Request("r", [1, 2, 3], SamplingParams())
    request.num_computed_tokens = 3
    request.append_output_token(7)
    assert (request.num_tokens, request.num_computed_tokens) == (4, 3)
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [7])


def test_the_token_lists_handed_out_are_copies():
    request = Request("r", [1, 2, 3], SamplingParams())
    request.prompt_token_ids.append(9)
    request.output_token_ids.append(9)
    assert request.all_token_ids == [1, 2, 3]


def test_every_status_after_preempted_is_a_finished_one():
    """The declaration order is load-bearing."""
    assert [status.name for status in RequestStatus if status > RequestStatus.PREEMPTED] == [
        "FINISHED_STOPPED",
        "FINISHED_LENGTH",
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
        "FINISHED_REPETITION",
    ]
    assert list(RequestStatus)[:3] == [
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
    ]


def test_the_text_form_shows_progress():
    request = Request("r7", [1, 2, 3], SamplingParams())
    assert repr(request) == "Request('r7', WAITING, computed 0 of 3)"
