"""Record what the real v0.22.1 scheduler decides on generated workloads, step by step.

Needs the pinned tree on `PYTHONPATH` (`README.md` beside it has the commands). One workload per
line, in the format of `recording.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.source import Real, installed

MAX_STEPS = 2000
STALL_STEPS = 3
SEEDS = range(3600)
"""Of the synchronous scheduler: 400 of each profile."""
ASYNC_SEEDS = range(30_000, 31_080)
"""The seeds of `async.jsonl.gz`: 120 of each profile."""


class Stalled(Exception):
    """The real scheduler stopped scheduling with work left: the workload asks the impossible."""


def record(workload: workloads.Workload, real: Real | None = None) -> recording.Recording:
    """Run one workload on the real scheduler and note every field of every step.

    Aborts of a step are applied after its arrivals, one by one in the order given. The script of
    `outputs` is cut to the tokens that were used.

    Raises:
        Stalled: unfinished work, no event to come, and nothing scheduled.
    """
    real = real or installed()
    config, script = workload["config"], workload["outputs"]
    scheduler = real.make_scheduler(config)
    block_size, eos = config["block_size"], workload["eos_token_id"]
    events = {event["step"]: event for event in workload["events"]}
    live: dict[str, Any] = {}
    used: dict[str, int] = dict.fromkeys(script, 0)
    steps: list[dict[str, Any]] = []
    idle = 0
    while scheduler.has_unfinished_requests() or any(step >= len(steps) for step in events):
        reasons: dict[str, str] = {}
        event = events.get(len(steps), {"add": [], "abort": []})
        for add in event["add"]:
            live[add["request_id"]] = real.make_request(add, block_size, eos)
            scheduler.add_request(live[add["request_id"]])
        for request_id in event["abort"]:
            real.abort(scheduler, request_id)
            if live.pop(request_id, None):
                reasons[request_id] = "abort"
        plan = scheduler.schedule()
        step = observe(scheduler, plan)
        sampled: dict[str, int] = {}
        for request_id in plan.num_scheduled_tokens:
            request = live[request_id]
            if request.num_computed_tokens == request.num_tokens:
                sampled[request_id] = script[request_id][request.num_output_tokens]
                used[request_id] += 1
        scheduler.update_from_output(plan, real.runner_output(plan, sampled))
        finished = [r for r in plan.num_scheduled_tokens if live[r].is_finished()]
        for request_id in finished:
            reasons[request_id] = str(live.pop(request_id).get_finished_reason())
        steps.append({**step, "finished": sorted(finished), "finish_reasons": reasons})
        idle = 0 if plan.num_scheduled_tokens or any(s >= len(steps) for s in events) else idle + 1
        if idle >= STALL_STEPS or len(steps) >= MAX_STEPS:
            raise Stalled(f"seed {workload['seed']}: no progress after {len(steps)} steps")
    outputs = {request_id: script[request_id][:count] for request_id, count in used.items()}
    return {"upstream": real.upstream, **workload, "outputs": outputs, "steps": steps}


def record_async(workload: workloads.Workload, real: Real | None = None) -> recording.Recording:
    """As `record`, on the real `AsyncScheduler` with a queue of two batches.

    Step k is planned, observed, and then step k - 1 is updated: `EngineCore.step_with_batch_queue`
    where no batch is ever done early. The script says each request's tokens; a step planned
    before its request's end was known samples `recording.BEYOND`, which the update ignores.

    Raises:
        Stalled: unfinished work, no event to come, and nothing scheduled.
    """
    real = real or installed()
    config, script = {**workload["config"], "async_scheduling": True}, workload["outputs"]
    scheduler = real.make_scheduler(config, async_scheduling=True)
    events = {event["step"]: event for event in workload["events"]}
    live: dict[str, Any] = {}
    num_sampled: dict[str, int] = dict.fromkeys(script, 0)
    used: dict[str, int] = dict.fromkeys(script, 0)
    steps: list[dict[str, Any]] = []
    queue: collections.deque[tuple[Any, dict[str, list[int]]]] = collections.deque(maxlen=2)
    idle = 0

    def busy() -> bool:
        in_flight = bool(queue and queue[0][0].num_scheduled_tokens)
        return scheduler.has_unfinished_requests() or in_flight

    while busy() or any(step >= len(steps) for step in events):
        reasons: dict[str, str] = {}
        event = events.get(len(steps), {"add": [], "abort": []})
        for add in event["add"]:
            live[add["request_id"]] = real.make_request(
                add, config["block_size"], workload["eos_token_id"]
            )
            scheduler.add_request(live[add["request_id"]])
        for request_id in event["abort"]:
            real.abort(scheduler, request_id)
            if live.pop(request_id, None):
                reasons[request_id] = "abort"
        plan = scheduler.schedule()
        step = observe(scheduler, plan)
        step["num_output_placeholders"] = {
            request_id: request.num_output_placeholders
            for request_id, request in scheduler.requests.items()
            if request.num_output_placeholders
        }
        sampled: dict[str, list[int]] = {}
        for request_id in plan.num_scheduled_tokens:
            if not live[request_id].is_prefill_chunk:
                position = num_sampled[request_id]
                known = script[request_id]
                token = known[position] if position < len(known) else recording.BEYOND
                sampled[request_id] = [token]
                num_sampled[request_id] += 1
        finished = []
        if queue:  # the batch before this one, the oldest
            done, tokens = queue.popleft()
            planned = [live[r] for r in done.num_scheduled_tokens if r in live]
            before = {r.request_id: r.num_output_tokens for r in planned}
            if done.num_scheduled_tokens:
                output = real.runner_output(done, {r: t[0] for r, t in tokens.items()})
                scheduler.update_from_output(done, output)
            for request in planned:
                used[request.request_id] += request.num_output_tokens - before[request.request_id]
            finished = [r for r in planned if r.is_finished()]
            for request in finished:
                reasons[request.request_id] = str(request.get_finished_reason())
                del live[request.request_id]
        queue.append((plan, sampled))
        steps.append(
            {
                **step,
                "sampled_token_ids": sampled,
                "finished": sorted(request.request_id for request in finished),
                "finish_reasons": reasons,
            }
        )
        idle = 0 if plan.num_scheduled_tokens or any(s >= len(steps) for s in events) else idle + 1
        if idle > STALL_STEPS or len(steps) >= MAX_STEPS:
            raise Stalled(f"seed {workload['seed']}: no progress after {len(steps)} steps")
    outputs = {request_id: script[request_id][:count] for request_id, count in used.items()}
    return {
        "upstream": real.upstream, **workload, "config": config, "outputs": outputs,
        "steps": steps,
    }  # fmt: skip


def skipped(scheduler: Any) -> list[Any]:
    """The second waiting queue; from 0.31 on there is one queue, and this is empty."""
    return list(getattr(scheduler, "skipped_waiting", ()))


def _resumed(cached: Any) -> list[str]:
    """Who comes back after a preemption; before 0.11.1 a flag per request says so."""
    if hasattr(cached, "resumed_req_ids"):
        return sorted(cached.resumed_req_ids)
    flags = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
    return sorted(request_id for request_id, resumed in flags if resumed)


def observe(scheduler: Any, plan: Any) -> dict[str, Any]:
    """The state between `schedule` and the update: the counters have already advanced."""
    running, manager = scheduler.running, scheduler.kv_cache_manager
    return {
        "num_scheduled_tokens": dict(plan.num_scheduled_tokens),
        "new": [data.req_id for data in plan.scheduled_new_reqs],
        "resumed": _resumed(plan.scheduled_cached_reqs),
        "preempted": sorted(plan.preempted_req_ids or ()),
        "finished_before": sorted(plan.finished_req_ids),
        "running": [request.request_id for request in running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "block_ids": {
            request.request_id: list(manager.get_block_ids(request.request_id)[0])
            for request in running
        },
        "num_computed_tokens": {
            request.request_id: request.num_computed_tokens for request in running
        },
        "free_blocks": manager.block_pool.get_num_free_blocks(),
        **(
            {"skipped_waiting": [request.request_id for request in skipped(scheduler)]}
            if scheduler.lora_config
            else {}
        ),
    }


def profile(
    name: str, seeds: Iterable[int] = SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """The recordings of one profile, of those of `seeds` that have it."""
    for seed in seeds:
        if workloads.profile_of(seed) == name:
            yield record(workloads.generate(seed), real)


def asynchronous(
    seeds: Iterable[int] = ASYNC_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """The recordings of the asynchronous scheduler, every profile in turn."""
    for seed in seeds:
        yield record_async(workloads.generate(seed), real)
