"""Record how many tokens a memory holds of the real v0.22.1."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    'Memory arithmetic of one full-attention group. `{"num_layers", "num_kv_heads", '
    '"head_size", "dtype_bytes", "block_size", "max_model_len", "available_memory"}` in bytes, '
    "and `page_size_bytes` (one block of one layer), `num_blocks`, `max_memory_usage_bytes` "
    "(one request of max_model_len, one layer), `max_concurrency` and "
    "`max_model_len_that_fits`."
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
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
