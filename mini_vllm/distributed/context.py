"""The K and V of one sequence spread over ranks: each attends to what it holds, then they merge.

Promises: position p is held by rank p % size alone, a block of the scheduler is `size`
times as long as one of a rank, and the merged output is that of attention over the whole sequence,
to rounding. Mirrors `vllm/v1/attention/backends/utils.py:857` `get_dcp_local_seq_lens` and
`vllm/v1/attention/ops/dcp_alltoall.py:39` `_lse_weighted_combine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.distributed.collectives import Communicator


def num_local(seq_lens: np.ndarray, rank: int, size: int) -> np.ndarray:
    """How many of the positions 0 to seq_len - 1 rank `rank` of `size` holds."""
    return (seq_lens + size - 1 - rank) // size


def local_batch(batch: ForwardBatch, rank: int, size: int) -> ForwardBatch:
    """The batch as one rank's cache sees it: its own block size, its own slots.

    A token that another rank holds is written to the null block, which is not read.
    """
    block, offset = np.divmod(batch.slot_mapping, batch.block_size)
    block_size = batch.block_size // size
    slots = np.where(offset % size == rank, block * block_size + offset // size, 0)
    return replace(batch, slot_mapping=slots, block_size=block_size)


def merge(outputs: np.ndarray, lses: np.ndarray) -> np.ndarray:
    """Attention over all keys from attention over disjoint sets of them.

    A part that saw keys with a sum of exponents e^lse counts by that sum: o = sum(o_i w_i) with
    w_i = e^(lse_i - lse). A part that saw none has lse = -inf and counts nothing.

    Args:
        outputs: [parts, num_tokens, num_heads, head_dim].
        lses: [parts, num_tokens, num_heads], not -inf in all parts.

    Returns:
        [num_tokens, num_heads, head_dim]
    """
    weights = np.exp(lses - lses.max(axis=0))
    total = weights[0].copy()
    merged = outputs[0] * weights[0][..., None]
    for part in range(1, len(outputs)):
        total += weights[part]
        merged += outputs[part] * weights[part][..., None]
    return merged / total[..., None]


class ContextParallelAttention:
    """An `AttentionFn` over this rank's share of each sequence's K and V.

    The ranks of the group have the same KV head and different query heads. Each gathers the
    queries of all, attends with all their heads to the keys it holds, and sends every rank its
    heads' partial outputs with the logarithm of their sum of exponents.
    """

    def __init__(self, group: Communicator, layers: Sequence[int]) -> None:
        """Args: the ranks that share the sequences; numbers of the layers that call, in turn."""
        self.group = group
        self._layers, self._calls = layers, 0

    def __call__(
        self, query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
    ) -> np.ndarray:
        """As `paged_attention`, with `batch` from `local_batch`."""
        group, num_heads = self.group, query.shape[1]
        name = f"model.layers.{self._layers[self._calls % len(self._layers)]}.self_attn"
        self._calls += 1
        queries = np.concatenate(group.all_gather(query, f"{name}.query"), axis=1)
        out, lse = self._attend(queries * query.dtype.type(scale), layer_cache, batch)
        packed = np.concatenate([out, lse[..., None]], axis=2)  # [num_tokens, all heads, dim + 1]
        parts = [packed[:, i * num_heads : (i + 1) * num_heads] for i in range(group.size)]
        lengths = [len(query)] * group.size
        received = np.stack(group.all_to_all(parts, lengths, f"{name}.merge"))
        return merge(received[..., :-1], received[..., -1])

    def _attend(
        self, query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch
    ) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [num_tokens, heads, head_dim] and log-sum-exps [num_tokens, heads], one request
        after the other. `batch.positions` and `seq_lens` are those of the whole sequence."""
        rank, size = self.group.rank, self.group.size
        out = np.zeros_like(query)
        lse = np.full(query.shape[:2], -np.inf, query.dtype)
        held = num_local(batch.seq_lens, rank, size)
        for i in np.flatnonzero(held):
            tokens = slice(batch.query_start_loc[i], batch.query_start_loc[i + 1])
            table = batch.block_tables[i, : -(-held[i] // batch.block_size)]
            keys, values = layer_cache[:, table].reshape(2, -1, layer_cache.shape[-1])[:, : held[i]]
            visible = num_local(batch.positions[tokens] + 1, rank, size)  # [tokens]
            scores = query[tokens] @ keys.T  # [tokens, heads, held]
            hidden = np.arange(held[i]) >= visible[:, None]
            scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
            highest = scores.max(axis=2)
            highest[visible == 0] = 0
            np.exp(scores - highest[..., None], out=scores)
            total = scores.sum(axis=2)
            some = visible > 0
            out[tokens][some] = (scores[some] @ values) / total[some][..., None]
            lse[tokens][some] = np.log(total[some]) + highest[some]
        return out, lse
