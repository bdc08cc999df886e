"""Hits of a prefix cache under an eviction policy of one's own. vLLM's:
`vllm/v1/core/block_pool.py:333` `BlockPool.get_new_blocks`, the front of the queue of free blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from course.challenges.judge import Player, Wrong, wholes
from course.challenges.lookups.meter import cache
from mini_vllm.block_pool import BlockPool

TITLE = "Which blocks a full prefix cache gives up"
UNIT = "hits"
FEWER = False
MARKS = (("bronze", 9, 10), ("vLLM's", 1, 1), ("silver", 21, 20))

REQUESTS = 500


def workload(seed: str) -> dict[str, Any]:
    """`{"capacity", "requests": [block ids]}`: conversations, and documents read once."""
    rng = random.Random(seed)
    last = 0

    def new(count: int) -> list[int]:
        nonlocal last
        last += count
        return list(range(last - count, last))

    systems = [new(rng.randrange(8, 24)) for _ in range(6)]
    talks: list[list[int]] = []
    requests: list[list[int]] = []
    while len(requests) < REQUESTS:
        draw = rng.randrange(100)
        if draw < 30:
            requests.append(new(rng.choice((20, 40, 80))))  # a document, once
        elif draw < 50 or not talks:
            talks.append([*rng.choice(systems), *new(rng.choice((2, 4, 8)))])
            requests.append(list(talks[-1]))
        else:
            talk = talks[-1 - min(len(talks) - 1, rng.choice((0, 1, 1, 2, 4, 8, 16, 24)))]
            talk += new(rng.choice((1, 2, 4, 8)))
            requests.append(list(talk))
    return {"capacity": 700, "requests": requests}


def of_trace(rows: list[list[int]], capacity: int) -> dict[str, Any]:
    """A workload of a trace's `hash_ids`."""
    return {"capacity": capacity, "requests": rows}


def play(answer: Callable[..., Player], load: dict[str, Any]) -> int:
    """Blocks that led their prompt and were cached."""
    capacity, cached, hits = load["capacity"], set[int](), 0
    player = answer({"capacity": capacity})
    for number, blocks in enumerate(load["requests"]):
        own = set(blocks)
        lead = 0
        while lead < len(blocks) and blocks[lead] in cached:
            lead += 1
        hits += lead
        needed = max(0, len(cached | own) - capacity)
        gone = wholes("evict()", player.call("evict", blocks, needed), 0, 2**62, needed)
        unfit = [block for block in gone if block not in cached or block in own]
        if unfit:
            raise Wrong(
                f"request {number}: evict() gave block {unfit[0]}: need cached blocks that the "
                "prompt itself does not use"
            )
        if len(set(gone)) != needed:
            raise Wrong(
                f"request {number}: evict() gave {len(set(gone))} different blocks: need {needed}"
            )
        cached = cached.difference(gone) | own
    return hits


def vllm(load: dict[str, Any]) -> int:
    """Hits of vLLM's queue of free blocks."""
    pool = BlockPool(load["capacity"] + 1)
    return sum(cache(pool, blocks) for blocks in load["requests"])


def real() -> Callable[[dict[str, Any]], int]:
    """The same by the pinned tree's own pool."""
    from types import SimpleNamespace

    from vllm.v1.core.block_pool import BlockPool as Real

    class Adapted:
        def __init__(self, num_blocks: int) -> None:
            self.pool = Real(num_blocks, True, 1)
            self.touch, self.get_new_blocks = self.pool.touch, self.pool.get_new_blocks
            self.free_blocks = self.pool.free_blocks

        def get_cached_block(self, block: int) -> Any:
            found = self.pool.get_cached_block(_hash(block), [0])
            return found[0] if found else None

        def cache_full_blocks(self, new: list[Any], blocks: list[int]) -> None:
            request = SimpleNamespace(block_hashes=[_hash(block) for block in blocks])
            self.pool.cache_full_blocks(request, new, 0, len(new), 1, 0)

    def hits(load: dict[str, Any]) -> int:
        pool = Adapted(load["capacity"] + 1)
        return sum(cache(pool, blocks) for blocks in load["requests"])

    return hits


def _hash(block: int) -> bytes:
    return block.to_bytes(8, "big")
