"""What 0.23.0 changed for loads that wait: they leave the blocks that prefills still need.

Places are those of the release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.config import SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.plan import ExternalTokens, Gate, SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler


class LoadsReserve(Scheduler):
    """A load that waits begins only if the prefills and loads under way can still end.

    It holds its blocks without a forward pass and cannot be preempted, so at the pin loads behind a
    head that does not fit may hold what the head needs, and the queue stands for ever (45388). As
    there, a load that failed whole is still among those under way when it asks again, so it is
    counted against itself: `phase-15-disaggregated-serving/test_since.py`.
    `vllm/v1/core/sched/scheduler.py`, lines 753-771 and 2130-2153 of 0.23.0
    `Scheduler._inflight_prefill_reserved_blocks`; PR 44560.
    """

    def __init__(
        self, kv: KVCacheManager, config: SchedulerConfig | None = None, gates: Sequence[Gate] = ()
    ) -> None:
        """As the scheduler below it, with nothing under way."""
        super().__init__(kv, config, gates)
        self._inflight_prefills: dict[str, Request] = {}

    def schedule(self) -> SchedulerOutput:
        """As the scheduler below it; a request whose prompt is planned to its end needs no more."""
        plan = super().schedule()
        ahead = bool(plan.num_computed_tokens)  # counters have moved
        for request in plan.scheduled_requests:
            count = plan.num_scheduled_tokens[request.request_id]
            if (
                request.request_id in plan.sampling_req_ids
                if ahead
                else self.needs_sample(request, count)
            ):
                self._inflight_prefills.pop(request.request_id, None)
        return plan

    def _allocate(
        self, request: Request, num_new: int, hits: Sequence[KVCacheBlock],
        external: ExternalTokens, was_loaded: bool,
    ) -> bool:  # fmt: skip
        if external.load_async:
            needed = self.kv.get_num_blocks_to_allocate(
                request.request_id, request.num_computed_tokens, hits
            )
            free = self.kv.block_pool.get_num_free_blocks()
            if needed > free - self._inflight_prefill_reserved_blocks():
                return False
        fits = super()._allocate(request, num_new, hits, external, was_loaded)
        if fits and (
            external.load_async or request.num_computed_tokens + num_new < request.num_tokens
        ):
            self._inflight_prefills[request.request_id] = request
        return fits

    def _inflight_prefill_reserved_blocks(self) -> int:
        """Blocks that the prefills and loads under way do not hold yet."""
        return sum(
            self.kv.get_num_blocks_to_allocate(request.request_id, request.num_tokens)
            for request in self._inflight_prefills.values()
        )

    def _free(self, request: Request) -> None:
        self._inflight_prefills.pop(request.request_id, None)
        super()._free(request)


class AsyncLoadsReserve(LoadsReserve, AsyncScheduler):
    """`AsyncScheduler` with the rule."""
