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
        raise NotImplementedError


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
    raise NotImplementedError


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
    raise NotImplementedError
