"""Every plan of a simulated server is the one that vLLM's own scheduler makes at that moment."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from conformance.features.simulate import mirror
from conformance.real_core import why_not
from mini_vllm.scheduler import Scheduler
from mini_vllm.simulate.cost import load_cost
from mini_vllm.simulate.samples import FOLDER
from mini_vllm.simulate.traces import TraceRequest, read_trace

COST = load_cost("step=6e-3,tokens=1e-5,host=3e-4")
SHARED = Path(__file__).parents[4] / "shared" / "traces"


def needs(release: str) -> pytest.MarkDecorator:
    reason = why_not(release)
    return pytest.mark.skipif(bool(reason), reason=reason)


def drawn(seed: int) -> tuple[list[TraceRequest], dict]:
    """A server under pressure: small blocks, shared prefixes, arrivals in the middle of steps."""
    draw = random.Random(seed)
    at, trace = 0.0, []
    for _ in range(draw.randint(4, 14)):
        at += draw.choice((0.0, 0.004, 0.03, 0.3)) * draw.random()
        length, shared = draw.randint(1, 40), draw.randint(0, 3)
        ids = (*range(shared), *(draw.randint(10, 30) for _ in range(10)))[: -(-length // 8)]
        hashes = tuple(hash(ids[: i + 1]) for i in range(len(ids)))
        trace.append(TraceRequest(
            at, length, draw.randint(1, 30), hashes, 8, draw.randint(0, 2),
        ))  # fmt: skip
    config = {
        "num_blocks": draw.randint(20, 40), "block_size": draw.choice((4, 8)),
        "max_num_batched_tokens": draw.choice((8, 16, 64)), "max_num_seqs": draw.choice((2, 8)),
        "long_prefill_token_threshold": draw.choice((0, 0, 6)), "max_model_len": 128,
        "policy": draw.choice(("fcfs", "priority")), "async_scheduling": draw.random() < 0.6,
        "enable_prefix_caching": draw.random() < 0.8,
    }  # fmt: skip
    if config["block_size"] == 4:
        config["num_blocks"] += 12
    return trace, config


@pytest.mark.slow
@needs("0.22.1")
@pytest.mark.parametrize("first", [0, 20])
def test_drawn_traces_are_planned_as_the_pin_plans_them(first):
    steps = 0
    for seed in range(first, first + 20):
        trace, config = drawn(seed)
        compared = mirror.mirrored(trace, config, COST)
        assert not compared.difference, f"seed {seed}: {compared}"
        steps += compared.num_steps
    assert steps > 400


@needs("0.22.1")
@pytest.mark.slow
def test_four_hundred_drawn_traces():
    for seed in range(1000, 1400):
        trace, config = drawn(seed)
        compared = mirror.mirrored(trace, config, COST)
        assert not compared.difference, f"seed {seed}: {compared}"


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.22.1", "0.23.0", "0.27.1", "0.33.0"])
def test_the_sample_is_planned_as_each_release_plans_it(release):
    if reason := why_not(release):
        pytest.skip(reason)
    trace = read_trace(FOLDER / "mooncake.jsonl", limit=60)
    config = {"num_blocks": 900, "async_scheduling": True, "max_model_len": 8192}
    compared = mirror.mirrored(trace, config, COST, release)
    assert compared.num_requests == 60 and not compared.difference


@needs("0.22.1")
@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="no real traces here")
def test_a_real_trace_is_planned_as_the_pin_plans_it():
    trace = read_trace(SHARED / "mooncake_conversation_1.jsonl.gz", limit=60)
    config = {
        "num_blocks": 6000, "max_num_batched_tokens": 8192, "max_num_seqs": 256,
        "max_model_len": 131_072, "async_scheduling": True,
    }  # fmt: skip
    compared = mirror.mirrored(trace, config, COST)
    assert compared.num_requests == 60 and not compared.difference


@pytest.mark.slow
@needs("0.22.1")
@pytest.mark.parametrize("rule", ["_clamp_new_tokens", "_after_own_preemption"])
def test_a_wrong_rule_is_seen(rule, monkeypatch):
    """The mirror can fail: a scheduler with one rule changed differs on a drawn trace."""
    wrong = {
        "_clamp_new_tokens": lambda self, wanted, budget: min(wanted, budget, 7),
        "_after_own_preemption": lambda self, plan, budget, index: self._schedule_running(
            plan, budget, index
        ),
    }
    monkeypatch.setattr(Scheduler, rule, wrong[rule])
    found = [mirror.mirrored(*drawn(seed), COST).difference for seed in range(60)]
    assert any(found)
