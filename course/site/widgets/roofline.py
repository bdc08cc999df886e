"""What bounds a decode step: arithmetic, or reading the weights and the cache."""

from __future__ import annotations

from typing import Any

from course.site.widgets.hardware import GPUS, shapes


def decode_step(
    shape: dict[str, Any], gpu: dict[str, float], batch: int, context: int
) -> dict[str, float]:
    """FLOP, bytes, intensity and the shortest possible time of one decode step.

    Every weight is read once and used once per request; every request reads its own context.
    Weights and cache take 2 bytes per number.
    """
    weights, kv = 2 * shape["parameters"], shape["kv_bytes_per_token"]
    flops = batch * (2 * shape["parameters"] + shape["attention_flops"] * context)
    kv_bytes = batch * context * kv
    seconds = max(flops / gpu["peak_flops"], (weights + kv_bytes) / gpu["mem_bw"])
    return {
        "flops": flops,
        "weight_bytes": weights,
        "kv_bytes": kv_bytes,
        "intensity": flops / (weights + kv_bytes),
        "ridge": gpu["peak_flops"] / gpu["mem_bw"],
        "seconds": seconds,
        "tokens_per_s": batch / seconds,
    }


def document() -> dict[str, Any]:
    """Model shapes and GPUs."""
    return {"models": shapes(), "gpus": GPUS}
