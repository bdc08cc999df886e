"""Record the KV-cache manager of the real v0.22.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Case = dict[str, Any]
EOS = 2

ABOUT = (
    '`{"num_blocks", "block_size", "enable_caching", "prompts", "ops": [{"op", "request", '
    "...}]}`. Ops: `lookup` -> hit ids; `admit n` (adopt the hits, then n more tokens) and "
    "`extend n` -> ids of the new blocks, or None when refused; `append token`; `free` "
    "(computed tokens go to 0). After each op: `free`, `refs`, `hashed` (ids of blocks with a "
    "hash) and `tables`."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from conformance import real

    rng = random.Random(4)
    for sequence in range(60):
        size, num_blocks = rng.choice((2, 4)), rng.choice((6, 8, 12, 20))
        caching = sequence % 6 != 0
        config = {
            "num_blocks": num_blocks, "block_size": size, "enable_prefix_caching": caching,
            "max_num_seqs": 8, "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0,
            "enable_chunked_prefill": True, "max_model_len": 64, "policy": "fcfs",
        }  # fmt: skip
        manager = real.make_scheduler(config).kv_cache_manager
        shared = rng.choices(range(3, 6), k=4 * size)
        prompts = [
            shared[: rng.randint(1, len(shared))] + rng.choices(range(3, 6), k=rng.randint(0, size))
            for _ in range(5)
        ]
        requests = [
            real.make_request(
                {"request_id": f"r{index}", "prompt_token_ids": prompt, "max_tokens": 40,
                 "priority": 0, "arrival_time": 0.0, "ignore_eos": True},
                size, EOS,
            )
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        ops = []
        for _ in range(50):
            index = rng.randrange(len(requests))
            request = requests[index]
            table = manager.get_block_ids(request.request_id)[0]
            left = request.num_tokens - request.num_computed_tokens
            argument, result = None, None
            if not table:
                op = rng.choice(("lookup", "admit", "admit"))
                hits, num_cached = manager.get_computed_blocks(request)
                if op == "lookup":
                    result = list(hits.get_block_ids()[0])
                else:
                    argument = rng.randint(1, request.num_tokens - num_cached)
                    new = manager.allocate_slots(request, argument, num_cached, hits)
                    if new is not None:
                        result = list(new.get_block_ids()[0])
                        request.num_computed_tokens = num_cached + argument
            elif rng.random() < 0.25:
                op = "free"
                manager.free(request)
                request.num_computed_tokens = 0
            elif left:
                op, argument = "extend", rng.randint(1, left)
                new = manager.allocate_slots(request, argument)
                if new is not None:
                    result = list(new.get_block_ids()[0])
                    request.num_computed_tokens += argument
            else:
                op, argument = "append", rng.randrange(3, 6)
                request.append_output_token_ids(argument)
            pool = manager.block_pool
            ops.append(
                {
                    "op": op,
                    "request": index,
                    "argument": argument,
                    "result": result,
                    "free": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
                    "refs": [block.ref_cnt for block in pool.blocks],
                    "hashed": [b.block_id for b in pool.blocks if b.block_hash is not None],
                    "tables": [list(manager.get_block_ids(r.request_id)[0]) for r in requests],
                }
            )
        yield {
            "num_blocks": num_blocks,
            "block_size": size,
            "enable_caching": caching,
            "prompts": prompts,
            "ops": ops,
        }
