"""The prediction of settings that were not fitted, from the measurements that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.modules import load_module

HERE = Path(__file__).parent
held_out = load_module(HERE / "held_out.py")
step_profile = load_module(HERE / "step_profile.py")
BOUNDS = dict(zip(held_out.NAMES, (0.07, 0.15, 0.25, 0.07), strict=True))


@pytest.fixture(scope="module")
def found():
    return held_out.load(HERE / "measured")


def test_the_held_out_settings_are_in_no_fit(found):
    fitted = [row["setting"] for row in found["rows"] if "steps" in row]
    assert len(fitted) == 6 and not [each for each in held_out.HELD_OUT if each in fitted]
    assert sorted(map(str, fitted + held_out.HELD_OUT)) == sorted(map(str, held_out.SETTINGS))


def test_held_out_settings_are_predicted_within_the_bounds(found):
    rows = [row for row in held_out.judge(found) if row["held_out"]]
    assert len(rows) == 3
    for row in rows:
        for name, error in zip(held_out.NAMES, row["error"], strict=True):
            assert abs(error) <= BOUNDS[name], (row["setting"], name, error)


def test_a_fit_of_other_prices_is_out_of_the_bounds(found):
    """The bounds can fail: a fit of steps that took a fifth longer breaks them."""
    worse = {**found, "rows": [dict(row) for row in found["rows"]]}
    for row in worse["rows"]:
        if "steps" in row:
            row["steps"] = [[*values, 1.2 * seconds] for *values, seconds in row["steps"]]
    rows = [row for row in held_out.judge(worse) if row["held_out"]]
    assert max(abs(row["error"][0]) for row in rows) > BOUNDS["ITL mean"]


def test_directions_count_what_the_server_can_tell(found):
    rows = held_out.judge(found)
    assert held_out.directions(rows, held_out.told_apart(found)) == (45, 0, 27)
    assert held_out.directions(rows) == (48, 2, 22)
    for row in rows:
        row["predicted"] = [1 / each for each in row["predicted"]]
    assert held_out.directions(rows, held_out.told_apart(found)) == (0, 45, 27)


def test_an_operator_is_not_counted_for_what_it_calls():
    """A forward pass of 100 µs: `a` of 60 calls `b` of 20, and `c` of 10 follows."""

    def span(name, ts, dur, cat="cpu_op"):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1}

    found = step_profile.steps_of([
        span("gpu_model_runner: preprocess", 0, 5, "user_annotation"), span("before", 1, 2),
        span(step_profile.FORWARD, 10, 100, "user_annotation"),
        span("a", 12, 60), span("b", 20, 20), span("c", 80, 10),
    ])  # fmt: skip
    assert found == [
        {"scopes": {"preprocess": 5, "forward": 100},
         "operators": {"a": 40, "b": 20, "c": 10, "others": 0}}
    ]  # fmt: skip
