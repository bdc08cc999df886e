"""Record what the real v0.22.1 scheduler decides on generated workloads, step by step.

Needs the pinned tree on `PYTHONPATH` (`README.md` beside it has the commands). One workload per
line, in the format of `recording.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from conformance import recording, workloads
from conformance.recorders.run import MAX_STEPS, Run, Stalled, observe
from conformance.recorders.source import Real

__all__ = ["MAX_STEPS", "Stalled", "asynchronous", "observe", "profile", "record", "record_async"]

SEEDS = range(3600)
"""Of the synchronous scheduler: 400 of each profile."""
ASYNC_SEEDS = range(30_000, 31_080)
"""The seeds of `async.jsonl.gz`: 120 of each profile."""


def record(workload: workloads.Workload, real: Real | None = None) -> recording.Recording:
    """Run one workload on the real scheduler and note every field of every step.

    Raises:
        Stalled: unfinished work, no event to come, and nothing scheduled.
    """
    return Run({**workload}, real, tells_tokens=False).recorded()


def record_async(workload: workloads.Workload, real: Real | None = None) -> recording.Recording:
    """As `record`, on the real `AsyncScheduler` with a queue of two batches.

    The script says each request's tokens; a step planned before its request's end was known samples
    `recording.BEYOND`, which the update ignores.
    """
    config = {**workload["config"], "async_scheduling": True}
    return Run({**workload, "config": config}, real).recorded()


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
