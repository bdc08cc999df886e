"""How far rounding may move what a Llama's layer computes, whatever the order of its sums.

A value and a bound on its error go through every operation together. A sum of n products, in any
order and with or without fused multiply-adds, is off by at most gamma(n) = n u / (1 - n u) times
the sum of magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and
what was off before is carried on by the operation's own slope. Two implementations of the same
arithmetic are then at most twice the bound apart. Products of two errors are dropped only where
they are below u squared.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mini_vllm.models.transformer import Transformer, rotate

ELEMENTARY = 16
"""Roundings allowed to one exp, square root, division or sigmoid, in units of u."""


class Bounded:
    """An array with a bound on how far it may be off."""

    def __init__(self, value: np.ndarray, error: np.ndarray | float = 0.0) -> None:
        self.value = value
        self.error = np.broadcast_to(np.asarray(error, np.float64), value.shape)

    @property
    def most(self) -> np.ndarray:
        """The largest magnitude it may have."""
        largest: np.ndarray = np.abs(self.value) + self.error
        return largest


def layer_of(model: Transformer, index: int, hidden: np.ndarray, u: float) -> Bounded:
    """What a layer makes of one sequence's `hidden` [num_tokens, hidden_size], and its bound.

    For unit roundoff `u`. The same input for both: carried on through all layers, worst case after
    worst case, the bound would say nothing.
    """
    c, layer = model.config, model.layers[index]
    angles = np.arange(len(hidden))[:, None] * model._frequencies
    rope = np.cos(angles)[:, None], np.sin(angles)[:, None]
    x = Bounded(hidden)
    x = _sum(x, _attention(layer, _rms(x, layer.input_norm, c, u), rope, c, u), u)
    both = _linear(_rms(x, layer.post_attention_norm, c, u), layer.gate_up_proj, u)
    gate, up = (
        Bounded(*pair)
        for pair in zip(np.split(both.value, 2, -1), np.split(both.error, 2, -1), strict=True)
    )
    silu = gate.value / (1 + np.exp(-gate.value))
    off = 1.1 * gate.error + _gamma(ELEMENTARY, u) * np.abs(silu)  # silu's slope is below 1.1
    gate = Bounded(silu, off)
    off = gate.most * up.most * (1 + u) - np.abs(silu * up.value)
    return _sum(x, _linear(Bounded(silu * up.value, off), layer.down_proj, u), u)


def head_of(model: Transformer, hidden: np.ndarray, u: float) -> Bounded:
    """Logits of the last layer's output, and their bound."""
    return _linear(_rms(Bounded(hidden), model.norm, model.config, u), model.lm_head, u)


def _gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)


def _sum(a: Bounded, b: Bounded, u: float) -> Bounded:
    return Bounded(a.value + b.value, a.error + b.error + u * (a.most + b.most))


def _linear(x: Bounded, linear: Any, u: float) -> Bounded:
    weight = linear.weight  # [in_features, out_features]
    size = np.abs(weight)
    return Bounded(x.value @ weight, x.error @ size + _gamma(len(weight), u) * (x.most @ size))


def _rms(x: Bounded, weight: np.ndarray, c: Any, u: float) -> Bounded:
    n = x.value.shape[-1]
    square = (x.value**2).mean(-1, keepdims=True) + c.rms_norm_eps
    largest = (x.most**2).mean(-1, keepdims=True) + c.rms_norm_eps
    off = largest - square + _gamma(n + ELEMENTARY, u) * largest
    grows = (1 - off / square) ** -0.5 * (1 + _gamma(ELEMENTARY, u))
    value = x.value / np.sqrt(square) * weight
    return Bounded(value, x.most / np.sqrt(square) * grows * np.abs(weight) - np.abs(value))


def _attention(layer: Any, x: Bounded, rope: Any, c: Any, u: float) -> Bounded:
    heads, kv_heads, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    qkv = _linear(x, layer.qkv_proj, u)
    shape = len(x.value), heads + 2 * kv_heads, size
    value, error = qkv.value.reshape(shape), qkv.error.reshape(shape)
    turned = heads + kv_heads
    half = size // 2
    cos, sin = (np.abs(each) for each in rope)
    most = np.abs(value) + error
    left, right = slice(0, half), slice(half, size)
    off = np.concatenate(
        [
            (e[..., a] * cos + e[..., b] * sin)
            + _gamma(3, u) * (m[..., a] * cos + m[..., b] * sin)
            for e, m in [(error[:, :turned], most[:, :turned])]
            for a, b in ((left, right), (right, left))
        ], -1,
    )  # fmt: skip
    value = np.concatenate([rotate(value[:, :turned], *rope), value[:, turned:]], 1)
    error = np.concatenate([off, error[:, turned:]], 1)
    group = heads // kv_heads
    q, k, v = (
        Bounded(value[:, part].transpose(1, 0, 2).repeat(times, 0),
                error[:, part].transpose(1, 0, 2).repeat(times, 0))
        for part, times in ((slice(0, heads), 1), (slice(heads, turned), group),
                            (slice(turned, None), group))
    )  # fmt: skip  # [heads, num_tokens, head_dim]
    hidden = np.triu(np.ones((shape[0], shape[0]), bool), 1)
    scale = size**-0.5
    scores = q.value @ k.value.transpose(0, 2, 1) * scale
    largest = q.most @ k.most.transpose(0, 2, 1) * scale
    off = largest - np.abs(q.value) @ np.abs(k.value).transpose(0, 2, 1) * scale
    off = np.where(hidden, 0.0, off + _gamma(size + 2, u) * largest)
    scores = np.where(hidden, -np.inf, scores)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True)
    spread = np.where(hidden, 0.0, top - scores).max(-1, keepdims=True)
    moved = 2 * (off.max(-1, keepdims=True) + u * spread)
    grows = np.exp(moved) * (1 + _gamma(shape[0] + 2 * ELEMENTARY, u)) - 1
    p = Bounded(weights, weights * grows)
    out = p.value @ v.value
    largest = p.most @ v.most
    off = largest - p.value @ np.abs(v.value) + _gamma(shape[0], u) * largest
    flat = [each.transpose(1, 0, 2).reshape(shape[0], heads * size) for each in (out, off)]
    return _linear(Bounded(*flat), layer.o_proj, u)
