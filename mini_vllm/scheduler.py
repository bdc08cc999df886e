"""Continuous batching: at every step, decide how many tokens of which request to compute.

Promises S1-S13: there is no prefill or decode phase, each request's `num_computed_tokens` catches
up with its `num_tokens` under one token budget, running requests before waiting ones. Decisions
equal those of `vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`, step by step.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request, RequestStatus

POLICIES = ("fcfs", "priority")


@dataclass(slots=True)
class SchedulerOutput:
    """The plan of one step. Mirrors `vllm/v1/core/sched/output.py:181` `SchedulerOutput`.

    `num_scheduled_tokens` and `scheduled_requests` are in scheduling order.
    """

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_requests: list[Request] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    scheduled_new_req_ids: list[str] = field(default_factory=list)
    scheduled_resumed_req_ids: list[str] = field(default_factory=list)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    """Prefix-cache hits in tokens of each request admitted in this step."""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that finished or were aborted since the previous step."""

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens the model will compute in this step."""
        return sum(self.num_scheduled_tokens.values())


class Scheduler:
    """Two queues, one budget. Owns the requests' status and counters."""

    def __init__(
        self,
        kv: KVCacheManager,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = 2048,
        long_prefill_token_threshold: int = 0,
        *,
        max_model_len: int | None = None,
        policy: str = "fcfs",
        enable_chunked_prefill: bool = True,
        forget_withdrawn_blocks: bool = False,
    ) -> None:
        """Create an idle scheduler.

        Args:
            kv: the block tables it allocates from.
            max_num_seqs: most requests running at once; default 128, or the budget if smaller.
            max_num_batched_tokens: token budget of one step.
            long_prefill_token_threshold: most tokens of one request in one step; 0 is no bound.
            max_model_len: longest sequence in tokens, prompt included; None is no bound.
            policy: "fcfs", or "priority" (smaller `Request.priority` first, then arrival).
            enable_chunked_prefill: when off, a prompt that exceeds the rest of the budget waits.
            forget_withdrawn_blocks: un-index the blocks of a request withdrawn from the step that
                had just indexed them. Off, as upstream, where a later request can then adopt
                blocks that were never computed.

        Raises:
            ValueError: a bound out of range, or an unknown policy.
        """
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens}: need at least 1")
        if max_num_seqs is None:
            max_num_seqs = min(128, max_num_batched_tokens)
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}: need 1 to max_num_batched_tokens="
                f"{max_num_batched_tokens}, so that every running request can get a token"
            )
        if long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold={long_prefill_token_threshold}: need 0 (off) or more"
            )
        if max_model_len is not None and max_model_len < 2:
            raise ValueError(f"max_model_len={max_model_len}: need at least 2, or None")
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: need one of {', '.join(POLICIES)}")
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_model_len = max_model_len
        self.policy = policy
        self.enable_chunked_prefill = enable_chunked_prefill
        self.forget_withdrawn_blocks = forget_withdrawn_blocks
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self._finished_req_ids: set[str] = set()

    # ------------------------------------------------------------------ in and out

    def add_request(self, request: Request) -> None:
        """Queue a new request. Raises ValueError when its id is already live."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r}: a live request has this id")
        self.requests[request.request_id] = request
        self._enqueue(request)

    def abort_request(self, request_id: str) -> Request | None:
        """End a request now, wherever it is; returns it, or None for an unknown id."""
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
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, then admissions, under one budget (S2, S7)."""
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        if not output.preempted_req_ids:  # S6
            self._schedule_waiting(output, budget)
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Phase A: every running request in order, preempting when blocks run out."""
        running, scheduled = self.running, output.num_scheduled_tokens
        allocate_slots, clamp = self.kv.allocate_slots, self._clamp_new_tokens
        max_model_len = self.max_model_len
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_new = request.num_tokens - request.num_computed_tokens
            if num_new != 1:  # 1 passes every clamp while budget lasts
                num_new = clamp(num_new, budget)
            if max_model_len is not None:
                num_new = min(num_new, max_model_len - 1 - request.num_computed_tokens)
            if num_new <= 0:
                index += 1
                continue
            while allocate_slots(request, num_new) is None:
                victim = self._pop_victim()
                if victim.request_id in scheduled:  # only under the priority policy
                    budget += self._withdraw(victim, output)
                    index -= 1
                self._preempt(victim)
                output.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    return budget
            scheduled[request.request_id] = num_new
            output.scheduled_requests.append(request)
            budget -= num_new
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        """Phase B: admit from the front of the queue; the first that does not fit blocks it."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            hits, num_cached = self.kv.get_computed_blocks(request)
            num_wanted = request.num_tokens - num_cached
            num_new = self._clamp_new_tokens(num_wanted, budget)
            whole_chunk = self._clamp_new_tokens(num_wanted, num_wanted)
            if num_new < whole_chunk and not self.enable_chunked_prefill:
                return
            assert num_new > 0  # a hit never covers the last token (B13)
            if not self.kv.full_sequence_fits(request, hits):  # D4
                return
            request.num_computed_tokens = num_cached
            if self.kv.allocate_slots(request, num_new, hits) is None:
                request.num_computed_tokens = 0  # D5
                return
            self.waiting.popleft()
            self.running.append(request)
            resumed = request.status == RequestStatus.PREEMPTED
            request.status = RequestStatus.RUNNING
            admitted = output.scheduled_resumed_req_ids if resumed else output.scheduled_new_req_ids
            admitted.append(request.request_id)
            output.num_cached_tokens[request.request_id] = num_cached
            output.num_scheduled_tokens[request.request_id] = num_new
            output.scheduled_requests.append(request)
            budget -= num_new

    @staticmethod
    def needs_sample(request: Request, num_scheduled: int) -> bool:
        """Whether this step computes the request's last token, so that a new one is sampled (S4).

        Evaluated before `update_from_output` moves the counter.
        """
        return request.num_computed_tokens + num_scheduled == request.num_tokens

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, int]
    ) -> list[Request]:
        """Advance counters, append sampled tokens, retire what is finished.

        Args:
            output: the plan that was executed.
            sampled: token id per request that caught up; others are absent.

        Returns:
            Requests that finished in this step, in scheduled order; their blocks are free.
        """
        finished = []
        num_scheduled_tokens, max_model_len = output.num_scheduled_tokens, self.max_model_len
        for request in output.scheduled_requests:
            if request.status != RequestStatus.RUNNING:
                continue  # aborted while the step ran
            request_id = request.request_id
            request.num_computed_tokens += num_scheduled_tokens[request_id]
            token = sampled.get(request_id)
            if token is None:
                continue
            request.append_output_token(token)
            if request.maybe_finish(max_model_len):
                finished.append(request)
                self._release(request)
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        return finished

    # ------------------------------------------------------------------ parts

    def _clamp_new_tokens(self, num_new_tokens: int, token_budget: int) -> int:
        """Threshold first, then budget, never negative (S8, D9)."""
        threshold = self.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        return max(0, min(num_new_tokens, token_budget))

    def _enqueue(self, request: Request) -> None:
        """Put a request where its policy wants it in `waiting`."""
        if self.policy == "priority":
            insort(self.waiting, request, key=_priority_order)
        elif request.status == RequestStatus.PREEMPTED:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def _pop_victim(self) -> Request:
        """Take the request to preempt out of `running`: the last, or the least urgent."""
        if self.policy == "fcfs":
            return self.running.pop()
        victim = max(self.running, key=lambda r: (r.priority, r.arrival_time))
        self.running.remove(victim)
        return victim

    def _withdraw(self, victim: Request, output: SchedulerOutput) -> int:
        """Unschedule a victim that this step had already planned; returns the refunded budget."""
        output.scheduled_requests.remove(victim)
        if self.forget_withdrawn_blocks:
            self.kv.forget_uncomputed(victim)
        return output.num_scheduled_tokens.pop(victim.request_id)

    def _preempt(self, request: Request) -> None:
        """Give up all blocks and start over later, keeping the outputs (S5)."""
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._enqueue(request)

    def _release(self, request: Request) -> None:
        """Free a finished request's blocks and forget it."""
        self.kv.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)


def _priority_order(request: Request) -> tuple[int, float, str]:
    """Sort key of the waiting queue under "priority": `vllm/v1/request.py:301` `Request.__lt__`."""
    return request.priority, request.arrival_time, request.request_id
