"""From a scheduling plan to logits: owns the KV cache and builds the ragged batch.

Promises: one row of logits per scheduled request, in scheduling order, partial prefills included;
whoever samples drops those. Mirrors `vllm/v1/worker/gpu_model_runner.py:415` `GPUModelRunner`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.scheduler import SchedulerOutput


class Model(Protocol):
    """Anything that turns a batch into logits [num_reqs, vocab_size]."""

    def forward(self, batch: ForwardBatch) -> np.ndarray: ...


class ModelRunner:
    """Holds K and V of all blocks and feeds a model one step at a time."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        kv_shape: tuple[int, int, int] | None = None,
        dtype: np.dtype | type | str = np.float32,
    ) -> None:
        """Allocate the cache.

        Args:
            model: what computes the logits; may be replaced between steps.
            num_blocks: physical blocks, the null block included.
            block_size: tokens per block.
            kv_shape: (num_layers, num_kv_heads, head_dim), or None for a model without K and V.
            dtype: of the cache.
        """
        self.model = model
        self.block_size = block_size
        self.kv_cache: np.ndarray | None = None
        if kv_shape is not None:
            num_layers, num_kv_heads, head_dim = kv_shape
            shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
            self.kv_cache = np.zeros(shape, dtype=dtype)

    def execute(self, output: SchedulerOutput, kv: KVCacheManager) -> np.ndarray:
        """Run one step; logits [len(output.scheduled_requests), vocab_size]."""
        return self.model.forward(self.prepare_batch(output, kv))

    def prepare_batch(self, output: SchedulerOutput, kv: KVCacheManager) -> ForwardBatch:
        """Lay the scheduled tokens of all requests end to end and look up their slots.

        Called after `schedule()` and before `update_from_output()`, so each request's
        `num_computed_tokens` is still the position of its first scheduled token.
        """
        requests = output.scheduled_requests
        num_reqs = len(requests)
        counts = np.fromiter(output.num_scheduled_tokens.values(), np.int64, num_reqs)
        computed = np.fromiter((r.num_computed_tokens for r in requests), np.int64, num_reqs)
        token_ids: list[int] = []
        for request, count in zip(requests, output.num_scheduled_tokens.values(), strict=True):
            start = request.num_computed_tokens
            if count == 1:
                token_ids.append(request.all_token_ids[start])
            else:
                token_ids += request.all_token_ids[start : start + count]

        query_start_loc = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        # Token t of request i sits at position computed[i] + (t - query_start_loc[i]).
        owner = np.repeat(np.arange(num_reqs), counts)  # [num_tokens]
        positions = np.arange(len(owner)) + (computed - query_start_loc[:-1])[owner]
        block_tables = self._block_tables([kv.get_block_ids(r.request_id) for r in requests])
        block, offset = np.divmod(positions, self.block_size)
        return ForwardBatch(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            slot_mapping=block_tables[owner, block] * self.block_size + offset,
            query_start_loc=query_start_loc,
            seq_lens=computed + counts,
            block_tables=block_tables,
            logits_indices=query_start_loc[1:] - 1,
            block_size=self.block_size,
            kv_cache=self.kv_cache,
        )

    @staticmethod
    def _block_tables(tables: list[list[int]]) -> np.ndarray:
        """[num_reqs, longest table], padded with the null block 0."""
        width = max(map(len, tables), default=0)
        padded = [table + [0] * (width - len(table)) for table in tables]
        return np.array(padded, dtype=np.int64).reshape(len(tables), width)
