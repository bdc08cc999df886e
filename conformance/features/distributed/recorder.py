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

from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import Run
from conformance.recorders.source import Real

SEEDS = range(50_000, 50_900)
"""300 of each depth, every profile in turn."""
DEPTHS = (2, 3, 4)


class SamplesTwiceError(Exception):
    """The real scheduler sampled a position while a token for it was on its way."""


class PipelineRun(Run):
    """A run with `depth` batches in flight; a plan that schedules nothing waits for the oldest."""

    def __init__(self, workload: dict[str, Any], depth: int, real: Real | None = None) -> None:
        config = {**workload["config"], "pipeline_parallel_size": depth}
        super().__init__({**workload, "config": config}, real)
        self.depth = depth

    def _is_due(self, plan: Any) -> bool:
        return not plan.num_scheduled_tokens or super()._is_due(plan)

    def _waits(self) -> bool:
        return self._flies() or super()._waits()

    def _sample(self, plan: Any) -> dict[str, list[int]]:
        sampled: dict[str, list[int]] = {}
        for request_id in plan.num_scheduled_tokens:
            request = self.live[request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            if any(request_id in tokens for _, tokens in self.in_flight):
                seed = self.workload["seed"]
                raise SamplesTwiceError(f"seed {seed}, depth {self.depth}: {request_id}")
            sampled[request_id] = [self.script[request_id][self.num_sampled[request_id]]]
            self.num_sampled[request_id] += 1
        return sampled


def record_pipeline(
    workload: workloads.Workload, depth: int, real: Real | None = None
) -> recording.Recording:
    """Run one workload on the real scheduler with `depth` batches in flight.

    Raises:
        Stalled: unfinished work, no event to come, nothing in flight and nothing scheduled.
        SamplesTwiceError: see above.
    """
    return PipelineRun(workload, depth, real).recorded()


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
