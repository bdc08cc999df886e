"""Workloads described by a few numbers, and the latencies an engine gives them.

Promises: the same seed gives the same workload; times are wall-clock seconds of this process.
TTFT counts from arrival, so queueing is in it; ITL is the gap between two outputs of one request.
Metric definitions: `vllm/v1/metrics/stats.py:353` `IterationStats.update_from_output`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mini_vllm.config import SamplingParams, number, whole
from mini_vllm.engine import LLMEngine
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

PERCENTILES = (50, 90, 99)
MOST_REQUESTS = MOST_LENGTH = 1_000_000
MOST_PROMPT_TOKENS = 1 << 26
"""Bounds of a workload, which is made in memory before it runs."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with uniform lengths in closed ranges and Poisson arrivals.

    `request_rate` is requests per second; 0 means all arrive at once. The first
    `shared_prefix_len` prompt tokens are the same for all requests.
    """

    num_requests: int = 64
    prompt_len: tuple[int, int] = (16, 256)
    output_len: tuple[int, int] = (8, 128)
    request_rate: float = 0.0
    shared_prefix_len: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        need = f"at least 1 and at most {MOST_REQUESTS}"
        whole("num_requests", self.num_requests, 1, MOST_REQUESTS, need)
        for name in ("prompt_len", "output_len"):
            low, high = getattr(self, name)
            if not 1 <= low <= high <= MOST_LENGTH:
                raise ValueError(f"{name}={low}-{high}: need 1 <= low <= high <= {MOST_LENGTH}")
        if self.num_requests * self.prompt_len[1] > MOST_PROMPT_TOKENS:
            raise ValueError(
                f"num_requests={self.num_requests} with prompt_len={self.prompt_len[1]}: need at "
                f"most {MOST_PROMPT_TOKENS} prompt tokens together"
            )
        if number("request_rate", self.request_rate) < 0.0:
            raise ValueError(f"request_rate={self.request_rate}: need 0 (all at once) or more")
        whole("seed", self.seed, 0, need="0 or more")
        if not 0 <= self.shared_prefix_len <= self.prompt_len[0]:
            raise ValueError(
                f"shared_prefix_len={self.shared_prefix_len}: need 0 to the shortest prompt, "
                f"{self.prompt_len[0]}"
            )

    def requests(self, vocab_size: int) -> list[tuple[float, list[int], int]]:
        """`(arrival in seconds, prompt token ids, number of output tokens)` per request."""
        rng = np.random.default_rng(self.seed)
        arrivals = np.zeros(self.num_requests)
        if self.request_rate > 0:
            gaps = rng.exponential(1.0 / self.request_rate, self.num_requests)
            arrivals = np.cumsum(gaps) - gaps[0]
        top = min(vocab_size, 256)
        prefix = rng.integers(0, top, self.shared_prefix_len).tolist()
        made = []
        for arrival in arrivals:
            length = int(rng.integers(self.prompt_len[0], self.prompt_len[1] + 1))
            own = rng.integers(0, top, length - len(prefix)).tolist()
            outputs = int(rng.integers(self.output_len[0], self.output_len[1] + 1))
            made.append((float(arrival), prefix + own, outputs))
        return made


@dataclass(slots=True)
class BenchResult:
    """What a run measured; times in seconds."""

    duration: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """What was wrong, by request that ended in an error; the other numbers then mean nothing."""

    def to_json(self) -> dict[str, float | int | dict[str, float]]:
        """Counts, throughput in tokens per second, and percentiles in milliseconds."""
        return {
            "duration_s": self.duration,
            "num_steps": self.num_steps,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "output_tokens_per_s": self.output_tokens / self.duration,
            "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / self.duration,
            "ttft_ms": _percentiles(self.ttft),
            "itl_ms": _percentiles(self.itl),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds; empty for no samples."""
    if not seconds:
        return {}
    values = np.asarray(seconds) * 1e3
    named = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean())} | named


def run_workload(
    engine: LLMEngine,
    workload: Workload,
    on_step: Callable[[int], None] | None = None,
    **options: Any,
) -> BenchResult:
    """Serve the workload to its end, every output at full length.

    Args:
        on_step: called after each step with the number of requests finished so far.
        options: of each request, what an open room understands, such as `lora_request`.

    Raises:
        ValueError: a request that the engine refuses; nothing has run.
    """
    pending = workload.requests(engine.tokenizer.vocab_size)
    all_params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, _, n in pending]
    for (_, prompt, _), params in zip(pending, all_params, strict=True):
        engine.inputs.check_fits(prompt, params)
    live: dict[str, tuple[Request, float]] = {}
    last_output: dict[str, float] = {}
    result = BenchResult(0.0, 0, sum(len(p) for _, p, _ in pending), 0, 0, 0)

    def count_hits(output: SchedulerOutput) -> None:
        result.cached_tokens += sum(output.num_cached_tokens.values())

    engine.observers.append(count_hits)
    began, added, done = time.perf_counter(), 0, 0
    try:
        while added < len(pending) or engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while added < len(pending) and pending[added][0] <= now:
                arrival, prompt, _ = pending[added]
                request_id = engine.add_request(prompt, all_params[added], **options)
                live[request_id] = (engine.requests[request_id], arrival)
                added += 1
            if not engine.has_unfinished_requests():
                time.sleep(min(0.01, max(0.0, pending[added][0] - now)))
                continue
            before = {request_id: r.num_tokens for request_id, (r, _) in live.items()}
            finished = engine.step()
            now = time.perf_counter() - began
            result.num_steps += 1
            for request_id, (request, arrival) in live.items():
                if request.num_tokens == before[request_id]:
                    continue
                since = last_output.get(request_id)
                if since is None:
                    result.ttft.append(now - arrival)
                else:
                    result.itl.append(now - since)
                last_output[request_id] = now
            for request in finished:
                result.output_tokens += request.num_output_tokens
                result.preemptions += request.num_preemptions
                if request.finish_reason == "error":
                    result.errors[request.request_id] = str(request.stop_reason)
                del live[request.request_id]
            done += len(finished)
            if on_step is not None:
                on_step(done)
    finally:
        engine.observers.remove(count_hits)
        for request_id in live:
            engine.abort_request(request_id)
    result.duration = time.perf_counter() - began
    return result
