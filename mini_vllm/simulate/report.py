"""What a simulation came to, in the forms that other tools read.

Promises: the names are those of `vllm bench serve` and of vLLM's `/metrics`, so that what reads a
real server's result reads this one; a percentile is numpy's linear one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mini_vllm.plan import SchedulerOutput
from mini_vllm.simulate.cost import StepWork
from mini_vllm.simulate.simulator import Outcome, Simulated

PERCENTILES = (50, 90, 99)
SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """Most seconds that a request may take; None means without a limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def of(cls, text: str) -> Slo:
        """From `ttft=0.8,tpot=0.02`.

        Raises:
            ValueError: an unknown name, or not seconds above 0.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            if name not in SLO_NAMES or not seconds > 0:
                names = ", ".join(SLO_NAMES)
                raise ValueError(f"slo {part!r}: need NAME=SECONDS with one of {names}")
            found[name] = seconds
        return cls(**found)

    def holds(self, outcome: Outcome) -> bool:
        """Whether a request kept all of its limits; one of a single token has no TPOT."""
        for limit, value in (
            (self.ttft, outcome.ttft), (self.tpot, outcome.tpot), (self.e2el, outcome.e2el),
        ):  # fmt: skip
            if limit is not None and value is not None and value > limit:
                return False
        return True


def weighted_percentiles(
    values: np.ndarray, counts: np.ndarray, percentiles: Iterable[float]
) -> list[float]:
    """Numpy's linear percentiles of `values`, each repeated `counts` times.

    Args:
        values: float64 [n], any order.
        counts: int [n], 1 or more.
    """
    order = np.argsort(values)
    values, ends = values[order], np.cumsum(counts[order])
    found = []
    for each in percentiles:
        rank = (int(ends[-1]) - 1) * each / 100
        low = values[np.searchsorted(ends, int(rank), side="right")]
        high = values[np.searchsorted(ends, -int(-rank // 1), side="right")]
        found.append(float(low + (high - low) * (rank - int(rank))))
    return found


def bench_json(result: Simulated, slo: Slo | None = None) -> dict[str, Any]:
    """The keys of `vllm bench serve --save-result`, and a few of a server that knows its inside.

    `vllm/benchmarks/serve.py:988` `benchmark`. Times in milliseconds where the key says so.
    """
    done = result.outcomes
    outputs = sum(outcome.output_len for outcome in done)
    inputs = sum(outcome.prompt_len for outcome in done)
    span = result.duration or 1.0
    kept = sum(map(slo.holds, done)) if slo else None
    found: dict[str, Any] = {
        "duration": result.duration,
        "completed": len(done),
        "failed": 0,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / span,
        "request_goodput": kept / span if kept is not None else None,
        "output_throughput": outputs / span,
        "total_token_throughput": (inputs + outputs) / span,
        "max_concurrent_requests": result.peak_running + result.peak_waiting,
    }
    ones = np.ones(len(done), int)
    tpots = np.array([o.tpot for o in done if o.tpot is not None])
    for name, values, counts in (
        ("ttft", np.array([o.ttft for o in done]), ones),
        ("tpot", tpots, np.ones(len(tpots), int)),
        ("itl", np.frombuffer(result.gaps), np.array(result.gap_counts, int)),
        ("e2el", np.array([o.e2el for o in done]), ones),
    ):
        if not len(values):
            continue
        mean = float(np.average(values, weights=counts))
        spread = float(np.sqrt(np.average((values - mean) ** 2, weights=counts)))
        at = weighted_percentiles(values, counts, PERCENTILES)
        found[f"mean_{name}_ms"], found[f"std_{name}_ms"] = mean * 1e3, spread * 1e3
        found[f"median_{name}_ms"] = at[0] * 1e3
        for percentile, value in zip(PERCENTILES, at, strict=True):
            found[f"p{percentile}_{name}_ms"] = value * 1e3
    found |= {
        "slo_attainment": kept / len(done) if kept is not None and done else None,
        "num_steps": result.num_steps,
        "busy_share": result.busy / span,
        "preemptions": result.preemptions,
        "recomputed_tokens": result.recomputed_tokens,
        "cached_tokens": sum(outcome.cached_tokens for outcome in done),
        "peak_running": result.peak_running,
        "peak_waiting": result.peak_waiting,
        "peak_kv_cache_usage": result.peak_usage,
        "skipped_requests": result.skipped.count,
    }
    return found


def write_csv(result: Simulated, file: TextIO) -> None:
    """One line per request, in the order of the trace; times in seconds."""
    rows = csv.writer(file)
    rows.writerow((
        "request", "arrival", "prompt_len", "output_len", "queued", "ttft", "tpot", "e2el",
        "cached_tokens", "preemptions",
    ))  # fmt: skip
    for o in sorted(result.outcomes, key=lambda o: o.number):
        rows.writerow((
            o.number, o.arrival, o.prompt_len, o.output_len, o.first_scheduled - o.arrival, o.ttft,
            "" if o.tpot is None else o.tpot, o.e2el, o.cached_tokens, o.preemptions,
        ))  # fmt: skip


class PerfettoTrace:
    """An observer that writes every step for https://ui.perfetto.dev, as it comes."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._comma = ""

    def __call__(self, begin: float, end: float, plan: SchedulerOutput, work: StepWork) -> None:
        """Write one step: a bar, and the size of the batch as a counter."""
        prompts = work.tokens - work.requests
        self._write({
            "name": "prefill" if prompts > 0 else "decode", "ph": "X", "pid": 0, "tid": 0,
            "ts": begin * 1e6, "dur": (end - begin) * 1e6,
            "args": {"tokens": work.tokens, "requests": work.requests,
                     "preempted": len(plan.preempted_req_ids),
                     "new": len(plan.scheduled_new_req_ids)},
        })  # fmt: skip
        self._write({
            "name": "batch", "ph": "C", "pid": 0, "ts": begin * 1e6,
            "args": {"requests": work.requests},
        })  # fmt: skip

    def close(self) -> None:
        """Write the end."""
        self.file.write("\n]}\n")

    def _write(self, event: Mapping[str, Any]) -> None:
        self.file.write(self._comma + json.dumps(event))
        self._comma = ",\n"


def prometheus_text(result: Simulated, model: str) -> str:
    """Counters and histograms as a server's `/metrics` would show them at the end.

    Raises:
        ValueError: `prometheus_client`, of the extra `serve`, is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    except ImportError as error:
        raise ValueError(
            "prometheus: prometheus-client is not installed; put `uv run --extra serve` before the "
            "command"
        ) from error
    from mini_vllm.entrypoints.openai.metrics import SECONDS

    registry, labels, own = CollectorRegistry(), ("model_name", "engine"), (model, "0")
    done = result.outcomes
    for name, value in (
        ("prefix_cache_queries", result.queries), ("prefix_cache_hits", result.hits),
        ("num_preemptions", result.preemptions),
        ("prompt_tokens", sum(o.prompt_len for o in done)),
        ("generation_tokens", sum(o.output_len for o in done)),
    ):  # fmt: skip
        Counter(f"vllm:{name}", name, labels, registry=registry).labels(*own).inc(value)
    success = Counter(
        "vllm:request_success", "Requests that ended", (*labels, "finished_reason"),
        registry=registry,
    )  # fmt: skip
    success.labels(*own, "length").inc(len(done))
    seen: list[tuple[str, Iterable[float], Iterable[int]]] = [
        ("time_to_first_token_seconds", [o.ttft for o in done], repeat(1)),
        ("inter_token_latency_seconds", result.gaps, result.gap_counts),
        ("e2e_request_latency_seconds", [o.e2el for o in done], repeat(1)),
        ("request_queue_time_seconds", [o.first_scheduled - o.arrival for o in done], repeat(1)),
    ]
    for name, times, counts in seen:
        made = Histogram(f"vllm:{name}", name, labels, buckets=SECONDS, registry=registry)
        histogram = made.labels(*own)
        for seconds, count in zip(times, counts, strict=False):
            for _ in range(count):
                histogram.observe(seconds)
    return generate_latest(registry).decode()


def save_json(found: Mapping[str, Any], path: Path) -> None:
    """Write a report."""
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
