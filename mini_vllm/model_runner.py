"""From a plan to logits: owns the KV cache and builds the ragged batch.

Promises: one row of logits per scheduled request, in scheduling order, partial prefills included,
and one more per draft to be verified and per prompt token asked for; the sampler drops what
it does not need. Sees plans, no scheduler and no KV manager. Mirrors
`vllm/v1/worker/gpu_model_runner.py:415` `GPUModelRunner`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch, Model
from mini_vllm.kv_cache_interface import KVCacheSpec, allocate_caches
from mini_vllm.plan import SchedulerOutput


class ModelRunner:
    """Holds K and V of all blocks and feeds a model one step at a time."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        kv_specs: Sequence[KVCacheSpec] = (),
        dtype: np.dtype | type | str = np.float32,
    ) -> None:
        """Allocate the cache.

        Args:
            model: what computes the logits; may be replaced between steps.
            num_blocks: physical blocks, the null block included.
            block_size: tokens per block.
            kv_specs: what each group of layers keeps; empty for a model without K and V.
            dtype: of the cache.

        Raises:
            ValueError: groups whose blocks differ in size, or a cache that does not fit the
                machine's memory; the bytes are named.
        """
        self.model = model
        self.block_size = block_size
        self.kv_specs = tuple(kv_specs)
        self.in_flight: dict[str, Sequence[int]] = {}
        """Tokens sampled by a step that the scheduler has not been told of yet, per request."""
        try:
            self.kv_caches = allocate_caches(kv_specs, num_blocks, block_size, dtype)
        except MemoryError:
            layers = max(len(spec.layers) for spec in kv_specs)
            shape = layers, *kv_specs[0].shape(num_blocks, block_size)[1:]
            size = np.prod(shape, dtype=float) * np.dtype(dtype).itemsize
            raise ValueError(
                f"num_blocks={num_blocks}: a KV cache of {size / 2**30:,.1f} GiB does not fit, "
                "need fewer blocks"
            ) from None

    @property
    def kv_cache(self) -> np.ndarray | None:
        """K and V of the first group of layers, of all layers where there is one group."""
        return self.kv_caches[0] if self.kv_caches else None

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
        counts.cumsum(out=query_start_loc[1:])
        # Token t of request i sits at position computed[i] + (t - query_start_loc[i]).
        owner = np.arange(num_reqs).repeat(counts.astype(np.intp, copy=False))  # [num_tokens]
        positions = np.arange(len(owner)) + (computed - query_start_loc[:-1])[owner]
        batch = ForwardBatch(
            token_ids=self._token_ids(plan),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=computed + counts,
            logits_indices=self._logits_indices(plan, query_start_loc[1:] - 1),
            **self._tables_of(0, plan.block_ids, plan, owner, positions),
        )
        if plan.group_block_ids:
            batch.groups = tuple(
                replace(batch, **self._tables_of(group, table, plan, owner, positions))
                for group, table in enumerate(plan.group_block_ids, 1)
            )
        return batch

    def _tables_of(
        self, group: int, block_ids: Mapping[str, Sequence[int]], plan: SchedulerOutput,
        owner: np.ndarray, positions: np.ndarray,
    ) -> dict[str, Any]:  # fmt: skip
        """The fields of a batch that differ from group to group: where its K and V live."""
        spec = self.kv_specs[group] if self.kv_specs else None
        size = (spec.block_size if spec else None) or self.block_size
        block_tables = self._block_tables([block_ids[r] for r in plan.num_scheduled_tokens])
        block, offset = np.divmod(positions, size)
        return {
            "block_tables": block_tables,
            "slot_mapping": block_tables[owner, block] * size + offset,
            "block_size": size,
            "sliding_window": spec.sliding_window if spec else None,
            "kv_cache": self.kv_caches[group] if self.kv_caches else None,
        }

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
