"""Online softmax over a few keys, block by block: what the widget shows and computes.

Promises: the browser's arithmetic is `walk`, and `walk` ends where the engine's attention ends.
Mirrors `vllm/v1/attention/ops/triton_attention_helpers.py:361` `softmax_step`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NEEDS = ("decide",)

PRESETS: dict[str, list[float]] = {
    "rising": [-6, -4, -2, 0, 2, 4, 6, 8],
    "falling": [8, 6, 4, 2, 0, -2, -4, -6],
    "a late peak": [1, 0.5, 1.5, 0, 1, 8, 0.5, 1],
    "all equal": [2, 2, 2, 2, 2, 2, 2, 2],
}
VALUES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
"""One number per key, where a head has a vector."""

LEAST, MOST, STEP = -10, 10, 0.5


def walk(scores: Sequence[float], values: Sequence[float], size: int) -> list[dict[str, float]]:
    """The state after each block of `size` keys, in float64.

    Returns:
        Per block: `read`, keys read so far; `m`, `corr`, `denom`, `acc`; `out`, acc / denom; and
        `forgot`, what that would be if corr were left out.
    """
    m, denom, acc, forgot_denom, forgot_acc = -math.inf, 0.0, 0.0, 0.0, 0.0
    steps = []
    for start in range(0, len(scores), size):
        part = scores[start : start + size]
        after = max(m, *part)
        corr = math.exp(m - after)
        p = [math.exp(score - after) for score in part]
        weighted = sum(w * v for w, v in zip(p, values[start:], strict=False))
        denom, acc, m = denom * corr + sum(p), acc * corr + weighted, after
        forgot_denom, forgot_acc = forgot_denom + sum(p), forgot_acc + weighted
        steps.append(
            {
                "read": start + len(part), "m": m, "corr": corr, "denom": denom, "acc": acc,
                "out": acc / denom, "forgot": forgot_acc / forgot_denom,
            }
        )  # fmt: skip
    return steps


def rescaled(steps: Sequence[dict[str, float]]) -> int:
    """How often what was summed already had to shrink."""
    return sum(step["corr"] < 1 for step in steps[1:])


def _questions() -> list[dict[str, Any]]:
    asked = []
    for ask, preset, size, because in (
        ("Scores rise, one key at a time. How often must the sums so far be rescaled?", "rising", 1,
         "Every key but the first is a new maximum."),
        ("The same scores, falling. How often now?", "falling", 1,
         "The first key is the maximum: whoever forgets corr never notices."),
        ("One peak at key 6, blocks of 4. How often?", "a late peak", 4,
         "The second block holds the peak."),
    ):  # fmt: skip
        answer = rescaled(walk(PRESETS[preset], VALUES, size))
        choices = sorted({answer, 0, 1, 2, 7})
        asked.append({"ask": ask, "preset": preset, "size": size, "choices": choices,
                      "answer": answer, "because": because})  # fmt: skip
    return asked


def document() -> dict[str, Any]:
    """The widget's document."""
    return {
        "presets": PRESETS, "values": VALUES, "least": LEAST, "most": MOST, "step": STEP,
        "questions": _questions(),
    }  # fmt: skip
