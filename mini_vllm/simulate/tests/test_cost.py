"""What a step costs: fitted, bounded, refused."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict

import numpy as np
import pytest

from conformance.real_core.places import tree_of, why_not
from labkit.modules import load_module
from mini_vllm.simulate.cost import (
    CAPTURE_SIZES,
    CostError,
    LinearCost,
    StepWork,
    error_of,
    fit,
    load_cost,
    nonnegative_least_squares,
    padded_size,
)
from mini_vllm.simulate.steps import read_steps

TRUTH = {"step": 5e-3, "tokens": 2e-5, "prefill_pairs": 1e-9, "decode_context": 4e-8}


def steps(count: int = 200, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    draw = np.random.default_rng(5)
    cost = LinearCost(TRUTH, "made up")
    found = []
    for _ in range(count):
        work = StepWork()
        for _ in range(int(draw.integers(1, 30))):
            work.add(1, int(draw.integers(1, 4000)))
        if draw.random() < 0.5:
            work.add(int(draw.integers(2, 2000)), int(draw.integers(0, 2000)))
        found.append((work, cost.seconds(work) * float(1 + noise * draw.standard_normal())))
    return found


def test_work_counts_pairs_of_prefills_and_keys_of_decodes():
    work = StepWork()
    work.add(3, 10)  # queries at 10, 11, 12 read 11, 12 and 13 keys
    work.add(1, 7)
    assert (work.tokens, work.requests) == (4, 2)
    assert (work.prefill_pairs, work.decode_context) == (11 + 12 + 13, 8)


def test_a_batch_is_padded_to_a_captured_size():
    assert [padded_size(n) for n in (1, 3, 8, 9, 256, 257, 513)] == [1, 4, 8, 16, 256, 272, 513]
    assert CAPTURE_SIZES[-1] == 512


def test_a_fit_finds_the_prices_that_made_the_times():
    cost = fit(steps(), "exact")
    assert cost.terms == pytest.approx(TRUTH, rel=1e-6)
    assert error_of(cost, steps())["p95"] < 1e-9
    assert cost.bands["decode"] == pytest.approx((1.0, 1.0))


@pytest.mark.slow
def test_noise_widens_the_bands_and_moves_no_price_far():
    cost = fit(steps(2000, noise=0.05), "noisy")
    assert cost.terms["tokens"] == pytest.approx(TRUTH["tokens"], rel=0.1)
    low, high = cost.bands["prefill"]
    assert 0.88 < low < 0.96 and 1.04 < high < 1.12


def test_no_price_is_negative_where_plain_least_squares_has_one():
    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    target = np.array([3.0, 2.0, 1.0])
    assert np.linalg.lstsq(table, target, rcond=None)[0][1] < 0
    assert nonnegative_least_squares(table, target) == pytest.approx([2.0, 0.0])


def test_the_solution_meets_the_conditions_of_an_optimum():
    draw = np.random.default_rng(3)
    for _ in range(50):
        table, target = draw.standard_normal((20, 6)), draw.standard_normal(20)
        x = nonnegative_least_squares(table, target)
        slope = table.T @ (target - table @ x)
        assert (x >= 0).all() and (slope <= 1e-8).all() and abs(slope @ x) < 1e-8


def test_outside_of_what_was_timed_a_cost_refuses_by_name():
    cost = fit(steps(), "one machine")
    far = StepWork()
    far.add(100_000, 0)
    with pytest.raises(CostError, match=r"tokens=100000: the cost was fitted on .*one machine"):
        cost.seconds(far)
    assert error_of(cost, [(far, 1.0)])["refused"] == 1


def test_a_cost_survives_its_file(tmp_path):
    cost, path = fit(steps(), "one machine", host=1e-4), tmp_path / "cost.json"
    cost.save(path)
    assert load_cost(str(path)) == cost


def test_a_cost_can_be_spelled_out_and_says_so():
    cost = load_cost("step=6e-3,tokens=1e-5,host=2e-4")
    assert (cost.terms, cost.host) == ({"step": 6e-3, "tokens": 1e-5}, 2e-4)
    assert "made up" in cost.source
    work = StepWork()
    work.add(100, 0)
    assert cost.seconds(work) == pytest.approx(7e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step=x", "'step=x': need NAME=SECONDS"),
        ("steps=1", r"terms\['steps'\]: need one of step, tokens"),
        ("step=-1", "step=-1.0: need seconds, 0 or more"),
        ("step=nan", "step=nan: need seconds"),
        ("nowhere.json", "No such file"),
    ],
)
def test_what_is_no_cost_is_refused(text, said):
    with pytest.raises(CostError, match=said):
        load_cost(text)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"cost": 1}', '{"cost": 1, "terms": {"step": "x"}, "source": ""}', "{"]
)
def test_a_file_that_is_no_cost_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(CostError, match=r"cost\.json|step='x'"):
        load_cost(str(path))


def test_a_fit_wants_enough_steps_and_times_above_zero():
    with pytest.raises(CostError, match="3 steps: need at least 12 for 3 features"):
        fit(steps(3), "few")
    with pytest.raises(CostError, match="timed holds a step of 0 seconds"):
        fit([(work, 0.0) for work, _ in steps()], "none")
    with pytest.raises(CostError, match=r"features=\['colour'\]: need some of tokens"):
        fit(steps(), "x", ["colour"])


def test_a_models_file_gives_its_decodes_and_prefills(tmp_path):
    arm = {
        "config": {"architectures": ["SomeForCausalLM"]},
        "decode_ms": {"1": [6.0], "3": [6.5]}, "prefill": {"2x100": [0.02]},
    }  # fmt: skip
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"device": "a card", "vllm": "0.22.1", "arms": {"bf16": arm}}))
    found = read_steps(path, arm="bf16")
    assert found.source == "a card, vLLM 0.22.1, bf16, SomeForCausalLM"
    assert [(w.tokens, w.prefill_pairs, round(s, 4)) for w, s in found.steps] == [
        (1, 0, 0.006), (3, 0, 0.0065), (200, 10_100, 0.02),
    ]  # fmt: skip
    with pytest.raises(CostError, match=r"arm='fp8': .* has bf16"):
        read_steps(path, arm="fp8")
    path.write_text('{"arms": {"bf16": {}}}')
    with pytest.raises(CostError, match="not a models file"):
        read_steps(path, arm="bf16")


def test_a_file_of_vllm_bench_forward_gives_its_cases_back(tmp_path, monkeypatch):
    """The cases are parsed and written by the release's own code; the times are made up."""
    if reason := why_not("0.33.0"):
        pytest.skip(reason)
    source = tree_of("0.33.0") / "vllm" / "benchmarks" / "forward" / "shapes.py"
    monkeypatch.setitem(sys.modules, "regex", re)  # it parses the cases' texts, nothing more
    shapes = load_module(source)
    texts = [f"d{n}={n}*1@{c}" for n in (1, 2, 4, 8, 16) for c in (64, 512, 4096)]
    texts += [f"p{n}={n}" for n in (32, 128, 512, 2048)] + ["mix=256@512c,8*1@512", "v=4*4@128:3"]
    rows, cost = [], LinearCost(TRUTH, "made up")
    for text in texts:
        case = shapes.parse_case(text)
        work = StepWork()
        for each in case.requests:
            work.add(each.query_len, each.prefix_len)
        asked = [asdict(each) for each in case.requests]
        rows.append({"case": case.name, "requests": asked, "median_us": 1e6 * cost.seconds(work)})
    path = tmp_path / "forward.json"
    path.write_text(json.dumps(rows, indent=2))
    found = read_steps(path)
    assert [work.tokens for work, _ in found.steps[:3]] == [1, 1, 1]
    assert found.steps[-1][0].drafts == 12 and found.steps[-1][0].requests == 4
    assert dict(fit(found.steps, "forward").terms) == pytest.approx(TRUTH, rel=1e-6)
    path.write_text('[{"case": "a"}]')
    with pytest.raises(CostError, match="not a forward file"):
        read_steps(path)
