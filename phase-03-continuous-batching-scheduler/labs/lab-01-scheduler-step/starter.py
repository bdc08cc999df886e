"""Lab 03-01: the scheduler's step, first with toy memory, then as the engine's own.

Part A, `clamp` and `schedule_step`: two phases and three limits, over `Req` and `FakeKV`. Part B,
`Scheduler`: the same loop over real block tables, with preemption, prefix hits and two policies,
as `vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`. Queues, records and arguments are
given.
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

    First every running request, in list order: the clamp of what it lacks; a request that gets 0 is
    passed over; `kv.allocate` takes memory for those tokens, and may be assumed to succeed here.
    Then the waiting ones, while there are any, budget is left and fewer than `max_num_seqs` run:
    look at the front only; if `kv.allocate` refuses memory for what this step would compute, stop
    and leave it where it is; otherwise move it to the end of `running`.

    Changes both queues. Leaves `num_computed` alone: the step has not run yet.

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


class Scheduler:
    """Two queues, one budget, real block tables; `course run --mine` puts it into the engine."""

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

    # ------------------------------------------------------------------ given: in and out

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

    # ------------------------------------------------------------------ given: records

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

    # ------------------------------------------------------------------ yours: one step

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, then admissions with the budget that is left.

        Start from `self._new_output()`. A step that preempted somebody admits nobody.
        """
        raise NotImplementedError

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Give every running request its tokens, in order, while budget is left.

        For each: `clamp` what it lacks; pass it over when that is 0. Then
        `self.kv.allocate_slots(request, n)`. As long as that returns None, `_pop_victim()` and
        `_preempt` the victim, and try again. When the victim is the request itself, give up: the
        running phase ends. On success `_commit`.

        `running` shrinks while you walk it: use an index. A victim that this step has already
        scheduled stood before your index; `_withdraw` it before `_preempt`, take its tokens back
        into the budget, and move the index.

        Returns:
            The budget that is left.
        """
        raise NotImplementedError

    def _pop_victim(self) -> Request:
        """Take the request that must make room out of `running`, and return it.

        Policy "fcfs": the last one. Policy "priority": the largest (priority, arrival time), the
        first of several that tie.
        """
        raise NotImplementedError

    def _preempt(self, victim: Request, output: SchedulerOutput) -> None:
        """Send a request, already out of `running`, back to `waiting` to start over.

        Free its blocks, set its counter to 0 and its status to PREEMPTED, count the preemption
        (`num_preemptions`), note its id in `output.preempted_req_ids`. It keeps its tokens. It goes
        to the front of `waiting` under "fcfs", and by `_insert_by_priority` under "priority".
        """
        raise NotImplementedError

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Admit from the front of `waiting`, while budget and one of `max_num_seqs` slots is left.

        For the request in front:

        1. `hits, num_cached = self.kv.get_computed_blocks(request)`.
        2. `clamp` what it then lacks. With `enable_chunked_prefill` off, stop when the budget cuts
           it short; the threshold still applies.
        3. Stop unless `self.kv.full_sequence_fits(request, hits)`.
        4. Set `num_computed_tokens` to `num_cached`, then `allocate_slots(request, n, hits)`. If
           that refuses, set the counter back to 0 and stop.
        5. Move it to the end of `running`, `_note_admission`, `_commit`.

        Whoever is stopped stays in front, and nobody behind it is looked at.
        """
        raise NotImplementedError

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """Take in what the step computed.

        For each request of the plan, in its order: pass over one that is not RUNNING any more (it
        was aborted meanwhile). Advance its counter by its scheduled tokens. Append its sampled
        tokens (`append_output_token`) up to the first that ends it: after each, ask
        `maybe_finish(self.max_model_len)`; one that is finished is released (`_release`) and leaves
        `running`.

        Args:
            output: the plan that was executed.
            sampled: tokens per request id that caught up, usually one; others are absent.

        Returns:
            The requests that finished in this step, in scheduled order.
        """
        raise NotImplementedError
