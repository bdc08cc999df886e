"""Lab 03-01: the scheduler's step, first with toy memory, then as the engine's own.

Part A, `clamp` and `schedule_step`: two phases and three limits, over `Req` and `FakeKV`. Part B,
`Scheduler`: the same loop over real block tables, with preemption, prefix hits and two policies,
as `vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`. The class is empty: what it decides
is recorded, and queues, records and arguments are given in `SchedulerBase`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mini_vllm import KVCacheManager, Request, RequestStatus, SchedulerConfig, SchedulerOutput

# --- Part A: two phases, three limits ------------------------------------------------------------


@dataclass(slots=True)
class Req:
    """Given. A request as two numbers: tokens known, and tokens whose K and V are in the cache."""

    rid: str
    num_tokens: int
    num_computed: int = 0


class FakeKV:
    """Given. Memory as a number of free slots, one per token (not those of `max_num_seqs`)."""

    def __init__(self, num_slots: int) -> None:
        self.free_slots = num_slots

    def allocate(self, req: Req, n: int) -> bool:
        """Take `n` slots for `req`; False, and nothing taken, when fewer are free."""
        if n > self.free_slots:
            return False
        self.free_slots -= n
        return True


def clamp(num_new: int, budget: int, threshold: int) -> int:
    """How many of `num_new` wanted tokens one request may compute in this step.

    Args:
        num_new: tokens it lacks.
        budget: tokens the step has left for everybody.
        threshold: most tokens of one request in one step; 0 or less means no such bound.

    Returns:
        The smallest of the three bounds that apply, never below 0.
    """
    raise NotImplementedError


def schedule_step(
    waiting: deque[Req],
    running: list[Req],
    kv: FakeKV,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    threshold: int = 0,
) -> dict[str, int]:
    """Plan one step: who computes how many tokens.

    What holds afterwards:

    - One budget serves everybody. Running requests come before waiting ones, each queue in its
      order, and each request gets the `clamp` of what it lacks.
    - `kv` has given memory for the planned tokens and no more. It never refuses a running request.
    - Who is admitted runs, behind those who ran already; never more than `max_num_seqs` run.
    - Who is refused memory stays in front of `waiting`, and nobody overtakes it.
    - `num_computed` is what it was: the step has not run yet.

    Budget 10, three prompts of 8: the plan is {"a": 8, "b": 2}; a and b run, c waits.

    Args:
        waiting: requests not admitted yet, the oldest in front.
        running: admitted requests, the oldest first.
        kv: memory; ask before you move anything.
        max_num_batched_tokens: the step's token budget, for all requests together.
        max_num_seqs: most requests running at once.
        threshold: see `clamp`.

    Returns:
        Tokens per request id, in the order of scheduling, without zero entries.
    """
    raise NotImplementedError


# --- Part B: the engine's scheduler --------------------------------------------------------------


class SchedulerBase:
    """Given: what comes in and goes out, and the records of a plan. It schedules nobody."""

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig | None = None) -> None:
        """Given. An idle scheduler; the limits and the policy stand in `self.config`."""
        self.kv = kv
        self.config = config or SchedulerConfig()
        self.max_num_seqs = self.config.max_num_seqs or 0
        self.max_model_len = self.config.max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._finished_req_ids: set[str] = set()

    def schedule(self) -> SchedulerOutput:
        """The plan of one step. Here it is a plan of nobody."""
        return self._new_output()

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """Take in what a plan computed. Here nothing is taken in.

        Args:
            output: the plan that was executed.
            sampled: tokens per request id that caught up, usually one; others are absent.

        Returns:
            The requests that finished in this step, in scheduled order.
        """
        return []

    # ------------------------------------------------------------------ in and out

    def add_request(self, request: Request) -> None:
        """Given. Queue a new request. Raises ValueError when its id is already live."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r}: a live request has this id")
        self.requests[request.request_id] = request
        if self.config.policy == "priority":
            self._insert_by_priority(request)
        else:
            self.waiting.append(request)

    def abort_request(self, request_id: str) -> Request | None:
        """Given. End a request now, wherever it is; returns it, or None for an unknown id."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED_ABORTED
        self._release(request)
        return request

    def has_unfinished_requests(self) -> bool:
        """Given. Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @staticmethod
    def needs_sample(request: Request, num_scheduled: int) -> bool:
        """Given. Whether this step computes the request's last token, so that one is sampled."""
        return request.num_computed_tokens + num_scheduled == request.num_tokens

    # ------------------------------------------------------------------ records

    def _new_output(self) -> SchedulerOutput:
        """Given. An empty plan that carries the ids finished since the last one."""
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        return output

    @staticmethod
    def _commit(request: Request, num_new: int, output: SchedulerOutput) -> None:
        """Given. Enter `num_new` tokens of `request` into the plan."""
        output.num_scheduled_tokens[request.request_id] = num_new
        output.scheduled_requests.append(request)

    @staticmethod
    def _note_admission(request: Request, num_cached: int, output: SchedulerOutput) -> None:
        """Given. Set the status RUNNING and note the request as new or resumed, with its hits."""
        resumed = request.status == RequestStatus.PREEMPTED
        admitted = output.scheduled_resumed_req_ids if resumed else output.scheduled_new_req_ids
        admitted.append(request.request_id)
        output.num_cached_tokens[request.request_id] = num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        request.status = RequestStatus.RUNNING

    def _withdraw(self, victim: Request, output: SchedulerOutput) -> int:
        """Given. Take a victim out of the plan of this step; returns the tokens it had there."""
        output.scheduled_requests.remove(victim)
        if self.config.forget_withdrawn_blocks:
            self.kv.forget_uncomputed(victim)
        return output.num_scheduled_tokens.pop(victim.request_id)

    def _insert_by_priority(self, request: Request) -> None:
        """Given. Put a request into `waiting` by (priority, arrival time, id)."""
        insort(self.waiting, request, key=lambda r: (r.priority, r.arrival_time, r.request_id))

    def _release(self, request: Request) -> None:
        """Given. Free a finished request's blocks and forget it; `running` is yours to clean."""
        self.kv.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)


class Scheduler(SchedulerBase):
    """The scheduler as the engine has it; `course run --mine` puts yours there.

    The engine calls `schedule` and `update_from_output` once a step. Which methods stand behind
    them is yours. v0.22.1's own scheduler decided 450 workloads, and each test shows the first
    difference.

    Recorded, `pressure`, seed 73: five usable blocks of 8, "fcfs", budget 35, threshold 3.

        step 9     plan r0: 1, r1: 1    running r0, r1    waiting r2        0 blocks free
        step 10    plan r0: 1           running r0        waiting r1, r2    r1 preempted

    Recorded, `priority`, seed 48: four usable blocks of 8, budget 4, threshold 2. r0 is the least
    urgent.

        step 6     plan r0: 1, r1: 2, r3: 1    running r0, r1, r3    0 blocks free
        step 7     plan r1: 2, r3: 2           running r1, r3        r0 preempted

    Must hold, besides every field of every recorded step:

    - S1 to S5, S11 and P of the guide's section 8.
    - What is in the plan (`_commit`) has its memory from `kv.allocate_slots`. None from there is
      the only reason to preempt, and nobody is preempted in vain.
    - A share is what `clamp` says when the request has its turn. What a victim's `_withdraw` gives
      back, with its blocks still held, is for those whose turn is still to come.
    - A request that lacks nothing stands in no plan and keeps nobody from a turn.
    - A request whose admission fails is as it was before: in front, no blocks, a counter of 0.
    - Scheduled tokens are computed tokens after the step, with a sampled token or without. Each
      sampled one (0 is a token, and a step may bring several) is followed by one question,
      `maybe_finish(self.max_model_len)`; after a yes the rest is dropped. Who ended has left
      `running` and is released (`_release`), in the order of the plan.
    - A request of the plan that is not RUNNING any more was aborted meanwhile and stays as it is.
    """
