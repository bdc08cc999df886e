"""From plans to tokens: who runs a plan, and how many may be under way at once.

Promises: plans are answered in the order in which they were made; one is waited for when as many
are under way as may be, or when nothing more can be planned. Mirrors
`vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue`, whose queue serves asynchronous
scheduling and pipeline stages alike; a plan that is answered at once is a queue of one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from mini_vllm.feature import Feature
from mini_vllm.model_runner import ModelRunner
from mini_vllm.plan import SchedulerOutput
from mini_vllm.row_sampler import Failure, RowSampler, Sampled

Answer = Callable[[], Sampled]


class Executor:
    """Runs each plan in this process, when it is submitted.

    With `depth` 2 it is answered a step later: the next plan is made and run before the scheduler
    knows its tokens.
    """

    def __init__(
        self, runner: ModelRunner, rows: RowSampler, features: Sequence[Feature], depth: int = 1
    ) -> None:
        """An idle one; `features` may still grow."""
        self.runner, self.rows, self.features, self.depth = runner, rows, features, depth
        self.under_way: deque[tuple[SchedulerOutput, Answer]] = deque()
        """The oldest first."""
        self._last: tuple[SchedulerOutput, Sampled] | None = None
        self._failed: dict[str, Failure] = {}

    @property
    def is_busy(self) -> bool:
        """Whether tokens are to come."""
        return any(plan.scheduled_requests for plan, _ in self.under_way)

    def swap(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, Sampled] | None:
        """Start a bound plan; the oldest one and its tokens, if it is time to wait for them."""
        self._load(plan)
        self.under_way.append((plan, self.start(plan)))
        if plan.scheduled_requests and len(self.under_way) < self.depth:
            return None
        oldest, answer = self.under_way.popleft()
        return oldest, answer()

    def start(self, plan: SchedulerOutput) -> Answer:
        """Run a plan; what gives its tokens."""
        before, in_flight = self._last, {}
        if before is not None:
            in_flight = before[0].still_wanted(before[1])
        sampled: Sampled = {}
        if plan.scheduled_requests:
            self.runner.in_flight = in_flight
            sampled = self.sample(plan, self.runner.execute(plan), in_flight)
        for feature in self.features:
            feature.ran(plan, sampled, in_flight)
        if self.depth > 1:
            self._last = plan, sampled
        return lambda: sampled

    def _load(self, plan: SchedulerOutput) -> None:
        """Have everything brought that the plan needs; requests that lack something leave it."""
        while plan.scheduled_requests:
            lacking = {r: why for feature in self.features for r, why in feature.load(plan).items()}
            if not lacking:
                return
            self._failed |= {r: Failure(why, "unwritten") for r, why in lacking.items()}
            for request_id in lacking:
                _withdraw(plan, request_id)

    def sample(
        self, plan: SchedulerOutput, logits: np.ndarray, in_flight: dict[str, Sequence[int]]
    ) -> Sampled:
        """The tokens of rows of logits; who gets none is kept for `failures`."""
        sampled, failed = self.rows.sample(plan, logits, in_flight)
        self._failed |= failed
        return sampled

    def failures(self) -> dict[str, Failure]:
        """Who gets no token, and why, since this was asked last."""
        failed, self._failed = self.rows.failed() | self._failed, {}
        return failed

    def restart(self) -> None:
        """Forget what is under way."""
        self.under_way.clear()
        self._last, self._failed = None, {}


def _withdraw(plan: SchedulerOutput, request_id: str) -> None:
    """Take a request out of a bound plan; its counter is where it was before the plan."""
    [request] = [r for r in plan.scheduled_requests if r.request_id == request_id]
    request.num_computed_tokens = plan.num_computed_tokens[request_id]
    plan.scheduled_requests.remove(request)
    plan.sampling_req_ids.discard(request_id)
    for entries in (
        plan.num_scheduled_tokens, plan.num_computed_tokens, plan.block_ids, plan.spec_token_ids,
        plan.prompt_rows,
    ):  # fmt: skip
        entries.pop(request_id, None)
