"""The thinking budget: what the mini engine forces beside what the real sampler forced."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.features.sampling.sampler import read
from conformance.features.sampling.thinking_budget import EOS, row
from conformance.mutants import edited
from labkit import shipped_model
from mini_vllm import LLM, Request, SamplingParams
from mini_vllm.reasoning import thinking_budget
from mini_vllm.sample.processors import LogitsProcessor, in_order
from mini_vllm.structured_output import StructuredOutputsParams

CASES = parts.load("thinking_budget")
STAYED = [case for case in CASES if not case["taken_out"]]


def steps(
    case: dict[str, Any], module: ModuleType = thinking_budget, last: bool = True
) -> Iterator[str]:
    """What of each step is not as recorded: "row", "token" or nothing ("")."""
    asked = dict(case["params"])
    if bias := asked.pop("logit_bias", None):
        asked["logit_bias"] = {int(token): value for token, value in bias.items()}
    params = SamplingParams(
        **asked, max_tokens=64, thinking_token_budget=case["budget"],
        _bad_words_token_ids=tuple(map(tuple, case["bad_words_token_ids"])),
    )  # fmt: skip
    made = Request("r", case["prompt"], params, EOS)
    budget = module.ThinkingBudget(case["start"], case["end"])
    ours: list[LogitsProcessor] = in_order((EOS,))
    ours.insert(len(ours) if last else 0, budget)
    for said, token, forced_row in zip(case["script"], case["tokens"], case["edited"], strict=True):
        logits = row(said)
        for processor in ours:
            logits = processor(made, logits)
        forced = logits.max() > 1e8
        if forced != (forced_row is not None) or (
            forced and not np.allclose(logits, read(forced_row), rtol=1e-6, atol=1e-6)
        ):
            yield "row"
        else:
            yield "" if int(logits.argmax()) == token else "token"
        made.append_output_token(token)


def differs(case: dict[str, Any], **other: Any) -> bool:
    return any(steps(case, **other))


def inherits(case: dict[str, Any]) -> bool:
    """Whether it has no budget and moved to a row: at the pin, that of who left may go on there."""
    return case["budget"] is None and bool(case["moved_at"])


@pytest.mark.slow
def test_every_token_and_every_forced_row_is_as_recorded() -> None:
    found = [case for case in CASES if not case["taken_out"] and not inherits(case)]
    assert [number for number, case in enumerate(found) if differs(case)] == []
    assert len(found) > 800
    assert sum(any(case["edited"]) for case in found) > 450
    assert sum(bool(case["params"] or case["bad_words_token_ids"]) for case in found) > 300


def test_at_the_pin_a_request_may_inherit_a_budget_and_forget_its_own() -> None:
    heirs = [case for case in CASES if inherits(case) and not case["taken_out"]]
    forced = [case for case in heirs if any(case["edited"])]
    assert (len(forced), len(heirs)) == (4, 24)
    assert [case for case in heirs if differs(case)] == forced
    back = [case for case in CASES if case["taken_out"] and case["budget"] is not None]
    assert (sum(map(differs, back)), len(back)) == (38, 142)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("budget - thought + len(self.start) - 1", "budget - thought"),
        ("opened > _find_last(prompt, self.end)", "opened >= 0"),
        ("opened = _find_last(prompt, self.start)", "opened = _find(prompt, self.start)"),
        ("opened + len(self.start) + budget", "opened + budget"),
        ("opened + len(self.start) + budget", "opened + len(self.start) + budget + 1"),
        ("if ended < 0 or opened <= ended:", "if True:"),
        ("if ended < 0 or opened <= ended:", "if ended < 0 or opened < ended:"),
        ("max(budget, 1)", "budget"),
        ("self.end[place] if", "self.end[0] if"),
        ("row[token] = FORCED_LOGIT", "row[:] = -np.inf\n        row[token] = FORCED_LOGIT"),
        ("if thought < budget:", "if thought <= budget:"),
    ],
)
def test_a_wrong_one_is_caught(old: str, new: str) -> None:
    wrong = edited(thinking_budget, old, new)
    assert any(differs(case, module=wrong) for case in STAYED if not inherits(case))


def test_before_the_other_edits_it_would_be_another_one() -> None:
    assert any(differs(case, last=False) for case in STAYED if not inherits(case))


MARKS = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
PROMPTS = ["vLLM <think>", "Each block holds <think>", "import "]


def _texts(budget: int | None, preempted: bool = False, **knobs: Any) -> list[str]:
    llm = LLM(shipped_model(), dtype="float64", reasoning_config=MARKS, **knobs)
    wish = SamplingParams(max_tokens=30, min_tokens=20, thinking_token_budget=budget)
    plans: list[bool] = []
    llm.llm_engine.observers.append(lambda plan: plans.append(bool(plan.preempted_req_ids)))
    texts = [output.outputs[0].text for output in llm.generate(PROMPTS, wish)]
    assert any(plans) == preempted
    return texts


@pytest.mark.slow
def test_in_the_engine_the_end_comes_after_the_budget_with_preemption_and_asynchronously() -> None:
    texts = _texts(12)
    assert [text.find("</think>") for text in texts] == [18, 18, -1]  # 12, and "<think>" less one
    free = _texts(None)
    assert [text[:18] for text in free] == [text[:18] for text in texts]
    assert free[2] == texts[2]
    assert _texts(12, async_scheduling=True) == texts
    tight: dict[str, Any] = {"num_blocks": 18, "block_size": 4, "max_num_batched_tokens": 8}
    assert _texts(12, preempted=True, **tight) == texts


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"reasoning_config": {}}, "need a dict of reasoning_start_str and reasoning_end_str"),
        ({"reasoning_config": {**MARKS, "reasoning_parser": "qwen3"}}, "need a dict of"),
        ({"reasoning_config": {**MARKS, "reasoning_end_str": ""}}, "reasoning_end_str=''"),
        (
            {
                "reasoning_config": MARKS,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            },
            "reasoning_config with speculative_config=",
        ),
        ({"reasoning_config": MARKS, "enable_lora": True}, "reasoning_config with enable_lora"),
    ],
)
def test_what_is_not_possible_or_not_compared_is_refused_by_name(
    knobs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(shipped_model(), **knobs)


def test_a_budget_needs_marks_and_no_constraint() -> None:
    with pytest.raises(ValueError, match="thinking_token_budget: need an engine with reasoning_c"):
        LLM("toy").generate(["a"], SamplingParams(thinking_token_budget=3))
    with pytest.raises(ValueError, match="thinking_token_budget=-2"):
        SamplingParams(thinking_token_budget=-2)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with pytest.raises(ValueError, match="thinking_token_budget: need None with structured_out"):
        SamplingParams(
            thinking_token_budget=3, structured_outputs=StructuredOutputsParams(regex="a")
        )
