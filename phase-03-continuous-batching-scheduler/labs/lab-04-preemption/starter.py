"""Lab 03-04: preemption. Take memory from one request for another, and lose time but no token.

`preempt` and `make_room` are the emergency of `vllm/v1/core/sched/scheduler.py:329`
`Scheduler.schedule`; `run` proves on the shipped model that no output changes, `measure` says what
it costs. `Scheduler`, which calls them from the engine's running phase, is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mini_vllm
from mini_vllm import EngineParts, LLMEngine, Request, RequestStatus, SamplingParams


def fits_alone(prompt_len: int, max_tokens: int, num_blocks: int, block_size: int) -> bool:
    """Whether a request can ever finish in an otherwise empty pool.

    True exactly when the engine, serving nothing else, comes to its last output. Whole numbers, of
    any size. A prompt of 8 in 5 blocks of 4 finishes with up to 9 outputs.

    Args:
        prompt_len: prompt tokens, at least 1.
        max_tokens: output tokens, at least 1.
        num_blocks: physical blocks, the null block included.
        block_size: tokens per block.
    """
    raise NotImplementedError


def preempt(scheduler: mini_vllm.Scheduler, victim: Request) -> None:
    """Send a running request, already taken out of `scheduler.running`, back to start over.

    What holds afterwards: it holds no block, nothing of it counts as computed, and its status is
    `RequestStatus.PREEMPTED`. Every token it knew it still knows, outputs included.
    `num_preemptions` is one more. Nobody stands before it in `scheduler.waiting`, and the others
    there keep their order.
    """
    raise NotImplementedError


def make_room(
    scheduler: mini_vllm.Scheduler, request: Request, num_new_tokens: int
) -> tuple[bool, list[Request]]:
    """Get a running request its slots, at the price of as many victims as it takes and no more.

    What holds afterwards: each victim was the last of `running` when it was chosen, and was
    preempted (`preempt`). No victim was taken while memory would have been granted, and granted
    memory was asked for once. `request` may be the last victim: it has no slots then, and nobody
    before it in `running` has lost any.

    4 usable blocks of 4, a and b with 8 computed tokens each, `make_room(scheduler, a, 1)`:
    (True, [b]); for b instead of a: (False, [b]).

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

    Tokens are those of the engine's tokenizer. What a request computes when it is never preempted
    is not wasted; the rest is, and a run that computed less than that has a negative `wasted`.
    Greedy, EOS ignored, exactly `max_tokens` outputs each.

    Args:
        prompts, num_blocks, block_size, max_tokens: as for `run`.
        engine_kwargs: further arguments of `LLMEngine`; `parts` defaults to your `Scheduler`.
    """
    raise NotImplementedError
