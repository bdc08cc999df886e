"""What the tests of adapters share: a tiny model, folders in PEFT's layout, merged weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from mini_vllm import EngineParts, LLMEngine, Sampler, SamplingParams
from mini_vllm.lora.request import LoRARequest
from mini_vllm.lora.weights import EMBEDDING, projections
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.transformer import ModelConfig, Transformer

CONFIG = ModelConfig(257, 16, 24, 2, 2, 1, 8, 512)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS: list[dict[str, Any]] = [
    {"r": 2, "lora_alpha": 4, "target_modules": ALL},
    {"r": 1, "lora_alpha": 3, "target_modules": ("q_proj", "v_proj")},
    {"r": 5, "lora_alpha": 5, "target_modules": ("k_proj", "down_proj"), "use_rslora": True},
    {"r": 8, "lora_alpha": 2, "target_modules": ("o_proj", "up_proj")},
    {"r": 3, "lora_alpha": 6, "target_modules": ("embed_tokens", "lm_head", "v_proj")},
    {"r": 6, "lora_alpha": 2, "target_modules": ("embed_tokens",)},
    {"r": 4, "lora_alpha": 6, "target_modules": ("lm_head",)},
]
"""Ranks, scalings and targets that differ, so that a mix-up shows."""
EXPERT_KINDS: list[dict[str, Any]] = [
    {"r": 2, "lora_alpha": 4, "target_modules": ("experts",)},
    {"r": 3, "lora_alpha": 3, "target_modules": (*ALL, "experts", "gate"), "use_rslora": True},
    {"r": 4, "lora_alpha": 2, "target_modules": ("gate",)},
    {"r": 1, "lora_alpha": 3, "target_modules": ("experts", "lm_head", "embed_tokens")},
    {"r": 2, "lora_alpha": 3, "target_modules": ("q_proj", "o_proj")},
]
"""Of a model with experts: its experts, its router, both, neither."""


def weights(config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    """Of the tiny model, float64."""
    rng = np.random.default_rng(0)
    return {n: rng.normal(0, 0.4, s) for n, s in expected_shapes(config).items()}


def tiny() -> Transformer:
    """Two layers of 16."""
    return Transformer(CONFIG, weights(), "float64")


def write_adapter(
    folder: Path,
    seed: int = 0,
    config: ModelConfig = CONFIG,
    size: float = 0.4,
    tensors: dict[str, np.ndarray | None] | None = None,
    **keys: Any,
) -> Path:
    """A folder in PEFT's layout with random weights.

    Args:
        size: standard deviation of A and B: large, so that texts part at once.
        tensors: added to the file; a name with None is left out.
        keys: of `adapter_config.json`, in the place of `KINDS[0]`'s; None leaves one out. Of
            `target_modules` "experts" stands for all matrices of all experts.
    """
    raw = {"peft_type": "LORA", "bias": "none", **KINDS[0], **keys}
    raw = {key: value for key, value in raw.items() if value is not None}
    rng = np.random.default_rng(seed)
    rank, held = int(raw.get("r", 2)), dict[str, np.ndarray | None]()
    for packed in projections(config).values():
        for p in packed:
            target = "experts" if ".experts." in p.name else p.name.rpartition(".")[2]
            if target in raw.get("target_modules", ()):
                name = f"base_model.model.{p.name}.lora"
                a, b = (
                    (f"{name}_embedding_A", f"{name}_embedding_B") if p.name == EMBEDDING
                    else (f"{name}_A.weight", f"{name}_B.weight")
                )  # fmt: skip
                held[a] = rng.normal(0, size, (rank, p.in_features))
                held[b] = rng.normal(0, size, (p.out_features, rank))
    held |= tensors or {}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {n: t.astype(np.float32) for n, t in held.items() if t is not None}
    save_file(kept, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return folder


def adapters(folder: Path, count: int = len(KINDS)) -> list[LoRARequest]:
    """Adapters 1 to `count`, written below `folder`."""
    made = []
    for number in range(1, count + 1):
        kind = KINDS[(number - 1) % len(KINDS)]
        path = write_adapter(folder / f"a{number}", seed=number, **kind)
        made.append(LoRARequest(f"a{number}", number, str(path)))
    return made


def merged(adapter: LoRARequest | None, config: ModelConfig = CONFIG) -> Transformer:
    """The tiny model with W + s B A in the place of every W, read here by other code.

    An embedding's W is [vocab, hidden] and its B A the other way round; a head that shares it has
    a W of its own afterwards.
    """
    new = weights(config)
    new.setdefault("lm_head.weight", new["model.embed_tokens.weight"])
    if adapter is not None:
        raw = json.loads((Path(adapter.lora_path) / "adapter_config.json").read_text())
        scaling = raw["lora_alpha"] / (math.sqrt(raw["r"]) if raw.get("use_rslora") else raw["r"])
        held = load_file(Path(adapter.lora_path) / "adapter_model.safetensors")
        for name in [n for n in held if ".lora_A." in n]:
            a, b = (
                held[name.replace("lora_A", half)].astype(float) for half in ("lora_A", "lora_B")
            )
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            new[target] = new[target] + scaling * (b @ a)
        if (name := "base_model.model.model.embed_tokens.lora_embedding_A") in held:
            a, b = (held[name[:-1] + half].astype(float) for half in "AB")
            target = "model.embed_tokens.weight"
            new[target] = new[target] + scaling * (b @ a).T
    return Transformer(replace(config, tie_word_embeddings=False), new, "float64")


class Watching(Sampler):
    """Keeps every row it is asked about, by request in order of asking."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []

    def sample(self, logits: np.ndarray, params: Any, rng: Any = None) -> int:
        self.rows.append(logits.copy())
        return super().sample(logits, params, rng)


def answers(
    engine: LLMEngine,
    prompts: Sequence[Any],
    wanted: Sequence[LoRARequest | None],
    max_tokens: int = 6,
) -> list[list[int]]:
    """Greedy tokens of each prompt under its adapter."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [r.outputs[0].token_ids for r in engine.generate(prompts, params, lora_request=wanted)]


def alone(prompt: Any, adapter: LoRARequest | None, max_tokens: int = 6) -> list[int]:
    """What the merged model answers: no adapter machinery, no batch, no cache."""
    engine = LLMEngine(merged(adapter), enable_prefix_caching=False)
    return answers(engine, [prompt], [None], max_tokens)[0]


def watched(**knobs: Any) -> tuple[LLMEngine, Watching]:
    """An engine with adapters over the tiny model, and the rows it sampled from."""
    watching = Watching()
    return LLMEngine(tiny(), parts=EngineParts(sampler=lambda: watching), **knobs), watching
