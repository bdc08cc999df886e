"""Record the block size of several KV groups of the real v0.22.1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"block_size", "groups", "mamba", "dcp", "pcp", "caching", "hash_block_size", "result"}`. '
    "`groups` holds each group's block size, `mamba` whether the last group is a Mamba one. "
    '`result` is [scheduler_block_size, hash_block_size] or "ValueError".'
)


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
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
