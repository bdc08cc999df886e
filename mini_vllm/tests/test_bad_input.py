"""Bad input: a ValueError naming argument, value and bound, and an unharmed engine."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.llm import LLM
from mini_vllm.models.tests.test_shipped_model import model
from mini_vllm.models.toy import ToyModel
from mini_vllm.request import Request
from mini_vllm.tests.watching import engine_state

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, r"temperature=-0\.5: need at least 0"),
        ({"temperature": NAN}, r"temperature=nan: need a finite number"),
        ({"temperature": INF}, r"temperature=inf: need a finite number"),
        ({"temperature": "hot"}, r"temperature='hot': need a finite number"),
        ({"temperature": True}, r"temperature=True: need a finite number"),
        ({"top_k": -2}, r"top_k=-2: need -1 or 0 \(off\) or a positive count"),
        ({"top_k": 1.5}, r"top_k=1\.5: need an int"),
        ({"top_p": 0.0}, r"top_p=0\.0: need a value in \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p=1\.01: need a value in \(0, 1\]"),
        ({"top_p": NAN}, r"top_p=nan: need a finite number"),
        ({"min_p": -0.1}, r"min_p=-0\.1: need a value in \[0, 1\]"),
        ({"min_p": 1.1}, r"min_p=1\.1: need a value in \[0, 1\]"),
        ({"max_tokens": 0}, r"max_tokens=0: need at least 1"),
        ({"max_tokens": -3}, r"max_tokens=-3: need at least 1"),
        ({"max_tokens": None}, r"max_tokens=None: need an int"),
        ({"min_tokens": 17}, r"min_tokens=17: need 0 to max_tokens=16"),
        ({"min_tokens": -1}, r"min_tokens=-1: need 0 to max_tokens=16"),
        ({"seed": -2}, r"seed=-2: need a non-negative int or None"),
        ({"seed": "x"}, r"seed='x': need an int, a non-negative int or None"),
        ({"stop_token_ids": 5}, r"stop_token_ids=5: need a sequence of token ids"),
        ({"stop_token_ids": (-1,)}, r"stop_token_ids=-1: need a sequence of token ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_sampling_params_refuse_a_value_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_k": 0}, {"top_p": 1.0}, {"min_p": 1.0}])
def test_sampling_params_accept_the_bounds_themselves(fields):
    SamplingParams(**fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 1}, r"num_blocks=1: need at least 2"),
        ({"num_blocks": 0}, r"num_blocks=0: need at least 2"),
        ({"block_size": 0}, r"block_size=0: need at least 1"),
        ({"max_num_seqs": 0}, r"max_num_seqs=0: need 1 to max_num_batched_tokens=2048"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            r"max_num_seqs=9: need 1 to max_num_batched_tokens=8",
        ),
        ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens=0: need at least 1"),
        (
            {"long_prefill_token_threshold": -1},
            r"long_prefill_token_threshold=-1: need 0 \(off\) or more",
        ),
        ({"max_model_len": 1}, r"max_model_len=1: need at least 2, or None"),
        ({"policy": "lifo"}, r"policy='lifo': need one of fcfs, priority"),
        ({"seed": -2}, r"seed=-2: need 0 or more"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_the_engine_refuses_a_setting_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        LLMEngine(model="toy", **options)


def test_the_offline_api_names_its_own_policy_values():
    with pytest.raises(ValueError, match="need one of fcfs, priority"):
        LLM("toy", scheduling_policy="lifo")


def test_a_max_model_len_beyond_the_checkpoint_is_refused():
    longest = model().config.max_position_embeddings
    with pytest.raises(ValueError, match=f"max_model_len={longest + 1}: the model supports"):
        LLMEngine(model=model(), max_model_len=longest + 1)


def test_a_toy_vocabulary_of_nothing_is_refused():
    with pytest.raises(ValueError, match="vocab_size=0: need at least 1"):
        ToyModel(0)


def test_a_request_without_tokens_is_refused():
    with pytest.raises(ValueError, match="prompt_token_ids is empty"):
        Request("r", [], SamplingParams())


# ------------------------------------------------------------------ an engine at work


@functools.cache
def undisturbed_output() -> list[list[int]]:
    engine, requests = working_engine()
    return finish(engine, requests)


def working_engine() -> tuple[LLMEngine, list[Request]]:
    """8 usable blocks of 4, max_model_len 24; one request decodes, one is half prefilled."""
    engine = LLMEngine(
        num_blocks=9,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=6,
        model=model(),
        max_model_len=24,
    )
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    random = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0)
    ids = [
        engine.add_request("abcd", greedy, request_id="first"),
        engine.add_request("The KV cache", random, request_id="second"),
    ]
    requests = [engine.requests[request_id] for request_id in ids]
    engine.step()
    engine.step()
    return engine, requests


def finish(engine: LLMEngine, requests: list[Request]) -> list[list[int]]:
    while engine.has_unfinished_requests():
        engine.step()
    return [request.output_token_ids for request in requests]


BAD_REQUESTS = {
    "empty text": ([""], {}, r"prompt is empty: need at least one token"),
    "no token ids": ([[]], {}, r"prompt is empty: need at least one token"),
    "id beyond the vocabulary": (
        [[1, 257]],
        {},
        r"prompt holds token id 257: need integers from 0 to 256",
    ),
    "negative id": ([[-1]], {}, r"prompt holds token id -1: need integers from 0 to 256"),
    "id that is no integer": ([[1.5]], {}, r"prompt holds token id 1\.5: need integers"),
    "longer than max_model_len": (
        ["x" * 24],
        {},
        r"prompt has 24 tokens: need fewer than max_model_len=24",
    ),
    "duplicate id": (["x"], {"request_id": "first"}, r"request_id='first': a live request has"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_refused_request_leaves_the_engine_as_it_was(name):
    args, options, message = BAD_REQUESTS[name]
    engine, requests = working_engine()
    before = engine_state(engine)
    with pytest.raises(ValueError, match=message):
        engine.add_request(*args, **options)
    assert engine_state(engine) == before
    assert finish(engine, requests) == undisturbed_output()


def test_a_request_larger_than_the_pool_is_refused_and_the_largest_that_fits_is_not():
    """4 usable blocks of 4 hold 16 tokens; the last token of a request is never computed."""
    engine = LLMEngine(num_blocks=5, block_size=4, model="toy")
    before = engine_state(engine)
    with pytest.raises(
        ValueError,
        match=r"prompt of 10 tokens with max_tokens=8 needs 5 blocks of 4: the pool has 4",
    ):
        engine.add_request("0123456789", SamplingParams(max_tokens=8))
    assert engine_state(engine) == before
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    assert len(engine.generate(["0123456789"], params)[0].outputs[0].token_ids) == 7


def test_one_bad_prompt_of_several_runs_none():
    engine, requests = working_engine()
    before = engine_state(engine)
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.generate(["fine", "", "also fine"])
    after = engine_state(engine)
    assert (after["running"], after["waiting"]) == (before["running"], before["waiting"])
    assert after["kv"] == before["kv"]
    assert finish(engine, requests) == undisturbed_output()


def test_a_wrong_number_of_sampling_params_runs_none():
    engine = LLMEngine(model="toy")
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        engine.generate(["a", "b"], [SamplingParams()])
    assert not engine.has_unfinished_requests()


def test_aborting_an_unknown_id_changes_nothing():
    engine, requests = working_engine()
    before = engine_state(engine)
    engine.abort_request("nobody")
    assert engine_state(engine) == before
    assert finish(engine, requests) == undisturbed_output()


def test_a_bad_request_does_not_shift_the_random_stream_of_the_next():
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    clean, disturbed = LLMEngine(model="toy"), LLMEngine(model="toy")
    with pytest.raises(ValueError, match="prompt is empty"):
        disturbed.add_request("", params)
    assert clean.generate(["x"], params)[0].outputs[0].token_ids == (
        disturbed.generate(["x"], params)[0].outputs[0].token_ids
    )


def test_numpy_token_ids_are_accepted():
    engine = LLMEngine(model="toy")
    (result,) = engine.generate([np.array([1, 2, 3])])
    assert (result.prompt, result.prompt_token_ids) == (None, [1, 2, 3])


@pytest.mark.parametrize("max_model_len", [0, 1, -3])
def test_a_max_model_len_without_room_for_prompt_and_output_is_refused(max_model_len: int):
    with pytest.raises(ValueError, match=f"max_model_len={max_model_len}"):
        LLMEngine(max_model_len=max_model_len)


@pytest.mark.parametrize("prompts", [None, 5])
def test_prompts_that_are_no_sequence_are_refused_by_name(prompts: object):
    with pytest.raises(ValueError, match="prompts="):
        LLM(model="toy").generate(prompts)  # type: ignore[arg-type]
