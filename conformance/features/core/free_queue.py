"""Record the free queue of the real v0.22.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"num_blocks", "ops": [{"op", "block", "result", "free"}]}`. `op` is popleft, append or '
    "remove; `block` its argument. `result` is the id popped, None, or the name of the "
    "exception; `free` is the queue afterwards, front first."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

    rng = random.Random(2)
    for num_blocks in (1, 2, 3, 5, 8, 12) * 5:
        blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        queue = FreeKVCacheBlockQueue(blocks)
        out: set[int] = set()
        ops: list[dict[str, Any]] = []
        for _ in range(40):
            op = rng.choice(("popleft", "popleft", "append", "remove"))
            block: Any = None
            result: Any = None
            if op == "append":
                if not out:
                    continue
                block = rng.choice(sorted(out))
                queue.append(blocks[block])
                out.discard(block)
            else:
                if op == "remove":
                    block = rng.randrange(num_blocks)
                try:
                    if op == "popleft":
                        result = queue.popleft().block_id
                        out.add(result)
                    else:
                        queue.remove(blocks[block])
                        out.add(block)
                except (ValueError, RuntimeError) as error:
                    result = type(error).__name__
            free = [entry.block_id for entry in queue.get_all_free_blocks()]
            ops.append({"op": op, "block": block, "result": result, "free": free})
        yield {"num_blocks": num_blocks, "ops": ops}
