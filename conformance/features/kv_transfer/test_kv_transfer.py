"""Loads and sends: what recordings cannot say by themselves, and what the pin does not survive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import recording, replay
from conformance.features import RECORDINGS
from conformance.features.kv_transfer import recorder
from conformance.features.kv_transfer.replaying import gate_of
from conformance.real_core import core_of, why_not
from conformance.recorders import connector
from conformance.recorders.run import RefusedError, Run, Stalled

DEATHS = RECORDINGS / "deaths" / "connector.jsonl.gz"
pytestmark = pytest.mark.skipif(not Path(DEATHS).is_file(), reason="no recordings")
needs_core = pytest.mark.skipif(bool(why_not()), reason=why_not())


def deaths() -> Iterator[recording.Recording]:
    return recording.read(DEATHS)


def freed_early(entry: recording.Recording) -> int | None:
    """The first step in which a report frees what another still uses; None where there is none."""
    kv = {add["request_id"]: add.get("kv") or {} for e in entry["events"] for add in e["add"]}
    both = {name for name, script in kv.items() if script.get("unasked") == "send"}
    aborted = {name for event in entry["events"] for name in event["abort"]}
    for number, step in enumerate(entry["steps"]):
        if both & aborted & {*step["finished_recving"], *step["finished_sending"]}:
            return number
    return None


def driven(entry: recording.Recording, shares: bool = True) -> replay.Driven:
    """Ours, after the whole workload; where the queue stands (45388), its head is aborted."""
    of = replay.Driven(entry, replay.mini_scheduler(replay.config_of(entry)), replay.mini_request)
    gate_of(of.scheduler).share_invalid_blocks = shares
    events = replay.events_by_step(entry)
    idle = 0
    for step in range(400):
        done = of.step(events.get(step, {}))
        if step > max(events) and not of.is_busy():
            return of
        connector = gate_of(of.scheduler).connector
        waits = connector.loads or connector.sends or step <= max(events)
        idle = 0 if done["num_scheduled_tokens"] or waits else idle + 1
        if idle > 12:  # no answer of a connector is awaited so long
            head = [*of.scheduler.skipped, *of.scheduler.waiting][0]
            of.scheduler.abort_request(head.request_id)
            idle = 0
    raise AssertionError(f"seed {entry['seed']}: not finished")


# ------------------------------------------------------------------ 43226, 46240


@pytest.mark.slow
def test_where_the_pin_dies_ours_decides_the_same_before_and_goes_on_after():
    """At the pin the first report frees the blocks, and the second asserts; or a report comes of a
    request that has been let go. Ours keeps blocks until both have come, so it differs from then
    on, and ends with every block free."""
    kinds = {"both": 0, "late": 0}
    for entry in deaths():
        assert entry["dies"]["error"] == "AssertionError"
        first = freed_early(entry)
        kinds["late" if first is None else "both"] += 1
        steps = entry["steps"][: None if first is None else first + 1]
        planned = [
            f for f in replay.FIELDS if f not in replay.UPDATE_FIELDS
        ]  # the last update raises
        assert replay.replay({**entry, "steps": steps[:-1]})[1] is None, entry["seed"]
        found = replay.replay({**entry, "steps": steps}, fields=planned)[1]
        assert found is None, str(found)
        of = driven(entry)
        assert of.scheduler.kv.usage == 0.0 and not gate_of(of.scheduler).held, entry["seed"]
    assert min(kinds.values()) >= 8, kinds


@needs_core
def test_the_pin_dies_today_as_it_did_when_it_was_recorded():
    entry = next(deaths())
    again = recorder.death_of(recorder.generate_deaths(entry["seed"]), core_of())
    assert again == entry


def lone(**kv: Any) -> dict[str, Any]:
    """One request of eight tokens that loads six of them, and ends by an abort at step 2."""
    script = {"external_tokens": 6, "load_async": True, "known_at": 0, "load_steps": 4}
    add = {
        "request_id": "r", "prompt_token_ids": list(range(3, 11)), "max_tokens": 2, "priority": 0,
        "arrival_time": 0.0, "ignore_eos": True, "kv": {**script, "send_steps": None, **kv},
    }  # fmt: skip
    return {
        "seed": 0, "eos_token_id": 2,
        "config": {
            "num_blocks": 10, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 12,
            "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
            "enable_chunked_prefill": True, "max_model_len": 64, "policy": "fcfs",
        },
        "events": [
            {"step": 0, "add": [add], "abort": []}, {"step": 2, "add": [], "abort": ["r"]},
        ],
        "outputs": {"r": [7, 7]},
    }  # fmt: skip


@pytest.mark.parametrize(("load_steps", "send_steps"), [(4, 3), (4, 1), (4, 2)])
@needs_core
def test_received_and_sent_after_an_abort_in_either_order_and_together(load_steps, send_steps):
    """The send begins at the abort: it is reported at steps 5, 3 and 4, the load at 4."""
    workload = lone(load_steps=load_steps, send_steps=send_steps, unasked="send")
    died = recorder.death_of({**workload, "outputs": {"r": [7, 7]}}, core_of())
    assert died is not None
    assert died["dies"] == {"step": max(4, 2 + send_steps), "error": "AssertionError"}
    assert driven(lone(load_steps=load_steps, send_steps=send_steps, unasked="send")) is not None


# ------------------------------------------------------------------ 46283


@needs_core
def test_a_remote_that_never_answers_holds_blocks_for_ever_at_the_pin():
    """Also after its client has gone; ours ends every load at its deadline (`test_pairs.py`)."""
    run = Run(lone(load_steps=None), core_of())
    with pytest.raises(Stalled):
        run.recorded()
    assert run.steps[-1]["block_ids"] == {"r": [1, 2]}
    assert not run.scheduler.has_unfinished_requests() and run.scheduler.requests


# ------------------------------------------------------------------ 45146


def ahead(max_tokens: int, **config: Any) -> dict[str, Any]:
    """A load without a wait that fails in the first step, with an asynchronous scheduler."""
    workload = lone(load_async=False, load_steps=None, fails={"blocks": [0], "times": 1})
    workload["config"] |= {"async_scheduling": True, "kv_load_failure_policy": "recompute"}
    workload["config"] |= config
    workload["events"][0]["add"][0]["max_tokens"] = max_tokens
    del workload["events"][1]
    return workload


@needs_core
def test_a_load_that_fails_with_a_token_in_flight_strands_its_request_at_the_pin():
    """The counter goes back and the placeholder stays, so the last token is never planned. Ours is
    in `mini_vllm/kv_transfer/tests/test_example_connector.py`."""
    workload = ahead(max_tokens=1, long_prefill_token_threshold=2)
    run = Run(workload, core_of())
    with pytest.raises(Stalled):
        run.recorded()
    [request] = run.scheduler.running
    assert request.num_output_placeholders == 1
    assert request.num_computed_tokens == request.num_tokens == 8


@needs_core
def test_a_token_that_was_planned_on_the_failed_load_is_kept_at_the_pin():
    """The next step is planned when the failure is reported, and its token is taken."""
    run = Run(ahead(max_tokens=2), core_of())
    entry = run.recorded()
    assert entry["steps"][1]["invalid_block_ids"] == [1]  # reported while plan 1 is in flight
    planned = [step["num_scheduled_tokens"].get("r", 0) for step in entry["steps"]]
    assert planned == [2, 1, 10, 0]  # all ten tokens again, those two that were sampled included
    assert run.script["r"][0] == 7 and run.used["r"] == 2


# ------------------------------------------------------------------ blocks whose load failed


def two_with_a_failed_prefix() -> dict[str, Any]:
    """`r` loads two blocks at once and they fail; `late` has the same prefix and comes one step
    later, while chunks of two tokens compute the first block again."""
    workload = lone(load_async=False, load_steps=None, fails={"blocks": [0], "times": 1})
    [first] = workload["events"][0]["add"]
    late = {**first, "request_id": "late", "kv": None}
    workload["config"] |= {
        "kv_load_failure_policy": "recompute", "long_prefill_token_threshold": 2,
    }  # fmt: skip
    workload["events"] = [
        {"step": 0, "add": [first], "abort": []}, {"step": 1, "add": [late], "abort": []},
    ]  # fmt: skip
    workload["outputs"]["late"] = [7, 7]
    return workload


@needs_core
def test_at_the_pin_a_newcomer_hits_a_block_that_is_still_to_be_computed_again():
    """Its first block counts as computed while two of its four tokens are there: a stale read."""
    entry = Run(two_with_a_failed_prefix(), core_of()).recorded()
    assert entry["steps"][0]["invalid_block_ids"] == [1]
    step = entry["steps"][1]
    assert step["num_computed_tokens"] == {"r": 2, "late": 6}
    assert step["block_ids"]["late"][0] == step["block_ids"]["r"][0] == 1
    for each in entry["steps"]:
        each.pop("sampled_token_ids", None)
    assert replay.replay(entry)[1] is None  # the replayed gate does as the pin


def test_ours_forgets_such_a_block_unless_it_is_to_do_as_the_pin():
    workload = two_with_a_failed_prefix()

    def steps(shares: bool) -> list[dict[str, Any]]:
        config = replay.config_of(workload)
        of = replay.Driven(workload, replay.mini_scheduler(config), replay.mini_request)
        gate_of(of.scheduler).share_invalid_blocks = shares
        events = replay.events_by_step(workload)
        return [of.step(events.get(number, {})) for number in range(8)]

    assert steps(True)[1]["num_computed_tokens"] == {"r": 2, "late": 6}
    assert steps(False)[1]["num_computed_tokens"] == {"r": 2, "late": 2}


DIES = 172_262
"""A seed of `generate_failures`; it was found among 300."""


@needs_core
@pytest.mark.parametrize("version", ["0.22.1", "0.23.0"])
def test_a_prompt_loaded_whole_whose_failed_block_is_anothers_ends_the_real_scheduler(version):
    """Every failed block of it counts as another's, so its counter stays at the whole prompt, and a
    failed load is not given its last token back to compute: `assert num_new_tokens > 0`."""
    if problem := why_not(version):
        pytest.skip(problem)
    core = core_of() if version == "0.22.1" else core_of(version)
    with pytest.raises(RefusedError, match="step 10: AssertionError"):
        connector.run(recorder.generate_failures(DIES), core)


@pytest.mark.parametrize("shares", [True, False])
def test_ours_computes_its_last_token_and_goes_on(shares):
    workload = recorder.generate_failures(DIES)
    of = driven(workload, shares)
    assert of.scheduler.kv.usage == 0.0
    assert {request.finish_reason for request in of.requests.values()} <= {"stop", "length"}


# ------------------------------------------------------------------ fresh workloads


def differences(record: Any, seeds: range) -> list[str]:
    found = (replay.replay(entry)[1] for entry in record(seeds, core_of()))
    return [str(difference) for difference in found if difference]


FAMILIES = (recorder.record, recorder.record_failures, recorder.record_async)


@needs_core
@pytest.mark.parametrize("record", FAMILIES, ids=lambda f: f.__name__)
def test_fresh_workloads_are_decided_as_by_the_real_scheduler(record):
    assert differences(record, range(170_000, 170_006)) == []


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize("record", FAMILIES, ids=lambda f: f.__name__)
def test_many_fresh_workloads_are_decided_as_by_the_real_scheduler(record):
    assert differences(record, range(171_000, 171_300)) == []


@needs_core
def test_what_the_recorder_raises_is_named():
    with pytest.raises(RefusedError, match="AssertionError"):
        Run(lone(send_steps=3, unasked="send"), core_of()).recorded()


@pytest.mark.slow
def test_offloading_decides_as_the_real_half_and_manager():
    result = replay.replay_files([RECORDINGS / "installed" / "offloading.jsonl.gz"])
    assert result.num_workloads == 169 and not result.differences


def test_1000_workloads_with_a_connector_are_kept():
    files = ("connector", "connector_failures")
    assert sum(recording.count(RECORDINGS / f"{name}.jsonl.gz") for name in files) == 1000
