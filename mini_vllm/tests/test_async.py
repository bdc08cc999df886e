"""Asynchronous scheduling: other plans, the same tokens."""

from __future__ import annotations

import dataclasses

import pytest

from mini_vllm import LLM, EngineParts, LLMEngine, SamplingParams, Scheduler
from mini_vllm.observe.trace import traced_steps
from mini_vllm.tests.support import (
    Scenario,
    ScriptedModel,
    drive,
    for_scenarios,
)

EOS = 256


@pytest.mark.slow
@for_scenarios(90, aborts=False)
def test_tokens_are_those_of_the_synchronous_engine(scenario: Scenario):
    ahead = dataclasses.replace(scenario, async_scheduling=True)
    expected = {i: (r.output_token_ids, r.finish_reason) for i, r in drive(scenario).items()}
    assert {i: (r.output_token_ids, r.finish_reason) for i, r in drive(ahead).items()} == expected


@pytest.mark.slow
@for_scenarios(60)
def test_with_aborts_every_request_ends_and_no_block_is_left(scenario: Scenario):
    engine = dataclasses.replace(scenario, async_scheduling=True).engine()
    requests = drive(scenario, engine=engine)
    assert all(request.is_finished for request in requests.values())
    assert engine.scheduler.kv.block_pool.get_num_free_blocks() == scenario.num_blocks - 1


@pytest.mark.slow
def test_the_shipped_model_writes_the_same_with_chunks_hits_and_preemptions():
    prompts = ["The KV cache of a request", "The KV cache of another request", "Blocks"] * 2
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    knobs = {"num_blocks": 14, "max_num_batched_tokens": 32, "dtype": "float64"}
    told = [LLM(async_scheduling=flag, **knobs).generate(prompts, params) for flag in (False, True)]
    assert [o.outputs for o in told[0]] == [o.outputs for o in told[1]]


def test_a_stop_is_noticed_one_step_late():
    """The model says EOS with its third token; a fourth is planned and ignored."""
    stream = [104, 105, EOS, 120, 120, 120]
    made = LLMEngine(ScriptedModel(lambda _, position: stream[position]), async_scheduling=True)
    made.add_request([1], SamplingParams(max_tokens=9), request_id="r")
    steps = [(r.num_scheduled_tokens, r.sampled, r.finished) for r in traced_steps(made)]
    assert steps == [
        ({"r": 1}, {}, {}),
        ({"r": 1}, {"r": 104}, {}),
        ({"r": 1}, {"r": 105}, {}),
        ({"r": 1}, {"r": EOS}, {"r": "stop"}),
    ]


def test_no_step_too_many_is_planned_for_max_tokens():
    made = LLMEngine("toy", async_scheduling=True)
    made.add_request([1], SamplingParams(max_tokens=3, ignore_eos=True), request_id="r")
    steps = [r.num_scheduled_tokens for r in traced_steps(made)]
    assert steps == [{"r": 1}, {"r": 1}, {"r": 1}, {}]


def test_an_abort_between_plan_and_update_drops_the_tokens_in_flight():
    made = LLMEngine("toy", async_scheduling=True)
    made.add_request([1], SamplingParams(max_tokens=9, ignore_eos=True), request_id="r")
    made.step()
    request = made.requests["r"]
    assert (request.num_output_tokens, request.num_output_placeholders) == (0, 1)
    made.abort_request("r")
    assert made.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].finished
    assert request.output_token_ids == []


@pytest.mark.parametrize("reset_running_requests", [True, False])
def test_a_reset_forgets_prefixes_and_drops_what_is_in_flight(reset_running_requests):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = LLMEngine("toy").generate(["abcdefgh"], params)[0].outputs
    made = LLMEngine("toy", async_scheduling=True, block_size=4)
    made.add_request("abcdefgh", params, request_id="r")
    request = made.requests["r"]
    for _ in range(3):
        made.step()
    assert made.reset_prefix_cache(reset_running_requests) == reset_running_requests
    while made.has_unfinished_requests():
        made.step()
    assert request.output_token_ids == expected[0].token_ids
    assert request.num_preemptions == int(reset_running_requests)


def test_a_scheduler_part_that_plans_one_step_at_a_time_is_refused():
    class Own(Scheduler):
        pass

    with pytest.raises(ValueError, match="async_scheduling=True: the scheduler part"):
        LLMEngine("toy", parts=EngineParts(scheduler=Own), async_scheduling=True)
