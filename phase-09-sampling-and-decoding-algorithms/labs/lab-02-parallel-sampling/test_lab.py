"""What lab 09-02 pins: the arithmetic of n answers, held against an engine that gives them."""

from __future__ import annotations

import pytest

from labkit import refused, same
from mini_vllm import LLMEngine, SamplingParams

ROWS = (
    # P, L, shared, prefill, without, hit rate %, blocks, without, forward, without
    (8, 24, 0, 32, 32, 0.0, 8, 8, 124, 124),
    (16, 24, 0, 64, 64, 0.0, 12, 12, 156, 156),
    (17, 24, 1, 20, 68, 70.6, 9, 12, 112, 160),
    (32, 24, 1, 80, 128, 37.5, 13, 16, 172, 220),
    (65, 24, 4, 68, 260, 73.8, 12, 24, 160, 352),
    (2000, 100, 124, 2048, 8000, 74.4, 156, 528, 2444, 8396),
)


def driven(P, lengths, caching=True):
    """An engine that serves the children, seen from outside: plans, and blocks per step."""
    engine = LLMEngine("toy", block_size=16, enable_prefix_caching=caching)
    names = [f"r{index}" for index in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=length, ignore_eos=True)
        engine.add_request([7] * P, params, request_id=name)
    plans, blocks = [], []

    def note(plan):
        plans.append([plan.num_scheduled_tokens.get(name, 0) for name in names])
        kv = engine.scheduler.kv
        blocks.append(len({block for name in names for block in kv.get_block_ids(name)}))

    engine.observers.append(note)
    while engine.has_unfinished_requests():
        engine.step()
    return plans, blocks


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=[f"P={row[0]}" for row in ROWS])
def test_four_answers_by_hand(lab, row):
    P, L, shared, prefill, prefill_off, rate, blocks, blocks_off, forward, forward_off = row
    on, off = lab.parallel_cost(P, L, 4), lab.parallel_cost(P, L, 4, caching=False)
    where = f"P = {P}, L = {L}, n = 4, blocks of 16"
    same(
        (on.shared_blocks, off.shared_blocks),
        (shared, 0),
        f"{where}: whole blocks before the last prompt token, floor((P - 1) / 16), and 0 without "
        "caching (N1)",
    )
    same((on.prefill_tokens, off.prefill_tokens), (prefill, prefill_off), f"{where}: prefill")
    same((round(on.hit_rate * 100, 1), off.hit_rate), (rate, 0.0), f"{where}: hits over lookups")
    same(
        (on.kv_blocks, off.kv_blocks),
        (blocks, blocks_off),
        f"{where}: the last token is never fed back, so a child holds P + L - 1 tokens",
    )
    same(
        (on.forward_tokens, off.forward_tokens),
        (forward, forward_off),
        f"{where}: prefill, and L - 1 tokens of each child",
    )


def test_one_answer_is_neutral(lab):
    for P, L in ((8, 1), (65, 24), (16, 16)):
        on, off = lab.parallel_cost(P, L, 1), lab.parallel_cost(P, L, 1, caching=False)
        same(
            (on.prefill_tokens, on.hit_rate, on.kv_blocks, on.forward_tokens),
            (P, 0.0, off.kv_blocks, P + L - 1),
            f"n = 1, P = {P}, L = {L}: nobody to share with, nothing lost",
        )


def test_other_block_sizes(lab):
    for block, shared, prefill in ((1, 64, 68), (32, 2, 68), (64, 1, 68), (65, 0, 260)):
        got = lab.parallel_cost(65, 24, 4, block)
        same(
            (got.shared_blocks, got.prefill_tokens),
            (shared, prefill),
            f"65 tokens, blocks of {block}: the remainder has 1 to {block} tokens",
        )


def test_three_quarters_is_a_limit(lab, record_property):
    rates = [lab.parallel_cost(P, 1, 4).hit_rate for P in (17, 129, 1025, 100_001)]
    assert rates == sorted(rates) and 0.7499 < rates[-1] < 0.75, (
        "n = 4: the hit rate rises towards (n - 1) / n and never reaches it: the first child finds "
        f"nothing, and each other one computes a remainder\nexpected below .75\ncame     {rates}"
    )
    record_property("measured.rate", round(lab.parallel_cost(32, 24, 4).hit_rate, 3))


def test_impossible_sizes_are_refused(lab):
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0), (-5, 3, 2)):
        refused(lambda a=arguments: lab.parallel_cost(*a), f"parallel_cost{arguments}")


# --- children -------------------------------------------------------------------------------------


def test_children_have_ids_and_seeds_of_their_own(lab):
    wish = lab.Params(n=4, temperature=0.8, seed=7, max_tokens=24)
    children = lab.fan_out("cmpl-1", wish)
    same(
        [name for name, _ in children],
        ["0_cmpl-1", "1_cmpl-1", "2_cmpl-1", "3_cmpl-1"],
        "ids by index, before the request's own",
    )
    same(
        [params.seed for _, params in children],
        [7, 8, 9, 10],
        "seed + index: with one seed for all, all four would say the same (N2)",
    )
    same(
        {(params.n, params.temperature, params.max_tokens) for _, params in children},
        {(1, 0.8, 24)},
        "each child asks for one answer; the rest is the parent's",
    )
    same(wish, lab.Params(n=4, temperature=0.8, seed=7, max_tokens=24), "the parent is unchanged")
    zero = lab.fan_out("r", lab.Params(n=2, seed=0))
    same([params.seed for _, params in zero], [0, 1], "0 is a seed like any other")


def test_without_a_seed_no_child_has_one(lab):
    children = lab.fan_out("r", lab.Params(n=3))
    same([params.seed for _, params in children], [None] * 3, "three generators of chance")
    cool = lab.fan_out("r", lab.Params(n=2, temperature=0.01))
    same(len(cool), 2, "a small temperature is none of 0: two children")


def test_one_answer_is_the_request_itself(lab):
    for wish in (lab.Params(seed=7), lab.Params(temperature=0.0)):
        same(lab.fan_out("r", wish), [("r", wish)], "n = 1: no children, the request's own id")


def test_impossible_fans_are_refused(lab):
    for n, temperature in ((0, 1.0), (-1, 1.0), (2, 0.0), (0, 0.0)):
        wish = lab.Params(n=n, temperature=temperature)
        refused(
            lambda wish=wish: lab.fan_out("r", wish),
            f"n = {n} at temperature {temperature} (greedy children would all say the same)",
        )


# --- an engine ------------------------------------------------------------------------------------


def test_the_trace_of_four_siblings(lab, record_property):
    trace = lab.run_mini(4, 65, [2, 4, 8, 16])
    same(
        trace.plans[:3],
        [[65, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]],
        "the first child computes the prompt; in the same step the others find four blocks of it "
        "and compute one token each; child 0 ends with its second token",
    )
    same(len(trace.plans), 16, "steps, until the longest has said 16 tokens")
    same(
        trace.refs,
        [4, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 0],
        "holders of the prompt's first block after each step: it is freed when the last child "
        "ends, and not when the first does (N3)",
    )
    record_property("measured.held", trace.refs.count(1))
    same(trace.blocks[:2], [8, 8], "4 shared blocks and one more for each child")


def test_caching_off_computes_the_prompt_four_times(lab):
    trace = lab.run_mini(4, 65, [2, 2, 2, 2], caching=False)
    same(trace.plans, [[65] * 4, [1] * 4], "without a cache each child computes all of the prompt")
    same((trace.refs, trace.blocks), ([1, 0], [20, 20]), "and holds five blocks nobody shares")


@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_the_engine_costs_what_you_say(lab, caching):
    for P, L in ((1, 1), (8, 24), (16, 9), (17, 24), (32, 5), (33, 16), (65, 24), (48, 17)):
        for n in (1, 2, 4):
            cost = lab.parallel_cost(P, L, n, 16, caching)
            trace = lab.run_mini(n, P, [L] * n, caching)
            plans, blocks = driven(P, [L] * n, caching)
            where = f"P = {P}, L = {L}, n = {n}, caching {caching}"
            same((trace.plans, trace.blocks), (plans, blocks), f"{where}: plans and blocks")
            same(
                (cost.prefill_tokens, cost.forward_tokens, cost.kv_blocks),
                (sum(plans[0]), sum(map(sum, plans)), blocks[-1]),
                f"{where}: prefill and forward tokens and last blocks, counted on the engine",
            )


def test_lengths_are_one_per_child(lab):
    for lengths in ([], [3], [3, 3, 3]):
        refused(lambda lengths=lengths: lab.run_mini(2, 8, lengths), f"two children, {lengths}")


def test_uneven_siblings(lab):
    for P, lengths in ((20, [5, 1, 3]), (33, [1, 2]), (7, [4, 4, 1, 9])):
        trace = lab.run_mini(len(lengths), P, lengths)
        plans, blocks = driven(P, lengths)
        where = f"P = {P}, lengths {lengths}"
        same(trace.plans, plans, f"{where}: tokens of each child in each step, 0 once it has ended")
        same(trace.blocks, blocks, f"{where}: distinct blocks in each step")
        alive = [sum(length > step + 1 for length in lengths) for step in range(max(lengths))]
        expected = alive if P > 16 else [int(lengths[0] > s + 1) for s in range(max(lengths))]
        same(
            trace.refs,
            expected,
            f"{where}: holders of child 0's first block; below 17 tokens nothing is shared",
        )
