"""What lab 15-05 pins: work and waiting of a routed trace, counted, and where simple routers lose.

`MOONCAKE_TRACE=FILE` besides runs a part of Mooncake's own trace; without it that test is skipped.
"""

from __future__ import annotations

import os
import random
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

from labkit import same
from labkit.modules import sibling

fleet = sibling(__file__, "fleet")
RECORDINGS = Path(__file__).parent / "recordings"
KINDS = ("chat", "hot")


class By:
    """A function as a router."""

    def __init__(self, choose):
        self.choose = choose


class RoundRobin:
    def __init__(self):
        self.last = -1

    def choose(self, arrival, reports):
        self.last += 1
        return self.last % len(reports)


@cache
def trace(kind):
    return fleet.load(RECORDINGS / f"{kind}.jsonl.gz")


def by_prefix(arrival, reports):
    best, most = 0, -1
    for engine, report in enumerate(reports):
        hits = 0
        while hits < len(arrival.hash_ids) and arrival.hash_ids[hits] in report.held:
            hits += 1
        if hits > most:
            best, most = engine, hits
    return best


def by_load(arrival, reports):
    queues = [report.queued_tokens for report in reports]
    return queues.index(min(queues))


@cache
def others(kind):
    """The scores of the four."""
    made = {
        "by_prefix": By(by_prefix), "by_load": By(by_load), "round-robin": RoundRobin(),
        "the mini engine's": fleet.Peer("both"),
    }  # fmt: skip
    return {name: fleet.play(trace(kind), routes) for name, routes in made.items()}


def best(kind, count):
    return min((getattr(score, count), name) for name, score in others(kind).items())


def arrival(hash_ids, time_s=0.5):
    return fleet.Arrival(time_s, tuple(hash_ids), len(hash_ids) * 512 - 7)


def report(held=(), queued=0.0, time_s=0.0):
    return fleet.Report(time_s, frozenset(held), queued)


def test_worked_example(lab):
    """Either half of the question answered alone."""
    prompt = arrival(range(10), 0.0)
    for held, queues, expected, why in (
        ({1: range(8)}, (0, 0, 0), 1, "all are idle, engine 1 has 8 of 10 blocks"),
        ({1: range(8)}, (0, 90_000, 0), 0, "engine 1 has 8 blocks and 90,000 tokens to compute"),
        ({}, (900, 500, 700), 1, "no engine has anything"),
        ({0: range(9), 2: range(4)}, (2_000, 9_000, 0), 0, "2,000 tokens of waiting save 2,560"),
    ):
        reports = [report(held.get(e, ()), queues[e]) for e in range(3)]
        same(lab.Balanced().choose(prompt, reports), expected, f"{why}: which engine?")


def test_a_prefix_begins_at_the_front(lab):
    """Blocks that are held behind a gap counted as found."""
    prompt = arrival(range(10))
    reports = [report(range(1, 10)), report(range(2), 512)]
    same(
        lab.Balanced().choose(prompt, reports), 1,
        "engine 0 has blocks 1 to 9 and not block 0: nothing of it can be used",
    )  # fmt: skip


def test_it_remembers_what_it_has_sent(lab):
    """The same stale report read again and again: everybody goes to the same engine."""
    of, chosen = lab.Balanced(), []
    for number in range(4):
        reports = [report(queued=100.0 * e) for e in range(4)]
        chosen.append(of.choose(arrival(range(100 * number, 100 * number + 20)), reports))
    same(sorted(chosen), [0, 1, 2, 3], "four long prompts before the next report (R2)")
    again = of.choose(arrival([*range(100, 120), 7]), reports)
    same(again, chosen[1], "a prompt that goes on with the second one: no report says so yet (R1)")


def test_a_report_is_news_once(lab):
    """What was sent is counted on top of a report that has it."""
    of = lab.Balanced()
    first = of.choose(arrival(range(20), 0.5), [report(), report(queued=900.0)])
    same(first, 0, "engine 0 is idle")
    reports = [report(range(20), 0.0, 4.0), report((), 900.0, 4.0)]
    same(of.choose(arrival(range(50, 60), 4.1), reports), 0, "and so it is in the next report")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_work_and_waiting(lab, kind):
    """One of the two saved at the other's price."""
    score = fleet.play(trace(kind), lab.Balanced())
    rows = {"yours": score, **others(kind)}
    shown = "\n".join(
        f"  {n:18} {s.computed:>10,} computed {s.worst_queue:>10,.0f} worst queue  {s.sent}"
        for n, s in rows.items()
    )
    least, name = best(kind, "computed")
    assert score.computed <= 1.1 * least, (
        f"{kind}: at most a tenth more than {name} (R1)\nexpected at most {1.1 * least:,.0f} "
        f"computed tokens\ncame     {score.computed:,}\n{shown}"
    )
    least, name = best(kind, "worst_queue")
    assert score.worst_queue <= 1.25 * least, (
        f"{kind}: at most a quarter longer than that of {name} (R2)\nexpected at most "
        f"{1.25 * least:,.0f}\ncame     {score.worst_queue:,.0f}\n{shown}"
    )


class Counted(Set):
    """What an engine holds, and how often it is asked."""

    def __init__(self, held):
        self.held, self.asked, self.walked = frozenset(held), 0, 0

    def __contains__(self, block):
        self.asked += 1
        return block in self.held

    def __iter__(self):
        self.walked += 1
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_a_choice_costs_its_own_blocks(lab):
    """A report of thousands of blocks copied or merged for every prompt."""
    of = lab.Balanced()
    sets = [Counted(range(e * 10, 5_000)) for e in range(4)]
    reports = [fleet.Report(0.0, each, 0.0) for each in sets]
    for number in range(50):
        of.choose(arrival(range(12), 0.5 + number / 100), reports)
    most = max(each.asked for each in sets)
    assert most <= 50 * 12, (
        f"look-ups in one report for 50 prompts of 12 blocks (R3)\nexpected at most 600\n"
        f"came     {most}"
    )
    same([each.walked for each in sets], [0] * 4, "walks through a report of 5,000 blocks (R3)")


def test_by_prefix_and_by_load(lab):
    """A peer that is not what its name says."""
    rng = random.Random(5)
    for _ in range(200):
        prompt = arrival([rng.randint(0, 3) for _ in range(rng.randint(1, 6))])
        reports = [
            report({rng.randint(0, 3) for _ in range(3)}, rng.choice((0.0, 5.0, 9.0)))
            for _ in range(4)
        ]
        said = (
            f"prompt {prompt.hash_ids}, reports {[(set(r.held), r.queued_tokens) for r in reports]}"
        )
        same(lab.by_prefix(prompt, reports), by_prefix(prompt, reports), f"by_prefix: {said}")
        same(lab.by_load(prompt, reports), by_load(prompt, reports), f"by_load: {said}")


def test_where_simple_routers_lose(lab, record_property):
    """A rule of thumb that was never counted."""
    lost = {name: set() for name in ("by_prefix", "by_load", "round-robin")}
    for kind in KINDS:
        for count in ("computed", "worst_queue"):
            least, _ = best(kind, count)
            for name in lost:
                if getattr(others(kind)[name], count) >= 2 * least:
                    lost[name].add((kind, count))
    came = lab.where_it_loses()
    for name, expected in lost.items():
        same(set(came[name]), expected, f"{name}: twice the best one's or more, on which, of what")
    record_property("measured.stuck", others("hot")["by_prefix"].sent[0])
    ratio = others("hot")["by_load"].worst_queue / others("hot")["round-robin"].worst_queue
    record_property("measured.herd", "longer" if ratio > 1.2 else "shorter")


REAL = os.environ.get("MOONCAKE_TRACE", "")


@pytest.mark.skipif(not REAL, reason="MOONCAKE_TRACE names no trace of Mooncake's")
def test_on_a_real_trace(lab):
    """A router that is fitted to two samples."""
    arrivals = fleet.load(Path(REAL), 1500)
    settings = {"cache_blocks": 2_000, "num_engines": 8}
    score = fleet.play(arrivals, lab.Balanced(), **settings)
    simple = (By(by_prefix), By(by_load), RoundRobin())
    peers = [fleet.play(arrivals, routes, **settings) for routes in simple]
    least = min(peer.computed for peer in peers), min(peer.worst_queue for peer in peers)
    came = score.computed, score.worst_queue
    assert came[0] <= least[0] and came[1] <= least[1], (
        f"computed tokens and worst queue against the best of three simple routers\n"
        f"expected at most {least}\ncame     {came}"
    )
