"""What lab 18-04 pins: features with a meaning, prices that are not negative, and a hull."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from labkit import refused, same
from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import LinearCost, StepWork, nonnegative_least_squares
from mini_vllm.simulate.cost import fit as our_fit
from mini_vllm.simulate.simulator import Simulator
from mini_vllm.simulate.traces import TraceRequest

FILE = Path(__file__).parent / "recordings" / "h100-llama-8b.json"
MACHINE = (6e-3, 2e-5, 1e-9, 4e-7)
"""A made-up machine: seconds per step, token, pair and key."""


@functools.cache
def cases():
    """(name, rows, times) of an 8 B model on an H100; the file says how it was timed."""
    return list(_measured())


def _measured():
    found = json.loads(FILE.read_text(encoding="utf-8"))
    before = found["decode_context"]
    for batch, times in found["decode_ms"].items():
        yield f"decode {batch}", ((1, before),) * int(batch), [each / 1e3 for each in times]
    for shape, times in found["prefill_s"].items():
        batch, length = map(int, shape.split("x"))
        yield f"prefill {shape}", ((length, 0),) * batch, times


def drawn(lab, seed, count=60, machine=MACHINE, noise=0.0):
    """Steps of the made-up machine."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        rows = [(1, draw.randint(1, 4000)) for _ in range(draw.randint(0, 64))]
        rows += [(draw.randint(2, 2000), draw.randint(0, 4000)) for _ in range(draw.randint(0, 2))]
        rows = rows or [(1, 7)]
        time = sum(p * f for p, f in zip(machine, by_hand(rows), strict=True))
        found.append(lab.Timed(tuple(rows), time * (1 + draw.uniform(-noise, noise))))
    return found


def by_hand(rows):
    """The features, token by token."""
    pairs = sum(before + i + 1 for new, before in rows if new > 1 for i in range(new))
    return (1, sum(new for new, _ in rows), pairs, sum(b + 1 for new, b in rows if new == 1))


def test_worked_example(lab):
    """Pairs without the diagonal, or a decode counted among the prefills."""
    same(lab.features([(100, 0), (1, 50), (1, 9)]), (1, 102, 5050, 61), "a prefill, two decodes")
    same(lab.features([(16, 32)]), (1, 16, 648, 0), "a chunk of 16 behind 32")
    same(lab.features([(1, 0)]), (1, 1, 0, 1), "a prompt of one token is one key")
    for step in drawn(lab, 1, 30):
        same(lab.features(step.rows), by_hand(step.rows), f"features of {step.rows}")
    refused(lambda: lab.features([]), "a step without rows")
    refused(lambda: lab.features([(0, 4)]), "a row without a new token")
    refused(lambda: lab.features([(3, -1)]), "a negative number")


def test_a_machine_is_found_again(lab):
    """Prices that are not those of the machine that made the times."""
    for seed in range(4):
        cost = lab.fit(drawn(lab, seed))
        for name, got, expected in zip(lab.FEATURES, cost.prices, MACHINE, strict=True):
            assert got == pytest.approx(expected, rel=1e-6), (
                f"seed {seed}, price of {name}\nexpected {expected}\ncame     {got}"
            )


def test_no_price_is_negative(lab):
    """A negative price, which makes a larger step faster; or one cut to 0 after the fit."""
    rng = np.random.default_rng(3)
    for _ in range(40):
        table = rng.uniform(0, 1, (12, 4))
        target = table @ rng.uniform(-1, 2, 4) + rng.normal(0, 0.1, 12)
        x, best = lab.nonnegative(table, target), nonnegative_least_squares(table, target)
        assert np.all(np.asarray(x) >= 0), f"no x below 0\ncame     {x}"
        least = np.linalg.norm(table @ best - target)
        came = np.linalg.norm(table @ x - target)
        assert came <= least * (1 + 1e-9) + 1e-12, (
            f"|table @ x - target| of the best x of 0 or more\nexpected {least}\ncame     {came}"
        )
    empty = np.column_stack([np.ones(5), np.zeros(5)])
    same(lab.nonnegative(empty, np.ones(5)).tolist()[1], 0, "a column of zeros has a price of 0")


def test_short_steps_count_as_much(lab):
    """Squared seconds: a prefill of a second outweighs a thousand decodes."""
    for steps in (drawn(lab, 9, noise=0.1), [lab.Timed(r, t) for _, r, ts in cases() for t in ts]):
        works = []
        for step in steps:
            work = StepWork()
            for new, before in step.rows:
                work.add(new, before)
            works.append((work, step.seconds))
        theirs = our_fit(works, "beside yours")

        def error(prices, steps=steps):
            table = np.array([by_hand(step.rows) for step in steps], float)
            return np.mean((table @ prices / [step.seconds for step in steps] - 1) ** 2)

        least = error(np.array(list(theirs.terms.values())))
        came = error(np.array(lab.fit(steps).prices))
        assert came <= least * (1 + 1e-6), (
            f"mean squared relative error\nexpected {least:.3g} at most\ncame     {came:.3g}"
        )


def test_outside_the_hull_it_refuses(lab):
    """An extrapolation that looks like a prediction."""
    steps = [lab.Timed(((1, 40),) * n, 1e-3 * n) for n in range(1, 17)]
    cost = lab.fit(steps)
    assert cost.seconds([(1, 40)] * 16) > 0, "the largest fitted step is inside"
    assert cost.seconds([(1, 40)]) > 0, "the smallest fitted step is inside"
    for rows, name in (
        ([(1, 40)] * 17, "tokens"), ([(1, 900)], "decode_context"), ([(2, 0)], "prefill_pairs"),
        ([(1, 3)], "decode_context"),
    ):  # fmt: skip
        try:
            came = f"{cost.seconds(rows)} seconds"
        except ValueError as error:
            came = str(error)
        assert name in came, (
            f"{rows[:2]}...: a ValueError that names {name}, which was fitted on other values\n"
            f"came     {came}"
        )


def test_held_out_steps_of_an_h100(lab, record_property):
    """Prices that fit what they saw, and nothing else."""
    held = ("decode 64", "prefill 1x2048")
    steps = [lab.Timed(rows, t) for name, rows, times in cases() if name not in held for t in times]
    cost = lab.fit(steps)
    for name, rows, times in cases():
        if name in held:
            error = cost.seconds(rows) / median(times) - 1
            assert abs(error) <= 0.05, (
                f"{name}, which was not fitted: measured {median(times) * 1e3:.2f} ms\n"
                f"expected a prediction within 5 %\ncame     {error:+.1%}"
            )
    same(cost.prices[3], 0, "48 keys a row cost nothing that can be told from the row itself")
    record_property("measured.floor", cost.prices[0] * 1e3)
    record_property("measured.token", cost.prices[1] * 1e6)


def test_time_to_first_token_by_budget(lab):
    """A chunk that forgets what stands before it."""
    cost = lab.Cost(MACHINE, (0.0,) * 4, (1e12,) * 4)
    same_machine = LinearCost(
        dict(zip(("step", "tokens", "prefill_pairs", "decode_context"), MACHINE, strict=True)),
        "made up",
    )
    for prompt, budget in ((96, 32), (100, 32), (700, 2048), (513, 512), (1, 8)):
        config = {"num_blocks": 200, "max_num_batched_tokens": budget, "max_num_seqs": 1}
        simulator = Simulator(EngineConfig.of(config), same_machine)
        expected = simulator.run([TraceRequest(0.0, prompt, 2)]).outcomes[0].ttft
        came = lab.time_to_first_token(cost, prompt, budget)
        assert came == pytest.approx(expected, rel=1e-9), (
            f"a prompt of {prompt}, budget {budget}: the simulator's TTFT\n"
            f"expected {expected}\ncame     {came}"
        )
    refused(lambda: lab.time_to_first_token(cost, 0, 8), "a prompt of 0 tokens")
    refused(lambda: lab.time_to_first_token(cost, 8, -1), "a budget of -1")
    small = lab.Cost(MACHINE, (0.0,) * 4, (1.0, 64.0, 1e9, 1e9))
    refused(lambda: lab.time_to_first_token(small, 96, 96), "a step above the hull")


def test_what_cannot_be_fitted(lab):
    """A fit on too few steps, or on a time of 0."""
    few = drawn(lab, 2, 11)
    refused(lambda: lab.fit(few), "11 steps for four prices")
    assert lab.fit(drawn(lab, 2, 12)).prices, "12 steps are three per price"
    refused(lambda: lab.fit([*drawn(lab, 2), lab.Timed(((1, 1),), 0.0)]), "a step of 0 seconds")
    nan = lab.Timed(((1, 1),), float("nan"))
    refused(lambda: lab.fit([*drawn(lab, 2), nan]), "a step that was not timed")
