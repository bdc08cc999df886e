"""Every value that int8, int4, E4M3, E5M2 and E2M1 can say, and what it does to real weights.

`python phase-06-quantization/studies/code_points.py` decodes the formats from their bits, rounds
the shipped model's weights to them under several kinds of scale, prints tables and writes
`code-points.json` into `--out`. Nothing is timed. The formats at the pin: `vllm/scalar_type.py:23`
`ScalarType`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.modules import sibling

common = sibling(__file__, "study_tools")


FORMATS = ("int8", "int4", "E4M3", "E5M2", "E2M1")


def decode(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Values of all bit patterns of a sign-exponent-mantissa format, by pattern, signs included.

    The bias is 2 ** (exponent_bits - 1) - 1 and exponent 0 is subnormal, as in IEEE 754. What the
    top patterns mean is the caller's business: here every one of them is a number.
    """
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    normal = exponent > 0
    size = np.where(normal, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return np.where(codes >> (exponent_bits + mantissa_bits), -size, size)


def grid(name: str) -> np.ndarray:
    """The non-negative finite values of a format, ascending; index parity is the code's parity.

    E4M3 has no infinity: only its last pattern is NaN, so 448 is the largest. E5M2 gives its last
    exponent to infinity and NaN: 57,344. E2M1 has neither. The integers are those of absmax
    quantization: -128 and -8 are not used.
    """
    if name.startswith("int"):
        return np.arange(1 << (int(name[3:]) - 1)).astype(float)
    if name == "E4M3":
        return decode(4, 3)[:127]
    if name == "E5M2":
        return decode(5, 2)[:124]
    if name == "E2M1":
        return decode(2, 1)[:8]
    raise ValueError(f"format={name!r}: need one of {', '.join(FORMATS)}")


def round_to(x: np.ndarray, name: str) -> np.ndarray:
    """The nearest value of a format, ties to the even code, what is too large to the largest."""
    values = grid(name)
    size = np.abs(x)
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x)


# ------------------------------------------------------------------ scales


def per_tensor(W: np.ndarray, name: str) -> np.ndarray:
    """One scale: the loudest weight gets the largest code."""
    scale = np.abs(W).max() / grid(name)[-1]
    return round_to(W / scale, name) * scale


def per_group(W: np.ndarray, name: str, size: int) -> np.ndarray:
    """An fp16 scale per `size` weights of a row; 0 counts as 1."""
    blocks = W.reshape(len(W), -1, size)
    scale = (np.abs(blocks).max(axis=2, keepdims=True) / grid(name)[-1]).astype(np.float16)
    scale = np.where(scale > 0, scale, 1).astype(float)
    return (round_to(blocks / scale, name) * scale).reshape(W.shape)


def mxfp4(W: np.ndarray) -> np.ndarray:
    """E2M1 with a power of two per 32 weights of a row.

    The exponent is that of the block's largest weight less 2, the exponent of E2M1's largest
    value: the largest weight lands in [4, 8) and is cut to 6 where it lies above. OCP Microscaling
    Formats 1.0, section 6.3.
    """
    blocks = W.reshape(len(W), -1, 32)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    exponent = np.floor(np.log2(np.where(top > 0, top, 1))) - 2
    scale = 2.0 ** np.clip(exponent, -127, 127)  # E8M0
    return (round_to(blocks / scale, "E2M1") * scale).reshape(W.shape)


def nvfp4(W: np.ndarray) -> np.ndarray:
    """E2M1 with an E4M3 scale per 16 weights of a row and one float32 for the tensor.

    The float32 maps the loudest block's scale to 448, E4M3's largest. float32 throughout, as in
    `vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py:439` `ref_nvfp4_quant`.
    """
    W = W.astype(np.float32)
    whole = np.float32(448 * 6) / np.abs(W).max()
    blocks = W.reshape(len(W), -1, 16)
    wanted = whole * (np.abs(blocks).max(axis=2, keepdims=True) * np.float32(1 / 6))
    scale = round_to(np.minimum(wanted, 448), "E4M3").astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, 1 / (scale * (1 / whole)), 0).astype(np.float32)
    codes = round_to(np.clip(blocks * inverse, -6, 6), "E2M1").astype(np.float32)
    return (codes * (scale / whole)).reshape(W.shape)


SCHEMES: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    "int8, tensor": (8.0, lambda W: per_tensor(W, "int8")),
    "E4M3, tensor": (8.0, lambda W: per_tensor(W, "E4M3")),
    "E5M2, tensor": (8.0, lambda W: per_tensor(W, "E5M2")),
    "int4, tensor": (4.0, lambda W: per_tensor(W, "int4")),
    "E2M1, tensor": (4.0, lambda W: per_tensor(W, "E2M1")),
    "int4, fp16 per 128": (4.125, lambda W: per_group(W, "int4", 128)),
    "int4, fp16 per 32": (4.5, lambda W: per_group(W, "int4", 32)),
    "E2M1, fp16 per 32": (4.5, lambda W: per_group(W, "E2M1", 32)),
    "MXFP4": (4.25, mxfp4),
    "NVFP4": (4.5, nvfp4),
}
"""Name to bits per weight and the rounding. One scale for a whole tensor counts as no bits."""


# ------------------------------------------------------------------ tables


def facts() -> list[dict[str, Any]]:
    """Size of each grid, its range, and its steps."""
    found = []
    for name in FORMATS:
        values = grid(name)
        positive = values[values > 0]
        found.append(
            {
                "format": name,
                "values": 2 * len(values) - 1,
                "largest": float(values[-1]),
                "smallest": float(positive[0]),
                "largest step over largest value": float((values[-1] - values[-2]) / values[-1]),
                "above half of the largest": int((values > values[-1] / 2).sum()),
            }
        )
    return found


def error_by_size(points: int = 33) -> dict[str, list[float]]:
    """RMS relative error of numbers between half a size and the size, the largest being 1.

    One entry per third of an octave, from size 1 down to 2 ** -((points - 1) / 3).
    """
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {"size": [2.0 ** (-k / 3) for k in range(points)]}
    for name in FORMATS:
        top = grid(name)[-1]
        errors = []
        for size in found["size"]:
            x = size * 2.0 ** -rng.random(4000)
            got = round_to(x * top, name) / top
            errors.append(float(np.sqrt((((got - x) / x) ** 2).mean())))
        found[name] = errors
    return found


def real_weights() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every scheme on every projection of the shipped model, and a histogram of the weights."""
    weights = [
        W.astype(float)
        for name, W in common.checkpoint().weights.items()
        if name.endswith("proj.weight")
    ]
    spiked = [W.copy() for W in weights]
    for W in spiked:
        W[0, 0] = 20 * np.abs(W).max()
    found = []
    for name, (bits, scheme) in SCHEMES.items():
        errors = [common.relative(scheme(W), W) for W in weights]
        others = []
        for W in spiked:
            got = scheme(W)
            got[0, 0] = W[0, 0]
            rest = W.copy()
            rest[0, 0] = 0
            others.append(float(np.linalg.norm(got - W) / np.linalg.norm(rest)))
        found.append(
            {
                "scheme": name,
                "bits": bits,
                "error": float(np.mean(errors)),
                "with one spike": float(np.mean(others)),
            }
        )
    shares = np.concatenate([(W / np.abs(W).max()).ravel() for W in weights])
    counts, edges = np.histogram(shares, bins=np.linspace(-1, 1, 81))
    histogram = {
        "edges": edges.tolist(),
        "shares": (counts / counts.sum()).tolist(),
        "within a tenth": float((np.abs(shares) <= 0.1).mean()),
        "above half": float((np.abs(shares) > 0.5).mean()),
    }
    return found, histogram


def table(saved: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = ["finite values, both signs"]
    for row in saved["formats"]:
        lines.append(
            f"  {row['format']:<5} {row['values']:>4} values   largest {row['largest']:>8,g}   "
            f"smallest {row['smallest']:<11.6g} {row['above half of the largest']:>3} of them in "
            "the upper half"
        )
    lines.append(
        "RMS relative error of numbers from half a size to the size; the tensor's largest is 1"
    )
    sizes = saved["by size"]["size"]
    shown = [k for k in range(0, len(sizes), 3) if k % 6 == 0]
    lines.append("  size  " + "".join(f"{'1/' + str(round(1 / sizes[k])):>9}" for k in shown))
    for name in FORMATS:
        cells = "".join(f"{saved['by size'][name][k]:>9.3f}" for k in shown)
        lines.append(f"  {name:<6}{cells}")
    lines.append(
        "the shipped model's 28 projections: mean error; the others when one weight is 20x"
    )
    for row in saved["real"]:
        lines.append(
            f"  {row['scheme']:<19} {row['bits']:>6.3f} bits   {row['error']:.4f}   "
            f"{row['with one spike']:.4f}"
        )
    spread = saved["histogram"]
    lines.append(
        f"{spread['within a tenth']:.0%} of the weights are below a tenth of their tensor's "
        f"largest, {spread['above half']:.2%} above half of it"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Code points of number formats.")
    parser.add_argument("--dump", choices=FORMATS, help="print all non-negative values and stop")
    parser.add_argument("--out", type=Path, default=Path("my-studies"))
    arguments = parser.parse_args(argv)
    if arguments.dump:
        for code, value in enumerate(grid(arguments.dump)):
            print(f"{code:3d}  {value:.10g}")
        return
    real, histogram = real_weights()
    saved = common.rounded(
        {"formats": facts(), "by size": error_by_size(), "real": real, "histogram": histogram}
    )
    common.write(saved, arguments.out, "code-points.json")
    print(table(saved))


if __name__ == "__main__":
    main()
