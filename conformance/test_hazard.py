"""The pinned scheduler has the priority hazard, the mini default copies it, a flag removes it."""

from __future__ import annotations

import pytest

from conformance import hazard, mutants, recording, replay, shadow, workloads
from conformance.features.core import recorder as scheduler
from conformance.shadow import Stale

KEPT = mutants.RECORDINGS / "hazard" / "priority.jsonl.gz"
STALE = [Stale(step, "low", position, 6) for step in (3, 4) for position in (16, 17, 18, 19)]


def test_the_real_scheduler_resumes_a_victim_on_a_block_it_never_computed() -> None:
    (entry,) = recording.read(KEPT)
    assert {key: entry[key] for key in hazard.WORKLOAD} == hazard.WORKLOAD
    assert shadow.stale_reads(entry) == STALE


def test_the_mini_default_decides_as_the_real_scheduler_and_has_the_hazard() -> None:
    assert replay.first_difference(KEPT) is None
    assert shadow.stale_reads(replay.run(hazard.WORKLOAD, hazard.build(False))) == STALE


def test_forgetting_withdrawn_blocks_makes_the_victim_compute_them() -> None:
    entry = replay.run(hazard.WORKLOAD, hazard.build(True))
    assert shadow.stale_reads(entry) == []
    resumed = entry["steps"][3]
    assert resumed["num_scheduled_tokens"] == {"low": 8}
    assert resumed["block_ids"]["low"][:4] == [1, 2, 3, 4], "computed blocks are still hits"


@pytest.mark.parametrize("seed", [10_004_448, 10_006_086, 10_007_329])
def test_random_workloads_that_show_the_hazard_do_not_with_the_flag(seed: int) -> None:
    workload = workloads.generate(seed)
    assert shadow.stale_reads(replay.run(workload, hazard.build(False)))
    assert shadow.stale_reads(replay.run(workload, hazard.build(True))) == []


@pytest.mark.parametrize(
    ("num", "some"), [(100, 20), pytest.param(300, 50, marks=pytest.mark.slow)]
)
def test_the_flag_leaves_no_stale_read_in_withdrawing_workloads(num: int, some: int) -> None:
    withdrawn = 0
    first, step = workloads.PROFILES.index("withdrawal"), len(workloads.PROFILES)
    for seed in range(first, num * step, step):
        entry = replay.run(workloads.generate(seed), hazard.build(True))
        assert shadow.stale_reads(entry) == [], seed
        withdrawn += any(step["preempted"] for step in entry["steps"])
    assert withdrawn > some


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_no_kept_recording_reads_a_stale_slot(every: int) -> None:
    for name in ("priority", "withdrawal"):
        path = mutants.RECORDINGS / f"{name}.jsonl.gz"
        for entry in recording.read(path, wanted=lambda number: number % every == 0):
            assert shadow.stale_reads(entry) == [], (name, entry["seed"])


def test_the_shadow_sees_a_block_given_to_two_requests() -> None:
    entry = next(recording.read(mutants.RECORDINGS / "pressure.jsonl.gz"))
    step = next(
        index
        for index, step in enumerate(entry["steps"])
        if len(step["block_ids"]) > 1
        and step["num_scheduled_tokens"].keys() == step["block_ids"].keys()
    )
    tables = list(entry["steps"][step]["block_ids"].values())
    tables[1][0] = tables[0][0]
    assert shadow.stale_reads(entry)


def test_a_run_that_does_not_end_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not finished after 2 steps"):
        replay.run(hazard.WORKLOAD, max_steps=2)


@pytest.mark.upstream
def test_the_real_scheduler_still_says_so() -> None:
    (entry,) = recording.read(KEPT)
    assert scheduler.record(hazard.WORKLOAD) == entry
