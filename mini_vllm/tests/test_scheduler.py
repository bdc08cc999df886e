"""Scheduling: worked cases, one rule each; the invariants stand in a file of their own."""

from __future__ import annotations

import pytest

from mini_vllm import Scheduler, SchedulerOutput
from mini_vllm.config import SamplingParams, SchedulerConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request, RequestStatus


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
