"""A solution of lab 03-01 part B as it was written before `SchedulerConfig`.

Flat arguments, one sampled token per request and step: what a learner may have in a checkout.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping

from mini_vllm import KVCacheManager, Request, RequestStatus, SchedulerOutput


def clamp(num_new: int, budget: int, threshold: int) -> int:
    if 0 < threshold < num_new:
        num_new = threshold
    return max(0, min(num_new, budget))


class Scheduler:
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
        if max_num_batched_tokens < 1:
            raise ValueError(f"max_num_batched_tokens={max_num_batched_tokens}: need at least 1")
        if max_num_seqs is None:
            max_num_seqs = min(128, max_num_batched_tokens)
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}: need 1 to max_num_batched_tokens="
                f"{max_num_batched_tokens}"
            )
        if long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold={long_prefill_token_threshold}: need 0 or more"
            )
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy={policy!r}: need fcfs or priority")
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

    def add_request(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r}: a live request has this id")
        self.requests[request.request_id] = request
        if self.policy == "priority":
            self._insert_by_priority(request)
        else:
            self.waiting.append(request)

    def abort_request(self, request_id: str) -> Request | None:
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
        return bool(self.waiting or self.running)

    @staticmethod
    def needs_sample(request: Request, num_scheduled: int) -> bool:
        return request.num_computed_tokens + num_scheduled == request.num_tokens

    def _new_output(self) -> SchedulerOutput:
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        return output

    @staticmethod
    def _commit(request: Request, num_new: int, output: SchedulerOutput) -> None:
        output.num_scheduled_tokens[request.request_id] = num_new
        output.scheduled_requests.append(request)

    @staticmethod
    def _note_admission(request: Request, num_cached: int, output: SchedulerOutput) -> None:
        resumed = request.status == RequestStatus.PREEMPTED
        admitted = output.scheduled_resumed_req_ids if resumed else output.scheduled_new_req_ids
        admitted.append(request.request_id)
        output.num_cached_tokens[request.request_id] = num_cached
        request.status = RequestStatus.RUNNING

    def _withdraw(self, victim: Request, output: SchedulerOutput) -> int:
        output.scheduled_requests.remove(victim)
        if self.forget_withdrawn_blocks:
            self.kv.forget_uncomputed(victim)
        return output.num_scheduled_tokens.pop(victim.request_id)

    def _insert_by_priority(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: (r.priority, r.arrival_time, r.request_id))

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)

    def schedule(self) -> SchedulerOutput:
        output = self._new_output()
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        if not output.preempted_req_ids:
            self._schedule_waiting(output, budget)
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            lacks = request.num_tokens - request.num_computed_tokens
            num_new = clamp(lacks, budget, self.long_prefill_token_threshold)
            if num_new == 0:
                index += 1
                continue
            while self.kv.allocate_slots(request, num_new) is None:
                victim = self._pop_victim()
                if victim.request_id in output.num_scheduled_tokens:
                    budget += self._withdraw(victim, output)
                    index -= 1
                self._preempt(victim, output)
                if victim is request:
                    return budget
            self._commit(request, num_new, output)
            budget -= num_new
            index += 1
        return budget

    def _pop_victim(self) -> Request:
        if self.policy == "fcfs":
            return self.running.pop()
        victim = max(self.running, key=lambda r: (r.priority, r.arrival_time))
        self.running.remove(victim)
        return victim

    def _preempt(self, victim: Request, output: SchedulerOutput) -> None:
        self.kv.free(victim)
        victim.num_computed_tokens = 0
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        output.preempted_req_ids.append(victim.request_id)
        if self.policy == "priority":
            self._insert_by_priority(victim)
        else:
            self.waiting.appendleft(victim)

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        threshold = self.long_prefill_token_threshold
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            hits, num_cached = self.kv.get_computed_blocks(request)
            lacks = request.num_tokens - num_cached
            num_new = clamp(lacks, budget, threshold)
            if not self.enable_chunked_prefill and num_new < clamp(lacks, lacks, threshold):
                return
            if not self.kv.full_sequence_fits(request, hits):
                return
            request.num_computed_tokens = num_cached
            if self.kv.allocate_slots(request, num_new, hits) is None:
                request.num_computed_tokens = 0
                return
            self.running.append(self.waiting.popleft())
            self._note_admission(request, num_cached, output)
            self._commit(request, num_new, output)
            budget -= num_new

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[str, int]
    ) -> list[Request]:
        finished = []
        for request in output.scheduled_requests:
            if request.status != RequestStatus.RUNNING:
                continue
            request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
            token = sampled.get(request.request_id)
            if token is None:
                continue
            request.append_output_token(token)
            if request.maybe_finish(self.max_model_len):
                self._release(request)
                self.running.remove(request)
                finished.append(request)
        return finished
