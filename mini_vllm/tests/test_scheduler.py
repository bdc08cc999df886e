"""Scheduling: invariants S1-S13, checked after every `schedule()` and every step."""

from __future__ import annotations

from collections import Counter

import pytest

from mini_vllm import Scheduler, SchedulerOutput
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.engine import LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request, RequestStatus
from mini_vllm.tests.support import Arrival, Moment, Scenario, drive, for_all, scenarios

# ------------------------------------------------------------------ invariants


@for_all(scenarios, max_examples=60)
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


@for_all(scenarios, max_examples=60)
def test_s2_a_step_never_schedules_more_tokens_than_the_budget(scenario: Scenario):
    def check(moment: Moment) -> None:
        assert moment.output.total_num_scheduled_tokens <= scenario.max_num_batched_tokens

    drive(scenario, check)


@for_all(scenarios, max_examples=60)
def test_s3_never_more_requests_run_than_there_are_slots(scenario: Scenario):
    def check(moment: Moment) -> None:
        assert len(moment.engine.scheduler.running) <= scenario.max_num_seqs
        assert len(moment.output.scheduled_requests) <= scenario.max_num_seqs

    drive(scenario, check)


@for_all(scenarios, max_examples=60)
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


@for_all(scenarios, max_examples=90)
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


@for_all(scenarios, max_examples=90)
def test_s6_a_step_that_preempts_admits_nobody(scenario: Scenario):
    def check(moment: Moment) -> None:
        output = moment.output
        if output.preempted_req_ids:
            assert output.scheduled_new_req_ids == output.scheduled_resumed_req_ids == []

    drive(scenario, check)


@for_all(scenarios, max_examples=90)
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


@for_all(lambda st: scenarios(st, policies=["priority"]), max_examples=60)
def test_s7_under_priority_the_waiting_queue_is_sorted_by_urgency_then_arrival(scenario: Scenario):
    def check(moment: Moment) -> None:
        waiting = moment.engine.scheduler.waiting
        keys = [(r.priority, r.arrival_time, r.request_id) for r in waiting]
        assert keys == sorted(keys)

    drive(scenario, check)


@for_all(scenarios, max_examples=60)
def test_s8_a_chunk_is_at_least_one_token_and_at_most_the_threshold(scenario: Scenario):
    threshold = scenario.long_prefill_token_threshold

    def check(moment: Moment) -> None:
        for count in moment.output.num_scheduled_tokens.values():
            assert count >= 1
            assert threshold == 0 or count <= threshold

    drive(scenario, check)


@for_all(lambda st: scenarios(st, caching=[False], aborts=False), max_examples=90)
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


@for_all(scenarios, max_examples=60)
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


@for_all(scenarios, max_examples=60)
def test_s11_a_request_that_does_not_run_holds_nothing(scenario: Scenario):
    def check(moment: Moment) -> None:
        running = {r.request_id for r in moment.engine.scheduler.running}
        assert set(moment.kv.req_to_blocks) <= running
        for request in moment.engine.scheduler.waiting:
            assert request.num_computed_tokens == 0

    drive(scenario, check)


@for_all(scenarios, max_examples=60)
def test_s12_a_drained_engine_holds_nothing(scenario: Scenario):
    engine = scenario.engine()
    requests = drive(scenario, None, engine)
    scheduler = engine.scheduler
    assert all(request.is_finished for request in requests.values())
    assert (len(scheduler.waiting), len(scheduler.running), scheduler.requests) == (0, 0, {})
    assert scheduler.kv.usage == 0.0
    assert scheduler.kv.req_to_blocks == {}
    assert engine.rows.generators == {}
    assert engine.step() == []


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


# ------------------------------------------------------------------ worked cases


def make_scheduler(num_blocks: int = 100, block_size: int = 4, **options) -> Scheduler:
    caching = options.pop("enable_caching", False)
    kv = KVCacheManager(num_blocks, block_size, caching)
    return Scheduler(kv, SchedulerConfig(**options))


class RefusesOnce(KVCacheManager):
    """Finds no room for the request named by `refuses`, once."""

    refuses = ""

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
        if request.request_id == self.refuses:
            self.refuses = ""
            return None
        return super().allocate_slots(request, num_new_tokens, new_computed_blocks)


def make_request(name: str, num_tokens: int, max_tokens: int = 4, **options) -> Request:
    token = ord(name[0])
    return Request(name, [token] * num_tokens, SamplingParams(max_tokens=max_tokens), **options)


def run_step(scheduler: Scheduler, token: int = 1) -> SchedulerOutput:
    """One step in which every request that caught up samples `token`."""
    output = scheduler.schedule()
    sampled = {
        r.request_id: [token]
        for r in output.scheduled_requests
        if scheduler.needs_sample(r, output.num_scheduled_tokens[r.request_id])
    }
    scheduler.update_from_output(output, sampled)
    return output


@pytest.mark.parametrize(
    ("wanted", "budget", "threshold", "expected"),
    [(100, 2048, 0, 100), (100, 64, 0, 64), (100, 64, 16, 16), (100, 8, 16, 8), (5, 0, 16, 0)],
)
def test_the_threshold_clamps_before_the_budget(wanted, budget, threshold, expected):
    scheduler = make_scheduler(long_prefill_token_threshold=threshold)
    assert scheduler._clamp_new_tokens(wanted, budget) == expected


def test_a_sample_is_needed_exactly_when_the_last_token_is_computed():
    request = make_request("a", 10)
    request.num_computed_tokens = 4
    assert not Scheduler.needs_sample(request, 5)
    assert Scheduler.needs_sample(request, 6)


def test_update_advances_requests_that_sampled_nothing():
    """E4 at the scheduler: a chunk without a token still moves the counter."""
    scheduler = make_scheduler(max_num_batched_tokens=4, max_num_seqs=1)
    request = make_request("a", 10)
    scheduler.add_request(request)
    assert scheduler.update_from_output(scheduler.schedule(), {}) == []
    assert request.num_computed_tokens == 4


def test_finished_requests_are_returned_in_scheduled_order_and_freed():
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add_request(make_request(name, 3, max_tokens=1))
    output = scheduler.schedule()
    finished = scheduler.update_from_output(output, {"a": [1], "b": [1], "c": [1]})
    assert [r.request_id for r in finished] == ["a", "b", "c"]
    assert scheduler.kv.usage == 0.0
    assert scheduler.schedule().finished_req_ids == {"a", "b", "c"}


def test_a_short_request_does_not_overtake_a_blocked_head():
    """3 usable blocks, 2 taken: the 9-token head waits, and so does the 1-token request behind."""
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add_request(make_request("a", 8))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 9))
    scheduler.add_request(make_request("c", 1))
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step():
    scheduler = make_scheduler(
        max_num_batched_tokens=10, max_num_seqs=4, enable_chunked_prefill=False
    )
    scheduler.add_request(make_request("a", 8))
    scheduler.add_request(make_request("b", 8))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 8}


def test_a_request_ends_at_the_length_of_the_model():
    scheduler = make_scheduler(max_model_len=10)
    request = make_request("a", 8, max_tokens=50)
    scheduler.add_request(request)
    counts = []
    while scheduler.has_unfinished_requests():
        counts.append(run_step(scheduler).num_scheduled_tokens["a"])
    assert counts == [8, 1]
    assert (request.num_tokens, request.status) == (10, RequestStatus.FINISHED_LENGTH)


def test_d9_a_running_request_never_computes_the_last_position_of_the_model():
    """12 tokens, length 10: positions 0-4, 5-8, then nothing. The engine refuses such a prompt."""
    scheduler = make_scheduler(max_model_len=10, max_num_batched_tokens=5)
    scheduler.add_request(make_request("a", 12))
    assert [run_step(scheduler).num_scheduled_tokens for _ in range(3)] == [{"a": 5}, {"a": 4}, {}]


def test_the_priority_victim_is_the_least_urgent_and_among_equals_the_latest():
    scheduler = make_scheduler(policy="priority")
    for name, priority, arrival in (("a", 1, 5.0), ("b", 2, 1.0), ("c", 2, 2.0), ("d", 0, 9.0)):
        scheduler.add_request(make_request(name, 2, priority=priority, arrival_time=arrival))
    run_step(scheduler)
    assert [scheduler._pop_victim().request_id for _ in range(4)] == ["c", "b", "a", "d"]


def test_d13_a_victim_already_scheduled_is_withdrawn_and_its_budget_refunded():
    """a (least urgent) gets its token, then b needs a block: a leaves the step again.

    Pool of 4 usable blocks of 2. Before the third step a holds 2 blocks for 3 tokens, b 2 for 4.
    """
    scheduler = make_scheduler(num_blocks=5, block_size=2, policy="priority")
    scheduler.add_request(make_request("a", 2, priority=5))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 4, priority=0))
    output = run_step(scheduler)
    assert output.num_scheduled_tokens == {"a": 1, "b": 4}
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["a"]
    assert output.num_scheduled_tokens == {"b": 1}
    assert [r.request_id for r in output.scheduled_requests] == ["b"]


def test_d13_the_refund_is_spent_in_the_same_step():
    """Budget 3: a takes 2, b's refused block costs a its place, and c still gets a token.

    Without the refund b's token would be the last; without the step back in `running` c would be
    skipped.
    """
    kv = RefusesOnce(100, 4, False)
    config = SchedulerConfig(3, 3, 1, policy="priority")
    scheduler = Scheduler(kv, config)
    for name, length, priority in (("a", 20, 9), ("b", 1, 0), ("c", 1, 1)):
        scheduler.add_request(make_request(name, length, max_tokens=20, priority=priority))
        run_step(scheduler)
    scheduler.long_prefill_token_threshold = 2
    kv.refuses = "b"
    output = scheduler.schedule()
    assert output.preempted_req_ids == ["a"]
    assert output.num_scheduled_tokens == {"b": 1, "c": 1}


def test_abort_works_in_either_queue_and_an_unknown_id_is_a_no_op():
    scheduler = make_scheduler(max_num_seqs=1)
    for name in "ab":
        scheduler.add_request(make_request(name, 4))
    run_step(scheduler)
    assert scheduler.abort_request("nobody") is None
    running, waiting = scheduler.abort_request("a"), scheduler.abort_request("b")
    assert running is not None and waiting is not None
    assert [running.finish_reason, waiting.finish_reason] == ["abort", "abort"]
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv.usage == 0.0
    assert scheduler.abort_request("a") is None


def test_a_request_aborted_while_its_step_runs_gets_no_token():
    scheduler = make_scheduler()
    request = make_request("a", 4)
    scheduler.add_request(request)
    output = scheduler.schedule()
    scheduler.abort_request("a")
    assert scheduler.update_from_output(output, {"a": [9]}) == []
    assert request.output_token_ids == []


def test_d5_hits_count_as_computed_only_once_the_blocks_are_there():
    """The admission gate makes a refusal here rare; a manager that refuses once forces it."""
    kv = RefusesOnce(100, 4)
    kv.refuses = "b"
    scheduler = Scheduler(kv)
    first, second = make_request("a", 9), make_request("b", 9)
    second.all_token_ids[:] = first.all_token_ids
    scheduler.add_request(first)
    run_step(scheduler)
    scheduler.add_request(second)
    assert list(run_step(scheduler).num_scheduled_tokens) == ["a"]
    assert (second.num_computed_tokens, second.status) == (0, RequestStatus.WAITING)
    output = scheduler.schedule()
    assert output.num_cached_tokens == {"b": 8}
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}


def test_a_finished_id_may_be_used_again():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 2))
    scheduler.abort_request("a")
    scheduler.add_request(make_request("a", 2))
    assert run_step(scheduler).num_scheduled_tokens == {"a": 2}


def test_an_empty_scheduler_plans_an_empty_step():
    output = make_scheduler().schedule()
    assert (output.num_scheduled_tokens, output.total_num_scheduled_tokens) == ({}, 0)


def test_the_default_number_of_slots_never_exceeds_the_budget():
    assert make_scheduler().max_num_seqs == 128
    assert make_scheduler(max_num_batched_tokens=8).max_num_seqs == 8


def test_a_scenario_of_these_tests_does_preempt_and_resume():
    """Guards the random scenarios themselves: this shape must exercise S5."""
    scenario = Scenario(
        tuple(Arrival(0, (1, 2, 3), 12, ignore_eos=True) for _ in range(3)),
        block_size=2,
        spare_blocks=3,
        spare_budget=20,
        enable_prefix_caching=False,
    )
    assert sum(r.num_preemptions for r in drive(scenario).values()) > 0
