"""Lab 04-03: causal attention of many queries over a paged cache, in tiles, for a ragged batch.

`attend_tile` is the body of the kernel; the others decide which rows make a tile. The last one,
`paged_attention`, has the signature of `mini_vllm/attention/paged.py`, so the engine can run on it.
No function changes an array that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mini_vllm.batch import ForwardBatch

TILE_ROWS = 16
"""Query rows of a tile: the fewest that a tensor core's product takes."""


def dense_causal_attention(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, start_pos: int = 0, window: int | None = None
) -> np.ndarray:
    """The definition: row i sits at position p = start_pos + i and sees keys 0 to p.

    Args:
        Q: [num_rows, d], scores scaled by d ** -0.5.
        K: [n, d], n >= start_pos + num_rows; keys beyond a row's position are not used.
        V: [n, d_v].
        start_pos: position of row 0.
        window: with a window w, position p sees keys max(0, p - w + 1) to p only.

    Returns:
        [num_rows, d_v].
    """
    out = np.empty((len(Q), V.shape[1]), dtype=Q.dtype)
    for i, q in enumerate(Q):
        stop = start_pos + i + 1
        first = 0 if window is None else max(0, stop - window)
        scores = K[first:stop] @ q * len(q) ** -0.5
        weights = np.exp(scores - scores.max())
        out[i] = weights @ V[first:stop] / weights.sum()
    return out


def attend_tile(
    q: np.ndarray,
    positions: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: Sequence[int] | np.ndarray,
    scale: float,
    window: int | None = None,
) -> np.ndarray:
    """A tile of query rows of one sequence: each block that any row sees is read once, for all.

    What is kept from one block to the next does not grow with the sequence. A key that one row
    sees may be hidden from another. Positions that no row of the tile sees are not read: they may
    not be written yet, or their block may have been given away.

    Args:
        q: [rows, d], rows >= 1.
        positions: [rows] position of each row in its sequence, not decreasing.
        k_cache: [num_blocks, block_size, d], any strides.
        v_cache: [num_blocks, block_size, d_v].
        block_table: physical block ids, first positions first.
        scale: factor on the scores.
        window: see `dense_causal_attention`.

    Returns:
        [rows, d_v], dtype of `q`.

    Source: `vllm/v1/attention/ops/triton_unified_attention.py:179` `kernel_unified_attention`,
    its bounds and its mask: `vllm/v1/attention/ops/triton_attention_helpers.py:142`
    `compute_tile_loop_bounds`.
    """
    block_size = k_cache.shape[1]
    first = 0 if window is None else max(0, int(positions[0]) - window + 1)
    stop = int(positions[-1]) + 1
    m = np.full(len(q), -np.inf, dtype=q.dtype)  # [rows]
    denom = np.zeros(len(q), dtype=q.dtype)
    acc = np.zeros((len(q), v_cache.shape[2]), dtype=q.dtype)
    scaled = q * q.dtype.type(scale)
    for index in range(first // block_size, -(-stop // block_size)):
        start = index * block_size
        low, high = max(first - start, 0), min(stop - start, block_size)
        keys = np.arange(start + low, start + high)
        scores = scaled @ k_cache[block_table[index], low:high].T  # [rows, keys]
        hidden = keys > positions[:, None]
        if window is not None:
            hidden |= keys <= positions[:, None] - window
        scores[hidden] = -np.inf
        new_m = np.maximum(m, scores.max(axis=1))
        shift = np.where(new_m > -np.inf, new_m, 0)  # a row that has seen nothing stays at 0
        corr, p = np.exp(m - shift), np.exp(scores - shift[:, None])
        denom = denom * corr + p.sum(axis=1)
        acc = acc * corr[:, None] + p @ v_cache[block_table[index], low:high]
        m = new_m
    return acc / denom[:, None]


def paged_causal_prefill_attention(
    Q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: Sequence[int] | np.ndarray,
    start_pos: int = 0,
    *,
    tile: int = TILE_ROWS,
    scale: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """A chunk of one prompt: rows at positions start_pos, start_pos + 1, ..., `tile` at a time.

    The cache already holds K and V of positions 0 to start_pos + num_rows - 1, except those that
    a window hides from every row.

    Args:
        Q: [num_rows, d]; may have no rows.
        k_cache, v_cache, block_table, window: as `attend_tile`.
        start_pos: position of row 0, the number of tokens computed before this chunk.
        tile: rows per tile; 1 is row at a time.
        scale: factor on the scores; None means d ** -0.5.

    Returns:
        [num_rows, d_v], dtype of `Q`.
    """
    scale = Q.shape[1] ** -0.5 if scale is None else scale
    out = np.empty((len(Q), v_cache.shape[2]), dtype=Q.dtype)
    for row in range(0, len(Q), tile):
        rows = Q[row : row + tile]
        positions = start_pos + row + np.arange(len(rows))
        out[row : row + tile] = attend_tile(
            rows, positions, k_cache, v_cache, block_table, scale, window
        )
    return out


def varlen_causal_attention(
    Q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: Sequence[Sequence[int]] | np.ndarray,
    query_start_loc: Sequence[int] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    *,
    tile: int = TILE_ROWS,
    scale: float | None = None,
    window: int | None = None,
) -> np.ndarray:
    """A ragged batch, requests end to end: decodes, chunks and whole prompts in one call.

    Request r owns rows query_start_loc[r] to query_start_loc[r + 1], possibly none. They are the
    *last* rows of a sequence of seq_lens[r] tokens, this step's included.

    Args:
        Q: [num_tokens, d].
        k_cache, v_cache, tile, scale, window: as `paged_causal_prefill_attention`.
        block_tables: one per request.
        query_start_loc: [num_reqs + 1].
        seq_lens: [num_reqs].

    Returns:
        [num_tokens, d_v], dtype of `Q`.

    Raises:
        ValueError: query_start_loc has not one entry more than seq_lens, does not start at 0 or
            not end at num_tokens, decreases, or gives a request more rows than its seq_len.

    Source: `vllm/v1/attention/backend.py:353` `CommonAttentionMetadata` for the names.
    """
    offsets = [int(offset) for offset in query_start_loc]
    if len(offsets) != len(seq_lens) + 1 or offsets[0] != 0 or offsets[-1] != len(Q):
        raise ValueError(
            f"query_start_loc={offsets}: need {len(seq_lens) + 1} entries from 0 to {len(Q)}"
        )
    out = np.empty((len(Q), v_cache.shape[2]), dtype=Q.dtype)
    for r, seq_len in enumerate(seq_lens):
        query_len = offsets[r + 1] - offsets[r]
        if not 0 <= query_len <= seq_len:
            raise ValueError(
                f"request {r}: {query_len} query rows in a sequence of {seq_len} tokens"
            )
        out[offsets[r] : offsets[r + 1]] = paged_causal_prefill_attention(
            Q[offsets[r] : offsets[r + 1]],
            k_cache,
            v_cache,
            block_tables[r],
            int(seq_len) - query_len,
            tile=tile,
            scale=scale,
            window=window,
        )
    return out


def paged_attention(
    query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
) -> np.ndarray:
    """What the engine calls in each layer: `varlen_causal_attention` for all heads.

    The query heads that share a KV head go into the same tile, token by token: a tile holds
    TILE_ROWS // group_size tokens, at least one, and each KV head's blocks are read once per
    tile for the whole group.

    Args:
        query: [num_tokens, num_heads, head_dim].
        layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], K at 0 and V at 1, this
            step's tokens written.
        batch: `block_tables`, `query_start_loc`, `seq_lens`, `num_reqs`.
        scale: factor on the scores.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`.

    Source: `vllm/model_executor/layers/attention/attention.py:734`
    `unified_attention_with_output`.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = layer_cache.shape[3]
    group_size = num_heads // num_kv_heads
    tokens_per_tile = max(1, TILE_ROWS // group_size)
    out = np.empty_like(query)
    for r in range(batch.num_reqs):
        begin, end = batch.query_start_loc[r], batch.query_start_loc[r + 1]
        start_pos = batch.seq_lens[r] - (end - begin)
        for token in range(begin, end, tokens_per_tile):
            tokens = slice(token, min(token + tokens_per_tile, end))
            positions = start_pos + np.arange(tokens.start, tokens.stop) - begin
            for kv_head in range(num_kv_heads):
                heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
                attended = attend_tile(
                    query[tokens, heads].reshape(-1, head_dim),  # [tokens * group_size, head_dim]
                    np.repeat(positions, group_size),
                    layer_cache[0, :, :, kv_head],
                    layer_cache[1, :, :, kv_head],
                    batch.block_tables[r],
                    scale,
                )
                out[tokens, heads] = attended.reshape(-1, group_size, head_dim)
    return out
