"""Two servers: what crosses, what is computed where, and what it costs."""

from __future__ import annotations

import pytest

from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import LinearCost
from mini_vllm.simulate.pools import Wire, apart, together
from mini_vllm.simulate.traces import TraceRequest

COST = LinearCost({"step": 0.010, "tokens": 0.0001}, "made up")
WIRE = Wire(8.0, 1_000)
"""A token in a microsecond."""


def config(**knobs):
    return EngineConfig.of({"num_blocks": 400, "max_num_batched_tokens": 512, **knobs})


def test_one_prompt_is_computed_carried_and_gone_on_with():
    found = apart(config(), COST, [TraceRequest(0.0, 400, 3)], WIRE)
    [outcome], [crossing] = found.result.outcomes, found.crossings
    prefill = 0.010 + 400 * 0.0001
    assert (crossing.ready, crossing.end) == pytest.approx((prefill, prefill + 400e-6))
    step = 0.010 + 0.0001
    assert outcome.ttft == pytest.approx(prefill + 400e-6 + step)
    assert outcome.tpot == pytest.approx(step)
    assert found.result.computed_tokens == 400 + 3  # the last token of the prompt is computed twice


def test_prompts_cross_one_after_the_other():
    slow = Wire(0.08, 1_000)
    found = apart(config(), COST, [TraceRequest(0.0, 100, 2)] * 3, slow)
    ready = {crossing.ready for crossing in found.crossings}
    assert len(ready) == 1  # one step computed all
    ends = [crossing.end for crossing in found.crossings]
    assert ends == pytest.approx([min(ready) + 0.01 * n for n in (1, 2, 3)])


def test_the_decoder_is_billed_for_the_prompts_blocks():
    trace = [TraceRequest(0.0, 160, 4)] * 2
    assert apart(config(num_blocks=12), COST, trace, WIRE).result.preemptions == 0
    both = apart(config(num_blocks=24), COST, trace, WIRE)
    one = apart(config(num_blocks=12), COST, trace, WIRE)
    assert one.result.duration > both.result.duration  # eleven blocks hold one at a time


def test_a_decode_never_waits_for_a_prefill_apart_and_does_together():
    trace = [TraceRequest(0.0, 16, 60), TraceRequest(0.0, 16, 60), TraceRequest(0.2, 500, 1),
             TraceRequest(0.2, 500, 1)]  # fmt: skip
    assert max(together(config(), COST, trace).result.gaps) == pytest.approx(0.010 + 501 * 0.0001)
    assert max(apart(config(), COST, trace, WIRE).result.gaps) < 0.0105


def test_two_servers_serve_the_trace_once():
    trace = [TraceRequest(0.01 * n, 40 + n, 5) for n in range(9)]
    for found in (together(config(), COST, trace), apart(config(), COST, trace, WIRE)):
        outcomes = sorted(found.result.outcomes, key=lambda each: each.number)
        assert [each.number for each in outcomes] == list(range(9))
        assert [each.prompt_len for each in outcomes] == [each.prompt_len for each in trace]
        assert [each.arrival for each in outcomes] == [each.arrival for each in trace]


@pytest.mark.parametrize(("gbps", "size"), [(0, 1), (-1.0, 1), (1.0, 0)])
def test_a_wire_that_carries_nothing_is_refused(gbps, size):
    with pytest.raises(ValueError, match=r"need"):
        Wire(gbps, size)
