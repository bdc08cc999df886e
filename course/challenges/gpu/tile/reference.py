"""The tile of a kernel for experts, raced against the one in vLLM's table for your card.

Write `tile(tokens, experts, width, k, top_k)`: how the pinned kernel
(`vllm/model_executor/layers/fused_moe/fused_moe.py:295` `fused_moe_kernel`) cuts its two products,
[pairs, k] by [experts, 2 width, k] and [pairs, width] by [experts, k, width], in bfloat16. It gives
back

    BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K    powers of two from 16 on
    GROUP_SIZE_M                                rows of tiles that run side by side, a power of two
    num_warps, num_stages                       of a program: 1, 2, 4, 8; stages in flight, 1 to 8

Raced are 1 to 4,096 tokens of a layer of 128 experts of width 384, eight per token, k = 2,048:
Qwen3-30B-A3B on two ranks. vLLM takes the tile of the table for the card, of the nearest number of
tokens (`get_moe_configs`), or a rule where it has no table (`get_default_config`). The kernel is
the same, the routing is sorted before; the score is vLLM's time over yours, in thousandths.

This one is a tile for everything. With few tokens an expert has one row or two: what does a tile of
64 rows compute, and what does it read? With many, which tile reads each weight once?
"""

from __future__ import annotations


def tile(tokens: int, experts: int, width: int, k: int, top_k: int) -> dict[str, int]:
    """One tile, whatever is asked."""
    return {
        "BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8,
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip
