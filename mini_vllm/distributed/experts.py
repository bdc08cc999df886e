"""Whole experts on each rank: tokens travel to them and their results back.

Promises: each (token, expert) pair is computed once, by the rank that has the expert; a token's
results are weighted and added in the order of its choices, as in one process. The attention is
tensor parallel, so all ranks have all tokens: each answers for its share of them. Mirrors
`vllm/config/parallel.py:617` `ParallelConfig.use_sequence_parallel_moe`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_vllm.distributed.collectives import Communicator, bounds
from mini_vllm.distributed.groups import experts_of
from mini_vllm.models.mlp import Mlp
from mini_vllm.models.moe import moe_forward_grouped


class ExpertParallel:
    """Dispatch, compute, combine, gather: an `ExpertsFn` over the experts held here."""

    def __init__(self, group: Communicator, name: str, num_experts: int) -> None:
        """Args: the ranks that share the experts; the layer's name; experts of the layer."""
        self.group, self.name, self.num_experts = group, name, num_experts
        self.owners = owner_of_experts(num_experts, group.size)
        self.first = experts_of(num_experts, group.rank, group.size).start

    def __call__(
        self, x: np.ndarray, experts: Sequence[Mlp], topk_ids: np.ndarray, topk_weights: np.ndarray
    ) -> np.ndarray:
        """As `moe_forward_grouped`, with `experts` those of this rank, by local id.

        Every rank knows all choices, for all have computed the router on the same tokens, so the
        numbers of rows to expect need not be sent.
        """
        group, top_k = self.group, topk_ids.shape[1]
        owners = self.owners[topk_ids]  # [num_tokens, k]
        shares = bounds(len(x), group.size)
        mine = shares[group.rank]
        # the pairs of my tokens, by owner: indices into the flattened choices of my share
        pairs = [np.flatnonzero(owners[mine].reshape(-1) == rank) for rank in range(group.size)]
        rows = [x[mine][of_rank // top_k] for of_rank in pairs]
        arriving = [
            topk_ids[share].reshape(-1)[owners[share].reshape(-1) == group.rank] for share in shares
        ]
        lengths = [len(ids) for ids in arriving]
        received = np.concatenate(group.all_to_all(rows, lengths, f"{self.name}.dispatch"))
        computed = self._compute(received, experts, np.concatenate(arriving) - self.first)
        returned = np.split(computed, np.cumsum(lengths)[:-1])
        back = group.all_to_all(returned, [len(p) for p in pairs], f"{self.name}.combine")
        results = np.empty((owners[mine].size, x.shape[1]), x.dtype)  # [my tokens * k, hidden]
        for of_rank, values in zip(pairs, back, strict=True):
            results[of_rank] = values
        results *= topk_weights[mine].reshape(-1, 1).astype(x.dtype, copy=False)
        by_slot = results.reshape(-1, top_k, x.shape[1])
        out = by_slot[:, 0].copy()
        for slot in range(1, top_k):
            out += by_slot[:, slot]
        sizes = [share.stop - share.start for share in shares]
        return np.concatenate(group.all_gather(out, f"{self.name}.gather", sizes))

    def _compute(self, rows: np.ndarray, experts: Sequence[Mlp], local: np.ndarray) -> np.ndarray:
        """Each row through the one expert it came for."""
        if not len(rows):
            return rows
        return moe_forward_grouped(
            rows, experts, local[:, None], np.ones((len(rows), 1), rows.dtype)
        )


def owner_of_experts(num_experts: int, num_ranks: int) -> np.ndarray:
    """int64 [num_experts] the rank that holds each expert."""
    sizes = [len(experts_of(num_experts, rank, num_ranks)) for rank in range(num_ranks)]
    return np.repeat(np.arange(num_ranks), sizes)
