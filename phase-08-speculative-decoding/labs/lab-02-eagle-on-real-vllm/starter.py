"""Lab 08-02: what an engine with drafts says of itself, and what follows from it.

The engine counts, per request and step that carried drafts: one *draft*, its *draft tokens*, and
how many of them were accepted. Steps without drafts count nowhere. Source:
`vllm/v1/spec_decode/metrics.py:18` `SpecDecodingStats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def count_runs(runs: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    """The engine's counters after some runs.

    A trace: the runs (3, 3), (3, 0), (0, 0), (2, 1) with k = 3 are 3 drafts, 8 draft tokens, 4
    accepted, and by position [2, 1, 1].

    Args:
        runs: for each request and step: drafts it carried, and drafts accepted.
        k: the largest number of drafts, `num_speculative_tokens`.

    Returns:
        `num_drafts`, `num_draft_tokens`, `num_accepted_tokens`, and
        `num_accepted_tokens_per_pos`, a list of k: how often draft i was accepted.

    Raises:
        ValueError: a run accepts more than it carries, carries more than k, or a number below 0.
    """
    raise NotImplementedError


def tokens_per_run(runs: Sequence[tuple[int, int]]) -> float:
    """Tokens that a run gave on average, the runs without drafts among them.

    Raises:
        ValueError: there is no run.
    """
    raise NotImplementedError


def log_line(counters: dict[str, Any], seconds: float) -> str:
    """The line the engine logs, from "SpecDecoding metrics:" to its end.

    A trace: the counters of `count_runs`, in 2 seconds, are `SpecDecoding metrics: Mean acceptance
    length: 2.33, Accepted throughput: 2.00 tokens/s, Drafted throughput: 4.00 tokens/s, Accepted: 4
    tokens, Drafted: 8 tokens, Per-position acceptance rate: 0.667, 0.333, 0.333, Avg Draft
    acceptance rate: 50.0%`.

    Args:
        counters: as `count_runs` gives them, with at least one draft.
        seconds: what they were counted in, above 0.
    """
    raise NotImplementedError


def parse_spec_line(line: str) -> dict[str, Any]:
    """The numbers in a line of the log, whatever stands before "SpecDecoding metrics:".

    Returns:
        `mean_acceptance_length`, `accepted_throughput` and `drafted_throughput` (tokens per
        second), `accepted` and `drafted` (ints), `per_position` (a list) and `acceptance_rate`
        (both as shares of 1).

    Raises:
        ValueError: the line is no such line, or not the whole of one.
    """
    raise NotImplementedError


def tpot(total: float, ttft: float, num_tokens: int) -> float:
    """Time per output token after the first one: what a reader of the stream waits on average.

    Args:
        total: seconds from arrival to the last token.
        ttft: seconds from arrival to the first token, at most `total`.
        num_tokens: tokens in all, at least 2.

    Raises:
        ValueError: an argument is outside of what it may be.
    """
    raise NotImplementedError


def reconcile(tpot_base: float, tpot_spec: float, length: float, k: int) -> dict[str, float]:
    """What two measured times and a mean acceptance length say together.

    A trace, 18.2 and 9.6 ms, 2.8, k = 5: 1.896 times faster; a run took 26.88 ms, 1.477 steps; so
    the drafts cost .477 steps, .095 each.

    Args:
        tpot_base: time per token without drafts, above 0.
        tpot_spec: with them, in the same unit, above 0.
        length: tokens per run, in [1, k + 1].
        k: drafts per run, at least 1.

    Returns:
        `speedup`; `run`, the time of a run, in the unit of the times; `run_steps`, in steps
        without drafts; `extra_steps`, beyond one; `draft_cost`, of them per draft.

    Raises:
        ValueError: an argument is outside of what it may be.
    """
    raise NotImplementedError
