"""What lab 05-02 pins: how often the host launches, and from when a graph pays, or never."""

from __future__ import annotations

import math
import random

import pytest

from labkit import refused, same
from mini_vllm.cudagraph.launches import LAYER, simulate

# --- counting -------------------------------------------------------------------------------------


def test_eager_formula(lab):
    for (ops, calls), expected in {(3, 100): 300, (300, 1): 300, (1, 7): 7, (300, 4): 1200}.items():
        same(lab.eager_launches(ops, calls), expected, f"{ops} kernels, {calls} calls, eager.")


def test_graph_formula(lab):
    cases = {(3, 100, 3): 102, (3, 4, 9): 12, (300, 1, 900): 900, (300, 1000, 900): 1899}
    for (ops, calls, capture), expected in cases.items():
        same(
            lab.graph_launches(ops, calls, capture),
            expected,
            f"{ops} kernels, {calls} calls, capture for {capture}: the first call is the capture, "
            f"and {calls - 1} replays follow.",
        )


def test_zero_calls(lab):
    got = (lab.eager_launches(3, 0), lab.graph_launches(3, 0), lab.graph_launches(3, 0, 9))
    same(got, (0, 0, 0), "nobody called: nothing was captured, nothing replayed.")


def test_default_capture_cost(lab):
    same(lab.graph_launches(300, 1), 300, "without a cost the capture costs one eager run.")
    same(lab.graph_launches(300, 100), 399, "and 99 replays follow.")


# --- from when it pays ----------------------------------------------------------------------------


def test_crossover_second_call(lab):
    got = [lab.crossover(ops) for ops in (2, 3, 300)]
    same(got[1:], [2, 2], "3 and 300 kernels: 2n eager against n + 1 after two calls.")
    same(got[0], 2, "2 kernels: 4 against 3 after two calls.")


def test_crossover_single_op_is_none(lab):
    got = [lab.crossover(1), lab.crossover(1, 1), lab.crossover(1, 50)]
    same(got, [None] * 3, "one kernel is one launch, in a graph too: there is nothing to win.")


def test_crossover_is_strict(lab):
    same(
        (lab.eager_launches(3, 4), lab.graph_launches(3, 4, 9), lab.crossover(3, 9)),
        (12, 12, 5),
        "3 kernels, capture 9: after 4 calls both have cost 12, a tie. The graph is ahead after 5.",
    )


def test_crossover_matches_bruteforce(lab):
    rng = random.Random(2)
    for _ in range(500):
        ops, capture = rng.randint(2, 40), rng.randint(1, 200)
        calls = 1
        while capture + calls - 1 >= ops * calls:
            calls += 1
        same(lab.crossover(ops, capture), calls, f"{ops} kernels, capture {capture}.")


def test_capture_cost_shifts_crossover_not_ceiling(lab):
    got = [lab.crossover(300, capture) for capture in (300, 900, 1500)]
    same(got, [2, 4, 6], "300 kernels, capture 300, 900, 1500: a dearer capture pays later.")
    for capture in (300, 900, 1500):
        ratio = lab.eager_launches(300, 10**7) / lab.graph_launches(300, 10**7, capture)
        assert abs(ratio - 300) < 0.1, (
            f"after ten million calls a capture of {capture} is forgotten: expected a ratio of "
            f"nearly 300, came {ratio}"
        )
    same(lab.asymptotic_speedup(300), 300, "eager launches over graph launches, in the long run.")


def test_ratio_monotone_below_ceiling(lab):
    ratios = []
    for calls in (1, 2, 10, 100, 1000, 10000):
        ratios.append(lab.eager_launches(300, calls) / lab.graph_launches(300, calls))
    same(
        [round(ratio, 2) for ratio in ratios],
        [1.0, 1.99, 9.71, 75.19, 230.95, 291.29],
        "300 kernels at 1, 2, 10, 100, 1000, 10000 calls.",
    )
    ceiling = lab.asymptotic_speedup(300)
    assert sorted(ratios) == ratios and ratios[-1] < ceiling, (
        f"the ratio rises and never reaches {ceiling}: every replay still costs one launch; "
        f"came {ratios}"
    )


# --- beside the GPU's work ------------------------------------------------------------------------


def test_launches_overlap_with_the_gpu(lab, record_property):
    got = [
        (lab.step_time(300, 5, gpu, False), lab.step_time(300, 5, gpu, True))
        for gpu in (600, 1500, 3000)
    ]
    same(
        got,
        [(1500, 600), (1500, 1500), (3000, 3000)],
        "300 kernels x 5 us of launches, GPU work 600, 1500, 3000 us; (eager, graph). The slower "
        "lane decides, so a graph gives 2.5, 1 and 1 times.",
    )
    record_property("measured.gain", got[1][0] / got[1][1])


def test_without_overlap_times_add_up(lab):
    ratios = [
        lab.step_time(300, 5, gpu, False, overlap=False)
        / lab.step_time(300, 5, gpu, True, overlap=False)
        for gpu in (600, 1500, 3000, 10000)
    ]
    same(
        [round(ratio, 2) for ratio in ratios],
        [3.47, 1.99, 1.5, 1.15],
        "(300 x 5 + gpu) / (5 + gpu) for gpu = 600, 1500, 3000, 10000 us.",
    )


@pytest.mark.parametrize("kernel_us", [1.0, 4.0, 5.0, 9.0])
def test_the_simulated_step_lies_between_the_bounds(lab, kernel_us):
    kernels = list(LAYER) * 4
    for mode, graphed in (("eager", False), ("full", True)):
        simulated = simulate(kernels, mode, 5.0, kernel_us).step_us
        gpu = len(kernels) * kernel_us
        low = lab.step_time(len(kernels), 5.0, gpu, graphed)
        high = lab.step_time(len(kernels), 5.0, gpu, graphed, overlap=False)
        assert low <= simulated <= high, (
            f"{len(kernels)} kernels of {kernel_us} us, 5 us a launch, {mode}: the two-lane "
            f"simulation takes {simulated} us and your bounds are {low} and {high}"
        )
        assert math.isclose(high - low, min(gpu, 5.0 * (1 if graphed else len(kernels)))), (
            f"the bounds differ by the faster lane; {low} and {high} do not ({mode})"
        )


def test_invalid_arguments(lab):
    for name, call in {
        "eager_launches(0, 1)": lambda: lab.eager_launches(0, 1),
        "eager_launches(3, -1)": lambda: lab.eager_launches(3, -1),
        "graph_launches(0, 1)": lambda: lab.graph_launches(0, 1),
        "graph_launches(3, -1)": lambda: lab.graph_launches(3, -1),
        "graph_launches(3, 1, 0)": lambda: lab.graph_launches(3, 1, 0),
        "graph_launches(3, 0, 0)": lambda: lab.graph_launches(3, 0, 0),
        "crossover(0)": lambda: lab.crossover(0),
        "crossover(1, 0)": lambda: lab.crossover(1, 0),
        "asymptotic_speedup(0)": lambda: lab.asymptotic_speedup(0),
        "step_time(0, 5, 5, True)": lambda: lab.step_time(0, 5, 5, True),
        "step_time(3, -1, 5, True)": lambda: lab.step_time(3, -1, 5, True),
        "step_time(3, 5, -1, True)": lambda: lab.step_time(3, 5, -1, True),
        "step_time(3, -1, 5, False)": lambda: lab.step_time(3, -1, 5, False),
        "step_time(3, 5, -1, False)": lambda: lab.step_time(3, 5, -1, False),
        "step_time(3, 5, -1, False, overlap=False)": lambda: lab.step_time(3, 5, -1, False, False),
    }.items():
        refused(call, name)
