"""Log-probabilities of chosen tokens: the mini engine's beside the real sampler's, and what the
real one says of a request that stands beside one that chose."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.features.sampling.sampler import read, tolerance
from conformance.mutants import edited
from labkit import shipped_model
from mini_vllm import LLM, SamplingParams
from mini_vllm.sample import logprobs

CASES = parts.load("logprob_token_ids")


def rows(chosen: bool) -> Iterator[tuple[dict[str, Any], int, bool]]:
    """Rows that chose tokens, or that asked for the likeliest: case, row, whether any row chose."""
    for case in CASES:
        chose = [bool(params.get("logprob_token_ids")) for params in case["params"]]
        for row, said in enumerate(case["said"]):
            if said is not None and chose[row] == chosen:
                yield case, row, any(chose)


def differs(case: dict[str, Any], row: int, module: ModuleType = logprobs) -> bool:
    """Whether what we say of a row is not what was recorded."""
    params = SamplingParams(**case["params"][row])
    which = params.logprob_token_ids or params.logprobs
    logits, said = read(case["logits"][row]), case["said"][row]
    entry = module.gather(logits, case["tokens"][row], which)
    (ours,) = module.as_dicts([entry], (), _Silent())
    near = tolerance(logits)
    return len(ours) != len(said) or any(
        (token, noted.rank) != (theirs[0], theirs[2])
        or not np.isclose(noted.logprob, -np.inf if theirs[1] is None else theirs[1], 0, near)
        for (token, noted), theirs in zip(ours.items(), said, strict=True)
    )


class _Silent:
    def decode(self, token_ids: list[int]) -> str:
        return ""


def test_every_row_that_chose_tokens_is_as_recorded() -> None:
    found = list(rows(True))
    assert len(found) > 60
    assert sum(beside for _, _, beside in found) == len(found)
    assert [row for row in found if differs(*row[:2])] == []


def test_alone_the_likeliest_are_as_recorded_and_beside_chosen_ones_upstream_loses_them() -> None:
    """At the pin one request that chooses tokens takes the likeliest from all others of its step:
    each gets columns for token 0 at minus infinity."""
    lost = 0
    for case, row, beside in rows(False):
        if not beside or case["params"][row]["logprobs"] == 0:
            assert not differs(case, row)
            continue
        found = {token: logprob for token, logprob, _ in case["said"][row]}
        assert found.keys() == {case["tokens"][row], 0}
        assert found[0] is None
        assert differs(case, row)
        lost += 1
    assert lost > 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("others = list(which)", "others = sorted(which)"),
        ("ids = [token_id, *others]", "ids = [*others, token_id]"),
        ("logprobs = log_softmax(logits)", "logprobs = np.asarray(logits, dtype=np.float64)"),
        (
            "ranks = [entry.rank, *range(1, len(entry.token_ids))]",
            "ranks = range(1, len(entry.token_ids) + 1)",
        ),
    ],
)
def test_a_wrong_one_is_caught(old: str, new: str) -> None:
    wrong = edited(logprobs, old, new)
    assert any(differs(case, row, wrong) for case, row, _ in rows(True))


@pytest.mark.slow
def test_a_request_has_its_own_whoever_else_is_in_the_step() -> None:
    llm = LLM(shipped_model(), dtype="float64")
    prompts = ["The scheduler ", "A block ", "import "]
    wishes = [
        SamplingParams(max_tokens=4, logprob_token_ids=[101, 32, 0]),
        SamplingParams(max_tokens=4, logprobs=3),
        SamplingParams(max_tokens=4),
    ]
    together = llm.generate(prompts, wishes)
    for prompt, wish, beside in zip(prompts, wishes, together, strict=True):
        (alone,) = llm.generate([prompt], wish)
        assert alone.outputs[0].token_ids == beside.outputs[0].token_ids
        noted, there = alone.outputs[0].logprobs, beside.outputs[0].logprobs
        assert (noted is None) == (there is None) == (wish.num_logprobs is None)
        for mine, theirs in zip(noted or (), there or (), strict=True):
            assert list(mine) == list(theirs)
            assert all(abs(mine[token].logprob - theirs[token].logprob) < 1e-9 for token in mine)
    first = together[0].outputs[0]
    for token, noted in zip(first.token_ids, first.logprobs, strict=True):
        assert {*noted} == {token, 101, 32, 0}


def test_what_is_not_proved_or_not_possible_is_refused_by_name() -> None:
    for ids in ([], range(129), [-1], [1.5], "ab"):
        with pytest.raises(ValueError, match="logprob_token_ids"):
            SamplingParams(logprob_token_ids=ids if isinstance(ids, str) else list(ids))
    with pytest.raises(ValueError, match="logprobs=3: need None or 2"):
        SamplingParams(logprob_token_ids=[1, 2], logprobs=3)
    assert SamplingParams(logprob_token_ids=[1, 2], logprobs=2).num_logprobs == 2
    llm = LLM("toy")
    with pytest.raises(ValueError, match="logprob_token_ids holds token id 257"):
        llm.generate(["a"], SamplingParams(logprob_token_ids=[257]))
    drafting = LLM("toy", speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="logprob_token_ids: need None with speculative_config"):
        drafting.generate(["a"], SamplingParams(logprob_token_ids=[1]))
