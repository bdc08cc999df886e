"""Who waits, who runs, and in which order: the queues of a scheduler and its policy.

Promises: under "fcfs" who came first is served first and preempted requests go in front; under
"priority" every queue is sorted and the least urgent is preempted. Knows no tokens, blocks or
plans. Mirrors `vllm/v1/core/sched/request_queue.py:20` `RequestQueue`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from mini_vllm.config import SchedulerConfig
from mini_vllm.request import Request, RequestStatus


class RequestQueues:
    """`running` in order of admission, and two queues of those who wait.

    `skipped` holds waiting requests that a gate passed over; it is served before `waiting`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        """Empty queues under `config.policy`."""
        self.config = config
        self.waiting: deque[Request] = deque()
        self.skipped: deque[Request] = deque()
        self.running: list[Request] = []

    def has_unfinished_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.skipped or self.running)

    def _next_queue(self) -> deque[Request]:
        """Whose head is looked at next: `skipped` first, or the more urgent head."""
        if self.config.policy == "priority" and self.skipped and self.waiting:
            return self.waiting if self.waiting[0] < self.skipped[0] else self.skipped
        return self.skipped or self.waiting

    def _queue_of(self, request: Request) -> deque[Request] | list[Request]:
        """The queue a live request stands in."""
        if request.status == RequestStatus.RUNNING:
            return self.running
        return self.skipped if request in self.skipped else self.waiting

    def _enqueue(self, request: Request) -> None:
        """Put a request where its policy wants it: among the `skipped` if it waits for more."""
        queue = self.skipped if request.waits_for else self.waiting
        if self.config.policy == "priority":
            insort(queue, request)
        elif request.status == RequestStatus.PREEMPTED:
            queue.appendleft(request)
        else:
            queue.append(request)

    def _set_aside(self, passed: list[Request]) -> None:
        """Requests that this step passed over go in front of those passed over before."""
        self.skipped.extendleft(reversed(passed))

    def _pop_victim(self) -> Request:
        """Take the request to preempt out of `running`: the last, or the least urgent."""
        if self.config.policy == "fcfs":
            return self.running.pop()
        victim = max(self.running, key=lambda r: (r.priority, r.arrival_time))
        self.running.remove(victim)
        return victim
