"""Lab 04-04: split the keys, attend to the parts, merge: exact, in any order and any grouping.

A part of the keys leaves a `Partial`. `merge_two` makes partials a commutative monoid with the
identity (-inf, 0, 0); the rest uses that. One query, one head, except for `cascade_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Partial(NamedTuple):
    """Attention over some of the keys, not yet divided by its denominator."""

    m: float
    """Largest score; -inf where there was no key."""
    denom: float
    """Sum of exp(score - m); 0 where there was no key."""
    acc: np.ndarray
    """[d_v], sum of exp(score - m) * value."""


def attend_partial(q: np.ndarray, K: np.ndarray, V: np.ndarray) -> Partial:
    """What a part of the keys contributes. No argument is changed.

    Args:
        q: [d], scores scaled by d ** -0.5.
        K: [n, d], n >= 0. No keys give the identity: (-inf, 0, zeros).
        V: [n, d_v].

    Source: the epilogue of `vllm/v1/attention/ops/triton_unified_attention.py:179`
    `kernel_unified_attention` for a segment.
    """
    if len(K) == 0:
        return Partial(-math.inf, 0.0, np.zeros(V.shape[1]))
    scores = K @ q * len(q) ** -0.5
    m = float(scores.max())
    p = np.exp(scores - m)
    return Partial(m, float(p.sum()), p @ V)


def merge_two(a: Partial, b: Partial) -> Partial:
    """The partial of the keys of `a` and of `b` together. Neither argument is changed.

    Two identities give the identity. A trace: (ln 2, 1.5, 2.5) and (ln 8, 1.5, 5.5) give
    (ln 8, 1.875, 6.125).

    Source: `vllm/v1/attention/ops/triton_unified_attention.py:646` `reduce_segments`, two at a
    time.
    """
    m = max(a.m, b.m)
    if m == -math.inf:  # -inf - (-inf) would be NaN
        return a
    scale_a, scale_b = math.exp(a.m - m), math.exp(b.m - m)
    return Partial(m, a.denom * scale_a + b.denom * scale_b, a.acc * scale_a + b.acc * scale_b)


def merge_partials(partials: Sequence[Partial]) -> np.ndarray:
    """The output over the keys of all partials: [d_v]; zeros when none of them saw a key.

    Raises:
        ValueError: no partials at all, since then the output's size is unknown.
    """
    if not partials:
        raise ValueError("partials is empty: need at least one")
    total = partials[0]
    for partial in partials[1:]:
        total = merge_two(total, partial)
    if total.denom == 0:
        return np.zeros_like(total.acc)
    return total.acc / total.denom


def partitioned_attention(
    q: np.ndarray, K: np.ndarray, V: np.ndarray, num_partitions: int
) -> np.ndarray:
    """Attention over K and V in `num_partitions` parts as equal as `np.array_split` makes them.

    More partitions than keys are allowed; the extra ones are empty.

    Raises:
        ValueError: `num_partitions` below 1.
    """
    if num_partitions < 1:
        raise ValueError(f"num_partitions={num_partitions}: need at least 1")
    parts = zip(np.array_split(K, num_partitions), np.array_split(V, num_partitions), strict=True)
    return merge_partials([attend_partial(q, keys, values) for keys, values in parts])


def to_lse(partial: Partial) -> tuple[np.ndarray, float]:
    """The other form: the part's own output, and the logarithm of its sum of exp(score).

    Returns:
        (output [d_v], lse = m + ln denom). The identity gives (zeros, -inf).
    """
    if partial.denom == 0:
        return np.zeros_like(partial.acc), -math.inf
    return partial.acc / partial.denom, partial.m + math.log(partial.denom)


def merge_lse(a: tuple[np.ndarray, float], b: tuple[np.ndarray, float]) -> tuple[np.ndarray, float]:
    """Merge two parts in the form of `to_lse`, natural logarithm.

    An lse of +inf means no keys, like -inf: FlashAttention 2 marks an empty part so, version 3
    the other way.

    Returns:
        (output, lse) of both parts' keys; (zeros, -inf) when both are empty.

    Source: `vllm/v1/attention/ops/triton_merge_attn_states.py:58` `merge_attn_states_kernel`.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse_a = -math.inf if lse_a == math.inf else lse_a
    lse_b = -math.inf if lse_b == math.inf else lse_b
    largest = max(lse_a, lse_b)
    if largest == -math.inf:
        return np.zeros_like(out_a), -math.inf
    weight_a, weight_b = math.exp(lse_a - largest), math.exp(lse_b - largest)
    total = weight_a + weight_b
    return out_a * (weight_a / total) + out_b * (weight_b / total), largest + math.log(total)


def cascade_prefix_len(
    num_common_blocks: int, num_computed_tokens: Sequence[int], block_size: int
) -> int:
    """How many tokens of a shared prefix all queries of a step may attend to without a mask.

    The prefix pass has no causal mask, so no query may lie inside the prefix: its length is at
    most the smallest `num_computed_tokens`. It is a whole number of blocks.

    Args:
        num_common_blocks: leading blocks that all requests share.
        num_computed_tokens: per request, tokens computed before this step.
        block_size: tokens per block.

    Source: `vllm/v1/worker/gpu_model_runner.py:2520`
    `GPUModelRunner._compute_cascade_attn_prefix_len`.
    """
    length = min(num_common_blocks * block_size, min(num_computed_tokens))
    return length // block_size * block_size


def cascade_attention(
    Q: np.ndarray,
    prefix_k: np.ndarray,
    prefix_v: np.ndarray,
    suffixes: Sequence[tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """One decode query per request, all over one shared prefix, each over a suffix of its own.

    The prefix goes through memory once, whatever the number of requests.

    Args:
        Q: [num_reqs, d].
        prefix_k: [n, d], n >= 0.
        prefix_v: [n, d_v].
        suffixes: per request K [n_r, d] and V [n_r, d_v], n_r >= 1.

    Returns:
        [num_reqs, d_v].

    Source: `vllm/v1/attention/backends/flash_attn.py:1132` `cascade_attention`.
    """
    out = np.empty((len(Q), prefix_v.shape[1]))
    shared = [Partial(-math.inf, 0.0, np.zeros(prefix_v.shape[1]))] * len(Q)
    if len(prefix_k):
        scores = Q @ prefix_k.T * Q.shape[1] ** -0.5  # [num_reqs, n]
        m = scores.max(axis=1)
        p = np.exp(scores - m[:, None])
        acc = p @ prefix_v
        shared = [Partial(float(m[r]), float(p[r].sum()), acc[r]) for r in range(len(Q))]
    for r, (keys, values) in enumerate(suffixes):
        own = attend_partial(Q[r], keys, values)
        out[r], _ = merge_lse(to_lse(shared[r]), to_lse(own))
    return out
