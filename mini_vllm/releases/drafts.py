"""What later releases changed for drafts, besides their slots at admission (`lookahead.py`).

Places are those of each release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mini_vllm.config import SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler


class NewDecodesPadded(Scheduler):
    """Who is admitted with one token to compute, beside decodes alone, is padded to their size.

    It gets as many placeholders as there are drafts, none of which is accepted, so that all rows of
    the step are as long and one captured graph fits. Where they do not fit, it waits.
    `vllm/v1/core/sched/scheduler.py`, lines 881-897 of 0.27.1 `Scheduler.schedule`; PR 45237.
    """

    _any_runs = _any_prefills = _padded = False

    def __init__(
        self, kv: KVCacheManager, config: SchedulerConfig | None = None, gates: Sequence[Gate] = ()
    ) -> None:
        """As the scheduler below it; no request is amid a prompt."""
        super().__init__(kv, config, gates)
        self._prefills: set[str] = set()
        """Whose last chunk sampled nothing."""

    def schedule(self) -> SchedulerOutput:
        """As the scheduler below it; whose chunk samples nothing is still a prefill."""
        plan = super().schedule()
        ahead = bool(plan.num_computed_tokens)  # counters have moved
        for request in plan.scheduled_requests:
            name = request.request_id
            if ahead:
                samples = name in plan.sampling_req_ids
            else:
                samples = self.needs_sample(request, plan.num_scheduled_tokens[name])
            (self._prefills.discard if samples else self._prefills.add)(name)
        return plan

    def _schedule_running(self, plan: SchedulerOutput, budget: int, index: int = 0) -> int:
        left = super()._schedule_running(plan, budget, index)
        self._any_runs = bool(plan.num_scheduled_tokens)
        self._any_prefills = not self._prefills.isdisjoint(plan.num_scheduled_tokens)
        return left

    def _admit(self, request: Request, plan: SchedulerOutput, budget: int) -> int | None:
        self._padded = False
        num_new = super()._admit(request, plan, budget)
        if num_new and self._padded:
            plan.spec_token_ids[request.request_id] = (-1,) * self.config.num_speculative_tokens
        return num_new

    def _num_admitted(self, request: Request, num_cached: int, budget: int) -> int:
        size = 1 + self.config.num_speculative_tokens
        if size == 1 or request.num_tokens - num_cached != 1 or not self._pads(num_cached):
            return super()._num_admitted(request, num_cached, budget)
        if not self._has_room(num_cached + size):
            return self._without_room(request, num_cached, budget)
        if size > budget:
            return 0
        self._padded = True
        num_new = self._clamp_new_tokens(size, budget)
        for gate in self.gates:
            num_new = gate.limit(request, num_cached, num_new)
        return num_new

    def _pads(self, num_cached: int) -> bool:
        """Whether this step pads who has one token to compute."""
        return self._any_runs and not self._any_prefills

    def _has_room(self, num_tokens: int) -> bool:
        """Whether so many tokens are within the model's length."""
        return num_tokens <= self._limit

    def _without_room(self, request: Request, num_cached: int, budget: int) -> int:
        """Tokens of a request that cannot be padded: it waits."""
        return 0

    def _free(self, request: Request) -> None:
        self._prefills.discard(request.request_id)
        super()._free(request)


class PaddedWhereRoom(NewDecodesPadded):
    """As `NewDecodesPadded`; whose sampled token would not fit behind the padding is not padded.

    Before, such a request waited until no other ran.
    `vllm/v1/core/sched/scheduler.py`, lines 970-983 of 0.29.0 `Scheduler.schedule`; PR 53962.
    """

    def _has_room(self, num_tokens: int) -> bool:
        return num_tokens + 1 <= self._limit

    def _without_room(self, request: Request, num_cached: int, budget: int) -> int:
        return Scheduler._num_admitted(self, request, num_cached, budget)


class HitsPadded(PaddedWhereRoom):
    """As `PaddedWhereRoom`, also where nothing runs, if the prefix cache had the rest.

    `vllm/v1/core/sched/scheduler.py`, lines 1049-1050 of 0.30.0 `Scheduler.schedule`; PR 55126.
    """

    def _pads(self, num_cached: int) -> bool:
        return not self._any_prefills and (self._any_runs or num_cached > 0)


class AcceptedCachedAtOnce(Scheduler):
    """Blocks that accepted drafts filled enter the index with the update, not with the next step.

    So a request that ends or is preempted before its next step leaves them for others. Of a
    synchronous step; the asynchronous scheduler did so before.
    `vllm/v1/core/sched/scheduler.py`, lines 2401-2413 of 0.33.0 `Scheduler.update_from_output`.
    """

    def update_from_output(
        self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """As `Scheduler.update_from_output`; tokens behind a stop do not count as computed."""
        if not self.config.num_speculative_tokens:
            return super().update_from_output(plan, sampled)
        self._sampled = sampled
        finished = []
        for request in plan.scheduled_requests:
            if request.status > RequestStatus.PREEMPTED:
                continue  # aborted while the step ran
            name, before = request.request_id, request.num_tokens
            request.num_computed_tokens += plan.num_scheduled_tokens[name]
            tokens = sampled.get(name)
            if not tokens:
                continue
            ended = request.append_output_tokens(tokens, self.max_model_len)
            num_trimmed = before + len(tokens) - request.num_tokens
            request.num_computed_tokens -= plan.num_rejected(name, tokens) + num_trimmed
            self.kv.cache_blocks(request, request.num_computed_tokens)
            if ended:
                finished.append(request)
                self._release(request)
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        return finished


class DraftSlots(Gate):
    """The budget of a step where each request takes one slot more, for its draft model."""

    def __init__(self, budget: int) -> None:
        self.budget = self.left = budget

    def begins(self, plan: SchedulerOutput) -> None:
        """Nothing of it is taken."""
        self.left = self.budget

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """What is left, without the request's own slot."""
        return min(num_new, max(self.left - 1, 0))

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """Its tokens and its slot are taken."""
        self.left -= num_new + 1


class SlotsByRequest(Scheduler):
    """A draft model's slots are taken off the budget by who is in the step, not by who might be.

    At the pin `max_num_seqs` slots are taken off once, in the configuration; the budget that is
    given here is what they left. `vllm/v1/core/sched/scheduler.py`, lines 497-499, 527, 565 and 701
    of 0.28.0 `Scheduler.schedule`.
    """

    def __init__(
        self, kv: KVCacheManager, config: SchedulerConfig | None = None, gates: Sequence[Gate] = ()
    ) -> None:
        """As the scheduler below it, with the whole budget where a draft model drafts."""
        config = config or SchedulerConfig()
        self._slots: DraftSlots | None = None
        if config.num_lookahead_tokens and not config.use_eagle:
            whole = config.max_num_batched_tokens + (config.max_num_seqs or 0)
            config = replace(config, max_num_batched_tokens=whole)
            self._slots = DraftSlots(whole)
            gates = (self._slots, *gates)
        super().__init__(kv, config, gates)

    def _admit(self, request: Request, plan: SchedulerOutput, budget: int) -> int | None:
        if self._slots is not None and self._slots.left <= 1:
            return 0  # before any gate is asked
        return super()._admit(request, plan, budget)

    def _num_admitted(self, request: Request, num_cached: int, budget: int) -> int:
        if self._slots is not None:
            budget = min(budget, self._slots.left - 1)
        return super()._num_admitted(request, num_cached, budget)

    def _withdraw(self, victim: Request, plan: SchedulerOutput) -> int:
        restored = super()._withdraw(victim, plan)
        if self._slots is not None:
            self._slots.left += restored + 1
        return restored
