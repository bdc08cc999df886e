"""Ranks: what the recordings of batches in flight hold, and which wrong ranks are noticed."""

from __future__ import annotations

import functools
import itertools

import pytest

from conformance import mutants, pipeline_situations, rank_mutants, ranks, recording, replay
from conformance.recorders import pipeline
from conformance.situations import README

LEFT_OUT = (50_370, 50_645, 50_884, 50_894)
"""Seeds of which the real scheduler samples a position twice."""


@functools.cache
def entries() -> list[recording.Recording]:
    """The first workloads, which hold every situation; all are replayed by `test_replay`."""
    return list(itertools.islice(recording.read(pipeline_situations.FILE), 300))


@pytest.mark.slow
def test_every_situation_of_batches_in_flight_occurs_in_the_recordings() -> None:
    missing = set(pipeline_situations.SITUATIONS)
    for entry in entries():
        missing -= pipeline_situations.situations_of(entry) if missing else set()
    assert not missing, f"the recordings no longer hold: {sorted(missing)}"


MISREADINGS = {
    "moves no counter before the token is there": (
        "            request.num_computed_tokens += plan.num_scheduled_tokens[request_id]\n",
        "            pass\n",
    ),
    "drops the token of a preempted request": (
        "            if request.is_finished:\n                continue  # aborted meanwhile\n",
        "            if request.is_finished or request not in self.running:\n"
        "                continue\n",
    ),
    "leaves what ends while it waits in the queue": (
        "                        self._queue_of(request).remove(request)\n",
        "                        pass\n",
    ),
    "admits nobody whose token is to come": (
        "return 0 if is_last and self.tokens_to_come",
        "return 0 if self.tokens_to_come",
    ),
    "promises a token for every chunk": (
        "            if request.num_computed_tokens >= request.num_tokens:\n",
        "            if request.num_computed_tokens:\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISREADINGS)
def test_the_recordings_of_batches_in_flight_catch_the_scheduler_that(name: str) -> None:
    source = mutants._source("distributed.pipeline")
    old, new = MISREADINGS[name]
    assert source.count(old) == 1, "the source has moved on"
    made = mutants._load("distributed.pipeline", source.replace(old, new))
    build = functools.partial(replay.mini_scheduler, scheduler=made.PipelineScheduler)
    assert any(replay.replay(entry, build)[1] for entry in entries())


@pytest.mark.parametrize("mutant", rank_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_edit_of_a_wrong_rank_still_applies(mutant: rank_mutants.Mutant) -> None:
    path = rank_mutants.ROOT / "mini_vllm" / "distributed" / mutant.file
    mutant.edit(path.read_text(encoding="utf-8"))
    assert mutant.name in README.read_text(encoding="utf-8"), "rank_mutants --write"


def test_an_edit_that_applies_no_more_is_an_error() -> None:
    stale = rank_mutants.Mutant("is stale", "pool.py", "no such text", "", "")
    with pytest.raises(ValueError, match=r"mutant 'is stale': pool\.py holds 0 times"):
        stale.edit("anything")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", rank_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_rank_is_caught_by_the_test_named(mutant: rank_mutants.Mutant) -> None:
    assert rank_mutants.caught(mutant)


@pytest.mark.slow
def test_random_splits_answer_as_one_process_and_none_hangs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ranks.main(["--runs", "60", "--first", "5000"]) == 0
    assert "60 runs" in capsys.readouterr().out


def test_a_random_run_is_its_seed() -> None:
    assert ranks.draw(17) == ranks.draw(17) != ranks.draw(18)


@pytest.mark.upstream
def test_fresh_workloads_with_batches_in_flight_are_decided_as_by_the_real_scheduler() -> None:
    for entry in pipeline.record(range(60_000, 60_054)):
        _, difference = replay.replay(entry)
        assert difference is None, str(difference)


@pytest.mark.upstream
@pytest.mark.parametrize("seed", LEFT_OUT)
def test_at_the_pin_a_position_is_sampled_twice_after_a_preemption_in_flight(seed: int) -> None:
    from conformance import workloads

    with pytest.raises(pipeline.SamplesTwiceError):
        pipeline.record_pipeline(workloads.generate(seed), pipeline.depth_of(seed))
