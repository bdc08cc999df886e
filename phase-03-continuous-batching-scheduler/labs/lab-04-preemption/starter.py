"""Lab 03-04: preemption. Take memory from one request for another, and lose time but no token.

`preempt` and `make_room` are the emergency of `vllm/v1/core/sched/scheduler.py:329`
`Scheduler.schedule`; `run` proves on the shipped model that no output changes, `measure` says what
it costs. `Scheduler`, which calls them from the engine's running phase, is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mini_vllm
from mini_vllm import EngineParts, LLMEngine, Request, RequestStatus, SamplingParams  # noqa: F401


def fits_alone(prompt_len: int, max_tokens: int, num_blocks: int, block_size: int) -> bool:
    """Whether a request can ever finish in an otherwise empty pool.

    It needs a slot for each token that is computed. Its last output token is sampled and never
    computed. Block 0 of the pool is the null block and is never handed out.

    Args:
        prompt_len: prompt tokens, at least 1.
        max_tokens: output tokens, at least 1.
        num_blocks: physical blocks, the null block included.
        block_size: tokens per block.
    """
    raise NotImplementedError


def preempt(scheduler: mini_vllm.Scheduler, victim: Request) -> None:
    """Send a running request, already taken out of `scheduler.running`, back to start over.

    Its blocks go back (`scheduler.kv.free`), its `num_computed_tokens` to 0, its status to
    `RequestStatus.PREEMPTED`; `num_preemptions` counts it. Its tokens stay, outputs included. It
    goes to the front of `scheduler.waiting`.
    """
    raise NotImplementedError


def make_room(
    scheduler: mini_vllm.Scheduler, request: Request, num_new_tokens: int
) -> tuple[bool, list[Request]]:
    """Allocate for a running request; while memory refuses, preempt the last of `running`.

    `scheduler.kv.allocate_slots(request, num_new_tokens)` returns None when it refuses, and has
    changed nothing then. When the last of `running` is `request` itself, it is preempted as well,
    and that is the end.

    Returns:
        Whether `request` has its slots, and the victims in the order of their eviction.
    """
    raise NotImplementedError


class Scheduler(mini_vllm.Scheduler):
    """Given. The engine's scheduler (policy "fcfs"), with your `make_room` in its running phase."""

    def _schedule_running(self, output: mini_vllm.SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            lacks = request.num_tokens - request.num_computed_tokens
            num_new = self._clamp_new_tokens(lacks, budget)
            granted, victims = make_room(self, request, num_new)
            output.preempted_req_ids += [victim.request_id for victim in victims]
            if not granted:
                return budget
            output.num_scheduled_tokens[request.request_id] = num_new
            output.scheduled_requests.append(request)
            budget -= num_new
            index += 1
        return budget


def run(
    prompts: list[str],
    num_blocks: int,
    block_size: int,
    max_tokens: int,
    *,
    parts: EngineParts | None = None,
    **engine_kwargs: Any,
) -> list[list[int]]:
    """Serve all prompts together, greedy, exactly `max_tokens` outputs each.

    Args:
        prompts: all of them are added before the first step.
        num_blocks, block_size: the engine's pool.
        max_tokens: outputs per request; EOS is ignored.
        parts: the engine's parts; the default has your `Scheduler` in it.
        engine_kwargs: further arguments of `LLMEngine`, such as `model` and `dtype`.

    Returns:
        Output token ids in prompt order.

    Raises:
        ValueError: the engine refuses a prompt that does not fit alone.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cost:
    """Given. What a run took."""

    steps: int
    scheduled: int
    """Tokens computed in all steps together."""
    wasted: int
    """Those of them that had been computed before."""
    evictions: int
    """Preemptions, counted as often as they happened."""


def measure(
    prompts: list[str], num_blocks: int, block_size: int, max_tokens: int, **engine_kwargs: Any
) -> Cost:
    """The cost of the same run, from the plans alone: `model="toy"`, prefix caching off.

    Watch the plans: each function in `engine.observers` is called with each
    `mini_vllm.SchedulerOutput` before the step runs. A request that is never preempted computes
    its prompt and all outputs but the last.

    Args:
        prompts, num_blocks, block_size, max_tokens: as for `run`.
        engine_kwargs: further arguments of `LLMEngine`; `parts` defaults to your `Scheduler`.
    """
    raise NotImplementedError
