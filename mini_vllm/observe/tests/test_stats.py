"""The numbers of an engine are those of its steps, and counting changes nothing."""

from __future__ import annotations

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.observe.stats import Stats, StepStats

CRAMPED = {"num_blocks": 9, "block_size": 4, "max_num_seqs": 3}


def test_the_numbers_are_those_of_the_plans_and_queues():
    engine = LLMEngine("toy", **CRAMPED)
    stats = StepStats(engine)
    plans: list[tuple[int, int]] = []
    engine.observers.append(
        lambda plan: plans.append(
            (len(plan.preempted_req_ids), sum(plan.num_cached_tokens.values()))
        )
    )
    for name in "abcd":
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        engine.add_request(list(range(9)), params, request_id=name)
    assert (stats.read().running, stats.read().waiting) == (0, 4)
    engine.step()
    now = stats.read()
    assert (now.running, now.waiting) == (len(engine.scheduler.running), 4 - now.running)
    assert now.usage == engine.scheduler.kv.usage > 0.0
    while engine.has_unfinished_requests():
        engine.step()
    preemptions, hits = map(sum, zip(*plans, strict=True))
    assert preemptions > 0 and hits > 0
    assert stats.read() == Stats(0, 0, 0.0, preemptions, 4 * 9, hits)
    assert engine.feature("stats") is stats
