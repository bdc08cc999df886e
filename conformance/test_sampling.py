"""The engine's sampler beside the real one: rows stage by stage, and whole answers."""

from __future__ import annotations

import re

import pytest

from conformance import parts, sampling, sampling_texts

CASES = parts.load("sampler")


def test_every_recorded_row_comes_out_the_same():
    found = {number: sampling.difference(case) for number, case in enumerate(CASES)}
    assert {number: stage for number, stage in found.items() if stage} == {}


@pytest.mark.parametrize("mutant", sampling.MUTANTS, ids=lambda m: m.name)
def test_the_recorded_rows_catch_a_wrong_sampler(mutant):
    assert sampling.caught(mutant, CASES) > 0


def test_the_table_of_mutants_names_each():
    page = sampling.README.read_text(encoding="utf-8")
    table = page.partition("<!-- sampling-mutants -->")[2].partition("<!-- /sampling-mutants")[0]
    rows = re.findall(r"^\| ([^|]+) \| \d+ \|$", table, re.MULTILINE)
    assert rows == [mutant.name for mutant in sampling.MUTANTS]


@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": "float32"},
        pytest.param({"async_scheduling": True, "num_blocks": 80}, marks=pytest.mark.slow),
    ],
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


def test_where_no_token_is_left_the_real_engine_says_token_0_and_ours_an_error():
    real = sampling_texts.kept()
    ours = sampling_texts.mini({**real, "searches": [], "prompts": real["prompts"][:2],
                                "wishes": real["wishes"][:2]})  # fmt: skip
    assert [tokens[:2] for tokens, _ in real["impossible"]] == [[0, 0], [0, 0]]
    assert [reason for _, reason in ours["impossible"]] == ["error", "error"]
