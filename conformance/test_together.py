"""Several features at once: what is compared, and what is counted apart."""

from __future__ import annotations

import pytest

from conformance import recording, replay, together
from conformance.real_core import core_of, why_not
from conformance.recorders import combined

needs_pin = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_every_seed_combines_at_least_two_features_and_all_combinations_come():
    found = {combined.features_of(seed) for seed in range(400)}
    assert min(map(len, found)) == 2
    assert len(found) == 6 + 4 + 1


def test_an_unknown_feature_is_refused_by_name():
    with pytest.raises(ValueError, match=r"features=\['lora'\]: need some of drafts"):
        combined.generate(0, ["lora"])


@needs_pin
def test_a_combined_recording_is_one_that_the_reader_accepts():
    for seed in range(900_000, 900_012):
        entry = combined.run(combined.generate(seed), core_of())
        assert recording.problem_of(entry) == ""


@needs_pin
def test_drafts_in_flight_beside_adapters_fail_an_assertion_of_the_real_scheduler():
    workload = combined.generate(1_000_185)
    assert {"drafts", "adapters", "async"} <= combined.features_of(1_000_185)
    with pytest.raises(combined.RefusedError, match="AssertionError") as caught:
        combined.run(workload, core_of())
    assert caught.value.entry["steps"]


@needs_pin
def test_a_frame_refused_in_its_middle_is_counted_apart():
    counts = together.compare([1_013_630], core_of())
    assert (len(counts.known), counts.differences) == (1, [])


@needs_pin
def test_only_a_refusal_before_the_difference_is_counted_apart():
    entry = combined.run(combined.generate(1_013_630), core_of())
    step = replay.replay(entry)[1].step
    assert together.refused_in_a_frame(entry, step)
    assert not together.refused_in_a_frame(entry, 1)
    for event in entry["events"]:
        for add in event["add"]:
            if add.get("grammar"):
                add["grammar"]["reject_at"] = None
    assert not together.refused_in_a_frame(entry, step)


@needs_pin
def test_a_difference_is_found_and_shown():
    entry = combined.run(combined.generate(900_001), core_of())
    entry["steps"][1]["free_blocks"] += 1
    difference = replay.replay(entry)[1]
    assert (difference.step, difference.field) == (1, "free_blocks")
