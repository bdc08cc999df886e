"""Fresh workloads on the real scheduler and on the mini engine, in one process.

Needs the pinned tree on `PYTHONPATH`. The seeds differ in every run; a failure prints the one that
reproduces it. `CONFORMANCE_SEED` repeats a run, `CONFORMANCE_WORKLOADS` makes it longer.
"""

from __future__ import annotations

import os
import random

import pytest

from benchmarks import bench_scheduler
from conformance import record, replay, workloads

NUM_WORKLOADS = int(os.environ.get("CONFORMANCE_WORKLOADS", "720"))
FIRST_SEED = int(os.environ.get("CONFORMANCE_SEED", random.randrange(10**6, 10**9)))


@pytest.mark.upstream
@pytest.mark.parametrize("profile", workloads.PROFILES)
def test_fresh_workloads_are_decided_as_by_the_real_scheduler(profile: str) -> None:
    seeds = [
        seed
        for seed in range(FIRST_SEED, FIRST_SEED + NUM_WORKLOADS)
        if workloads.profile_of(seed) == profile
    ]
    for seed in seeds:
        _, difference = replay.replay(record.record(workloads.generate(seed)))
        assert difference is None, (
            f"{difference}\nreproduce: python -m conformance.record --seeds {seed} --out FOLDER, "
            f"then python -m conformance.replay FOLDER/{profile}.jsonl.gz"
        )
    assert len(seeds) >= NUM_WORKLOADS // len(workloads.PROFILES)


@pytest.mark.upstream
def test_kept_recordings_are_what_the_real_scheduler_still_says() -> None:
    """The kept files are not hand-made: recording a seed again gives the kept line."""
    from conformance import mutants, recording

    for path in sorted(mutants.RECORDINGS.glob("*.jsonl.gz")):
        kept = next(recording.read(path))
        assert record.record(workloads.generate(kept["seed"])) == kept, path.name


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("kind", "caching", "request_steps"),
    [
        ("decode", False, 1024),
        ("decode", True, 1024),
        ("prefill", False, 176),
        ("prefill", True, 122),
    ],
)
def test_benchmark_workloads_are_decided_equally(
    kind: str, caching: bool, request_steps: int
) -> None:
    timing, count = bench_scheduler.measure(*bench_scheduler.workload(kind, 16, caching), repeats=1)
    assert (len(timing.ours), len(timing.theirs), count) == (1, 1, request_steps)
