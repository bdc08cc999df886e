"""Tokens of padding on captured sizes. vLLM's: the default ladder of
`vllm/config/vllm.py:1597` `VllmConfig._set_cudagraph_sizes`, up to `max_num_seqs`.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from course.challenges.judge import Player, Wrong, wholes
from mini_vllm.compilation.graphs import default_capture_sizes

TITLE = "Which sizes of a CUDA graph to capture for your traffic"
UNIT = "tokens of padding"
FEWER = True
MARKS = (("vLLM's", 1, 1), ("bronze", 3, 4), ("silver", 1, 2))

SEATS, STEPS, TOKENS = 128, 4000, 8192
MOST = sum(size <= SEATS for size in default_capture_sizes(SEATS, TOKENS))
"""Sizes that vLLM's ladder has up to `SEATS`: each costs memory and a capture."""


def workload(seed: str) -> dict[str, list[int]]:
    """Decoding requests of each step, in the past and later: tenants that come and go."""
    rng = random.Random(seed)
    tenants = [
        (rng.randrange(6, 40), rng.randrange(1, 4), rng.randrange(20, 300)) for _ in range(3)
    ]
    present = [rng.randrange(2) == 0 for _ in tenants]
    found = []
    for _ in range(2 * STEPS):
        running = 0
        for place, (usual, spread, stays) in enumerate(tenants):
            if rng.randrange(stays) == 0:
                present[place] = not present[place]
            if present[place]:
                running += max(0, usual + rng.randrange(-spread, spread + 1))
        if rng.randrange(100) == 0:
            running += rng.randrange(60)
        found.append(min(SEATS, max(1, running)))
    return {"past": found[:STEPS], "later": found[STEPS:]}


def padding(sizes: Sequence[int], batches: Sequence[int]) -> int:
    """Tokens that steps of these batches carry for nothing."""
    ladder = sorted(sizes)
    return sum(ladder[bisect_left(ladder, batch)] - batch for batch in batches)


def play(answer: Callable[..., Player], load: dict[str, list[int]]) -> int:
    """The padding of the later steps."""
    player = answer({"past": load["past"], "most": MOST, "max_num_seqs": SEATS})
    sizes = wholes("sizes()", player.call("sizes"), 1, SEATS, MOST)
    if SEATS not in sizes:
        raise Wrong(f"sizes() ends at {max(sizes, default=0)}: need {SEATS}, the largest batch")
    return padding(sizes, load["later"])


def vllm(load: dict[str, list[int]]) -> int:
    """vLLM's padding."""
    ladder = default_capture_sizes(SEATS, TOKENS)
    return padding([size for size in ladder if size <= SEATS], load["later"])


def real() -> Callable[[Any], int]:
    """The same on the ladder that the pinned tree makes."""
    from conformance.features.cudagraph.cudagraph_modes import ladder

    sizes = [size for size in ladder(SEATS, TOKENS) if size <= SEATS]
    return lambda load: padding(sizes, load["later"])
