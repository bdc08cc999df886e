"""The engine's sampler beside the real one: rows stage by stage, and whole answers."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from conformance import parts, seeds
from conformance.features import FOLDER
from conformance.features.sampling import mutants as sampling
from conformance.features.sampling import texts as sampling_texts
from conformance.features.sampling.sampling_edges import unpacked
from mini_vllm import LLM, LLMEngine, SamplingParams

CASES = parts.load("sampler")


def test_every_recorded_row_comes_out_the_same():
    found = {number: sampling.difference(case) for number, case in enumerate(CASES)}
    assert {number: stage for number, stage in found.items() if stage} == {}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", sampling.MUTANTS, ids=lambda m: m.name)
def test_the_recorded_rows_catch_a_wrong_sampler(mutant):
    modules = sampling.built(mutant)
    with np.errstate(invalid="ignore"):  # as where they are counted
        assert any(sampling.difference(case, modules) for case in CASES)


def test_the_table_of_mutants_names_each():
    page = (FOLDER / "sampling" / "README.md").read_text(encoding="utf-8")
    table = page.partition("<!-- sampling-mutants -->")[2].partition("<!-- /sampling-mutants")[0]
    rows = re.findall(r"^\| ([^|]+) \| \d+ \|$", table, re.MULTILINE)
    assert rows == [mutant.name for mutant in sampling.MUTANTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [{"dtype": "float32"}, {"async_scheduling": True, "num_blocks": 80}],
    ids=["float32", "float64-async-preempted"],
)
def test_answers_and_beams_are_those_of_the_real_engine(knobs):
    real = sampling_texts.kept()
    assert sampling_texts.differences(real, sampling_texts.mini(real, **knobs)) == []


def test_the_recorded_answers_hold_every_knob_and_every_end():
    real = sampling_texts.kept()
    names = {name for wish in real["wishes"] for name in wish}
    assert {"repetition_penalty", "logit_bias", "bad_words", "stop", "prompt_logprobs"} <= names
    ends = {(a["finish_reason"], type(a["stop_reason"])) for a in real["answers"]}
    assert ends >= {("length", type(None)), ("stop", str), ("stop", int)}


def test_the_real_engines_children_are_requests_with_seeds_of_their_own():
    """Its numbers are torch's, so the tokens are not ours; that n is a fan-out is the same."""
    seeded = sampling_texts.kept()["seeded"]
    assert seeded["n"] == seeded["one_by_one"] and len({tuple(t) for t in seeded["n"]}) == 3


@pytest.mark.slow
def test_where_no_token_is_left_the_real_engine_says_token_0_and_ours_an_error():
    real = sampling_texts.kept()
    ours = sampling_texts.mini({**real, "searches": [], "prompts": real["prompts"][:2],
                                "wishes": real["wishes"][:2]})  # fmt: skip
    assert [tokens[:2] for tokens, _ in real["impossible"]] == [[0, 0], [0, 0]]
    assert [reason for _, reason in ours["impossible"]] == ["error", "error"]


def why_not(field: str, value: object) -> str | None:
    """Why we refuse a value that the real engine lets in, where it can do no good."""
    if isinstance(value, dict) and value:
        value = next(iter(value.values()))
    if isinstance(value, bool):
        return "a truth value is no number"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan and infinity have no law"
    if isinstance(value, float) and field not in NUMBERS:
        return "a fraction is no count"
    return {
        ("max_tokens", None): "here every request is bounded when it comes",
        ("seed", -2): "numpy's generators take no negative seed",
        ("seed", "x"): "a text is no seed",
        ("logit_bias", str([0])): "a list is no mapping",
        ("stop_token_ids", str([-1])): "no token has this id",
    }.get((field, value if not isinstance(value, list) else str(value)))


NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
)  # fmt: skip


@pytest.mark.slow
def test_what_is_accepted_is_what_the_real_engine_accepts_but_for_named_reasons():
    engine = LLMEngine("toy", num_blocks=1200)
    stricter = 0
    for case in parts.load("sampling_edges"):
        field, value = case["field"], unpacked(case["value"])
        try:
            made = SamplingParams(**case["base"], **{field: value})
            engine.inputs.process([1], made)
        except ValueError as refusal:
            assert field in str(refusal), f"{field}={value!r}: {refusal}"
            if case["accepted"]:
                assert why_not(field, value), f"{field}={value!r}: vLLM accepts it"
                stricter += 1
            continue
        if (field, value) == ("bad_words", "a"):  # a bare text fails an assertion there
            continue
        assert case["accepted"], f"{field}={value!r}: vLLM says {case['raised']}"
        after, wanted = getattr(made, field), unpacked(case["becomes"])
        if isinstance(after, tuple):
            after = list(after)
        assert after == (wanted or None if field == "logit_bias" else wanted), f"{field}={value!r}"
    assert stricter == 28


@pytest.mark.slow
def test_a_seeded_request_says_the_same_beside_anybody():
    texts = seeds.ask(LLM(num_blocks=64), SamplingParams)
    assert len({text for each in texts.values() for text in each}) == 1


def test_the_real_engine_forgets_the_seed_beside_a_request_without_one():
    found = seeds.kept()["texts"]
    assert len({*found["nobody"], *found["a request with a seed"]}) == 1
    for mate in ("one without a seed", "a greedy one"):
        assert len({*found[mate], *found["nobody"]}) == seeds.TIMES + 1


def test_the_real_engine_ends_at_a_seeded_prompt_in_two_pieces_and_this_one_does_not():
    assert "CPU Generator does not use offset" in seeds.kept()["chunked"]
    llm = LLM(num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8)
    (answer,) = llm.generate([seeds.PROMPT * 8], SamplingParams(**seeds.SEEDED))
    assert len(answer.outputs[0].token_ids) == 16
