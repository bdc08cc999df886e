"""Lab 07-02: say where a decode step of a mixture of experts goes, before profiling it.

`experts_touched`, `step_bytes`, `fit_step_time`, `categorise`, `expected_launches` and
`time_shares` are the lab. `run.py` profiles a real engine and holds them against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

CATEGORIES = ("experts", "route", "align", "activation", "combine", "attention", "gemm", "other")


def experts_touched(num_experts: int, top_k: int, batch: int) -> float:
    """How many experts of a layer at least one of `batch` tokens chooses, on average.

    Each token's choice is as likely as any other; tokens choose for themselves.

    A trace: 8 of 128 experts, 8 tokens: 51.6.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


def step_bytes(
    config: Mapping[str, Any], batch: int, distinct: int | None = None, element_bytes: int = 2
) -> dict[str, float]:
    """Weight bytes that one decode step reads, by part; each matrix in use is read once.

    Args:
        config: `config.json` of a Qwen3-MoE whose layers all have experts: hidden_size,
            moe_intermediate_size, num_experts, num_experts_per_tok, num_hidden_layers,
            num_attention_heads, num_key_value_heads, head_dim, vocab_size.
        batch: tokens of the step, one a request.
        distinct: how many of them are different; equal prompts are routed alike. Default: all.
        element_bytes: of a weight.

    Returns:
        "experts" (gate, up and down of those touched), "attention" (Q, K, V, O), "router" and
        "head", in bytes over all layers.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config["head_dim"]
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    tokens = batch if distinct is None else distinct
    touched = experts_touched(config["num_experts"], config["num_experts_per_tok"], tokens)
    numbers = {
        "experts": layers * touched * 3 * hidden * config["moe_intermediate_size"],
        "attention": layers * hidden * (2 * q + 2 * kv),
        "router": layers * hidden * config["num_experts"],
        "head": config["vocab_size"] * hidden,
    }
    return {part: float(count * element_bytes) for part, count in numbers.items()}


def fit_step_time(num_bytes: Sequence[float], milliseconds: Sequence[float]) -> tuple[float, float]:
    """A line through measured steps: what every step takes, and how fast bytes come on top.

    Returns:
        Fixed milliseconds, and bytes per second, by least squares.

    Raises:
        ValueError: fewer than two different numbers of bytes.
    """
    if len(set(num_bytes)) < 2:
        raise ValueError(f"num_bytes={list(num_bytes)}: need two different ones for a line")
    slope, fixed = np.polyfit(num_bytes, milliseconds, 1)
    return float(fixed), float(1e3 / slope)


def categorise(kernel: str) -> str:
    """Which part of a layer a GPU kernel belongs to, by its name; one of `CATEGORIES`.

    On the Triton backend. A dense product's name says nothing of its purpose: router, Q, K, V, O
    and the head are all "gemm".
    """
    name = kernel.lower()
    words = {
        "align": ("moe_align_block_size", "count_and_sort_expert_tokens"),
        "route": ("topkgating", "moesoftmax", "moetopk"),
        "experts": ("fused_moe_kernel",),
        "activation": ("act_and_mul",),
        "combine": ("moe_sum",),
        "attention": ("flash", "attention", "reshape_and_cache"),
        "gemm": ("gemm", "cutlass", "nvjet", "splitk"),
    }
    for category, parts in words.items():
        if any(part in name for part in parts):
            return category
    return "other"


def expected_launches(config: Mapping[str, Any], batch: int, steps: int) -> dict[str, int]:
    """Launches by category of `steps` decode steps on the Triton backend; exact, on any GPU.

    Every layer has experts; `batch` tokens a step. Only "experts", "route", "align", "activation"
    and "combine", where combine counts vLLM's own kernel, which exists for 2, 3 and 4 experts a
    token: for other numbers torch sums.
    """
    num_experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    times = config["num_hidden_layers"] * steps
    power = num_experts & (num_experts - 1) == 0 and num_experts <= 512
    one_kernel = power or num_experts in (192, 320, 384, 448, 576)
    pairs = batch * top_k
    align = 0 if pairs * 4 <= num_experts else 1 if pairs < 1024 and num_experts <= 64 else 2
    return {
        "experts": 2 * times,
        "route": (1 if one_kernel else 2) * times,
        "align": align * times,
        "activation": times,
        "combine": times if top_k in (2, 3, 4) else 0,
    }


def time_shares(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Share of the GPU's time by category, all of `CATEGORIES`, from (kernel, microseconds).

    Raises:
        ValueError: no time at all.
    """
    totals = dict.fromkeys(CATEGORIES, 0.0)
    for name, microseconds in rows:
        totals[categorise(name)] += microseconds
    whole = sum(totals.values())
    if whole <= 0:
        raise ValueError("rows: no time at all; was the right process profiled?")
    return {category: total / whole for category, total in totals.items()}
