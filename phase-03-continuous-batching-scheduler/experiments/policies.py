"""The policies compared: mini_vllm's scheduler with its settings, and four not upstream's.

FCFS, chunks, thresholds and priorities are settings of `vllm/v1/core/sched/scheduler.py:64`
`Scheduler`, whose decisions mini_vllm makes. The four subclasses below change one method each and
have no upstream counterpart in v0.22.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mini_vllm import KVCacheManager, Scheduler, SchedulerConfig, SchedulerOutput


class StaticBatching(Scheduler):
    """Not upstream's. Admits only into an empty engine: a batch is served to its last request.

    Kinder than real static batching: finished requests cost nothing, and nothing is padded.
    """

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        if not output.scheduled_requests:
            super()._schedule_waiting(output, budget)


class PrefillFirst(Scheduler):
    """Not upstream's (V1). A step is either prompts, whole, or decodes; prompts go first."""

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        self._schedule_waiting(output, self.config.max_num_batched_tokens)
        if not output.scheduled_requests:
            self._schedule_running(output, self.config.max_num_batched_tokens)
        return output


class OldestFirst(Scheduler):
    """Not upstream's. Preempts the request that has run longest."""

    def _pop_victim(self):
        return self.running.pop(0)


class ReservingKV(KVCacheManager):
    """Not upstream's. Admits only what fits at its longest beside all others at theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reserved: dict[str, int] = {}

    def full_sequence_fits(self, request, new_computed_blocks) -> bool:
        longest = request.num_prompt_tokens + request.sampling_params.max_tokens - 1
        needed = -(-longest // self.block_size)
        fits = sum(self.reserved.values()) + needed <= len(self.block_pool.blocks) - 1
        if fits:
            self.reserved[request.request_id] = needed
        return fits

    def free(self, request) -> None:
        super().free(request)
        self.reserved.pop(request.request_id, None)


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduler and its settings."""

    scheduler: Callable[..., Scheduler] = Scheduler
    kv: Callable[..., KVCacheManager] = KVCacheManager
    budget: int = 512
    settings: dict[str, Any] = field(default_factory=dict)
    caching: bool = True

    def build(self, num_blocks: int, max_num_seqs: int, block_size: int = 16) -> Scheduler:
        """An idle scheduler over an empty pool."""
        kv = self.kv(num_blocks, block_size, self.caching)
        config = SchedulerConfig(
            max_num_seqs=min(max_num_seqs, self.budget),
            max_num_batched_tokens=self.budget,
            **self.settings,
        )
        return self.scheduler(kv, config)
