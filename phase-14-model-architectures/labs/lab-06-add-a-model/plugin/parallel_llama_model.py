"""The architecture of lab 14-06 in vLLM's own layers, loaded by the learner's rules.

Each duty of the contract in the order of the guide's table. `PARALLEL_LLAMA` names the file whose
`parse` and `rules` are used: the lab's solution, unless it says a learner's. For one rank: a rule's
rows are copied as they are, where vLLM's own loaders would cut out a rank's part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.utils import maybe_prefix

from labkit.modules import load_module
from mini_vllm.models.mapping import places_of

LAB = Path(os.environ.get("PARALLEL_LLAMA") or Path(__file__).parents[1] / "solution.py")


class Block(nn.Module):
    """x + m * (attention(norm(x)) + mlp(norm(x)))"""

    def __init__(self, vllm_config: VllmConfig, config, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        quantization, hidden = vllm_config.quant_config, config.hidden_size
        self.multiplier = config.residual_multiplier
        self.sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
        self.input_layernorm = RMSNorm(hidden, eps=config.rms_norm_eps)
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj = QKVParallelLinear(
            hidden, dim, heads, kv_heads, bias=False, quant_config=quantization,
            prefix=f"{prefix}.self_attn.qkv_proj",
        )  # fmt: skip
        self.self_attn.o_proj = RowParallelLinear(
            heads * dim, hidden, bias=False, quant_config=quantization,
            prefix=f"{prefix}.self_attn.o_proj",
        )  # fmt: skip
        self.rope = get_rope(
            dim, max_position=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )  # fmt: skip
        self.attn = Attention(
            heads, dim, dim**-0.5, num_kv_heads=kv_heads, cache_config=vllm_config.cache_config,
            quant_config=quantization, prefix=f"{prefix}.self_attn.attn",
        )  # fmt: skip
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(
            hidden, [config.intermediate_size] * 2, bias=False, quant_config=quantization,
            prefix=f"{prefix}.mlp.gate_up_proj",
        )  # fmt: skip
        self.mlp.down_proj = RowParallelLinear(
            config.intermediate_size, hidden, bias=False, quant_config=quantization,
            prefix=f"{prefix}.mlp.down_proj",
        )  # fmt: skip
        self.activation = SiluAndMul()

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        normed = self.input_layernorm(hidden)
        qkv, _ = self.self_attn.qkv_proj(normed)
        query, key, value = qkv.split(self.sizes, dim=-1)
        query, key = self.rope(positions, query, key)
        mixed, _ = self.self_attn.o_proj(self.attn(query, key, value))
        gate_up, _ = self.mlp.gate_up_proj(normed)
        inner, _ = self.mlp.down_proj(self.activation(gate_up))
        return hidden + self.multiplier * (mixed + inner)


class ParallelLlamaForCausalLM(nn.Module):
    """What vLLM's loader and runner ask for, and no mixin: neither LoRA nor pipeline stages."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        path = Path(vllm_config.model_config.model) / "config.json"
        self.lab = load_module(LAB)
        config = self.config = self.lab.parse(json.loads(path.read_text(encoding="utf-8")), path)
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(
            Block(vllm_config, config, maybe_prefix(prefix, f"model.layers.{index}"))
            for index in range(config.num_hidden_layers)
        )
        self.model.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] to [num_tokens, hidden_size]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor,
        intermediate_tensors: object = None, inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states; each layer's attention finds its cache by its prefix."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.model.layers:
            hidden = layer(positions, hidden)
        return self.model.norm(hidden)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Of the rows that the runner gathered."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """By the rules that serve `mini_vllm`; the names of what was filled."""
        parameters, rules = dict(self.named_parameters()), self.lab.rules(self.config)
        loaded = set()
        for name, tensor in weights:
            for place in places_of(name, rules):
                target = parameters[place.parameter].data
                if place.parameter == "model.embed_tokens.weight":
                    target = target[: self.config.vocab_size]  # the rest is padding
                source = tensor if place.part is None else tensor[place.part]
                target = target if place.rows is None else target[place.rows]
                if target.shape != source.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(source.shape)}, need {tuple(target.shape)} for "
                        f"{place.parameter}"
                    )
                target.copy_(source)
                loaded.add(place.parameter)
        return loaded
