"""What a server's meters say step by step, and what happened: vLLM's scheduler and its own stats.

The counters are those of the `/metrics` page, summed from the pin's own records as
`vllm/v1/metrics/loggers.py:1058` `PrometheusStatLogger.record` sums them: `SchedulerStats` of each
step, `IterationStats` of each output. Beside them stands what no meter says, from calls that were
watched: tokens looked up again, tokens computed again, and how often memory was refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from conformance import workloads

ABOUT = (
    '`{"seed", "config", "prompts"}` of one workload, `"meters"` before the first step and after '
    "each: queries, hits, computed, cached, preemptions, running, waiting, usage; and "
    '`"happened"`, up to then: tokens looked up again, tokens computed again, refusals of memory.'
)
WANTED = {"prefix": 40, "mixed": 12, "limits": 12, "pressure": 12}
"""Workloads of each profile of `workloads.py`, in the order of their seeds."""


def plain(workload: workloads.Workload) -> bool:
    """Whether nothing happens that these meters are not about: an abort, a priority, a batch."""
    config = workload["config"]
    return (
        config["policy"] == "fcfs"
        and config["enable_chunked_prefill"]
        and not config["long_prefill_token_threshold"]
        and not any(event["abort"] for event in workload["events"])
    )


def watched(workload: workloads.Workload) -> dict[str, Any]:
    """One workload on the real scheduler, its meters on."""
    from vllm.v1.metrics.stats import (
        IterationStats,
        LoRARequestStates,
        PrefixCacheStats,
        RequestStateStats,
    )

    from conformance import real

    config = workload["config"]
    scheduler = real.make_scheduler(config)
    manager = scheduler.kv_cache_manager
    scheduler.log_stats = manager.log_stats = True
    manager.prefix_cache_stats = PrefixCacheStats()
    count: dict[str, int] = dict.fromkeys(("queries", "hits", "computed", "cached", "preempted"), 0)
    happened = {"again": 0, "recomputed": 0, "refused": 0}
    lookups: dict[str, int] = defaultdict(int)
    top: dict[str, int] = defaultdict(int)
    states: dict[str, RequestStateStats] = defaultdict(RequestStateStats)
    admitted: list[str] = []
    find, allocate = manager.get_computed_blocks, manager.allocate_slots

    def find_watched(request: Any) -> Any:
        if request.num_preemptions == 0 and config["enable_prefix_caching"]:
            happened["again"] += request.num_tokens if lookups[request.request_id] else 0
            lookups[request.request_id] += 1
        return find(request)

    def allocate_watched(*args: Any, **more: Any) -> Any:
        found = allocate(*args, **more)
        happened["refused"] += found is None
        return found

    manager.get_computed_blocks, manager.allocate_slots = find_watched, allocate_watched
    events = {event["step"]: event["add"] for event in workload["events"]}
    meters, truth, step = [[0] * 7 + [0.0]], [[0, 0, 0]], 0
    while step <= max(events) or scheduler.has_unfinished_requests():
        for add in events.get(step, ()):
            request = real.make_request(add, config["block_size"], workload["eos_token_id"])
            scheduler.add_request(request)
        plan = scheduler.schedule()
        admitted += [new.req_id for new in plan.scheduled_new_reqs]
        sampled = {}
        for name, tokens in plan.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            happened["recomputed"] += max(0, min(top[name], end) - (end - tokens))
            top[name] = max(top[name], end)
            if end == request.num_tokens:
                place = request.num_output_tokens
                sampled[name] = workload["outputs"][name][place]
        outputs = scheduler.update_from_output(plan, real.runner_output(plan, sampled))
        iteration = IterationStats()
        for batch in outputs.values():
            for output in batch.outputs:
                first = output.request_id not in states
                iteration.update_from_output(
                    output, 0.0, first, states[output.request_id], LoRARequestStates(False), None
                )
        (stats,) = [b.scheduler_stats for b in outputs.values() if b.scheduler_stats is not None]
        count["queries"] += stats.prefix_cache_stats.queries
        count["hits"] += stats.prefix_cache_stats.hits
        count["computed"] += iteration.prompt_token_stats.get_by_source("local_compute")
        count["cached"] += iteration.prompt_token_stats.get_by_source("local_cache_hit")
        count["preempted"] += iteration.num_preempted_reqs
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        usage = round(stats.kv_cache_usage, 6)
        meters.append([*count.values(), stats.num_running_reqs, waiting, usage])
        truth.append(list(happened.values()))
        step += 1
    adds = {add["request_id"]: add for adds in events.values() for add in adds}
    return {
        "seed": workload["seed"],
        "config": config,
        "prompts": [adds[name]["prompt_token_ids"] for name in admitted],
        "meters": meters,
        "happened": truth,
    }


def cases() -> Iterator[dict[str, Any]]:
    """The first workloads of each profile that are plain."""
    for name, most in WANTED.items():
        found, seed = 0, 0
        while found < most:
            workload = workloads.generate(seed)
            if workloads.profile_of(seed) == name and plain(workload):
                found += 1
                yield watched(workload)
            seed += 1
