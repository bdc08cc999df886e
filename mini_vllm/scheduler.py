"""Continuous batching: at every step, decide how many tokens of which request to compute.

Promises S1-S13: there is no prefill or decode phase, each request's `num_computed_tokens` catches
up with its `num_tokens` under one token budget, running requests before waiting ones. Decisions
equal those of `vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`, step by step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial

from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.config import SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.plan import NO_EXTERNAL_TOKENS, ExternalTokens, Gate, SchedulerOutput
from mini_vllm.queues import RequestQueues
from mini_vllm.request import Request, RequestStatus


class Scheduler(RequestQueues):
    """Queues and one budget. Owns the requests' status and counters."""

    def __init__(
        self, kv: KVCacheManager, config: SchedulerConfig | None = None, gates: Sequence[Gate] = ()
    ) -> None:
        """An idle scheduler over the block tables of `kv`; it asks `gates` in their order."""
        super().__init__(config or SchedulerConfig())
        self.kv = kv
        self.gates = tuple(gates)
        self.max_num_seqs = self.config.max_num_seqs or 0
        self.max_model_len = kv.max_model_len = self.config.max_model_len
        kv.use_eagle = self.config.use_eagle
        kv.max_num_batched_tokens = self.config.max_num_batched_tokens
        self._limit = self.max_model_len or sys.maxsize
        self.requests: dict[str, Request] = {}
        self._finished_req_ids: set[str] = set()
        self._sampled: Mapping[str, Sequence[int]] = {}

    def add_request(self, request: Request) -> None:
        """Queue a new request. Raises ValueError when its id is already live."""
        if request.request_id in self.requests:
            raise ValueError(f"request_id={request.request_id!r}: a live request has this id")
        self.requests[request.request_id] = request
        self._enqueue(request)

    def abort_request(self, request_id: str) -> Request | None:
        """End a request now, wherever it is; returns it, or None for an unknown id."""
        request = self.requests.get(request_id)
        if request is not None:
            self._queue_of(request).remove(request)
            request.status = RequestStatus.FINISHED_ABORTED
            self._release(request)
        return request

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget every cached prefix; False, and nothing changed, while blocks are in use.

        With `reset_running_requests` all of them are preempted first, and requeued in their order.
        """
        while reset_running_requests and self.running:
            self._preempt(request := self.running.pop())
            in_flight, request.num_output_placeholders = request.num_output_placeholders, 0
            request.num_tokens_to_discard = in_flight
        return self.kv.reset_prefix_cache()

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, then admissions, under one budget (S2, S7)."""
        plan = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = set()
        for gate in self.gates:
            gate.begins(plan)
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted_req_ids:  # S6
            self._schedule_waiting(plan, budget)
        return plan

    def _schedule_running(self, plan: SchedulerOutput, budget: int, index: int = 0) -> int:
        """Phase A: running requests from `index` on, preempting when blocks run out."""
        running, scheduled = self.running, plan.num_scheduled_tokens
        allocate_slots, clamp, limit = self.kv.allocate_slots, self._clamp_new_tokens, self._limit
        if lookahead := self.config.num_lookahead_tokens:
            allocate_slots = partial(allocate_slots, num_lookahead_tokens=lookahead)
        while index < len(running) and budget > 0:
            request = running[index]
            num_new = request.num_tokens - request.num_computed_tokens
            special = request.num_output_placeholders or request.spec_token_ids or self.gates
            if special:
                num_new = self._num_wanted(request)
            room = limit - 1 - request.num_computed_tokens
            if num_new != 1 or room < 1:  # 1 passes every other clamp
                num_new = clamp(num_new, budget if budget < room else room)
            for gate in self.gates:
                num_new = gate.limit(request, request.num_computed_tokens, num_new)
            if num_new <= 0:
                index += 1
                continue
            while allocate_slots(request, num_new) is None:
                victim = self._pop_victim()
                if victim.request_id in scheduled:  # only under the priority policy
                    budget += self._withdraw(victim, plan)
                    index -= 1
                self._preempt(victim)
                plan.preempted_req_ids.append(victim.request_id)
                if victim is request:
                    return self._after_own_preemption(plan, budget, index)
            scheduled[request.request_id] = num_new
            plan.scheduled_requests.append(request)
            if special:
                self._note(request, num_new, plan)
            budget, index = budget - num_new, index + 1
        return budget

    def _after_own_preemption(self, plan: SchedulerOutput, budget: int, index: int) -> int:
        """A request preempted itself; `running[index]` comes next. Here the phase ends."""
        return budget

    @staticmethod
    def _num_wanted(request: Request) -> int:
        """Tokens known, in flight and drafted that a running request lacks."""
        start, in_flight = request.num_computed_tokens, request.num_output_placeholders
        most = request.num_prompt_tokens + request.sampling_params.max_tokens
        if in_flight and start + 2 - in_flight >= most:
            return 0  # what is in flight reaches max_tokens, even if every draft is rejected
        return request.num_tokens + in_flight + len(request.spec_token_ids) - start

    def _schedule_waiting(self, plan: SchedulerOutput, budget: int) -> None:
        """Phase B: admit from the front of the queue; the first that does not fit blocks it."""
        passed: list[Request] = []
        while (
            budget > 0 and len(self.running) < self.max_num_seqs and (queue := self._next_queue())
        ):
            request = queue[0]
            num_new = self._admit(request, plan, budget)
            if num_new == 0:
                break
            queue.popleft()
            if num_new is None:
                passed.append(request)
            else:
                budget -= num_new
        self._set_aside(passed)

    def _admit(self, request: Request, plan: SchedulerOutput, budget: int) -> int | None:
        """Move a waiting request to `running`; how many tokens it got.

        0 if it must wait, and all behind it; None if it alone is passed over.
        """
        verdicts = [gate.admission(request, plan) for gate in self.gates]
        if others := [verdict for verdict in verdicts if verdict != "admit"]:
            return 0 if others[0] == "stop" else None
        before = request.num_computed_tokens  # above 0: a gate had its K and V loaded
        hits, num_cached, external = self._find_computed(request)
        if external is None:
            return None
        num_new = 0 if external.load_async else self._num_admitted(request, num_cached, budget)
        if num_new <= 0 and not external.load_async:
            return 0
        request.num_computed_tokens = num_cached
        if not self._allocate(request, num_new, hits, external, before > 0):
            request.num_computed_tokens = before
            for gate in self.gates:
                gate.refused(request)
            return 0
        if external.load_async:
            for gate in self.gates:
                gate.scheduled(request, 0, plan)
            return None
        self.running.append(request)
        resumed, request.status = request.status == RequestStatus.PREEMPTED, RequestStatus.RUNNING
        admitted = plan.scheduled_resumed_req_ids if resumed else plan.scheduled_new_req_ids
        admitted.append(request.request_id)
        plan.num_cached_tokens[request.request_id] = num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
        plan.num_scheduled_tokens[request.request_id] = num_new
        plan.scheduled_requests.append(request)
        self._note(request, num_new, plan)
        return num_new

    def _find_computed(
        self, request: Request
    ) -> tuple[Sequence[KVCacheBlock], int, ExternalTokens | None]:
        """Hits, how many tokens need not be computed, and which of them a gate brings.

        None instead of the last: a gate cannot say yet. What was loaded is indexed now, and one
        token is left to give logits.
        """
        if loaded := request.num_computed_tokens:
            self.kv.cache_blocks(request, loaded)
            return (), min(loaded, request.num_tokens - 1), NO_EXTERNAL_TOKENS
        hits, num_cached = self.kv.get_computed_blocks(request)
        for gate in self.gates:
            external = gate.found(request, num_cached)
            if external is None or external.num_tokens:
                return hits, num_cached + (external.num_tokens if external else 0), external
        return hits, num_cached, NO_EXTERNAL_TOKENS

    def _num_admitted(self, request: Request, num_cached: int, budget: int) -> int:
        """Tokens of its first chunk; 0 if it is to be whole and is not, or a gate allows none."""
        wanted = request.num_tokens - num_cached
        num_new = self._clamp_new_tokens(wanted, budget)
        needs_whole = not self.config.enable_chunked_prefill
        if needs_whole and num_new < self._clamp_new_tokens(wanted, wanted):
            return 0
        for gate in self.gates:
            num_new = gate.limit(request, num_cached, num_new)
        return num_new

    def _allocate(
        self, request: Request, num_new: int, hits: Sequence[KVCacheBlock],
        external: ExternalTokens, was_loaded: bool,
    ) -> bool:  # fmt: skip
        """Slots for an admission, if its whole sequence fits; drafts get theirs a step later, but
        for a request that was loaded."""
        if not self.kv.full_sequence_fits(request, hits):
            return False
        if not external.num_tokens and not was_loaded:
            return self.kv.allocate_slots(request, num_new, hits) is not None
        lookahead = self.config.num_lookahead_tokens if was_loaded else 0
        blocks = self.kv.allocate_slots(
            request, num_new, hits, lookahead, external.num_tokens, external.load_async
        )
        return blocks is not None

    def _note(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """Enter those of a planned request's drafts that fit, and tell the gates."""
        if request.spec_token_ids:
            known = request.num_tokens + request.num_output_placeholders
            num_drafts = request.num_computed_tokens + num_new - known
            if num_drafts > 0:
                plan.spec_token_ids[request.request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = ()
        for gate in self.gates:
            gate.scheduled(request, num_new, plan)

    @staticmethod
    def needs_sample(request: Request, num_scheduled: int) -> bool:
        """Whether this step computes the last known token, so that one is sampled (S4)."""
        return request.num_computed_tokens + num_scheduled >= request.num_tokens

    def update_from_output(
        self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """Advance counters by the executed plan, append sampled tokens, retire what is finished.

        `sampled` has token ids per request that caught up, one more than drafts were accepted.
        Returns those that finished, in scheduled order; their blocks are free.
        """
        finished = []
        counts, drafts, self._sampled = plan.num_scheduled_tokens, plan.spec_token_ids, sampled
        for request in plan.scheduled_requests:
            if request.status > RequestStatus.PREEMPTED:
                continue  # aborted while the step ran
            request_id = request.request_id
            request.num_computed_tokens += counts[request_id]
            tokens = sampled.get(request_id)
            if not tokens:
                continue
            if drafts:
                request.num_computed_tokens -= plan.num_rejected(request_id, tokens)
            for token in tokens:
                request.append_output_token(token)
                if request.maybe_finish(self.max_model_len):
                    finished.append(request)
                    self._release(request)
                    break
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        return finished

    def update_draft_token_ids(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Take the drafts made in the step just updated; who has not caught up gets none."""
        for request_id, drafts in draft_token_ids.items():
            if request := self.requests.get(request_id):
                request.spec_token_ids = drafts if self._sampled.get(request_id) else ()

    def _clamp_new_tokens(self, num_new_tokens: int, token_budget: int) -> int:
        """Threshold first, then budget (S8)."""
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        return num_new_tokens if num_new_tokens < token_budget else token_budget

    def _withdraw(self, victim: Request, plan: SchedulerOutput) -> int:
        """Unschedule a victim that this step had already planned; returns the refunded budget."""
        plan.scheduled_requests.remove(victim)
        plan.spec_token_ids.pop(victim.request_id, None)
        if self.config.forget_withdrawn_blocks:
            self.kv.forget_uncomputed(victim)
        return plan.num_scheduled_tokens.pop(victim.request_id)

    def _preempt(self, request: Request) -> None:
        """Give up all blocks and start over later, keeping the outputs (S5)."""
        self._free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = ()
        request.num_preemptions += 1
        self._enqueue(request)

    def _release(self, request: Request) -> None:
        """Free a finished request's blocks and forget it."""
        self._free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)

    def _free(self, request: Request) -> None:
        """Give its blocks back, unless a gate keeps them; every gate hears of it."""
        if sum(gate.leaves(request) for gate in self.gates) == 0:
            self.kv.free(request)
