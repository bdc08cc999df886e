"""Copies of experts that are sent when loads change. vLLM's:
`vllm/distributed/eplb/policy/default.py:275` `DefaultEplbPolicy.rebalance_experts`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from course.challenges.judge import Player, Wrong, wholes

TITLE = "Experts that follow their load, with few moves"
UNIT = "moves"
FEWER = True
MARKS = (("vLLM's", 1, 1), ("bronze", 1, 4), ("silver", 1, 12))

RANKS, SLOTS, EXPERTS, WINDOWS = 4, 6, 16, 8
Placement = list[list[int]]


def workload(seed: str) -> list[list[int]]:
    """Loads of the experts, window by window; the first is that of the first placement."""
    rng = random.Random(seed)
    loads = [rng.randrange(1_000, 30_000) for _ in range(EXPERTS)]
    found = [list(loads)]
    for _ in range(WINDOWS):
        for expert in range(EXPERTS):
            loads[expert] = max(500, loads[expert] * rng.randrange(85, 118) // 100 + expert)
        if rng.randrange(3) == 0:
            loads[rng.randrange(EXPERTS)] = rng.randrange(20_000, 60_000)
        found.append(list(loads))
    return found


def busiest(placed: Placement, loads: list[int]) -> Fraction:
    """The load of the busiest rank."""
    copies = Counter(expert for row in placed for expert in row)
    return max(sum((Fraction(loads[e], copies[e]) for e in row), Fraction(0)) for row in placed)


def moves(old: Placement, new: Placement) -> int:
    """Copies that ranks get and did not hold."""
    return sum((Counter(b) - Counter(a)).total() for a, b in zip(old, new, strict=True))


def policy(loads: list[int]) -> Placement:
    """vLLM's placement of loads: copies for the hottest, heaviest first onto the lightest rank."""
    copies = [1] * EXPERTS
    items = list(range(EXPERTS))
    for _ in range(RANKS * SLOTS - EXPERTS):
        hottest = max(range(EXPERTS), key=lambda e: Fraction(loads[e], copies[e]))
        copies[hottest] += 1
        items.append(hottest)
    each = [Fraction(load, count) for load, count in zip(loads, copies, strict=True)]
    placed: Placement = [[] for _ in range(RANKS)]
    weights = [Fraction(0)] * RANKS
    for expert in sorted(items, key=lambda e: -each[e]):
        rank = min((r for r in range(RANKS) if len(placed[r]) < SLOTS), key=weights.__getitem__)
        placed[rank].append(expert)
        weights[rank] += each[expert]
    return placed


def play(answer: Callable[..., Player], load: list[list[int]]) -> int:
    """Moves over all windows."""
    placed = policy(load[0])
    setup = {"ranks": RANKS, "slots": SLOTS, "experts": EXPERTS, "placement": placed}
    player, count = answer(setup), 0
    for number, loads in enumerate(load[1:], 1):
        limit = busiest(policy(loads), loads) * Fraction(21, 20)
        came = player.call("rebalance", loads, [limit.numerator, limit.denominator])
        if not isinstance(came, list) or len(came) != RANKS:
            raise Wrong(f"window {number}: need a list for each of {RANKS} ranks")
        new = [wholes("a rank's experts", row, 0, EXPERTS - 1, SLOTS) for row in came]
        if any(len(row) != SLOTS for row in new):
            raise Wrong(f"window {number}: each rank needs {SLOTS} experts")
        missing = set(range(EXPERTS)).difference(*new)
        if missing:
            raise Wrong(f"window {number}: no rank holds expert {min(missing)}")
        if (load_of := busiest(new, loads)) > limit:
            raise Wrong(
                f"window {number}: the busiest rank has {float(load_of):.1f}, the limit is "
                f"{float(limit):.1f}"
            )
        count += moves(placed, new)
        placed = new
    return count


def _moved(load: list[list[int]], place: Callable[[list[int], Placement], Placement]) -> int:
    placed, count = place(load[0], []), 0
    for loads in load[1:]:
        new = place(loads, placed)
        count, placed = count + moves(placed, new), new
    return count


def vllm(load: list[list[int]]) -> int:
    """Moves of vLLM's policy."""
    return _moved(load, lambda loads, _: policy(loads))


def real() -> Callable[[list[list[int]]], int]:
    """The same by the pinned tree's own policy."""
    import torch
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    def place(loads: list[int], old: Placement) -> Placement:
        weight = torch.tensor([loads], dtype=torch.float32)
        before: Any = torch.tensor([[e for row in old for e in row]]) if old else None
        found = DefaultEplbPolicy.rebalance_experts(weight, RANKS * SLOTS, 1, 1, RANKS, before)
        flat = found[0].tolist()
        return [flat[at : at + SLOTS] for at in range(0, RANKS * SLOTS, SLOTS)]

    return lambda load: _moved(load, place)
