"""What had changed by 0.33.0: the free queue again, three rules of the scheduler, one of the stop.

Places are those of the release's own archive; the pin has none of these lines. Each rule is a class
of its own, so that a test can leave one out.
"""

from __future__ import annotations

from mini_vllm.block_pool import KVCacheBlock
from mini_vllm.plan import SchedulerOutput
from mini_vllm.releases.v0_27_1 import UnhashedFirst
from mini_vllm.request import Request, RequestStatus
from mini_vllm.scheduler import Scheduler


class UnhashedFirstAlways(UnhashedFirst):
    """As `UnhashedFirst`, also without prefix caching: what was freed last is reused first.

    `vllm/v1/core/block_pool.py`, lines 824-847 of 0.33.0 `BlockPool.free_blocks`; PR 51482.
    """

    def is_worthless(self, block: KVCacheBlock) -> bool:
        """Whether a freed block goes to the front; without caching none holds a prefix."""
        return block.block_hash is None


class LoneRequestUncapped(Scheduler):
    """A request that is alone ignores `long_prefill_token_threshold`: there is no other to starve.

    `vllm/v1/core/sched/scheduler.py`, lines 752-761 of 0.33.0 `Scheduler.schedule`; PR 57951.
    """

    _alone = False

    def schedule(self) -> SchedulerOutput:
        """As the scheduler below it, with or without the threshold in this step."""
        self._alone = len(self.running) + len(self.waiting) + len(self.skipped) <= 1
        return super().schedule()

    def _clamp_new_tokens(self, num_new_tokens: int, token_budget: int) -> int:
        if self._alone:
            return min(num_new_tokens, token_budget)
        return super()._clamp_new_tokens(num_new_tokens, token_budget)


class ResumedAreNew(Scheduler):
    """The second model runner hears of a resumed request as of a new one, with all its tokens.

    A matter of labels: nothing else of the plan changes. `vllm/v1/core/sched/scheduler.py`, lines
    1642-1653 of 0.33.0 `Scheduler.schedule`; PR 44443 and PR 53183 made that runner the default.
    """

    def schedule(self) -> SchedulerOutput:
        """As the scheduler below it, resumed requests behind the new ones."""
        plan = super().schedule()
        plan.scheduled_new_req_ids += plan.scheduled_resumed_req_ids
        plan.scheduled_resumed_req_ids = []
        return plan


class ScanGoesOn(Scheduler):
    """Under the priority policy the running requests behind one that preempted itself get a turn.

    They are more urgent than it was, and its blocks have just come free. Under FCFS a request that
    preempts itself is the last, so none is behind it.
    `vllm/v1/core/sched/scheduler.py`, lines 982-994 of 0.33.0 `Scheduler.schedule`.
    """

    def _after_own_preemption(self, plan: SchedulerOutput, budget: int, index: int) -> int:
        return self._schedule_running(plan, budget, index)


class StopBeforeMinTokens(Request):
    """EOS, stop ids and the length caps end a request before `min_tokens` is reached, too.

    Sampling masks the stop tokens until then, so what is left is the length: at the pin a request
    at the model's length goes on. `vllm/v1/core/sched/utils.py`, lines 98-127 of 0.33.0
    `check_stop`; its comment names PR 47489, PR 49521 and PR 51299.
    """

    def maybe_finish(self, max_model_len: int | None = None) -> bool:
        """As `Request.maybe_finish`, with nothing before the ends."""
        params = self.sampling_params
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        if not 0 < num_output_tokens < params.min_tokens:
            return super().maybe_finish(max_model_len)
        last = self.all_token_ids[-1]
        if last == self.eos_token_id and not params.ignore_eos:
            self.status = RequestStatus.FINISHED_STOPPED
        elif last in params.stop_token_ids:
            self.status, self.stop_reason = RequestStatus.FINISHED_STOPPED, last
        elif num_output_tokens >= params.max_tokens or (
            max_model_len is not None and self.num_tokens >= max_model_len
        ):
            self.status = RequestStatus.FINISHED_LENGTH
        return self.is_finished
