"""A Llama-family decoder in numpy whose only memory is the paged KV cache it is handed.

Promises: Llama, Qwen2 and Qwen3 checkpoints, and Qwen3-MoE and Mixtral with their experts, give the
logits of `transformers` to rounding; the projections run once over all scheduled tokens, whatever
request they belong to. Mirrors `vllm/model_executor/models/llama.py:350` `LlamaModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mini_vllm.attention import paged_attention, write_kv
from mini_vllm.batch import ForwardBatch
from mini_vllm.kv_cache_interface import KVCacheSpec
from mini_vllm.models.fp8 import Fp8Config
from mini_vllm.models.mlp import Mlp, silu_and_mul
from mini_vllm.models.moe import ExpertsFn, MoeConfig, SparseMlp, moe_forward_grouped

VOCAB_PADDING = 64
"""`vllm/model_executor/layers/vocab_parallel_embedding.py:32` `DEFAULT_VOCAB_PADDING_SIZE`"""
_TOKEN_TILE = 128
"""Tokens per pass through a layer's products: their intermediates then stay in a core's cache
instead of being fetched from fresh memory for every large array."""
_SMALL_PRODUCT = 10**6
"""Multiplications up to which OpenBLAS, on AVX-512, reads the matrices where they lie; for a larger
product it first copies them into the order its kernel reads."""
_FEW_TOKENS = 16
_LEAST_COLUMNS = 64

AttentionFn = Callable[[np.ndarray, np.ndarray, ForwardBatch, float], np.ndarray]
LinearLike = Callable[[np.ndarray], np.ndarray]
LinearFactory = Callable[[np.ndarray, "np.ndarray | None", str], LinearLike]
"""Weight [out, in], bias [out] or None, and a name, such as `model.layers.0.self_attn.qkv_proj`."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretch of the low rotary frequencies (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a Llama-family model; names are those of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    architecture: str = "LlamaForCausalLM"
    moe: MoeConfig | None = None
    """Experts in the place of some or all MLPs; None for a dense model."""
    quant_config: Fp8Config | None = None
    """Of matrices that are codes with scales in the checkpoint; None: there are none."""

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """K and V of one token: 2 x layers x KV heads x head_dim x `dtype_bytes`."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * dtype_bytes


class Linear:
    """y = x @ weight.T + bias, with the weight stored the way the product reads it."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> None:
        """Args: weight [out_features, in_features]; bias [out_features] or None; name unused."""
        self.weight = np.ascontiguousarray(weight.T)  # [in_features, out_features]
        self.bias = bias

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        y = _product(x, self.weight)
        if self.bias is not None:
            y += self.bias
        return y


def _product(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight: [num_tokens, in_features] by [in_features, out_features].

    Copying the weight costs more than multiplying it with few tokens: they meet it in tiles of
    columns, each a small product. With more tokens a wide weight is copied faster in the transposed
    product, whose result has the tokens of one feature side by side in memory.
    """
    (num_tokens, in_features), out_features = x.shape, weight.shape[1]
    width = _SMALL_PRODUCT // max(1, num_tokens * in_features)
    if 1 < num_tokens <= _FEW_TOKENS and _LEAST_COLUMNS <= width < out_features:
        y = np.empty((num_tokens, out_features), np.result_type(x, weight))
        for start in range(0, out_features, width):
            columns = slice(start, start + width)
            np.matmul(x, weight[:, columns], out=y[:, columns])
        return y
    if num_tokens > _FEW_TOKENS and out_features >= 4 * in_features:
        return (weight.T @ x.T).T
    return x @ weight


class Transformer:
    """The model protocol over real weights: `forward(batch)` returns one row per request."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: np.dtype | type | str = np.float32,
        *,
        attention: AttentionFn = paged_attention,
        linear: LinearFactory = Linear,
        experts: ExpertsFn = moe_forward_grouped,
    ) -> None:
        """Build the layers.

        Args:
            config: sizes and switches.
            weights: Hugging Face names to arrays, complete and of the right shapes
                (`loader.load_checkpoint` checks both), or what `families.fused_shapes` names.
            dtype: float32, or float64 where equal output across batch shapes is claimed: in
                float32 a product's rounding depends on how many rows it has.
            attention: replacement for `paged_attention`.
            linear: replacement for `Linear`, called with (weight, bias, name) for each projection.
                Fused ones have upstream's names: `qkv_proj`, `gate_up_proj`; those of an expert
                are named `model.layers.0.mlp.experts.3.gate_up_proj`.
            experts: replacement for `moe_forward_grouped` in layers of experts.

        Raises:
            ValueError: another dtype; a quantized checkpoint with a `linear` that reads no scales.
        """
        if config.quant_config is not None and linear is Linear:
            raise ValueError("linear=Linear with quant_config: need block_fp8.checkpoint_linear")
        try:
            self.dtype = np.dtype(dtype)
        except TypeError:  # no dtype at all
            raise ValueError(f"dtype={dtype!r}: need float32 or float64") from None
        if self.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype={dtype!r}: need float32 or float64")
        self.config = config
        self.attention = attention
        self.embed_tokens = self._cast(weights["model.embed_tokens.weight"])
        self.norm = self._cast(weights["model.norm.weight"])
        self.lm_head = linear(self._cast(weights[head_name(config)]), None, "lm_head")
        self.layers = build_layers(config, weights, self._cast, linear, experts)
        self._frequencies = rope_frequencies(config)  # [head_dim / 2], float64

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """(num_layers, num_kv_heads, head_dim): what the runner's cache must hold per token."""
        c = self.config
        return c.num_hidden_layers, c.num_key_value_heads, c.head_dim

    @property
    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """One group: every layer attends to every token before."""
        num_layers, num_kv_heads, head_dim = self.kv_shape
        return (KVCacheSpec(tuple(range(num_layers)), num_kv_heads, head_dim),)

    def _cast(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array, dtype=self.dtype)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Run one step, writing this step's K and V into `batch.kv_cache`.

        Returns:
            Logits [num_rows, vocab_size] of the tokens of `batch.logits_indices`, in `dtype`.
        """
        return self.lm_head(self.hidden_states(batch, batch.logits_indices))

    def hidden_states(self, batch: ForwardBatch, rows: Any = ...) -> np.ndarray:
        """Run the layers; what the final norm leaves of these rows, by default of all tokens:
        [num_rows, hidden_size]."""
        hidden = batch.inputs_embeds  # [num_tokens, hidden_size]
        if hidden is None:
            hidden = embedded(self.embed_tokens, batch.token_ids)
        run_layers(self.layers, hidden, batch, self.attention, self._frequencies)
        return rms_norm(hidden[rows], self.norm, self.config.rms_norm_eps)


def embedded(table: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Rows [num_tokens, hidden_size] of `table`; a token behind its end is padding, all zeros.

    As in `vllm/model_executor/layers/vocab_parallel_embedding.py:192` `VocabParallelEmbedding`.
    """
    known = token_ids < len(table)
    if known.all():
        rows: np.ndarray = table[token_ids]
        return rows
    rows = np.zeros((len(token_ids), table.shape[1]), table.dtype)
    rows[known] = table[token_ids[known]]
    return rows


def head_name(config: ModelConfig) -> str:
    """The tensor that turns hidden states into logits: the embedding's own, or the head's."""
    return "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"


def build_layers(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    cast: Callable[[np.ndarray], np.ndarray],
    linear: LinearFactory = Linear,
    experts: ExpertsFn = moe_forward_grouped,
    indices: Iterable[int] | None = None,
    token_tile: int = _TOKEN_TILE,
) -> list[_DecoderLayer]:
    """A model's layers, or some that follow each other.

    Args:
        config: as for `Transformer`, and so `weights`, `linear` and `experts`.
        weights: at least those of the layers asked for.
        cast: how an array becomes one of the model's dtype.
        linear: what builds the projections.
        experts: what computes layers of experts.
        indices: numbers of the layers; all by default.
        token_tile: tokens per pass through a layer's products.
    """
    return [
        _DecoderLayer(config, index, weights, cast, linear, experts, token_tile)
        for index in (range(config.num_hidden_layers) if indices is None else indices)
    ]


def run_layers(
    layers: Sequence[_DecoderLayer],
    hidden: np.ndarray,
    batch: ForwardBatch,
    attention: AttentionFn,
    frequencies: np.ndarray,
) -> None:
    """Change `hidden` [num_tokens, hidden_size] in place, and `batch.kv_cache`, which has an entry
    for each of the layers; `frequencies` are those of `rope_frequencies`."""
    assert batch.kv_cache is not None, "a transformer needs the runner's KV cache"
    angles = batch.positions[:, None] * frequencies  # [num_tokens, head_dim / 2]
    cos, sin = (f(angles).astype(hidden.dtype, copy=False)[:, None] for f in (np.cos, np.sin))
    for layer, layer_cache in zip(layers, batch.kv_cache, strict=True):
        layer.forward(hidden, (cos, sin), layer_cache, batch, attention)


class _DecoderLayer:
    """Norm, attention, norm, MLP; adds its two results to the residual stream in place."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        weights: Mapping[str, np.ndarray],
        cast: Callable[[np.ndarray], np.ndarray],
        linear: LinearFactory,
        experts: ExpertsFn,
        token_tile: int,
    ) -> None:
        def get(name: str) -> np.ndarray:
            return cast(weights[f"model.layers.{index}.{name}"])

        def fused(name: str, shards: list[str], has_bias: bool = False) -> LinearLike:
            block, whole = name.rpartition(".")[0], f"model.layers.{index}.{name}"
            if len(shards) > 1 and f"{whole}.weight" in weights:  # loaded by rules
                bias = get(f"{name}.bias") if has_bias else None
                return linear(get(f"{name}.weight"), bias, whole)
            weight = np.concatenate([get(f"{block}.{s}.weight") for s in shards])
            bias = np.concatenate([get(f"{block}.{s}.bias") for s in shards]) if has_bias else None
            return linear(weight, bias, whole)

        self.config = config
        self.token_tile = token_tile
        self.input_norm = get("input_layernorm.weight")
        self.post_attention_norm = get("post_attention_layernorm.weight")
        qkv = ["q_proj", "k_proj", "v_proj"]
        self.qkv_proj = fused("self_attn.qkv_proj", qkv, config.qkv_bias)
        self.o_proj = fused("self_attn.o_proj", ["o_proj"], config.o_bias)
        self.experts: SparseMlp | None = None
        if config.moe is not None and config.moe.is_sparse(index):
            self.experts = _sparse_mlp(config.moe, index, fused, experts)
        else:
            gate_up = ["gate_proj", "up_proj"]
            self.gate_up_proj = fused("mlp.gate_up_proj", gate_up, config.mlp_bias)
            self.down_proj = fused("mlp.down_proj", ["down_proj"], config.mlp_bias)
        self.q_norm = get("self_attn.q_norm.weight") if config.qk_norm else None
        self.k_norm = get("self_attn.k_norm.weight") if config.qk_norm else None

    def forward(
        self,
        hidden: np.ndarray,
        rope: tuple[np.ndarray, np.ndarray],
        layer_cache: np.ndarray,
        batch: ForwardBatch,
        attention: AttentionFn,
    ) -> None:
        """Change `hidden` [num_tokens, hidden_size] in place."""
        c = self.config
        num_tokens, heads = len(hidden), c.num_attention_heads
        query = np.empty((num_tokens, heads, c.head_dim), dtype=hidden.dtype)
        tiles = [slice(i, i + self.token_tile) for i in range(0, num_tokens, self.token_tile)]
        for tile in tiles:
            batch.tile = tile
            query[tile], key, value = self._qkv(hidden[tile], rope[0][tile], rope[1][tile])
            write_kv(layer_cache, key, value, batch.slot_mapping[tile])
        attended = attention(query, layer_cache, batch, c.head_dim**-0.5)
        attended = attended.reshape(num_tokens, heads * c.head_dim)
        for tile in tiles:
            batch.tile = tile
            rows = hidden[tile]
            rows += self.o_proj(attended[tile])
            if self.experts is None:
                normed = rms_norm(rows, self.post_attention_norm, c.rms_norm_eps)
                rows += self.down_proj(silu_and_mul(self.gate_up_proj(normed)))
        if self.experts is not None:  # all tokens at once: the more rows an expert has, the better
            hidden += self.experts(rms_norm(hidden, self.post_attention_norm, c.rms_norm_eps))

    def _qkv(
        self, hidden: np.ndarray, cos: np.ndarray, sin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Query, key and value [num_tokens, heads or kv_heads, head_dim], Q and K rotated."""
        c = self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        qkv = self.qkv_proj(rms_norm(hidden, self.input_norm, c.rms_norm_eps))
        qkv = qkv.reshape(len(hidden), heads + 2 * kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = rms_norm(qkv[:, :heads], self.q_norm, c.rms_norm_eps)
            keys = slice(heads, heads + kv_heads)
            qkv[:, keys] = rms_norm(qkv[:, keys], self.k_norm, c.rms_norm_eps)
        rotated = rotate(qkv[:, : heads + kv_heads], cos, sin)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]


def _sparse_mlp(
    config: MoeConfig, layer: int, fused: Callable[[str, list[str]], LinearLike], run: ExpertsFn
) -> SparseMlp:
    """A layer's router and experts; upstream keeps all experts' matrices in two stacks instead."""
    block, gate, up, down = config.names
    experts = [
        Mlp(
            fused(f"{block}.experts.{expert}.gate_up_proj", [gate, up]),
            fused(f"{block}.experts.{expert}.down_proj", [down]),
        )
        for expert in config.ids_here
    ]
    return SparseMlp(config, layer, fused(f"{block}.gate", ["gate"]), experts, run)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; any leading shape."""
    mean_square = np.einsum("...i,...i->...", x, x) / x.shape[-1] + x.dtype.type(eps)
    normed = x / np.sqrt(mean_square)[..., None]
    normed *= weight
    return normed


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary position embedding in the half-split layout of Hugging Face checkpoints.

    Args:
        x: [num_tokens, heads, head_dim]; element i is paired with i + head_dim / 2.
        cos: [num_tokens, 1, head_dim / 2]; sin the same.
    """
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    out = np.empty_like(x)
    out[..., :half] = left * cos - right * sin
    out[..., half:] = right * cos + left * sin
    return out


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each rotary pair: float64 [head_dim / 2].

    With `rope_scaling`, waves longer than the original context are slowed by `factor` and those
    in between are blended, as Llama 3.1 does.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)
