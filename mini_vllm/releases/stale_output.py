"""What 0.27.0 changed for tokens that are under way when their request is preempted.

Places are those of the release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.request import Request


class StaleOutputKept(AsyncScheduler):
    """A preemption takes the placeholders away; what is under way is delivered, and counts nothing.

    At the pin the placeholders stay, and the tokens that come take them down. Two plans are under
    way at most, so the tokens are there before the request could be resumed.
    `vllm/v1/core/sched/scheduler.py`, lines 1295-1306 of 0.27.1 `Scheduler._preempt_request`;
    PR 48245.
    """

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As the scheduler below it; the one frame under way of each request is dropped."""
        stale = [r for r in self.running if r.num_output_placeholders]
        done = super().reset_prefix_cache(reset_running_requests)
        for request in stale if reset_running_requests else ():
            request.num_tokens_to_discard = 1
        return done

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        request.num_output_placeholders = 0

    def _take(self, request: Request, tokens: Sequence[int]) -> bool:
        is_stale = not request.num_output_placeholders
        ended = super()._take(request, tokens)
        if is_stale:
            request.num_output_placeholders = 0
        return ended
