"""What lab 03-05 pins: the exact size of every step a stream sits in, and its tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mini_vllm
from labkit import shipped_model
from mini_vllm import EngineParts, KVCacheManager, LLMEngine, SamplingParams

REAL_STEPS = Path(__file__).resolve().parents[2] / "experiments" / "measured" / "real-steps.json"


# --- predicted -----------------------------------------------------------------------------------


COSTS = [
    ((0,), [257, 2] + [1] * 13, "256 + 1 in one step, the second token of the prompt, alone"),
    ((32,), [33] * 8 + [2] + [1] * 6, "8 chunks of 32, each beside one decode"),
    ((64,), [65] * 4 + [2] + [1] * 10, "4 chunks"),
    ((128,), [129, 129, 2] + [1] * 12, "2 chunks"),
    ((256,), [257, 2] + [1] * 13, "a threshold of the prompt's own length binds nothing"),
    ((16,), [17] * 15, "16 chunks and 15 steps: the stream ends first"),
    ((100,), [101, 101, 57, 2] + [1] * 11, "100, 100 and the 56 that are left"),
    ((0, 256, 16, 64), [64] * 4 + [5, 2] + [1] * 9, "the budget cuts, and the decode is in it"),
    ((32, 256, 16, 20), [20] * 13 + [10, 2], "the budget is below the threshold"),
    ((32, 40, 4), [33, 9, 2], "3 decode steps for 4 outputs"),
]


@pytest.mark.parametrize(("args", "expected", "why"), COSTS, ids=[case[-1] for case in COSTS])
def test_costs_by_hand(lab, args, expected, why):
    came = lab.predict_costs(*args)
    assert came == expected, (
        f"predict_costs(threshold, long_prompt_len, max_tokens, budget) of {args}: {why}.\n"
        f"expected {expected}\ncame     {came}"
    )


# --- measured ------------------------------------------------------------------------------------


class Spy(mini_vllm.Scheduler):
    """The engine's scheduler, and all its plans in a list that belongs to the test."""

    plans: list[dict[str, int]]

    def schedule(self):
        output = super().schedule()
        self.plans.append(dict(output.num_scheduled_tokens))
        return output


def spied(lab, threshold: int, **kwargs: Any) -> tuple[list[int], list[dict[str, int]]]:
    """Costs that the learner measured, and the plans of all steps."""
    spy = type("Spy", (Spy,), {"plans": []})
    parts = EngineParts(scheduler=spy)
    costs, _ = lab.decode_step_costs(threshold, model="toy", parts=parts, **kwargs)
    return costs, spy.plans


def test_unchunked_prefill_spikes_one_decode_step(lab):
    costs, _ = spied(lab, 0)
    assert costs == [257, 2] + [1] * 13, (
        "one step holds the whole prompt of 256 and the victim's token, the next a decode each; "
        "then the victim is alone.\n"
        f"expected {[257, 2] + [1] * 13}\ncame     {costs}\n"
        "All ones: those are the victim's own tokens, not the step's. A 4 in front: the victim's "
        "prefill. A third step above 1: the long prompt has more than 2 outputs."
    )


def test_chunked_prefill_caps_the_spike(lab):
    costs, _ = spied(lab, 32)
    assert costs == [33] * 8 + [2] + [1] * 6, (
        "eight steps of 33 instead of one of 257.\n"
        f"expected {[33] * 8 + [2] + [1] * 6}\ncame     {costs}"
    )


@pytest.mark.parametrize("threshold", [0, 1, 16, 50, 64, 256, 300])
@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_measured_equals_predicted(lab, threshold, budget):
    for length, max_tokens in ((256, 16), (30, 5), (16, 30)):
        costs, plans = spied(
            lab, threshold, long_prompt_len=length, max_tokens=max_tokens,
            max_num_batched_tokens=budget,
        )  # fmt: skip
        want = [sum(plan.values()) for plan in plans if next(iter(plans[0])) in plan]
        want = want[len(want) - (max_tokens - 1) :]
        where = f"threshold {threshold}, budget {budget}, prompt {length}, {max_tokens} outputs"
        assert costs == want, (
            f"{where}: the tokens of all requests in each of the victim's {max_tokens - 1} decode "
            f"steps, by the plans themselves.\nexpected {want}\ncame     {costs}"
        )
        came = lab.predict_costs(threshold, length, max_tokens, budget)
        assert came == costs, f"{where}: predicted\nexpected {costs}\ncame     {came}"


def test_the_steps_of_the_real_engine(lab):
    recorded = json.loads(REAL_STEPS.read_text(encoding="utf-8"))
    for setting, steps in recorded["steps"].items():
        threshold, budget = map(int, setting.split(", "))
        expected = [tokens for tokens, _, _ in steps[: recorded["outputs"] - 1]]
        came = lab.predict_costs(threshold, recorded["long"], recorded["outputs"], budget)
        assert came == expected, (
            f"vLLM v0.22.1 itself, threshold {threshold}, budget {budget}: a stream of "
            f"{recorded['outputs']} outputs, and a prompt of {recorded['long']} after its first. "
            f"Tokens in each of the stream's steps.\nexpected {expected}\ncame     {came}"
        )


def test_chunks_move_work_and_save_none(lab, record_property):
    sums = {threshold: sum(spied(lab, threshold)[0]) for threshold in (0, 32, 64, 128)}
    assert set(sums.values()) == {272}, (
        "4 thresholds, 15 steps each: 15 tokens of the victim, 256 of the prompt, and its one "
        f"decode, 272 in all, 18.13 a step.\nexpected 272 each\ncame     {sums}"
    )
    record_property("measured.longest", max(lab.storm_costs(32, model="toy")[0]))


def test_decode_stream_is_never_starved(lab):
    for threshold in (0, 16, 32):
        costs, plans = spied(lab, threshold)
        victim = next(iter(plans[0]))
        last = max(number for number, plan in enumerate(plans) if victim in plan)
        gaps = [number for number, plan in enumerate(plans[:last]) if victim not in plan]
        assert not gaps and len(costs) == 15 == last, (
            f"threshold {threshold}: running requests come first, so the victim gets a token in "
            "every step from its own prefill to its end; 16 outputs are that and 15 decode steps.\n"
            f"expected no gap, 15 costs, 16 steps\ncame     gaps {gaps}, {len(costs)} costs, "
            f"{last + 1} steps"
        )


# --- what does not change ------------------------------------------------------------------------


@cache
def undisturbed() -> list[int]:
    """What the victim says when it is alone."""
    engine = LLMEngine(model=shipped_model())
    (result,) = engine.generate(["Why?"], SamplingParams(max_tokens=16, ignore_eos=True))
    return result.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 40}, {"block_size": 4}])
def test_chunking_does_not_change_the_decode_streams_output(lab, settings):
    for threshold in (0, 30, 64):
        _, came = lab.decode_step_costs(threshold, model=shipped_model(), **settings)
        assert came == undisturbed(), (
            f"threshold {threshold}, {settings}: the shipped model beside a prompt of 256, and "
            "alone. Company in the batch costs the stream time and changes no token.\n"
            f"expected {undisturbed()}\ncame     {came}"
        )


class CrossedKV(KVCacheManager):
    """The planted bug: another request is given the first request's first block as its own."""

    def get_block_ids(self, request_id):
        return [block.block_id for block in self.get_blocks(request_id)]

    def allocate_slots(self, request, num_new_tokens, new_computed_blocks=None):
        blocks = super().allocate_slots(request, num_new_tokens, new_computed_blocks)
        first, *others = self.req_to_blocks.values()
        for table in others:
            table[0] = first[0]
        return blocks


def test_a_crossed_block_would_be_seen(lab):
    parts = EngineParts(kv_cache_manager=CrossedKV)
    _, came = lab.decode_step_costs(
        32, model=shipped_model(), enable_prefix_caching=False, parts=parts
    )
    assert came[0] == undisturbed()[0] and came != undisturbed(), (
        "this cache lets the long prompt write over the victim's first block, K and V of its own "
        "prompt. From then on the victim must say something else: else the comparison proves "
        "nothing about the sound cache. Are the victim's ids returned, and parts and model handed "
        f"to the engine?\nalone {undisturbed()}\ncame  {came}"
    )
    _, crossed = lab.decode_step_costs(32, model="toy", enable_prefix_caching=False, parts=parts)
    _, sound = lab.decode_step_costs(32, model="toy", enable_prefix_caching=False)
    assert crossed == sound, "the toy model reads no K and V and cannot see it; came other tokens"


# --- a storm -------------------------------------------------------------------------------------


def test_five_prompts_at_once(lab):
    costs, tokens = lab.storm_costs(32, model="toy")
    expected = [34, 66, 98, 130, 162, 162, 162, 162, 131, 99, 67, 35, 3, 2, 2]
    assert costs == expected, (
        "five prompts on consecutive steps, two victims: 32 more in each step until all five are "
        "in it. 5 x 32 + 2 = 162: the threshold bounds each prompt and not the step.\n"
        f"expected {expected}\ncame     {costs}"
    )
    assert [len(ids) for ids in tokens] == [16, 16], (
        f"both victims finish; came {[len(ids) for ids in tokens]} tokens"
    )


def test_the_budget_bounds_the_storm(lab):
    costs, _ = lab.storm_costs(32, model="toy", max_num_batched_tokens=64, max_tokens=30)
    expected = [34] + [64] * 17 + [35] + [34] * 5 + [7, 3, 2, 2, 2]
    assert costs == expected, (
        "the same storm under a budget of 64: no step is longer, and the storm lasts longer.\n"
        f"expected {expected}\ncame     {costs}"
    )
    costs, _ = lab.storm_costs(0, model="toy")
    expected = [258, 259, 259, 259, 259, 3] + [2] * 9
    assert costs == expected, (
        "no threshold and a large budget: each prompt in one step, beside the decode of the one "
        f"before.\nexpected {expected}\ncame     {costs}"
    )


def test_a_storm_lasts_as_long_as_any_victim(lab):
    settings = {"model": "toy", "max_num_batched_tokens": 6}
    costs, tokens = lab.storm_costs(0, 1, 2, 8, 4, **settings)
    assert costs == [6, 6, 2] and [len(ids) for ids in tokens] == [4, 4], (
        "a budget of 6 does not hold two prompts of 4: the second victim has its first token one "
        "step after the first one, and is measured one step longer. The long prompt comes when "
        "both have begun; it computes 4 tokens beside both, twice, and decodes beside the second.\n"
        f"expected [6, 6, 2] and two answers of 4\ncame     {costs} and {tokens}"
    )


def test_bounds_by_hand(lab):
    for args, expected, why in (
        ((5, 2, 32, 2048), 162, "5 x 32 + 2"),
        ((5, 2, 32, 64), 64, "the budget is lower"),
        ((1, 1, 32, 2048), 33, "one prompt, one stream"),
        ((3, 2, 0, 512), 512, "no threshold: only the budget bounds"),
        ((0, 7, 32, 2048), 7, "no prompt: one token per stream"),
        ((0, 7, 0, 2048), 7, "no prompt: the threshold does not matter"),
    ):
        came = lab.peak_bound(*args)
        assert came == expected, (
            f"peak_bound(num_prompts, num_decodes, threshold, budget) of {args}: {why}.\n"
            f"expected {expected}\ncame     {came}"
        )


def test_no_step_exceeds_the_bound(lab):
    for num_prompts in (1, 3, 6):
        for threshold in (0, 16, 40):
            for budget in (48, 150, 2048):
                costs, _ = lab.storm_costs(
                    threshold, num_prompts, 2, 200, 24, model="toy", max_num_batched_tokens=budget
                )
                # A prompt that is through decodes beside the others.
                bound = max(
                    lab.peak_bound(prefilling, 2 + num_prompts - prefilling, threshold, budget)
                    for prefilling in range(num_prompts + 1)
                )
                assert costs and max(costs) <= bound, (
                    f"{num_prompts} prompts, threshold {threshold}, budget {budget}: a step of "
                    f"{max(costs or [0])} tokens, and the bound says {bound}"
                )


# --- reported ------------------------------------------------------------------------------------


def test_percentiles_by_nearest_rank(lab):
    spike, chunks = [257, 2] + [1] * 13, [33] * 8 + [2] + [1] * 6
    for values, q, expected, why in (
        (spike, 50, 1, "rank ceil(15 x 0.50) = 8 of the sorted costs"),
        (spike, 99, 257, "rank 15: the last"),
        (chunks, 50, 33, "6 ones, a 2, and then 33 is the eighth"),
        (chunks, 99, 33, "no step is longer than 33"),
        (list(range(1, 101)), 99, 99, "of 100 values the 99th"),
        (list(range(1, 101)), 1, 1, "and the first"),
        (list(range(1, 101)), 7, 7, "the seventh; the float 100 x 0.07 is a little above 7"),
        ([5, 3, 4], 100, 5, "the largest; values come unsorted"),
        ([5, 3, 4], 34, 4, "ceil(3 x 0.34) = 2"),
    ):
        came = lab.percentile(values, q)
        assert came == expected, (
            f"percentile {q} of {values if len(values) < 20 else '1 to 100'}: {why}.\n"
            f"expected {expected}\ncame     {came}"
        )


def test_both_sides_of_the_threshold(lab):
    came = [
        (row.threshold, round(row.mean, 2), row.p50, row.worst, row.first_token)
        for row in lab.sweep([0, 16, 32, 64, 128, 256])
    ]
    expected = [
        (0, 14.53, 1, 257, 1),
        (16, 14.53, 17, 17, 16),
        (32, 14.53, 1, 33, 8),
        (64, 14.53, 1, 65, 4),
        (128, 14.53, 1, 129, 2),
        (256, 14.53, 1, 257, 1),
    ]
    assert came == expected, (
        "rows of (threshold, mean, p50, worst, steps to the long prompt's first token) for 20 "
        "outputs. The mean is blind; the worst step and the first token pull against each other.\n"
        f"expected {expected}\ncame     {came}"
    )
    (came_small,) = lab.sweep([64], 120, 20, 40)
    assert (came_small.worst, came_small.first_token) == (40, 4), (
        "120 tokens, threshold 64 under a budget of 40: the victim leaves chunks of 39, so 4 of "
        f"them.\nexpected worst 40, first token in step 4\ncame     {came_small}"
    )
