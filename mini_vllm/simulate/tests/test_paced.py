"""A simulated server lasts what the simulation says, to the float, on a clock that is ours."""

from __future__ import annotations

import logging
import random

import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import LinearCost, load_cost
from mini_vllm.simulate.paced import Paced, make_paced_engine
from mini_vllm.simulate.simulator import Simulator
from mini_vllm.simulate.traces import TraceRequest

COST = load_cost("step=0.5,tokens=0.03125")


class Clock:
    """Time that moves when somebody sleeps."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def paced(cost: LinearCost, is_async: bool, **knobs) -> tuple[LLMEngine, Clock]:
    clock = Clock()
    engine = LLMEngine("toy", async_scheduling=is_async, **knobs)
    engine.join(Paced(cost, is_async, clock, clock.sleep))
    return engine, clock


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_served_workload_ends_when_the_simulated_one_does(seed, is_async):
    draw = random.Random(seed)
    knobs = {"num_blocks": 16, "block_size": 4, "max_num_batched_tokens": 16, "max_model_len": 60}
    trace = [TraceRequest(0.0, draw.randint(1, 30), draw.randint(1, 20)) for _ in range(6)]
    config = EngineConfig.of({**knobs, "async_scheduling": is_async})
    simulated = Simulator(config, COST).run(trace)
    engine, clock = paced(COST, is_async, **knobs)
    for number, request in enumerate(trace):
        engine.add_request(
            [number] * request.prompt_len,
            SamplingParams(max_tokens=request.output_len, ignore_eos=True), request_id=str(number),
        )  # fmt: skip
    ends = {}
    while engine.has_unfinished_requests():
        for request in engine.step():
            ends[int(request.request_id)] = clock.now
    assert clock.now == simulated.duration
    late = COST.terms["step"] + COST.terms["tokens"] * 16 if is_async else 0.0
    for outcome in simulated.outcomes:  # an inline engine hears of it a step later
        assert outcome.last_token <= ends[outcome.number] <= outcome.last_token + late


def test_beyond_what_was_fitted_the_terms_are_used_and_the_log_says_so_once(caplog):
    cost = LinearCost({"step": 1.0, "tokens": 0.5}, "a card", hull={"tokens": (1, 4)})
    engine, clock = paced(cost, False, num_blocks=16, block_size=4)
    with caplog.at_level(logging.WARNING):
        engine.generate([[1] * 10, [2] * 10], SamplingParams(max_tokens=2, ignore_eos=True))
    assert clock.now == 1.0 + 0.5 * 20 + 1.0 + 0.5 * 2
    assert len(caplog.records) == 1 and "tokens=20: the cost was fitted on 1 to 4" in caplog.text


def test_a_simulated_engine_has_the_models_tokenizer_template_and_length():
    real = LLMEngine("byte-llama", num_blocks=8)
    engine = make_paced_engine("byte-llama", {}, {"step_cost": "step=1e-6", "num_blocks": 8})
    assert engine.chat_template == real.chat_template
    assert engine.max_model_len == real.max_model_len
    assert engine.tokenizer.encode("a b") == real.tokenizer.encode("a b")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"step_cost": "nowhere"}, "nowhere: No such file"),
        ({"step_cost": "step=1", "speculative_config": {"num_speculative_tokens": 1}},
         "simulate with speculative_config: a step"),
        ({"step_cost": "step=1", "num_blocks": 1}, "num_blocks=1"),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused(knobs, said):
    with pytest.raises(ValueError, match=said):
        make_paced_engine("byte-llama", {}, knobs)
