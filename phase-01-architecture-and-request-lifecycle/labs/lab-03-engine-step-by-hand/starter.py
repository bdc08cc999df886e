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

    1. `scheduler.schedule()` makes the plan.
    2. `plan.bind(scheduler.kv)` notes positions and block tables in the plan, which is then all
       that `runner.execute(plan)` needs. It returns logits [num_scheduled_requests, vocab_size]:
       one row per entry of `plan.scheduled_requests`, in that order, whether or not the request
       has caught up.
    3. Sample a token with `sampler.sample(row, request.sampling_params)` for each request that
       catches up in this step (`scheduler.needs_sample(request, num_scheduled)`, asked before
       the update moves the counter). Rows of the others are dropped, not sampled.
    4. `scheduler.update_from_output(plan, sampled)` with a list of tokens, here of one, per
       sampled request, in every step that computed something, also when `sampled` is empty.

    A plan without requests ends the step at once: the runner is not called.

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

    For each scheduled request: advance `num_computed_tokens` by what was scheduled. If it caught
    up, a token is on its way: append one placeholder, so that the next plan computes it, unless
    the token on its way is number `max_tokens`. That one is never computed, so nobody needs a
    place for it.

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
    placeholders whose counter has not moved for this plan. So, for each scheduled request that is
    not finished: remove its placeholders and take this plan's tokens off `num_computed_tokens`.
    Then update. Then give back, to each that is still unfinished, the placeholders of tokens
    still on their way: one fewer than before where this plan brought a token.

    A request that finished while this plan was in flight is left alone, by you and by the update:
    its token is dropped.
    """
    raise NotImplementedError


def async_step(scheduler: Scheduler, device: Device, in_flight: deque[InFlight]) -> list[Request]:
    """Plan and launch one step, and take in the oldest one when that is due.

    1. `schedule()`. If the plan holds requests: `device.launch(plan, scheduler)`, then
       `plan_ahead`, and append an `InFlight` on the right of the queue.
    2. If the queue now holds `QUEUE_DEPTH` steps, or the plan was empty, take in the leftmost one
       and return what finished. Otherwise return [].

    Call it while the scheduler has unfinished requests or `in_flight` is not empty.
    """
    raise NotImplementedError
