"""Lab 03-05: what a long prompt does to somebody else's stream, from the victim's seat.

The victim's wait for a token is the length of the step that brings it, and a step is as long as the
tokens in it, all of them (`vllm/v1/core/sched/output.py:181` `SchedulerOutput`, its
`total_num_scheduled_tokens`). `predict_costs` says that number beforehand, `decode_step_costs`
measures it, `storm_costs` sends several prompts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mini_vllm import LLMEngine, SamplingParams

VICTIM = "Why?"
"""The prompt of the stream that is disturbed: 4 byte tokens."""


def long_prompt(length: int, number: int = 0) -> list[int]:
    """Given. `length` token ids of prose; different numbers differ from the first token on."""
    text = f"{number} long documents arrive without notice, and somebody waits meanwhile. " * length
    return list(text.encode()[:length])


def predict_costs(
    threshold: int, long_prompt_len: int = 256, max_tokens: int = 16, budget: int = 2048
) -> list[int]:
    """What `decode_step_costs` will measure, by arithmetic.

    Equal to the measurement for every argument, whichever of threshold, budget and prompt binds.
    The long prompt has two outputs; the victim is in every step, before it.

    Threshold 100, 256 tokens, 16 outputs: [101, 101, 57, 2] and eleven ones.

    Args:
        threshold: `long_prefill_token_threshold`.
        long_prompt_len: tokens of the prompt that arrives.
        max_tokens: outputs of the victim; the first one came before the long prompt did.
        budget: `max_num_batched_tokens`, at least 2.

    Returns:
        Tokens in each of the victim's `max_tokens - 1` decode steps.
    """
    raise NotImplementedError


def decode_step_costs(
    threshold: int, long_prompt_len: int = 256, max_tokens: int = 16, **engine_kwargs: Any
) -> tuple[list[int], list[int]]:
    """Disturb one stream with one long prompt, and note what each of the stream's steps holds.

    The victim has the prompt `VICTIM` and `max_tokens` outputs. `long_prompt(long_prompt_len)`,
    with exactly 2 outputs, arrives between the step of its first token and the next; what came
    before is not measured. A cost is all tokens of one step (`total_num_scheduled_tokens`) that the
    victim is in. Greedy, EOS ignored. Threshold 0: [257, 2] and thirteen ones.

    Args:
        threshold: `long_prefill_token_threshold`; 0 is none.
        long_prompt_len, max_tokens: as for `predict_costs`.
        engine_kwargs: further arguments of `LLMEngine`, such as `model`.

    Returns:
        Tokens in each of the victim's steps, and the victim's output token ids.
    """
    raise NotImplementedError


def storm_costs(
    threshold: int,
    num_prompts: int = 5,
    num_victims: int = 2,
    long_prompt_len: int = 256,
    max_tokens: int = 16,
    **engine_kwargs: Any,
) -> tuple[list[int], list[list[int]]]:
    """The same with several: `num_victims` streams, then one long prompt before each step.

    The victims, all with the prompt `VICTIM`, are there from the beginning. The storm begins when
    each has its first token: before each of the next `num_prompts` steps one
    `long_prompt(long_prompt_len, number)` arrives, numbers from 0, with 2 outputs each. A step
    counts when any victim is in it, until all have ended.

    Returns:
        Tokens in each of the victims' steps, and the victims' output token ids.
    """
    raise NotImplementedError


def peak_bound(num_prompts: int, num_decodes: int, threshold: int, budget: int) -> int:
    """The most tokens one step can hold: `num_prompts` in their prompts, `num_decodes` decoding.

    Each prompt gets at most `threshold` tokens (0: no bound of its own), each decode one, and all
    together at most `budget`.
    """
    raise NotImplementedError


def percentile(values: Sequence[float], q: int) -> float:
    """The smallest of `values` that at least `q` per cent of them do not exceed (nearest rank).

    Args:
        values: at least one, in any order.
        q: whole per cent, 1 to 100.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Row:
    """Given. What one threshold does to both sides."""

    threshold: int
    mean: float
    """Tokens in a step of the victim, on average."""
    p50: float
    worst: float
    first_token: int
    """Steps from the long prompt's arrival to its first token."""


def sweep(
    thresholds: Sequence[int], long_prompt_len: int = 256, max_tokens: int = 20, budget: int = 2048
) -> list[Row]:
    """A `Row` per threshold, from `predict_costs` and the chunk that the threshold allows.

    Args:
        thresholds: in the order of the rows; 0 is none.
        long_prompt_len, max_tokens, budget: as for `predict_costs`.
    """
    raise NotImplementedError
