"""Lab 18-02: what a benchmark measured, what it means, and what cannot have been measured.

A run is the JSON of `vllm bench serve --save-result --save-detailed`. Times in it are seconds; a
row has milliseconds, as vLLM's own report. `run.py` makes such files from a real server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark run, request by request. Lists are parallel; times in seconds."""

    duration: float
    completed: int
    request_rate: float
    """Requests per second that were offered; infinite where all came at once."""
    max_concurrency: int | None
    input_lens: tuple[int, ...]
    output_lens: tuple[int, ...]
    """0 where a request failed."""
    ttfts: tuple[float, ...]
    itls: tuple[tuple[float, ...], ...]
    """Gaps between chunks, of each request."""
    start_times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a report. Percentiles are over requests, those of ITL over all gaps."""

    completed: int
    failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    e2el_max_s: float
    output_tps: float
    total_tps: float
    goodput_rps: float | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A line of another engineer's table, with what is known of how it was made."""

    rate: float
    """Requests per second offered."""
    output_len: int
    num_requests: int
    output_tps: float
    ttft_p50_ms: float
    itl_p50_ms: float
    max_num_seqs: int | None = None
    """Given where this line's change is the cap on running requests."""
    kv_usage: float | None = None
    """Share of the cache in use, 0 to 1; given where this line's change is its size."""
    change: float | None = None
    """Relative difference in throughput that the line claims over its baseline."""
    spread: float = 0.03
    """Relative difference between repeats of one setting; 3 %, a rule of thumb, where there are
    no repeats."""


def load_run(path: str | Path) -> Run:
    """Read a run.

    `request_rate` may be the text "inf". `max_concurrency` may be missing or null.

    Raises:
        ValueError: not a JSON object, a field missing (those of `--save-detailed` are named with
            that option), or lists of different lengths.
    """
    raise NotImplementedError


def percentile(xs: Sequence[float], p: float) -> float:
    """Between the two neighbours of rank (n - 1) * p / 100, linearly, as numpy does.

    Raises:
        ValueError: no values, or p outside of 0 to 100.
    """
    raise NotImplementedError


def summarize(run: Run, slo: Mapping[str, float] | None = None, role_chunk: bool = False) -> Row:
    """The line of a report.

    A request of one token has no TPOT, and for the goodput its TPOT is 0. Failed requests are
    counted, and have no times. Throughputs divide by the run's duration.

    Args:
        slo: most seconds per request, of "ttft", "tpot", "e2el"; all given ones must hold.
        role_chunk: the run is of a chat endpoint, whose first chunk has a role and no token: the
            gap behind it is part of the TTFT.

    Raises:
        ValueError: no request completed, or an unknown limit.
    """
    raise NotImplementedError


def concurrency(rate: float, ttft_s: float, itl_s: float, out_tokens: int) -> float:
    """Requests in the server on average, by Little's law: rate times the time each is there."""
    raise NotImplementedError


def knee(points: Sequence[tuple[float, float]], slo_ms: float) -> tuple[float, float | None]:
    """The interval that holds the knee.

    Args:
        points: (rate, P99 of TTFT in ms), in any order.

    Returns:
        The last rate up to which every rate keeps the limit, and the first that does not, None
        where all do.

    Raises:
        ValueError: no points, or the lowest rate breaks the limit.
    """
    raise NotImplementedError


def audit(claim: Claim) -> list[str]:
    """What is wrong with a line of a table, of these, in this order:

    "throughput-above-offered": more output tokens per second than are asked for.
    "cap-cannot-bind": the cap is above twice the requests in the server, by Little's law.
    "kv-not-limiting": under 5 % of the cache is used, so its size cannot matter.
    "too-few-requests": under 1,000 requests, of which a P99 is the worst few.
    "delta-within-noise": the change is not above the spread of repeats.
    """
    raise NotImplementedError


def differs(a_runs: Sequence[float], b_runs: Sequence[float]) -> bool:
    """Whether two settings differ, from one value per run: an exact test at p <= 0.05.

    p is the share of all ways to deal the values into two groups of these sizes whose means lie
    at least as far apart, in either direction, as they do here (to 1e-12 of the distance).

    Raises:
        ValueError: a side without runs.
    """
    raise NotImplementedError
