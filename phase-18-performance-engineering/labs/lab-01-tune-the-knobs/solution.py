"""Lab 18-01: serve a workload in counted steps, and search its knobs under a hard limit.

The engine is the real one of this course with the model "toy": plans do not depend on what a model
says. Time is counted in steps. Use the engine's own API; patch no class.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mini_vllm import LLMEngine, SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the step before which it comes."""

    step: int
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """What one run came to."""

    ttft_steps: tuple[int, ...]
    """In the order of the list of arrivals."""
    max_step_tokens: int
    """Tokens of the fullest step: every request in that step waits for them."""
    total_steps: int
    step_tokens: tuple[int, ...]
    """Tokens of each step, 0 where nothing ran."""

    @property
    def worst_ttft(self) -> int:
        """The longest wait for a first token."""
        return max(self.ttft_steps)


def simulate(arrivals: Sequence[Arrival], **engine_kwargs: Any) -> Metrics:
    """Serve the arrivals to the end and count.

    The clock begins at 0. Each turn of it: every arrival with `arrival.step <= clock` that is not
    in yet is added, in the order of the list, greedy and with `ignore_eos=True`; one step; the
    clock moves on. A turn in which nothing can run counts too. A request whose first token comes in
    the step before which it arrived has a TTFT of 1.

    Args:
        arrivals: in any order of their steps.
        engine_kwargs: for `LLMEngine`, whose model is "toy".

    Returns:
        `sum(step_tokens)` is the sum of (prompt tokens + outputs - 1) where nothing is cached or
        preempted.

    Raises:
        ValueError: no arrivals, a negative step, or what the engine refuses.
    """
    if not arrivals:
        raise ValueError("arrivals: need at least one")
    for arrival in arrivals:
        if arrival.step < 0:
            raise ValueError(f"arrival.step={arrival.step}: need 0 or more")
    engine = LLMEngine(model="toy", **engine_kwargs)
    schedule = engine.scheduler.schedule
    planned: list[int] = []

    def probe() -> Any:
        plan = schedule()
        planned.append(plan.total_num_scheduled_tokens)
        return plan

    engine.scheduler.schedule = probe  # type: ignore[method-assign]
    waiting = list(range(len(arrivals)))
    requests: dict[int, Any] = {}
    first: dict[int, int] = {}
    step_tokens: list[int] = []
    clock = 0
    while waiting or engine.scheduler.has_unfinished_requests():
        for place in [place for place in waiting if arrivals[place].step <= clock]:
            params = SamplingParams(
                temperature=0.0, max_tokens=arrivals[place].max_tokens, ignore_eos=True
            )
            request_id = engine.add_request(arrivals[place].prompt, params)
            requests[place] = engine.requests[request_id]
            waiting.remove(place)
        if engine.scheduler.has_unfinished_requests():
            engine.step()
            step_tokens.append(planned[-1])
        else:
            step_tokens.append(0)
        for place, request in requests.items():
            if place not in first and request.num_output_tokens:
                first[place] = clock - arrivals[place].step + 1
        clock += 1
    ttfts = tuple(first[place] for place in range(len(arrivals)))
    return Metrics(ttfts, max(step_tokens), clock, tuple(step_tokens))


@dataclass(frozen=True, slots=True)
class Choice:
    """A point of the grid and what it came to."""

    budget: int
    threshold: int
    metrics: Metrics


def grid_search(
    arrivals: Sequence[Arrival],
    budgets: Iterable[int],
    thresholds: Iterable[int],
    max_spike: int,
    **engine_kwargs: Any,
) -> Choice:
    """The best point of a grid that keeps a hard limit.

    A point is `max_num_batched_tokens` from `budgets` and `long_prefill_token_threshold` from
    `thresholds`. It is legal where `max_step_tokens <= max_spike`. Of the legal ones the least
    `(total_steps, worst_ttft, max_step_tokens)` wins; of equals the one that comes first, budgets
    being the outer loop.

    Raises:
        ValueError: an empty grid, or no legal point: the message has the limit and the smallest
            spike that any point reached.
    """
    columns = list(thresholds)
    grid = [(budget, threshold) for budget in budgets for threshold in columns]
    if not grid:
        raise ValueError("grid: need at least one budget and one threshold")
    tried = []
    for budget, threshold in grid:
        knobs = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
        tried.append(Choice(budget, threshold, simulate(arrivals, **knobs, **engine_kwargs)))
    legal = [choice for choice in tried if choice.metrics.max_step_tokens <= max_spike]
    if not legal:
        least = min(choice.metrics.max_step_tokens for choice in tried)
        raise ValueError(f"max_spike={max_spike}: the smallest spike of this grid is {least}")
    return min(legal, key=_rank)


def _rank(choice: Choice) -> tuple[int, int, int]:
    found = choice.metrics
    return found.total_steps, found.worst_ttft, found.max_step_tokens
