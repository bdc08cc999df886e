"""Sweeps and reports: the same numbers however they are made, and in other tools' words."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

import mini_vllm.simulate.sweep as module
from mini_vllm.simulate.cost import load_cost
from mini_vllm.simulate.report import (
    PerfettoTrace,
    Slo,
    bench_json,
    prometheus_text,
    weighted_percentiles,
    write_csv,
)
from mini_vllm.simulate.samples import FOLDER
from mini_vllm.simulate.sweep import Row, Setup, grid, knee, simulate, sweep
from mini_vllm.simulate.traces import read_trace

TRACE = FOLDER / "mooncake.jsonl"
SETTINGS = {"num_blocks": 1200, "async_scheduling": True, "max_num_batched_tokens": 2048}
SETUP = Setup(TRACE, load_cost("step=6e-3,tokens=1e-5"), limit=12, settings=SETTINGS)
AXES = {"max_num_batched_tokens": [512, 2048], "speed": [1, 8]}


def test_percentiles_are_numpys():
    draw = np.random.default_rng(1)
    values, counts = draw.random(40), draw.integers(1, 9, 40)
    expected = np.percentile(np.repeat(values, counts), (0, 1, 50, 90, 99, 100))
    assert weighted_percentiles(values, counts, (0, 1, 50, 90, 99, 100)) == pytest.approx(expected)


def test_a_report_adds_up():
    result = simulate(SETUP)
    found = bench_json(result, Slo(ttft=0.03))
    trace = list(read_trace(TRACE, limit=12))
    assert found["completed"] == 12
    assert found["total_output_tokens"] == sum(r.output_len for r in trace)
    assert found["output_throughput"] * found["duration"] == pytest.approx(
        found["total_output_tokens"]
    )
    assert (
        found["p50_ttft_ms"]
        == found["median_ttft_ms"]
        == pytest.approx(1e3 * float(np.median([o.ttft for o in result.outcomes])))
    )
    kept = sum(o.ttft <= 0.03 for o in result.outcomes)
    assert 0 < kept < 12 and found["slo_attainment"] == kept / 12


def test_a_request_is_good_when_it_keeps_every_limit():
    outcomes = simulate(SETUP).outcomes
    for slo in (Slo.of("ttft=0.03,tpot=0.0065"), Slo.of("e2el=1.0")):
        for o in outcomes:
            within = all(
                limit is None or value is None or value <= limit
                for limit, value in ((slo.ttft, o.ttft), (slo.tpot, o.tpot), (slo.e2el, o.e2el))
            )
            assert slo.holds(o) == within
    for wrong in ("ttft", "itl=1", "ttft=0", "ttft=x"):
        with pytest.raises(ValueError, match="need NAME=SECONDS with one of ttft, tpot, e2el"):
            Slo.of(wrong)


def test_a_csv_has_a_line_per_request_in_the_order_of_the_trace():
    file = io.StringIO()
    write_csv(simulate(SETUP), file)
    rows = list(csv.DictReader(io.StringIO(file.getvalue())))
    assert [int(row["request"]) for row in rows] == list(range(12))
    assert all(float(row["e2el"]) >= float(row["ttft"]) > float(row["queued"]) for row in rows)


def test_a_perfetto_trace_is_json_with_a_bar_per_step():
    file = io.StringIO()
    writer = PerfettoTrace(file)
    result = simulate(SETUP, observers=[writer])
    writer.close()
    bars = [e for e in json.loads(file.getvalue())["traceEvents"] if e["ph"] == "X"]
    assert len(bars) >= result.num_steps
    assert sum(e["dur"] for e in bars) == pytest.approx(result.busy * 1e6)


def test_prometheus_text_has_upstreams_names():
    pytest.importorskip("prometheus_client")
    result = simulate(SETUP)
    text = prometheus_text(result, "m")
    said = sum(o.output_len for o in result.outcomes)
    assert f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {float(said)}' in text
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 12.0' in text


@pytest.mark.slow
def test_rows_are_in_the_order_of_the_grid_whoever_makes_them():
    alone = sweep(SETUP, AXES, Slo(ttft=0.05))
    together = sweep(SETUP, AXES, Slo(ttft=0.05), workers=2)
    assert alone == together
    assert [row.setting for row in alone] == list(grid(AXES))
    assert alone[0].first_difference is None and alone[2].first_difference is not None


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch):
    state = tmp_path / "sweep.jsonl"
    whole = sweep(SETUP, AXES, state=state)
    kept = state.read_text().splitlines()
    state.write_text("\n".join(kept[:3]) + "\n" + kept[3][:40])  # stopped while writing
    ran: list[dict] = []
    real = module._one
    monkeypatch.setattr(
        module, "_one", lambda s, setting, *a: ran.append(setting) or real(s, setting, *a)
    )
    assert sweep(SETUP, AXES, state=state) == whole
    settings = list(grid(AXES))
    assert ran == [settings[0], settings[3]]  # the first one gives the plans
    other = Setup(TRACE, SETUP.cost, limit=20, settings=SETTINGS)
    with pytest.raises(ValueError, match="holds the rows of another sweep"):
        sweep(other, AXES, state=state)


def test_a_refused_setting_is_a_row_that_says_why():
    rows = sweep(SETUP, {"num_blocks": [1200, 20], "release": ["0.22.1", "0.1"]})
    assert [bool(row.error) for row in rows] == [False, True, True, True]
    assert "what the cache holds" in rows[2].error and "release='0.1'" in rows[1].error


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1.0, 0.99, 0.4, 0.1], (2, 4)),
        ([1.0, 0.98, 1.0, 1.0], (1, 2)),
        ([0.2, 0.1, 0.0, 0.0], (None, 1)),
        ([1.0, 1.0, 1.0, 1.0], (8, None)),
    ],
)
def test_the_knee_lies_between_the_last_load_that_holds_and_the_first_that_does_not(
    shares, expected
):
    rows = [
        Row({"rate": rate}, {"slo_attainment": share})
        for rate, share in zip((1, 2, 4, 8), shares, strict=True)
    ]
    assert knee(rows, "rate", 0.99) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rate": 1.0, "speed": 2.0}, "rate with speed: each sets the load; need one"),
        ({"num_speculative_tokens": 2}, "need acceptance too"),
        ({"acceptance": 0.5}, "acceptance: needs num_speculative_tokens"),
        ({"ramp": 0.1}, "ramp: needs concurrency"),
        ({"concurrency": 2, "turnaround": -1}, "turnaround=-1: need seconds, 0 or more"),
        ({"concurrency": 0}, "concurrency=0: need at least 1"),
        ({"max_seqs": 3}, "max_seqs=3: no such argument"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        simulate(Setup(TRACE, SETUP.cost, limit=2, settings=settings))
