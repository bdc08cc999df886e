"""The scheduler's half of the NIXL connector: what was recorded, and that ours decides as it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from conformance import parts
from conformance.features.kv_transfer import nixl_pair
from conformance.features.kv_transfer.nixl_pair_replay import replayed

CASES = {case["case"]["name"]: case for case in parts.load("nixl_pair")}


def steps_of(name: str, engine: str = "D") -> list[dict[str, Any]]:
    """The steps of one engine of a case."""
    return [step for step in CASES[name]["steps"] if step["engine"] == engine]


def test_the_decoder_waits_and_then_computes_one_token_of_the_prompt():
    waiting, *_ = found = steps_of("a load of 40 tokens")
    assert waiting["planned"] == {} and waiting["status"] == {"r": "WAITING_FOR_REMOTE_KVS"}
    assert waiting["to_read"] == {"r": [1, 2, 3]} and waiting["computed"] == {"r": 40}
    first = next(step for step in found if step["planned"])
    assert first["planned"] == {"r": 1} and first["computed"] == {"r": 40}


def test_the_producer_ends_by_its_length_and_frees_when_it_is_told():
    found = steps_of("a load of 40 tokens", "P")
    params = found[0]["kv_transfer_params"]
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[1, 2, 3]], 40)
    assert params["do_remote_prefill"] and not params["do_remote_decode"]
    assert [step["free_blocks"] for step in found] == [16, 16, 16, 16, 19, 19, 19]
    assert found[1]["to_send"] == ["r"] and found[1]["status"] == {"r": "FINISHED_LENGTH_CAPPED"}


def test_only_blocks_that_are_missing_are_read():
    before, waiting, *_ = steps_of("D has the first two blocks")
    assert before["planned"] == {"before": 40}
    assert waiting["block_ids"]["r"] == [1, 2, 4] and waiting["to_read"] == {"r": [4]}


def test_a_full_decoder_waits_and_renews_the_lease():
    found = steps_of("D is full")
    assert all(step["status"] == {"r": "WAITING"} and step["leases"] == ["r"] for step in found)
    assert {step["free_blocks"] for step in steps_of("D is full", "P")} == {16}


@pytest.mark.parametrize(("name", "planned"), [
    ("the second block fails", {}), ("the second block fails, recompute", {"r": 24}),
])  # fmt: skip
def test_a_block_that_fails_ends_the_request_or_is_computed(name, planned):
    found = steps_of(name)
    assert next((step["planned"] for step in found if step["planned"]), {}) == planned
    assert found[-1]["finished"] == {"r": "length" if planned else "error"}


def test_who_goes_away_before_a_look_tells_the_producer_alone():
    [only] = steps_of("aborted before it is looked at")
    assert only["to_read"] == {"r": []} and not only["status"]
    assert steps_of("aborted before it is looked at", "P")[1]["free_blocks"] == 16  # then told


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (48, 3)])
def test_the_decoder_computes_one_token_whatever_the_length(length, blocks):
    found = steps_of(f"a prompt of {length}")
    assert len(found[0]["to_read"]["r"]) == blocks
    assert [sum(step["planned"].values()) for step in found] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", CASES)
def test_ours_decides_as_it_in_every_step(name):
    assert replayed(CASES[name]) == ""


def test_a_replay_sees_a_difference():
    case = CASES["a load of 40 tokens"]
    wrong = {**case, "case": {**case["case"], "load_steps": 1}}
    assert replayed(wrong) == "step 5, D, planned: expected {}, got {'r': 1}"


@pytest.mark.upstream
def test_the_real_half_says_today_what_was_recorded():
    for case in nixl_pair.CASES:
        again = nixl_pair.recorded(case)
        assert json.loads(json.dumps(again)) == CASES[case.name]
