"""From plans to tokens: what runs a plan, and how many may be in flight at once.

Promises: plans are answered in the order in which they were made; one is waited for when as many
are in flight as may be, or when nothing more can be planned. Mirrors
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
from mini_vllm.row_sampler import Failure, RowSampler, TokenLists

FutureOutput = Callable[[], TokenLists]
"""Waits for the tokens of a plan."""


class Executor:
    """Runs each plan in this process, when it is submitted.

    With `batch_queue_size` 2 it is answered a step later: the next plan is made and run
    before the scheduler knows its tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        row_sampler: RowSampler,
        features: Sequence[Feature],
        batch_queue_size: int = 1,
    ) -> None:
        """An idle one; `features` may still grow."""
        self.runner, self.row_sampler, self.features = runner, row_sampler, features
        self.batch_queue_size = batch_queue_size
        self.batch_queue: deque[tuple[SchedulerOutput, FutureOutput]] = deque()
        """The plans in flight, the oldest first."""
        self._previous: tuple[SchedulerOutput, TokenLists] | None = None
        self._failures: dict[str, Failure] = {}

    @property
    def is_busy(self) -> bool:
        """Whether tokens are to come."""
        return any(plan.scheduled_requests for plan, _ in self.batch_queue)

    def submit(self, plan: SchedulerOutput) -> tuple[SchedulerOutput, TokenLists] | None:
        """Run a bound plan; the oldest one in flight and its tokens, if it is time to wait."""
        self.prepare(plan)
        self.batch_queue.append((plan, self.execute_model(plan)))
        if plan.scheduled_requests and len(self.batch_queue) < self.batch_queue_size:
            return None
        oldest, future = self.batch_queue.popleft()
        return oldest, future()

    def execute_model(self, plan: SchedulerOutput) -> FutureOutput:
        """Run a plan; what gives its tokens."""
        in_flight = {}
        if self._previous is not None:
            previous, tokens = self._previous
            in_flight = previous.still_wanted(tokens)
        sampled: TokenLists = {}
        if plan.scheduled_requests:
            self.runner.in_flight = in_flight
            sampled = self.sample_tokens(plan, self.runner.execute(plan), in_flight)
        for feature in self.features:
            feature.after_execute(plan, sampled, in_flight)
        if self.batch_queue_size > 1:
            self._previous = plan, sampled
        return lambda: sampled

    def sample_tokens(
        self, plan: SchedulerOutput, logits: np.ndarray, in_flight: dict[str, Sequence[int]]
    ) -> TokenLists:
        """The tokens of rows of logits; a request without one is kept for `take_failures`."""
        sampled, failures = self.row_sampler.sample(plan, logits, in_flight)
        self._failures |= failures
        return sampled

    def take_failures(self) -> dict[str, Failure]:
        """The requests that get no token, and why, since the last call."""
        failures = self.row_sampler.failures()
        if self._failures:
            failures, self._failures = failures | self._failures, {}
        return failures

    def restart(self) -> None:
        """Forget what is in flight."""
        self.batch_queue.clear()
        self._previous, self._failures = None, {}

    def prepare(self, plan: SchedulerOutput) -> None:
        """Have everything brought that the plan needs; requests that lack something leave it."""
        while plan.scheduled_requests:
            lacking: dict[str, str] = {}
            for feature in self.features:
                if refused := feature.before_execute(plan):
                    lacking |= refused
            if not lacking:
                return
            for request_id, reason in lacking.items():
                self._failures[request_id] = Failure(reason, "unwritten")
                _withdraw(plan, request_id)


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
