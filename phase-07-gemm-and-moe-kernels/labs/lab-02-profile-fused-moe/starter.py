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
    raise NotImplementedError


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
    raise NotImplementedError


def fit_step_time(num_bytes: Sequence[float], milliseconds: Sequence[float]) -> tuple[float, float]:
    """A line through measured steps: what every step takes, and how fast bytes come on top.

    Returns:
        Fixed milliseconds, and bytes per second, by least squares.

    Raises:
        ValueError: fewer than two different numbers of bytes.
    """
    raise NotImplementedError


def categorise(kernel: str) -> str:
    """Which part of a layer a GPU kernel belongs to, by its name; one of `CATEGORIES`.

    On the Triton backend. A dense product's name says nothing of its purpose: router, Q, K, V, O
    and the head are all "gemm".
    """
    raise NotImplementedError


def expected_launches(config: Mapping[str, Any], batch: int, steps: int) -> dict[str, int]:
    """Launches by category of `steps` decode steps on the Triton backend; exact, on any GPU.

    Every layer has experts; `batch` tokens a step. Only "experts", "route", "align", "activation"
    and "combine", where combine counts vLLM's own kernel, which exists for 2, 3 and 4 experts a
    token: for other numbers torch sums.
    """
    raise NotImplementedError


def time_shares(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Share of the GPU's time by category, all of `CATEGORIES`, from (kernel, microseconds).

    Raises:
        ValueError: no time at all.
    """
    raise NotImplementedError
