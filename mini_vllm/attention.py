"""Attention over a paged KV cache: write by slot, read by block table.

Promises: K and V are reached only through `slot_mapping` and `block_tables`; a query at position p
sees positions 0 to p and nothing else. `paged_attention_reference` is the definition,
`paged_attention` the same values by whole-batch products, and a test holds them equal. Mirrors the
two ops of `vllm/model_executor/layers/attention/attention.py:691` `unified_kv_cache_update`
and `vllm/model_executor/layers/attention/attention.py:734` `unified_attention_with_output`.
"""

from __future__ import annotations

import numpy as np

from mini_vllm.batch import DecodeGroup, ForwardBatch, hidden_bias

_QUERY_TILE = 256


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
            visible = range(batch.positions[token] + 1)
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


def paged_attention(
    query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
) -> np.ndarray:
    """Same arguments and values as `paged_attention_reference`, by batched products.

    Decode requests go in groups of similar length; each prefill request by itself.
    """
    out = np.empty_like(query)
    query = query * query.dtype.type(scale)
    for group in batch.decode_groups:
        out[group.token_rows] = _attend_decodes(query[group.token_rows], layer_cache, group)
    for i in batch.prefill_rows:
        start, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        num_blocks = -(-int(batch.seq_lens[i]) // batch.block_size)
        table = batch.block_tables[i, :num_blocks]
        out[start:stop] = _attend_prefill(
            query[start:stop], layer_cache, table, int(batch.seq_lens[i])
        )
    return out


def _attend_decodes(query: np.ndarray, layer_cache: np.ndarray, group: DecodeGroup) -> np.ndarray:
    """One query per request: scaled query [group, num_heads, head_dim] to output, same shape."""
    num_reqs, num_heads, head_dim = query.shape
    num_kv_heads = layer_cache.shape[3]
    # [group, num_blocks, block_size, num_kv_heads, head_dim] -> [group, width, kv_heads, head_dim]
    keys = layer_cache[0, group.block_tables].reshape(num_reqs, -1, num_kv_heads, head_dim)
    values = layer_cache[1, group.block_tables].reshape(num_reqs, -1, num_kv_heads, head_dim)
    grouped = query.reshape(num_reqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.transpose(0, 2, 3, 1)  # [group, kv_heads, heads per kv head, width]
    out = _softmax_product(scores, values.transpose(0, 2, 1, 3), group.bias)
    return out.reshape(num_reqs, num_heads, head_dim)


def _attend_prefill(
    query: np.ndarray, layer_cache: np.ndarray, table: np.ndarray, seq_len: int
) -> np.ndarray:
    """The last `len(query)` positions of one sequence of `seq_len` attend causally.

    Queries go in tiles, and a tile reads no key beyond its own last position.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = layer_cache.shape[3]
    group_size = num_heads // num_kv_heads
    keys = layer_cache[0, table].reshape(-1, num_kv_heads, head_dim).transpose(1, 2, 0)
    values = layer_cache[1, table].reshape(-1, num_kv_heads, head_dim).transpose(1, 0, 2)
    # [num_tokens, num_heads, head_dim] -> [kv_heads, group_size, num_tokens, head_dim]
    grouped = query.reshape(num_tokens, num_kv_heads, group_size, head_dim).transpose(1, 2, 0, 3)
    out = np.empty_like(query)
    first_position = seq_len - num_tokens
    for start in range(0, num_tokens, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, num_tokens)
        num_visible = first_position + stop
        tile = grouped[:, :, start:stop].reshape(num_kv_heads, -1, head_dim)
        scores = tile @ keys[:, :, :num_visible]  # [kv_heads, group_size * tile, num_visible]
        positions = np.arange(first_position + start, num_visible)
        bias = hidden_bias(np.arange(num_visible) > positions[:, None], scores.dtype)
        by_head = scores.reshape(num_kv_heads, group_size, stop - start, num_visible)
        attended = _softmax_product(by_head, values[:, None, :num_visible], bias)
        attended = attended.reshape(num_heads, stop - start, head_dim)
        out[start:stop] = attended.transpose(1, 0, 2)
    return out


def _softmax_product(scores: np.ndarray, values: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """softmax(scores + bias) @ values, overwriting `scores`.

    The division by the sum comes after the product, where there are fewer numbers. Exponents stop
    at -70: such weights are far below the rounding of either dtype, and smaller ones would be
    subnormal numbers in float32, which slow the product several times over. What the bias hides
    has a weight of exactly 0.

    Args:
        scores: [..., rows, width], every row with a visible entry.
        values: [..., width, head_dim].
        bias: 0 where visible and -inf elsewhere, broadcast to `scores`; None hides nothing.
    """
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.maximum(scores, -70.0, out=scores)
    if bias is not None:
        scores += bias
    np.exp(scores, out=scores)
    return (scores @ values) / scores.sum(axis=-1, keepdims=True)
