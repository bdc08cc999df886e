"""What lab 07-04 pins: loads count every pair, the slowest rank sets the step, balancing is vLLM's.

Loads of the last tests are measured: a model with experts serves requests, its router is watched.
"""

from __future__ import annotations

import numpy as np
import pytest

from conformance import parts
from labkit import moe_model, refused, same
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models.moe import ExpertLoads, observing_routing

HOT = [960, 92, 92, 92, 91, 91, 91, 91]
"""1,600 tokens, one expert each, 60 % of them to expert 0."""
CASES = parts.load("moe")
PROSE = ["The scheduler gives every request a budget of tokens", "A block that nobody uses is free"]
CODE = ["def forward(self, hidden_states):\n    return", "for block in self.free_queue:\n    if "]


def of_kind(kind):
    return [case for case in CASES if case["kind"] == kind]


def close(got, expected, why, tolerance=1e-9):
    assert abs(got - expected) <= tolerance, f"{why}\nexpected {expected}\ncame     {got}"


@pytest.fixture(scope="module")
def measured():
    """Loads [layers][experts] of a served model, for prompts of prose and of code."""
    found = {}
    for name, prompts in (("prose", PROSE), ("code", CODE)):
        engine = LLMEngine(model=moe_model(), num_blocks=64)
        counter = ExpertLoads(engine.model)
        with observing_routing(engine.model, counter):
            engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        found[name] = np.stack(list(counter.loads.values()))
    return found


# --- counting -------------------------------------------------------------------------------------


def test_loads_count_pairs(lab):
    loads = lab.expert_loads(np.array([[0, 1], [2, 3], [1, 3], [3, 0]]), 6)
    assert np.asarray(loads).tolist() == [2, 2, 1, 3, 0, 0], (
        f"four tokens, two experts each, are eight pairs; experts 4 and 5 have none and a place\n"
        f"expected [2, 2, 1, 3, 0, 0]\ncame     {loads}"
    )
    twice = np.asarray(lab.expert_loads(np.array([[3, 3], [1, 3]]), 4)).tolist()
    same(twice, [0, 1, 0, 3], "a token that names expert 3 twice is two pairs of work")
    none = np.asarray(lab.expert_loads(np.empty((0, 2), dtype=int), 3)).tolist()
    same(none, [0, 0, 0], "no tokens, no load, three experts")
    refused(lambda: lab.expert_loads(np.array([[0, 4]]), 4), "expert 4 of four")
    refused(lambda: lab.expert_loads(np.array([[0, -1]]), 4), "expert -1")


def test_imbalance_is_largest_over_mean_of_all_experts(lab):
    close(lab.imbalance(HOT), 4.8, "960 over a mean of 200")
    close(lab.imbalance([8, 8, 0, 0]), 2.0, "experts without tokens belong to the mean: 8 / 4")
    close(lab.imbalance([5, 5, 5]), 1.0, "even")
    close(lab.imbalance([0, 0]), 1.0, "no load at all is even")


def test_uniform_routing_is_nearly_balanced_and_a_hot_expert_is_not(lab, record_property):
    rng = np.random.default_rng(0)
    loads = lab.expert_loads(np.argsort(rng.random((800, 8)), axis=1)[:, :2], 8)
    got = lab.imbalance(loads)
    assert 1.0 < got < 1.3, f"1,600 random pairs on 8 experts: a little above 1, came {got}"
    loads = lab.expert_loads(np.argsort(rng.random((8, 64)), axis=1)[:, :2], 64)
    got = lab.imbalance(loads)
    assert got >= 4, (
        f"16 pairs on 64 experts: the mean is 1/4, so one pair is 4 already; came {got}"
    )
    record_property("measured.small_batch", float(got))


def test_a_step_takes_as_long_as_its_busiest_rank(lab):
    why = "linear placement: neighbours share a rank"
    same(lab.ep_step_time([5, 3, 4, 1], 2), 8, f"{why}: max(5 + 3, 4 + 1)")
    same(lab.ep_step_time([5, 3, 4, 1], 2, [0, 1, 0, 1]), 9, "0 and 2 on one rank: max(9, 4)")
    same(lab.ep_step_time([5, 3, 4, 1], 4), 5, "a rank for each expert: the largest load")
    same(lab.ep_step_time([5, 3, 4, 1], 1), 13, "one rank computes everything")
    same(
        lab.ep_step_time([1, 2, 3, 4, 5], 2), 9, "five on two ranks: the first has three, max(6, 9)"
    )
    same([lab.ep_step_time(HOT, d) for d in (2, 4, 8)], [1236, 1052, 960], "960 of 1,600 stay put")
    refused(lambda: lab.ep_step_time([1, 2], 0), "no rank")
    refused(lambda: lab.ep_step_time([1, 2], 2, [0, 2]), "rank 2 of two")


def test_capacity_drops_only_the_overflow(lab):
    loads = [100, 10, 10, 8]
    got = [lab.dropped_tokens(loads, factor) for factor in (1, 1.25, 2, 3, 3.125)]
    same(got, [68, 60, 36, 4, 0], "capacity is the factor times 32; what is beyond it is dropped")
    same(lab.dropped_tokens([6, 2, 1, 1], 1.0), 3, "a mean of 2.5 is a capacity of 3")
    same(lab.dropped_tokens(HOT, 4.8), 0, "a factor of the imbalance drops nothing")


def test_below_the_ridge_a_hot_expert_costs_little(lab):
    close(lab.ep_step_time_roofline(HOT, 8, 156), 960 / 156, "960 rows at 156 a weight-read")
    close(lab.ep_step_time_roofline([200] * 8, 8, 156), 200 / 156, "the same work, evenly")
    close(lab.ep_step_time_roofline([24, 0, 0, 0, 8, 8, 8, 8], 4, 156), 2.0,
          "decode: the hot rank reads one expert, the even ones two; reading decides")  # fmt: skip
    close(lab.ep_step_time_roofline([4, 4, 4, 4], 4, 156), 1.0, "one expert a rank")
    close(lab.ep_step_time_roofline([24, 0, 0, 9], 2, 156), 1.0, "an idle expert is not read")


# --- placement ------------------------------------------------------------------------------------


def test_experts_of_a_rank(lab):
    same(lab.expert_map(4, 1, 10, "linear").tolist(), [-1, -1, -1, 0, 1, 2, -1, -1, -1, -1],
         "ten experts on four ranks are 3, 3, 2, 2: rank 1 has 3 to 5")  # fmt: skip
    same(lab.expert_map(4, 1, 10, "round_robin").tolist(), [-1, 0, -1, -1, -1, 1, -1, -1, -1, 2],
         "every fourth from expert 1 on")  # fmt: skip
    refused(lambda: lab.expert_map(4, 4, 10, "linear"), "rank 4 of four")
    refused(lambda: lab.expert_map(4, 1, 10, "random"), "another strategy")


def test_placement_is_vllms(lab):
    for case in of_kind("expert_map"):
        asked = [case[name] for name in ("num_ranks", "rank", "num_experts", "strategy")]
        expected = case["map"] if case["map"] is not None else list(range(case["num_experts"]))
        got = np.asarray(lab.expert_map(*asked)).tolist()
        assert got == expected, f"expert_map{tuple(asked)}\nexpected {expected}\ncame     {got}"


def test_copies_go_to_the_expert_with_the_most_per_copy(lab):
    logical, counts = lab.replicate_experts(HOT, 10)
    assert (list(logical), list(counts)) == ([*range(8), 0, 0], [3, 1, 1, 1, 1, 1, 1, 1]), (
        f"960, then 480 for each of two copies: the hottest both times\n"
        f"expected 0 to 7, 0, 0\ncame     {list(logical)}, copies {list(counts)}"
    )
    logical = lab.replicate_experts([4, 4], 4)[0]
    assert list(logical) == [0, 1, 0, 1], (
        f"a tie goes to the lower id; then expert 0 has 2 a copy and expert 1 has 4; came {logical}"
    )
    refused(lambda: lab.replicate_experts(HOT, 7), "fewer slots than experts")


def test_packs_are_filled_heaviest_first(lab):
    packs, places = lab.balanced_packing([300, 280, 40, 30, 60, 50, 20, 10], 4)
    assert (list(packs), list(places)) == ([0, 1, 3, 2, 2, 3, 1, 0], [0, 0, 1, 1, 0, 0, 1, 1]), (
        f"300, 280, 60, 50 open the packs; 40 joins 50, which is then full; 30 joins 60\n"
        f"expected [0, 1, 3, 2, 2, 3, 1, 0] at [0, 0, 1, 1, 0, 0, 1, 1]\n"
        f"came     {list(packs)} at {list(places)}"
    )
    same(list(lab.balanced_packing([1, 9, 5], 3)[0]), [0, 1, 2], "one a pack: item i into pack i")
    refused(lambda: lab.balanced_packing([1, 2, 3], 2), "three items in two packs")


def test_replicas_and_packs_are_vllms(lab):
    for case in of_kind("replicas"):
        for row, physical in zip(case["loads"], case["physical_to_logical"], strict=True):
            got = list(lab.replicate_experts(row, case["num_physical"])[0])
            assert got == physical, (
                f"{case['num_physical']} physical experts for loads {row}\nexpected {physical}\n"
                f"came     {got}"
            )
    for case in of_kind("packing"):
        rows = zip(case["loads"], case["pack_index"], case["rank_in_pack"], strict=True)
        for row, packs, places in rows:
            got = [list(part) for part in lab.balanced_packing(row, case["num_packs"])]
            assert got == [packs, places], (
                f"{case['num_packs']} packs of {row}\nexpected {packs} at {places}\ncame     {got}"
            )


def test_rebalancing_is_vllms(lab):
    for case in of_kind("rebalance"):
        for row, expected in zip(case["loads"], case["physical_to_logical"], strict=True):
            got = list(lab.rebalance(row, case["num_physical"], case["num_ranks"]))
            assert got == expected, (
                f"{case['num_physical']} slots on {case['num_ranks']} ranks for loads {row}\n"
                f"expected {expected}\ncame     {got}"
            )


# --- on a served model ----------------------------------------------------------------------------


def rank_loads(slots, loads, num_ranks):
    """Load of each rank when copies share an expert's load evenly; plain loops, not the lab."""
    copies = [slots.count(expert) for expert in range(len(loads))]
    size = len(slots) // num_ranks
    return [
        sum(loads[e] / copies[e] for e in slots[rank * size : (rank + 1) * size])
        for rank in range(num_ranks)
    ]


def test_a_served_model_is_uneven_and_rebalancing_evens_it(lab, measured, record_property):
    before, after = [], []
    for row in (*measured["prose"], *measured["code"]):
        loads = row.tolist()
        before.append(lab.ep_step_time(loads, 4))
        slots = [int(expert) for expert in lab.rebalance(loads, len(loads) + 4, 4)]
        held = set(slots)
        assert held == set(range(len(loads))), f"every expert needs a slot; missing from {slots}"
        after.append(max(rank_loads(slots, loads, 4)))
    assert sum(after) < sum(before), (
        f"with four more slots the busiest of four ranks has {sum(after):.1f} pairs in all layers, "
        f"and had {sum(before)} under the linear placement"
    )
    record_property("measured.saved", float(1 - sum(after) / sum(before)))


def test_a_placement_is_only_as_good_as_its_forecast(lab, measured):
    """Slots chosen for prose serve code worse than slots chosen for code."""
    own = foreign = 0.0
    for prose, code in zip(measured["prose"].tolist(), measured["code"].tolist(), strict=True):
        for_prose = [int(e) for e in lab.rebalance(prose, len(prose), 4)]
        for_code = [int(e) for e in lab.rebalance(code, len(code), 4)]
        foreign += max(rank_loads(for_prose, code, 4))
        own += max(rank_loads(for_code, code, 4))
    assert own < foreign, (
        f"busiest ranks of all layers on code: {own:.1f} with slots chosen for code, {foreign:.1f} "
        "with slots chosen for prose; the second should be larger, as the two load other experts"
    )
