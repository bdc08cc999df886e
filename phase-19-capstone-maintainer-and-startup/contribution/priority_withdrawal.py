# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A victim that is withdrawn from the plan being made leaves no hash of what it never computed.

For tests/v1/core. Regression tests for pull request 43569.
"""

import pytest
from tests.v1.core.utils import create_requests, create_scheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.outputs import ModelRunnerOutput

pytestmark = pytest.mark.cpu_test

BLOCK_SIZE = 4
COMPUTED = 16  # Tokens of `low` in the two plans before the one it is withdrawn from.


def _make(policy: SchedulingPolicy, async_scheduling: bool):
    """7 usable blocks; `low` fills two blocks a step, `high` needs a third block in step 2."""
    scheduler = create_scheduler(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        enable_prefix_caching=True,
        long_prefill_token_threshold=8,
        num_blocks=8,
        block_size=BLOCK_SIZE,
        async_scheduling=async_scheduling,
    )
    scheduler.policy = policy
    scheduler.waiting = create_request_queue(policy)
    if hasattr(scheduler, "skipped_waiting"):
        scheduler.skipped_waiting = create_request_queue(policy)
    # `later` waits throughout: a release that computes a lone prompt whole has company.
    names = ("low", "high", "later")
    low, high, later = (  # The i-th request of a call repeats token i: no two prompts share any.
        create_requests(
            i + 1, num_tokens=n, max_tokens=2, block_size=BLOCK_SIZE, req_ids=list(names[: i + 1])
        )[i]
        for i, n in enumerate((24, 4, 25))
    )
    for arrival, (request, priority) in enumerate(((low, 5), (high, 0), (later, 9))):
        request.priority = priority
        request.arrival_time = float(arrival)
    return scheduler, low, high, later


def _output(plan, scheduler) -> ModelRunnerOutput:
    req_ids = list(plan.num_scheduled_tokens)
    prefilling = {
        r for r in req_ids if r in scheduler.requests and scheduler.requests[r].is_prefill_chunk
    }
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[[] if r in prefilling else [7] for r in req_ids],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _until_low_resumes(scheduler, low, high, later, depth: int) -> tuple[int, int]:
    """The step in which `low` is preempted, and the token at which it computes again.

    `depth` plans are in flight: 2 under async scheduling, else 1.
    """
    scheduler.add_request(low)
    scheduler.add_request(later)
    in_flight = []
    withdrawn_in = None
    for step in range(12):
        if step == 1:
            scheduler.add_request(high)
        plan = scheduler.schedule()
        planned = plan.num_scheduled_tokens
        if withdrawn_in is not None and "low" in planned:
            return withdrawn_in, low.num_computed_tokens - planned["low"]
        if low.num_preemptions and withdrawn_in is None:
            assert "low" not in planned
            withdrawn_in = step
        in_flight.append((plan, _output(plan, scheduler)))
        if len(in_flight) == depth:
            scheduler.update_from_output(*in_flight.pop(0))
    raise AssertionError("low never resumed")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_withdrawn_victim_is_not_hit_beyond_what_was_computed(async_scheduling: bool):
    """Two blocks of `low` enter the cache in step 2, which then withdraws it: 16 tokens remain.

    Under async scheduling the plan of step 1 is still in flight at that time. What it computes is
    written before any later plan reads it, so those 8 tokens are to be kept: a fix that rolls back
    everything no output has confirmed fails here, and so does one that rolls back nothing.
    """
    made = _make(SchedulingPolicy.PRIORITY, async_scheduling)
    step, start = _until_low_resumes(*made, depth=2 if async_scheduling else 1)
    assert step == 2
    assert start == COMPUTED


def test_newcomer_does_not_hit_a_withdrawn_block():
    """Another request with the same prompt, as soon as the pass is over."""
    scheduler, low, high, later = _make(SchedulingPolicy.PRIORITY, False)
    scheduler.add_request(low)
    scheduler.add_request(later)
    for step in range(3):
        if step == 1:
            scheduler.add_request(high)
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, _output(plan, scheduler))
    assert low.num_preemptions == 1
    _, hits = scheduler.kv_cache_manager.get_computed_blocks(low)[:2]
    assert hits == COMPUTED


def test_victim_that_was_not_planned_keeps_its_blocks():
    """Control: `low` stands behind `high`: nothing of it is planned when it is preempted."""
    scheduler, low, high, later = _make(SchedulingPolicy.PRIORITY, False)
    high.sampling_params.max_tokens = high.max_tokens = 8
    for request in (high, low, later):
        scheduler.add_request(request)
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, _output(plan, scheduler))
    assert low.num_preemptions == 1
    _, hits = scheduler.kv_cache_manager.get_computed_blocks(low)[:2]
    assert hits == COMPUTED
