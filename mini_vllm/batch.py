"""What one forward pass needs: a ragged batch of tokens and where their K and V live.

Promises: names, shapes and meanings are upstream's, so `slot_mapping` here is `slot_mapping`
there. Mirrors the tensors that `vllm/v1/worker/gpu_model_runner.py:1863`
`GPUModelRunner._prepare_inputs` builds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

_GROUP_SLOTS = 1024


@dataclass
class ForwardBatch:
    """Tokens of all scheduled requests, one request after the other.

    Integer arrays are int64. `kv_cache` is the runner's, passed in and written by the model:
    [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], K at index 0 and V at 1, the
    layout of `vllm/v1/attention/backends/flash_attn.py:140`
    `FlashAttentionBackend.get_kv_cache_shape` per layer. Models without a cache leave it None.
    """

    token_ids: np.ndarray
    """[num_tokens]"""
    positions: np.ndarray
    """[num_tokens] index of each token in its own sequence"""
    slot_mapping: np.ndarray
    """[num_tokens] block_id * block_size + offset: where each token's K and V are written"""
    query_start_loc: np.ndarray
    """[num_reqs + 1] request i owns tokens query_start_loc[i] to query_start_loc[i + 1]"""
    seq_lens: np.ndarray
    """[num_reqs] tokens whose K and V exist after this step's writes"""
    block_tables: np.ndarray
    """[num_reqs, max_blocks] physical block ids, 0 beyond a sequence's end"""
    logits_indices: np.ndarray
    """[num_reqs] index of each request's last scheduled token: one row of logits each"""
    block_size: int = 16
    kv_cache: np.ndarray | None = field(default=None, repr=False)

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Requests with a single query token, grouped by length.

        Sequences are sorted by length and cut into groups. A group's shortest member has at least
        three quarters of the blocks of its longest, so padding stays small, and a group holds at
        most `_GROUP_SLOTS` token slots, so what is gathered for it stays in a core's cache.
        """
        query_lens = np.diff(self.query_start_loc)
        rows = np.flatnonzero(query_lens == 1)
        if len(rows) > 1:
            rows = rows[np.argsort(-self.seq_lens[rows], kind="stable")]
        num_blocks = (-(-self.seq_lens[rows] // self.block_size)).tolist()
        groups, start = [], 0
        while start < len(rows):
            widest = num_blocks[start]
            most = max(1, _GROUP_SLOTS // (widest * self.block_size))
            stop = start + 1
            while stop < len(rows) and stop - start < most and num_blocks[stop] >= 0.75 * widest:
                stop += 1
            groups.append(self._decode_group(rows[start:stop], widest))
            start = stop
        return groups

    def _decode_group(self, rows: np.ndarray, num_blocks: int) -> DecodeGroup:
        lens = self.seq_lens[rows]
        width = num_blocks * self.block_size
        hidden = np.arange(width)[None, :] >= lens[:, None]  # [group, width]
        dtype = np.dtype(np.float32) if self.kv_cache is None else self.kv_cache.dtype
        return DecodeGroup(
            token_rows=self.query_start_loc[rows],
            block_tables=np.ascontiguousarray(self.block_tables[rows, :num_blocks]),
            bias=hidden_bias(hidden, dtype)[:, None, None, :] if hidden.any() else None,
        )

    @cached_property
    def prefill_rows(self) -> list[int]:
        """Requests with more than one query token."""
        return [int(i) for i in np.flatnonzero(np.diff(self.query_start_loc) > 1)]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode requests of similar length, attended to in one batched product."""

    token_rows: np.ndarray
    """[group] index of each request's only query token"""
    block_tables: np.ndarray
    """[group, num_blocks]"""
    bias: np.ndarray | None
    """[group, 1, 1, num_blocks * block_size], -inf beyond a sequence's end; None if no padding"""


def hidden_bias(hidden: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What to add to attention scores: -inf where `hidden` is True, 0 elsewhere, same shape."""
    return np.where(hidden, dtype.type(-np.inf), dtype.type(0))
