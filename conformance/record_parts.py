"""Record the real parts around the scheduler: one small file each, replayed by `test_parts.py`.

    PYTHONHASHSEED=0 python -m conformance.record_parts --out conformance/recordings/parts

Needs the pinned tree on `PYTHONPATH`. Every file is `{"upstream", "part", "about", "cases"}`; what
a case holds is said by the function that records it. `parts.load` reads them.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from conformance import parts

Case = dict[str, Any]
EOS, STOP, OTHER = 2, 5, 7


def block_hashing() -> Iterator[Case]:
    """`{"block_size", "requests": [{"token_ids", "lora", "cache_salt"}], "hashes": [[hex]]}`.

    One list of hashes per request, one hash per full block. Only equality means anything: the
    root of the chain is random unless PYTHONHASHSEED is set.
    """
    from vllm.lora.request import LoRARequest

    from conformance import real

    rng = random.Random(1)
    real.init_none_hash(real.sha256)
    for _ in range(60):
        block_size = rng.choice((1, 2, 4, 16))
        shared = rng.choices(range(3), k=5 * block_size)
        requests, hashes = [], []
        for index in range(8):
            token_ids = shared[: rng.randint(1, len(shared))] + rng.choices(range(3), k=block_size)
            lora, salt = rng.choice((None, None, "a", "b")), rng.choice((None, None, "s", "t"))
            request = real.Request(
                request_id=f"r{index}",
                prompt_token_ids=token_ids,
                sampling_params=real.SamplingParams(max_tokens=1),
                pooling_params=None,
                lora_request=LoRARequest(lora, 1 + (lora == "b"), "none") if lora else None,
                cache_salt=salt,
                block_hasher=real.get_request_block_hasher(block_size, real.sha256),
            )
            requests.append({"token_ids": token_ids, "lora": lora, "cache_salt": salt})
            hashes.append([value.hex()[:24] for value in request.block_hashes])
        yield {"block_size": block_size, "requests": requests, "hashes": hashes}


def free_queue() -> Iterator[Case]:
    """`{"num_blocks", "ops": [{"op", "block", "result", "free"}]}`.

    `op` is popleft, append or remove; `block` its argument. `result` is the id popped, None, or
    the name of the exception; `free` is the queue afterwards, front first.
    """
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


def block_pool() -> Iterator[Case]:
    """`{"num_blocks", "enable_caching", "ops": [{"op", "args", "result", "free", ...}]}`.

    Ops: `get_new_blocks [n]` -> ids or "ValueError"; `touch [ids]`; `free_blocks [ids]`;
    `cache_full_blocks [ids, contents]`; `get_cached_block [content]` -> id or None. A content is a
    small int that stands for a prefix hash. After each op: `free` (the queue, front first), `refs`
    (per block) and `contents` (per block, None without a hash).
    """
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


def kv_cache_manager() -> Iterator[Case]:
    """`{"num_blocks", "block_size", "enable_caching", "prompts", "ops": [{"op", "request", ...}]}`.

    Ops: `lookup` -> hit ids; `admit n` (adopt the hits, then n more tokens) and `extend n` -> ids
    of the new blocks, or None when refused; `append token`; `free` (computed tokens go to 0).
    After each op: `free`, `refs`, `hashed` (ids of blocks with a hash) and `tables`.
    """
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


def check_stop() -> Iterator[Case]:
    """Every stream of 1-3 tokens out of EOS, a stop id and another, under every small bound.

    `{"num_prompt_tokens", "output_token_ids", "max_tokens", "min_tokens", "ignore_eos",
    "stop_token_ids", "max_model_len", "reason"}`; the check looks at the last token only, and
    `reason` is "stop", "length" or None.
    """
    from vllm.v1.core.sched.utils import check_stop as real_check_stop

    from conformance import real

    streams = [
        stream
        for length in (1, 2, 3)
        for stream in itertools.product((EOS, STOP, OTHER), repeat=length)
    ]
    for stream, max_tokens, ignore, stops, length in itertools.product(
        streams, (1, 2, 3, 4), (False, True), ((), (STOP,)), (3, 4, 5, 6, 64)
    ):
        for min_tokens in range(max_tokens + 1):
            params = real.SamplingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                ignore_eos=ignore,
                stop_token_ids=list(stops),
            )
            params.update_from_generation_config({}, EOS)
            request = real.Request("r", [OTHER, OTHER], params, None)
            request.append_output_token_ids(list(stream))
            stopped = real_check_stop(request, length)
            yield {
                "num_prompt_tokens": 2,
                "output_token_ids": list(stream),
                "max_tokens": max_tokens,
                "min_tokens": min_tokens,
                "ignore_eos": ignore,
                "stop_token_ids": list(stops),
                "max_model_len": length,
                "reason": str(request.get_finished_reason()) if stopped else None,
            }


def sampling_masks() -> Iterator[Case]:
    """`{"logits", "top_k", "top_p", "min_p", "kept"}`: ids that survive, in the real order.

    The real sampler works in float32. Rows where rounding could decide (a probability within 1e-4
    of a bound, or equal logits under top-p) are left out; equal logits under top-k are kept.
    """
    import torch
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    rng = np.random.default_rng(6)
    count = 0
    while count < 600:
        vocabulary = int(rng.choice((4, 8, 24)))
        logits = rng.normal(0, float(rng.choice((0.5, 2.0, 6.0))), vocabulary)
        logits += float(rng.choice((0.0, 0.0, 1000.0)))
        top_k = int(rng.choice((0, 0, 1, 2, 3, vocabulary)))
        top_p = float(rng.choice((1.0, 0.1, 0.5, 0.9, 0.99)))
        min_p = float(rng.choice((0.0, 0.0, 0.05, 0.3, 1.0)))
        if top_p == 1.0 and rng.random() < 0.4:
            logits = np.round(logits)  # ties
        logits = np.round(logits.astype(np.float32), 3).astype(np.float32)
        if not _survives_rounding(logits.astype(np.float64), top_k, top_p, min_p):
            continue
        row = torch.tensor(logits).unsqueeze(0)
        processor = MinPLogitsProcessor.__new__(MinPLogitsProcessor)
        processor.min_p_count, processor.min_p = int(min_p > 0), torch.tensor([[min_p]])
        row = processor.apply(row)
        k = torch.tensor([top_k]) if 0 < top_k < vocabulary else None
        p = torch.tensor([top_p], dtype=torch.float32) if top_p < 1.0 else None
        row = apply_top_k_top_p_pytorch(row, k, p)
        yield {
            "logits": [round(float(value), 3) for value in logits],
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "kept": torch.nonzero(row[0] > -torch.inf).flatten().tolist(),
        }
        count += 1


def _survives_rounding(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether float32 cannot change the outcome: no probability is close to its bound."""
    if top_p < 1.0 and len(set(logits)) < len(logits):
        return False
    weights = np.exp(logits - logits.max())
    ratio = weights  # probability over the largest one: what min-p compares with min_p
    if 0.0 < min_p < 1.0 and np.abs(ratio - min_p).min() < 1e-4:
        return False
    kept = weights[ratio >= min_p] if min_p > 0.0 else weights
    kept = np.sort(kept)[::-1]
    if 0 < top_k < len(kept):
        kept = kept[kept >= kept[top_k - 1]]
    mass = np.cumsum(kept) / kept.sum()
    return top_p == 1.0 or float(np.abs(mass - top_p).min()) > 1e-4


def cudagraph_dispatcher() -> Iterator[Case]:
    """`{"mode", "capture_sizes", "max_num_seqs", "keys", "calls": [[n, uniform, mode, ...]]}`.

    `keys` lists what is captured per runtime mode as [num_tokens, num_reqs, uniform]; a call is
    [num_tokens, uniform_decode, runtime mode, num_tokens, num_reqs, uniform] of the descriptor.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    for mode, sizes, max_num_seqs in itertools.product(
        CUDAGraphMode, ([1, 2, 4, 8], [1, 2, 4, 8, 16, 24, 32], [4, 12]), (3, 8, 64)
    ):
        compilation = SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sizes,
            max_cudagraph_capture_size=sizes[-1],
            compile_sizes=[],
            cudagraph_specialize_lora=True,
            is_attention_compiled_piecewise=lambda: True,
        )
        dispatcher = CudagraphDispatcher(
            SimpleNamespace(
                compilation_config=compilation,
                speculative_config=None,
                lora_config=None,
                scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            )
        )
        dispatcher.initialize_cudagraph_keys(mode, 1)
        calls = []
        for num_tokens in range(1, sizes[-1] + 4):
            for uniform in (False, True):
                if uniform and num_tokens > max_num_seqs:
                    continue  # one token per request: there are not that many requests
                runtime, found = dispatcher.dispatch(num_tokens, uniform_decode=uniform)
                calls.append(
                    [num_tokens, uniform, runtime.name, found.num_tokens, found.num_reqs,
                     found.uniform]
                )  # fmt: skip
        yield {
            "mode": mode.name,
            "capture_sizes": sizes,
            "max_num_seqs": max_num_seqs,
            "keys": {
                runtime.name: sorted(
                    [key.num_tokens, key.num_reqs, key.uniform]
                    for key in dispatcher.cudagraph_keys[runtime]
                )
                for runtime in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
            },
            "calls": calls,
        }


def block_sizes() -> Iterator[Case]:
    """`{"block_size", "groups", "mamba", "dcp", "pcp", "caching", "hash_block_size", "result"}`.

    `groups` holds each group's block size, `mamba` whether the last group is a Mamba one. `result`
    is [scheduler_block_size, hash_block_size] or "ValueError".
    """
    import torch
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import MambaSpec

    from conformance import real

    grid = itertools.product(
        (16, 32), ((16,), (32,), (16, 16), (16, 32), (16, 48), (32, 48), (8, 12, 16)),
        (False, True), (1, 2), (1, 2), (False, True), (None, 4, 8, 16),
    )  # fmt: skip
    for block_size, groups, mamba, dcp, pcp, caching, hash_block_size in grid:
        specs: list[Any] = [
            real.FullAttentionSpec(
                block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32
            )
            for size in groups
        ]
        if mamba:
            specs[-1] = MambaSpec(block_size=groups[-1], shapes=((1,),), dtypes=(torch.float32,))
        kv_cache_config = real.KVCacheConfig(
            num_blocks=8,
            kv_cache_tensors=[],
            kv_cache_groups=[real.KVCacheGroupSpec([f"l{i}"], s) for i, s in enumerate(specs)],
        )
        vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=block_size,
                enable_prefix_caching=caching,
                hash_block_size=hash_block_size,
            ),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp
            ),
            kv_transfer_config=None,
        )
        try:
            result: Any = list(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config))
        except ValueError:
            result = "ValueError"
        yield {
            "block_size": block_size, "groups": list(groups), "mamba": mamba, "dcp": dcp,
            "pcp": pcp, "caching": caching, "hash_block_size": hash_block_size, "result": result,
        }  # fmt: skip


def kv_capacity() -> Iterator[Case]:
    """Memory arithmetic of one full-attention group.

    `{"num_layers", "num_kv_heads", "head_size", "dtype_bytes", "block_size", "max_model_len",
    "available_memory"}` in bytes, and `page_size_bytes` (one block of one layer), `num_blocks`,
    `max_memory_usage_bytes` (one request of max_model_len, one layer), `max_concurrency` and
    `max_model_len_that_fits`.
    """
    import torch
    from vllm.v1.core import kv_cache_utils

    from conformance import real

    rng = random.Random(9)
    shapes = ((16, 16, 64), (24, 2, 64), (28, 4, 128), (32, 8, 128), (64, 8, 128), (80, 8, 128))
    for _ in range(200):
        num_layers, num_kv_heads, head_size = rng.choice(shapes)
        dtype = rng.choice((torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32))
        block_size, max_model_len = rng.choice((16, 32, 64)), rng.choice((1000, 4096, 8192, 131072))
        memory = rng.choice((10**8, 2 * 2**30, 13_500_000_000, 60 * 2**30)) + rng.randrange(10**8)
        spec = real.FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
        )
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len),
            cache_config=SimpleNamespace(num_gpu_blocks_override=None),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1
            ),
        )
        num_blocks = kv_cache_utils.get_num_blocks(
            vllm_config, num_layers, memory, spec.page_size_bytes
        )
        layers = [f"layer{index}" for index in range(num_layers)]
        kv_cache_config = real.KVCacheConfig(num_blocks, [], [real.KVCacheGroupSpec(layers, spec)])
        yield {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "dtype_bytes": dtype.itemsize,
            "block_size": block_size,
            "max_model_len": max_model_len,
            "available_memory": memory,
            "page_size_bytes": spec.page_size_bytes,
            "num_blocks": num_blocks,
            "max_memory_usage_bytes": spec.max_memory_usage_bytes(vllm_config),
            "max_concurrency": kv_cache_utils.get_max_concurrency_for_kv_cache_config(
                vllm_config, kv_cache_config
            ),
            "max_model_len_that_fits": kv_cache_utils.estimate_max_model_len(
                vllm_config, dict.fromkeys(layers, spec), memory
            ),
        }


def async_plans() -> Iterator[Case]:
    """The real `AsyncScheduler` with a queue two deep: step k+1 is planned before step k is known.

    `{"config", "eos_token_id", "requests", "outputs", "steps"}`. `requests` are all added before
    step 0. A step holds `num_scheduled_tokens` (empty when nothing can be planned), `running`
    with [num_tokens, num_computed_tokens, num_output_placeholders] of each after planning, and
    `updated`, the step whose tokens were taken in afterwards (None while the queue fills), with
    the ids that `finished` then. `outputs` is what each request said; a token sampled past the end
    is dropped by the real scheduler and not listed.
    """
    from collections import deque

    from conformance import real

    rng = random.Random(10)
    for _ in range(40):
        config = {
            "num_blocks": 256, "block_size": 4, "enable_prefix_caching": False,
            "max_num_seqs": rng.choice((1, 2, 4)), "max_num_batched_tokens": rng.choice((4, 8, 64)),
            "long_prefill_token_threshold": 0, "enable_chunked_prefill": True,
            "max_model_len": rng.choice((12, 64)), "policy": "fcfs",
        }  # fmt: skip
        scheduler = real.make_scheduler(config, async_scheduling=True)
        adds, script = [], {}
        for index in range(rng.randint(1, 4)):
            max_tokens = rng.randint(1, 6)
            script[f"r{index}"] = [EOS if rng.random() < 0.25 else OTHER for _ in range(8)]
            adds.append(
                {"request_id": f"r{index}", "prompt_token_ids": [OTHER] * rng.randint(1, 10),
                 "max_tokens": max_tokens, "priority": 0, "arrival_time": float(index),
                 "ignore_eos": False}
            )  # fmt: skip
        live = {add["request_id"]: real.make_request(add, 4, EOS) for add in adds}
        for request in live.values():
            scheduler.add_request(request)
        position = dict.fromkeys(live, 0)
        queue: deque[tuple[int, Any, dict[str, int]]] = deque()
        steps: list[dict[str, Any]] = []
        while scheduler.has_unfinished_requests() or queue:
            plan = scheduler.schedule()
            sampled = {}
            for request_id in plan.num_scheduled_tokens:
                if not live[request_id].is_prefill_chunk:
                    sampled[request_id] = script[request_id][position[request_id]]
                    position[request_id] += 1
            if plan.num_scheduled_tokens:
                queue.append((len(steps), plan, sampled))
            running = {
                r.request_id: [r.num_tokens, r.num_computed_tokens, r.num_output_placeholders]
                for r in scheduler.running
            }
            updated, before = None, set(scheduler.requests)
            if len(queue) == 2 or not plan.num_scheduled_tokens:
                updated, old_plan, old_sampled = queue.popleft()
                scheduler.update_from_output(old_plan, real.runner_output(old_plan, old_sampled))
            steps.append(
                {
                    "num_scheduled_tokens": dict(plan.num_scheduled_tokens),
                    "running": running,
                    "updated": updated,
                    "finished": sorted(before - set(scheduler.requests)),
                }
            )
        yield {
            "config": config,
            "eos_token_id": EOS,
            "requests": adds,
            "outputs": {r: list(request.output_token_ids) for r, request in live.items()},
            "finish_reasons": {r: str(live[r].get_finished_reason()) for r in live},
            "steps": steps,
        }


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    function.__name__: function
    for function in (
        block_hashing,
        free_queue,
        block_pool,
        kv_cache_manager,
        check_stop,
        sampling_masks,
        cudagraph_dispatcher,
        block_sizes,
        kv_capacity,
        async_plans,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.record_parts", description="Record the real parts."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument("--only", choices=sorted(PARTS), nargs="+", default=sorted(PARTS))
    arguments = parser.parse_args(argv)
    from conformance import real

    real.model_config()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        about = " ".join((PARTS[name].__doc__ or "").split())
        cases = list(PARTS[name]())
        parts.save(arguments.out / f"{name}.json.gz", name, about, cases)
        print(f"{name}: {len(cases)} cases")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
