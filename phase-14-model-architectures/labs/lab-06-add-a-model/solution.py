"""Lab 14-06: an architecture of your own, served by `mini_vllm` and by the real vLLM.

A folder holds a decoder that neither engine knows. You say what its `config.json` means, which
parameters it needs, how the names and rows on disk go to them, and what the layers compute. The
same rules then load the checkpoint into real vLLM, through the plugin beside this file.

The architecture, for each layer, with n = rms_norm(x) and m = residual_multiplier:

    x = x + m * (attention(n) + mlp(n))

Attention is grouped-query with half-split rotary angles and scale head_dim ** -0.5; the MLP is
down(silu(gate(n)) * up(n)). The head is the embedding. What holds:

- A1: a field of `config.json` that would change the model and is not implemented is refused by
  name.
- A2: every row of every parameter comes from one place of the file, or nothing is loaded.
- A3: tokens do not depend on chunks, hits or other requests (float64).
- A4: the tokens are the real engine's.

Sources: `vllm/model_executor/models/llama.py:316` `LlamaDecoderLayer.forward`, for the layer
without the twist, and `vllm/model_executor/models/interfaces_base.py:47` `VllmModel`, for the
contract.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.attention import paged_attention, write_kv
from mini_vllm.batch import ForwardBatch
from mini_vllm.kv_cache_interface import KVCacheSpec
from mini_vllm.models.config import Fields
from mini_vllm.models.families import ARCHITECTURES, Architecture, register_model
from mini_vllm.models.mapping import Prefixed, Renamed, Rule, Stacked, Tied
from mini_vllm.models.mlp import silu_and_mul
from mini_vllm.models.transformer import rms_norm, rotate

NAME = "ParallelLlamaForCausalLM"


@dataclass(frozen=True)
class Config:
    """What `config.json` says."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    residual_multiplier: float


def parse(raw: Mapping[str, Any], source: Path) -> Config:
    """The fields of `Config`, each of the type and range it needs (A1).

    `Fields(raw, source)` takes sizes and numbers with their bounds and refuses by name.

    Raises:
        ValueError: names file, field and value. A size below 1; heads that KV heads do not divide;
            an odd `head_dim`; `parallel_block` that is not true; `tie_word_embeddings` that is not
            true; `hidden_act` that is not "silu"; and any of `rope_scaling`, `attention_bias`,
            `mlp_bias`, `sliding_window`, `quantization_config` that is there and neither null nor
            false.
    """
    fields = Fields(raw, source)
    for name, need in (("parallel_block", True), ("tie_word_embeddings", True)):
        if raw.get(name) is not need:
            fields.refuse(name, "true: the other layout is not implemented")
    if raw.get("hidden_act") != "silu":
        fields.refuse("hidden_act", "'silu'")
    for name in (
        "rope_scaling", "attention_bias", "mlp_bias", "sliding_window", "quantization_config",
    ):  # fmt: skip
        if raw.get(name) not in (None, False):
            fields.refuse(name, "null: it is not implemented")
    config = Config(
        **{
            name: fields.size(name)
            for name in (
                "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "head_dim",
                "max_position_embeddings",
            )
        },
        rms_norm_eps=fields.number("rms_norm_eps", None, least=1e-30, most=1.0),
        rope_theta=fields.number("rope_theta", None, least=1.0),
        residual_multiplier=fields.number("residual_multiplier", None, least=1e-9),
    )  # fmt: skip
    if config.num_attention_heads % config.num_key_value_heads:
        fields.refuse("num_key_value_heads", "a divisor of num_attention_heads")
    if config.head_dim % 2:
        fields.refuse("head_dim", "an even size")
    return config


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape by name of what the model is built from, as vLLM names and fuses it.

    `model.embed_tokens.weight`, `model.norm.weight`, `lm_head.weight`, and of each layer
    `model.layers.N.` with `input_layernorm.weight`, `self_attn.qkv_proj.weight` (Q above K above
    V), `self_attn.o_proj.weight`, `mlp.gate_up_proj.weight` (gate above up) and
    `mlp.down_proj.weight`.
    """
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("self_attn.qkv_proj", (q + 2 * kv, hidden)),
                ("self_attn.o_proj", (hidden, q)),
                ("mlp.gate_up_proj", (2 * inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            )
        }
    return shapes


def rules(config: Config) -> tuple[Rule, ...]:
    """How the names and rows of `checkpoint.tensors` go to `parameters` (A2).

    On disk: `transformer.tok_embeddings`, `transformer.norm`, and of each layer
    `transformer.layers.N.` with `norm`, `attention.wq`, `attention.wkv` (K above V),
    `attention.wo`, `feed_forward.w1` (gate), `feed_forward.w2` (down), `feed_forward.w3` (up).
    There is no head on disk.
    """
    dim, inner = config.head_dim, config.intermediate_size
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return (
        Prefixed("transformer", "model"),
        Renamed("tok_embeddings", "embed_tokens"),
        *(
            Renamed(f"layers.{layer}.norm", f"layers.{layer}.input_layernorm")
            for layer in range(config.num_hidden_layers)
        ),
        Renamed("attention.wo", "self_attn.o_proj"),
        Renamed("feed_forward.w2", "mlp.down_proj"),
        Stacked("self_attn.qkv_proj", (("attention.wq", q), ("attention.wkv", 2 * kv))),
        Stacked("mlp.gate_up_proj", (("feed_forward.w1", inner), ("feed_forward.w3", inner))),
        Tied("lm_head.weight", "model.embed_tokens.weight"),
    )


class ParallelLlama:
    """The model: `kv_specs` says what its layers keep, `forward` computes one step."""

    def __init__(
        self, config: Config, weights: Mapping[str, np.ndarray], dtype: np.dtype | type | str
    ) -> None:
        """Weights are those of `parameters`; all arithmetic is in `dtype`."""
        self.config, self.dtype = config, np.dtype(dtype)
        self.weights = {name: np.asarray(array, self.dtype) for name, array in weights.items()}
        self.kv_specs = (
            KVCacheSpec(
                tuple(range(config.num_hidden_layers)), config.num_key_value_heads, config.head_dim
            ),
        )
        powers = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        self.frequencies = config.rope_theta**-powers

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Logits [num_rows, vocab_size] of `batch.logits_indices`, in `dtype`.

        `batch.kv_cache[layer]` is a layer's K and V. `write_kv` puts [num_tokens, kv_heads,
        head_dim] there by `batch.slot_mapping`, and `paged_attention` reads it for a query of
        [num_tokens, heads, head_dim].
        """
        assert batch.kv_cache is not None
        angles = batch.positions[:, None] * self.frequencies  # [num_tokens, head_dim / 2]
        rope = tuple(f(angles).astype(self.dtype)[:, None] for f in (np.cos, np.sin))
        hidden = self.weights["model.embed_tokens.weight"][batch.token_ids]
        for layer in range(self.config.num_hidden_layers):
            hidden = self._block(layer, hidden, batch, rope)
        last = self._norm("model.norm", hidden[batch.logits_indices])
        return last @ self.weights["lm_head.weight"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def _block(
        self, layer: int, hidden: np.ndarray, batch: ForwardBatch, rope: tuple[np.ndarray, ...]
    ) -> np.ndarray:
        """One layer: [num_tokens, hidden_size] to the same."""
        c, prefix = self.config, f"model.layers.{layer}"
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim

        def project(name: str, x: np.ndarray) -> np.ndarray:
            return x @ self.weights[f"{prefix}.{name}.weight"].T

        normed = self._norm(f"{prefix}.input_layernorm", hidden)
        qkv = project("self_attn.qkv_proj", normed).reshape(len(hidden), -1, dim)
        query, key, value = np.split(qkv, [heads, heads + kv_heads], axis=1)
        query, key = rotate(query, *rope), rotate(key, *rope)
        assert batch.kv_cache is not None
        write_kv(batch.kv_cache[layer], key, value, batch.slot_mapping)
        mixed = paged_attention(query, batch.kv_cache[layer], batch, dim**-0.5)
        mixed = project("self_attn.o_proj", mixed.reshape(len(hidden), heads * dim))
        inner = project("mlp.down_proj", silu_and_mul(project("mlp.gate_up_proj", normed)))
        return hidden + self.dtype.type(c.residual_multiplier) * (mixed + inner)


def register() -> None:
    """Have `mini_vllm` build folders whose `config.json` says `NAME` by the above."""
    ARCHITECTURES.pop(NAME, None)  # of a run before, in the same process
    register_model(NAME, Architecture(parse, parameters, ParallelLlama, rules))
