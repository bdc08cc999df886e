"""Block-scaled FP8 as the pinned tree's reference code computes it, and what it changes in a model.

What the tree gave is in `recordings/parts/block_fp8.jsonl.gz`, by `block_fp8.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.features.moe import texts
from conformance.features.moe.block_fp8 import BLOCK, expert_matrices
from conformance.mutants import edited
from mini_vllm.models import block_fp8
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.mlp import Mlp
from mini_vllm.models.moe import moe_forward_grouped
from mini_vllm.models.transformer import Linear
from mini_vllm.parts import EngineParts

CASES = parts.load("block_fp8")
TOLERANCE = 2e-3
"""Of the largest result of a layer. Codes are equal when inputs are, and a float32 sum differs by
1e-6; but the activation between the two products is rounded to e4m3, and where it lies at a middle
a difference in the last bit moves one code by a 16th of its value."""


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["kind"] == kind]


def codes_of(case: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(case["codes"]), np.uint8).reshape(shape)


@functools.cache
def byte_moe() -> dict[str, np.ndarray]:
    return load_checkpoint("byte-moe").weights


def experts_difference(module: Any, layer: int) -> float:
    """The largest difference of one layer of experts, as a part of its largest result."""
    [case] = [case for case in of_kind("experts") if case["layer"] == layer]
    weights = byte_moe()
    experts = []
    for expert in range(16):
        both, down = expert_matrices(weights, layer, expert)
        coded = [module.quantize_weight(m, BLOCK) for m in (both, down)]
        experts.append(Mlp(*(
            module.BlockFp8Linear(module.from_e4m3(codes), scale, BLOCK) for codes, scale in coded
        )))  # fmt: skip
    x, chosen = (np.array(case[key], np.float32) for key in ("x", "weights"))
    out = moe_forward_grouped(x, experts, np.array(case["ids"]), chosen)
    wanted = np.array(case["out"], np.float32)
    return float(np.abs(out - wanted).max() / np.abs(wanted).max())


# ------------------------------------------------------------------ replayed


@pytest.mark.parametrize("case", of_kind("weight"))
def test_a_weight_has_the_recorded_codes_and_scales(case):
    weight = np.array(case["weight"], np.float32)
    codes, scale = block_fp8.quantize_weight(weight, tuple(case["block"]))
    assert np.array_equal(codes, codes_of(case, weight.shape))
    assert np.array_equal(scale, np.array(case["scale_inv"], np.float32))


@pytest.mark.parametrize("case", of_kind("activations"))
def test_rows_have_the_recorded_codes_and_scales(case):
    x = np.array(case["x"], np.float32)
    codes, scale = block_fp8.quantize_activations(x, case["group"])
    assert np.array_equal(codes, codes_of(case, x.shape))
    assert np.array_equal(scale, np.array(case["scale"], np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(4))
def test_each_layer_of_experts_gives_what_the_reference_gives(layer):
    assert experts_difference(block_fp8, layer) < TOLERANCE


MUTANTS = {
    "the scale transposed": (
        "np.repeat(scale_inv, high, axis=0)",
        "np.repeat(scale_inv.T.reshape(scale_inv.shape), high, axis=0)",
    ),
    "the scale of the next block": ("np.repeat(scale_inv,", "np.repeat(np.roll(scale_inv, 1),"),
    "one activation scale for all": (
        "most = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(1e-10))",
        "most = np.broadcast_to(np.abs(groups).max(), (*groups.shape[:2], 1))",
    ),
    "the scale applied twice": ("* column)", "* column * column)"),
    "the scale as its inverse": ("* column)", "/ column)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name):
    assert experts_difference(edited(block_fp8, *MUTANTS[name]), 0) > TOLERANCE


# ------------------------------------------------------------------ by itself


def test_every_code_reads_back_and_the_rest_is_refused():
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    assert np.array_equal(block_fp8.to_e4m3(block_fp8.from_e4m3(codes)), codes)
    with pytest.raises(ValueError, match="0x7f"):
        block_fp8.from_e4m3(np.array([0x7F], np.uint8))
    with pytest.raises(ValueError, match="NaN"):
        block_fp8.to_e4m3(np.array([np.nan], np.float32))


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"block=\(0, 64\)"):
        block_fp8.quantize_weight(np.ones((96, 64), np.float32), (0, 64))
    with pytest.raises(ValueError, match="group=48"):
        block_fp8.quantize_activations(np.ones((1, 64), np.float32), 48)
    weight = np.zeros((128, 64), np.float32)
    with pytest.raises(ValueError, match="weight_scale_inv of shape"):
        block_fp8.BlockFp8Linear(weight, np.ones((1, 2), np.float32), BLOCK)
    with pytest.raises(ValueError, match=r"block=\(64, 48\)"):
        block_fp8.BlockFp8Linear(weight, np.ones((2, 2), np.float32), (64, 48))
    build = block_fp8.block_fp8_experts((128, 64))
    with pytest.raises(ValueError, match="gate and up"):
        build(np.ones((128, 64), np.float32), None, "model.layers.0.mlp.experts.0.gate_up_proj")


def test_other_matrices_of_a_model_stay_as_they_are():
    build = block_fp8.block_fp8_experts(BLOCK)
    weight = np.ones((64, 64), np.float32)
    for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate", "lm_head"):
        assert type(build(weight, None, name)) is Linear
    expert = build(weight, None, "model.layers.0.mlp.experts.3.down_proj")
    assert type(expert) is block_fp8.BlockFp8Linear


@pytest.mark.slow
def test_some_of_the_texts_change_when_all_experts_are_quantized():
    found = texts.kept("byte-moe")
    quantized = EngineParts(linear=block_fp8.block_fp8_experts(BLOCK))
    answers = texts.mini(texts.BYTE_MOE, found["prompts"], parts=quantized)
    assert 0 < len(texts.differing(found, answers)) < 50  # 16 where it was measured
