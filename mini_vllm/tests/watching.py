"""Probes of the tests: a KV manager that reports its calls, and a model that checks its reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_vllm import EngineParts, LLMEngine
from mini_vllm.batch import ForwardBatch, Model
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.tests.support import Check, Moment, Scenario, drive

# ------------------------------------------------------------------ watching the KV manager


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a `KVCacheManager` method, with the state around it."""

    name: str
    request: Request
    kv: KVCacheManager
    before: dict[str, Any]
    num_new_tokens: int = 0
    adopted: tuple[KVCacheBlock, ...] = ()
    result: Any = None


class WatchedKVCacheManager(KVCacheManager):
    """A KV manager that reports every call to `watch` after it returned."""

    watch: Callable[[Call], None] | None = None

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        before = kv_state(self)
        result = super().get_computed_blocks(request)
        self._report(Call("get_computed_blocks", request, self, before, result=result))
        return result

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
        *rest: Any,
    ) -> list[KVCacheBlock] | None:
        before = kv_state(self)
        result = super().allocate_slots(
            request, num_new_tokens, new_computed_blocks, num_lookahead_tokens, *rest
        )
        adopted = tuple(new_computed_blocks or ())
        call = Call("allocate_slots", request, self, before, num_new_tokens, adopted, result)
        self._report(call)
        return result

    def free(self, request: Request) -> None:
        before = kv_state(self)
        super().free(request)
        self._report(Call("free", request, self, before))

    def _report(self, call: Call) -> None:
        if self.watch is not None:
            self.watch(call)


def watch_calls(
    scenario: Scenario, watch: Callable[[Call], None], check: Check | None = None
) -> dict[str, Request]:
    """Drive a scenario, calling `watch` after every call of the KV manager."""
    engine = scenario.engine(parts=EngineParts(kv_cache_manager=WatchedKVCacheManager))
    kv = engine.scheduler.kv
    assert isinstance(kv, WatchedKVCacheManager)
    kv.watch = watch
    return drive(scenario, check, engine)


def kv_state(kv: KVCacheManager) -> dict[str, Any]:
    """Everything a KV manager remembers, as plain data that compares by value."""
    pool = kv.block_pool
    return {
        "blocks": [(b.ref_cnt, b.block_hash, b.is_null) for b in pool.blocks],
        "queue": [b.block_id for b in pool.free_queue.get_all_free_blocks()],
        "num_free": pool.get_num_free_blocks(),
        "index": [(h, list(held)) for h, held in pool.cached_block_hash_to_block.items()],
        "tables": {r: [b.block_id for b in table] for r, table in kv.req_to_blocks.items()},
        "rest": {
            k: repr(v) for k, v in vars(kv).items() if k not in ("block_pool", "watch", "stats")
        },
    }


def engine_state(engine: LLMEngine) -> dict[str, Any]:
    """Everything an engine remembers between steps, the KV cache's contents included."""
    scheduler, cache = engine.scheduler, engine.runner.kv_cache
    slots = Request.__slots__
    return {
        "kv": kv_state(scheduler.kv),
        "waiting": [r.request_id for r in scheduler.waiting],
        "running": [r.request_id for r in scheduler.running],
        "requests": {
            request_id: {name: repr(getattr(request, name)) for name in slots}
            for request_id, request in scheduler.requests.items()
        },
        "generators": {
            k: repr(g.bit_generator.state) for k, g in engine.row_sampler.generators.items()
        },
        "cache": None if cache is None else cache.tobytes(),
    }


# ------------------------------------------------------------------ shadow KV (K1)


class ShadowModel:
    """Writes, instead of K and V, a fingerprint of each token's whole prefix; reads them all back.

    At every forward pass each scheduled slot receives the fingerprint of the tokens up to it. Then
    every position of every scheduled request, from 0 to its last scheduled token, is read through
    the block table and must hold the fingerprint of that request's own prefix (K1).
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.slots: dict[int, int] = {}
        self.output: SchedulerOutput | None = None
        """The plan being executed; the test sets it from a check."""

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Check K1, then let the wrapped model answer."""
        assert self.output is not None
        starts = batch.query_start_loc
        prefixes = [_fingerprints(r.all_token_ids) for r in self.output.scheduled_requests]
        for i, prefix in enumerate(prefixes):
            for token in range(starts[i], starts[i + 1]):
                position = int(batch.positions[token])
                self.slots[int(batch.slot_mapping[token])] = prefix[position]
        for i, prefix in enumerate(prefixes):
            for position in range(int(batch.seq_lens[i])):
                block, offset = divmod(position, batch.block_size)
                slot = int(batch.block_tables[i, block]) * batch.block_size + offset
                request = self.output.scheduled_requests[i]
                assert self.slots.get(slot) == prefix[position], (
                    f"K1: position {position} of {request} reads slot {slot}, which holds "
                    "another prefix or nothing"
                )
        return self.model.forward(batch)


def _fingerprints(token_ids: Sequence[int]) -> list[int]:
    """A number per position that depends on all tokens up to it."""
    prints: list[int] = []
    current = 0
    for token in token_ids:
        current = hash((current, token, len(prints)))
        prints.append(current)
    return prints


def drive_with_shadow(scenario: Scenario, engine: LLMEngine | None = None) -> dict[str, Request]:
    """Drive a scenario with K1 checked at every forward pass."""
    engine = engine if engine is not None else scenario.engine()
    shadow = ShadowModel(engine.model)
    engine.model = shadow

    def check(moment: Moment) -> None:
        shadow.output = moment.output

    return drive(scenario, check, engine)
