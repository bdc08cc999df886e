"""Several features at once: what is compared, and what is counted apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import recording, replay, together, workload_file
from conformance.real_core import core_of, why_not
from conformance.recorders import combined
from mini_vllm.request import Request
from mini_vllm.structured_output.request import constrained

needs_pin = pytest.mark.skipif(bool(why_not()), reason=why_not())
FRAME = Path(__file__).parent / "features" / "structured_output" / "refused_frame.jsonl"
"""The smallest workload found on which it matters when the grammar is asked: recorded."""


def test_every_seed_combines_at_least_two_features_and_all_combinations_come():
    found = {combined.features_of(seed) for seed in range(400)}
    assert min(map(len, found)) == 2
    assert len(found) == 6 + 4 + 1


def test_an_unknown_feature_is_refused_by_name():
    with pytest.raises(ValueError, match=r"features=\['lora'\]: need some of drafts"):
        combined.generate(0, ["lora"])


@pytest.mark.slow
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


def test_a_frame_that_a_grammar_refuses_in_its_middle_is_kept_whole(monkeypatch):
    (entry,) = recording.read(FRAME)
    assert replay.replay(entry)[1] is None
    stops_at_the_refused_token = Request.append_output_tokens
    kind = constrained(Request)
    monkeypatch.setattr(kind, "append_output_tokens", stops_at_the_refused_token, raising=False)
    difference = replay.replay(entry)[1]
    assert difference.field == "block_ids"  # its third block was indexed with the whole frame


@needs_pin
def test_the_real_scheduler_decides_so_today():
    (entry,) = recording.read(FRAME)
    # what was sampled behind a request's end is not in its recorded outputs
    workload = {**workload_file.read(str(FRAME)), "seed": 1_013_630, "acceptance": 0.6}
    workload["outputs"]["r0"] = [6, 5, 6, 6, 11, 18, 25]
    assert combined.run(workload, core_of())["steps"] == entry["steps"]


@needs_pin
def test_fresh_workloads_are_decided_alike_and_counted_by_their_features():
    counts = together.compare(range(900_000, 900_008), core_of())
    assert (counts.num_workloads, counts.differences) == (8, [])
    assert sum(counts.by_features.values()) == 8


@needs_pin
def test_a_difference_is_found_and_shown():
    entry = combined.run(combined.generate(900_001), core_of())
    entry["steps"][1]["free_blocks"] += 1
    difference = replay.replay(entry)[1]
    assert (difference.step, difference.field) == (1, "free_blocks")
