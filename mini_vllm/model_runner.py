"""From a plan to logits: owns the KV cache and builds the ragged batch.

Promises: one row of logits per scheduled request, in scheduling order, partial prefills included,
and one more per draft to be verified and per prompt token asked for; whoever samples drops what
it needs not. Sees plans, no scheduler and no KV manager. Mirrors
`vllm/v1/worker/gpu_model_runner.py:415` `GPUModelRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_vllm.batch import ForwardBatch, Model
from mini_vllm.plan import SchedulerOutput


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

        Raises:
            ValueError: the cache does not fit the machine's memory; the bytes are named.
        """
        self.model = model
        self.block_size = block_size
        self.kv_cache: np.ndarray | None = None
        self.in_flight: dict[str, Sequence[int]] = {}
        """Tokens sampled by a step that the scheduler has not been told of yet, per request."""
        if kv_shape is not None:
            num_layers, num_kv_heads, head_dim = kv_shape
            shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
            try:
                self.kv_cache = np.zeros(shape, dtype=dtype)
            except MemoryError:
                size = np.prod(shape, dtype=float) * np.dtype(dtype).itemsize
                raise ValueError(
                    f"num_blocks={num_blocks}: a KV cache of {size / 2**30:,.1f} GiB does not fit"
                ) from None

    def execute(self, plan: SchedulerOutput) -> np.ndarray:
        """Run one bound plan; logits [plan.num_rows, vocab_size]."""
        return self.model.forward(self.prepare_batch(plan))

    def prepare_batch(self, plan: SchedulerOutput) -> ForwardBatch:
        """Lay the scheduled tokens of all requests end to end and look up their slots.

        The plan must be bound (`SchedulerOutput.bind`): it then knows each request's block table
        and the position of its first scheduled token.
        """
        num_reqs = len(plan.scheduled_requests)
        counts = np.fromiter(plan.num_scheduled_tokens.values(), np.int64, num_reqs)
        starts = [plan.num_computed_tokens[r] for r in plan.num_scheduled_tokens]
        computed = np.array(starts, dtype=np.int64)
        query_start_loc = np.zeros(num_reqs + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        # Token t of request i sits at position computed[i] + (t - query_start_loc[i]).
        owner = np.repeat(np.arange(num_reqs), counts.astype(np.intp))  # [num_tokens]
        positions = np.arange(len(owner)) + (computed - query_start_loc[:-1])[owner]
        block_tables = self._block_tables([plan.block_ids[r] for r in plan.num_scheduled_tokens])
        block, offset = np.divmod(positions, self.block_size)
        return ForwardBatch(
            token_ids=self._token_ids(plan),
            positions=positions,
            slot_mapping=block_tables[owner, block] * self.block_size + offset,
            query_start_loc=query_start_loc,
            seq_lens=computed + counts,
            block_tables=block_tables,
            logits_indices=self._logits_indices(plan, query_start_loc[1:] - 1),
            block_size=self.block_size,
            kv_cache=self.kv_cache,
        )

    @staticmethod
    def _logits_indices(plan: SchedulerOutput, last: np.ndarray) -> np.ndarray:
        """[num_rows] each request's last token and, before it, those whose rows are wanted too.

        As `vllm/v1/worker/gpu_model_runner.py:2713` `GPUModelRunner._calc_spec_decode_metadata`.
        """
        if not plan.spec_token_ids and not plan.prompt_rows:
            return last
        rows = np.array([plan.rows_of(r) for r in plan.num_scheduled_tokens], dtype=np.int64)
        return np.arange(rows.sum()) + np.repeat(last + 1 - np.cumsum(rows), rows.astype(np.intp))

    def _token_ids(self, plan: SchedulerOutput) -> np.ndarray:
        """[num_tokens] the scheduled tokens: known ones, those in flight, then drafts."""
        token_ids: list[int] = []
        for request in plan.scheduled_requests:
            request_id = request.request_id
            start, count = (
                plan.num_computed_tokens[request_id],
                plan.num_scheduled_tokens[request_id],
            )
            stop, known = start + count, request.all_token_ids
            if stop <= len(known):
                token_ids += known[start:stop]
                continue
            beyond = [*self.in_flight.get(request_id, ()), *plan.spec_token_ids.get(request_id, ())]
            token_ids += (known[start:] + beyond[max(0, start - len(known)) :])[:count]
        return np.array(token_ids, dtype=np.int64)

    @staticmethod
    def _block_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
        """[num_reqs, longest table], padded with the null block 0."""
        width = max(map(len, tables), default=0)
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        return np.array(padded, dtype=np.int64).reshape(len(tables), width)
