"""The architectures whose layers keep different things: what `config.json` says, and whose names.

Promises: each family is one entry of a table, and its names one list of rules; a field that would
change the model and is not implemented is refused by name. `register_model` adds an architecture of
one's own. Mirrors `vllm/model_executor/models/registry.py:71` `_TEXT_GENERATION_MODELS` and
`vllm/model_executor/models/registry.py:963` `_ModelRegistry.register_model`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_vllm.batch import Model
from mini_vllm.models.config import SUPPORTED, Fields, expected_shapes, shown
from mini_vllm.models.hybrid import (
    FULL,
    MAMBA,
    SLIDING,
    HybridConfig,
    HybridTransformer,
    hybrid_shapes,
)
from mini_vllm.models.mamba import MambaConfig
from mini_vllm.models.mapping import Renamed, Rule, Stacked, check_rules, places_of
from mini_vllm.models.transformer import ModelConfig


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a checkpoint of one architecture becomes a model.

    The config may be of any type; the engine reads `vocab_size`, and `max_position_embeddings` if
    there is one. A model that keeps K and V has `kv_specs`; without it is computed anew each time.
    """

    parse: Callable[[Mapping[str, Any], Path], Any]
    """`config.json` and its path to the model's config; ValueError to refuse."""
    parameters: Callable[[Any], Mapping[str, tuple[int, ...]]]
    """Every parameter the model needs, by name, with its shape."""
    build: Callable[..., Model]
    """`build(config, parameters, dtype)` to the model; one of the engine's own families also gets
    `attention`, `linear`, `block_size`, `max_model_len` and `mamba_cache_mode` by name."""
    rules: Callable[[Any], Sequence[Rule]] = lambda config: ()
    """How names and rows on disk go to the parameters."""
    takes_cache_options: bool = False


def parse_gemma3(raw: Mapping[str, Any], source: Path) -> HybridConfig:
    """A `Gemma3ForCausalLM`, as `transformers` writes it before and after its version 5.

    Raises:
        ValueError: a field of the wrong type or out of range, or one that is not implemented.
    """
    fields = Fields(raw, source)
    _refuse(fields, {
        "attn_logit_softcapping": (), "final_logit_softcapping": (), "quantization_config": (),
        "use_bidirectional_attention": (False,), "attention_bias": (False,),
    })  # fmt: skip
    if (act := raw.get("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        fields.refuse("hidden_activation", "'gelu_pytorch_tanh'")
    num_layers = fields.size("num_hidden_layers")
    every = fields.size("sliding_window_pattern", 6)
    default = [FULL if (i + 1) % every == 0 else SLIDING for i in range(num_layers)]
    kinds = _layer_types(fields, num_layers, {FULL: FULL, SLIDING: SLIDING}, default)
    theta, local, factor = _gemma_rope(fields)
    hidden = fields.size("hidden_size")
    return HybridConfig(
        **_sizes(fields, head_dim=256),
        layer_types=kinds,
        sliding_window=fields.size("sliding_window", 4096),
        rope_theta=theta, rope_local_base_freq=local, rope_factor=factor,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
        tie_word_embeddings=raw.get("tie_word_embeddings") is not False,
        qk_norm=True, has_outer_norms=True, activation=str(act),
        attention_scale=fields.number("query_pre_attn_scalar", 256, least=1e-6) ** -0.5,
        embedding_multiplier=hidden**0.5,
        architecture="Gemma3ForCausalLM",
    )  # fmt: skip


def _gemma_rope(fields: Fields) -> tuple[float, float, float]:
    """Base of the layers without and with a window, and the stretch of those without."""
    rope = fields.part("rope_parameters")
    if rope is not None and ({FULL, SLIDING} & rope.raw.keys()):
        full, sliding = rope.part(FULL), rope.part(SLIDING)
        if sliding is not None and sliding.raw.get("rope_type", "default") != "default":
            sliding.refuse("rope_type", "'default'")
        theta = 1e6 if full is None else full.number("rope_theta", 1e6, least=1.0)
        local = 1e4 if sliding is None else sliding.number("rope_theta", 1e4, least=1.0)
        return theta, local, _linear_factor(full)
    theta = fields.number("rope_theta", 1e6, least=1.0)
    local = fields.number("rope_local_base_freq", 1e4, least=1.0)
    return theta, local, _linear_factor(fields.part("rope_scaling"))


def _linear_factor(rope: Fields | None) -> float:
    """What positions are divided by: that of `rope_type` "linear", else 1."""
    if rope is None:
        return 1.0
    kind = next((rope.raw[k] for k in ("rope_type", "type") if rope.raw.get(k)), "default")
    if kind not in ("default", "linear"):
        rope.refuse("rope_type", "'default' or 'linear'")
    return rope.number("factor", None, least=1.0) if kind == "linear" else 1.0


def parse_granite_hybrid(raw: Mapping[str, Any], source: Path) -> HybridConfig:
    """A `GraniteMoeHybridForCausalLM` without experts: Mamba-2 layers and some of attention.

    Raises:
        ValueError: a field of the wrong type or out of range, or one that is not implemented.
    """
    fields = Fields(raw, source)
    _refuse(fields, {
        "num_local_experts": (0,), "quantization_config": (), "hidden_act": ("silu",),
        "attention_bias": (False,), "normalization_function": ("rmsnorm",),
    })  # fmt: skip
    if fields.raw.get("num_local_experts") is None:
        fields.refuse("num_local_experts", "0: layers of experts are not supported here")
    limit = raw.get("time_step_limit")
    if limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        fields.refuse("time_step_limit", "null or [0.0, Infinity]")
    num_layers = fields.size("num_hidden_layers")
    names = {"mamba": MAMBA, "linear_attention": MAMBA, "attention": FULL, FULL: FULL}
    kinds = _layer_types(fields, num_layers, names, None)
    position = raw.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        fields.refuse("position_embedding_type", "'rope', 'nope' or null")
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    if rope is not None and rope.raw.get("rope_type", "default") != "default":
        rope.refuse("rope_type", "'default'")
    theta = fields.number("rope_theta", 10000.0, least=1.0)
    sizes = _sizes(fields)
    sizes["intermediate_size"] = fields.size("shared_intermediate_size", 1024)
    hidden, heads = sizes["hidden_size"], fields.size("mamba_n_heads", 128)
    inner = hidden * fields.size("mamba_expand", 2)
    dim = raw.get("mamba_d_head", "auto")
    if (dim not in (None, "auto") and dim != inner // heads) or inner % heads:
        fields.refuse("mamba_d_head", f"mamba_expand x hidden_size / mamba_n_heads={heads}")
    groups = fields.size("mamba_n_groups", 1)
    if heads % groups:
        fields.refuse("mamba_n_groups", f"a divisor of mamba_n_heads={heads}")
    return HybridConfig(
        **sizes,
        layer_types=kinds,
        rope_theta=theta if rope is None else rope.number("rope_theta", theta, least=1.0),
        has_rope=position == "rope",
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_scale=fields.number("attention_multiplier", 1.0, least=1e-9),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0, least=1e-9),
        residual_multiplier=fields.number("residual_multiplier", 1.0, least=1e-9),
        logits_scaling=fields.number("logits_scaling", 1.0, least=1e-9),
        mamba=MambaConfig(
            heads, inner // heads, fields.size("mamba_d_state", 256),
            fields.size("mamba_d_conv", 4, least=2), groups, fields.size("mamba_chunk_size", 256),
            raw.get("mamba_conv_bias") is not False, fields.flag("mamba_proj_bias"),
        ),
        architecture="GraniteMoeHybridForCausalLM",
    )  # fmt: skip


def _sizes(fields: Fields, head_dim: int | None = None) -> dict[str, Any]:
    """The sizes that both families have."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    dim = fields.size("head_dim", head_dim or hidden // heads or 1)
    if dim % 2:
        fields.refuse("head_dim", "an even size")
    return {
        "vocab_size": fields.size("vocab_size"), "hidden_size": hidden,
        "intermediate_size": fields.size("intermediate_size"),
        "num_hidden_layers": fields.size("num_hidden_layers"),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "max_position_embeddings": fields.size("max_position_embeddings", 2048, least=2),
    }  # fmt: skip


def _layer_types(
    fields: Fields, num_layers: int, known: Mapping[str, str], default: list[str] | None
) -> tuple[str, ...]:
    """The kind of each layer, by the names that `config.json` may use."""
    names = next((n for n in ("layer_types", "layers_block_type") if fields.raw.get(n)), None)
    if names is None:
        if default is None:
            fields.refuse("layer_types", "the kind of each layer")
        return tuple(default)
    kinds = fields.raw[names]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not {*map(str, kinds)} <= {*known}
    ):
        fields.refuse(names, f"num_hidden_layers={num_layers} of {', '.join(map(repr, known))}")
    return tuple(known[kind] for kind in kinds)


def _refuse(fields: Fields, harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse by name what would change the model and is left out here."""
    for name, values in harmless.items():
        value = fields.raw.get(name)
        if value is not None and value not in values:
            fields.refuse(name, " or ".join(map(repr, values)) or "null: it is not supported")


def gemma3_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """Gemma 3 keeps Q, K, V, gate and up apart on disk."""
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    inner = config.intermediate_size
    return (
        Stacked("self_attn.qkv_proj", (
            ("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv),
        )),
        Stacked("mlp.gate_up_proj", (("mlp.gate_proj", inner), ("mlp.up_proj", inner))),
    )  # fmt: skip


def granite_rules(config: HybridConfig) -> tuple[Rule, ...]:
    """Granite's MLP is fused on disk already, under another name."""
    return (
        Renamed("shared_mlp.input_linear", "mlp.gate_up_proj"),
        Renamed("shared_mlp.output_linear", "mlp.down_proj"),
        *gemma3_rules(config)[:1],
    )


def llama_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """Llama, Qwen2, Qwen3 and their mixtures: three projections and two lie in one each."""
    rules = list(gemma3_rules(config))
    if config.moe is not None:
        inner, (_, gate, up, _) = config.moe.intermediate_size, config.moe.names
        rules.append(Stacked("gate_up_proj", ((gate, inner), (up, inner))))
    return tuple(rules)


def fused_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The parameters that `llama_rules` fill, by name: those of the checkpoint, fused."""
    rules, rows = llama_rules(config), Counter[str]()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(config).items():
        [place] = places_of(name, rules)
        rows[place.parameter] += shape[0]
        shapes[place.parameter] = (rows[place.parameter], *shape[1:])
    return shapes


ARCHITECTURES: dict[str, Architecture] = {
    "Gemma3ForCausalLM": Architecture(
        parse_gemma3, hybrid_shapes, HybridTransformer, gemma3_rules, takes_cache_options=True
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        parse_granite_hybrid, hybrid_shapes, HybridTransformer, granite_rules,
        takes_cache_options=True,
    ),
}  # fmt: skip
"""By the first name in `architectures`; those of `config.SUPPORTED` are read there."""


def register_model(name: str, architecture: Architecture) -> None:
    """Have checkpoints whose `config.json` names `name` built by `architecture`.

    Upstream lets a name be registered again and warns; here it is refused.

    Raises:
        ValueError: a name that is taken, or what is not an `Architecture`.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}: need the name that config.json says")
    if name in ARCHITECTURES or name in SUPPORTED:
        raise ValueError(f"name={name!r}: this architecture is there already")
    if not isinstance(architecture, Architecture):
        raise ValueError(f"architecture={shown.repr(architecture)}: need an Architecture")
    for part in ("parse", "parameters", "build", "rules"):
        if not callable(given := getattr(architecture, part)):
            raise ValueError(f"architecture.{part}={shown.repr(given)}: need a function")
    ARCHITECTURES[name] = architecture


def architecture_of(raw: Mapping[str, Any]) -> Architecture | None:
    """What builds the model of this `config.json`; None if it is one of `config.SUPPORTED`."""
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return ARCHITECTURES.get(first) if isinstance(first, str) else None


def rules_of(architecture: Architecture, config: Any) -> tuple[Rule, ...]:
    """Its rules, checked.

    Raises:
        ValueError: see `check_rules`.
    """
    return check_rules(architecture.rules(config))
