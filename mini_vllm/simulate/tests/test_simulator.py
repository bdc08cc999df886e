"""The computed clock: worked examples to the millisecond, and plans that are the engine's."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.config import EngineConfig
from mini_vllm.simulate.cost import CostError, LinearCost, StepWork, fit, load_cost, work_of
from mini_vllm.simulate.simulator import Drafts, Simulator, _Run, prompt_hashes
from mini_vllm.simulate.traces import TraceError, TraceRequest

TENTH = load_cost("step=1,tokens=0.1")


def run(trace, cost=TENTH, concurrency=None, skip=False, closed=None, **settings):
    made = {name: settings.pop(name) for name in ("release", "drafts", "max_loras", "host")
            if name in settings}  # fmt: skip
    knobs = {"num_blocks": 64, "block_size": 4, **settings}
    simulator = Simulator(EngineConfig.of(knobs), cost, **made)
    plans: list[tuple[float, float, dict[str, int]]] = []
    simulator.observers.append(
        lambda begin, end, plan, work: plans.append((begin, end, dict(plan.num_scheduled_tokens)))
    )
    closed = closed or {}
    return simulator.run(trace, concurrency=concurrency, skip=skip, **closed), plans


def test_one_request_by_hand():
    """10 prompt tokens cost 1 + 1.0 s, each of two more tokens 1.1 s."""
    result, plans = run([TraceRequest(5.0, 10, 3)])
    [done] = result.outcomes
    assert (done.ttft, done.e2el) == pytest.approx((2.0, 4.2))
    assert done.tpot == pytest.approx(1.1)
    assert [round(end - begin, 6) for begin, end, _ in plans] == [2.0, 1.1, 1.1]
    assert result.duration == pytest.approx(9.2) and result.recomputed_tokens == 0


def test_who_comes_during_a_step_is_planned_after_it():
    result, plans = run([TraceRequest(0.0, 10, 2), TraceRequest(0.5, 20, 1)])
    assert [counts for _, _, counts in plans] == [{"0": 10}, {"0": 1, "1": 20}]
    late = next(o for o in result.outcomes if o.number == 1)
    assert late.first_scheduled == pytest.approx(2.0)
    assert late.ttft == pytest.approx(2.0 + 3.1 - 0.5)


def test_asynchronous_plans_are_made_while_the_step_before_runs():
    """Host time leaves the model of a synchronous engine idle, and not of an asynchronous one."""
    trace = [TraceRequest(0.0, 4, 20)]
    sync, _ = run(trace, host=0.2)
    ahead, _ = run(trace, host=0.2, async_scheduling=True)
    assert sync.duration == pytest.approx(1.4 + 19 * 1.1 + 20 * 0.2)
    assert ahead.duration == pytest.approx(1.4 + 19 * 1.1 + 0.2)
    assert ahead.busy == pytest.approx(sync.busy)


def test_an_asynchronous_engine_sees_an_arrival_one_step_later():
    """When it comes, the next step is planned already."""
    trace = [TraceRequest(0.0, 10, 8), TraceRequest(0.5, 5, 1)]
    _, sync = run(trace)
    _, ahead = run(trace, async_scheduling=True)
    first = [next(i for i, (_, _, c) in enumerate(plans) if "1" in c) for plans in (sync, ahead)]
    assert first == [1, 2]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_plans_are_those_of_the_engine(seed, async_scheduling):
    """The same arrivals in an engine with a model: equal plans, preemptions among them."""
    draw = random.Random(seed)
    knobs = {
        "num_blocks": 14, "block_size": 4, "max_num_batched_tokens": draw.choice((8, 24, 64)),
        "max_num_seqs": 4, "async_scheduling": async_scheduling, "enable_prefix_caching": False,
        "long_prefill_token_threshold": draw.choice((0, 6)), "max_model_len": 48,
    }  # fmt: skip
    trace = [TraceRequest(0.0, draw.randint(1, 20), draw.randint(1, 20)) for _ in range(9)]
    result, plans = run(trace, **knobs)
    engine, theirs = LLMEngine("toy", **knobs), []
    engine.observers.append(lambda plan: theirs.append(dict(plan.num_scheduled_tokens)))
    for number, request in enumerate(trace):
        engine.add_request(
            [7 + number] * request.prompt_len,
            SamplingParams(max_tokens=request.output_len, ignore_eos=True), request_id=str(number),
        )  # fmt: skip
    while engine.has_unfinished_requests():
        engine.step()
    assert [c for _, _, c in plans if c] == [c for c in theirs if c]
    assert len(result.outcomes) == 9


def test_a_preemption_is_computed_again_and_counted():
    trace = [TraceRequest(0.0, 8, 20), TraceRequest(0.0, 8, 20)]
    result, plans = run(trace, num_blocks=10, enable_prefix_caching=False)
    assert result.preemptions >= 1
    assert sum(sum(c.values()) for *_, c in plans) == 2 * 27 + result.recomputed_tokens
    assert result.recomputed_tokens > 0


def test_shared_prefixes_hit_and_only_those():
    """Ids of 8 tokens over blocks of 4: the second request shares its first 8."""
    first = TraceRequest(0.0, 20, 2, (1, 2, 3), 8)
    second = TraceRequest(50.0, 20, 2, (1, 9, 10), 8)
    alone = TraceRequest(100.0, 20, 2)
    result, _ = run([first, second, alone, alone])
    assert [o.cached_tokens for o in sorted(result.outcomes, key=lambda o: o.number)] == [
        0,
        8,
        0,
        0,
    ]


def test_hash_ids_stand_for_blocks_of_any_dividing_size():
    request = TraceRequest(0.0, 1300, 1, (5, 6, 9), 512)
    assert len(list(prompt_hashes(request, 16))) == 81
    assert list(prompt_hashes(request, 512)) == [5, 6]
    assert list(prompt_hashes(request, 1024)) == [6]
    with pytest.raises(TraceError, match="block_size=48: need a divisor or a multiple of 512"):
        prompt_hashes(request, 48)


def test_adapters_keep_prefixes_apart_and_slots_limit_a_step():
    trace = [TraceRequest(0.0, 8, 3, (1,), 8, lora=n) for n in (1, 2, 1)]
    result, plans = run(trace, max_loras=1)
    assert plans[0][2].keys() == {"0", "2"}
    cached = {o.number: o.cached_tokens for o in result.outcomes}
    assert cached == {0: 0, 1: 0, 2: 4}  # 2 has the adapter of 0; its last block is computed
    with pytest.raises(TraceError, match="request 0: has an adapter: need max_loras"):
        run(trace)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drafts_that_are_always_accepted_save_steps(async_scheduling):
    trace = [TraceRequest(0.0, 4, 25)]
    none, _ = run(trace, async_scheduling=async_scheduling)
    all_of_them, _ = run(trace, drafts=Drafts(3, 1.0), async_scheduling=async_scheduling)
    never, _ = run(trace, drafts=Drafts(3, 0.0), async_scheduling=async_scheduling)
    assert none.num_steps == 25 and all_of_them.num_steps <= 8
    assert never.num_steps >= 25 and never.accepted_tokens == 0
    for result in (all_of_them, never):
        assert result.outcomes[0].output_len == 25
        assert sum(result.gap_counts) == 24 and result.recomputed_tokens is None


def test_acceptance_is_drawn_by_its_seed():
    trace = [TraceRequest(0.0, 4, 400)]
    first, _ = run(trace, drafts=Drafts(3, 0.5, seed=1), num_blocks=256)
    again, _ = run(trace, drafts=Drafts(3, 0.5, seed=1), num_blocks=256)
    other, _ = run(trace, drafts=Drafts(3, 0.5, seed=2), num_blocks=256)
    assert first.num_steps == again.num_steps != other.num_steps
    assert 0.7 < first.accepted_tokens / first.num_steps < 1.05  # 0.5 + 0.25 + 0.125


def test_a_closed_loop_holds_its_concurrency():
    trace = [TraceRequest(0.0, 4, 5 + n % 3) for n in range(40)]
    result, plans = run(trace, concurrency=4)
    assert max(len(counts) for *_, counts in plans) == 4
    assert result.peak_running + result.peak_waiting == 4
    assert all(o.ttft > 0 for o in result.outcomes) and len(result.outcomes) == 40


def test_clients_begin_apart_and_send_again_after_a_turnaround():
    """Two clients; each request takes one step of 1 + 0.4 s, or 1 + 0.8 s beside the other."""
    trace = [TraceRequest(99.0, 4, 1) for _ in range(4)]
    result, plans = run(trace, concurrency=2, closed={"turnaround": 0.5, "ramp": 10.0})
    began = [round(begin, 6) for begin, _, _ in plans]
    # the first client at 0, again 0.5 s after 1.4, again; the second would begin at 10
    assert began == [0.0, 1.9, 3.8, 5.7]
    assert [round(o.arrival, 6) for o in result.outcomes] == began
    for name in ("turnaround", "ramp"):
        with pytest.raises(ValueError, match=f"{name}=-1: need seconds, 0 or more"):
            run(trace, concurrency=2, closed={name: -1})


def test_a_request_that_could_never_be_served_is_refused_or_counted():
    trace = [TraceRequest(0.0, 4, 2), TraceRequest(1.0, 300, 2), TraceRequest(2.0, 4, 2)]
    with pytest.raises(TraceError, match=r"request 1: 302 tokens: need at most 252"):
        run(trace)
    result, _ = run(trace, skip=True)
    assert result.skipped.count == 1 and len(result.outcomes) == 2
    with pytest.raises(
        TraceError, match=r"request 1: 300 \+ 2 tokens: need at most max_model_len=100"
    ):
        run(trace, max_model_len=100, num_blocks=600)


def test_a_step_outside_the_cost_ends_the_simulation_by_name():
    cost = LinearCost({"step": 1.0}, "a card", hull={"tokens": (1, 8)})
    with pytest.raises(CostError, match=r"tokens=9: the cost was fitted on 1 to 8 \(a card\)"):
        run([TraceRequest(0.0, 9, 1)], cost)


def test_what_is_not_proved_is_refused():
    for wrong in ({"drafts": Drafts(2, 0.5)}, {"max_loras": 2}):
        with pytest.raises(
            ValueError, match=r"drafts, adapters and gates are simulated at 0\.22\.1 alone"
        ):
            run([], release="0.33.0", **wrong)
    with pytest.raises(ValueError, match="max_loras with drafts"):
        run([], drafts=Drafts(2, 0.5), max_loras=1)
    with pytest.raises(ValueError, match=r"release='0\.1\.0'"):
        run([], release="0.1.0")
    with pytest.raises(ValueError, match="acceptance=2"):
        Drafts(2, 2)


def test_priorities_decide_under_the_priority_policy():
    trace = [TraceRequest(0.0, 8, 4, priority=5), TraceRequest(0.0, 8, 4, priority=1)]
    result, _ = run(trace, policy="priority", max_num_seqs=1)
    assert [o.number for o in result.outcomes] == [1, 0]


def test_every_token_of_a_trace_is_said_once():
    draw = random.Random(2)
    trace = [TraceRequest(n * 0.3, draw.randint(1, 30), draw.randint(1, 30)) for n in range(60)]
    result, plans = run(trace, num_blocks=40, async_scheduling=True)
    once = sum(o.prompt_len + o.output_len - 1 - o.cached_tokens for o in result.outcomes)
    assert sum(sum(c.values()) for *_, c in plans) == once + result.recomputed_tokens
    assert sum(result.gap_counts) == sum(o.output_len - 1 for o in result.outcomes)
    assert Counter(o.number for o in result.outcomes) == Counter(range(60))


def test_a_fitted_cost_drives_the_clock():
    _, plans = run([TraceRequest(0.0, 10, 30)])
    timed = []
    for begin, end, counts in plans:
        work = StepWork()
        for count in counts.values():
            work.add(count, 0)
        timed.append((work, end - begin))
    cost = fit(timed, "itself", ["tokens"])
    again, _ = run([TraceRequest(0.0, 10, 30)], cost)
    assert again.duration == pytest.approx(2.0 + 29 * 1.1)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_steady_step_comes_to_what_a_look_at_each_request_finds(monkeypatch, async_scheduling):
    """Most steps repeat the one before; every number is that of the long way, to the last bit."""
    draw = random.Random(18)
    trace = [
        TraceRequest(0.9 * i, draw.randint(1, 40), draw.randint(1, 30), lora=draw.randint(0, 2))
        for i in range(40)
    ]  # fmt: skip
    cost = LinearCost({"step": 0.7, "tokens": 0.013, "decode_context": 1e-4}, "made up")
    found = []
    for steady in (True, False):
        if not steady:
            monkeypatch.setattr(_Run, "_work_of", lambda self, plan: (work_of(plan), False))
        knobs = {"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 24,
                 "async_scheduling": async_scheduling}  # fmt: skip
        simulator = Simulator(EngineConfig.of(knobs), cost, max_loras=1)
        works: list[StepWork] = []
        simulator.observers.append(lambda begin, end, plan, work: works.append(work))  # noqa: B023
        found.append((simulator.run(trace), works))
    assert found[0] == found[1] and found[0][0].preemptions
