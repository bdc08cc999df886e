"""The policy laboratory: mini_vllm's scheduler in simulated time, under several policies.

`python phase-03-continuous-batching-scheduler/experiments/policy_lab.py` runs every comparison,
prints the tables and writes `policies.json` into `--out`. Scheduler and KV cache manager are the
engine's own; there is no model: a request ends after the outputs its job asks for, and a step
takes the seconds that the fitted cost (`step_cost.py`) gives it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.modules import sibling
from mini_vllm import Request, SamplingParams, Scheduler

_policies = sibling(__file__, "policies")
OldestFirst, Policy, PrefillFirst, ReservingKV, StaticBatching = (
    _policies.OldestFirst,
    _policies.Policy,
    _policies.PrefillFirst,
    _policies.ReservingKV,
    _policies.StaticBatching,
)
_step_cost = sibling(__file__, "step_cost")
H100_8B, StepCost, load, shape_of = (
    _step_cost.H100_8B,
    _step_cost.StepCost,
    _step_cost.load,
    _step_cost.shape_of,
)
_workload = sibling(__file__, "workload")
LAPTOP, SERVER, Job, Workload, jobs_of = (
    _workload.LAPTOP,
    _workload.SERVER,
    _workload.Job,
    _workload.Workload,
    _workload.jobs_of,
)

HERE = Path(__file__).resolve().parent


Metrics = dict[str, float]


def simulate(scheduler: Scheduler, jobs: Sequence[Job], cost: StepCost) -> dict[str, Any]:
    """Serve `jobs` in simulated time; a request that arrives during a step waits for its end.

    Returns:
        `"times"`: for each job its arrival and the times of its output tokens, in seconds; `"end"`:
        when the last request ended; `"scheduled"`, `"recomputed"`, `"cached"`: tokens;
        `"preemptions"`, `"steps"`: counts.

    Raises:
        RuntimeError: requests are unfinished and none can be scheduled.
    """
    pending = deque(jobs)
    times: dict[str, list[float]] = {}
    most_computed: dict[str, int] = {}
    counts = dict.fromkeys(("scheduled", "recomputed", "cached", "preemptions", "steps"), 0)
    now = 0.0
    while pending or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, pending[0].arrival)
        while pending and pending[0].arrival <= now:
            job = pending.popleft()
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
            scheduler.add_request(
                Request(job.name, list(job.prompt), params, None, job.arrival, job.priority)
            )
            times[job.name] = []
        plan = scheduler.schedule()
        counts["preemptions"] += len(plan.preempted_req_ids)
        if not plan.scheduled_requests:
            if plan.preempted_req_ids:
                continue
            raise RuntimeError("no progress: requests are unfinished but none can be scheduled")
        now += cost.seconds(shape_of(plan))
        counts["steps"] += 1
        counts["cached"] += sum(plan.num_cached_tokens.values())
        sampled = {}
        for request in plan.scheduled_requests:
            name, start = request.request_id, request.num_computed_tokens
            n = plan.num_scheduled_tokens[name]
            known = most_computed.get(name, 0)
            counts["scheduled"] += n
            counts["recomputed"] += max(0, min(start + n, known) - start)
            most_computed[name] = max(known, start + n)
            if scheduler.needs_sample(request, n):
                sampled[name] = [1]
                times[name].append(now)
        scheduler.update_from_output(plan, sampled)
    return {"times": times, "end": now, **counts}


def quantile(values: Sequence[float], q: float) -> float:
    """The value at rank `ceil(n q)`, as in lab 03-05; 0.0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(round(len(values) * q, 9)) - 1)]


def metrics(run: dict[str, Any], jobs: Sequence[Job]) -> Metrics:
    """Time to first token and between tokens, throughput, waste; times in milliseconds."""
    times = run["times"]
    first = {job.name: times[job.name][0] - job.arrival for job in jobs}
    chats = [first[job.name] for job in jobs if job.kind == "chat"]
    others = [first[job.name] for job in jobs if job.kind != "chat"]
    gaps = [b - a for line in times.values() for a, b in itertools.pairwise(line)]
    worst = [max(b - a for a, b in itertools.pairwise(t)) for t in times.values() if t[1:]]
    outputs = sum(len(line) for line in times.values())
    result = {
        "ttft_p50": quantile(list(first.values()), 0.5) * 1e3,
        "ttft_p99": quantile(list(first.values()), 0.99) * 1e3,
        "chat_ttft_p99": quantile(chats, 0.99) * 1e3,
        "document_ttft_p50": quantile(others, 0.5) * 1e3,
        "itl_p50": quantile(gaps, 0.5) * 1e3,
        "itl_p99": quantile(gaps, 0.99) * 1e3,
        "stall_p90": quantile(worst, 0.9) * 1e3,
        "throughput": outputs / (run["end"] - jobs[0].arrival),
        "wasted": 100 * run["recomputed"] / run["scheduled"],
        "preemptions": run["preemptions"],
        "cached": 100 * run["cached"] / (run["cached"] + run["scheduled"]),
    }
    return {name: float(value) for name, value in result.items()}


def interval(values: Sequence[float], seed: int = 0) -> list[float]:
    """Mean over the seeds, and the 95 % interval of that mean by bootstrap: `[mean, low, high]`."""
    rng, n = random.Random(seed), len(values)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(1000))
    return [round(value, 4) for value in (sum(values) / n, means[24], means[974])]


def over_seeds(
    build: Callable[[], Scheduler], workload: Workload, cost: StepCost, seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Every metric as `[mean, low, high]` over the seeds."""
    rows = []
    for seed in seeds:
        jobs = jobs_of(workload, seed)
        rows.append(metrics(simulate(build(), jobs, cost), jobs))
    return {name: interval([row[name] for row in rows]) for name in rows[0]}


# ---------------------------------------------------------------------- the comparisons

WHOLE = {"enable_chunked_prefill": False}
POLICIES = {
    "static batching": Policy(StaticBatching, budget=16384),
    "prompts first, whole": Policy(PrefillFirst, budget=2048, settings=WHOLE),
    "FCFS, whole prompts": Policy(budget=2048, settings=WHOLE),
    "FCFS, budget 512": Policy(),
    "FCFS, budget 128": Policy(budget=128),
    "budget 512, threshold 64": Policy(settings={"long_prefill_token_threshold": 64}),
    "priority, budget 512": Policy(settings={"policy": "priority"}),
    "budget 512, no prefix cache": Policy(caching=False),
}
MEMORY = {
    "newest first": Policy(),
    "oldest first": Policy(OldestFirst, settings={"forget_withdrawn_blocks": True}),
    "reserve up front": Policy(kv=ReservingKV),
}
POOLS = (70, 90, 120, 160, 220, 300)


def compare(cost: StepCost, rate: float, seeds: Sequence[int], requests: int) -> dict[str, Any]:
    """Every policy on the same requests, with memory for all."""
    workload = _sized(LAPTOP.at(rate), requests)
    return {
        name: over_seeds(lambda p=policy: p.build(4096, 64), workload, cost, seeds)
        for name, policy in POLICIES.items()
    }


def memory(cost: StepCost, rate: float, seeds: Sequence[int], requests: int) -> dict[str, Any]:
    """Three ways to live with a small pool, over its size."""
    workload = _sized(LAPTOP.at(rate), requests)
    return {
        name: {
            str(size): over_seeds(lambda p=policy, n=size: p.build(n, 64), workload, cost, seeds)
            for size in POOLS
        }
        for name, policy in MEMORY.items()
    }


def tradeoff(
    cost: StepCost,
    workload: Workload,
    policies: dict[str, Policy],
    rates: Sequence[float],
    seeds: Sequence[int],
    requests: int,
) -> dict[str, Any]:
    """Each policy at each rate."""
    return {
        name: {
            str(rate): over_seeds(
                lambda p=policy: p.build(60000, 256),
                _sized(workload.at(rate), requests),
                cost,
                seeds,
            )
            for rate in rates
        }
        for name, policy in policies.items()
    }


def _sized(workload: Workload, requests: int) -> Workload:
    return replace(workload, num_requests=requests)


def budgets(sizes: Sequence[int], whole: int) -> dict[str, Policy]:
    """Whole prompts first, and first come first served with chunks, by the step's budget."""
    return {
        "prompts first, whole": Policy(PrefillFirst, budget=whole, settings=WHOLE),
        **{f"budget {size}": Policy(budget=size) for size in sizes},
    }


def run_all(cost: StepCost, seeds: Sequence[int], requests: int) -> dict[str, Any]:
    """Every comparison, as JSON types."""
    laptop_rates, server_rates = (10, 20, 30, 40, 45, 50, 55), (2, 4, 6, 8, 10, 12, 14, 16)
    few = seeds[: max(2, len(seeds) // 2)]
    return {
        "seeds": len(seeds),
        "seeds_tradeoff": len(few),
        "requests": requests,
        "compare": {str(rate): compare(cost, rate, seeds, requests) for rate in (40, 60)},
        "memory": {"40": memory(cost, 40, seeds, requests)},
        "tradeoff": {
            "laptop": tradeoff(
                cost,
                LAPTOP,
                budgets((32, 64, 128, 256, 512, 1024), 2048),
                laptop_rates,
                few,
                requests,
            ),
            "server": tradeoff(
                H100_8B,
                SERVER,
                budgets((256, 512, 1024, 2048, 8192), 16384),
                server_rates,
                few,
                requests,
            ),
        },
    }


def capacity(
    curves: dict[str, Any], limit: float, metric: str, first_token: float
) -> dict[str, float]:
    """Per policy the highest throughput of any rate that keeps two promises; 0.0 where none does.

    Args:
        curves: policy to rate to metrics, as `tradeoff` gives it.
        limit: of `metric`, in milliseconds.
        first_token: of the median time to first token, in milliseconds.
    """
    return {
        name: max(
            (
                point["throughput"][0]
                for point in rates.values()
                if point[metric][0] <= limit and point["ttft_p50"][0] <= first_token
            ),
            default=0.0,
        )
        for name, rates in curves.items()
    }


COLUMNS = {
    "ttft_p50": "TTFT p50",
    "chat_ttft_p99": "chat p99",
    "document_ttft_p50": "doc. p50",
    "itl_p50": "ITL p50",
    "itl_p99": "ITL p99",
    "stall_p90": "stall p90",
    "throughput": "tokens/s",
}


def table(rows: dict[str, dict[str, list[float]]], columns: dict[str, str] | None = None) -> str:
    """Means as text, a row per policy."""
    columns = columns or COLUMNS
    width = max(len(name) for name in rows)
    lines = [" " * width + "".join(f"{words:>11}" for words in columns.values())]
    for name, row in rows.items():
        lines.append(f"{name:<{width}}" + "".join(f"{row[key][0]:>11.1f}" for key in columns))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write the JSON."""
    parser = argparse.ArgumentParser(description="Compare scheduling policies in simulated time.")
    parser.add_argument("--cost", type=Path, default=HERE / "measured" / "step-cost.json")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=300, help="per run")
    parser.add_argument("--out", type=Path, default=Path("my-policies"), help="folder to write to")
    args = parser.parse_args(argv)
    if args.seeds < 2 or args.requests < 10:
        parser.error("--seeds needs at least 2, --requests at least 10")
    result = run_all(load(args.cost), range(args.seeds), args.requests)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "policies.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    for rate, rows in result["compare"].items():
        print(f"\n{rate} requests a second; times in ms\n{table(rows)}")
    waste = {"throughput": "tokens/s", "wasted": "wasted %", "preemptions": "preempt."}
    for rate, ways in result["memory"].items():
        for name, sizes in ways.items():
            print(f"\n{name}, {rate} requests a second, by blocks\n{table(sizes, waste)}")


if __name__ == "__main__":
    main()
