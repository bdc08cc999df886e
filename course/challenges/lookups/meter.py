"""Looks at the prefix cache's index. vLLM's: `vllm/v1/core/single_type_kv_cache_manager.py:483`
`FullAttentionManager.find_longest_cache_hit`, which looks until one is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from course.challenges.judge import Player, Wrong, whole
from mini_vllm.block_pool import BlockPool

TITLE = "How much of a prompt is cached, with few looks"
UNIT = "looks"
FEWER = True
MARKS = (("vLLM's", 1, 1), ("bronze", 1, 4), ("silver", 1, 10))

PROMPTS, CAPACITY = 90, 900


def cache(pool: Any, blocks: list[int]) -> int:
    """Serve a prompt alone through a pool; how many of its leading blocks were cached."""
    hits = []
    for block in blocks:
        held = pool.get_cached_block(block)
        if held is None:
            break
        hits.append(held)
    pool.touch(hits)
    new = pool.get_new_blocks(len(blocks) - len(hits))
    pool.cache_full_blocks(new, blocks[len(hits) :])
    pool.free_blocks(reversed([*hits, *new]))
    return len(hits)


def workload(seed: str) -> list[list[Any]]:
    """Per prompt `[blocks, hits]`; every second client's prompts are left out."""
    rng = random.Random(seed)
    names = iter(rng.sample(range(10**9), 60_000))
    systems = [[next(names) for _ in range(rng.randrange(4, 40))] for _ in range(4)]
    talks: list[tuple[bool, list[int]]] = []
    pool = BlockPool(CAPACITY + 1)
    found: list[list[Any]] = []
    while len(found) < PROMPTS:
        if len(talks) < 6 or rng.randrange(4) == 0:
            system = rng.choice(systems) if rng.randrange(5) else []
            talks.append((rng.randrange(2) == 0, list(system)))
            if len(talks) > 24:
                talks.pop(0)
        shown, blocks = rng.choice(talks[-12:])
        blocks += [next(names) for _ in range(rng.choice((1, 2, 4, 9, 30)))]
        if len(blocks) > 400:
            talks.remove((shown, blocks))
            continue
        hits = cache(pool, blocks)
        if shown:
            found.append([list(blocks), hits])
    return found


def play(answer: Callable[..., Player], load: list[list[Any]]) -> int:
    """Calls of `cached`."""
    count, known = 0, dict[int, bool]()

    def cached(block: Any) -> bool:
        nonlocal count
        count += 1
        if type(block) is not int or block not in known:
            raise ValueError(f"cached({block!r}): need a block of this prompt")
        return known[block]

    player = answer({}, cached=cached)
    for number, (blocks, hits) in enumerate(load):
        known = {block: place < hits for place, block in enumerate(blocks)}
        came = player.call("hits", blocks)
        if whole("hits()", came, 0, len(blocks)) != hits:
            raise Wrong(f"prompt {number}: hits() gave {came} of {len(blocks)}: need {hits}")
    return count


def vllm(load: list[list[Any]]) -> int:
    """vLLM's looks."""
    return sum(min(hits + 1, len(blocks)) for blocks, hits in load)


def real() -> Callable[[list[list[Any]]], int]:
    """The same by the pinned tree's own loop, over an index that counts."""
    import torch
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=torch.float32)

    def looks(load: list[list[Any]]) -> int:
        count = 0
        for blocks, hits in load:
            held = set(blocks[:hits])

            def look(block: int, groups: list[int], held: set[int] = held) -> list[Any] | None:
                nonlocal count
                count += 1
                return [block] if block in held else None

            found = FullAttentionManager.find_longest_cache_hit(
                blocks, len(blocks), [0], SimpleNamespace(get_cached_block=look), spec, False, 1
            )
            assert len(found[0]) == hits
        return count

    return looks
