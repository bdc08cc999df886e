"""Shapes of models and data sheets of GPUs that several widgets calculate with."""

from __future__ import annotations

import math
from typing import Any

from mini_vllm.models.config import expected_shapes, parse_config
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import resolve
from mini_vllm.models.transformer import ModelConfig


def _llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, context: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )


def models() -> dict[str, ModelConfig]:
    """Shapes to choose from: the shipped model, and three of the Llama family as published."""
    path = resolve("byte-llama") / "config.json"
    return {
        "Llama 3 8B": _llama(128256, 4096, 14336, 32, 32, 8, 8192),
        "Llama 3 70B": _llama(128256, 8192, 28672, 80, 64, 8, 8192),
        "Llama 2 7B, no GQA": _llama(32000, 4096, 11008, 32, 32, 32, 4096),
        "byte-llama, shipped here": parse_config(read_json(path), path),
    }


GPUS: dict[str, dict[str, float]] = {
    "L4": {"gib": 24, "peak_flops": 121e12, "mem_bw": 300e9},
    "A100 80 GB": {"gib": 80, "peak_flops": 312e12, "mem_bw": 2.0e12},
    "H100 SXM": {"gib": 80, "peak_flops": 989e12, "mem_bw": 3.35e12},
    "H200 SXM": {"gib": 141, "peak_flops": 989e12, "mem_bw": 4.8e12},
}
"""The vendor's data sheets, rounded: nominal memory, dense bf16 FLOP/s, bytes/s."""


def num_parameters(config: ModelConfig) -> int:
    """Weights of a checkpoint of this shape."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def shapes() -> dict[str, dict[str, Any]]:
    """What the formulas need of each of `models()`."""
    return {name: _shape(config) for name, config in models().items()}


def _shape(config: ModelConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "context": config.max_position_embeddings,
        "parameters": num_parameters(config),
        "kv_bytes_per_token": config.kv_bytes_per_token(2),
        # 2 per multiplication and addition, for the score and for the weighted value
        "attention_flops": 4 * config.num_hidden_layers * heads * config.head_dim,
    }
