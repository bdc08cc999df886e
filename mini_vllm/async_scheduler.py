"""Planning one step ahead: the next step is planned before this one's tokens are known.

Promises: counters move in `schedule`, every token still to come has a placeholder, and a stop or an
abort is noticed one step late, its extra step ignored. The tokens equal those of `Scheduler`; the
plans differ. Mirrors `vllm/v1/core/sched/async_scheduler.py:12` `AsyncScheduler`, the default of
the real engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """A `Scheduler` that may be asked for a plan while the one before it is still in flight."""

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`; then counters advance and rows that sample get placeholders."""
        plan = super().schedule()
        for request in plan.scheduled_requests:
            plan.advance(request)
            known = request.num_tokens + request.num_output_placeholders
            if request.num_computed_tokens >= known:
                plan.sampling_req_ids.add(request.request_id)
                num_drafts = len(plan.spec_token_ids.get(request.request_id, ()))
                request.num_output_placeholders += 1 + num_drafts
                request.spec_token_ids = (-1,) * self.config.num_speculative_tokens
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """As `Scheduler.update_from_output`, of a plan that later plans have built upon.

        Counters have moved already; only what was rejected moves them back. A request preempted
        meanwhile takes its tokens too, and may even end in the waiting queue.
        """
        finished = []
        for request in plan.scheduled_requests:
            tokens = sampled.get(request.request_id)
            if not tokens or request.is_finished:
                continue
            rejected = plan.num_rejected(request.request_id, tokens)
            if request.num_computed_tokens > 0:
                request.num_computed_tokens -= rejected
            if request.num_output_placeholders > 0:
                request.num_output_placeholders -= rejected
            if request.num_tokens_to_discard:  # sampled before a reset of the prefix cache
                request.num_tokens_to_discard -= 1
            elif self._take(request, tokens):
                finished.append(request)
                self._release(request)
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        return finished

    def _take(self, request: Request, tokens: Sequence[int]) -> bool:
        """Append tokens in place of placeholders up to the first that ends the request."""
        queue, before = self._queue_of(request), request.num_tokens
        ended = request.append_output_tokens(tokens, self.max_model_len)
        request.num_output_placeholders -= request.num_tokens - before
        if queue is self.running:
            num_known = request.num_computed_tokens - request.num_output_placeholders
            self.kv.cache_blocks(request, num_known)
        elif ended:
            queue.remove(request)
        return ended
