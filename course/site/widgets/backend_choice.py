"""Which attention backend the real selector takes, and what the others object to.

Promises: every outcome is one of the recording that
`conformance/features/attention/attention_selector.py` makes of upstream's own code; the browser
looks up and decides nothing.
Mirrors `vllm/platforms/cuda.py:258` `CudaPlatformBase.get_valid_backends`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from conformance import parts

NEEDS = ("decide",)

GPUS = {
    "T4 (7.5)": "7.5", "A100 (8.0)": "8.0", "L4 (8.9)": "8.9", "H100 (9.0)": "9.0",
    "B200 (10.0)": "10.0", "RTX PRO 6000 (12.0)": "12.0",
}  # fmt: skip
"""Vendor's names for the recorded compute capabilities."""

AXES: dict[str, list[Any]] = {
    "head_size": [16, 64, 80, 100, 128, 256, 512, 576],
    "dtype": ["float16", "bfloat16", "float32"],
    "kv_cache_dtype": ["auto", "fp8", "nvfp4", "turboquant_k8v4"],
    "block_size": [None, 8, 16, 32, 64, 128],
}
"""Of the recorded grid, what can be picked."""

LAYERS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "with sinks (gpt-oss)": {"has_sink": True},
    "image tokens see both ways": {"use_mm_prefix": True},
    "not causal": {"use_non_causal": True},
    "encoder": {"attn_type": "encoder_only"},
    "MLA": {"use_mla": True},
    "sparse MLA": {"use_mla": True, "use_sparse": True},
}

START = {
    "gpu": "H100 (9.0)", "layer": "MLA", "head_size": 576, "dtype": "bfloat16",
    "kv_cache_dtype": "fp8", "block_size": 16,
}  # fmt: skip
"""What the guide's figure shows."""


def outcome(picked: dict[str, Any]) -> dict[str, Any]:
    """`valid` and `rejected` of one combination; the keys are those of `START`."""
    asked = {name: picked[name] for name in AXES}
    return parts.selector_outcome(GPUS[picked["gpu"]], LAYERS[picked["layer"]], **asked)


def combinations() -> list[dict[str, Any]]:
    """Every combination, in the order of the document's table."""
    names = ["gpu", "layer", *AXES]
    places = itertools.product(GPUS, LAYERS, *AXES.values())
    return [dict(zip(names, values, strict=True)) for values in places]


def _questions() -> list[dict[str, Any]]:
    usual = {**START, "layer": "ordinary", "head_size": 128, "kv_cache_dtype": "auto",
             "block_size": None}  # fmt: skip
    asked = []
    for ask, picked in (
        ("An A100 serves bf16 with an fp8 cache. Which backend?",
         {**usual, "gpu": "A100 (8.0)", "kv_cache_dtype": "fp8"}),
        ("Sinks and heads of 64 on a B200. Which backend?",
         {**usual, "gpu": "B200 (10.0)", "layer": "with sinks (gpt-oss)", "head_size": 64}),
        ("MLA on an H100, fp8 cache, no block size given. Which backend?",
         {**START, "block_size": None}),
        ("Heads of 100 on an H100. Which backend?", {**usual, "head_size": 100}),
    ):  # fmt: skip
        found = outcome(picked)
        asked.append(
            {
                "ask": ask, "picked": picked, "answer": found["valid"][0],
                "choices": sorted([*found["valid"], *found["rejected"]]),
            }
        )  # fmt: skip
    return asked


@functools.cache
def document() -> dict[str, Any]:
    """The widget's document: `table` has three digits in base 36 for each of `combinations()`."""
    outcomes: list[Any] = []
    known: dict[str, int] = {}
    table = []
    for picked in combinations():
        found = outcome(picked)
        at = known.setdefault(repr(found), len(known))
        if at == len(outcomes):
            outcomes.append(found)
        table.append(_base36(at))
    reasons = sorted({r for o in outcomes for given in o["rejected"].values() for r in given})
    backends = sorted({b for o in outcomes for b in (*o["valid"], *o["rejected"])})
    short = [
        [
            [backends.index(name) for name in found["valid"]],
            [
                [backends.index(name), *(reasons.index(reason) for reason in given)]
                for name, given in found["rejected"].items()
            ],
        ]
        for found in outcomes
    ]
    return {
        "gpus": list(GPUS), "layers": list(LAYERS), "axes": AXES, "start": START,
        "backends": backends, "reasons": reasons, "outcomes": short, "table": "".join(table),
        "questions": _questions(),
    }  # fmt: skip


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    if not 0 <= number < 36**3:
        raise ValueError(f"number={number}: need at most {36**3 - 1}")
    return digits[number // 1296] + digits[number // 36 % 36] + digits[number % 36]
