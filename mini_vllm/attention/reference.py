"""Attention over a paged KV cache, as a definition: write by slot, read by block table.

Promises: K and V are reached only through `slot_mapping` and `block_tables`; a query at position p
sees positions 0 to p, or the last `sliding_window` of them, and nothing else. Slow; read this file
first. Mirrors the two ops of
`vllm/model_executor/layers/attention/attention.py:691` `unified_kv_cache_update` and
`vllm/model_executor/layers/attention/attention.py:734` `unified_attention_with_output`.
"""

from __future__ import annotations

import numpy as np

from mini_vllm.batch import ForwardBatch


def write_kv(
    layer_cache: np.ndarray, key: np.ndarray, value: np.ndarray, slot_mapping: np.ndarray
) -> None:
    """Store this step's K and V.

    Args:
        layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], changed in place.
        key: [num_tokens, num_kv_heads, head_dim]; value the same.
        slot_mapping: [num_tokens] flat slots, block_id * block_size + offset.
    """
    _, num_blocks, block_size, num_kv_heads, head_dim = layer_cache.shape
    slots = layer_cache.reshape(2, num_blocks * block_size, num_kv_heads, head_dim)
    slots[0, slot_mapping] = key
    slots[1, slot_mapping] = value


def paged_attention_reference(
    query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
) -> np.ndarray:
    """The definition, one query token and one head at a time. Slow; read this one first.

    Args:
        query: [num_tokens, num_heads, head_dim]; heads share K/V heads in equal groups (GQA).
        layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], already written.
        batch: block tables, sequence lengths and token ranges.
        scale: factor on the scores, usually head_dim ** -0.5.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`.
    """
    num_heads, num_kv_heads = query.shape[1], layer_cache.shape[3]
    out = np.empty_like(query)
    for i in range(batch.num_reqs):
        for token in range(batch.query_start_loc[i], batch.query_start_loc[i + 1]):
            position = batch.positions[token]
            window = batch.sliding_window or position + 1
            visible = range(max(0, position + 1 - window), position + 1)
            places = [divmod(p, batch.block_size) for p in visible]
            slots = [(batch.block_tables[i, block], offset) for block, offset in places]
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                keys = np.stack([layer_cache[0, b, o, kv_head] for b, o in slots])
                values = np.stack([layer_cache[1, b, o, kv_head] for b, o in slots])
                scores = keys @ query[token, head] * scale  # [position + 1]
                weights = np.exp(scores - scores.max())
                out[token, head] = (weights / weights.sum()) @ values
    return out
