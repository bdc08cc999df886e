"""Record how many blocks the real v0.22.1 makes of a memory, with a drafter's layers or without."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

ABOUT = (
    "`target` and `drafter` (layers, KV heads, head size; the drafter null where there is none), "
    "`dtype_bytes`, `memory_bytes`, `block_size`, `is_mla`, and what the real functions answer: "
    "`num_blocks`, `num_groups`."
)
GIB = 2**30
SIZES: dict[str, tuple[int, int, int]] = {
    "byte-llama": (4, 2, 64), "byte-mtp": (1, 2, 64), "byte-draft": (2, 1, 64),
    "llama-3-8b": (32, 8, 128), "eagle head of llama-3-8b": (1, 8, 128),
    "llama-3.2-1b": (16, 8, 64), "deepseek-v3": (61, 1, 576), "mtp of deepseek-v3": (1, 1, 576),
}  # fmt: skip
"""Layers, KV heads and head size. Llama 3 8B, Llama 3.2 1B and DeepSeek-V3: their published
`config.json`; of DeepSeek-V3 the width of its one latent vector, 512 + 64."""
PAIRS = (
    ("byte-llama", None, 4, GIB), ("byte-llama", "byte-mtp", 4, GIB),
    ("byte-llama", "byte-draft", 4, GIB), ("llama-3-8b", None, 2, 40 * GIB),
    ("llama-3-8b", "eagle head of llama-3-8b", 2, 40 * GIB),
    ("llama-3-8b", "llama-3.2-1b", 2, 40 * GIB), ("deepseek-v3", None, 2, 40 * GIB),
    ("deepseek-v3", "mtp of deepseek-v3", 2, 40 * GIB),
)  # fmt: skip


def cases() -> Iterator[dict[str, Any]]:
    """The cases; the same every time."""
    for target, drafter, dtype_bytes, memory in PAIRS:
        is_mla = target == "deepseek-v3"
        case = {
            "target": [target, *SIZES[target]],
            "drafter": drafter and [drafter, *SIZES[drafter]],
            "dtype_bytes": dtype_bytes, "memory_bytes": memory, "is_mla": is_mla,
            "block_size": 64 if is_mla else 16,
        }  # fmt: skip
        yield case | answer(case)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """What the real functions make of one case."""
    import torch
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    spec = MLAAttentionSpec if case["is_mla"] else FullAttentionSpec
    dtype = torch.float32 if case["dtype_bytes"] == 4 else torch.bfloat16
    specs = {
        f"{name}.{layer}": spec(
            block_size=case["block_size"], dtype=dtype, num_kv_heads=heads, head_size=size
        )
        for name, layers, heads, size in filter(None, (case["target"], case["drafter"]))
        for layer in range(layers)
    }
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=8192),
        cache_config=SimpleNamespace(num_gpu_blocks_override=None, mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=8192, disable_hybrid_kv_cache_manager=False
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
    )
    groups = kv_cache_utils.get_kv_cache_groups(vllm_config, specs)
    config = kv_cache_utils.get_kv_cache_config_from_groups(
        vllm_config, groups, case["memory_bytes"]
    )
    return {"num_blocks": config.num_blocks, "num_groups": len(groups)}
