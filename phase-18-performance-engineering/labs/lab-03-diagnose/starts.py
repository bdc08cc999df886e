"""Reads the starts of lab 18-03: what two of them differ in, and what a setting does to one.

Promises: every number is a clock of a real start of vLLM's CPU build, `conformance/startup.py`
wrote it; a setting is measured by the start that was recorded with it, and one that was not is
refused. Processor time is compared, since the machine was shared.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
PAIRS = ((1890, 0, 2), (1891, 6, 7), (1892, 4, 2))
"""Seed, the slow start, the start that it is compared with."""
SHARE = 0.75
"""A fix is to leave at most so much of the processor time."""
PHASES = {
    "imports": ("begins", "vllm is imported"),
    "inspection": ("vllm is imported", "Resolved architecture"),
    "another-process": ("begins", "Initializing a V1 LLM engine"),
    "weights": ("Starting to load model", "Loading weights took"),
    "compilation": ("Warming up model", "Warming up done"),
}
"""Lines of one process between which each of the causes passes."""


def load(path: Path) -> list[dict[str, Any]]:
    """The cases: a slow start with its settings, another one without, and a goal."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    return [
        {
            "case": "start", "seed": seed, "subject": "llm", "knobs": found[slow]["knobs"],
            "lines": found[slow]["lines"], "other": found[other]["lines"],
            "goal": {"cpu": round(SHARE * total(found[slow]["lines"]), 3)}, "recorded": found,
        }
        for seed, slow, other in PAIRS
    ]  # fmt: skip


def total(lines: Sequence[Line]) -> float:
    """Processor seconds of all processes until the first token is there."""
    last = next(line["wall"] for line in lines if line["text"] == "the first token is there")
    ends = {line["pid"]: line for line in lines if line["wall"] <= last}
    return sum(line["cpu"] + line["children"] for line in ends.values())


def spent(lines: Sequence[Line], cause: str) -> tuple[str, int]:
    """The process in which a cause passes, and its processor milliseconds; 0 where none does."""
    first, last = PHASES[cause]
    main = lines[0]["pid"]
    for pid in dict.fromkeys(line["pid"] for line in lines):
        own = [line for line in lines if line["pid"] == pid]
        marks = [
            next((line for line in own if mark in line["text"]), None) for mark in (first, last)
        ]
        if None in marks or (cause == "another-process" and pid == main):
            continue
        before, after = (line["cpu"] + line["children"] for line in marks if line)
        return str(pid), round(1000 * (after - before))
    return "", 0


def contradiction(case: Mapping[str, Any], cause: str) -> str:
    """What in the two starts contradicts a cause; empty where nothing does.

    Raises:
        ValueError: a cause that is none of the case's; the accepted ones are listed.
    """
    if cause not in PHASES:
        raise ValueError(f"cause={cause!r}: need one of {', '.join(PHASES)}")
    more = total(case["lines"]) - total(case["other"])
    here, there = (spent(case[name], cause)[1] / 1e3 for name in ("lines", "other"))
    if 2 * (here - there) > more:
        return ""
    return (
        f"{cause} takes {here:.2f} s of processor time here and {there:.2f} s in the other start, "
        f"and here all takes {more:.2f} s more"
    )


def measure(case: Mapping[str, Any], **knobs: Any) -> float:
    """Processor seconds of the start that was recorded with some settings turned.

    Raises:
        ValueError: a setting that does not exist, or a start that was not recorded.
    """
    if unknown := set(knobs) - set(case["knobs"]):
        raise ValueError(f"{', '.join(sorted(unknown))}: need one of {', '.join(case['knobs'])}")
    for start in case["recorded"]:
        if start["knobs"] == {**case["knobs"], **knobs}:
            return total(start["lines"])
    raise ValueError(f"{knobs}: no start was recorded with it")


def missed(case: Mapping[str, Any], seconds: float) -> str:
    """Whether the goal does not hold; empty where it does."""
    most = case["goal"]["cpu"]
    return "" if seconds <= most else f"{seconds:.2f} s of processor time, the goal is {most:.2f}"
