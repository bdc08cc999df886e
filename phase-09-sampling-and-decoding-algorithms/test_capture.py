"""The captured run of lab 09-02 against what the mini engine and the lab's arithmetic say today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from course.files import load_module

LAB = Path(__file__).parent / "labs" / "lab-02-parallel-sampling"
OUTPUT = json.loads((LAB / "captured" / "cpu.json").read_text(encoding="utf-8"))["output"]


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_the_real_engines_plans_are_the_mini_engines(caching):
    run, lab = load_module(LAB / "run.py"), load_module(LAB / "solution.py")
    plans, cost = run.expected(lab, caching)
    part = OUTPUT.split("=== ")[1 if caching else 2]
    assert f"{run.P} prompt tokens: {run.told(plans)}\n" in part
    assert f"tokens computed: {cost.forward_tokens}\n" in part


def test_the_real_engine_found_what_the_arithmetic_says():
    run, lab = load_module(LAB / "run.py"), load_module(LAB / "solution.py")
    found = round(lab.parallel_cost(run.P, run.L, run.N).hit_rate * run.N * run.P)
    assert f"tokens looked up, tokens found: ({run.N * run.P}, {found})\n" in OUTPUT
    assert "NOT AS PREDICTED" not in OUTPUT and OUTPUT.endswith("all as predicted\n")
