"""Outputs that repeat themselves end where the real check ends them, and cost nothing elsewhere."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from typing import Any

import pytest

from conformance import parts
from conformance.features.core.repetition import EOS, PROMPT, STOP
from mini_vllm import LLM, LLMEngine, Request, SamplingParams
from mini_vllm.sampling_params import RepetitionDetectionParams

CASES = parts.load("repetition")
Ended = tuple[int, str | None, Any]


def ended(case: dict[str, Any], kind: type[Request] = Request) -> Ended:
    """How many tokens had come when ours ended it, and why."""
    params = SamplingParams(
        max_tokens=case["max_tokens"], min_tokens=case["min_tokens"], stop_token_ids=[STOP],
        ignore_eos=case["ignore_eos"], repetition_detection=case["wanted"],
    )  # fmt: skip
    request, kept = kind("r", PROMPT, params, EOS), 0
    for kept, token in enumerate(case["tokens"], 1):  # noqa: B007
        request.append_output_token(token)
        if request.maybe_finish(case["max_model_len"]):
            break
    return kept, request.finish_reason, request.stop_reason


def recorded(case: dict[str, Any]) -> Ended:
    return case["kept"], case["reason"], case["stop_reason"]


def test_every_recorded_output_ends_as_the_real_check_ends_it() -> None:
    assert [case for case in CASES if ended(case) != recorded(case)] == []
    reasons = Counter(case["reason"] for case in CASES)
    assert min(reasons[reason] for reason in ("repetition", "stop", "length")) > 100, reasons


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("size * wanted.min_count > length", "size * wanted.min_count >= length"),
        ("length = self.num_tokens - self.num_prompt_tokens", "length = self.num_tokens"),
        ("max(1, wanted.min_pattern_size)", "1"),
        ("wanted.max_pattern_size + 1", "wanted.max_pattern_size"),
        ("-size * wanted.min_count :", "-size * 2 :"),
        ("last[size:] == last[:-size]", "last[size:] == last[:-size] and size == 1"),
        ("length < self.sampling_params.min_tokens", "length <= self.sampling_params.min_tokens"),
    ],
)
def test_a_wrong_check_is_caught(old: str, new: str) -> None:
    text = textwrap.dedent(inspect.getsource(Request.finish_repetitive))
    assert text.count(old) == 1
    made: dict[str, Any] = dict(vars(inspect.getmodule(Request)))
    exec(compile(text.replace(old, new), "wrong", "exec"), made)
    wrong = type("Wrong", (Request,), {"finish_repetitive": made["finish_repetitive"]})
    assert any(ended(case, wrong) != recorded(case) for case in CASES)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_ends_a_text_that_goes_in_circles(asynchronous: bool) -> None:
    wish = {"max_pattern_size": 24, "min_count": 3}
    llm = LLM(dtype="float64", async_scheduling=asynchronous)
    [free] = llm.generate(["vLLM "], SamplingParams(max_tokens=90, ignore_eos=True))
    params = SamplingParams(max_tokens=90, ignore_eos=True, repetition_detection=wish)
    [found] = llm.generate(["vLLM "], params)
    one, plain = found.outputs[0], free.outputs[0]
    assert (one.finish_reason, one.stop_reason) == ("repetition", "repetition_detected")
    assert one.text.endswith(3 * " the same shape as")
    assert one.token_ids == plain.token_ids[: len(one.token_ids)]
    assert len(one.token_ids) < len(plain.token_ids) == 90
    engine = llm.llm_engine
    assert (
        engine.scheduler.kv.block_pool.get_num_free_blocks() == engine.config.cache.num_blocks - 1
    )


def test_what_makes_no_sense_is_refused_by_name() -> None:
    for wish, word in (
        ({"max_pattern_size": 2, "min_count": 1}, "min_count=1: need at least 2"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size=3"),
        ({"max_pattern_size": -1}, "max_pattern_size=-1"),
        ({"patterns": 3}, "'patterns'"),
        (7, "repetition_detection=7"),
    ):
        with pytest.raises(ValueError, match=word):
            SamplingParams(repetition_detection=wish)
    off = SamplingParams(repetition_detection=RepetitionDetectionParams(0, 0, 9))
    assert off.repetition_detection is None
    engine = LLMEngine(model="toy")
    engine.add_request("a", off)
