"""What lab 05-07 pins: the gain in closed form, the fit of a sweep, and what a replay sees.

`run.py` is tried on a pretended device (`pretend.py`); what it prints there is arithmetic, not a
measurement. The tests marked `gpu` need a CUDA GPU and torch.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from course.files import load_module
from labkit import refused, same
from mini_vllm.cudagraph import Tape
from mini_vllm.cudagraph.launches import simulate

HERE = Path(__file__).parent
PRETENDED = {"launch_us": 4.0, "replay_us": 12.0, "floor_us": 1.5, "bandwidth": 4e10}


def close(got, expected, why: str, tolerance: float = 1e-9) -> None:
    assert got is not None and math.isclose(got, expected, rel_tol=tolerance), (
        f"{why}\nexpected {expected:.6g}\ncame     {got}"
    )


def load(name: str):
    """run.py or pretend.py, fresh."""
    return load_module(HERE / f"{name}.py", f"_lab_05_07_{name}")


# --- Part A ---------------------------------------------------------------------------------------


def test_steps_by_hand(lab):
    close(lab.eager_us(300, 5, 2), 1502, "the host is slower: 300 launches, then the last kernel.")
    close(lab.eager_us(300, 5, 10), 3005, "the GPU is slower: one launch, then 300 kernels.")
    close(lab.graph_us(300, 12, 2), 612, "one submission of 12 us, then 300 kernels.")
    close(lab.gain(300, 5, 12, 2), 1502 / 612, "eager over graph.")


@pytest.mark.parametrize("num_kernels", [1, 2, 7, 300])
def test_steps_of_the_simulator(lab, num_kernels):
    for launch in (0.7, 5.0):
        for kernel in (0.3, 5.0, 8.0):
            for mode, function in (("eager", lab.eager_us), ("full", lab.graph_us)):
                close(
                    function(num_kernels, launch, kernel),
                    simulate(["kernel"] * num_kernels, mode, launch, kernel).step_us,
                    f"{num_kernels} kernels of {kernel} us, a submission {launch} us, {mode}: what "
                    "mini_vllm/cudagraph/launches.py simulates kernel by kernel.",
                )


def test_a_graph_can_lose(lab):
    got = lab.gain(300, 5, 12, 10)
    assert got is not None and 0.99 < got < 1, (
        "kernels of 10 us hide the launches, and a replay (12 us) costs more than one launch (5 "
        f"us): 3005 / 3012.\nexpected 0.9977\ncame     {got}"
    )


def test_gain_at_ten_percent(lab):
    got = lab.kernel_us_at_gain(300, 5, 12, 1.1)
    close(got, 1486.8 / 329, "(300 x 5 - 1.1 x 12) / (1.1 x 300 - 1): just below a launch.")
    close(lab.gain(300, 5, 12, got), 1.1, "put back in, it must gain 1.1.")


def test_gain_at_every_ratio(lab):
    rng = random.Random(0)
    for _ in range(300):
        n, launch, replay = rng.randint(2, 500), rng.uniform(1, 9), rng.uniform(1, 40)
        ratio = rng.uniform(1.001, 4)
        got = lab.kernel_us_at_gain(n, launch, replay, ratio)
        where = f"{n} kernels, launch {launch:.3f}, replay {replay:.3f}, ratio {ratio:.4f}"
        if n * launch <= ratio * replay:
            same(got, None, f"{where}: kernels of no length gain {n * launch / replay:.3f}, less.")
        else:
            close(
                lab.gain(n, launch, replay, got),
                ratio,
                f"{where}: your {got} us per kernel, put into gain().",
                1e-6,
            )


def test_small_gains_lie_beyond_the_launch(lab):
    got = lab.kernel_us_at_gain(2, 5, 1, 1.2)
    close(got, 9.5, "2 kernels, replay cheaper than a launch: (5 - 1.2) / (2 x 0.2), above 5 us.")
    same(
        lab.kernel_us_at_gain(2, 6, 10, 1.2),
        None,
        "2 x 6 us of launches and a replay of 10: kernels of no length gain 1.2 and no more.",
    )
    for ratio in (1, 0.5):
        refused(
            lambda ratio=ratio: lab.kernel_us_at_gain(300, 5, 12, ratio),
            f"a gain of {ratio}, at which the formula divides by nothing or by less,",
        )


def test_kernels_by_bytes(lab):
    close(lab.kernel_us(10**6, 2e12, 1.5), 4.0, "10**6 x 8 bytes at 2e12 a second.")
    for elements in (1000, 10**5):
        close(
            lab.kernel_us(elements, 2e12, 1.5), 1.5,
            f"{elements} elements: no kernel is shorter than the floor.",
        )  # fmt: skip


def test_elements_at_the_crossover(lab):
    got = lab.elements_at_gain(300, 5, 12, 1.1, 2e12, 1.5)
    same(got, 1_129_788, "4.519 us x 2e12 bytes/s / 8 bytes, rounded up.")
    below, above = (lab.gain(300, 5, 12, lab.kernel_us(n, 2e12, 1.5)) for n in (got - 1, got))
    assert above <= 1.1 < below, (
        f"{got} elements must be the fewest that gain at most 1.1; they gain {above}, and one "
        f"fewer {below}"
    )
    same(
        lab.elements_at_gain(1, 4, 1, 2, 2e12, 2.0),
        0,
        "kernels of 2 us gain exactly 2, and the shortest of this device lasts 2 us: 0 elements.",
    )
    same(
        (lab.elements_at_gain(300, 5, 12, 1.1, 2e12, 6.0),
         lab.elements_at_gain(2, 5, 12, 1.1, 2e12, 1.5)),
        (0, 0),
        "a device whose shortest kernel lasts 6 us; a step of 2 kernels, 10 us of launches against "
        "a replay of 12: the graph gains less than 1.1 from 0 elements on.",
    )  # fmt: skip


# --- Part B ---------------------------------------------------------------------------------------


def rows_of(lab, sizes, num_kernels=300, launch=4.0, replay=12.0, queue=0.0):
    """A sweep without noise. `queue`: what a launch waits once kernels are longer than launches."""
    rows = []
    for elements in sizes:
        kernel = max(1.5, elements * 8 / 4e10 * 1e6)
        eager = max(num_kernels * launch + kernel, launch + num_kernels * kernel)
        host = num_kernels * (launch + queue * max(0.0, kernel - launch))
        rows.append(lab.Row(elements, host, eager, replay, replay + num_kernels * kernel))
    return rows


SIZES = [2**n for n in range(8, 19)]


def test_fit_of_a_clean_sweep(lab):
    got = lab.fit(rows_of(lab, SIZES), 300)
    close(got.launch_us, 4.0, "1200 us of issuing, 300 launches.")
    close(got.replay_us, 12.0, "what replay() took.")
    for elements, kernel in zip(SIZES, got.kernel_us, strict=True):
        close(kernel, max(1.5, elements / 5000), f"{elements} elements: (graph - replay) / 300.")


def test_fit_trusts_the_smallest_size(lab):
    rows = rows_of(lab, SIZES, queue=0.5)[::-1]
    rows = [row._replace(replay_us=row.replay_us + row.elements / 1e4) for row in rows]
    rows[-2] = rows[-2]._replace(host_us=1100.0)  # the second smallest: a lucky one
    rows[-1] = rows[-1]._replace(replay_us=12.0)
    got = lab.fit(rows, 300)
    close(got.replay_us, 12.0, "a replay of long kernels may wait as well: the smallest row's.")
    close(
        got.launch_us,
        4.0,
        "with long kernels the device's queue fills and a launch waits for it: host times of "
        "large sizes are not launch costs. The rows come in any order.",
    )
    close(
        got.kernel_us[0],
        max(1.5, rows[0].elements / 5000),
        "kernel times belong to the rows as they came, not to sorted ones.",
    )


def test_crossover_of_a_sweep(lab):
    rows = [lab.Row(n, 0, gain * 100, 0, 100) for n, gain in ((1000, 3.0), (10_000, 1.2),
                                                              (100_000, 1.0))]  # fmt: skip
    close(
        lab.measured_crossover(rows, 1.1),
        10**4.5,
        "1.1 is half-way between 1.2 and 1.0, so half-way between 10**4 and 10**5 on a "
        "logarithmic scale.",
    )
    close(lab.measured_crossover(rows[::-1], 1.1), 10**4.5, "rows may come in any order.")
    exact = [lab.Row(1000, 0, 400, 0, 100), lab.Row(10_000, 0, 200, 0, 100)]
    close(lab.measured_crossover(exact, 2.0), 10_000, "the last row gains 2 and is not above 2.")


def test_crossover_is_the_last_one(lab):
    gains = ((100, 2.0), (1000, 1.05), (10_000, 1.3), (100_000, 0.9))
    rows = [lab.Row(n, 0, gain * 100, 0, 100) for n, gain in gains]
    close(
        lab.measured_crossover(rows, 1.1),
        10**4.5,
        "one noisy row at 1000 is below 1.1; from the next one on the gain is back. For good means "
        "after the last row above.",
    )
    flat = [lab.Row(n, 0, 150, 0, 100) for n in (100, 1000)]
    same(
        (lab.measured_crossover(flat, 1.1), lab.measured_crossover(flat, 2.0)),
        (None, None),
        "above 1.1 to the end: not crossed in this sweep. Never above 2.0: nothing to cross.",
    )


def test_prediction_meets_the_sweep(lab):
    sizes = [2**12 + 256 * n for n in range(120)]
    rows = rows_of(lab, sizes)
    found = lab.fit(rows, 300)
    predicted = lab.elements_at_gain(300, found.launch_us, found.replay_us, 1.1, 4e10, 1.5)
    measured = lab.measured_crossover(rows, 1.1)
    assert predicted and measured and abs(measured / predicted - 1) < 0.01, (
        "a fine sweep without noise: the crossover read off the rows and the one computed from the "
        f"fit must agree within 1 %.\npredicted {predicted}\nread      {measured}"
    )


# --- Part C ---------------------------------------------------------------------------------------


def test_reads_of_a_rebound_input(lab):
    actions = [("fill", 5), ("replay",), ("read",), ("rebind", 100), ("replay",), ("read",),
               ("fill", 200), ("replay",), ("read",)]  # fmt: skip
    got = lab.reads(actions)
    same(
        got and got[0],
        [11, 11, 11],
        "2 x 5 + 1. After x = torch.full(...) the graph still reads the tensor it was captured "
        "with, and x.fill_(200) now writes into another one. No error, the old answer.",
    )


def test_reads_before_a_replay(lab):
    got = lab.reads([("read",), ("fill", 3), ("read",), ("replay",), ("read",)])
    same(
        got and got[0],
        [None, None, 7],
        "a capture runs nothing and neither does a fill: until the first replay nobody has written "
        "out.",
    )
    got = lab.reads([("fill", 3), ("replay",), ("fill", 9), ("read",), ("replay",), ("read",)])
    same(got and got[0], [7, 19], "new input changes the output with the next replay, not before.")


def test_kept_outputs(lab):
    actions = [("fill", 1), ("replay",), ("keep",), ("clone",), ("fill", 2), ("replay",), ("keep",)]
    got = lab.reads(actions)
    same(
        got and got[1],
        [5, 3, 5],
        "kept without a copy, the first output is the buffer that the second replay overwrote; a "
        "clone is not.",
    )
    got = lab.reads([("clone",), ("keep",), ("replay",)])
    same(got and got[1], [None, 1], "a clone of unwritten memory stays that; a kept one is filled.")


def random_actions(rng: random.Random) -> list[tuple]:
    names = rng.choices(
        ["fill", "rebind", "replay", "read", "keep", "clone"], [4, 1, 4, 3, 2, 2], k=14
    )
    return [(n, rng.randint(1, 99)) if n in ("fill", "rebind") else (n,) for n in names]


def on_a_tape(actions) -> tuple[list, list]:
    """The same on mini_vllm's recorder."""
    x, double, out = np.zeros(1), np.full(1, np.nan), np.full(1, np.nan)
    tape = Tape()
    tape.record(lambda a: 2 * a, x, double)
    tape.record(lambda a: a + 1, double, out)
    noted, kept = [], []
    for name, *values in actions:
        if name == "fill":
            x[:] = values[0]
        elif name == "rebind":
            x = np.full(1, float(values[0]))
        elif name == "replay":
            tape.replay()
        elif name == "read":
            noted.append(out[0])
        else:
            kept.append(out if name == "keep" else out.copy())
    plain = [None if math.isnan(value) else value for value in noted]
    return plain, [None if math.isnan(array[0]) else array[0] for array in kept]


def test_reads_of_the_engine_tape(lab):
    rng = random.Random(5)
    for _ in range(200):
        actions = random_actions(rng)
        got = lab.reads(actions)
        same(
            tuple(got or ()),
            on_a_tape(actions),
            f"mini_vllm's Tape, captured over x and out, after {actions}: (read, kept).",
        )
    for before in ([], [("fill", 1), ("replay",)]):
        refused(lambda before=before: lab.reads([*before, ("jump",)]), "an action none of the six")


# --- run.py, on a pretended device ----------------------------------------------------------------


def test_the_sweep_finds_the_pretended_device(lab, capsys):
    run, pretend = load("run"), load("pretend")
    device = pretend.Device(**PRETENDED)
    run.clock = device.clock
    rows = run.sweep(pretend.make(device), lab, 60, [64, 1024, 16384, 32768], 3)
    got = lab.fit(rows, 60)
    close(got.launch_us, 4.0, "run.py's sweep on a device whose launches take 4 us.", 1e-6)
    close(got.replay_us, 12.0, "and whose replays take 12 us.", 1e-6)
    assert np.allclose(got.kernel_us, [1.5, 1.5, 16384 / 5000, 32768 / 5000]), (
        f"kernels of max(1.5, bytes / 4e10) us; came {got.kernel_us}"
    )
    run.report(lab, rows, 60, 1.1)
    printed = capsys.readouterr().out
    assert printed.count("(+0.0%)") == 4 and "at 17447 elements with 40 GB/s" in printed, (
        "on this device the eager column is predicted exactly, and the gain is 1.1 where a kernel "
        f"lasts (60 x 4 - 1.1 x 12) / 65 us; printed:\n{printed}"
    )


def test_the_script_of_run_plays_as_predicted(lab):
    run, pretend = load("run"), load("pretend")
    torch = pretend.make(pretend.Device(**PRETENDED))
    rng = random.Random(9)
    for actions in (run.SCRIPT, *(random_actions(rng) for _ in range(50))):
        real = run.play(torch, actions)
        shown = tuple([None if math.isnan(v) else v for v in values] for values in real)
        same(
            tuple(lab.reads(actions) or ()),
            shown,
            f"run.py plays {actions} on a pretended device that records honestly: (read, kept).",
        )


def test_run_from_end_to_end(lab, capsys):
    run = load("run")
    run.main(["--pretend", "--kernels", "20", "--repeats", "1", "--file", lab.__file__,
              "--elements", "256", "65536", "262144"])  # fmt: skip
    printed = capsys.readouterr().out
    for words in (
        "a pretended device: nothing here is measured",
        "launch 5.00 us, replay 10.0 us",
        "measured: the gain falls to 1.1 at",
        "0 differ",
    ):
        assert words in printed, f"run.py --pretend must print {words!r}; it printed:\n{printed}"


# --- run.py, on a GPU -----------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_replay_on_a_gpu(lab, gpu_device):
    import torch

    run = load("run")
    buffer = torch.zeros(1000, device=gpu_device)
    graph, _ = run.capture(torch, lambda: [buffer.add_(1) for _ in range(300)])
    buffer.fill_(-1)
    torch.cuda.synchronize()
    before = buffer[0].item()
    run.check(torch, buffer, graph, 300)
    same(before, -1, "a capture runs nothing, so nothing is added before a replay")
    rows = run.sweep(torch, lab, 300, [256, 2**20, 2**24], 5)
    got = lab.fit(rows, 300)
    assert got.launch_us > 0 and got.replay_us > 0 and min(got.kernel_us) > 0, (
        f"launch, replay and kernel times of a real sweep are positive; came {got}"
    )
    assert got.kernel_us[2] > got.kernel_us[0], (
        f"a kernel over 2**24 elements takes longer than one over 256; came {got.kernel_us}"
    )


@pytest.mark.gpu
def test_reads_on_a_gpu(lab, gpu_device):
    import torch

    run = load("run")
    rng = random.Random(11)
    for actions in (run.SCRIPT, *(random_actions(rng) for _ in range(30))):
        for expected, came in zip(lab.reads(actions), run.play(torch, actions), strict=True):
            pairs = [(a, b) for a, b in zip(expected, came, strict=True) if a is not None]
            same(
                [b for _, b in pairs],
                [a for a, _ in pairs],
                f"a real graph of 2 * x + 1 after {actions}; the device must agree with reads()",
            )
