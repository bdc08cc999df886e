"""Checkpoints in block-scaled FP8, from the folder to the logits, as the pinned tree takes them.

What the tree gave is in `recordings/parts/fp8_checkpoint.jsonl.gz`, by `fp8_checkpoint.py`.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from conformance import parts, recording
from conformance.features import ROOT
from conformance.features.moe.fp8_checkpoint import DAMAGES, MODELS, damaged, written
from conformance.mutants import edited
from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.models import block_fp8, fp8
from mini_vllm.models.loader import Checkpoint, load_checkpoint
from mini_vllm.models.transformer import Transformer
from mini_vllm.parts import EngineParts

CASES = parts.load("fp8_checkpoint")
MOST = 2e-3
"""Of the largest logit of a row. Both sides compute in float32 and take the same codes; where an
activation lies at the middle of two, another order of a sum moves it by a 16th of its value."""
USUAL = 1e-5
"""Where none moved."""
SMALL = [name for name in MODELS if not name.startswith("byte-moe")]


class Heard(Transformer):
    """Keeps the rows of its last step."""

    def forward(self, batch: Any) -> np.ndarray:
        self.rows = super().forward(batch)
        return self.rows


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """A checkpoint of `MODELS` by name, written once."""

    @functools.cache
    def load(name: str) -> Checkpoint:
        return load_checkpoint(written(name, tmp_path_factory.mktemp("fp8"))[1])

    return load


def differences(
    checkpoint: Checkpoint, name: str, cases: list[dict[str, Any]], module: Any = block_fp8
) -> list[float]:
    """Of each prompt the largest difference of a logit, as a part of the largest logit."""
    config, weights = checkpoint.config, checkpoint.weights
    model = Heard(config, weights, linear=module.checkpoint_linear(config, weights))
    engine = LLMEngine(model, num_blocks=16, max_num_batched_tokens=32)  # in two chunks
    found = []
    for case in cases:
        if case["kind"] == "logits" and case["model"] == name:
            engine.generate([case["prompt"]], SamplingParams(max_tokens=1))
            theirs = np.array(case["logits"], np.float32)
            found.append(float(np.abs(model.rows[0] - theirs).max() / np.abs(theirs).max()))
    return found


# ------------------------------------------------------------------ replayed


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Of codes and scales, one below the other under the names that vLLM has for them."""
    weights, found = checkpoint.weights, collections.defaultdict(hashlib.sha256)
    down = checkpoint.config.moe.names[3] if checkpoint.config.moe else ""
    for name, array in weights.items():  # in the order of layers, experts and rows
        module, _, kind = name.rpartition(".")
        if kind == "bias" or f"{module}.{fp8.SCALE}" not in weights:
            continue
        place = re.sub(r"\.[qkv]_proj", ".qkv_proj", name)
        place = re.sub(rf"(\.experts)\.\d+\.{down}\.", r"\1.w2_", place)
        place = re.sub(r"(\.experts)\.\d+\.\w+\.", r"\1.w13_", place)
        place = re.sub(r"mlp\.(gate|up)_proj", "mlp.gate_up_proj", place)
        found[place].update((array if kind == fp8.SCALE else block_fp8.to_e4m3(array)).tobytes())
    return {name: digest.hexdigest() for name, digest in found.items()}


EVERY = [pytest.param(n, marks=[] if n in SMALL else [pytest.mark.slow]) for n in MODELS]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_codes_and_scales_are_bit_for_bit_what_vllm_loads(checkpoint_of, name):
    [case] = [c for c in CASES if c["kind"] == "loaded" and c["model"] == name]
    assert digests(checkpoint_of(name)) == case["sha256"]


@pytest.mark.parametrize("name", EVERY)
def test_a_checkpoint_gives_the_recorded_logits(checkpoint_of, name):
    found = differences(checkpoint_of(name), name, CASES)
    assert len(found) == 4 and max(found) < MOST, found


def test_most_rows_differ_by_rounding_alone(checkpoint_of):
    found = [d for name in SMALL for d in differences(checkpoint_of(name), name, CASES)]
    assert np.median(found) < USUAL, found


CUT, BIASED, EXPERTS = SMALL[2], SMALL[1], SMALL[0]
MUTANTS = {
    "the scale divides": (EXPERTS, "* column)", "/ column)"),
    "the scale's axes swapped": (
        EXPERTS, "np.repeat(scale_inv, high, axis=0)",
        "np.repeat(scale_inv.T.reshape(scale_inv.shape), high, axis=0)",
    ),
    "every scale 1, as without one": (
        EXPERTS, "np.repeat(scale_inv, high, axis=0)",
        "np.repeat(np.ones_like(scale_inv), high, axis=0)",
    ),
    "gate and up with each other's scales": (
        EXPERTS, "np.concatenate(found)", "np.concatenate(found[::-1])",
    ),
    "activations that stay as they are": (
        EXPERTS, "codes, scale = quantize_activations(x, wide)\n        values = from_e4m3(codes)",
        "values, scale = x, np.ones((len(x), x.shape[1] // wide), np.float32)",
    ),
    "one activation scale for a token": (
        BIASED, "np.abs(groups).max(axis=2, keepdims=True)",
        "np.broadcast_to(np.abs(groups).max((1, 2), keepdims=True), (*groups.shape[:2], 1))",
    ),
    "the first block cut in place of the last": (CUT, "[:rows].T", "[-rows:].T"),
    "the last block with the scale before": (
        CUT, "np.repeat(scale_inv, high, axis=0)",
        "np.repeat(scale_inv[np.arange(len(scale_inv)).clip(max=rows // high - 1)], high, axis=0)",
    ),
    "no bias": (BIASED, "self.bias = block, bias", "self.bias = block, None"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(checkpoint_of, name):
    model, old, new = MUTANTS[name]
    mutant = edited(block_fp8, old, new)
    found = differences(checkpoint_of(model), model, CASES, mutant)
    assert max(found) > MOST, found


# ------------------------------------------------------------------ what is refused

REFUSALS = {
    "weight_scale for weight_scale_inv": r"lacks \d+ tensor\(s\): .*weight_scale_inv",
    "no scales": r"lacks \d+ tensor\(s\): .*weight_scale_inv",
    "scales of swapped shape": r"weight_scale_inv has shape \(2, 4\), config.json implies \(4, 2\)",
    "static activations": "activation_scheme='static': need 'dynamic'",
    "a block of one size": r"weight_block_size=\[32\]: need two equal sizes",
    "a block wider than an expert": r"weight_scale_inv has shape \(4, 2\), .* implies \(2, 1\)",
    "one expert listed": "dtype F8_E4M3 is not supported; supported: F32, F16, BF16",
    "one of three listed": "dtype F8_E4M3 is not supported; supported: F32, F16, BF16",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case["kind"] == "damage"])
def test_a_mistake_is_refused_by_name_also_where_vllm_loads_it(tmp_path, case):
    name = case["damage"]
    if name == "none":
        assert not case["said"]
        load_checkpoint(damaged(name, tmp_path))
        return
    with pytest.raises(ValueError, match=REFUSALS[name]):
        load_checkpoint(damaged(name, tmp_path))
    assert case["scales_are_ones"] is not bool(case["said"])


def test_every_mistake_is_recorded_and_two_of_them_load_in_vllm_with_scales_of_1():
    found = {case["damage"]: case for case in CASES if case["kind"] == "damage"}
    assert found.keys() == {*DAMAGES}
    silent = {name for name, case in found.items() if case["scales_are_ones"]}
    assert silent == {"weight_scale for weight_scale_inv", "no scales"}


def skips_as_recorded(module: Any) -> bool:
    return all(
        module.Fp8Config((64, 64), frozenset(case["ignored"])).is_layer_skipped(name) == flag
        for case in CASES
        if case["kind"] == "skipped"
        for name, flag in zip(case["modules"], case["skipped"], strict=True)
    )


def test_the_modules_that_a_list_leaves_unquantized_are_the_recorded_ones():
    assert skips_as_recorded(fp8)


SKIP_MUTANTS = {
    "experts one by one": ("if is_expert:", "if False:"),
    "a listed name within a module's": (
        "return module in self", "return any(n in module for n in self",
    ),
    "the block's name of another layer": ('f"{block}.experts" in name', "'experts' in name"),
    "the list's names within the experts'": (
        'f"{block}.experts" in name', 'name in f"{block}.experts"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SKIP_MUTANTS)
def test_a_mutant_of_the_rule_is_seen(name):
    old, new = SKIP_MUTANTS[name]
    if name.startswith("a listed"):
        old, new = f"{old}.ignored_layers", f"{new}.ignored_layers)"
    assert not skips_as_recorded(edited(fp8, old, new))


# ------------------------------------------------------------------ from the folder, with no flag


@pytest.mark.slow
def test_the_folder_alone_computes_what_the_part_in_memory_computes(tmp_path):
    folder = written("byte-moe: experts", tmp_path)[1]
    quantized = EngineParts(linear=block_fp8.block_fp8_experts((64, 64)))
    asked = [case["prompt"] for case in CASES if case["kind"] == "logits"][:4]
    params = SamplingParams(max_tokens=24, logprobs=3)
    answers = [
        [answer.outputs[0].logprobs for answer in llm.generate(asked, params)]
        for llm in (LLM(folder), LLM("byte-moe", parts=quantized))
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.upstream
def test_the_pinned_tree_on_this_machine_says_what_was_recorded(checkpoint_of, tmp_path):
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "upstream")])}
    command = [sys.executable, "-m", "conformance.record", "fp8_checkpoint", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | path)
    _, *fresh = recording.lines(tmp_path / "parts" / "fp8_checkpoint.jsonl.gz")
    kept, now = ([case for case in cases if case["kind"] != "logits"] for cases in (CASES, fresh))
    assert now == kept
    for name in MODELS:
        assert max(differences(checkpoint_of(name), name, fresh)) < MOST
