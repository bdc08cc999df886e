"""From `config.json` to `ModelConfig`, and the tensors such a model must have.

Promises: every field that is used is checked for type and range, and a wrong one is a ValueError
that names file, field and value. `null` is as good as absent, as in `transformers`. Mirrors the
checks of `vllm/config/model.py:117` `ModelConfig`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mini_vllm.models.fp8 import SCALE, Fp8Config
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import ModelConfig, RopeScaling

SUPPORTED = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
)  # fmt: skip
MOST = (1 << 31) - 1
"""Bound on every size and token id."""

shown = reprlib.Repr()
"""Values in messages: of a nested or endless one only the beginning."""
shown.maxstring = shown.maxother = 60


class Fields:
    """A JSON object whose values are checked as they are taken."""

    def __init__(self, raw: Mapping[str, Any], source: Path | str) -> None:
        self.raw = raw
        self.source = source

    def refuse(self, name: str, need: str) -> NoReturn:
        """Raise the ValueError that names file, field and value."""
        value = shown.repr(self.raw.get(name))
        raise ValueError(f"{self.source}: {name}={value}: need {need}")

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer from `least` to `MOST`; without a default the field must be there."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= MOST:
            what = "a positive integer" if least == 1 else f"an integer of at least {least}"
            self.refuse(name, f"{what}, at most {MOST}")
        return value

    def number(self, name: str, default: float | None, least: float, most: float = 1e30) -> float:
        """A number from `least` to `most`, so never NaN or infinite."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        number = value if isinstance(value, int | float) and value is not True else math.nan
        if not least <= number <= most:  # exact for huge integers; never true of NaN
            self.refuse(name, f"a number from {least:g} to {most:g}")
        return float(number)

    def flag(self, name: str) -> bool:
        """true or false; absent is false."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, "true or false")
        return bool(value)

    def part(self, name: str) -> Fields | None:
        """An object within, or None."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, f"{self.source}: {name}") if value else None


LLAVA = "LlavaForConditionalGeneration"


def is_llava(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a language model with a tower for pictures in front."""
    names = raw.get("architectures")
    return isinstance(names, list) and names[:1] == [LLAVA]


def text_config(raw: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The language model's part of a LLaVA `config.json`.

    Raises:
        ValueError: it has none.
    """
    part = Fields(raw, source).part("text_config")
    if part is None:
        Fields(raw, source).refuse("text_config", "an object")
    return {"architectures": [SUPPORTED[0]], **part.raw}


def parse_config(
    raw: Mapping[str, Any], source: Path, known: Sequence[str] = SUPPORTED
) -> ModelConfig:
    """A `config.json` as `ModelConfig`; `source` and the `known` architectures stand in errors.

    Raises:
        ValueError: a field of the wrong type or out of range, an unknown architecture, an
            activation other than silu, or an attention or rotary variant that is not implemented.
    """
    fields = Fields(raw, source)
    architecture = _architecture(fields, known)
    if raw.get("hidden_act", "silu") != "silu":
        value = shown.repr(raw["hidden_act"])
        raise ValueError(f"{source}: hidden_act={value}: only 'silu' is supported")
    if fields.flag("use_sliding_window"):
        raise ValueError(f"{source}: use_sliding_window=true: sliding windows are not supported")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"{source}: num_attention_heads={heads} does not divide hidden_size={hidden}, and "
            "there is no head_dim"
        )
    head_dim = fields.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"{source}: head_dim={head_dim}: rotary embedding needs an even size")
    theta, scaling = _parse_rope(fields)
    num_layers = fields.size("num_hidden_layers")
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.size("max_position_embeddings", 2048, least=2),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=fields.flag("mlp_bias"),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        architecture=architecture,
        moe=_parse_moe(fields, architecture),
        quant_config=_parse_fp8(fields),
    )


def _parse_fp8(fields: Fields) -> Fp8Config | None:
    """What the config says about quantization, None for a checkpoint without.

    `vllm/model_executor/layers/quantization/fp8.py:159` `Fp8Config.from_config`
    """
    part = fields.part("quantization_config")
    if part is None:
        return None
    kinds: dict[str, tuple[Any, ...]] = {
        "quant_method": ("fp8",), "activation_scheme": ("dynamic",), "fmt": (None, "e4m3"),
        "scale_fmt": (None, "float"),
    }  # fmt: skip
    for name, accepted in kinds.items():
        if part.raw.get(name) not in accepted:
            others = f": only block-scaled FP8 is supported, of {', '.join(SUPPORTED)}"
            part.refuse(name, " or ".join(map(repr, accepted)) + others)
    block = part.raw.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or block[0] != block[1]:
        part.refuse("weight_block_size", "two equal sizes, such as [128, 128]")
    if type(block[0]) is not int or not 1 <= block[0] <= MOST:
        part.refuse("weight_block_size", f"positive integers, at most {MOST}")
    names = ("ignored_layers", "modules_to_not_convert")  # of both the first that is not empty
    for name in names:
        listed = part.raw.get(name) or []
        if not isinstance(listed, list) or not all(isinstance(n, str) for n in listed):
            part.refuse(name, "a list of modules' names")
        if listed:
            break
    return Fp8Config((block[0], block[1]), frozenset(listed))


def _parse_moe(fields: Fields, architecture: str) -> MoeConfig | None:
    """What the config says about experts, None for a dense architecture.

    The number of experts stands under either of two names, whichever wrote the file.
    """
    is_mixtral = architecture == "MixtralForCausalLM"
    if not is_mixtral and architecture != "Qwen3MoeForCausalLM":
        return None
    _refuse_other_experts(fields)
    names = ("num_experts", "num_local_experts")
    given = [name for name in names if fields.raw.get(name) is not None]
    num_experts = fields.size((given or [names[is_mixtral]])[0])
    if any(fields.raw[name] != num_experts for name in given):
        fields.refuse(given[1], f"the same as num_experts={num_experts}")
    top_k = fields.size("num_experts_per_tok")
    if top_k > num_experts:
        fields.refuse("num_experts_per_tok", f"at most {num_experts}, the number of experts")
    if is_mixtral:
        names_of = ("block_sparse_moe", "w1", "w3", "w2")
        inner = fields.size("intermediate_size")
        return MoeConfig(num_experts, top_k, inner, norm_topk_prob=True, names=names_of)
    dense = fields.raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int and 0 <= i <= MOST for i in dense):
        fields.refuse("mlp_only_layers", "a list of layer numbers, from 0")
    return MoeConfig(
        num_experts,
        top_k,
        fields.size("moe_intermediate_size"),
        fields.flag("norm_topk_prob"),
        frozenset(dense),
        fields.size("decoder_sparse_step", 1),
    )


def _refuse_other_experts(fields: Fields) -> None:
    """Refuse by name what other mixtures have and this one would silently leave out."""
    off: dict[str, tuple[Any, ...]] = {
        "shared_expert_intermediate_size": (0,), "n_shared_experts": (0,),
        "num_shared_experts": (0,), "scoring_func": ("softmax",), "n_group": (0, 1),
        "topk_group": (0, 1), "num_expert_group": (0, 1), "routed_scaling_factor": (1,),
        "topk_method": ("greedy",), "first_k_dense_replace": (0,), "zero_expert_num": (0,),
        "mlp_bias": (False,), "sliding_window": (),
    }  # fmt: skip
    for name, harmless in off.items():
        value = fields.raw.get(name)
        if name == "sliding_window" and fields.raw.get("use_sliding_window") is False:
            continue  # a number that is switched off
        if value is not None and value not in harmless:
            need = " or ".join(repr(v) for v in harmless) or "null"
            fields.refuse(name, f"{need}: another kind of model with experts is not supported")


def _architecture(fields: Fields, known: Sequence[str]) -> str:
    """The first of `architectures`, one of `SUPPORTED`."""
    names = fields.raw.get("architectures") or [None]
    if not isinstance(names, list):
        fields.refuse("architectures", "a list of names")
    for name in SUPPORTED:
        if names[0] == name:
            return name
    raise ValueError(
        f"{fields.source}: architecture {shown.repr(names[0])} is not supported; "
        f"supported: {', '.join(known)}"
    )


def _parse_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    rope = fields.part("rope_parameters") or fields.part("rope_scaling")
    theta = fields.number("rope_theta", 10000.0, least=1.0)
    if rope is None:
        return theta, None
    theta = rope.number("rope_theta", theta, least=1.0)
    raw = rope.raw
    kind = next((raw[key] for key in ("rope_type", "type") if raw.get(key) is not None), "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"{fields.source}: rope_type={shown.repr(kind)} is not supported; "
            "supported: default, llama3"
        )
    names = (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    )  # fmt: skip
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise ValueError(f"{fields.source}: llama3 rope scaling lacks {', '.join(missing)}")
    scaling = RopeScaling(
        rope.number("factor", None, least=1.0),
        low := rope.number("low_freq_factor", None, least=1e-6),
        rope.number("high_freq_factor", None, least=1e-6),
        rope.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= low:
        rope.refuse("high_freq_factor", f"more than low_freq_factor={low}")
    return theta, scaling


def parse_eos(raw: Mapping[str, Any], source: Path) -> tuple[int, ...]:
    """`eos_token_id` as a tuple of ids, empty when there is none.

    Raises:
        ValueError: neither null, a token id, nor a list of token ids.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token <= MOST for token in ids):
        Fields(raw, source).refuse("eos_token_id", f"a token id, 0 to {MOST}, or a list of them")
    return tuple(ids)


# ------------------------------------------------------------------ tensors


def layer_shapes(config: ModelConfig, index: int = 0) -> dict[str, tuple[int, ...]]:
    """The tensors of layer `index`, by Hugging Face name without `model.layers.N.`"""
    hidden = config.hidden_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    projections = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        *_mlp_projections(config, index),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, has_bias in projections:
        shapes[f"{name}.weight"] = (rows, columns)
        fp8 = config.quant_config
        if fp8 is not None and not fp8.is_layer_skipped(f"model.layers.{index}.{name}"):
            shapes[f"{name}.{SCALE}"] = fp8.scale_shape((rows, columns))
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _mlp_projections(config: ModelConfig, index: int) -> list[tuple[str, int, int, bool]]:
    """Name, rows, columns, has a bias: of a dense MLP, or of a router and its experts."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    if config.moe is None or not config.moe.is_sparse(index):
        return [
            ("mlp.gate_proj", inner, hidden, bias),
            ("mlp.up_proj", inner, hidden, bias),
            ("mlp.down_proj", hidden, inner, bias),
        ]
    moe, (block, gate, up, down) = config.moe, config.moe.names
    router = (f"{block}.gate", moe.num_experts, hidden, False)
    inner = moe.intermediate_size
    return [router] + [
        (f"{block}.experts.{expert}.{name}", rows, columns, False)
        for expert in range(moe.num_experts)
        for name, rows, columns in (
            (gate, inner, hidden),
            (up, inner, hidden),
            (down, hidden, inner),
        )
    ]


def outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors outside the layers, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config must hold, by Hugging Face name."""
    return outer_shapes(config) | {
        f"model.layers.{index}.{name}": shape
        for index in range(config.num_hidden_layers)
        for name, shape in layer_shapes(config, index).items()
    }


def num_parameters(config: ModelConfig) -> int:
    """Numbers in all tensors but scales, by arithmetic alone."""
    config = replace(config, quant_config=None)
    outer = sum(math.prod(shape) for shape in outer_shapes(config).values())
    dense = layer_shapes(replace(config, moe=None))
    total = outer + config.num_hidden_layers * sum(math.prod(shape) for shape in dense.values())
    if config.moe is None:
        return total
    moe, num_layers = config.moe, config.num_hidden_layers
    every = moe.decoder_sparse_step
    left_out = sum(i < num_layers and (i + 1) % every == 0 for i in moe.mlp_only_layers)
    of_experts = moe.num_experts * (1 + 3 * moe.intermediate_size)  # times hidden_size, as the MLP
    more = config.hidden_size * (of_experts - 3 * config.intermediate_size)
    return total + (num_layers // every - left_out) * more
