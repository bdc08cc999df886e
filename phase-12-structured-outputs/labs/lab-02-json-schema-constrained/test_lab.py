"""What lab 12-02 pins: a judge that is not fooled, arms that may be compared, honest numbers."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path

import pytest

from conformance import parts
from labkit import refused, same
from labkit.modules import load_module

RUN = load_module(Path(__file__).with_name("run.py"))
OPEN, CLOSED = RUN.OPEN, RUN.CLOSED
GOOD = '{"name": "Ann", "age": 7, "skills": ["a"]}'


# --- the judge ------------------------------------------------------------------------------------


def test_worked_example(lab):
    """Whatever `json.loads` takes is valid."""
    for text, reason, expected in (
        (GOOD, "stop", "valid"),
        (f"\n {GOOD}\n", "stop", "valid"),
        (f"```json\n{GOOD}\n```", "stop", "wrapped"),
        (f"Sure. Here it is: {GOOD} Anything else?", "stop", "wrapped"),
        ('{"name": "Ann", "age": 7}', "stop", "wrong schema"),
        ('{"name": "Ann", "age": "7", "skills": []}', "stop", "wrong schema"),
        ('{"name": "Ann", "age": -1, "skills": []}', "stop", "wrong schema"),
        ("[1, 2]", "stop", "wrong schema"),
        ('{"name": "Ann", "age": 7, "ski', "length", "truncated"),
        ('{"name": "Ann", "age": 7, "ski', "stop", "unparseable"),
        ("Ann is seven", "stop", "unparseable"),
        ("", "stop", "unparseable"),
    ):
        same(lab.classify(text, reason, OPEN), expected, f"classify({text!r}, {reason!r})")


def test_conforms(lab):
    """A keyword applied to values it says nothing of; true taken for 1."""
    one = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for schema, right, wrong in (
        (one, [{"a": 1}, {"a": 1.0}, {"a": 1, "b": None}], [{}, {"a": 1.5}, {"a": True}, [], None]),
        ({"type": "number"}, [1, 1.5, 0], [True, "1", None]),
        ({"type": ["string", "null"]}, ["", None], [0, False, [], {}]),
        ({"type": "boolean"}, [True, False], [0, 1, "true"]),
        ({"minimum": 0, "maximum": 9}, [0, 9, "x", None, {}, True], [-1, 9.5, 10]),
        ({"enum": [1, "a", None]}, [1, "a", None, 1.0], [True, "b", 0, False]),
        ({"enum": [True]}, [True], [1]),
        ({"items": {"type": "integer"}}, [[], [1], "x", {"items": "x"}], [[1, "2"], [None]]),
        ({"required": ["a"]}, [{"a": None}, [], "a"], [{}, {"b": 1}]),
        ({"properties": {"a": {"minimum": 3}}}, [{"a": 3}, {"b": 1}, {"a": "x"}, 2], [{"a": 2}]),
        ({"items": one}, [[{"a": 1}]], [[{"a": 1}, {}]]),
        ({}, [1, None, [], {"a": {}}], []),
    ):
        for value in right:
            same(lab.conforms(value, schema), True, f"{json.dumps(value)} under {schema}")
        for value in wrong:
            same(lab.conforms(value, schema), False, f"{json.dumps(value)} under {schema}")


def test_an_unknown_keyword_is_an_error(lab):
    """A condition passed over is a verdict that means nothing."""
    for schema in (
        {"type": "string", "maxLength": 3}, {"properties": {"a": {"pattern": "x"}}},
        {"items": {"uniqueItems": True}},
    ):  # fmt: skip
        value = [["a"]] if "items" in schema else {"a": "y"} if "properties" in schema else "abcd"
        refused(lambda s=schema, v=value: lab.conforms(v, s), f"{schema}: another keyword (Q1)")
        text = json.dumps(value)
        refused(lambda s=schema, t=text: lab.classify(t, "stop", s), f"classify under {schema}")


def test_the_published_suite_agrees(lab):
    """A judge that is right on the examples only."""
    known, count = lab.KEYWORDS, 0

    def mine(schema):
        """Whether a schema has the lab's keywords only."""
        if not isinstance(schema, dict) or not set(schema) <= known:
            return False
        inner = [*schema.get("properties", {}).values()]
        return all(map(mine, [*inner, schema["items"]] if "items" in schema else inner))

    for schema, value, expected in suite_cases():
        if mine(schema):
            count += 1
            same(lab.conforms(value, schema), expected, f"{json.dumps(value)} under {schema}")
    assert count > 100, f"expected more than 100 cases of the suite; came {count}"


def suite_cases():
    """Schema, value and verdict of the published suite, schemas without `$schema`."""
    for case in parts.load("grammar_suite"):
        if isinstance(case["schema"], dict):
            schema = {name: value for name, value in case["schema"].items() if name != "$schema"}
            yield from ((schema, test["data"], test["valid"]) for test in case["tests"])


def test_nan_is_no_json(lab):
    """Python's reader takes what no other does."""
    for text in ("NaN", '{"name": "x", "age": Infinity, "skills": []}', "-Infinity"):
        same(lab.classify(text, "stop", OPEN), "unparseable", f"classify({text!r})")
    same(lab.classify('so: {"a": NaN}', "stop", {"type": "object"}), "unparseable", "inside, too")
    deep = "[" * 100_000
    same(lab.classify(deep, "stop", OPEN), "unparseable", "100,000 open brackets: no crash")


def test_cut_off_is_its_own_case(lab):
    """A whole number that is half of another one."""
    same(lab.classify("12", "length", {"type": "integer"}), "truncated", "12, or 12 of 123? (Q3)")
    same(lab.classify(GOOD, "length", OPEN), "truncated", "closed, and its end was never said")


# --- numbers --------------------------------------------------------------------------------------


def test_wilson(lab):
    """50 of 50 reported as certainty; an interval past 1."""
    for successes, trials, expected in (
        (50, 50, (0.9287, 1.0)), (0, 50, (0.0, 0.0713)), (5, 10, (0.2366, 0.7634)),
        (31, 50, (0.4815, 0.7414)), (1, 1, (0.2065, 1.0)),
    ):  # fmt: skip
        came = lab.wilson(successes, trials)
        assert all(abs(a - b) < 1e-4 for a, b in zip(came, expected, strict=True)), (
            f"{successes} of {trials}\nexpected {expected} within 0.0001\ncame     {came}"
        )
        close = 1e-9  # of rounding
        assert (
            0.0 <= came[0] <= successes / trials + close
            and successes / trials <= came[1] + close <= 1 + close
        ), f"{successes} of {trials}: expected a part of [0, 1] that holds the rate; came {came}"
    low, high = lab.wilson(50, 50, z=1.0)
    assert abs(low - 50 / 51) < 1e-9 and high <= 1.0, (
        f"50 of 50 with z = 1\nexpected (50/51, 1)\ncame     {(low, high)}"
    )
    for bad in ((0, 0), (-1, 5), (6, 5)):
        refused(lambda bad=bad: lab.wilson(*bad), f"{bad[0]} of {bad[1]} (Q4)")


def answers(lab, *texts):
    return [lab.Answer("p", seed, text, reason) for seed, (text, reason) in enumerate(texts)]


def test_report(lab):
    """What was cut off dropped without a word, or blamed on the mask."""
    came = lab.report(
        answers(lab, (GOOD, "stop"), (GOOD, "stop"), ("x", "stop"), (GOOD[:9], "length")), OPEN
    )
    low, high = lab.wilson(2, 3)
    same(
        came,
        lab.Report(
            {"valid": 2, "wrapped": 0, "wrong schema": 0, "unparseable": 1, "truncated": 1},
            3, 2 / 3, (low, high),
        ),
        "two good ones, one bad, one cut off: 2 of 3 completed",
    )  # fmt: skip
    came = lab.report(answers(lab, ("{", "length")), OPEN)
    same((came.completed, came.rate, came.interval), (0, None, None), "all cut off: no rate")
    refused(lambda: lab.report([], OPEN), "no answers: no report without a run (Q4)")


def test_arms_are_paired(lab):
    """Two arms that were asked different things."""
    free = answers(lab, ("no", "stop"), (GOOD, "stop"), ("no", "stop"))
    constrained = answers(lab, (GOOD, "stop"), (GOOD, "stop"), (GOOD[:5], "length"))
    same(
        lab.paired(free, constrained, OPEN),
        {("unparseable", "valid"): 1, ("valid", "valid"): 1, ("unparseable", "truncated"): 1},
        "three prompts, pair by pair",
    )
    other = [lab.Answer("q", each.seed, each.text, each.finish_reason) for each in constrained]
    refused(lambda: lab.paired(free, other, OPEN), "other prompts (Q2)")
    refused(lambda: lab.paired(free, constrained[::-1], OPEN), "other seeds (Q2)")
    refused(lambda: lab.paired(free, constrained[:2], OPEN), "an answer less (Q2)")


def test_compile_seconds(lab, record_property):
    """The engine's first request timed as a compilation."""
    times = [("A", 1.5), ("A", 0.1), ("B", 0.3), ("B", 0.1), ("C", 0.2), ("C", 0.1), ("C", 0.1)]
    came = lab.compile_seconds(times)
    assert abs(came - 0.15) < 1e-12, (
        f"{times}: expected 0.15, medians 0.25 and 0.1 of B and C; came {came}"
    )
    late = [("A", 9.0), ("B", 0.4), ("A", 0.1), ("B", 0.1), ("C", 7.0)]
    came = lab.compile_seconds(late)
    assert abs(came - 0.3) < 1e-12, (
        f"{late}: expected 0.3: A was the engine's first, C came once; came {came}"
    )
    more = [*times[:6], ("D", 5.0), ("D", 0.1), ("B", 7.0)]
    came = lab.compile_seconds(more)
    assert abs(came - 0.2) < 1e-12, (
        f"{more}: expected 0.2: medians 0.3 and 0.1 of the first and the second times; came {came}"
    )
    record_property("measured.milliseconds", 1e3 * lab.compile_seconds(times))
    for bad in ([], [("A", 1.0), ("A", 0.1)], [("A", 1.0), ("B", 1.0)]):
        refused(lambda bad=bad: lab.compile_seconds(bad), f"{bad}: no constraint to tell from")


# --- both arms on the mini engine -----------------------------------------------------------------


@pytest.mark.slow
def test_both_arms(lab, record_property):
    """A constraint that reaches one request, or none; arms with other seeds."""
    prompts = ["A pirate: ", "A wizard: "] * 4
    free = lab.run_mini(prompts, None, 48)
    constrained = lab.run_mini(prompts, CLOSED, 48)
    for arm, name in ((free, "free"), (constrained, "constrained")):
        same(
            [(each.prompt, each.seed) for each in arm],
            [(prompt, seed) for seed, prompt in enumerate(prompts)],
            f"the {name} arm: prompts and seeds (Q2)",
        )
    found, control = lab.report(constrained, CLOSED), lab.report(free, CLOSED)
    same(found.counts["valid"], 8, f"constrained answers that are valid; {found.counts}")
    same(
        control.counts["valid"], 0, f"the control: a byte model that is not made; {control.counts}"
    )
    assert len({each.text for each in constrained}) > 1, (
        f"seeds and temperature: expected different answers; came {constrained[0].text!r} 8 times"
    )
    record_property("measured.control", control.counts["valid"])


def test_the_trap(lab):
    """Valid or nothing: a limit that is too low gives neither."""
    cut = lab.run_mini(["A pirate: "] * 2, CLOSED, 12)
    same([each.finish_reason for each in cut], ["length"] * 2, "12 tokens end with")
    same(lab.report(cut, CLOSED).counts["truncated"], 2, "and are cut off")
    same([len(each.text) for each in cut], [12, 12], "characters; a token is a byte here")
    for each in cut:
        assert each.text.startswith('{"role": "'), (
            f"a prefix of something valid: expected it to begin with the role; came {each.text!r}"
        )


def test_an_arm_without_seeds_is_greedy_only_when_asked(lab):
    """The claim is about sampled tails; a greedy arm tests one text."""
    prompts = ["A pirate: "] * 3
    greedy = lab.run_mini(prompts, CLOSED, 40, temperature=0.0)
    same(len({each.text for each in greedy}), 1, "temperature 0: one prompt, one answer")


@pytest.mark.gpu
def test_a_real_engine_keeps_its_promise(lab, gpu_device):
    """What run.py does on a GPU, asked of its engine."""
    came = RUN.launch(Namespace(util=0.5, model=str(RUN.BYTES)), dummy=False)
    rng = random.Random(0)
    for name, schema in RUN.SCHEMAS.items():
        arm = [lab.Answer(*each) for each in came["arms"][name]["constrained"]]
        ended = [each for each in arm if each.finish_reason == "stop"]
        assert ended, f"expected answers that ended by themselves; came {rng.choice(arm)}"
        for each in ended:
            same(lab.classify(each.text, "stop", schema), "valid", each.text)
    same({each[3] for each in came["trap"]}, {"length"}, "12 tokens end with")
