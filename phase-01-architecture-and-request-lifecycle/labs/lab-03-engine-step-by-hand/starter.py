"""Lab 01-03: write the engine's step, then the step that plans ahead of its results.

Part A, `engine_step`: schedule, execute, sample, update, as
`vllm/v1/engine/core.py:428` `EngineCore.step`. Part B, `plan_ahead`, `take_in` and `async_step`:
a queue two deep, as `vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue` and
`vllm/v1/core/sched/async_scheduler.py:12` `AsyncScheduler`. `Device` and the placeholder helpers
are given.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from mini_vllm import Request, Sampler, Scheduler, SchedulerOutput
from mini_vllm.model_runner import ModelRunner

# --- Part A: one step, start to end --------------------------------------------------------------


def engine_step(scheduler: Scheduler, runner: ModelRunner, sampler: Sampler) -> list[Request]:
    """Run one step and return the requests that finished in it.

    What holds afterwards, for every plan:

    - A request has one token more if this step computed its last known token, and else none; the
      token comes from its own row, with its own parameters. `runner.execute` needs a bound plan
      and returns logits [num_scheduled_requests, vocab_size] in the order of
      `plan.scheduled_requests`, a row for requests in mid-prompt too.
    - The scheduler has heard of every step that computed something, of those without a token too.
    - The sampler is not called for a row that is dropped, the runner not for an empty plan; that
      step returns [].
    - Nothing is kept between calls.

    A prompt of 12 tokens in chunks of 4 has (computed, outputs) (4, 0), (8, 0), (12, 1) after
    three steps.

    Args:
        scheduler: owns the queues, the counters and, as `scheduler.kv`, the block tables.
        runner: turns a plan into rows of logits.
        sampler: turns one row into one token id.
    """
    raise NotImplementedError


# --- Part B: a queue two deep --------------------------------------------------------------------

QUEUE_DEPTH = 2
"""Steps in flight at most: `vllm/v1/executor/uniproc_executor.py:77`
`UniProcExecutor.max_concurrent_batches`."""

PLACEHOLDER = -1
"""Stands in a request's tokens for one that is sampled, or about to be, and not yet known."""


class InFlight(NamedTuple):
    """A step that was launched and whose tokens the scheduler has not taken in."""

    plan: SchedulerOutput
    sampled: dict[str, list[int]]
    """What the device will report: a list of one token per request that caught up."""


class Device:
    """Given. Runs plans in order and remembers the newest token of each request.

    So step k+1 can be launched before anyone outside has seen the tokens of step k, as in
    `vllm/v1/worker/gpu_model_runner.py:1691` `GPUModelRunner._prepare_input_ids`.
    """

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner = runner
        self.sampler = sampler
        self._newest: dict[str, int] = {}

    def launch(self, plan: SchedulerOutput, scheduler: Scheduler) -> dict[str, list[int]]:
        """Compute a plan; a list of one token per request that catches up.

        Call it before the counters move: it reads `num_computed_tokens` as the position of the
        first scheduled token.
        """
        if scheduler.kv.enable_caching:
            raise ValueError(
                "enable_prefix_caching=True: blocks would be hashed with placeholders in them"
            )
        plan.bind(scheduler.kv)
        batch = self.runner.prepare_batch(plan)
        for request, last in zip(plan.scheduled_requests, batch.logits_indices, strict=True):
            if batch.token_ids[last] == PLACEHOLDER:
                batch.token_ids[last] = self._newest[request.request_id]
        logits = self.runner.model.forward(batch)
        sampled = {}
        for request, row in zip(plan.scheduled_requests, logits, strict=True):
            if scheduler.needs_sample(request, plan.num_scheduled_tokens[request.request_id]):
                token = self.sampler.sample(row, request.sampling_params)
                self._newest[request.request_id] = token
                sampled[request.request_id] = [token]
        return sampled


def remove_placeholders(request: Request) -> int:
    """Given. Take the placeholders off the end of a request's tokens; returns how many."""
    count = 0
    while request.all_token_ids[-1] == PLACEHOLDER:
        request.all_token_ids.pop()
        request.num_tokens -= 1
        count += 1
    return count


def add_placeholders(request: Request, count: int) -> None:
    """Given. Append `count` placeholders; `num_tokens` counts them, so they will be scheduled."""
    for _ in range(count):
        request.append_output_token(PLACEHOLDER)


def plan_ahead(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """Move the books of a launched plan on, as if it had been computed already.

    Each scheduled request's `num_computed_tokens` includes what was scheduled. A request that the
    plan catches up has a token on its way, and a placeholder where it will stand, so that the next
    plan computes it; but none if that token is number `max_tokens`, which is never computed. 10
    prompt tokens planned as 4, 4, 2 have (computed, placeholders) (4, 0), (8, 0), (10, 1).

    The advance is `vllm/v1/core/sched/scheduler.py:951` `Scheduler._update_after_schedule`, the
    placeholder `vllm/v1/core/sched/async_scheduler.py:18` `AsyncScheduler._update_after_schedule`.

    Raises:
        RuntimeError: the plan preempted a request (`plan.preempted_req_ids`); this small loop
            cannot call back tokens that are on their way. The message says "preempted".
    """
    raise NotImplementedError


def take_in(
    scheduler: Scheduler, plan: SchedulerOutput, sampled: dict[str, list[int]]
) -> list[Request]:
    """Give the scheduler the tokens of an earlier plan; returns what finished by them.

    `scheduler.update_from_output(plan, sampled)` does the work, but it expects a request without
    placeholders whose counter has not moved for this plan. Afterwards the tokens stand in their
    requests, `num_computed_tokens` is what it was before the call, and an unfinished request has
    one placeholder per token still on its way: with two steps in flight 2 become 1 when one token
    arrives, and stay 2 in a step that brings none.

    A request that finished while this plan was in flight is left alone, by you and by the update:
    its token is dropped.
    """
    raise NotImplementedError


def async_step(scheduler: Scheduler, device: Device, in_flight: deque[InFlight]) -> list[Request]:
    """Plan and launch one step, and take in the oldest one when that is due.

    At most `QUEUE_DEPTH` steps are in flight, oldest on the left, and after a call fewer than that.
    A plan with requests is launched, booked as computed, and in flight; an empty one is neither.
    The oldest step is taken in when `QUEUE_DEPTH` are in flight, or when there was nothing to plan;
    a call returns what finished by that, and [] when nothing was taken in. The device is given a
    plan whose counters have not moved. One request with `max_tokens` 4 leaves 1, 1, 1, 1, 0 steps
    in flight after its five calls.

    Call it while the scheduler has unfinished requests or `in_flight` is not empty.
    """
    raise NotImplementedError
