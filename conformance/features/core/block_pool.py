"""Record the block pool of the real v0.22.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"num_blocks", "enable_caching", "ops": [{"op", "args", "result", "free", ...}]}`. Ops: '
    '`get_new_blocks [n]` -> ids or "ValueError"; `touch [ids]`; `free_blocks [ids]`; '
    "`cache_full_blocks [ids, contents]`; `get_cached_block [content]` -> id or None. A content "
    "is a small int that stands for a prefix hash. After each op: `free` (the queue, front "
    "first), `refs` (per block) and `contents` (per block, None without a hash)."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.v1.core.block_pool import BlockPool

    rng = random.Random(3)
    for sequence in range(60):
        caching = sequence % 5 != 0
        num_blocks = rng.choice((3, 5, 8, 12))
        pool = BlockPool(num_blocks, caching, hash_block_size=1)
        held: list[int] = []  # one entry per reference
        ops: list[dict[str, Any]] = []

        def note(op: str, args: list[Any], result: Any, pool: Any = pool, ops: Any = ops) -> None:
            ops.append({"op": op, "args": args, "result": result, **_pool_state(pool)})

        for _ in range(40):
            op = rng.choice(("get", "get", "free", "free", "cache", "cache", "lookup", "lookup"))
            if op == "get":
                count = rng.randint(1, 4)
                try:
                    ids = [block.block_id for block in pool.get_new_blocks(count)]
                except ValueError:
                    note("get_new_blocks", [count], "ValueError")
                else:
                    held += ids
                    note("get_new_blocks", [count], ids)
            elif op == "free" and held:
                once = list(dict.fromkeys(held))  # a table never holds a block twice
                ids = rng.sample(once, rng.randint(1, len(once)))
                for block_id in ids:
                    held.remove(block_id)
                pool.free_blocks([pool.blocks[block_id] for block_id in ids])
                note("free_blocks", [ids], None)
            elif op == "cache" and caching:
                fresh = [b for b in dict.fromkeys(held) if pool.blocks[b].block_hash is None]
                contents = [rng.randrange(1, 7) for _ in fresh]
                owner = SimpleNamespace(block_hashes=[bytes([value]) * 8 for value in contents])
                blocks = [pool.blocks[block_id] for block_id in fresh]
                pool.cache_full_blocks(owner, blocks, 0, len(blocks), 1, 0)
                note("cache_full_blocks", [fresh, contents], None)
            elif op == "lookup" and caching:
                content = rng.randrange(1, 7)
                found = pool.get_cached_block(bytes([content]) * 8, [0])
                note("get_cached_block", [content], found[0].block_id if found else None)
                if found:
                    held.append(found[0].block_id)
                    pool.touch(found)
                    note("touch", [[found[0].block_id]], None)
        yield {"num_blocks": num_blocks, "enable_caching": caching, "ops": ops}


def _pool_state(pool: Any) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_utils import get_block_hash

    return {
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "refs": [block.ref_cnt for block in pool.blocks],
        "contents": [
            get_block_hash(block.block_hash)[0] if block.block_hash else None
            for block in pool.blocks
        ],
    }
