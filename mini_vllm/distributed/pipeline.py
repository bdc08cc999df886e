"""Several batches in flight: while the last stage computes one, the first begins another.

Promises R5: a request whose token is still to come is passed over, other requests fill the batch;
the oldest batch is asked for when the queue is full or nothing more can be planned. Mirrors
`vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue` and
`vllm/v1/core/sched/scheduler.py:951` `Scheduler._update_after_schedule`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.config import SchedulerConfig
from mini_vllm.executor import Executor, FutureOutput
from mini_vllm.feature import Feature
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.model_runner import ModelRunner
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.row_sampler import RowSampler, TokenLists
from mini_vllm.scheduler import Scheduler


class OnceGate(Gate):
    """Keeps a position from being sampled while a token for it is on its way.

    A request preempted with a token in flight starts over at 0 and may be admitted again before
    that token has come. The real scheduler then computes all that is known and samples the same
    position twice; here its last known token is not computed before.
    """

    def __init__(self) -> None:
        self.tokens_to_come: Counter[str] = Counter()

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """Nothing, where the tokens would reach the last known one too early."""
        is_last = start + num_new >= request.num_tokens
        return 0 if is_last and self.tokens_to_come[request.request_id] else num_new

    def leaves(self, request: Request) -> bool:
        """A request that ends is waited for no more."""
        if request.is_finished:
            self.tokens_to_come.pop(request.request_id, None)
        return False


class PipelineScheduler(Scheduler):
    """A `Scheduler` that may be asked for plans while earlier ones are still in flight.

    Counters move in `schedule`, so the next chunk of a prompt can follow at once, and a request
    that waits for its token lacks nothing to compute.
    """

    def __init__(
        self, kv: KVCacheManager, config: SchedulerConfig | None = None, gates: Sequence[Gate] = ()
    ) -> None:
        self._once = OnceGate()
        super().__init__(kv, config, (*gates, self._once))

    def schedule(self) -> SchedulerOutput:
        """As `Scheduler.schedule`; then counters advance."""
        plan = super().schedule()
        for request in plan.scheduled_requests:
            plan.advance(request)
            if request.num_computed_tokens >= request.num_tokens:
                plan.sampling_req_ids.add(request.request_id)
                self._once.tokens_to_come[request.request_id] += 1
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """Append the tokens of a plan that later plans may have been made after.

        A request preempted meanwhile takes its token too, and may even end in the waiting queue.
        """
        finished = []
        for request in plan.scheduled_requests:
            if request.is_finished:
                continue  # aborted meanwhile
            if request.request_id in plan.sampling_req_ids:
                self._once.tokens_to_come[request.request_id] -= 1
            for token in sampled.get(request.request_id, ()):
                request.append_output_token(token)
                if request.maybe_finish(self.max_model_len):
                    finished.append(request)
                    if request not in self.running:
                        self._queue_of(request).remove(request)
                    self._release(request)
                    break
        if finished:
            self.running = [request for request in self.running if not request.is_finished]
        return finished


class _Ranks(Protocol):
    """What the queue asks of `executor.Ranks`."""

    def submit(self, batch: ForwardBatch) -> int: ...

    def collect(self, number: int) -> np.ndarray: ...

    def discard_batches(self) -> None: ...


class StagedExecutor(Executor):
    """Plans run in other processes, as many at once as there are stages.

    The real queue asks besides whether the oldest is done already, so that its plans depend on the
    clock; ours do not.
    """

    def __init__(
        self,
        runner: ModelRunner,
        row_sampler: RowSampler,
        features: Sequence[Feature],
        ranks: _Ranks,
        depth: int,
    ) -> None:
        """An idle one; `ranks` run the batches."""
        super().__init__(runner, row_sampler, features, depth)
        self.ranks = ranks

    def execute_model(self, plan: SchedulerOutput) -> FutureOutput:
        """Submit the batch to the ranks; the future waits for them and samples."""
        if not plan.scheduled_requests:
            return dict
        number = self.ranks.submit(self.runner.prepare_batch(plan))

        def future() -> TokenLists:
            logits = self.ranks.collect(number)
            gone = {r.request_id for r in plan.scheduled_requests if r.is_finished}
            plan.sampling_req_ids -= gone  # their tokens are not needed any more
            return self.sample_tokens(plan, logits, {})

        return future

    def restart(self) -> None:
        """What is in flight runs, before whatever comes next, and is not looked at."""
        super().restart()
        self.ranks.discard_batches()
