"""The laboratory's rules on small cases, and that the committed results still come out."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from course.files import load_module
from labkit.modules import sibling
from mini_vllm import ToyModel
from mini_vllm.scheduler import Scheduler

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    return load_module(HERE / f"{name}.py")


lab = load("policy_lab")
cost = lab.load(HERE / "measured" / "step-cost.json")
STEP = lab.StepCost(base=1.0, token=0.0, context=0.0, pair=0.0)
"""Every step takes a second, so that times are counts."""


def job(name: str, arrival: float, prompt_len: int, max_tokens: int, priority: int = 0):
    letter = ord(name[0])
    return lab.Job(name, "chat", arrival, (letter,) * prompt_len, max_tokens, priority)


# ------------------------------------------------------------------ cost


def test_fit_finds_the_line_it_was_given():
    rng = np.random.default_rng(0)
    rows = [
        {"tokens": float(t), "context": float(c), "seconds": 1e-3 + 2e-5 * t + 3e-7 * c}
        for t, c in rng.integers(1, 500, (40, 2))
    ]
    solution, error = sibling(__file__, "step_cost").fit(rows, ("tokens", "context"))
    assert solution == pytest.approx([1e-3, 2e-5, 3e-7])
    assert error == {"median_error": 0.0, "p95_error": 0.0, "r2": 1.0}


def test_the_committed_fit_is_that_of_its_own_steps():
    saved = json.loads((HERE / "measured" / "step-cost.json").read_text(encoding="utf-8"))
    fit = sibling(__file__, "step_cost").fit
    solution, error = fit(saved["steps"], ("tokens", "context", "pairs"))
    assert solution == pytest.approx(list(saved["cost"].values()))
    assert error == saved["residual"]
    assert saved["residual"]["median_error"] < saved["three_terms"]["residual"]["median_error"]


def test_shapes_are_measured_as_they_are_computed():
    rows = sibling(__file__, "step_cost").measure(4, model=ToyModel(257))
    for row in rows:
        assert row["context"] >= row["tokens"] >= 2
        assert row["pairs"] >= row["context"]


def test_a_floor_hides_small_batches():
    assert lab.H100_8B.seconds(lab.shape_of(_empty())) == pytest.approx(0.5e-3 + 16e9 / 3.35e12)
    ridge = lab.H100_8B.floor / lab.H100_8B.token
    assert ridge == pytest.approx(495e12 / 3.35e12)


def _empty():
    from mini_vllm import SchedulerOutput

    return SchedulerOutput()


# ------------------------------------------------------------------ workload


def test_a_rate_changes_only_the_times():
    slow, fast = (lab.jobs_of(lab.LAPTOP.at(rate), 3) for rate in (1.0, 4.0))
    assert [j.prompt for j in slow] == [j.prompt for j in fast]
    assert [j.arrival / 4 for j in slow] == pytest.approx([j.arrival for j in fast])


def test_the_arrival_rate_and_the_shared_prefixes_are_as_asked():
    from dataclasses import replace

    jobs = lab.jobs_of(replace(lab.LAPTOP.at(10.0), num_requests=4000), 0)
    assert jobs[-1].arrival / 4000 == pytest.approx(0.1, rel=0.05)
    chats = [j for j in jobs if j.kind == "chat"]
    assert len(chats) / 4000 == pytest.approx(0.9, abs=0.02)
    assert len({j.prompt[:48] for j in chats}) == 2
    assert all(300 <= len(j.prompt) <= 900 for j in jobs if j.kind == "document")


def test_shares_and_rates_are_checked():
    from dataclasses import replace

    with pytest.raises(ValueError, match="add up to 1"):
        lab.jobs_of(replace(lab.LAPTOP, kinds=lab.LAPTOP.kinds[:1]), 0)
    with pytest.raises(ValueError, match="rate=0"):
        lab.jobs_of(lab.LAPTOP.at(0), 0)


# ------------------------------------------------------------------ simulation


def test_times_of_a_run_by_hand():
    jobs = [job("a", 0.0, 20, 3), job("b", 0.5, 8, 2)]
    run = lab.simulate(lab.Policy(budget=16).build(64, 8), jobs, STEP)
    # a: 16, then 4 and the first token; b arrives in step 1 and gets 8 in step 2.
    assert run["times"] == {"a": [2.0, 3.0, 4.0], "b": [2.0, 3.0]}
    assert (run["end"], run["scheduled"], run["steps"], run["recomputed"]) == (4.0, 31, 4, 0)


def test_idle_time_passes():
    run = lab.simulate(lab.Policy().build(64, 8), [job("a", 5.0, 4, 1), job("b", 9.0, 4, 1)], STEP)
    assert run["times"] == {"a": [6.0], "b": [10.0]}


def test_static_batching_admits_into_an_empty_engine_only():
    jobs = [job("a", 0.0, 4, 3), job("b", 0.5, 4, 1)]
    policy = lab.POLICIES["static batching"]
    assert lab.simulate(policy.build(64, 8), jobs, STEP)["times"]["b"] == [4.0]
    assert lab.simulate(lab.Policy().build(64, 8), jobs, STEP)["times"]["b"] == [2.0]


def test_prompts_first_stalls_the_decodes():
    jobs = [job("a", 0.0, 4, 3), job("b", 0.5, 4, 1), job("c", 1.5, 4, 1)]
    policy = lab.POLICIES["prompts first, whole"]
    run = lab.simulate(policy.build(64, 8), jobs, STEP)
    assert run["times"] == {"a": [1.0, 4.0, 5.0], "b": [2.0], "c": [3.0]}


@pytest.mark.parametrize("name", lab.MEMORY)
def test_small_pools_waste_only_where_they_preempt(name):
    jobs = [job(letter, 0.0, 8, 20) for letter in "abcd"]
    scheduler = lab.MEMORY[name].build(12, 8, block_size=4)
    run = lab.simulate(scheduler, jobs, STEP)
    assert [len(line) for line in run["times"].values()] == [20] * 4
    assert scheduler.kv.block_pool.get_num_free_blocks() == 11
    if name == "reserve up front":
        assert (run["preemptions"], run["recomputed"], run["scheduled"]) == (0, 0, 4 * 27)
    else:
        assert run["preemptions"] > 0
        assert run["scheduled"] + run["cached"] >= 4 * 27 + run["recomputed"]
        assert run["recomputed"] > 0


def test_upstreams_policies_are_the_engines_own_scheduler():
    for name in ("FCFS, whole prompts", "FCFS, budget 512", "priority, budget 512"):
        assert type(lab.POLICIES[name].build(64, 8)) is Scheduler


def test_quantiles_and_intervals():
    assert lab.quantile(list(range(1, 101)), 0.99) == 99
    assert lab.quantile([3, 1, 2], 0.5) == 2
    assert lab.quantile([], 0.5) == 0.0
    mean, low, high = lab.interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and 1.0 <= low < mean < high <= 4.0
    assert lab.interval([1.0, 2.0, 3.0, 4.0]) == [mean, low, high]


def test_committed_results_come_out_again():
    saved = json.loads((HERE / "measured" / "policies.json").read_text(encoding="utf-8"))
    policy, rate = lab.POLICIES["FCFS, budget 128"], 40
    workload = lab.replace(lab.LAPTOP.at(rate), num_requests=saved["requests"])
    got = lab.over_seeds(lambda: policy.build(4096, 64), workload, cost, range(saved["seeds"]))
    want = saved["compare"][str(rate)]["FCFS, budget 128"]
    assert {name: value[0] for name, value in got.items()} == pytest.approx(
        {name: value[0] for name, value in want.items()}
    )


# ------------------------------------------------------------------ the real engine's steps


def test_steps_are_kept_by_their_medians():
    real = load("real_steps")
    repeats = [[[9, took, 0.0], [2, 1.0, 1.0]] for took in (5.0, 90.0, 4.0)]
    assert real.typical(repeats) == [[9, 5.0, 0.0], [2, 1.0, 1.0]]


def test_repetitions_that_were_scheduled_differently_have_no_median():
    with pytest.raises(ValueError, match="step 1 differs between repetitions"):
        load("real_steps").typical([[[9, 5.0, 0], [2, 1.0, 1]], [[9, 5.0, 0], [3, 1.0, 1]]])


def test_the_table_counts_the_victims_steps_only():
    real = load("real_steps")
    saved = {
        "outputs": 4,
        "steps": {"0, 64": [[9, 5.0, 0], [3, 2.0, 1], [2, 1.0, 0], [2, 99.0, 0]]},
    }
    (line,) = real.table(saved).splitlines()[1:]
    assert " ".join(line.split()) == "0, 64 9: 5.0 ms 3: 2.0 ms 2.7 ms 7 ms"
