"""From an adapter's folder in PEFT's layout to the A and B of each projection.

Promises: nothing half loaded: configuration, names, shapes and values are checked before anything
is kept, and each refusal is a ValueError that names the file and what was wrong. The scaling goes
into B once, here. Mirrors `vllm/lora/peft_helper.py:22` `PEFTHelper` and
`vllm/lora/lora_model.py:167` `LoRAModel.from_local_checkpoint`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.config import number, whole
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import Shard
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import ModelConfig

Pair = tuple[np.ndarray, np.ndarray]
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
ADAPTS_EMBEDDING = (
    "LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM",
)  # fmt: skip
"""Architectures that upstream lets adapt both: `vllm/model_executor/models/llama.py:510`
`LlamaForCausalLM.embedding_modules`. Qwen2 has none."""
_WEIGHT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_BASE = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
_UNSUPPORTED = (
    "modules_to_save", "use_dora", "rank_pattern", "alpha_pattern", "layer_replication",
)  # fmt: skip
"""Keys that must be absent, empty or false. The real engine refuses the first two and does not look
at the others, which leaves their scaling or their layers wrong without a word."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix as a checkpoint names it."""

    name: str
    """Such as `model.layers.0.self_attn.q_proj`."""
    in_features: int
    out_features: int


def projections(config: ModelConfig) -> dict[str, tuple[Projection, ...]]:
    """What can be adapted: by the name of the model's part, the matrices packed in it, in order.

    Every linear of the decoder layers, routers and experts too; and where the architecture has it
    so, the embedding and the head. An embedding takes the vocabulary in: its A is [r, vocab_size],
    its B [hidden_size, r].
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    found: dict[str, tuple[Projection, ...]] = {}
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found[f"{attention}.qkv_proj"] = (
            Projection(f"{attention}.q_proj", hidden, heads),
            Projection(f"{attention}.k_proj", hidden, kv_heads),
            Projection(f"{attention}.v_proj", hidden, kv_heads),
        )
        found[f"{attention}.o_proj"] = (Projection(f"{attention}.o_proj", heads, hidden),)
        if config.moe is None or not config.moe.is_sparse(layer):
            found[f"{mlp}.gate_up_proj"] = (
                Projection(f"{mlp}.gate_proj", hidden, inner),
                Projection(f"{mlp}.up_proj", hidden, inner),
            )
            found[f"{mlp}.down_proj"] = (Projection(f"{mlp}.down_proj", inner, hidden),)
        else:
            found |= _of_experts(config.moe, f"model.layers.{layer}", hidden)
    if config.architecture in ADAPTS_EMBEDDING:
        found[EMBEDDING] = (Projection(EMBEDDING, config.vocab_size, hidden),)
        found[HEAD] = (Projection(HEAD, hidden, config.vocab_size),)
    return found


def _of_experts(moe: MoeConfig, layer: str, hidden: int) -> dict[str, tuple[Projection, ...]]:
    """A layer's router, and its experts one by one, as peft names a list of them.

    `vllm/model_executor/models/qwen3_moe.py:519` `Qwen3MoeModel.get_expert_mapping`
    """
    block, gate, up, down = moe.names
    inner, router = moe.intermediate_size, f"{layer}.{block}.gate"
    found: dict[str, tuple[Projection, ...]]
    found = {router: (Projection(router, hidden, moe.num_experts),)}
    for expert in moe.ids_here:
        name = f"{layer}.{block}.experts.{expert}"
        found[f"{name}.gate_up_proj"] = (
            Projection(f"{name}.{gate}", hidden, inner), Projection(f"{name}.{up}", hidden, inner),
        )  # fmt: skip
        found[f"{name}.down_proj"] = (Projection(f"{name}.{down}", inner, hidden),)
    return found


def load_adapter(
    folder: str | Path,
    wanted: Mapping[str, Sequence[Projection]],
    max_lora_rank: int,
    dtype: np.dtype | type | str = np.float32,
) -> dict[str, Pair]:
    """Read and check an adapter.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.
        wanted: `projections` of the model.
        max_lora_rank: largest rank that is accepted.
        dtype: of the result: the model's.

    Returns:
        By matrix name A [r, in] and B [out, r], the scaling inside B.

    Raises:
        ValueError: a file is missing or damaged; a rank or feature that is not supported; a weight
            that is foreign, of another shape, or without its other half.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"lora_path={str(folder)!r}: no such folder")
    rank, scaling = _read_config(folder / "adapter_config.json", max_lora_rank)
    shard = Shard.open(folder / "adapter_model.safetensors")
    known = {p.name: p for packed in wanted.values() for p in packed}
    names = _by_module(shard, known)
    _check_experts(shard, names, known)
    found: dict[str, Pair] = {}
    for module, halves in names.items():
        for half in "AB":
            if half not in halves:
                raise ValueError(f"{shard.path}: {module}: lora_{half} is missing")
        shape = known[module]
        by = f"r={rank} of adapter_config.json on {module}"
        shard.check(halves["A"], (rank, shape.in_features), by)
        shard.check(halves["B"], (shape.out_features, rank), by)
        a, b = (shard.read(halves[half]).astype(dtype) for half in "AB")
        b *= scaling
        found[module] = a, b
    return found


def pack(packed: Sequence[Projection], modules: Mapping[str, Pair]) -> Pair | None:
    """One A and one B for a linear that holds several matrices; None if none is adapted.

    The A of all stand on top of each other [sum of r, in], the B on a diagonal of blocks
    [out, sum of r], so that two products serve them all: q, k and v, or gate and up.
    """
    pairs = [(p, modules[p.name]) for p in packed if p.name in modules]
    if not pairs:
        return None
    stacked = np.concatenate([a for _, (a, _) in pairs])
    blocks = np.zeros((sum(p.out_features for p in packed), len(stacked)), dtype=stacked.dtype)
    row = column = 0
    for projection in packed:
        if projection.name in modules:
            b = modules[projection.name][1]
            blocks[row : row + len(b), column : column + b.shape[1]] = b
            column += b.shape[1]
        row += projection.out_features
    return stacked, np.asfortranarray(blocks)  # B^T in the order the product reads: 3x faster


def _read_config(path: Path, max_lora_rank: int) -> tuple[int, float]:
    """Rank and scaling: alpha / r, with rsLoRA alpha / sqrt(r)."""
    raw = read_json(path)
    missing = [key for key in ("r", "lora_alpha", "target_modules") if raw.get(key) is None]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} is missing")
    for key in _UNSUPPORTED:
        if raw.get(key):
            raise ValueError(f"{path}: {key}={raw[key]!r}: not supported")
    for key, accepted in (("bias", "none"), ("peft_type", "LORA")):
        if raw.get(key, accepted) != accepted:
            raise ValueError(f"{path}: {key}={raw[key]!r}: need {accepted!r}")
    if not isinstance(raw["target_modules"], list | str):
        raise ValueError(f"{path}: target_modules={raw['target_modules']!r}: need names")
    rank = whole(f"{path}: r", raw["r"], 1)
    if rank > max_lora_rank:
        raise ValueError(f"{path}: r={rank}: greater than max_lora_rank={max_lora_rank}")
    return rank, _scaling(path, raw, rank)


def _scaling(path: Path, raw: Mapping[str, Any], rank: int) -> float:
    rslora = raw.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise ValueError(f"{path}: use_rslora={rslora!r}: need true or false")
    return number(f"{path}: lora_alpha", raw["lora_alpha"]) / (math.sqrt(rank) if rslora else rank)


def _by_module(shard: Shard, known: Mapping[str, Projection]) -> dict[str, dict[str, str]]:
    """Per matrix the tensor that is its A and the one that is its B."""
    names: dict[str, dict[str, str]] = {}
    for tensor in shard.tensors:
        if _is_base_weight(tensor, shard, known):
            continue
        match = _WEIGHT.fullmatch(tensor)
        if match is None or (match[3] is None) == (match[1] == EMBEDDING):
            raise ValueError(
                f"{shard.path}: {tensor} is not a supported LoRA weight; need names that end in "
                "lora_A.weight or lora_B.weight, of an embedding in lora_embedding_A or "
                "lora_embedding_B"
            )
        names.setdefault(match[1], {})[match[2] or match[3]] = tensor
    if not names:
        raise ValueError(f"{shard.path}: holds no weights")
    unexpected = sorted(set(names) - set(known))
    if unexpected:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
        shown = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        raise ValueError(f"{shard.path}: the model has no {shown} to adapt; it has {kinds}")
    return names


def _check_experts(
    shard: Shard, names: Mapping[str, object], known: Mapping[str, Projection]
) -> None:
    """A layer's experts are adapted all or not at all, each with its three matrices.

    `vllm/lora/lora_weights.py:155` `PackedLoRALayerWeights.pack_moe`
    """
    layers = {name.partition(".experts.")[0] for name in names if ".experts." in name}
    for name in known:
        layer, _, expert = name.partition(".experts.")
        if expert and layer in layers and name not in names:
            raise ValueError(
                f"{shard.path}: {name} is missing: an adapter of a layer's experts needs all three "
                "matrices of each"
            )


def _is_base_weight(tensor: str, shard: Shard, known: Mapping[str, Projection]) -> bool:
    """Whether it is the base's own embedding or head, which PEFT may write beside the adapter's.

    It is not loaded: `vllm/lora/utils.py:199` `is_base_embedding_weights`. One of another size is
    refused, since its new tokens would be left out without a word.
    """
    match = _BASE.fullmatch(tensor)
    if match is None or match[1] not in (EMBEDDING, HEAD) or EMBEDDING not in known:
        return False
    table = known[EMBEDDING]
    shard.check(tensor, (table.in_features, table.out_features), "the model")
    return True
