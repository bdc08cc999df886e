"""Requests within two limits, in computed time. vLLM's: `vllm/v1/core/sched/scheduler.py:362`
`Scheduler.schedule`, by `mini_vllm`, which decides as it does.

Workloads and the cost of a step are phase 03's policy laboratory's. Times are whole nanoseconds, so
that sums are exact.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from course.challenges.judge import Player, Wrong, whole
from labkit.modules import load_module
from mini_vllm import KVCacheManager, Request, SamplingParams, Scheduler, SchedulerConfig

TITLE = "Requests that keep two limits, under a policy of yours"
UNIT = "requests"
FEWER = False
MARKS = (("bronze", 9, 10), ("vLLM's", 1, 1), ("silver", 5, 4))

HERE = Path(__file__).resolve().parents[3] / "phase-03-continuous-batching-scheduler/experiments"
REQUESTS, RATE = 80, 45
BUDGET, RUNNING = 2048, 64
FIRST, GAP = 200_000, 50_000
"""Microseconds to the first token, and between two."""


@functools.cache
def cost() -> dict[str, int]:
    """Nanoseconds of a step, rounded from phase 03's fit."""
    data = json.loads((HERE / "measured" / "step-cost.json").read_text(encoding="utf-8"))
    return {name: round(value * 1e9) for name, value in data["cost"].items()}


def workload(seed: str) -> list[list[int]]:
    """`[arrival in microseconds, prompt tokens, output tokens]` per request."""
    lab = load_module(HERE / "workload.py", "challenge_workload")
    jobs = lab.jobs_of(replace(lab.LAPTOP.at(RATE), num_requests=REQUESTS), seed)
    return [[round(job.arrival * 1e6), len(job.prompt), job.max_tokens] for job in jobs]


def seconds(parts: list[tuple[int, int]]) -> int:
    """Nanoseconds of a step that computes `(tokens, tokens before)` of each request."""
    each = cost()
    time = each["base"]
    for n, before in parts:
        pairs = n * before + n * (n + 1) // 2
        time += each["token"] * n + each["context"] * (before + n) + each["pair"] * pairs
    return time


def _kept(arrival: int, times: list[int]) -> bool:
    """Whether a request kept both limits; `times` of its tokens in nanoseconds."""
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return times[0] - 1000 * arrival <= 1000 * FIRST and max(gaps, default=0) <= 1000 * GAP


Step = Callable[[int, list[dict[str, Any]], list[dict[str, Any]]], Any]


def _serve(load: list[list[int]], step: Step) -> int:
    """Serve the requests, and count those that kept both limits."""
    jobs = {f"r{n}": job for n, job in enumerate(load)}
    pending, now, good = list(jobs), 0, 0
    waiting: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    times: dict[str, list[int]] = {name: [] for name in jobs}
    while pending or waiting or running:
        if not waiting and not running:
            now = max(now, 1000 * jobs[pending[0]][0])
        while pending and 1000 * jobs[pending[0]][0] <= now:
            name = pending.pop(0)
            waiting.append({"name": name, "arrival": jobs[name][0], "prompt": jobs[name][1]})
        plan = step(now // 1000, waiting, running)
        if not isinstance(plan, list) or not plan:
            raise Wrong(
                f"plan() gave {str(plan)[:60]}: need a list of [name, tokens], at least one"
            )
        live = {request["name"]: request for request in [*waiting, *running]}
        budget, parts, named = BUDGET, [], dict[str, int]()
        for each in plan:
            if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], str)):
                raise Wrong(f"plan() holds {str(each)[:60]}: need [name, tokens]")
            if each[0] not in live or each[0] in named:
                raise Wrong(
                    f"plan() names {each[0][:20]!r}: need waiting or running requests, each once"
                )
            request = live[each[0]]
            left = request["prompt"] - request.get("computed", 0)
            n = whole(f"tokens of {each[0]}", each[1], 1, max(1, left))
            named[each[0]] = n
            budget -= n
            parts.append((n, request.get("computed", 0)))
        if budget < 0:
            raise Wrong(f"plan() computes {BUDGET - budget} tokens: need at most {BUDGET}")
        now += seconds(parts)
        for name in named:
            if "computed" not in live[name]:
                waiting.remove(live[name])
                live[name].update(computed=0, said=0, last=0)
                running.append(live[name])
        if len(running) > RUNNING:
            raise Wrong(f"plan() runs {len(running)} requests: need at most {RUNNING}")
        for name, n in named.items():
            request = live[name]
            request["computed"] += n
            if request["computed"] >= request["prompt"]:
                times[name].append(now)
                request["said"], request["last"] = request["said"] + 1, now // 1000
            if request["said"] == jobs[name][2]:
                running.remove(request)
                good += _kept(jobs[name][0], times[name])
    return good


def play(answer: Callable[..., Player], load: list[list[int]]) -> int:
    """Requests that kept both limits."""
    setup = {"budget": BUDGET, "running": RUNNING, "first": FIRST, "gap": GAP, "cost": cost()}
    player = answer(setup)
    return _serve(load, lambda *state: player.call("plan", *state))


def vllm(load: list[list[int]]) -> int:
    """The same under vLLM's scheduler."""
    pool = KVCacheManager(100_000, 16, False)
    config = SchedulerConfig(max_num_seqs=RUNNING, max_num_batched_tokens=BUDGET)
    scheduler = Scheduler(pool, config)
    said: dict[str, int] = {}
    plans: list[Any] = []

    def step(now: int, waiting: list[dict[str, Any]], running: list[dict[str, Any]]) -> Any:
        if plans:  # what the step before computed
            last = plans.pop()
            sampled = {
                r.request_id: [1]
                for r in last.scheduled_requests
                if scheduler.needs_sample(r, last.num_scheduled_tokens[r.request_id])
            }
            scheduler.update_from_output(last, sampled)
        for request in waiting:
            name = request["name"]
            if name not in said:
                said[name] = 0
                params = SamplingParams(
                    max_tokens=load[int(name.removeprefix("r"))][2], ignore_eos=True
                )
                scheduler.add_request(Request(name, [1] * request["prompt"], params))
        plans.append(scheduler.schedule())
        return [[name, n] for name, n in plans[-1].num_scheduled_tokens.items()]

    return _serve(load, step)
