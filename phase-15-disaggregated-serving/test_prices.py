"""The three prices of the guide and its figures are a fit of the measured steps of lab 18-04."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median

import pytest

from course.site.widgets import two_pools
from labkit.modules import load_module
from mini_vllm.simulate.cost import StepWork, fit

LAB = Path(__file__).parents[1] / "phase-18-performance-engineering/labs/lab-04-fit-and-predict"
MEASURED = json.loads((LAB / "recordings" / "h100-llama-8b.json").read_text(encoding="utf-8"))


def steps():
    """(work, seconds) of what was measured, without the two that the lab holds out."""
    for batch, times in MEASURED["decode_ms"].items():
        work = StepWork()
        for _ in range(int(batch)):
            work.add(1, MEASURED["decode_context"])
        if batch != "64":
            yield from ((work, each / 1e3) for each in times)
    for shape, times in MEASURED["prefill_s"].items():
        work = StepWork()
        for _ in range(int(shape.split("x")[0])):
            work.add(int(shape.split("x")[1]), 0)
        if shape != "1x2048":
            yield from ((work, each) for each in times)


def test_the_prices_are_those_of_the_measured_steps():
    found = fit(steps(), "lab 18-04").terms
    used = two_pools.COST.terms
    assert found["decode_context"] == 0
    assert round(found["step"], 5) == used["step"] == 6.46e-3
    assert round(found["tokens"], 7) == used["tokens"] == 2.12e-5
    assert round(found["prefill_pairs"], 10) == used["prefill_pairs"] == 1.2e-9


def test_they_predict_the_prefill_that_was_held_out_within_three_percent():
    seconds = median(MEASURED["prefill_s"]["1x2048"])
    assert round(seconds, 4) == 0.0536
    work = StepWork()
    work.add(2048, 0)
    assert two_pools.COST.seconds(work) == pytest.approx(seconds, rel=0.03)


def test_the_processors_prices_in_the_exercise_are_those_of_six_measured_settings():
    folder = Path(__file__).parents[1] / "phase-18-performance-engineering" / "experiments"
    held_out = load_module(folder / "held_out.py")
    found = held_out.fitted(held_out.load(folder / "measured")).terms
    page = (Path(__file__).parent / "EXERCISES.md").read_text(encoding="utf-8")
    said = {
        "step": (1e-3, 1),
        "tokens": (1e-6, 0),
        "requests": (1e-6, 0),
        "prefill_pairs": (1e-6, 2),
        "decode_context": (1e-6, 2),
    }
    assert said.keys() == found.keys()
    for name, (unit, digits) in said.items():
        assert f'"{name}": {found[name] / unit:.{digits}f}e{round(math.log10(unit))}' in page
