"""The captured run of lab 11-02 against what the mini engine says today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from course.files import load_module

LAB = Path(__file__).parent / "labs" / "lab-02-serve-many-loras"
OUTPUT = json.loads((LAB / "captured" / "cpu.json").read_text(encoding="utf-8"))["output"]


@pytest.mark.slow
def test_the_real_engines_plans_are_the_mini_engines() -> None:
    run, lab = load_module(LAB / "run.py"), load_module(LAB / "solution.py")
    for batch, slots, words in (
        (run.MIXED, 4, "of the mixed batch"),
        (run.QUEUE, 1, "on one slot"),
    ):
        plans = lab.run_mini(*batch, slots, run.TOKENS).plans
        assert f"as predicted: plans {words}: {run.told(plans)}\n" in OUTPUT


def test_the_slots_history_is_the_last_adapter() -> None:
    run, lab = load_module(LAB / "run.py"), load_module(LAB / "solution.py")
    events = []
    for line in OUTPUT.splitlines():
        words = line.split()
        if words[:1] in (["read"], ["activate"], ["remove"]):
            slot = int(words[2]) if len(words) == 3 else None
            events.append(lab.Event(words[0], int(words[1]), slot))
    assert lab.slots_after(events, 1) == [run.IDS["code"]]
    assert "NOT AS PREDICTED" not in OUTPUT and OUTPUT.endswith("all as predicted\n")
