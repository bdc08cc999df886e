"""What lab 10-04 pins: the geometry of a burst, the loop that has none of it, the real split."""

from __future__ import annotations

import math
from itertools import pairwise

from conformance import parts
from labkit import refused, same

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (4, 4), (5, 2), (8, 3), (4, 12)]


class Budget(float):
    """A number that counts what is done with it."""

    operations = 0


def _counting(name):
    plain = getattr(float, name)

    def operation(self, *others):
        Budget.operations += 1
        return plain(self, *others)

    return operation


for _name in (
    "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__add__", "__radd__", "__sub__", "__rsub__",
    "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__float__", "__hash__",
):  # fmt: skip
    setattr(Budget, _name, _counting(_name))


def shape(grid):
    return len(grid), sorted({len(row) for row in grid})


def places(grid):
    """(tick, stage) of every visit, by microbatch, in the order of ticks."""
    found = {}
    for tick in range(len(grid[0])):
        for stage, row in enumerate(grid):
            if row[tick] is not None:
                found.setdefault(row[tick], []).append((tick, stage))
    return found


# --- a burst --------------------------------------------------------------------------------------


def test_worked_example(lab):
    same(
        lab.simulate_schedule(2, 3), [[0, 1, 2, None], [None, 0, 1, 2]],
        "2 stages, 3 microbatches: a row for each stage, a column for each tick",
    )  # fmt: skip
    same(lab.pipeline_total_ticks(4, 4), 7, "4 stages, 4 microbatches: ticks until the last is out")
    same(lab.bubble_fraction(4, 4), 12 / 28, "and idle cells of 4 x 7")


def test_total_ticks(lab):
    for p, m, expected in ((4, 1, 4), (1, 9, 9), (8, 63, 70), (8, 1, 8), (3, 2, 4), (1, 1, 1)):
        same(
            lab.pipeline_total_ticks(p, m), expected,
            f"{p} stages, {m} microbatches: the last one starts after {m - 1} ticks and takes {p}",
        )  # fmt: skip


def test_bubble_formula(lab, record_property):
    for p, m, expected in (
        (4, 1, 0.75), (4, 4, 3 / 7), (8, 1, 0.875), (8, 63, 0.1), (8, 62, 7 / 69), (1, 3, 0.0),
    ):  # fmt: skip
        same(
            lab.bubble_fraction(p, m), expected,
            f"{p} stages, {m} microbatches: idle share of all cells. (The share of the ideal time, "
            "(p - 1) / m, is another convention)",
        )  # fmt: skip
    thousand = lab.bubble_fraction(4, 1000)
    assert 0.0029 < thousand < 0.0031, (
        f"4 stages, 1,000 microbatches: expected about 0.003; came {thousand}"
    )
    record_property("measured.bubble", 100 * lab.bubble_fraction(8, 8))


def test_schedule_grid_matches_the_formula(lab):
    for p, m in SIZES:
        grid = lab.simulate_schedule(p, m)
        same(
            shape(grid), (p, [p + m - 1]), f"{p} stages, {m} microbatches: rows, and their lengths"
        )
        idle = sum(cell is None for row in grid for cell in row)
        same(
            (idle, idle / (p * (p + m - 1))), (p * (p - 1), lab.bubble_fraction(p, m)),
            f"{p} stages, {m} microbatches: idle cells, however many microbatches, and their share",
        )  # fmt: skip


def test_stage_never_runs_two_microbatches_at_once(lab):
    for p, m in SIZES:
        grid = lab.simulate_schedule(p, m)
        assert grid is not None, "simulate_schedule: expected a grid; came None"
        for batch, visits in sorted(places(grid).items()):
            expected = [(batch + stage, stage) for stage in range(p)]
            same(
                visits, expected,
                f"{p} stages, {m} microbatches: (tick, stage) of microbatch {batch}: every stage "
                "once, each after the one before (P2), as early as the stage is free (P1, P3)",
            )  # fmt: skip
        same(sorted(places(grid)), list(range(m)), f"{p} stages, {m} microbatches: who was served")


def test_min_microbatches_for_a_bubble_budget(lab, record_property):
    for p, budget, expected in (
        (2, 0.1, 9), (4, 0.1, 27), (8, 0.1, 63), (16, 0.1, 135), (8, 0.05, 133), (8, 0.01, 693),
        (1, 0.0, 1), (4, 0.75, 1), (4, 0.9, 1), (8, 0.5, 7),
    ):  # fmt: skip
        same(
            lab.min_microbatches_for_bubble(p, budget), expected,
            f"{p} stages, at most {budget} idle: a burst that meets the budget exactly will do",
        )  # fmt: skip
    record_property("measured.microbatches", lab.min_microbatches_for_bubble(8, 0.1))


def test_no_fewer_would_do(lab):
    for p, budget, expected in (
        (4, 0.2, 12), (4, 0.12, 22), (4, 0.03, 97), (4, 0.6, 2), (7, 0.24, 19),
    ):  # fmt: skip
        same(
            lab.min_microbatches_for_bubble(p, budget), expected,
            f"{p} stages, {budget}: (p - 1)(1 - b) / b comes out a hair above a whole number in "
            "floating point, and a plain ceil is one too many",
        )  # fmt: skip
    for p in range(2, 40):
        for percent in range(1, 100):
            budget = percent / 100
            m = lab.min_microbatches_for_bubble(p, budget)
            same(
                ((p - 1) / (p + m - 1) <= budget, m == 1 or (p - 1) / (p + m - 2) > budget),
                (True, True),
                f"{p} stages, {budget}: whether {m} microbatches meet it, and one fewer would not",
            )


def test_the_answer_is_computed_not_searched(lab):
    budget, Budget.operations = Budget(1e-6), 0
    m = lab.min_microbatches_for_bubble(16, budget)
    assert m == 14_999_985, f"16 stages, one in a million idle: expected 14,999,985; came {m}"
    assert Budget.operations <= 200, (
        "operations with the budget for an answer of 15 million: a formula, and a look at its "
        f"neighbours\nexpected at most 200\ncame     {Budget.operations:,}"
    )


def test_unequal_stages(lab, record_property):
    total, idle = lab.unequal_stages([1, 1, 2, 1], 8)
    same(
        (total, round(idle, 4)), (19, 0.4737),
        "times 1, 1, 2, 1, 8 microbatches: the slow stage sets the pace, the others fill and drain",
    )  # fmt: skip
    record_property("measured.straggler", total)
    even, idle_even = lab.unequal_stages([1.25] * 4, 8)
    same((even, round(idle_even, 4)), (13.75, 0.2727), "the same work, 1.25 in each stage")
    for times, m in (([3], 4), ([2, 1, 3], 1), ([1, 5, 1, 5], 3), ([4, 3, 2, 1], 6)):
        expected = sum(times) + (m - 1) * max(times)
        total, idle = lab.unequal_stages(times, m)
        same(total, expected, f"times {times}, {m} microbatches: when the last one has left")
        same(
            round(idle, 9), round(1 - m * sum(times) / (len(times) * expected), 9),
            f"times {times}, {m} microbatches: idle share of all stages",
        )  # fmt: skip
    for p, m in SIZES:
        same(
            [round(each, 9) for each in lab.unequal_stages([1] * p, m)],
            [p + m - 1, round(lab.bubble_fraction(p, m), 9)],
            f"{p} equal stages, {m} microbatches: ticks and bubble again",
        )


# --- a loop ---------------------------------------------------------------------------------------


def test_a_loop_by_its_rules(lab):
    same(
        lab.simulate_loop(2, 1, 4), [[0, None, 0, None], [None, 0, None, 0]],
        "2 stages, one batch: its next token needs the one it has just sampled",
    )  # fmt: skip
    same(
        lab.simulate_loop(2, 3, 5), [[0, 1, 2, 0, 1], [None, 0, 1, 2, 0]],
        "2 stages, 3 batches: who waits longest goes first",
    )  # fmt: skip
    for p, b in ((1, 1), (3, 1), (3, 2), (3, 3), (4, 6), (5, 3)):
        grid = lab.simulate_loop(p, b, 40)
        same(shape(grid), (p, [40]), f"{p} stages, {b} batches: rows, and their lengths")
        for batch, visits in places(grid).items():
            stages = [stage for _, stage in visits]
            same(
                stages, [place % p for place in range(len(visits))],
                f"{p} stages, {b} batches: the way of batch {batch}, around and around (P2)",
            )  # fmt: skip
            ticks = [tick for tick, _ in visits]
            same(sorted(set(ticks)), ticks, f"batch {batch}: it is in one place at a time")


def test_a_full_loop_has_no_bubble(lab, record_property):
    for p, b, expected in ((4, 1, 0.25), (4, 2, 0.5), (4, 4, 1.0), (4, 8, 1.0), (1, 1, 1.0)):
        same(
            lab.steady_state_utilization(p, b), expected,
            f"{p} stages, {b} batches in flight: more than {p} only wait",
        )  # fmt: skip
    for p in range(1, 7):
        for b in range(1, 10):
            ticks = p * b * 6
            grid = lab.simulate_loop(p, b, 3 * p + ticks)
            busy = sum(cell is not None for row in grid for cell in row[3 * p :])
            same(
                round(lab.steady_state_utilization(p, b), 9), round(busy / (p * ticks), 9),
                f"{p} stages, {b} batches: the rule, and cells that are used in your own loop (P4)",
            )  # fmt: skip
    record_property("measured.busy", 100 * lab.steady_state_utilization(4, 2))


def test_more_batches_than_stages_only_wait(lab):
    for p in range(1, 7):
        for b in range(1, 10):
            grid = lab.simulate_loop(p, b, 3 * p + 3 * max(p, b) + b)
            leaves = [tick for tick, cell in enumerate(grid[-1]) if cell == 0]
            gaps = {after - before for before, after in pairwise(leaves[1:])}
            same(
                (lab.ticks_between_tokens(p, b), gaps), (max(p, b), {max(p, b)}),
                f"{p} stages, {b} batches: ticks between tokens by the rule, and in your loop",
            )  # fmt: skip


# --- the layers -----------------------------------------------------------------------------------


def test_layers_of_each_stage(lab):
    for layers, stages, expected in (
        (10, 4, [2, 3, 3, 2]), (3, 2, [2, 1]), (5, 3, [2, 2, 1]), (8, 4, [2, 2, 2, 2]),
        (4, 1, [4]), (11, 4, [3, 3, 3, 2]), (9, 4, [2, 2, 3, 2]),
    ):  # fmt: skip
        ranges = lab.split_layers(layers, stages)
        same(
            [end - start for start, end in ranges], expected,
            f"{layers} layers on {stages} stages: who has one more (P5)",
        )  # fmt: skip


def test_the_real_split_agrees(lab):
    found = {"even": 0, "uneven": 0, "written": 0, "refused": 0}
    for case in parts.load("pp_layers"):
        layers, stages, partition = case["num_layers"], case["stages"], case["partition"]
        words = f"{layers} layers, {stages} stages" + (
            f", {partition!r}" if partition is not None else ""
        )
        if "error" in case:
            refused(lambda a=(layers, stages, partition): lab.split_layers(*a), f"{words}: it")
            found["refused"] += 1
            continue
        came = [list(each) for each in lab.split_layers(layers, stages, partition)]
        same(came, case["ranges"], f"{words}: what get_pp_indices answers on every stage")
        kind = "written" if partition is not None else "uneven" if layers % stages else "even"
        found[kind] += 1
    assert min(found.values()) >= 10, f"situations that were met: expected 10 of each; came {found}"


def test_a_stage_holds_its_share_of_the_cache(lab):
    for layers, stages in ((32, 4), (80, 8), (61, 8)):
        counts = [end - start for start, end in lab.split_layers(layers, stages)]
        same(sum(counts), layers, f"{layers} layers on {stages} stages: each once")
        assert max(counts) == math.ceil(layers / stages), (
            f"{layers} layers, {stages} stages: weights and KV go with the layers, and the fullest "
            "stage bounds both\n"
            f"expected {math.ceil(layers / stages)} layers\ncame     {max(counts)}"
        )


def test_bad_input_is_refused(lab):
    for call, why in (
        (lambda: lab.pipeline_total_ticks(0, 4), "no stage"),
        (lambda: lab.bubble_fraction(4, 0), "no microbatch"),
        (lambda: lab.simulate_schedule(-1, 2), "-1 stages"),
        (lambda: lab.min_microbatches_for_bubble(4, 0.0), "a burst without a bubble on 4 stages"),
        (lambda: lab.min_microbatches_for_bubble(4, -0.1), "a bubble below 0"),
        (lambda: lab.min_microbatches_for_bubble(0, 0.5), "no stage"),
        (lambda: lab.unequal_stages([], 2), "no stage"),
        (lambda: lab.unequal_stages([1, 0], 2), "a stage that takes no time"),
        (lambda: lab.simulate_loop(2, 0, 5), "no batch"),
        (lambda: lab.simulate_loop(2, 2, 0), "no tick"),
        (lambda: lab.steady_state_utilization(0, 1), "no stage"),
        (lambda: lab.ticks_between_tokens(1, 0), "no batch"),
        (lambda: lab.split_layers(8, 0), "no stage"),
    ):
        refused(call, why)
