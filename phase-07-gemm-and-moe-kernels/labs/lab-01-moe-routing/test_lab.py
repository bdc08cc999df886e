"""What lab 07-01 pins: the grouped forward is the definition, at one call per chosen expert."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance import parts
from labkit import moe_model, refused
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models.moe import sparse_layers

X = np.array([[2.0, 1, 0, -1], [0, 0, 3, 3], [-1, 4, -2, 4 - math.log(3)], [1, 0, 0, 2]])
IDS = np.array([[0, 1], [2, 3], [1, 3], [3, 0]])
BIG = 1 / (1 + math.exp(-1))
WEIGHTS = np.array([[BIG, 1 - BIG], [0.5, 0.5], [0.75, 0.25], [BIG, 1 - BIG]])
CASES = parts.load("moe")


def times(factor):
    """An expert: `factor` times what is positive."""
    return lambda rows: factor * np.maximum(rows, 0)


def worst(got, expected) -> float:
    """Largest absolute difference; infinite for another shape or what is no number."""
    got = np.asarray(got if got is not None else [], dtype=float)
    if got.shape != np.shape(expected) or not np.isfinite(got).all():
        return math.inf
    return float(np.abs(got - expected).max(initial=0.0))


def swiglu(rng, hidden):
    """An expert with three random matrices."""
    gate, up, down = rng.standard_normal((3, hidden, hidden))
    return lambda rows: (rows @ gate / (1 + np.exp(-(rows @ gate))) * (rows @ up)) @ down


def case(seed, num_tokens, num_experts, k, hidden=6):
    """Tokens, experts, ids without repetition in a row, weights."""
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(num_experts)[:k] for _ in range(num_tokens)]).reshape(-1, k)
    experts = [swiglu(rng, hidden) for _ in range(num_experts)]
    return rng.standard_normal((num_tokens, hidden)), experts, ids, rng.random((num_tokens, k))


# --- routing --------------------------------------------------------------------------------------


def test_route_of_the_worked_example(lab):
    got = lab.route(X, np.eye(4), 2)
    assert got is not None and len(got) == 2, f"route returns (topk_ids, topk_weights); came {got}"
    ids, weights = got
    assert np.array_equal(ids, IDS), (
        f"w_gate is the unit matrix, so a token's logits are its own entries\n"
        f"expected {IDS.tolist()}\ncame     {np.asarray(ids).tolist()}"
    )
    assert worst(weights, WEIGHTS) < 1e-12, (
        f"logits 2 and 1 weigh e / (1 + e) and 1 / (1 + e), and so on\n"
        f"expected {WEIGHTS.tolist()}\ncame     {np.asarray(weights).tolist()}"
    )


def test_of_equal_scores_the_lower_expert_wins(lab):
    ids = np.asarray(lab.route(np.array([[0.0, 5, 5, 5], [7, 7, 7, 7]]), np.eye(4), 2)[0])
    assert ids.tolist() == [[1, 2], [0, 1]], (
        f"experts 1, 2, 3 tie in the first row and all in the second: the lower ids, in order, or "
        f"two machines answer differently\nexpected [[1, 2], [0, 1]]\ncame     {ids.tolist()}"
    )


def test_large_logits_stay_finite(lab):
    weights = lab.route(np.array([[1000.0, -1000, 999, 0]]), np.eye(4), 2)[1]
    assert worst(weights, [[BIG, 1 - BIG]]) < 1e-12, (
        f"logits 1000 and 999 differ by 1: the weights are {BIG:.4f} and {1 - BIG:.4f}; exp(1000) "
        f"is infinite. Came {weights}"
    )


def test_without_renormalisation_weights_are_scores_over_all_experts(lab):
    weights = lab.route(X[:1], np.eye(4), 2, renormalize=False)[1]
    scores = np.exp(X[0]) / np.exp(X[0]).sum()
    assert worst(weights, scores[None, :2]) < 1e-12, (
        f"the two chosen scores as they are, {scores[:2].tolist()}: their sum is below 1, since "
        f"the other experts have a share of the softmax; came {weights}"
    )


def test_it_routes_as_vllms_router(lab):
    for number, recorded in enumerate(c for c in CASES if c["kind"] == "route"):
        logits = np.array(recorded["logits"], dtype=np.float32)
        gate = np.eye(logits.shape[1], dtype=np.float32)
        ids, weights = lab.route(logits, gate, recorded["top_k"], recorded["renormalize"])
        assert np.asarray(ids).tolist() == recorded["ids"], (
            f"route case {number}, k={recorded['top_k']}: ids\nexpected {recorded['ids']}\n"
            f"came     {np.asarray(ids).tolist()}"
        )
        difference = worst(weights, np.array(recorded["weights"]))
        assert difference < 1e-6, (
            f"route case {number}, renormalize={recorded['renormalize']}: weights of the real "
            f"router differ by {difference:.1e}"
        )


def test_a_k_out_of_range_is_refused_and_no_tokens_are_fine(lab):
    for k in (0, -1, 5):
        refused(lambda k=k: lab.route(X, np.eye(4), k), f"k={k} with 4 experts")
    ids, weights = lab.route(np.empty((0, 4)), np.eye(4), 2)
    shapes = np.shape(ids), np.shape(weights)
    assert shapes == ((0, 2), (0, 2)), f"no tokens: ids and weights of shape (0, 2); came {shapes}"


# --- the two forwards -----------------------------------------------------------------------------

OUT = np.array(
    [
        [2 * BIG + 4 * (1 - BIG), BIG + 2 * (1 - BIG), 0, 0],
        [0, 0, 10.5, 10.5],
        [0, 10, 0, 2.5 * (4 - math.log(3))],
        [4 * BIG + (1 - BIG), 0, 0, 8 * BIG + 2 * (1 - BIG)],
    ]
)


@pytest.mark.parametrize("name", ["moe_forward_reference", "moe_forward_grouped"])
def test_forward_of_the_worked_example(lab, name):
    got = getattr(lab, name)(X, [times(e + 1) for e in range(4)], IDS, WEIGHTS)
    assert worst(got, OUT) < 1e-12, (
        f"{name}: expert e multiplies by e + 1 what is positive; token 1 gets (3 + 4) / 2 times 3\n"
        f"expected {OUT.round(4).tolist()}\ncame     {got}"
    )


def test_the_reference_is_all_experts_on_all_tokens_and_a_mask(lab):
    x, experts, ids, weights = case(3, 9, 5, 2)
    share = np.zeros((9, 5))
    np.put_along_axis(share, ids, weights, axis=1)
    expected = sum(share[:, e : e + 1] * expert(x) for e, expert in enumerate(experts))
    difference = worst(lab.moe_forward_reference(x, experts, ids, weights), expected)
    assert difference < 1e-10, (
        f"every expert on every token, times its weight or 0, is the same sum: off by {difference}"
    )


def test_grouped_equals_reference(lab):
    shapes = ((1, 4, 1), (1, 4, 4), (7, 3, 2), (16, 8, 2), (33, 5, 3), (6, 60, 4), (40, 2, 1))
    for seed, (num_tokens, num_experts, k) in enumerate(shapes):
        x, experts, ids, weights = case(seed, num_tokens, num_experts, k)
        reference = lab.moe_forward_reference(x, experts, ids, weights)
        difference = worst(lab.moe_forward_grouped(x, experts, ids, weights), reference)
        assert difference < 1e-10, (
            f"{num_tokens} tokens, {k} of {num_experts} experts, seed {seed}: grouped differs from "
            f"the reference by {difference}"
        )


def test_a_token_that_names_an_expert_twice_gets_both_shares(lab):
    x, experts, _, _ = case(5, 2, 4, 2)
    ids, weights = np.array([[3, 3], [1, 3]]), np.array([[0.25, 0.5], [1.0, 2.0]])
    expected = np.stack([0.75 * experts[3](x)[0], experts[1](x)[1] + 2 * experts[3](x)[1]])
    for name in ("moe_forward_reference", "moe_forward_grouped"):
        difference = worst(getattr(lab, name)(x, experts, ids, weights), expected)
        assert difference < 1e-10, (
            f"{name}: token 0 names expert 3 with 0.25 and 0.5, which is 0.75 times its result "
            f"(a simulated router does that); off by {difference}"
        )


def test_one_call_for_each_chosen_expert(lab, record_property):
    calls = []

    def expert(number):
        return lambda rows: calls.append((number, rows[:, 0].tolist())) or rows

    x = np.array([[10.0], [20.0], [30.0]])
    ids = np.array([[1, 0], [0, 4], [3, 1]])
    lab.moe_forward_grouped(x, [expert(n) for n in range(6)], ids, np.ones((3, 2)))
    expected = [(0, [10.0, 20.0]), (1, [10.0, 30.0]), (3, [30.0]), (4, [20.0])]
    assert sorted(calls) == expected, (
        f"experts 2 and 5 are chosen by nobody and must not be called; each other one is called "
        f"once, with the rows of its tokens in their order\nexpected {expected}\ncame     {calls}"
    )
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(200):
        calls.clear()
        ids = np.argsort(rng.random((8, 16)), axis=1)[:, :2]
        lab.moe_forward_grouped(
            np.ones((8, 1)), [expert(n) for n in range(16)], ids, np.ones((8, 2))
        )
        counts.append(len(calls))
    record_property("measured.touched", float(np.mean(counts)))


def test_arguments_stay_and_the_dtype_is_that_of_x(lab):
    x, _, ids, weights = case(6, 12, 4, 2)
    x = x.astype(np.float32)
    before = x.copy(), ids.copy(), weights.copy()
    for name in ("moe_forward_reference", "moe_forward_grouped"):
        got = getattr(lab, name)(x, [lambda rows: rows] * 4, ids, weights)
        assert got.dtype == np.float32, f"{name}: x is float32, so is the result; came {got.dtype}"
    same = all(np.array_equal(a, b) for a, b in zip(before, (x, ids, weights), strict=True))
    assert same, "x, topk_ids and topk_weights are read by others afterwards: they must not change"


# --- blocks of one expert -------------------------------------------------------------------------


def test_align_of_the_worked_example(lab):
    got = lab.align_block_size(IDS, 4, 4)
    assert got is not None and len(got) == 3, f"three results; came {got}"
    sorted_ids, expert_ids, padded = (np.asarray(part).tolist() for part in got)
    expected = [0, 7, 8, 8, 1, 4, 8, 8, 2, 8, 8, 8, 3, 5, 6, 8]
    assert sorted_ids[:16] == expected, (
        f"expert 0 has pairs 0 and 7, then two fillers (8 is the number of pairs), and so on\n"
        f"expected {expected}\ncame     {sorted_ids[:16]}"
    )
    assert (padded, expert_ids) == (16, [0, 1, 2, 3, -1]), (
        f"four blocks in use, 16 entries, and a fifth block that nobody owns\n"
        f"expected 16 and [0, 1, 2, 3, -1]\ncame     {padded} and {expert_ids}"
    )
    assert sorted_ids[16:] == [8] * 4, (
        f"the room is 8 + 4 x 3 = 20 entries, the rest filled with 8; came {sorted_ids[16:]}"
    )


def test_align_as_the_reference_vllms_kernel_is_tested_against(lab):
    for recorded in (c for c in CASES if c["kind"] == "align"):
        ids = np.array(recorded["topk_ids"])
        got = lab.align_block_size(ids, recorded["block_size"], recorded["num_experts"])
        asked = f"{len(ids)} tokens, {ids.shape[1]} of {recorded['num_experts']} experts, blocks of"
        names = ("sorted_ids", "expert_ids", "num_padded")
        for field, came in zip(names, got, strict=True):
            came = np.asarray(came).tolist()
            assert came == recorded[field], (
                f"{asked} {recorded['block_size']}: {field}\nexpected {str(recorded[field])[:300]}"
                f"\ncame     {str(came)[:300]}"
            )


def test_align_costs_padding(lab, record_property):
    rng = np.random.default_rng(4)
    ids = np.argsort(rng.random((64, 16)), axis=1)[:, :2]
    _, _, padded = lab.align_block_size(ids, 16, 16)
    loads = np.bincount(ids.reshape(-1), minlength=16)
    expected = sum(16 * math.ceil(load / 16) for load in loads)
    assert padded == expected, (
        f"128 pairs with loads {loads.tolist()}, each rounded up to 16: {expected}; came {padded}"
    )
    record_property("measured.padded", padded)


def test_align_refuses_what_is_no_block_and_no_expert(lab):
    refused(lambda: lab.align_block_size(IDS, 0, 4), "block_size=0")
    refused(lambda: lab.align_block_size(IDS, 4, 3), "expert 3 of three")
    refused(lambda: lab.align_block_size(IDS - 1, 4, 4), "expert -1")


# --- in the engine --------------------------------------------------------------------------------


def counted(forward, calls):
    return lambda *arguments: calls.append(len(arguments[0])) or forward(*arguments)


def test_the_engine_serves_a_trained_model_through_it(lab):
    prompts = ["The router picks ", "def expert(", "A block is "]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    texts = []
    for forward in (None, lab.moe_forward_grouped):
        model = moe_model()
        calls = []
        for layer in sparse_layers(model):
            inner = forward or layer.forward
            layer.forward = counted(inner, calls)
        engine = LLMEngine(model=model, num_blocks=64, max_num_batched_tokens=24)
        texts.append([r.outputs[0].token_ids for r in engine.generate(prompts, params)])
        assert len(calls) > 8, "every layer with experts of every step calls the forward"
    assert texts[0] == texts[1], (
        f"24 greedy tokens in float64, prompts in chunks\nexpected {texts[0]}\ncame     {texts[1]}"
    )
