"""The values of `reference.py` by whole-batch products, for speed.

Promises: a test holds both equal. Decode requests, also those with a few drafts to verify, go in
groups of similar length, each prefill request by itself; what is grouped is worked out once per
batch, not once per layer, as upstream's
`vllm/v1/attention/backend.py:516` `AttentionMetadataBuilder` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mini_vllm.batch import ForwardBatch

_GROUP_SLOTS = 1024
_QUERY_TILE = 256
_MOST_GROUPED = 16
"""Query tokens of a request that goes into a group: a decode token and up to 15 drafts."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with equally many query tokens and similar length, attended to in one product."""

    token_rows: np.ndarray
    """[group, num_queries] index of each request's query tokens: one, and one per draft"""
    block_tables: np.ndarray
    """[group, num_blocks]"""
    width: int
    """Slots that are read of each request: those of the longest, so not all of its last block"""
    bias: np.ndarray | None
    """[group, 1, num_queries, width], -inf beyond each query's own position; None if it hides
    nothing, as where all are equally long"""


def hidden_bias(hidden: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What to add to attention scores: -inf where `hidden` is True, 0 elsewhere, same shape."""
    return np.where(hidden, dtype.type(-np.inf), dtype.type(0))


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """What `paged_attention` works out once per batch and reads in every layer."""

    decode_groups: list[DecodeGroup]
    prefill_rows: list[int]
    """Requests with more query tokens than go into a group."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> PagedMetadata:
        """The batch's own, made on first use."""
        if not isinstance(batch.attn_metadata, cls):
            query_lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
            prefills = [int(i) for i in np.flatnonzero(query_lens > _MOST_GROUPED)]
            batch.attn_metadata = cls(_decode_groups(batch, query_lens), prefills)
        return batch.attn_metadata


def _decode_groups(batch: ForwardBatch, query_lens: np.ndarray) -> list[DecodeGroup]:
    """Requests with few query tokens, grouped by their number and by length.

    Sequences are sorted by length and cut into groups. A group's shortest member has at least
    three quarters of the blocks of its longest, so padding stays small, and a group holds at most
    `_GROUP_SLOTS` token slots, so what is gathered for it stays in a core's cache.
    """
    rows = np.flatnonzero(query_lens <= _MOST_GROUPED)
    if len(rows) > 1:
        rows = rows[np.lexsort((-batch.seq_lens[rows], query_lens[rows]))]
    num_blocks = -(-batch.seq_lens[rows] // batch.block_size)
    if batch.sliding_window is not None:
        num_blocks -= first_blocks(batch, rows, query_lens[rows])
        order = np.lexsort((-num_blocks, query_lens[rows]))
        rows, num_blocks = rows[order], num_blocks[order]
    num_blocks = num_blocks.tolist()
    num_queries = query_lens[rows].tolist()
    groups, start = [], 0
    while start < len(rows):
        widest, queries = num_blocks[start], num_queries[start]
        most = max(1, _GROUP_SLOTS // (widest * batch.block_size))
        stop = start + 1
        while (
            stop < len(rows)
            and stop - start < most
            and num_blocks[stop] >= 0.75 * widest
            and num_queries[stop] == queries
        ):
            stop += 1
        groups.append(_decode_group(batch, rows[start:stop], widest, queries))
        start = stop
    return groups


def first_blocks(batch: ForwardBatch, rows: np.ndarray, query_lens: np.ndarray) -> np.ndarray:
    """[len(rows)] the first block that a query of each request sees; those before may be gone."""
    assert batch.sliding_window is not None
    first_query = batch.seq_lens[rows] - query_lens
    return np.maximum(first_query + 1 - batch.sliding_window, 0) // batch.block_size


def _decode_group(
    batch: ForwardBatch, rows: np.ndarray, num_blocks: int, num_queries: int
) -> DecodeGroup:
    back = np.arange(num_queries - 1, -1, -1)  # how far each query stands before the last
    ends = batch.seq_lens[rows][:, None] - back  # [group, num_queries]
    columns = np.arange(num_blocks)
    if batch.sliding_window is None:
        width = int(ends[:, -1].max())
        hidden = np.arange(width) >= ends[:, :, None]
    else:
        first = first_blocks(batch, rows, np.full(len(rows), num_queries))[:, None]
        passed = first * batch.block_size
        width = int((ends[:, -1:] - passed).max())
        keys = np.arange(width) + passed[:, :, None]  # [group, 1, width] their positions
        ends, columns = ends[:, :, None], columns + first
        hidden = (keys >= ends) | (keys < ends - batch.sliding_window)
    last = -(-batch.seq_lens[rows] // batch.block_size)[:, None] - 1
    # What a shorter row has too few of is its last block again, hidden, never the null block.
    block_tables = batch.block_tables[rows[:, None], np.minimum(columns, last)]
    dtype = np.dtype(np.float32) if batch.kv_cache is None else batch.kv_cache.dtype
    return DecodeGroup(
        token_rows=batch.query_start_loc[rows][:, None] + np.arange(num_queries),
        block_tables=block_tables,
        width=width,
        bias=hidden_bias(hidden, dtype)[:, None] if hidden.any() else None,
    )


def paged_attention(
    query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
) -> np.ndarray:
    """Same arguments and values as `paged_attention_reference`, by batched products.

    Requests with few query tokens go in groups of similar length; each other one by itself.
    """
    out = np.empty_like(query)
    factor = query.dtype.type(scale)
    metadata = PagedMetadata.of(batch)
    for group in metadata.decode_groups:
        out[group.token_rows] = _attend_decodes(
            query[group.token_rows] * factor, layer_cache, group
        )
    for i in metadata.prefill_rows:
        start, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        seq_len, window = int(batch.seq_lens[i]), batch.sliding_window
        num_blocks, first = -(-seq_len // batch.block_size), 0
        if window is not None:
            first = max(0, seq_len - int(stop - start) + 1 - window) // batch.block_size
        out[start:stop] = _attend_prefill(
            query[start:stop] * factor, layer_cache, batch.block_tables[i, first:num_blocks],
            seq_len - first * batch.block_size, window,
        )  # fmt: skip
    return out


def _attend_decodes(query: np.ndarray, layer_cache: np.ndarray, group: DecodeGroup) -> np.ndarray:
    """Few queries per request: scaled query [group, num_queries, num_heads, head_dim] to output."""
    num_reqs, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = layer_cache.shape[3]

    def gathered(which: int) -> np.ndarray:
        """K (0) or V (1) of every request's blocks: [group, num_kv_heads, width, head_dim]."""
        blocks = layer_cache[which].take(group.block_tables, axis=0)
        slots = blocks.reshape(num_reqs, -1, num_kv_heads, head_dim)[:, : group.width]
        return slots.transpose(0, 2, 1, 3)

    # heads per kv head, each with its queries, one below the other
    by_head = query.transpose(0, 2, 1, 3).reshape(num_reqs, num_kv_heads, -1, head_dim)
    bias, per_head = group.bias, num_heads // num_kv_heads
    if bias is not None and num_queries > 1 and per_head > 1:
        bias = np.tile(bias, (1, 1, per_head, 1))
    scores = by_head @ gathered(0).swapaxes(2, 3)  # [group, kv_heads, per_head * queries, width]
    weights, sums = _softmax(scores, bias)
    # V is gathered only now: it takes the memory that K has just left, still in a core's cache.
    out = (weights @ gathered(1)) / sums
    return out.reshape(num_reqs, num_heads, num_queries, head_dim).transpose(0, 2, 1, 3)


def _attend_prefill(
    query: np.ndarray, layer_cache: np.ndarray, table: np.ndarray, seq_len: int, window: int | None
) -> np.ndarray:
    """The last `len(query)` positions of one sequence of `seq_len` attend causally.

    Queries go in tiles, and a tile reads no key beyond its own last position, nor one that its
    first position's window has passed.
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
        begin, end = 0, first_position + stop
        if window is not None:
            begin = max(0, first_position + start + 1 - window)
        tile = grouped[:, :, start:stop].reshape(num_kv_heads, -1, head_dim)
        scores = tile @ keys[:, :, begin:end]  # [kv_heads, group_size * tile, num_visible]
        positions = np.arange(first_position + start, end)[:, None]
        visible = np.arange(begin, end)
        hidden = visible > positions
        if window is not None:
            hidden |= visible <= positions - window
        bias = hidden_bias(hidden, scores.dtype)
        by_head = scores.reshape(num_kv_heads, group_size, stop - start, end - begin)
        weights, sums = _softmax(by_head, bias)
        attended = (weights @ values[:, None, begin:end]) / sums
        attended = attended.reshape(num_heads, stop - start, head_dim)
        out[start:stop] = attended.transpose(1, 0, 2)
    return out


def _softmax(scores: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """softmax(scores + bias) as weights, written over `scores`, and the sums to divide by.

    The division comes after the product with the values, where there are fewer numbers. Exponents
    stop at -70: such weights are far below the rounding of either dtype, and smaller ones would be
    subnormal numbers in float32, which slow the product several times over. What the bias hides
    has a weight of exactly 0.

    Args:
        scores: [..., rows, width], every row with a visible entry.
        bias: 0 where visible and -inf elsewhere, broadcast to `scores`; None hides nothing.

    Returns:
        [..., rows, width] and [..., rows, 1].
    """
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.maximum(scores, -70.0, out=scores)
    if bias is not None:
        scores += bias
    np.exp(scores, out=scores)
    return scores, scores.sum(axis=-1, keepdims=True)
