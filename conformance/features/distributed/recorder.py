"""Record what the real v0.22.1 scheduler decides with two, three and four batches in flight.

The queue is that of `vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue` with as many
places as there are pipeline stages, and no batch ever done early: a plan that schedules something
is followed by the next one until the queue is full; then the oldest is updated.

With three or more in flight the real scheduler may resume a request whose token is still to come:
`vllm/v1/core/sched/scheduler.py:929` `Scheduler._preempt_request` sets its counter to 0, the next
plan computes all that is known, and so the same position is sampled twice. `samples_twice` says of
which workloads that is true; they are not recorded, because the mini engine waits there instead.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.features.core.recorder import MAX_STEPS, STALL_STEPS, Stalled, observe
from conformance.recorders.source import Real, installed

SEEDS = range(50_000, 50_900)
"""300 of each depth, every profile in turn."""
DEPTHS = (2, 3, 4)


class SamplesTwiceError(Exception):
    """The real scheduler sampled a position while a token for it was on its way."""


def record_pipeline(
    workload: workloads.Workload, depth: int, real: Real | None = None
) -> recording.Recording:
    """Run one workload on the real scheduler with `depth` batches in flight.

    Raises:
        Stalled: unfinished work, no event to come, nothing in flight and nothing scheduled.
        SamplesTwiceError: see above.
    """
    real = real or installed()
    config = {**workload["config"], "pipeline_parallel_size": depth}
    script, scheduler = workload["outputs"], real.make_scheduler(workload["config"])
    events = {event["step"]: event for event in workload["events"]}
    live: dict[str, Any] = {}
    in_flight: collections.Counter[str] = collections.Counter()
    num_sampled: dict[str, int] = dict.fromkeys(script, 0)
    used: dict[str, int] = dict.fromkeys(script, 0)
    steps: list[dict[str, Any]] = []
    queue: collections.deque[tuple[Any, dict[str, list[int]]]] = collections.deque()
    idle = 0

    def flying() -> bool:
        return any(plan.num_scheduled_tokens for plan, _ in queue)

    while (
        scheduler.has_unfinished_requests()
        or flying()
        or any(step >= len(steps) for step in events)
    ):
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
        sampled: dict[str, list[int]] = {}
        for request_id in plan.num_scheduled_tokens:
            request = live[request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            if in_flight[request_id]:
                raise SamplesTwiceError(f"seed {workload['seed']}, depth {depth}: {request_id}")
            in_flight[request_id] += 1
            sampled[request_id] = [script[request_id][num_sampled[request_id]]]
            num_sampled[request_id] += 1
        queue.append((plan, sampled))
        finished: list[Any] = []
        if not (plan.num_scheduled_tokens and len(queue) < depth):
            done, tokens = queue.popleft()
            planned = [live[r] for r in done.num_scheduled_tokens if r in live]
            before = {r.request_id: r.num_output_tokens for r in planned}
            in_flight.subtract(dict.fromkeys(tokens, 1))
            if done.num_scheduled_tokens:
                output = real.runner_output(done, {r: t[0] for r, t in tokens.items()})
                scheduler.update_from_output(done, output)
            for request in planned:
                used[request.request_id] += request.num_output_tokens - before[request.request_id]
            finished = [r for r in planned if r.is_finished()]
            for request in finished:
                reasons[request.request_id] = str(request.get_finished_reason())
                del live[request.request_id]
        steps.append(
            {
                **step,
                "sampled_token_ids": sampled,
                "finished": sorted(request.request_id for request in finished),
                "finish_reasons": reasons,
            }
        )
        to_come = flying() or any(s >= len(steps) for s in events)
        idle = 0 if plan.num_scheduled_tokens or to_come else idle + 1
        if idle > STALL_STEPS * depth or len(steps) >= MAX_STEPS:
            raise Stalled(f"seed {workload['seed']}: no progress after {len(steps)} steps")
    outputs = {request_id: script[request_id][:count] for request_id, count in used.items()}
    return {
        "upstream": real.upstream, **workload, "config": config, "outputs": outputs,
        "steps": steps,
    }  # fmt: skip


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """The recordings of those of `seeds` whose positions are each sampled once; the depth goes
    round with the seed's ninth part, so that each profile has each depth."""
    for seed in seeds:
        try:
            yield record_pipeline(workloads.generate(seed), depth_of(seed), real)
        except SamplesTwiceError as error:
            print(f"left out: {error}")


def depth_of(seed: int) -> int:
    """Batches in flight of a seed's workload."""
    return DEPTHS[seed // len(workloads.PROFILES) % len(DEPTHS)]
