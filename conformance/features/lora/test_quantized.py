"""Adapters over quantized linears as the pinned wrappers compute them: block-scaled FP8.

What they gave is in `recordings/parts/lora_quantized.jsonl.gz`, by `lora_quantized.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.mutants import edited
from mini_vllm.batch import ForwardBatch
from mini_vllm.lora import layers, weights
from mini_vllm.models.block_fp8 import BlockFp8Linear, from_e4m3, quantize_weight
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.transformer import Linear, LinearLike, Transformer
from mini_vllm.tests.lora_support import CONFIG, write_adapter

[CASE] = parts.load("lora_quantized")
BLOCK = tuple(CASE["block"])
TOLERANCE = 1e-5
"""Of the largest value of a linear's output: both sides are float32, codes are equal where inputs
are, and sums differ in their order."""


def quantized(weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> LinearLike:
    """The linear part: block-scaled FP8 in the layer, the head as it is."""
    if name == "lm_head":
        return Linear(weight, bias)
    codes, scale_inv = quantize_weight(weight, BLOCK)
    return BlockFp8Linear(from_e4m3(codes), scale_inv, BLOCK)


class _Layer(Transformer):
    """A model that gives each linear of its first layer the input it is told."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        self.outputs = {}
        for name, x in self.inputs.items():
            linear = getattr(self.layers[0], name.rpartition(".")[2])
            self.outputs[name] = linear(x[batch.positions])[np.argsort(batch.positions)]
        return np.zeros(0)


def differences(
    folder: Path,
    layers: ModuleType = layers,
    weights: ModuleType = weights,
    linear: Any = quantized,
) -> dict[str, float]:
    """By linear the largest difference of all steps, as a part of the largest recorded value."""
    held = {name: np.zeros(shape) for name, shape in expected_shapes(CONFIG).items()}
    held |= {f"model.layers.0.{n}.weight": np.array(w) for n, w in CASE["weights"].items()}
    model = layers.AdaptedModel(_Layer(CONFIG, held, linear=linear), weights.projections(CONFIG), 3)
    wanted, adapters = weights.projections(CONFIG), {}
    for number, adapter in enumerate(CASE["adapters"], start=1):
        keys = {key: adapter[key] for key in ("r", "lora_alpha", "use_rslora")}
        tensors = {name: np.array(tensor) for name, tensor in adapter["tensors"].items()}
        path = write_adapter(folder / str(number), target_modules=(), tensors=tensors, **keys)
        adapters[number] = weights.load_adapter(path, wanted, 8)
    found = dict.fromkeys(CASE["weights"], 0.0)
    for step in CASE["steps"]:
        for slot, number in enumerate(step["slots"]):
            loaded = {} if number is None else adapters[number]
            pairs = {name: weights.pack(each, loaded) for name, each in wanted.items()}
            model.set_slot(slot, {n: pair for n, pair in pairs.items() if pair is not None})
        counts = np.array([r["tokens"] for r in step["requests"]])
        model.step.slots = np.array(
            [step["slots"].index(r["adapter"]) if r["adapter"] else -1 for r in step["requests"]]
        )
        total = int(counts.sum())
        model.transformer.inputs = {n: np.array(x, np.float32) for n, x in step["inputs"].items()}
        model.forward(
            ForwardBatch(
                token_ids=np.zeros(total, np.int64), positions=np.arange(total),
                slot_mapping=np.arange(total), seq_lens=counts,
                query_start_loc=np.concatenate([[0], np.cumsum(counts)]),
                block_tables=np.zeros((len(counts), 1), np.int64),
                logits_indices=np.cumsum(counts) - 1,
            )
        )  # fmt: skip
        for name, recorded in step["outputs"].items():
            theirs = np.array(recorded)
            seen = np.abs(model.transformer.outputs[name] - theirs).max() / np.abs(theirs).max()
            found[name] = max(found[name], float(seen))
    return found


def test_each_linear_of_a_quantized_layer_gives_what_the_pinned_wrapper_gives(tmp_path):
    found = differences(tmp_path)
    assert len(found) == 4 and max(found.values()) < TOLERANCE


ROUNDED = (
    "        from mini_vllm.models.block_fp8 import from_e4m3, quantize_activations\n"
    "        codes, scale = quantize_activations(x, 8)\n"
    "        y = self.base(x)\n        x = from_e4m3(codes) * np.repeat(scale, 8, axis=1)\n"
)
MUTANTS = {
    "the delta of the rounded input": (layers, "        y = self.base(x)\n", ROUNDED),
    "the delta in the place of the base's output": (
        layers, "y[rows] += self.delta(x[rows]", "y[rows] = self.delta(x[rows]",
    ),
    "the base computed from the delta's output": (
        layers, "y[rows] += self.delta(x[rows], *pair, 1.0)",
        "y[rows] *= 1.0 + self.delta(x[rows], *pair, 1.0)",
    ),
    "the scaling left out": (weights, "        b *= scaling\n", ""),
    "a part that is not adapted takes no rows": (
        weights, "        row += projection.out_features\n",
        "        row += projection.out_features * (projection.name in modules)\n",
    ),
    "the pair of the slot before": (
        layers, "pair, rows = self.slots[slot],", "pair, rows = self.slots[slot - 1],",
    ),
    "the delta of one row too many": (
        layers, "slice(max(0, start - first), max(0, end - first))",
        "slice(max(0, start - first), max(0, end - first) + 1)",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name, tmp_path):
    module, old, new = MUTANTS[name]
    modules = {module.__name__.rpartition(".")[2]: edited(module, old, new)}
    assert max(differences(tmp_path, **modules).values()) > 100 * TOLERANCE


def test_another_base_than_the_quantized_one_is_seen(tmp_path):
    """So the recording is of a quantized base: with the weights before they were, it differs."""
    assert min(differences(tmp_path, linear=Linear).values()) > 100 * TOLERANCE
