"""What 0.31.0 changed for requests that are passed over: they stay in the one queue.

Places are those of the release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler


class OneQueue(Scheduler):
    """A request that a gate passes over goes back to the front of the queue it came from.

    At the pin it goes to a second queue that is served first, so who is behind a grammar that is
    not compiled changes places with it. `vllm/v1/core/sched/scheduler.py`, lines 924-934 and
    1395-1402 of 0.31.0 `Scheduler.schedule`. The queue of those that hold blocks while they wait,
    new there too, is one of connectors, which are refused with this rule.
    """

    def _next_queue(self) -> deque[Request]:
        return self.waiting

    def _enqueue(self, request: Request) -> None:
        if self.config.policy == "priority":
            insort(self.waiting, request)
        elif request.status == RequestStatus.PREEMPTED:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _set_aside(self, passed: list[Request]) -> None:
        if self.config.policy == "priority":
            for request in passed:
                insort(self.waiting, request)
        else:
            self.waiting.extendleft(reversed(passed))
