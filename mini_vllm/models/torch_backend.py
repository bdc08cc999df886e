"""The model protocol a second time: torch on a processor, beside the same paged KV cache.

    LLM("byte-llama", platform="torch")

Promises: logits are those of `Transformer` up to the rounding of sums in another order, bounded by
`mini_vllm/tests/rounding.py`; the KV cache stays the runner's and is written in place. What was not
compared is refused by name: another architecture, a room, one's own attention or projections.
Mirrors how `vllm/platforms/cpu.py:41` `CpuPlatform` and its attention run the same model elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from mini_vllm.attention import paged_attention
from mini_vllm.batch import ForwardBatch
from mini_vllm.models.transformer import Linear, ModelConfig, Transformer, embedded
from mini_vllm.platforms import CpuPlatform, Platform, PlatformError

COMPARED = ("LlamaForCausalLM",)
"""Architectures whose logits were held against numpy's."""


class TorchPlatform(Platform):
    """The machine's processors, with the model's arithmetic in torch. No default moves."""

    name = "torch"
    on_host = True

    def memory(self) -> tuple[int, int]:
        """Of the whole machine: the KV cache is the runner's, in its memory."""
        return CpuPlatform().memory()

    def transformer(self) -> type[Transformer]:
        """The model in torch."""
        return TorchTransformer


class TorchTransformer(Transformer):
    """`Transformer.forward` in torch; built from the same weights, and the same to an engine."""

    def __init__(
        self, config: ModelConfig, weights: Any, dtype: Any = np.float32, **parts: Any
    ) -> None:
        """As `Transformer`, which checks and fuses the weights.

        Raises:
            PlatformError: an architecture that was not compared, experts, or one's own attention or
                projections, which are numpy's.
        """
        if parts.get("attention", paged_attention) is not paged_attention:
            raise PlatformError(
                "platform='torch' with parts.attention: torch computes the attention; need "
                "platform='cpu' for a part of your own"
            )
        if parts.get("linear", Linear) is not Linear:
            raise PlatformError(
                "platform='torch' with parts.linear: torch computes the projections; need "
                "platform='cpu' for a part of your own"
            )
        kind = config.architecture
        if kind not in COMPARED or config.moe is not None:
            raise PlatformError(
                f"platform='torch' with architecture {kind}: need one without experts that was "
                f"compared: {', '.join(COMPARED)}"
            )
        super().__init__(config, weights, dtype)
        self._torch = [
            {
                "input_norm": _tensor(layer.input_norm),
                "post_norm": _tensor(layer.post_attention_norm),
                **{
                    name: _projection(getattr(layer, name))
                    for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
                },
            }
            for layer in self.layers
        ]  # fmt: skip
        self._norm, self._head = _tensor(self.norm), _projection(self.lm_head)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """As `Transformer.forward`: logits [num_rows, vocab_size], K and V written in place."""
        assert batch.kv_cache is not None, "a transformer needs the runner's KV cache"
        hidden = batch.inputs_embeds
        if hidden is None:
            hidden = embedded(self.embed_tokens, batch.token_ids)
        angles = batch.positions[:, None] * self._frequencies  # [num_tokens, head_dim / 2]
        with torch.inference_mode():
            rope = tuple(
                _tensor(f(angles).astype(self.dtype, copy=False))[:, None] for f in (np.cos, np.sin)
            )
            x = _tensor(hidden)  # [num_tokens, hidden_size]
            slots = torch.from_numpy(batch.slot_mapping)
            for weights, layer_cache in zip(self._torch, batch.kv_cache, strict=True):
                x = self._layer(weights, x, rope, _tensor(layer_cache), slots, batch)
            last = x[torch.from_numpy(batch.logits_indices)]  # [num_rows, hidden_size]
            rows: np.ndarray = _linear(self._head, self._rms(last, self._norm)).numpy()
        return rows

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        square = x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps
        return x / square.sqrt() * weight

    def _layer(
        self, w: Any, x: torch.Tensor, rope: tuple[torch.Tensor, ...], cache: torch.Tensor,
        slots: torch.Tensor, batch: ForwardBatch,
    ) -> torch.Tensor:  # fmt: skip
        c = self.config
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        qkv = _linear(w["qkv_proj"], self._rms(x, w["input_norm"]))
        qkv = qkv.view(len(x), heads + 2 * kv_heads, c.head_dim)
        query, key, value = qkv.split((heads, kv_heads, kv_heads), 1)
        query, key = _rotate(query, *rope), _rotate(key, *rope)
        # [2, num_blocks, block_size, kv_heads, head_dim] -> a row per slot, the runner's memory
        flat = cache.view(2, -1, kv_heads, c.head_dim)
        flat[0, slots], flat[1, slots] = key, value
        attended = self._attend(query, cache, batch)
        x = x + _linear(w["o_proj"], attended.reshape(len(x), heads * c.head_dim))
        gate, up = _linear(w["gate_up_proj"], self._rms(x, w["post_norm"])).chunk(2, -1)
        return x + _linear(w["down_proj"], functional.silu(gate) * up)

    def _attend(
        self, query: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """One request at a time: [num_tokens, heads, head_dim] to the same."""
        c = self.config
        group = c.num_attention_heads // c.num_key_value_heads
        out = torch.empty_like(query)
        starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for i, length in enumerate(lengths):
            first, end = starts[i], starts[i + 1]
            table = torch.from_numpy(batch.block_tables[i, : -(-length // batch.block_size)])
            # [2, kv_heads, length, head_dim]
            known = cache[:, table].flatten(1, 2)[:, :length].transpose(1, 2)
            keys, values = (part.repeat_interleave(group, 0) for part in known)
            mine = query[first:end].transpose(0, 1)  # [heads, queries, head_dim]
            scores = mine @ keys.transpose(1, 2) * c.head_dim**-0.5
            at = torch.from_numpy(batch.positions[first:end])
            later = torch.arange(length) > at[:, None]
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out[first:end] = (weights @ values).transpose(0, 1)
        return out


def _tensor(array: np.ndarray) -> torch.Tensor:
    """The same memory."""
    return torch.from_numpy(array)


def _projection(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = None if linear.bias is None else _tensor(linear.bias)
    return _tensor(linear.weight), bias


def _linear(weights: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor) -> torch.Tensor:
    weight, bias = weights  # [in_features, out_features]
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
