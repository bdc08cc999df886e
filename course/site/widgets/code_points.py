"""A row of weights on the values that a small format can say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mini_vllm.models.loader import load_checkpoint


def _floats(exponent_bits: int, mantissa_bits: int, count: int) -> list[float]:
    """The first `count` values of a small float format, from 0 upwards."""
    bias, steps = (1 << (exponent_bits - 1)) - 1, 1 << mantissa_bits
    found = []
    for code in range(count):
        exponent, fraction = code // steps, code % steps / steps
        normal = exponent > 0
        found.append((normal + fraction) * 2.0 ** ((exponent if normal else 1) - bias))
    return found


FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"points": [float(n) for n in range(128)], "bits": 8, "rule": "absmax"},
    "int4": {"points": [float(n) for n in range(8)], "bits": 4, "rule": "absmax"},
    "E4M3": {"points": _floats(4, 3, 127), "bits": 8, "rule": "absmax"},
    "E5M2": {"points": _floats(5, 2, 124), "bits": 8, "rule": "absmax"},
    "E2M1": {"points": _floats(2, 1, 8), "bits": 4, "rule": "absmax"},
    "MXFP4": {"points": _floats(2, 1, 8), "bits": 4, "rule": "power of two", "size": 32},
    "NVFP4": {"points": _floats(2, 1, 8), "bits": 4, "rule": "E4M3", "size": 16},
}
"""Non-negative values, bits of a code, what a scale may be, and the group where it is fixed."""

SCALE_BITS = {"absmax": 16, "power of two": 8, "E4M3": 8}


def round_to_points(sizes: np.ndarray, points: Sequence[float]) -> np.ndarray:
    """Index of the nearest point of each size (float64, not negative); ties to the even index."""
    values = np.asarray(points)
    above = np.clip(np.searchsorted(values, sizes), 1, len(values) - 1)
    middle = (values[above - 1] + values[above]) / 2
    up = (sizes > middle) | ((sizes == middle) & (above % 2 == 0))
    found: np.ndarray = np.where(up, above, above - 1)
    return found


def on_grid(row: np.ndarray, name: str, size: int, spike: float) -> dict[str, float]:
    """Quantize `row` (float64) with one scale per `size` neighbours; float64 throughout.

    Its largest weight is first made `spike` times as large. Returns `error`, the norm of the error
    of all other weights over theirs; `zeros`, how many of them became 0; `bits` per weight.
    NVFP4's float32 scale of the whole tensor is that of this row, and counts as no bits.
    """
    form = FORMATS[name]
    size = form.get("size", size)
    loud = int(np.abs(row).argmax())
    weights = row.copy()
    weights[loud] *= spike
    blocks = weights.reshape(-1, size)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    if form["rule"] == "absmax":
        scale = largest / form["points"][-1]
    elif form["rule"] == "power of two":
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
    else:
        e4m3 = FORMATS["E4M3"]["points"]
        whole = 448 * 6 / largest.max()
        scale = np.take(e4m3, round_to_points(np.minimum(whole * largest / 6, 448), e4m3)) / whole
    back = np.take(form["points"], round_to_points(np.abs(blocks) / scale, form["points"])) * scale
    sizes, got = np.delete(np.abs(weights), loud), np.delete(back.ravel(), loud)
    error = float(np.linalg.norm(got - sizes) / np.linalg.norm(sizes))
    bits = form["bits"] + SCALE_BITS[form["rule"]] / size
    return {"error": error, "zeros": int((got == 0).sum()), "bits": bits}


def rows() -> dict[str, np.ndarray]:
    """Two rows of the shipped model's weights, float64, by their names."""
    weights = load_checkpoint("byte-llama").weights
    found = {}
    for layer, place, number in ((3, "mlp.gate_proj", 219), (0, "self_attn.o_proj", 114)):
        name = f"{place.split('.')[1]} of layer {layer}, row {number}"
        found[name] = weights[f"model.layers.{layer}.{place}.weight"][number].astype(float)
    return found


def document() -> dict[str, Any]:
    """Rows and formats."""
    return {
        "rows": {name: row.tolist() for name, row in rows().items()},
        "formats": FORMATS,
        "scale_bits": SCALE_BITS,
    }
