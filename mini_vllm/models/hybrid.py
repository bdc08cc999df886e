"""Decoders whose layers keep different things: all K and V, those of a window, or a state.

Promises: Gemma 3 and Granite 4 hybrid checkpoints give the logits of `transformers` to rounding;
each layer reads and writes the cache of its own group. Mirrors
`vllm/model_executor/models/gemma3.py:297` `Gemma3Model` and
`vllm/model_executor/models/granitemoehybrid.py:325` `GraniteMoeHybridModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mini_vllm.attention import paged_attention, write_kv
from mini_vllm.batch import ForwardBatch
from mini_vllm.checks import whole
from mini_vllm.config import MAMBA_CACHE_MODES
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec
from mini_vllm.models.groups import hybrid_block_size, layer_groups
from mini_vllm.models.mamba import MambaConfig, MambaMixer
from mini_vllm.models.mlp import silu_and_mul
from mini_vllm.models.transformer import (
    AttentionFn,
    Linear,
    LinearFactory,
    LinearLike,
    ModelConfig,
    rms_norm,
    rotate,
)

FULL, SLIDING, MAMBA = "full_attention", "sliding_attention", "mamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(ModelConfig):
    """What `config.json` says besides: kinds of layers, and the switches of the two families."""

    layer_types: tuple[str, ...]
    """FULL, SLIDING or MAMBA, one per layer."""
    sliding_window: int | None = None
    rope_local_base_freq: float | None = None
    """Base of the rotary angles in layers with a window; None: `rope_theta`."""
    rope_factor: float = 1.0
    """Positions of layers without a window are divided by it."""
    has_rope: bool = True
    has_outer_norms: bool = False
    """Each block's result is normed as well, and all norms multiply by one more than their weight.
    """
    activation: str = "silu"
    attention_scale: float = 1.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    mamba: MambaConfig | None = None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """K and V of one token in the layers that keep them for every token."""
        return self.layer_types.count(FULL) * 2 * self.num_key_value_heads * self.head_dim * (
            dtype_bytes
        )  # fmt: skip


def hybrid_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by name: fused as vLLM fuses them, prefixed as on disk."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    outer = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for index, kind in enumerate(config.layer_types):
        layer: dict[str, tuple[int, ...]] = {
            "mlp.gate_up_proj.weight": (2 * inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            *outer[: 2 * config.has_outer_norms],
        )
        layer |= {f"{name}.weight": (hidden,) for name in norms}
        if kind == MAMBA:
            assert config.mamba is not None
            layer |= {f"mamba.{n}": s for n, s in config.mamba.shapes(hidden).items()}
        else:
            layer["self_attn.qkv_proj.weight"] = (q + 2 * kv, hidden)
            layer["self_attn.o_proj.weight"] = (hidden, q)
            if config.qkv_bias:
                layer["self_attn.qkv_proj.bias"] = (q + 2 * kv,)
            if config.o_bias:
                layer["self_attn.o_proj.bias"] = (hidden,)
            if config.qk_norm:
                layer |= {f"self_attn.{n}_norm.weight": (config.head_dim,) for n in "qk"}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


class HybridTransformer:
    """The model protocol; `kv_specs` says what each group of its layers keeps."""

    def __init__(
        self,
        config: HybridConfig,
        weights: Mapping[str, np.ndarray],
        dtype: np.dtype | type | str = np.float32,
        *,
        attention: AttentionFn = paged_attention,
        linear: LinearFactory = Linear,
        block_size: int = 16,
        max_model_len: int | None = None,
        mamba_cache_mode: str = "all",
    ) -> None:
        """Build the layers and group them.

        Args:
            config: sizes and switches.
            weights: the parameters of `hybrid_shapes`.
            dtype: float32, or float64 where equal output across batch shapes is claimed.
            attention: replacement for `paged_attention`; it must mind `batch.sliding_window`.
            linear: replacement for `Linear`.
            block_size: tokens per block asked for. Where layers have states it may be too small
                for one; see `block_size` of the model for what it became.
            max_model_len: longest sequence, at most that of the config.
            mamba_cache_mode: which states are kept: "all", "align" or "none"; see `MambaSpec`.

        Raises:
            ValueError: another dtype or mode, a block without tokens, or a sequence longer than the
                config says.
        """
        whole("block_size", block_size, 1)
        longest = config.max_position_embeddings
        if max_model_len is not None:
            whole("max_model_len", max_model_len, 1, longest)
        if mamba_cache_mode not in MAMBA_CACHE_MODES:
            modes = ", ".join(MAMBA_CACHE_MODES)
            raise ValueError(f"mamba_cache_mode={mamba_cache_mode!r}: need one of {modes}")
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype={dtype!r}: need float32 or float64")
        self.config, self.attention = config, attention
        self.max_model_len = max_model_len or longest
        self.embed_tokens = self._cast(weights["model.embed_tokens.weight"])
        self.norm = self._norm(weights["model.norm.weight"])
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.lm_head = linear(self._cast(weights[head]), None, "lm_head")
        self.block_size, self.kv_specs = _kv_specs(
            config, block_size, self.max_model_len, mamba_cache_mode
        )
        self._places = {
            layer: (group, row)
            for group, spec in enumerate(self.kv_specs)
            for row, layer in enumerate(spec.layers)
        }
        """Of each layer its cache group, and its row in the group's cache."""
        self.layers = [
            _Layer(self, index, weights, linear) for index in range(config.num_hidden_layers)
        ]
        powers = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        local = config.rope_local_base_freq or config.rope_theta
        self._frequencies = {
            FULL: config.rope_theta**-powers / config.rope_factor, SLIDING: local**-powers,
        }  # fmt: skip

    def _cast(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array, dtype=self.dtype)

    def _norm(self, weight: np.ndarray) -> np.ndarray:
        """A norm's weight as it multiplies."""
        return self._cast(weight) + self.dtype.type(self.config.has_outer_norms)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Run one step, writing this step's K, V and states into the caches of the groups.

        Returns:
            Logits [num_rows, vocab_size] of the tokens of `batch.logits_indices`, in `dtype`.
        """
        c = self.config
        hidden = self.embed_tokens[batch.token_ids] * self.dtype.type(c.embedding_multiplier)
        rope = {}
        for kind in set(c.layer_types) - {MAMBA} if c.has_rope else ():
            angles = batch.positions[:, None] * self._frequencies[kind]
            rope[kind] = tuple(
                f(angles).astype(self.dtype, copy=False)[:, None] for f in (np.cos, np.sin)
            )
        for index, layer in enumerate(self.layers):
            group, row = self._places[index]
            of_group = batch.of_group(group)
            assert of_group.kv_cache is not None, "a transformer needs the runner's KV cache"
            hidden = layer(hidden, of_group.kv_cache[row], of_group, rope.get(layer.kind))
        last = rms_norm(hidden[batch.logits_indices], self.norm, c.rms_norm_eps)
        return self.lm_head(last) / self.dtype.type(c.logits_scaling)


class _Layer:
    """A mixer and an MLP, each behind a norm and, in Gemma, before one."""

    def __init__(
        self, model: HybridTransformer, index: int, weights: Mapping[str, np.ndarray],
        linear: LinearFactory,
    ) -> None:  # fmt: skip
        c = self.config = model.config
        self.kind, self.attention = c.layer_types[index], model.attention
        prefix = f"model.layers.{index}"

        def get(name: str) -> np.ndarray:
            return model._cast(weights[f"{prefix}.{name}"])

        def projection(name: str) -> LinearLike:
            bias = weights.get(f"{prefix}.{name}.bias")
            bias = None if bias is None else model._cast(bias)
            return linear(get(f"{name}.weight"), bias, f"{prefix}.{name}")

        def norm(name: str) -> Callable[[np.ndarray], np.ndarray]:
            weight = model._norm(weights[f"{prefix}.{name}.weight"])
            return partial(rms_norm, weight=weight, eps=c.rms_norm_eps)

        self.input_norm = norm("input_layernorm")
        if c.has_outer_norms:
            self.mixed_norm, self.mlp_norm, self.out_norm = (
                norm(n) for n in (
                    "post_attention_layernorm", "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                )
            )  # fmt: skip
        else:
            self.mixed_norm = self.out_norm = lambda x: x
            self.mlp_norm = norm("post_attention_layernorm")
        self.gate_up_proj, self.down_proj = (
            projection("mlp.gate_up_proj"),
            projection("mlp.down_proj"),
        )
        self.act_and_mul = gelu_and_mul if c.activation == "gelu_pytorch_tanh" else silu_and_mul
        if self.kind == MAMBA:
            assert c.mamba is not None
            self.mamba = MambaMixer(
                c.mamba, lambda name: get(f"mamba.{name}"),
                lambda name: projection(f"mamba.{name}"), c.rms_norm_eps,
            )  # fmt: skip
        else:
            self.qkv_proj, self.o_proj = (
                projection("self_attn.qkv_proj"),
                projection("self_attn.o_proj"),
            )
            if c.qk_norm:
                self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")

    def __call__(
        self, hidden: np.ndarray, cache: np.ndarray, batch: ForwardBatch,
        rope: tuple[np.ndarray, ...] | None,
    ) -> np.ndarray:  # fmt: skip
        """[num_tokens, hidden_size] to the same; `cache` is the layer's, changed in place."""
        scale = hidden.dtype.type(self.config.residual_multiplier)
        normed = self.input_norm(hidden)
        if self.kind == MAMBA:
            mixed = self.mamba(normed, cache, batch)
        else:
            mixed = self._attend(normed, cache, batch, rope)
        hidden = hidden + self.mixed_norm(mixed) * scale
        inner = self.act_and_mul(self.gate_up_proj(self.mlp_norm(hidden)))
        return hidden + self.out_norm(self.down_proj(inner)) * scale

    def _attend(
        self, normed: np.ndarray, cache: np.ndarray, batch: ForwardBatch,
        rope: tuple[np.ndarray, ...] | None,
    ) -> np.ndarray:  # fmt: skip
        c = self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        qkv = self.qkv_proj(normed).reshape(len(normed), heads + 2 * kv_heads, c.head_dim)
        query, key, value = np.split(qkv, [heads, heads + kv_heads], axis=1)
        if c.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None:
            query, key = (rotate(x, *rope) for x in (query, key))
        write_kv(cache, key, value, batch.slot_mapping)
        out = self.attention(np.ascontiguousarray(query), cache, batch, c.attention_scale)
        return self.o_proj(out.reshape(len(normed), heads * c.head_dim))


def gelu_and_mul(gate_up: np.ndarray) -> np.ndarray:
    """gelu(gate) * up, from [num_tokens, 2 * size] to [num_tokens, size], by tanh as Gemma has it.

    `vllm/model_executor/layers/activation.py:322` `GeluAndMul`
    """
    size = gate_up.shape[1] // 2
    gate, up = gate_up[:, :size], gate_up[:, size:]
    kind = gate.dtype.type
    inner = kind(math.sqrt(2 / math.pi)) * (gate + kind(0.044715) * gate * gate * gate)
    return kind(0.5) * gate * (1 + np.tanh(inner)) * up


def _kv_specs(
    config: HybridConfig, block_size: int, max_model_len: int, mamba_cache_mode: str
) -> tuple[int, tuple[KVCacheSpec, ...]]:
    """Tokens per block, and what each group of layers keeps in one."""
    heads, dim, mamba = config.num_key_value_heads, config.head_dim, config.mamba
    if mamba is not None and MAMBA in config.layer_types:
        state = sum(math.prod(shape) for shape in mamba.state_shapes)
        chunk = mamba.chunk_size if mamba_cache_mode == "all" else None
        block_size = hybrid_block_size(state, 2 * heads * dim, block_size, chunk)
        states: KVCacheSpec = MambaSpec(
            (), state_shapes=mamba.state_shapes, page_size_padded=2 * heads * dim * block_size,
            mamba_cache_mode=mamba_cache_mode,
            block_size=max_model_len if mamba_cache_mode == "none" else block_size,
        )  # fmt: skip
    kinds: dict[str, KVCacheSpec] = {FULL: KVCacheSpec((), heads, dim)}
    if SLIDING in config.layer_types:
        kinds[SLIDING] = KVCacheSpec((), heads, dim, config.sliding_window)
    if MAMBA in config.layer_types:
        kinds[MAMBA] = states
    return block_size, tuple(
        replace(kinds[config.layer_types[layers[0]]], layers=tuple(layers))
        for layers in layer_groups(config.layer_types)
    )
