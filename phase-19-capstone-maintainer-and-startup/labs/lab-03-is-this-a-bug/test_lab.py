"""What lab 19-03 pins: five rules, each against runs that keep it and runs that do not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from labkit import same

HERE = Path(__file__).resolve().parent / "recordings"


@cache
def recorded(number: int) -> Any:
    """The runs of a report; `conformance/museum/recorder.py` made them on releases' own code."""
    return json.loads((HERE / f"{number}.json").read_text(encoding="utf-8"))


def verdict(found: list[int | None]) -> str:
    return "a bug" if any(place is not None for place in found) else "not a bug"


def test_nobody_takes_what_was_found(lab, record_property):
    """37076: refused or taken over, and still counted as found."""
    same(lab.taken_between([["found", "a", [1]], ["handed out", "", [2, 1]]]), 1, "worked example:")
    kept = [["found", "a", [1]], ["adopted", "", [1]], ["handed out", "", [2]]]
    same(lab.taken_between(kept), None, f"{kept}, adopted before anything is handed out:")
    refused = [["found", "a", [1]], ["refused", "a", []], ["handed out", "", [1]]]
    same(lab.taken_between(refused), None, f"{refused}, a looks again in a later step:")
    other = [["found", "a", [1]], ["found", "b", []], ["allocated", "b", []]]
    same(lab.taken_between([*other, ["handed out", "", [1]]]), 3, f"{other}, then [1] handed out:")
    two = [["found", "a", [1, 3]], ["found", "b", [2]], ["adopted", "", [2]]]
    same(lab.taken_between([*two, ["handed out", "", [3]]]), 3, f"{two}, then [3] handed out:")
    again = [["found", "a", [1]], ["found", "a", [2]], ["handed out", "", [1]]]
    same(lab.taken_between(again), None, f"{again}, a has looked again before:")
    own = [["found", "a", [1]], ["adopted", "", [1]], ["handed out", "", [1]]]
    same(lab.taken_between(own), None, f"{own}, [1] was adopted before:")
    report = recorded(37076)["report"]
    same(
        lab.taken_between(report), 2, f"the manager of 0.22.1, called as the report does, {report}:"
    )
    found = []
    for number, calls in enumerate(recorded(37076)["scheduler"]):
        found.append(lab.taken_between(calls))
        at = found[-1]
        near = calls[max(0, (at or 0) - 4) : (at or 0) + 1]
        same(at, None, f"run {number} of 0.22.1's own scheduler; the calls before it, {near}:")
    record_property("measured.between", verdict(found))


def test_the_smallest_key_is_admitted_first(lab, record_property):
    """41951: a rule that the policy does not have."""
    keys = {"a": (0, 1.0, "a"), "b": (0, 2.0, "b")}
    step = {"admitted": ["b"], "preempted": [], "waiting": ["a"]}
    same(lab.overtaken(keys, [step]), 0, f"{step} with {keys}:")
    same(lab.overtaken({**keys, "a": (0, 3.0, "a")}, [step]), None, "the same, a arrived at 3.0:")
    same(lab.overtaken({**keys, "a": (1, 0.0, "a")}, [step]), None, "the same, a has priority 1:")
    same(lab.overtaken({**keys, "b": (0, 1.0, "b")}, [step]), 0, "the same arrival, a before b:")
    many = {"a": (0, 1.0, "a"), "b": (0, 2.0, "b"), "c": (1, 0.0, "c"), "d": (0, 0.0, "d")}
    for admitted in (["b", "d"], ["d", "b"]):
        step = {"admitted": admitted, "preempted": [], "waiting": ["c", "a"]}
        same(lab.overtaken(many, [step]), 0, f"{step} with {many}:")
    step = {"admitted": ["b"], "preempted": ["a"], "waiting": ["a"]}
    same(lab.overtaken(keys, [step]), 0, f"{step}, a was preempted in this step, {keys}:")
    found = []
    for number, run in enumerate(recorded(41951)["priority"]):
        found.append(lab.overtaken(run["keys"], run["steps"]))
        at = found[-1]
        said = f"step {at}: {run['steps'][at]}, keys {run['keys']}" if at is not None else ""
        same(at, None, f"run {number} of 0.22.1 under the priority policy; {said}:")
    fcfs = [lab.overtaken(run["keys"], run["steps"]) for run in recorded(41951)["fcfs"]]
    assert any(at is not None for at in fcfs), (
        "first come, first served does not look at priorities: some of the same workloads must "
        f"break the rule there; came {fcfs}"
    )
    record_property("measured.overtaken", verdict(found))


def test_whole_blocks_hit(lab, record_property):
    """51198: tokens counted where only blocks can be found."""
    short = [[[7] * 15, 0], [[7] * 16, 0], [[7] * 17, 16]]
    same(lab.missed(short, 16), None, f"{short}, blocks of 16:")
    same(
        lab.missed([[[7] * 20, 0], [[7] * 21, 0]], 16), 1, "20 tokens of 7, then 21 without a hit:"
    )
    exact = [[[7] * 16, 0], [[7] * 16, 0]]
    same(
        lab.missed(exact, 16), None, f"{exact}: the last token is computed, so its block is not hit"
    )
    seven, eight = [7] * 40, [8] * 40
    for asks, at in (
        ([[seven, 0], [eight, 0], [[*seven, 1], 0]], 2),
        ([[eight, 0], [seven, 0], [[*seven, 1], 0]], 2),
        ([[seven, 0], [[*seven, 1], 16]], 1),
        ([[seven, 0], [[*seven, 1], 32]], None),
        ([[seven[:20], 0], [[*seven[:20], 1], 32]], None),
    ):
        told = [(prompt[:1], len(prompt), hits) for prompt, hits in asks]
        same(lab.missed(asks, 16), at, f"blocks of 16, (first token, tokens, hits) {told}:")
    found = []
    for number, asks in enumerate(recorded(51198)["hybrid"]):
        found.append(lab.missed(asks, 16))
        told = [(len(prompt), hits) for prompt, hits in asks]
        same(found[-1], None, f"run {number} of 0.26.0, blocks of 16, (tokens, hits) {told}:")
    off = [lab.missed(asks, 16) for asks in recorded(51198)["off"]]
    assert any(at is not None for at in off), (
        f"with prefix caching off nothing hits: the rule must be broken somewhere; came {off}"
    )
    record_property("measured.missed", verdict(found))


def test_who_runs_gets_a_token(lab, record_property):
    """26765: a step without a plan, hidden by others in which there is no budget or no block."""
    step = {"num_scheduled_tokens": {"a": 2}, "running": ["a", "b"], "free_blocks": 3}
    same(
        lab.passed_over({"budget": 2, "steps": [step]}), None, f"a budget of 2 is used up, {step}:"
    )
    same(lab.passed_over({"budget": 3, "steps": [step]}), 0, f"a budget of 3, {step}:")
    full = {**step, "free_blocks": 0}
    same(lab.passed_over({"budget": 3, "steps": [full]}), None, f"no block is free, {full}:")
    runs = recorded(26765)
    first = runs["0.22.1"][0]
    same(
        lab.passed_over(first), runs["step"],
        f"the museum's workload at 0.22.1, a budget of {first['budget']}, {first['steps'][:7]}:",
    )  # fmt: skip
    for number, run in enumerate(runs["0.33.0"]):
        at = lab.passed_over(run)
        said = run["steps"][at] if at is not None else ""
        same(at, None, f"run {number} of 0.33.0, a budget of {run['budget']}; {said}:")
    record_property("measured.passed", verdict([lab.passed_over(run) for run in runs["0.22.1"]]))


def test_nothing_waits_for_ever(lab, record_property):
    """44560: an idle step is no deadlock, and a run that ends is none either."""
    one, idle = {"num_scheduled_tokens": {"a": 1}}, {"num_scheduled_tokens": {}}
    same(lab.stuck({"steps": [idle, one, idle], "left": []}), None, "everybody has ended:")
    same(
        lab.stuck({"steps": [idle, one, idle, idle], "left": ["a"]}), 2, "a is left after one plan:"
    )
    same(lab.stuck({"steps": [idle, idle], "left": ["a"]}), 0, "nothing is ever planned:")
    runs = recorded(44560)
    for number, run in enumerate(runs["0.23.0"]):
        same(lab.stuck(run), None, f"run {number} of 0.23.0, in which left is {run['left']}:")
    found = [lab.stuck(run) for run in runs["0.22.1"]]
    same(found[0], 0, "the museum's workload at 0.22.1, in which nothing is ever planned:")
    for number, (at, run) in enumerate(zip(found, runs["0.22.1"], strict=True)):
        same(
            at is None, not run["left"], f"run {number} of 0.22.1, in which left is {run['left']}:"
        )
    record_property("measured.stuck", verdict(found))
