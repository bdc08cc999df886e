"""From a Hugging Face folder (or hub id) to config, weights and tokenizer.

Promises: nothing half loaded: every file, key, shape and dtype is checked before a model is built,
and each refusal is a ValueError that names the file and what was wrong. Single or sharded
safetensors in fp32, fp16 or bf16. Mirrors `vllm/model_executor/model_loader/default_loader.py:43`
`DefaultModelLoader`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from mini_vllm.models.transformer import ModelConfig, RopeScaling
from mini_vllm.tokenizer import ByteTokenizer, Tokenizer

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SHIPPED_MODEL = Path(__file__).resolve().parents[2] / "models" / "byte-llama"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as loaded: `weights` maps Hugging Face names to float32 arrays."""

    folder: Path
    config: ModelConfig
    weights: dict[str, np.ndarray]
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def load_checkpoint(model: str | Path) -> Checkpoint:
    """Load a folder, or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct` (needs the `hf` extra).

    Raises:
        ValueError: a file is missing, truncated or does not fit the config; an unknown
            architecture; a hub id without `huggingface_hub`.
    """
    folder = resolve(model)
    raw = read_json(folder / "config.json")
    config = parse_config(raw, folder / "config.json")
    weights = load_weights(folder, config)
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    eos = raw.get("eos_token_id") if eos is None else eos
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    tokenizer = load_tokenizer(folder, eos_ids)
    return Checkpoint(folder, config, weights, tokenizer, eos_ids, _chat_template(folder))


def resolve(model: str | Path) -> Path:
    """The folder that `model` names: the shipped model, a path, or a hub id downloaded."""
    if str(model) == "byte-llama":
        if not SHIPPED_MODEL.is_dir():
            raise ValueError(f"model='byte-llama': no folder {SHIPPED_MODEL}; clone the repository")
        return SHIPPED_MODEL
    folder = Path(model)
    if folder.is_dir():
        return folder
    if str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        raise ValueError(f"model={str(model)!r}: no such folder (and not a hub id 'owner/name')")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError(
            f"model={str(model)!r}: no such folder, and downloading a hub id needs the 'hf' extra"
        ) from None
    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except Exception as error:
        raise ValueError(f"model={str(model)!r}: download failed: {error}") from error


def parse_config(raw: dict[str, Any], source: Path) -> ModelConfig:
    """A `config.json` as `ModelConfig`; `source` is named in errors.

    Raises:
        ValueError: unknown architecture, missing or non-positive sizes, an activation other than
            silu, or an attention or rotary variant that is not implemented.
    """
    names = raw.get("architectures") or []
    architecture = names[0] if names else None
    if architecture not in SUPPORTED:
        raise ValueError(
            f"{source}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{source}: hidden_act={raw['hidden_act']!r}: only 'silu' is supported")
    if raw.get("use_sliding_window"):
        raise ValueError(f"{source}: use_sliding_window=true: sliding windows are not supported")
    if raw.get("quantization_config"):
        raise ValueError(f"{source}: quantization_config: quantized checkpoints are not supported")
    required = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
    )  # fmt: skip
    sizes: dict[str, int] = {}
    for name in required:
        value = raw.get(name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{source}: {name}={value!r}: need a positive integer")
        sizes[name] = value
    heads = sizes["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    head_dim = raw.get("head_dim") or sizes["hidden_size"] // heads
    if heads % kv_heads:
        raise ValueError(
            f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )
    if head_dim % 2:
        raise ValueError(f"{source}: head_dim={head_dim}: rotary embedding needs an even size")
    theta, scaling = _parse_rope(raw, source)
    is_qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        architecture=architecture,
    )


def _parse_rope(raw: dict[str, Any], source: Path) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(
            f"{source}: rope_type={kind!r} is not supported; supported: default, llama3"
        )
    names = (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    )  # fmt: skip
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"{source}: llama3 rope scaling lacks {', '.join(missing)}")
    factor, low, high, original = (float(rope[name]) for name in names)
    return theta, RopeScaling(factor, low, high, int(original))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config must hold, by Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    projections = [
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in projections:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def load_weights(folder: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """All tensors the config needs, as float32, shapes checked; others are ignored."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: no weight_map")
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    wanted = expected_shapes(config)
    weights: dict[str, np.ndarray] = {}
    for file in files:
        weights |= _read_safetensors(folder / file, wanted)
    missing = sorted(set(wanted) - set(weights))
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(f"{folder}: checkpoint lacks {len(missing)} tensor(s): {shown}")
    return weights


def _read_safetensors(path: Path, wanted: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The wanted tensors of one file as float32."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        tensors = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from error
    found = {}
    for name, entry in tensors:
        if name not in wanted:
            continue
        shape = tuple(entry["shape"])
        if shape != wanted[name]:
            raise ValueError(
                f"{path}: {name} has shape {shape}, config.json implies {wanted[name]}"
            )
        found[name] = _as_float32(entry, f"{path}: {name}").reshape(shape)
    return found


def _as_float32(entry: dict[str, Any], where: str) -> np.ndarray:
    """Raw little-endian bytes of F32, F16 or BF16 as float32, exactly."""
    data, dtype = entry["data"], entry["dtype"]
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F32", "F16"):
        return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
    raise ValueError(f"{where}: dtype {dtype} is not supported; supported: F32, F16, BF16")


# ------------------------------------------------------------------ tokenizer


class HubTokenizer:
    """A `tokenizer.json` run by the `tokenizers` library."""

    def __init__(self, path: Path, eos_token_id: int | None) -> None:
        """Raises ValueError when `tokenizers` is absent (extra `hf`) or the file is bad."""
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise ValueError(f"{path}: this tokenizer needs the 'hf' extra") from None
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:
            raise ValueError(f"{path}: not a tokenizer file ({error})") from error
        self.vocab_size = self._backend.get_vocab_size()
        self.eos_token_id = eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with whatever BOS the file's post-processor adds."""
        return list(self._backend.encode(text).ids)

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens skipped."""
        return self._backend.decode(token_ids, skip_special_tokens=True)


def load_tokenizer(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer:
    """`ByteTokenizer` for a merge-free byte vocabulary, else the `tokenizers` library.

    The shipped model therefore needs no extra package.
    """
    path = folder / "tokenizer.json"
    raw = read_json(path)
    model = raw.get("model", {})
    is_bytes = model.get("type") == "BPE" and not model.get("merges")
    if is_bytes and len(model.get("vocab", {})) == ByteTokenizer.vocab_size:
        return ByteTokenizer()
    return HubTokenizer(path, eos_token_ids[0] if eos_token_ids else None)


def _chat_template(folder: Path) -> str | None:
    """The checkpoint's Jinja chat template, from its own file or the tokenizer's config."""
    jinja = folder / "chat_template.jinja"
    if jinja.exists():
        return jinja.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    template = read_json(config).get("chat_template") if config.exists() else None
    return template if isinstance(template, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file when it is missing or broken."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw
