"""Lab 18-02: what a benchmark measured, what it means, and what cannot have been measured.

A run is the JSON of `vllm bench serve --save-result --save-detailed`. Times in it are seconds; a
row has milliseconds, as vLLM's own report. `run.py` makes such files from a real server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
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


_FIELDS = ("input_lens", "output_lens", "ttfts", "itls", "start_times")


def load_run(path: str | Path) -> Run:
    """Read a run.

    `request_rate` may be the text "inf". `max_concurrency` may be missing or null.

    Raises:
        ValueError: not a JSON object, a field missing (those of `--save-detailed` are named with
            that option), or lists of different lengths.
    """
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: need a JSON object")
    if missing := [name for name in ("duration", "completed", "request_rate") if name not in found]:
        raise ValueError(f"{path}: {', '.join(missing)} missing")
    if missing := [name for name in _FIELDS if name not in found]:
        raise ValueError(f"{path}: {', '.join(missing)} missing: need --save-detailed")
    if len({len(found[name]) for name in _FIELDS}) != 1:
        raise ValueError(f"{path}: {', '.join(_FIELDS)} have different lengths")
    return Run(
        float(found["duration"]), int(found["completed"]), float(found["request_rate"]),
        found.get("max_concurrency"), tuple(found["input_lens"]), tuple(found["output_lens"]),
        tuple(found["ttfts"]), tuple(tuple(gaps) for gaps in found["itls"]),
        tuple(found["start_times"]),
    )  # fmt: skip


def percentile(xs: Sequence[float], p: float) -> float:
    """Between the two neighbours of rank (n - 1) * p / 100, linearly, as numpy does.

    Raises:
        ValueError: no values, or p outside of 0 to 100.
    """
    if not xs or not 0 <= p <= 100:
        raise ValueError(f"percentile({len(xs)} values, {p}): need values, and p from 0 to 100")
    ordered, rank = sorted(xs), (len(xs) - 1) * p / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


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
    if unknown := set(slo or ()) - {"ttft", "tpot", "e2el"}:
        raise ValueError(f"slo={sorted(unknown)}: need some of ttft, tpot, e2el")
    done = [place for place, length in enumerate(run.output_lens) if length > 0]
    if not done:
        raise ValueError("no request completed")
    ttfts, tpots, gaps, ends, good = [], [], [], [], 0
    for place in done:
        ttft, own = run.ttfts[place], run.itls[place]
        if role_chunk and own:
            ttft, own = ttft + own[0], own[1:]
        end, length = ttft + math.fsum(own), run.output_lens[place]
        tpot = (end - ttft) / (length - 1) if length > 1 else 0.0
        if length > 1:
            tpots.append(tpot)
        ttfts.append(ttft)
        ends.append(end)
        gaps.extend(own)
        took = {"ttft": ttft, "tpot": tpot, "e2el": end}
        good += all(took[name] <= limit for name, limit in (slo or {}).items())
    outputs = sum(run.output_lens)
    inputs = sum(run.input_lens[place] for place in done)

    def ms(values: list[float], p: float | None = None) -> float:
        if not values:
            return 0.0
        return 1e3 * (math.fsum(values) / len(values) if p is None else percentile(values, p))

    return Row(
        len(done), len(run.output_lens) - len(done), ms(ttfts, 50), ms(ttfts, 99), ms(gaps),
        ms(gaps, 50), ms(gaps, 99), ms(tpots), ms(tpots, 50), ms(tpots, 99), max(ends),
        outputs / run.duration, (inputs + outputs) / run.duration,
        good / run.duration if slo else None,
    )  # fmt: skip


def concurrency(rate: float, ttft_s: float, itl_s: float, out_tokens: int) -> float:
    """Requests in the server on average, by Little's law: rate times the time each is there."""
    return rate * (ttft_s + (out_tokens - 1) * itl_s)


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
    ordered = sorted(points)
    if not ordered or ordered[0][1] > slo_ms:
        raise ValueError(f"slo_ms={slo_ms}: the lowest rate breaks it already, or none is given")
    last = ordered[0][0]
    for rate, value in ordered:
        if value > slo_ms:
            return last, rate
        last = rate
    return last, None


def audit(claim: Claim) -> list[str]:
    """What is wrong with a line of a table, of these, in this order:

    "throughput-above-offered": more output tokens per second than are asked for.
    "cap-cannot-bind": the cap is above twice the requests in the server, by Little's law.
    "kv-not-limiting": under 5 % of the cache is used, so its size cannot matter.
    "too-few-requests": under 1,000 requests, of which a P99 is the worst few.
    "delta-within-noise": the change is not above the spread of repeats.
    """
    found = []
    if claim.output_tps > claim.rate * claim.output_len:
        found.append("throughput-above-offered")
    there = concurrency(
        claim.rate, claim.ttft_p50_ms / 1e3, claim.itl_p50_ms / 1e3, claim.output_len
    )
    if claim.max_num_seqs is not None and claim.max_num_seqs > 2 * there:
        found.append("cap-cannot-bind")
    if claim.kv_usage is not None and claim.kv_usage < 0.05:
        found.append("kv-not-limiting")
    if claim.num_requests < 1000:
        found.append("too-few-requests")
    if claim.change is not None and abs(claim.change) <= claim.spread:
        found.append("delta-within-noise")
    return found


def differs(a_runs: Sequence[float], b_runs: Sequence[float]) -> bool:
    """Whether two settings differ, from one value per run: an exact test at p <= 0.05.

    p is the share of all ways to deal the values into two groups of these sizes whose means lie
    at least as far apart, in either direction, as they do here (to 1e-12 of the distance).

    Raises:
        ValueError: a side without runs.
    """
    if not a_runs or not b_runs:
        raise ValueError("differs: need runs of both settings")
    values, size = [*a_runs, *b_runs], len(a_runs)
    total = math.fsum(values)

    def apart(chosen: Sequence[float]) -> float:
        part = math.fsum(chosen)
        return abs(part / size - (total - part) / len(b_runs))

    seen = apart(a_runs)
    splits = [apart(chosen) for chosen in combinations(values, size)]
    return sum(each >= seen * (1 - 1e-12) for each in splits) <= 0.05 * len(splits)
