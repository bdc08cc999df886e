"""Which limit a step hits, compute or memory bandwidth, and how fast decode can go.

A roofline model of one forward pass: pure arithmetic on model size, tokens, hardware. `roofline`
has a JSON form. Upstream counts the same quantities per layer type in
`vllm/v1/metrics/perf.py:400` `AttentionMetrics` and `vllm/v1/metrics/perf.py:662` `FfnMetrics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def _require_positive(**values: float) -> None:
    """Given. Refuse anything that is not a finite number above 0, naming argument and value."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}={value!r}: need a number above 0")
        if not (0 < value < math.inf):
            raise ValueError(f"{name}={value!r}: need a finite number above 0")


# --- Part A: the weights-only model --------------------------------------------------------------


def ridge_point(peak_flops: float, mem_bw: float) -> float:
    """FLOP per byte at which compute and memory take equally long.

    Args:
        peak_flops: peak arithmetic rate, FLOP/s (dense, for the dtype you compute in).
        mem_bw: memory bandwidth, bytes/s.

    Raises:
        ValueError: an argument that is not a finite number above 0. So in every function of this
            file, for every argument; `_require_positive` does it.
    """
    _require_positive(peak_flops=peak_flops, mem_bw=mem_bw)
    return peak_flops / mem_bw


def step_flops(n_params: float, num_tokens: float) -> float:
    """FLOP of one forward pass over `num_tokens` tokens, all requests together.

    Every weight meets every token once, in one multiplication and one addition: 2 FLOP.
    Attention's own arithmetic is left out here; Part B adds it.
    """
    _require_positive(n_params=n_params, num_tokens=num_tokens)
    return 2 * n_params * num_tokens


def step_bytes(n_params: float, dtype_bytes: float = 2) -> float:
    """Bytes of weights one forward pass reads: every weight once, whatever the number of tokens.

    Args:
        n_params: number of weights.
        dtype_bytes: bytes per weight: 2 for fp16 and bf16, 1 for fp8, 0.5 for int4.
    """
    _require_positive(n_params=n_params, dtype_bytes=dtype_bytes)
    return n_params * dtype_bytes


def arithmetic_intensity(n_params: float, num_tokens: float, dtype_bytes: float = 2) -> float:
    """FLOP per byte of a step: `step_flops / step_bytes`."""
    return step_flops(n_params, num_tokens) / step_bytes(n_params, dtype_bytes)


def is_compute_bound(
    n_params: float,
    num_tokens: float,
    peak_flops: float,
    mem_bw: float,
    dtype_bytes: float = 2,
) -> bool:
    """True when the arithmetic takes at least as long as reading the weights.

    At the ridge point itself both take equally long, and that counts as compute-bound.
    """
    intensity = arithmetic_intensity(n_params, num_tokens, dtype_bytes)
    return intensity >= ridge_point(peak_flops, mem_bw)


def critical_tokens(peak_flops: float, mem_bw: float, dtype_bytes: float = 2) -> float:
    """Tokens per step at which the weights-only model reaches the ridge point.

    The number of tokens whose `arithmetic_intensity` equals `ridge_point`, for any model size.
    """
    _require_positive(dtype_bytes=dtype_bytes)
    return ridge_point(peak_flops, mem_bw) * dtype_bytes / 2


def decode_tokens_per_second(
    n_params: float,
    mem_bw: float,
    batch: int = 1,
    dtype_bytes: float = 2,
    peak_flops: float | None = None,
) -> float:
    """Upper limit of decode throughput: `batch` tokens per step, one for each request.

    A step lasts as long as the slower of reading the weights once and, when `peak_flops` is
    given, doing the arithmetic of `batch` tokens.
    """
    _require_positive(mem_bw=mem_bw, batch=batch)
    seconds = step_bytes(n_params, dtype_bytes) / mem_bw
    if peak_flops is not None:
        _require_positive(peak_flops=peak_flops)
        seconds = max(seconds, step_flops(n_params, batch) / peak_flops)
    return batch / seconds


# --- Part B: the KV cache is read too ------------------------------------------------------------


def attention_flops_per_context_token(num_layers: int, num_heads: int, head_dim: int) -> int:
    """FLOP that attention spends, per new token, on each token of its context, over all layers.

    Per query head and layer: a dot product with the key (2 x head_dim FLOP) and adding the
    weighted value (2 x head_dim FLOP). Query heads count here, not KV heads.

    Source: `vllm/v1/metrics/perf.py:432` `AttentionMetrics.get_num_flops_breakdown`, the entries
    `attn_qk` and `attn_av`.
    """
    _require_positive(num_layers=num_layers, num_heads=num_heads, head_dim=head_dim)
    return 4 * num_layers * num_heads * head_dim


def decode_intensity_with_kv(
    n_params: float,
    batch: float,
    context_len: float,
    kv_bytes_per_token: float,
    attention_flops: float,
    dtype_bytes: float = 2,
) -> float:
    """FLOP per byte of a decode step that also reads the KV cache.

    Each of the `batch` requests adds one token's arithmetic (2 FLOP per weight, plus
    `attention_flops` for each of its `context_len` tokens) and reads its own
    `context_len * kv_bytes_per_token` bytes. The weights are read once for all.

    Args:
        attention_flops: from `attention_flops_per_context_token`.

    Source: the decode branch of `vllm/v1/metrics/perf.py:458`
    `AttentionMetrics.get_read_bytes_breakdown`.
    """
    _require_positive(
        batch=batch,
        context_len=context_len,
        kv_bytes_per_token=kv_bytes_per_token,
        attention_flops=attention_flops,
    )
    flops = step_flops(n_params, batch) + batch * context_len * attention_flops
    read = step_bytes(n_params, dtype_bytes) + batch * context_len * kv_bytes_per_token
    return flops / read


def decode_tokens_per_second_with_kv(
    n_params: float,
    mem_bw: float,
    batch: int,
    context_len: float,
    kv_bytes_per_token: float,
    dtype_bytes: float = 2,
) -> float:
    """Upper limit of decode throughput when a step reads the weights once and every request's KV.

    Args:
        context_len: tokens in the cache of each request, on average.
        kv_bytes_per_token: bytes of KV cache per token (131,072 for Llama-3-8B in bf16).
    """
    _require_positive(
        mem_bw=mem_bw,
        batch=batch,
        context_len=context_len,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    read = step_bytes(n_params, dtype_bytes) + batch * context_len * kv_bytes_per_token
    return batch / (read / mem_bw)


def compute_bound_context_limit(
    n_params: float,
    peak_flops: float,
    mem_bw: float,
    kv_bytes_per_token: float,
    attention_flops: float,
) -> float:
    """Context length above which no batch, however large, makes decode compute-bound.

    Where `decode_intensity_with_kv` tends, for an endless batch, to the ridge point exactly: 803.1
    tokens for the 8B model on an A100. `math.inf` when attention alone reaches the ridge.
    """
    _require_positive(
        n_params=n_params, kv_bytes_per_token=kv_bytes_per_token, attention_flops=attention_flops
    )
    missing = ridge_point(peak_flops, mem_bw) * kv_bytes_per_token - attention_flops
    if missing <= 0:
        return math.inf
    return 2 * n_params / missing


# --- Given: the JSON form ------------------------------------------------------------------------


def roofline(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Given. Hardware, a model and some decode batches in; a point on the roofline for each out.

    Inputs: `peak_flops`, `mem_bw`, `n_params`, `kv_bytes_per_token`, `attention_flops`, optional
    `dtype_bytes` (2), and `points`, a list of `{"batch": ..., "context_len": ...}`.
    """
    dtype_bytes = inputs.get("dtype_bytes", 2)
    ridge = ridge_point(inputs["peak_flops"], inputs["mem_bw"])
    limit = compute_bound_context_limit(
        inputs["n_params"],
        inputs["peak_flops"],
        inputs["mem_bw"],
        inputs["kv_bytes_per_token"],
        inputs["attention_flops"],
    )
    points = []
    for point in inputs["points"]:
        intensity = decode_intensity_with_kv(
            inputs["n_params"],
            point["batch"],
            point["context_len"],
            inputs["kv_bytes_per_token"],
            inputs["attention_flops"],
            dtype_bytes,
        )
        points.append(
            {
                **point,
                "intensity": intensity,
                "weights_only_intensity": arithmetic_intensity(
                    inputs["n_params"], point["batch"], dtype_bytes
                ),
                "attainable_flops": min(inputs["peak_flops"], intensity * inputs["mem_bw"]),
                "bound": "compute" if intensity >= ridge else "memory",
            }
        )
    return {
        "ridge": ridge,
        "critical_tokens": critical_tokens(inputs["peak_flops"], inputs["mem_bw"], dtype_bytes),
        "compute_bound_context_limit": None if math.isinf(limit) else limit,
        "points": points,
    }
