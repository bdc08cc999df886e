"""How many blocks fit beside the weights, and how many requests into those blocks.

Mirrors `vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks`.
"""

from __future__ import annotations

from typing import Any

from course.site.widgets.hardware import GPUS, shapes


def capacity(
    available_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int
) -> dict[str, float]:
    """Blocks in `available_bytes`, the tokens in them, and full-length requests at once.

    Mirrors `vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks` for one full-attention group.
    """
    bytes_per_block = bytes_per_token * block_size
    num_blocks = max(0, available_bytes // bytes_per_block)
    concurrency = num_blocks / -(-max_model_len // block_size)
    return {
        "bytes_per_block": bytes_per_block,
        "num_blocks": num_blocks,
        "tokens": num_blocks * block_size,
        "max_concurrency": concurrency,
    }


def document() -> dict[str, Any]:
    """Model shapes and GPUs."""
    return {"models": shapes(), "gpus": GPUS}
