"""What the labs of phase 12 are graded by: chosen recordings, and the captured run of lab 12-02."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance import recording
from conformance.features import RECORDINGS
from conformance.features.structured_output import situations as grammar_situations
from course.files import load_module

LABS = Path(__file__).parent / "labs"
CAPTURED = LABS / "lab-02-json-schema-constrained"
OUTPUT = json.loads((CAPTURED / "captured" / "cpu.json").read_text(encoding="utf-8"))["output"]


@pytest.mark.slow
def test_the_workloads_of_lab_04_hold_every_situation_of_grammars() -> None:
    seeds = load_module(LABS / "lab-04-waits-and-rows" / "test_lab.py").SEEDS
    missing = set(grammar_situations.COUNTED.meanings)
    for entry in recording.read(RECORDINGS / "grammar.jsonl.gz"):
        if entry["seed"] in seeds:
            missing -= grammar_situations.COUNTED.situations_of(entry)
    assert not missing


def test_the_captured_run_of_lab_02_is_as_predicted_to_its_end() -> None:
    assert "NOT AS PREDICTED" not in OUTPUT and OUTPUT.endswith("all as predicted\n")
    assert OUTPUT.count("answers that ended by themselves and are not valid: 0") == 4
    assert OUTPUT.count("jsonschema says the same: True") == 4


def test_the_captured_intervals_are_what_the_lab_says_today() -> None:
    lab = load_module(CAPTURED / "solution.py")
    low, high = lab.wilson(39, 39)
    assert (
        f"39 valid, 11 truncated; valid of completed 100.0%, interval {low:.1%} to {high:.1%}"
        in (OUTPUT)
    )
    low, high = lab.wilson(0, 4)
    assert f"4 unparseable, 46 truncated; valid of completed 0.0%, interval {low:.1%} to" in OUTPUT
