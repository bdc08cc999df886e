"""The mini scheduler against the real v0.22.1 one: cost of a request-step, same decisions.

    PYTHONPATH=upstream python -m benchmarks.bench_scheduler --write

Both run the same workload in turn in one process; only `schedule` and `update_from_output` are
timed. What a model runner would do in between (tokens per request, output objects) is not, and
neither is building requests, which for the real one includes hashing the prompt; the mini one
hashes inside `schedule`, and that is counted. The clock counts this thread's CPU time, so that
other work on the machine does not. Every pair must make equal decisions.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.report import README, Paired, machine
from conformance import replay
from labkit.tables import markdown_table, write_section

RUNNING = (16, 64, 256, 1024)
TARGET = 2.0
EOS = 2
TOKEN = 7

Plan = list[tuple[str, int]]


def workload(kind: str, num_running: int, caching: bool) -> tuple[dict[str, Any], list[Any]]:
    """A configuration and requests that keep `num_running` requests running.

    "decode": prompts of 32 tokens in one go, then 64 outputs. "prefill": prompts of 512 tokens in
    chunks of 64 over many steps, then 4 outputs. With caching, half of each prompt is shared.
    """
    prompt_len, max_tokens, threshold = (32, 64, 0) if kind == "decode" else (512, 4, 64)
    rng = random.Random(num_running)
    shared = rng.choices(range(3, 500), k=prompt_len // 2 if caching else 0)
    adds = [
        {
            "request_id": f"r{index}",
            "prompt_token_ids": shared + rng.choices(range(3, 500), k=prompt_len - len(shared)),
            "max_tokens": max_tokens,
            "priority": 0,
            "arrival_time": float(index),
            "ignore_eos": True,
        }
        for index in range(num_running)
    ]
    blocks = -(-(prompt_len + max_tokens) // 16)
    config = {
        "num_blocks": num_running * blocks + 1,
        "block_size": 16,
        "max_num_seqs": num_running,
        "max_num_batched_tokens": max(2048, num_running * 32),
        "long_prefill_token_threshold": threshold,
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": True,
        "max_model_len": 1024,
        "policy": "fcfs",
    }
    return config, adds


def run_ours(config: Mapping[str, Any], adds: list[Any]) -> tuple[float, list[Plan]]:
    """Seconds inside the mini scheduler, and its plans."""
    scheduler = replay.mini_scheduler(config)
    for add in adds:
        scheduler.add_request(replay.mini_request(add, EOS))
    clock, seconds, plans = time.thread_time, 0.0, []
    while scheduler.has_unfinished_requests():
        began = clock()
        output = scheduler.schedule()
        seconds += clock() - began
        plans.append(list(output.num_scheduled_tokens.items()))
        sampled = {
            request.request_id: [TOKEN]
            for request in output.scheduled_requests
            if scheduler.needs_sample(request, output.num_scheduled_tokens[request.request_id])
        }
        began = clock()
        scheduler.update_from_output(output, sampled)
        seconds += clock() - began
    return seconds, plans


def run_theirs(config: dict[str, Any], adds: list[Any]) -> tuple[float, list[Plan]]:
    """Seconds inside the real scheduler, and its plans."""
    from conformance import real

    scheduler = real.make_scheduler(config)
    requests = {add["request_id"]: real.make_request(add, 16, EOS) for add in adds}
    for request in requests.values():
        scheduler.add_request(request)
    clock, seconds, plans = time.thread_time, 0.0, []
    while scheduler.has_unfinished_requests():
        began = clock()
        plan = scheduler.schedule()
        seconds += clock() - began
        plans.append(list(plan.num_scheduled_tokens.items()))
        output = real.runner_output(
            plan,
            {
                request_id: TOKEN
                for request_id in plan.num_scheduled_tokens
                if not requests[request_id].is_prefill_chunk
            },
        )
        began = clock()
        scheduler.update_from_output(plan, output)
        seconds += clock() - began
    return seconds, plans


def measure(config: dict[str, Any], adds: list[Any], repeats: int) -> tuple[Paired, int]:
    """Timings of both in turn, and the number of request-steps of one run.

    Raises:
        RuntimeError: the two decided differently.
    """
    result = Paired([], [])
    plans: list[list[Plan]] = []
    runs: tuple[tuple[Callable[..., tuple[float, list[Plan]]], list[float]], ...] = (
        (run_ours, result.ours),
        (run_theirs, result.theirs),
    )
    for repeat in range(repeats + 1):
        plans = []
        for run, times in runs:
            gc.collect()
            gc.disable()  # a collection would hit whoever happens to allocate
            seconds, plan = run(config, adds)
            gc.enable()
            plans.append(plan)
            if repeat:  # the first pair warms up
                times.append(seconds)
        if plans[0] != plans[1]:
            raise RuntimeError(f"the two schedulers decided differently: {config}")
    return result, sum(map(len, plans[0]))


def main() -> None:
    """Measure every row, print it, and write the table into the README if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--running", type=int, nargs="+", default=RUNNING)
    parser.add_argument("--write", action="store_true", help="update benchmarks/README.md")
    args = parser.parse_args()
    rows = []
    for kind in ("decode", "prefill"):
        for caching in (False, True):
            for num_running in args.running:
                config, adds = workload(kind, num_running, caching)
                timing, count = measure(config, adds, args.repeats)
                each = [
                    f"{statistics.median(times) / count * 1e6:.2f}"
                    for times in (timing.ours, timing.theirs)
                ]
                name = f"{kind}-heavy, caching {'on' if caching else 'off'}"
                rows.append([name, str(num_running), *each, timing.ratio_text(), f"{TARGET}x"])
                print(" | ".join(rows[-1]), flush=True)
    header = ["workload", "running", "ours, µs", "real, µs", "ratio, median (min-max)", "target"]
    text = markdown_table(header, rows)
    text += f"\n\nMicroseconds of CPU time per request-step, median of {args.repeats} pairs."
    text += f" {machine()}."
    if args.write:
        write_section("scheduler", text, README)


if __name__ == "__main__":
    main()
