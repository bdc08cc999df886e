"""Adapters of experts and routers as the pinned manager, wrapper and kernels compute them.

What they gave is in `recordings/parts/lora_experts.jsonl.gz`, by `lora_experts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts, recording
from conformance.features.lora import lora_embeddings, lora_experts, moe_texts, texts
from conformance.features.lora.lora_experts import EXPERTS, HIDDEN, INNER, TOP_K
from conformance.mutants import edited
from mini_vllm.batch import ForwardBatch
from mini_vllm.lora import layers, weights
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import Transformer
from mini_vllm.tests.lora_support import CONFIG, write_adapter

CASES = parts.load("lora_experts")
RIGHT = [case for case in CASES if "fault" not in case]
FAULTS = {case["fault"]: case for case in CASES if "fault" in case}
LAYER = replace(
    CONFIG, hidden_size=HIDDEN, num_hidden_layers=1, moe=MoeConfig(EXPERTS, TOP_K, INNER, True)
)
TOLERANCE = 1e-5
"""Of the largest value of a step: float32 on both sides, and sums differ in their order."""
Found = tuple[float, float]


class _Layer(Transformer):
    """A model that is its first layer's router and experts."""

    inputs: np.ndarray
    outputs: np.ndarray
    logits: np.ndarray

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        back = np.argsort(batch.positions)
        block = self.layers[0].experts
        assert block is not None
        x = self.inputs[batch.positions]
        self.logits, self.outputs = block.gate(x)[back], block(x)[back]
        return np.zeros(0)


def differences(
    case: dict[str, Any], folder: Path, layers: ModuleType = layers, weights: ModuleType = weights
) -> Found:
    """The largest differences of all steps, as parts of the largest recorded value: of the
    router's logits, and of the layer's output."""
    held = {name: np.zeros(shape) for name, shape in expected_shapes(LAYER).items()}
    block = "model.layers.0.mlp"
    held[f"{block}.gate.weight"] = np.array(case["router"])
    for expert, (w13, w2) in enumerate(zip(case["w13"], case["w2"], strict=True)):
        name = f"{block}.experts.{expert}"
        held[f"{name}.gate_proj.weight"] = np.array(w13[:INNER])
        held[f"{name}.up_proj.weight"] = np.array(w13[INNER:])
        held[f"{name}.down_proj.weight"] = np.array(w2)
    wanted = weights.projections(LAYER)
    model = layers.AdaptedModel(_Layer(LAYER, held), wanted, len(case["steps"][0]["slots"]))
    adapters = {}
    for number, adapter in enumerate(case["adapters"], start=1):
        keys = {key: adapter[key] for key in ("r", "lora_alpha", "use_rslora")}
        tensors = {name: np.array(tensor) for name, tensor in adapter["tensors"].items()}
        path = write_adapter(
            folder / str(number), config=LAYER, target_modules=(), tensors=tensors, **keys
        )
        adapters[number] = weights.load_adapter(path, wanted, case["max_lora_rank"])
    return _worst(case, model, adapters)


def _worst(case: dict[str, Any], model: Any, adapters: dict[int, Any]) -> Found:
    found = []
    for step in case["steps"]:
        for slot, number in enumerate(step["slots"]):
            model.set_adapter(slot, adapters.get(number, {}))
        total = len(step["tokens"])
        model.step.slots = np.array(
            [step["slots"].index(number) if number else -1 for number in step["tokens"]]
        )
        model.transformer.inputs = np.array(step["inputs"], np.float32)
        batch = ForwardBatch(
            token_ids=np.zeros(total, np.int64), positions=np.arange(total),
            slot_mapping=np.arange(total), seq_lens=np.ones(total, np.int64),
            query_start_loc=np.arange(total + 1), block_tables=np.zeros((total, 1), np.int64),
            logits_indices=np.arange(total),
        )  # fmt: skip
        model.forward(batch)
        ours = model.transformer
        found.append(
            [
                np.abs(mine - np.array(theirs)).max() / np.abs(theirs).max()
                for mine, theirs in ((ours.logits, step["logits"]), (ours.outputs, step["outputs"]))
            ]
        )
    logits, outputs = np.max(found, axis=0).tolist()
    return logits, outputs


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case["kernel"])
def test_experts_and_router_give_what_the_pinned_wrapper_and_kernels_give(case, tmp_path):
    """Mixed steps, slots that are taken over, ranks of 2 to 8 in slots of 8 and of 128."""
    assert max(differences(case, tmp_path)) < TOLERANCE


def test_at_the_pin_experts_have_the_scaling_without_the_ranks_root(tmp_path):
    """`vllm/lora/lora_weights.py:155` `PackedLoRALayerWeights.pack_moe` computes it anew, as
    alpha / r, whatever `use_rslora` says. Ours is peft's, alpha / sqrt(r)."""
    case = FAULTS["scaling"]
    [adapter] = case["adapters"]
    assert adapter["use_rslora"]
    assert differences(case, tmp_path / "ours")[1] > 0.1
    as_there = case | {"adapters": [adapter | {"use_rslora": False}]}
    assert max(differences(as_there, tmp_path / "theirs")) < TOLERANCE


def test_at_the_pin_a_step_of_base_rows_goes_through_the_experts_of_the_step_before(tmp_path):
    """Of a step without adapters nothing is noted, and the experts' kernels read what was noted
    last: `vllm/lora/ops/triton_ops/lora_kernel_metadata.py:109` `LoRAKernelMeta.prepare_tensors`.
    https://github.com/vllm-project/vllm/issues/42008"""
    case = FAULTS["base rows alone"]
    before, alone = case["steps"]
    assert (set(before["tokens"]), set(alone["tokens"])) == ({1}, {0})
    assert differences(case | {"steps": [alone]}, tmp_path / "ours")[1] > 0.1
    as_there = case | {"steps": [before, alone | {"tokens": [1] * len(alone["tokens"])}]}
    assert max(differences(as_there, tmp_path / "theirs")) < TOLERANCE


MUTANTS = {
    "gate and up without their delta": (
        layers, "expert.gate_up_proj(x) + self.delta(x, *gate_up, 1.0)", "expert.gate_up_proj(x)",
    ),
    "down without its delta": (
        layers, "expert.down_proj(x) + self.delta(x, *down, 1.0)", "expert.down_proj(x)",
    ),
    "every expert with the first one's pairs": (
        layers, "zip(experts, pairs, strict=True)", "zip(experts, pairs[:1] * len(pairs))",
    ),
    "one group of adapted experts for all adapters": (
        layers, "ids[start:end] += len(every)", "ids[start:end] += len(experts)",
    ),
    "the pairs of the slot before": (
        layers, "(pairs := self.slots[slot]) is not None:\n                ids",
        "(pairs := self.slots[slot - 1]) is not None:\n                ids",
    ),
    "an adapted expert for the row behind the last": (
        layers, "ids[start:end] += len(every)", "ids[start : end + 1] += len(every)",
    ),
    "the rows before the tokens were sorted": (
        layers, "batch = group_by_slot(batch, self.step)", "group_by_slot(batch, self.step)",
    ),
    "experts that are not reset": (
        layers, "self.slots[slot] = found or None", "self.slots[slot] = found or self.slots[slot]",
    ),
    "gate and up swapped": (
        weights,
        'Projection(f"{name}.{gate}", hidden, inner), Projection(f"{name}.{up}", hidden, inner)',
        'Projection(f"{name}.{up}", hidden, inner), Projection(f"{name}.{gate}", hidden, inner)',
    ),
    "the scaling left out": (weights, "        b *= scaling\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name, tmp_path):
    module, old, new = MUTANTS[name]
    modules = {module.__name__.rpartition(".")[2]: edited(module, old, new)}
    assert max(differences(RIGHT[0], tmp_path, **modules)) > 100 * TOLERANCE


EXPERT = "base_model.model.model.layers.0.mlp.experts"
REFUSED = {
    "a matrix of an expert is missing": {
        f"{EXPERT}.{EXPERTS - 1}.up_proj.lora_{half}.weight": None for half in "AB"
    },
    "experts are stacked": {
        f"{EXPERT}.lora_A.weight": np.zeros((2 * EXPERTS, INNER)),
        f"{EXPERT}.lora_B.weight": np.zeros((HIDDEN, 2 * EXPERTS)),
    },
}  # fmt: skip


@pytest.mark.upstream
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_of_experts_raises_at_the_pin_as_well(name, tmp_path):
    """There by an assertion, when the weights are packed or put into a slot."""
    stacked = name == "experts are stacked"
    tensors: dict[str, Any] = {} if stacked else dict(CASES[0]["adapters"][0]["tensors"])
    tensors = {n: t for n, t in (tensors | REFUSED[name]).items() if t is not None}
    case = CASES[0] | {
        "adapters": [{"r": 3, "lora_alpha": 6, "use_rslora": False, "tensors": tensors}]
    }
    with lora_embeddings.on_a_processor(), pytest.raises(AssertionError):
        manager = lora_experts.manager_of(case)
        lora_embeddings.add_adapters(manager, case)
        manager.activate_adapter(1)
    with pytest.raises(ValueError, match="experts"):
        differences(case, tmp_path)


# ------------------------------------------------------------------ texts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_texts_of_adapted_routers_are_the_real_engines(ranks):
    """The model of experts whole, float32 and greedy; ours on one rank and on two."""
    [found] = recording.lines(texts.KEPT / "texts-lora-moe.jsonl.gz")
    assert (len(found["outputs"]), found["max_loras"]) == (64, 4)
    apart = [len({tuple(t) for t in found["outputs"][i : i + 4]}) == 4 for i in range(0, 64, 4)]
    assert sum(apart) > 10, "adapters that change nothing prove nothing"
    said = moe_texts.mini(found, tensor_parallel_size=ranks)
    assert not any(texts.differing(found, said, tuple(moe_texts.PARTS)).values())
