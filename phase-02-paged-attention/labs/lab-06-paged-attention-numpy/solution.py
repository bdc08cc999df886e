"""Lab 02-06: attention over a paged KV cache in numpy: one formula to write and to read by.

`build_slot_mapping`, `write_kv`, `attend_one` and `paged_attention` are the lab. The last one has
the signature of `mini_vllm/attention/paged.py`, so the engine can run on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mini_vllm.batch import ForwardBatch


def build_slot_mapping(
    block_table: Sequence[int] | np.ndarray, block_size: int, start: int, num_tokens: int
) -> np.ndarray:
    """Where the tokens at positions `start` to `start + num_tokens - 1` live in the flat cache.

    The cache is a long row of slots, `block_size` of them per physical block. Entry j of
    `block_table` is the physical block of the sequence's j-th block of positions.

    A trace: table [4, 1, 7], blocks of 16, 4 tokens from position 14 on live in slots 78, 79, 16
    and 17.

    Args:
        block_table: physical block ids of one sequence, in order of position.
        block_size: tokens per block.
        start: position of the first token.
        num_tokens: how many tokens; 0 gives an empty mapping.

    Returns:
        int64 [num_tokens].

    Raises:
        ValueError: `start` or `num_tokens` below 0.
        IndexError: a position beyond the last block of the table.

    Source: `vllm/v1/worker/block_table.py:326` `_compute_slot_mapping_kernel`.
    """
    if start < 0 or num_tokens < 0:
        raise ValueError(f"start={start}, num_tokens={num_tokens}: need 0 or more")
    if start + num_tokens > len(block_table) * block_size:
        raise IndexError(
            f"position {start + num_tokens - 1} lies beyond a table of {len(block_table)} blocks "
            f"of {block_size}"
        )
    table = np.asarray(block_table, dtype=np.int64)
    positions = np.arange(start, start + num_tokens)
    return table[positions // block_size] * block_size + positions % block_size


def write_kv(
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    new_k: np.ndarray,
    new_v: np.ndarray,
    slot_mapping: np.ndarray,
) -> None:
    """Store one K row and one V row per token, in place.

    Args:
        k_cache: [num_blocks * block_size, num_kv_heads, head_dim]; `v_cache` the same.
        new_k: [num_tokens, num_kv_heads, head_dim]; `new_v` the same.
        slot_mapping: int64 [num_tokens]. A negative slot, -1 or any other, is padding: its token is
            not stored. Slot 0 is a slot.

    Source: `csrc/cache_kernels.cu:304` `reshape_and_cache_flash_kernel`.
    """
    real = slot_mapping >= 0
    k_cache[slot_mapping[real]] = new_k[real]
    v_cache[slot_mapping[real]] = new_v[real]


def attend_one(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: Sequence[int] | np.ndarray,
    seq_len: int,
    block_size: int,
    scale: float | None = None,
) -> np.ndarray:
    """One query token attends to the first `seq_len` positions of its sequence.

    Reads exactly `seq_len` rows of each cache, whatever else lies in the sequence's last block. It
    changes none of its arguments, and the memory it takes grows with `seq_len`, not with the cache.

    Args:
        q: [num_heads, head_dim].
        k_cache: [num_blocks * block_size, num_kv_heads, head_dim]; `v_cache` the same. Query heads
            share KV heads in equal groups: with 4 and 2, heads 0 and 1 read KV head 0.
        block_table: physical block ids in order of position; may be longer than needed.
        seq_len: positions to attend to, at least 1.
        block_size: tokens per block.
        scale: factor on the scores; None means head_dim ** -0.5. At 0.0 every position weighs the
            same.

    Returns:
        [num_heads, head_dim], dtype of `q`.
    """
    num_heads, head_dim = q.shape
    group_size = num_heads // k_cache.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    slots = build_slot_mapping(block_table, block_size, 0, seq_len)
    keys, values = k_cache[slots], v_cache[slots]  # [seq_len, num_kv_heads, head_dim]
    out = np.empty_like(q)
    for head in range(num_heads):
        kv_head = head // group_size
        scores = keys[:, kv_head] @ q[head] * scale  # [seq_len]
        weights = np.exp(scores - scores.max())
        out[head] = (weights / weights.sum()) @ values[:, kv_head]
    return out


def paged_attention(
    query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
) -> np.ndarray:
    """Every query token of a step attends to its own past: what the engine calls in each layer.

    This step's K and V are already in the cache. The token at position p sees positions 0 to p of
    its own request. No argument is changed, and the cache is not copied.

    Args:
        query: [num_tokens, num_heads, head_dim], the tokens of all requests end to end.
        layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], K at 0 and V at 1.
        batch: `block_tables` [num_reqs, max_blocks], `query_start_loc` [num_reqs + 1] (request i
            owns query tokens query_start_loc[i] to query_start_loc[i + 1]), `positions`
            [num_tokens], `block_size`, `num_reqs`.
        scale: factor on the scores.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of `query`.

    Source: `vllm/model_executor/layers/attention/attention.py:734`
    `unified_attention_with_output`.
    """
    num_kv_heads, head_dim = layer_cache.shape[3:]
    k_cache, v_cache = layer_cache.reshape(2, -1, num_kv_heads, head_dim)
    out = np.empty_like(query)
    for i in range(batch.num_reqs):
        for token in range(batch.query_start_loc[i], batch.query_start_loc[i + 1]):
            out[token] = attend_one(
                query[token],
                k_cache,
                v_cache,
                batch.block_tables[i],
                batch.positions[token] + 1,
                batch.block_size,
                scale,
            )
    return out
