"""Ranks: what the recordings of batches in flight hold, and which wrong ranks are noticed."""

from __future__ import annotations

import pytest

from conformance import replay
from conformance.features import FOLDER
from conformance.features.distributed import mutants as rank_mutants
from conformance.features.distributed import ranks
from conformance.features.distributed import recorder as pipeline
from conformance.mutants import Mutant, diffs, sources

PAGE = FOLDER / "distributed" / "README.md"
LEFT_OUT = (50_370, 50_645, 50_884, 50_894)
"""Seeds of which the real scheduler samples a position twice."""


@pytest.mark.parametrize("mutant", rank_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_edit_of_a_wrong_rank_still_applies(mutant: Mutant) -> None:
    sources(mutant)
    assert mutant.name in PAGE.read_text(encoding="utf-8"), "mutants distributed --write"


def test_an_edit_that_applies_no_more_is_an_error() -> None:
    (stale,) = diffs("is stale\n@ distributed.pool | a test\n-no such text\n+none")
    with pytest.raises(ValueError, match=r"mutant 'is stale': distributed\.pool\.py holds 0 times"):
        sources(stale)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", rank_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_rank_is_caught_by_the_test_named(mutant: Mutant) -> None:
    assert rank_mutants.caught(mutant)


@pytest.mark.slow
def test_random_splits_answer_as_one_process_and_none_hangs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A thousand: `python -m conformance.features.distributed.ranks`."""
    assert ranks.main(["--runs", "30", "--first", "5000"]) == 0
    assert "30 runs" in capsys.readouterr().out


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
