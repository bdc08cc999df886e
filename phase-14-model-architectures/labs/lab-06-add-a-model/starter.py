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

from mini_vllm.batch import ForwardBatch
from mini_vllm.kv_cache_interface import KVCacheSpec
from mini_vllm.models.config import Fields
from mini_vllm.models.families import ARCHITECTURES, Architecture, register_model
from mini_vllm.models.mapping import Prefixed, Renamed, Rule, Stacked, Tied

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
    raise NotImplementedError


def parameters(config: Config) -> dict[str, tuple[int, ...]]:
    """Shape by name of what the model is built from, as vLLM names and fuses it.

    `model.embed_tokens.weight`, `model.norm.weight`, `lm_head.weight`, and of each layer
    `model.layers.N.` with `input_layernorm.weight`, `self_attn.qkv_proj.weight` (Q above K above
    V), `self_attn.o_proj.weight`, `mlp.gate_up_proj.weight` (gate above up) and
    `mlp.down_proj.weight`.
    """
    raise NotImplementedError


def rules(config: Config) -> tuple[Rule, ...]:
    """How the names and rows of `checkpoint.tensors` go to `parameters` (A2).

    On disk: `transformer.tok_embeddings`, `transformer.norm`, and of each layer
    `transformer.layers.N.` with `norm`, `attention.wq`, `attention.wkv` (K above V),
    `attention.wo`, `feed_forward.w1` (gate), `feed_forward.w2` (down), `feed_forward.w3` (up).
    There is no head on disk.
    """
    raise NotImplementedError


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
        raise NotImplementedError


def register() -> None:
    """Have `mini_vllm` build folders whose `config.json` says `NAME` by the above."""
    ARCHITECTURES.pop(NAME, None)  # of a run before, in the same process
    register_model(NAME, Architecture(parse, parameters, ParallelLlama, rules))
