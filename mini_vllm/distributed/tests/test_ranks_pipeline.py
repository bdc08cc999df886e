"""Several batches in flight, without processes: the queue, the counters, the plans."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch
from mini_vllm.config import SchedulerConfig
from mini_vllm.distributed.pipeline import PipelineScheduler, StagedExecutor
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.parts import EngineParts
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.tests.ranks_support import DENSE, RandomSource
from mini_vllm.tests.support import Scenario, ScenarioRequest, drive, for_all, scenarios

PARTS = EngineParts(scheduler=PipelineScheduler)
MODEL = RandomSource(DENSE).transformer()


class Stages:
    """Stands for ranks: a batch is computed when it is submitted, and answered when asked for."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.logits: dict[int, np.ndarray] = {}

    def submit(self, batch: ForwardBatch) -> int:
        number = len(self.logits)
        self.logits[number] = self.engine.model.forward(batch)
        return number

    def collect(self, number: int) -> np.ndarray:
        return self.logits[number]

    def discard_batches(self) -> None:
        """Nothing is under way."""


def piped(scenario: Scenario, depth: int, model=None) -> LLMEngine:
    engine = scenario.engine(model, parts=PARTS)
    engine.executor = StagedExecutor(
        engine.runner, engine.row_sampler, engine.features, Stages(engine), depth
    )
    return engine


def tokens(requests: dict[str, Request], scenario: Scenario) -> dict[str, list[int]]:
    """Of those that nobody aborted."""
    whole = [f"r{i}" for i, a in enumerate(scenario.arrivals) if a.abort_step is None]
    return {name: list(requests[name].output_token_ids) for name in whole}


@pytest.mark.parametrize("depth", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_texts_do_not_depend_on_the_batches_in_flight(depth):
    pytest.importorskip("hypothesis")

    @for_all(scenarios, max_examples=20)
    def check(scenario):
        got = drive(scenario, engine=piped(scenario, depth))
        assert tokens(got, scenario) == tokens(drive(scenario), scenario)

    check()


def two_requests(budget: int) -> tuple[PipelineScheduler, dict[str, Request]]:
    """Prompts of two blocks each, in a pool of four."""
    scheduler = PipelineScheduler(
        KVCacheManager(5, 4, False), SchedulerConfig(max_num_batched_tokens=budget)
    )
    requests = {}
    for name, length in (("a", 8), ("b", 7)):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        requests[name] = Request(name, list(range(length)), params)
        scheduler.add_request(requests[name])
    return scheduler, requests


def test_a_request_in_flight_is_passed_over_until_its_token_is_there():
    scheduler, requests = two_requests(20)
    first = scheduler.schedule()
    assert dict(first.num_scheduled_tokens) == {"a": 8, "b": 7}
    assert first.sampling_req_ids == {"a", "b"}
    assert not scheduler.schedule().num_scheduled_tokens
    scheduler.update_from_output(first, {"a": [1], "b": [1]})
    assert requests["a"].num_computed_tokens == 8 and requests["a"].num_tokens == 9


def test_the_next_chunk_of_a_prompt_follows_while_the_one_before_is_in_flight():
    scheduler = PipelineScheduler(
        KVCacheManager(9, 4, False), SchedulerConfig(max_num_batched_tokens=3)
    )
    scheduler.add_request(Request("a", list(range(8)), SamplingParams(max_tokens=2)))
    plans = [scheduler.schedule() for _ in range(4)]
    assert [dict(plan.num_scheduled_tokens) for plan in plans] == [{"a": 3}, {"a": 3}, {"a": 2}, {}]
    assert [plan.num_computed_tokens for plan in plans] == [{"a": 0}, {"a": 3}, {"a": 6}, {}]
    assert [bool(plan.sampling_req_ids) for plan in plans] == [False, False, True, False]


def test_a_position_is_not_sampled_twice_after_a_preemption_in_flight():
    """b's token is on its way when a's third block pushes b out; a is aborted, and nothing hinders
    b from coming back but that token. The real scheduler lets it in at once."""
    scheduler, requests = two_requests(8)
    of_a, of_b = scheduler.schedule(), scheduler.schedule()
    assert (dict(of_a.num_scheduled_tokens), of_b.sampling_req_ids) == ({"a": 8}, {"b"})
    scheduler.update_from_output(of_a, {"a": [1]})
    assert scheduler.schedule().preempted_req_ids == ["b"]
    scheduler.abort_request("a")
    assert not scheduler.schedule().sampling_req_ids, "b's next token is on its way"
    scheduler.update_from_output(of_b, {"b": [1]})
    again = scheduler.schedule()
    assert dict(again.num_scheduled_tokens) == {"b": 8}
    scheduler.update_from_output(again, {"b": [2]})
    assert requests["b"].output_token_ids == [1, 2]


def test_the_queue_waits_for_the_oldest_when_it_is_full_or_nothing_can_be_planned():
    """Upstream's order: fill first, then wait."""
    asked: list[str] = []

    class Ranks:
        def submit(self, batch: ForwardBatch) -> int:
            asked.append(f"submit {len(asked)}")
            return len(asked)

        def collect(self, number: int) -> np.ndarray:
            asked.append("collect")
            return np.zeros((1, 2))

        def discard_batches(self) -> None:
            asked.append("give up")

    class Runner:
        def prepare_batch(self, plan: SchedulerOutput) -> None:
            return None

    class Rows:
        def sample(self, *_):
            return {}, {}

    def plan(name: str) -> SchedulerOutput:
        request = Request(name, [1], SamplingParams())
        return SchedulerOutput({name: 1}, [request], sampling_req_ids={name})

    queue = StagedExecutor(Runner(), Rows(), (), Ranks(), 3)
    plans = [plan(name) for name in "abcd"]
    assert queue.submit(plans[0]) is None
    assert queue.submit(plans[1]) is None
    assert queue.submit(plans[2])[0] is plans[0], "full"
    assert queue.submit(SchedulerOutput())[0] is plans[1], "nothing to plan"
    assert len(queue.batch_queue) == 2 and queue.is_busy
    queue.restart()
    assert not queue.is_busy and asked[-1] == "give up"


@pytest.mark.slow
def test_a_model_that_reads_its_cache_answers_the_same_with_batches_in_flight():
    arrivals = tuple(
        ScenarioRequest(step, tuple((7 * i + step) % 8 for i in range(length)), 6, ignore_eos=True)
        for step, length in ((0, 9), (0, 14), (1, 3), (2, 11), (2, 9))
    )
    scenario = Scenario(arrivals, spare_budget=6, spare_blocks=2)
    expected = tokens(drive(scenario, engine=scenario.engine(MODEL)), scenario)
    for depth in (2, 3, 4):
        got = drive(scenario, engine=piped(scenario, depth, MODEL))
        assert tokens(got, scenario) == expected
