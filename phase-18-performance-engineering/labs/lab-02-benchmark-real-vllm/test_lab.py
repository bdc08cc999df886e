"""What lab 18-02 pins: a report that is vLLM's own, and tables that cannot have been measured."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from labkit import refused, same
from labkit.modules import load_module

RECORDED = Path(__file__).parent / "recordings" / "bench.json"
"""What `vllm bench serve` 0.22.1 saved of a server on a CPU, its own summary among it."""


def bench(**more):
    """A saved run of two requests: A with 101 tokens at 10 ms, B with 3 at 100 ms."""
    return {
        "duration": 2.0, "completed": 2, "request_rate": 4.0, "max_concurrency": None,
        "input_lens": [10, 20], "output_lens": [101, 3], "ttfts": [0.2, 0.4],
        "itls": [[0.01] * 100, [0.1, 0.1]], "start_times": [7.0, 7.25], **more,
    }  # fmt: skip


def load(lab, folder, found):
    path = folder / "run.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    return lab.load_run(path)


def near(got, expected, what):
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12), (
        f"{what}\nexpected {expected}\ncame     {got}"
    )


# --- a report -------------------------------------------------------------------------------------


def test_worked_example(lab, tmp_path, record_property):
    """A mean over gaps that hides the slow request, and one over requests that shows it."""
    row = lab.summarize(load(lab, tmp_path, bench()))
    near(row.itl_mean_ms, 1200 / 102, "102 gaps, 100 of them of 10 ms: mean ITL in ms")
    near(row.tpot_mean_ms, 55.0, "two requests, of 10 and 100 ms per token: mean TPOT in ms")
    near((row.output_tps, row.total_tps), (104 / 2, 134 / 2), "tokens per second: output, all")
    near(row.e2el_max_s, 1.2, "the longest request: 0.2 s and 100 gaps, whenever it began")
    record_property("measured.pooled", row.itl_mean_ms)
    record_property("measured.tpot", row.tpot_mean_ms)


def test_a_run_as_vllm_reports_it(lab):
    """Any percentile, mean or throughput that is another one than vLLM's own of the same run."""
    theirs = json.loads(RECORDED.read_text(encoding="utf-8"))
    slo = {"ttft": 0.8, "tpot": 0.1}
    row = lab.summarize(lab.load_run(RECORDED), slo)
    for own, key in (
        (row.ttft_p50_ms, "p50_ttft_ms"), (row.ttft_p99_ms, "p99_ttft_ms"),
        (row.itl_mean_ms, "mean_itl_ms"), (row.itl_p50_ms, "p50_itl_ms"),
        (row.itl_p99_ms, "p99_itl_ms"), (row.tpot_mean_ms, "mean_tpot_ms"),
        (row.tpot_p50_ms, "p50_tpot_ms"), (row.tpot_p99_ms, "p99_tpot_ms"),
        (row.output_tps, "output_throughput"), (row.total_tps, "total_token_throughput"),
        (row.goodput_rps, "request_goodput"), (row.completed, "completed"),
    ):  # fmt: skip
        assert own == pytest.approx(theirs[key], rel=1e-6, abs=1e-3), (
            f"{key} of a recorded run\nexpected {theirs[key]}\ncame     {own}"
        )


def test_percentile_is_numpys(lab):
    """A rank that is rounded, up or down."""
    draw = random.Random(4)
    for count in (1, 2, 3, 10, 101, 200):
        values = [draw.expovariate(1) for _ in range(count)]
        for p in (0, 1, 50, 90, 99, 99.9, 100):
            near(lab.percentile(values, p), float(np.percentile(values, p)), f"p{p} of {count}")
    refused(lambda: lab.percentile([], 50), "a percentile of nothing")
    refused(lambda: lab.percentile([1.0], 101), "p101")


def test_failed_requests_have_no_times(lab, tmp_path):
    """A request that failed at once, and makes the median fast."""
    found = bench(
        completed=2, input_lens=[10, 20, 30], output_lens=[101, 3, 0], ttfts=[0.2, 0.4, 0.0],
        itls=[[0.01] * 100, [0.1, 0.1], []], start_times=[0.0, 0.25, 0.5],
    )  # fmt: skip
    row = lab.summarize(load(lab, tmp_path, found))
    same((row.completed, row.failed), (2, 1), "completed and failed")
    near(row.ttft_p50_ms, 300.0, "median TTFT of the two that completed")
    near(row.total_tps, 134 / 2, "the prompt of a failed request is not throughput")
    none = {"completed": 0, "output_lens": [0, 0], "ttfts": [0, 0], "itls": [[], []]}
    refused(lambda: lab.summarize(load(lab, tmp_path, bench(**none))), "a run without a request")


def test_a_single_token_has_no_tpot(lab, tmp_path):
    """A division by n - 1 = 0, or by n."""
    found = bench(output_lens=[101, 1], itls=[[0.01] * 100, []])
    row = lab.summarize(load(lab, tmp_path, found), {"tpot": 0.01 + 1e-9})
    near(row.tpot_mean_ms, 10.0, "mean TPOT where one request has a single token")
    near(row.goodput_rps, 2 / 2, "a request of one token keeps every TPOT limit")


def test_goodput_asks_for_every_limit(lab, tmp_path):
    """A request that is good by half of its limits."""
    run = load(lab, tmp_path, bench())
    for slo, good in (
        ({"ttft": 0.3}, 1), ({"tpot": 0.02}, 1), ({"ttft": 0.3, "tpot": 0.2}, 1),
        ({"ttft": 0.5, "tpot": 0.2}, 2), ({"ttft": 0.2}, 1), ({"e2el": 0.7}, 1), ({"ttft": 0.1}, 0),
    ):  # fmt: skip
        near(lab.summarize(run, slo).goodput_rps, good / 2.0, f"requests/s that keep {slo}")
    same(lab.summarize(run).goodput_rps, None, "without a limit there is no goodput")
    refused(lambda: lab.summarize(run, {"itl": 0.1}), "a limit on ITL, which vLLM refuses too")


def test_the_role_chunk_is_no_token(lab, tmp_path):
    """An empty first chunk of a chat that is counted as the first token."""
    found = bench(ttfts=[0.19, 0.39], itls=[[0.01, *[0.01] * 100], [0.01, 0.1, 0.1]])
    row = lab.summarize(load(lab, tmp_path, found), role_chunk=True)
    near((row.ttft_p50_ms, row.itl_p50_ms), (300.0, 10.0), "TTFT and ITL behind the role")
    near(row.tpot_mean_ms, 55.0, "TPOT, from the first token on")


def test_what_cannot_be_read(lab, tmp_path):
    """A file without details, of which half a report is made."""
    load(lab, tmp_path, bench(request_rate="inf"))
    plain = {key: value for key, value in bench().items() if key not in ("itls", "ttfts")}
    try:
        came = repr(load(lab, tmp_path, plain))
    except ValueError as error:
        came = str(error)
    assert "--save-detailed" in came and "ttfts" in came, (
        "a file without ttfts: ValueError that names the field and --save-detailed\n"
        f"came     {came}"
    )
    refused(lambda: load(lab, tmp_path, bench(ttfts=[0.1])), "lists of different lengths")
    refused(lambda: load(lab, tmp_path, "{"), "half a file")
    refused(lambda: load(lab, tmp_path, "5"), "a number")
    closed = load(lab, tmp_path, bench(request_rate="inf", max_concurrency=8))
    same((closed.request_rate, closed.max_concurrency), (float("inf"), 8), "a closed loop of 8")
    no_rate = {key: value for key, value in bench().items() if key != "request_rate"}
    refused(lambda: load(lab, tmp_path, no_rate), "a file without a rate")


# --- what it means --------------------------------------------------------------------------------


def test_concurrency_by_littles_law(lab, record_property):
    """One gap too many, or milliseconds taken for seconds."""
    found = lab.concurrency(8, 0.145, 0.0112, 128)
    near(found, 12.5392, "8 requests/s, each there for 0.145 s and 127 gaps of 11.2 ms")
    near(lab.concurrency(2, 0.5, 9.0, 1), 1.0, "a single token has no gap")
    record_property("measured.inside", found)


def test_knee_is_an_interval(lab):
    """The highest rate that passes, although a lower one failed."""
    points = [(4, 210.0), (8, 610.0), (12, 4900.0)]
    same(lab.knee(points, 800), (8, 12), "limit 800 ms")
    same(lab.knee(points, 5000), (12, None), "limit 5,000 ms: not reached")
    same(lab.knee(points[::-1], 610), (8, 12), "in any order, and a limit that is just kept")
    same(lab.knee([*points, (16, 700.0)], 800), (8, 12), "a pass behind a failure is luck")
    same(lab.knee(points, 210), (4, 8), "a limit that the lowest rate just keeps")
    refused(lambda: lab.knee(points, 200), "a limit that the lowest rate breaks")
    refused(lambda: lab.knee([], 200), "no rates")


def test_a_table_that_cannot_be(lab):
    """The four lines of the page: believed, or thrown out for the wrong reason."""

    def claim(tps, ttft, itl, **more):
        return lab.Claim(8, 128, 200, tps, ttft, itl, **more)

    few, above = "too-few-requests", "throughput-above-offered"
    for name, line, expected in (
        ("defaults", claim(4310, 145, 11.2), [above, few]),
        ("threshold 64", claim(4150, 160, 11.3, change=4150 / 4310 - 1), [above, few]),
        (
            "slots 256 to 64",
            claim(4290, 150, 11.1, max_num_seqs=64, change=4290 / 4310 - 1),
            [above, "cap-cannot-bind", few, "delta-within-noise"],
        ),
        (
            "memory 0.85 to 0.9",
            claim(4420, 144, 11.2, kv_usage=0.005, change=4420 / 4310 - 1),
            [above, "kv-not-limiting", few, "delta-within-noise"],
        ),
    ):
        same(lab.audit(line), expected, f"the line {name!r}")


def test_a_table_that_can(lab):
    """An audit that finds something everywhere."""
    fine = {"rate": 8, "output_len": 128, "num_requests": 1000, "output_tps": 1018.0,
            "ttft_p50_ms": 145.0, "itl_p50_ms": 11.2}  # fmt: skip
    same(lab.audit(lab.Claim(**fine)), [], "just below the offered load, 1,000 requests")
    binds = lab.Claim(**fine, max_num_seqs=25, kv_usage=0.05, change=-0.031)
    same(lab.audit(binds), [], "a cap within twice the concurrency, 5 % of the cache, 3.1 %")
    above = lab.Claim(**fine, max_num_seqs=26, change=0.08, spread=0.09)
    same(lab.audit(above), ["cap-cannot-bind", "delta-within-noise"], "a cap of 26, spread 9 %")
    edge = {**fine, "output_tps": 1024.0, "change": -0.03}
    same(lab.audit(lab.Claim(**edge)), ["delta-within-noise"], "the offered load, and the spread")
    more = {**fine, "output_tps": 1025.0}
    same(lab.audit(lab.Claim(**more)), ["throughput-above-offered"], "a token above what is asked")


def test_differs_needs_runs(lab, record_property):
    """Two runs that seem to differ, and a difference of one direction only."""
    same(lab.differs([1.0, 1.1], [9.0, 9.1]), False, "two runs each: p is 2 of 6 at best")
    same(lab.differs([1, 2, 3], [9, 8, 7]), False, "three runs each: 2 of 20")
    same(lab.differs([1, 2, 3, 4], [9, 8, 7, 6]), True, "four runs each, apart: 2 of 70")
    same(lab.differs([9, 8, 7, 6], [1, 2, 3, 4]), True, "the other way round")
    same(lab.differs([1, 2, 3, 8], [9, 4, 7, 6]), False, "four runs each that overlap")
    same(lab.differs([5, 5, 5, 5], [5, 5, 5, 5]), False, "equal runs")
    same(lab.differs([1.0] * 3, [2.0, 2.1, 2.2, 2.3, 2.4]), True, "3 and 5 runs: 1 of 56")
    near_one = [1 + 0.01 * place for place in range(19)]
    same(lab.differs([50.0], near_one), True, "one run far from 19: 1 of 20, p is 0.05")
    refused(lambda: lab.differs([], [1.0]), "no runs")
    record_property("measured.runs", 4)


# --- the run script -------------------------------------------------------------------------------


def test_the_run_script_judges_a_recorded_run(lab, capsys):
    """A run.py that is satisfied with whatever came."""
    theirs = json.loads(RECORDED.read_text(encoding="utf-8"))
    script = load_module(Path(__file__).parent / "run.py")
    given = Namespace(
        num_prompts=len(theirs["ttfts"]), output_len=theirs["output_lens"][0], ttft=800, tpot=100,
        keep=None,
    )  # fmt: skip
    one = {
        "rate": theirs["request_rate"], "seed": 1, "reset": True, "bench": theirs,
        "vllm:prefix_cache_hits": 0.0, "vllm:prefix_cache_queries": 100.0,
        "vllm:num_preemptions": 0.0,
    }  # fmt: skip
    assert script.judge(lab, given, [one]), f"as it was recorded:\n{capsys.readouterr().out}"
    kept = {**one, "reset": False, "vllm:prefix_cache_hits": 90.0}
    assert script.judge(lab, given, [one, kept]), "90 % found by the same seed, 0 after a reset"
    assert not script.judge(lab, given, [{**kept, "reset": True}, kept]), (
        "90 % found in a cache that was reset: must fail"
    )
    other = {**one, "bench": {**theirs, "p99_ttft_ms": theirs["p99_ttft_ms"] * 1.01}}
    assert not script.judge(lab, given, [other]), "a P99 that is another one than vLLM's: must fail"


@pytest.mark.gpu
def test_offered_load_on_a_gpu(lab, gpu_device):
    """It runs on a GPU only: two rates of run.py, judged as above."""
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "run.py"), "--rates", "4", "8"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert "all as predicted" in ran.stdout, f"on {gpu_device}:\n{ran.stdout[-3000:]}"
