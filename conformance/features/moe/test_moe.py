"""Routing, alignment, placement, balancing as the pinned tree has them; the real engine's texts.

What the tree gave is in `recordings/parts/moe.jsonl.gz`; the texts are in `recordings/engine`, by
`texts.py`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.features import ROOT
from conformance.features.moe import expert_backends
from conformance.features.moe import texts as moe_texts
from conformance.mutants import edited
from course.files import load_module
from mini_vllm.models import moe

LABS = ROOT / "phase-07-gemm-and-moe-kernels" / "labs"
CASES = parts.load("moe")


@functools.cache
def lab(name: str) -> ModuleType:
    return load_module(LABS / name / "solution.py")


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["kind"] == kind]


def route_difference(module: Any) -> str:
    """The first recorded choice that `module.route` makes otherwise, in words; "" for none."""
    for number, case in enumerate(of_kind("route")):
        logits = np.array(case["logits"], dtype=np.float32)
        ids, weights = module.route(logits, case["top_k"], case["renormalize"])
        if ids.tolist() != case["ids"]:
            return f"case {number}: ids"
        if not np.abs(weights - np.array(case["weights"])).max() < 1e-6:
            return f"case {number}: weights"
    return ""


# ------------------------------------------------------------------ what is recorded


def test_the_recording_holds_every_kind_and_what_is_hard_about_each():
    counts = {kind: len(of_kind(kind)) for kind in {case["kind"] for case in CASES}}
    assert counts.keys() == {"route", "align", "expert_map", "packing", "replicas", "rebalance"}
    assert {case["renormalize"] for case in of_kind("route")} == {True, False}
    align = of_kind("align")
    assert any(np.size(c["topk_ids"]) < c["num_experts"] for c in align), "the small buffer"
    assert any(-1 in c["expert_ids"] for c in align), "a block nobody owns"
    assert any(c["num_experts"] % c["num_ranks"] for c in of_kind("expert_map")), "a remainder"
    assert any(c["num_experts"] < c["num_ranks"] for c in of_kind("expert_map")), "ranks without"
    assert any(c["map"] is None for c in of_kind("expert_map")), "one rank has no map"
    assert any(max(map(max, c["num_replicas"])) > 4 for c in of_kind("replicas")), "a hot expert"
    assert any(c["num_physical"] > len(c["loads"][0]) for c in of_kind("rebalance"))


# ------------------------------------------------------------------ replayed


def test_the_engine_routes_as_the_real_router():
    assert route_difference(moe) == ""


MUTANTS = {
    "softmax over the chosen alone": (
        "topk_weights = np.take_along_axis(scores, topk_ids, axis=1)",
        "topk_weights = np.take_along_axis(scores, topk_ids, axis=1)\n"
        "    topk_weights = topk_weights / topk_weights.sum(axis=1, keepdims=True)",
    ),
    "never renormalised": ("if renormalize:", "if False:"),
    "the smallest": ("np.argsort(-scores", "np.argsort(scores"),
    "one expert fewer": ("[:, :top_k]", "[:, : max(1, top_k - 1)]"),
    "ids in their own order": (
        'np.argsort(-scores, axis=1, kind="stable")[:, :top_k]',
        'np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :top_k], axis=1)',
    ),
    "sigmoid": ("scores /= scores.sum(axis=1, keepdims=True)", "scores /= 1 + scores"),
    "softmax over tokens": ("scores.sum(axis=1, keepdims=True)", "scores.sum(axis=0)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_router_one_edit_away_is_caught(name):
    mutant = edited(moe, *MUTANTS[name])
    with np.errstate(all="ignore"):
        try:
            said = route_difference(mutant)
        except ValueError as error:  # another shape
            said = str(error)
    assert said


def test_the_lab_aligns_as_the_reference():
    for case in of_kind("align"):
        ids = np.array(case["topk_ids"])
        found = lab("lab-01-moe-routing").align_block_size(
            ids, case["block_size"], case["num_experts"]
        )
        sorted_ids, expert_ids, padded = found
        assert sorted_ids.tolist() == case["sorted_ids"]
        assert expert_ids.tolist() == case["expert_ids"]
        assert padded == case["num_padded"]


def test_the_lab_places_experts_as_vllm_does():
    for case in of_kind("expert_map"):
        found = lab("lab-04-expert-load-balance").expert_map(
            case["num_ranks"], case["rank"], case["num_experts"], case["strategy"]
        )
        assert (found >= 0).sum() == case["num_local"]
        everything = list(range(case["num_experts"]))
        assert found.tolist() == (everything if case["map"] is None else case["map"])


def test_the_lab_packs_replicates_and_rebalances_as_vllm_does():
    balance = lab("lab-04-expert-load-balance")
    for case in of_kind("packing"):
        rows = [balance.balanced_packing(row, case["num_packs"]) for row in case["loads"]]
        assert [packs.tolist() for packs, _ in rows] == case["pack_index"]
        assert [places.tolist() for _, places in rows] == case["rank_in_pack"]
    for case in of_kind("replicas"):
        rows = [balance.replicate_experts(row, case["num_physical"]) for row in case["loads"]]
        assert [logical.tolist() for logical, _ in rows] == case["physical_to_logical"]
        assert [counts.tolist() for _, counts in rows] == case["num_replicas"]
    for case in of_kind("rebalance"):
        slots = [
            balance.rebalance(row, case["num_physical"], case["num_ranks"]).tolist()
            for row in case["loads"]
        ]
        assert slots == case["physical_to_logical"]


# ------------------------------------------------------------------ texts


@pytest.fixture(scope="module", params=moe_texts.models())
def model(request, tmp_path_factory) -> tuple[str, Path]:
    home = tmp_path_factory.mktemp("models")
    return request.param, moe_texts.folder_of(request.param, home)


@pytest.mark.slow
def test_a_hundred_texts_of_the_real_engine_are_the_mini_engines(model):
    """vLLM on a processor, float32 and greedy; ours in float32, in one batch."""
    name, folder = model
    found = moe_texts.kept(name)
    assert len(found["prompts"]) == 100
    assert len({tuple(text) for text in found["outputs"]}) > 50, "not one text for all"
    assert moe_texts.differing(found, moe_texts.mini(folder, found["prompts"])) == []


@pytest.mark.slow
def test_wider_experts_of_zeros_answer_the_same(tmp_path, monkeypatch):
    """What vLLM's CPU build is given in the place of experts it cannot compute."""
    monkeypatch.setitem(moe_texts.SIZES, "hidden_size", 32)
    odd = moe_texts.RANDOM["qwen3-moe"] | {"moe_intermediate_size": 24}
    monkeypatch.setitem(moe_texts.RANDOM, "qwen3-moe", odd)
    folder = moe_texts.random_checkpoint("qwen3-moe", tmp_path / "odd")
    wider = moe_texts.for_processors(folder, tmp_path)
    assert wider != folder
    asked = moe_texts.prompts()[:8]
    assert moe_texts.mini(wider, asked, "float64") == moe_texts.mini(folder, asked, "float64")
    assert moe_texts.for_processors(wider, tmp_path) == wider


@pytest.mark.upstream
def test_recording_again_gives_the_kept_cases():
    """Everything exactly but a router's weights: float32, whose last digit is the processor's."""
    from conformance.features.moe import recorder

    again = list(recorder.cases())
    assert len(again) == len(CASES)
    for case, kept in zip(again, CASES, strict=True):
        left = dict(kept)
        if "weights" in case:
            np.testing.assert_allclose(case.pop("weights"), left.pop("weights"), rtol=2e-7)
        assert case == left


# ------------------------------------------------------------------ which kernels


def chosen(**asked: Any) -> list[dict[str, Any]]:
    cases = parts.load("expert_backends")
    return [case for case in cases if all(case.get(n) == value for n, value in asked.items())]


def test_every_choice_of_a_kernel_for_experts_is_recorded_once():
    keys = ("capability", "flashinfer", "checkpoint", "deployment", "lora")
    asked = {tuple(case[key] for key in keys) for case in chosen()}
    assert len(asked) == len(chosen()) == 5 * 2 * 4 * 8 * 2
    assert all(case["error"] for case in chosen(backend=None))


def test_dp_without_ep_slices_each_expert_and_ep_slices_none():
    assert {str(c["sizes"]) for c in chosen(deployment="dp")} == {"{'tp': 8, 'dp': 8, 'ep': 1}"}
    assert {str(c["sizes"]) for c in chosen(deployment="dp_ep")} == {"{'tp': 1, 'dp': 8, 'ep': 8}"}


def test_low_latency_alone_has_the_batched_format():
    assert {case["deployment"] for case in chosen(batched=True)} == {"dp_ep_ll"}
    served = [case for case in chosen(batched=True, lora=False) if case["backend"]]
    assert served and all("BATCHED" in case["backend"] for case in served)


def test_a_monolithic_kernel_serves_no_exchange_but_the_all_gather_and_no_balancer():
    monolithic = {case["deployment"] for case in chosen(monolithic=True)}
    assert monolithic == {"tp", "tp_ep", "dp", "dp_ep"}


def test_with_adapters_experts_run_on_the_kernels_that_take_a_delta():
    served = {case["experts"] for case in chosen(lora=True) if case["backend"]}
    assert served == {"TritonExperts", "MarlinExperts"}


@pytest.mark.upstream
@pytest.mark.slow
def test_the_real_oracles_still_say_so():
    """One card of five; 15 s."""
    setting = {"capability": "9.0", "flashinfer": True}
    assert expert_backends.record(setting) == chosen(**setting)
