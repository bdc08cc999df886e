"""Launches and kernels on two lanes: who waits for whom."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mini_vllm.cudagraph.launches import LAYER, MODES, simulate
from mini_vllm.tests.support import for_all


def kernels_of(st):
    return st.lists(st.sampled_from(LAYER), min_size=1, max_size=40)


def microseconds(st):
    return st.floats(0.1, 50)


def test_short_kernels_wait_for_the_host_and_a_graph_frees_them():
    eager = simulate(LAYER * 32, "eager", launch_us=5, kernel_us=2)
    full = simulate(LAYER * 32, "full", launch_us=5, kernel_us=2)
    assert eager.step_us == 288 * 5 + 2  # the host is the slower lane, plus the last kernel
    assert full.step_us == 5 + 288 * 2  # one launch, then the GPU alone


def test_long_kernels_hide_the_host_and_a_graph_gains_next_to_nothing():
    eager = simulate(LAYER * 32, "eager", launch_us=5, kernel_us=10)
    full = simulate(LAYER * 32, "full", launch_us=5, kernel_us=10)
    assert eager.step_us == full.step_us == 5 + 288 * 10


def test_launches_by_mode_for_32_layers():
    counts = {mode: len(simulate(LAYER * 32, mode, 5, 2).launches) for mode in MODES}
    assert counts == {"eager": 288, "piecewise": 33 + 32, "full": 1}


@pytest.mark.slow
@for_all(
    kernels_of, lambda st: st.sampled_from(MODES), microseconds, microseconds, max_examples=100
)
def test_a_step_is_never_shorter_than_either_lane_and_never_longer_than_both(
    kernels, mode, launch_us, kernel_us
):
    line = simulate(kernels, mode, launch_us, kernel_us)
    host, gpu = launch_us * len(line.launches), kernel_us * len(kernels)
    assert line.step_us >= max(host, gpu)
    assert line.step_us <= host + gpu + 1e-9 * (host + gpu)
    assert [kernel.name for kernel in line.kernels] == list(kernels)
    for before, after in pairwise(line.kernels):
        assert after.start >= before.end
    assert 0 < line.gpu_busy <= 1 + 1e-12


@pytest.mark.slow
@for_all(kernels_of, microseconds, microseconds, max_examples=100)
def test_fewer_launches_are_never_slower(kernels, launch_us, kernel_us):
    eager, piecewise, full = (simulate(kernels, m, launch_us, kernel_us).step_us for m in MODES)
    # A piecewise graph is issued before its first kernel, no later than that kernel alone would be.
    assert full <= piecewise * (1 + 1e-12)
    assert piecewise <= eager * (1 + 1e-12)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([], "eager", 1, 1), "kernels"),
        ((["a"], "graph", 1, 1), "mode='graph'"),
        ((["a"], "full", 0, 1), "launch_us=0"),
        ((["a"], "full", 1, float("nan")), "kernel_us=nan"),
    ],
)
def test_what_makes_no_step_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        simulate(*arguments)
