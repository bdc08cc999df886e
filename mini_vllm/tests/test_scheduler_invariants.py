"""Scheduling: invariants S1-S13, checked after every `schedule()` and every step."""

from __future__ import annotations

from collections import Counter

import pytest

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.request import Request, RequestStatus
from mini_vllm.tests.support import (
    Moment,
    Scenario,
    ScenarioRequest,
    drive,
    for_all,
    for_scenarios,
)

# ------------------------------------------------------------------ invariants


@pytest.mark.slow
@for_scenarios(60)
def test_s1_an_unfinished_request_is_in_exactly_one_queue_and_a_finished_one_in_none(
    scenario: Scenario,
):
    def check(moment: Moment) -> None:
        scheduler = moment.engine.scheduler
        places = Counter(r.request_id for r in [*scheduler.waiting, *scheduler.running])
        for request_id, request in moment.requests.items():
            assert places.pop(request_id, 0) == (0 if request.is_finished else 1)
        assert not places
        assert all(r.status == RequestStatus.RUNNING for r in scheduler.running)
        waiting_states = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
        assert all(r.status in waiting_states for r in scheduler.waiting)

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_s2_a_step_never_schedules_more_tokens_than_the_budget(scenario: Scenario):
    def check(moment: Moment) -> None:
        assert moment.output.total_num_scheduled_tokens <= scenario.max_num_batched_tokens

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_s3_never_more_requests_run_than_there_are_slots(scenario: Scenario):
    def check(moment: Moment) -> None:
        assert len(moment.engine.scheduler.running) <= scenario.max_num_seqs
        assert len(moment.output.scheduled_requests) <= scenario.max_num_seqs

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_s4_a_token_is_emitted_exactly_when_the_request_caught_up(scenario: Scenario):
    def check(moment: Moment) -> None:
        if moment.phase != "stepped":
            return
        for request_id, request in moment.requests.items():
            scheduled = moment.output.num_scheduled_tokens.get(request_id, 0)
            before = moment.before[request_id]
            hits = moment.output.num_cached_tokens.get(request_id, before.num_computed_tokens)
            caught_up = scheduled > 0 and hits + scheduled == before.num_tokens
            assert request.num_tokens - before.num_tokens == int(caught_up)

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(90)
def test_s5_a_preempted_request_loses_its_blocks_and_keeps_its_outputs(scenario: Scenario):
    def check(moment: Moment) -> None:
        if moment.phase != "scheduled":
            return
        victims = moment.output.preempted_req_ids
        assert len(set(victims)) == len(victims), "preempted twice in one step"
        for request_id in victims:
            request, before = moment.requests[request_id], moment.before[request_id]
            assert request.status == RequestStatus.PREEMPTED
            assert request.num_computed_tokens == 0
            assert moment.kv.get_block_ids(request_id) == []
            assert tuple(request.output_token_ids) == before.output_token_ids
            assert request.num_preemptions == before.num_preemptions + 1
            assert request_id not in moment.output.num_scheduled_tokens
        waiting = [r.request_id for r in moment.engine.scheduler.waiting]
        if scenario.policy == "fcfs" and victims:
            assert waiting == victims[::-1] + moment.waiting_before

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(90)
def test_s6_a_step_that_preempts_admits_nobody(scenario: Scenario):
    def check(moment: Moment) -> None:
        output = moment.output
        if output.preempted_req_ids:
            assert output.scheduled_new_req_ids == output.scheduled_resumed_req_ids == []

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(90)
def test_s7_running_requests_come_first_and_admissions_take_the_head_of_the_queue(
    scenario: Scenario,
):
    def check(moment: Moment) -> None:
        if moment.phase != "scheduled":
            return
        order = list(moment.output.num_scheduled_tokens)
        assert order == [r.request_id for r in moment.output.scheduled_requests]
        kept = [r for r in order if r in moment.running_before]
        admitted = [r for r in order if r not in moment.running_before]
        assert order == kept + admitted, "an admission overtook a running request"
        assert kept == [r for r in moment.running_before if r in kept]
        assert admitted == moment.waiting_before[: len(admitted)], "a waiting request was skipped"
        if scenario.policy == "fcfs":
            left = moment.output.preempted_req_ids[::-1] + moment.waiting_before[len(admitted) :]
            assert [r.request_id for r in moment.engine.scheduler.waiting] == left
        new_and_resumed = moment.output.scheduled_new_req_ids + (
            moment.output.scheduled_resumed_req_ids
        )
        assert sorted(new_and_resumed) == sorted(admitted)

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60, policies=("priority",))
def test_s7_under_priority_the_waiting_queue_is_sorted_by_urgency_then_arrival(scenario: Scenario):
    def check(moment: Moment) -> None:
        waiting = moment.engine.scheduler.waiting
        keys = [(r.priority, r.arrival_time, r.request_id) for r in waiting]
        assert keys == sorted(keys)

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_s8_a_chunk_is_at_least_one_token_and_at_most_the_threshold(scenario: Scenario):
    threshold = scenario.long_prefill_token_threshold

    def check(moment: Moment) -> None:
        for count in moment.output.num_scheduled_tokens.values():
            assert count >= 1
            assert threshold == 0 or count <= threshold

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(90, caching=(False,), aborts=False)
def test_s9_without_hits_and_preemption_every_token_but_the_last_is_computed_once(
    scenario: Scenario,
):
    totals: Counter[str] = Counter()

    def check(moment: Moment) -> None:
        if moment.phase == "stepped":
            totals.update(moment.output.num_scheduled_tokens)

    for request_id, request in drive(scenario, check).items():
        if request.num_preemptions == 0:
            expected = request.num_prompt_tokens + request.num_output_tokens - 1
            assert totals[request_id] == expected


@pytest.mark.slow
@for_scenarios(60)
def test_s10_computed_tokens_fall_only_by_preemption_and_never_pass_the_tokens(scenario: Scenario):
    def check(moment: Moment) -> None:
        for request_id, request in moment.requests.items():
            before = moment.before[request_id]
            assert request.num_computed_tokens <= request.num_tokens
            if request_id not in moment.output.preempted_req_ids:
                assert request.num_computed_tokens >= before.num_computed_tokens
            if moment.phase == "stepped" and request.status == RequestStatus.RUNNING:
                assert request.num_computed_tokens < request.num_tokens

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_s11_a_request_that_does_not_run_holds_nothing(scenario: Scenario):
    def check(moment: Moment) -> None:
        running = {r.request_id for r in moment.engine.scheduler.running}
        assert set(moment.kv.req_to_blocks) <= running
        for request in moment.engine.scheduler.waiting:
            assert request.num_computed_tokens == 0

    drive(scenario, check)


@pytest.mark.slow
@for_scenarios(60)
def test_s12_a_drained_engine_holds_nothing(scenario: Scenario):
    engine = scenario.engine()
    requests = drive(scenario, None, engine)
    scheduler = engine.scheduler
    assert all(request.is_finished for request in requests.values())
    assert (len(scheduler.waiting), len(scheduler.running), scheduler.requests) == (0, 0, {})
    assert scheduler.kv.usage == 0.0
    assert scheduler.kv.req_to_blocks == {}
    assert engine.row_sampler.generators == {}
    assert engine.step() == []


@pytest.mark.slow
@for_all(
    lambda st: st.integers(2, 6),
    lambda st: st.integers(1, 4),
    lambda st: st.integers(1, 30),
    max_examples=100,
)
def test_s13_work_that_can_never_run_raises_instead_of_spinning(num_blocks, block_size, surplus):
    """`add_request` refuses such a request; here it is put behind the engine's back."""
    engine = LLMEngine(num_blocks=num_blocks, block_size=block_size, model="toy")
    too_long = (num_blocks - 1) * block_size + surplus
    request = Request("r", [1] * too_long, SamplingParams(max_tokens=1))
    engine.scheduler.add_request(request)
    with pytest.raises(RuntimeError, match="no progress"):
        engine.step()
    assert request.status == RequestStatus.WAITING


def test_s13_a_request_that_outgrows_the_pool_raises_instead_of_spinning():
    """8 usable slots, 4 prompt tokens, 20 outputs: the pool is full after the fifth output."""
    engine = LLMEngine(num_blocks=3, block_size=4, model="toy")
    engine.scheduler.add_request(
        Request("r", [1, 2, 3, 4], SamplingParams(max_tokens=20, ignore_eos=True))
    )
    with pytest.raises(RuntimeError, match="no progress"):
        for _ in range(30):
            engine.step()


def test_a_scenario_of_these_tests_does_preempt_and_resume():
    """Guards the random scenarios themselves: this shape must exercise S5."""
    scenario = Scenario(
        tuple(ScenarioRequest(0, (1, 2, 3), 12, ignore_eos=True) for _ in range(3)),
        block_size=2,
        spare_blocks=3,
        spare_budget=20,
        enable_prefix_caching=False,
    )
    assert sum(r.num_preemptions for r in drive(scenario).values()) > 0
