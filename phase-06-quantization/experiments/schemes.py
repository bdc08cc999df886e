"""Ways to store a linear layer: each makes a layer from a weight, and says how many bytes it takes.

A scheme maps (weight, what is known of its inputs) to a `Stored`: codes that decode to a matrix, a
rule for activations or none, and bytes. The int8 and int4 quantizers are those of labs 06-01 and
06-03; the rest is here. What a GPU does in 8 or 4 bits is simulated: codes are multiplied back and
the product runs in floating point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from course.files import load_module

PHASE = Path(__file__).resolve().parents[1]
ROOT = PHASE.parent


INT8: ModuleType = load_module(PHASE / "labs" / "lab-01-fake-quant-linear" / "solution.py")
INT4: ModuleType = load_module(PHASE / "labs" / "lab-03-int4-groups-and-packing" / "solution.py")
E4M3_MAX = 448.0

Activation = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What calibration knows of a layer's inputs [num_tokens, in_features]."""

    sample: np.ndarray
    """Some rows of them, float32 [num_rows, in_features]."""
    foldable: bool
    """Whether a factor per input channel can be folded into what comes before: a norm's gain."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantized layer as the experiments see it."""

    decode: Callable[[], np.ndarray]
    """From the codes to the matrix they stand for, float32 [out_features, in_features]."""
    weight_bytes: int
    """Codes, scales and zero-points, as a checkpoint would hold them."""
    scale_bytes: int
    """Of these, scales and zero-points."""
    activation: Activation | None = None
    """What happens to the inputs before the product."""
    call: Activation | None = None
    """A layer of its own that does all of this; then `decode` and `activation` are not used."""


Scheme = Callable[[np.ndarray, Inputs], Stored]


class Layer:
    """A stored layer as the engine calls it: decodes its codes at every call, then multiplies."""

    def __init__(self, stored: Stored, *, cached: bool = False) -> None:
        """`cached` decodes once: the same numbers, without the time and without the saving."""
        self.stored = stored
        self.matrix = stored.decode() if cached and stored.call is None else None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        if self.stored.call is not None:
            return self.stored.call(x)
        weight = self.stored.decode() if self.matrix is None else self.matrix
        if self.stored.activation is not None:
            x = self.stored.activation(x)
        y: np.ndarray = x @ weight.T
        return y


# ------------------------------------------------------------------ weight-only


def unquantized(weight: np.ndarray, inputs: Inputs) -> Stored:
    """As shipped: two bytes per weight."""
    return Stored(lambda: weight, 2 * weight.size, 0)


def int8_tensor(weight: np.ndarray, inputs: Inputs) -> Stored:
    """Lab 06-01, one scale for the matrix."""
    q, scale = INT8.quantize_per_tensor(weight)
    return Stored(lambda: INT8.dequantize(q, scale), INT8.memory_bytes_quant(q, scale), 4)


def int8_channel(weight: np.ndarray, inputs: Inputs) -> Stored:
    """Lab 06-01, one scale per output channel."""
    q, scales = INT8.quantize_per_channel(weight)
    total = INT8.memory_bytes_quant(q, scales)
    return Stored(lambda: INT8.dequantize(q, scales), total, 4 * scales.size)


def int4_groups(group_size: int) -> Scheme:
    """Lab 06-03: 15 codes, a float16 scale per group."""

    def scheme(weight: np.ndarray, inputs: Inputs) -> Stored:
        q, scales = INT4.quantize_grouped(weight, group_size)
        return int4_stored(q, scales, group_size)

    return scheme


def int4_stored(q: np.ndarray, scales: np.ndarray, group_size: int) -> Stored:
    """Codes -7..7 and float16 scales, packed two codes to a byte."""
    packed = INT4.pack_int4(q)

    def decode() -> np.ndarray:
        back: np.ndarray = INT4.dequantize_grouped(INT4.unpack_int4(packed), scales, group_size)
        return back

    return Stored(decode, INT4.memory_bytes_grouped(packed, scales), scales.nbytes)


def uint4b8(weight: np.ndarray, group_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Upstream's symmetric rule: 16 codes with a bias of 8, the scale that needs no clipping.

    Mirrors `vllm/model_executor/layers/quantization/utils/quant_utils.py:556` `quantize_weights`;
    equal to its recordings, bit for bit (`conformance/features/quantization/test_quantization.py`).

    Returns:
        `(codes, scales, zeros)`: int32 0..15 [out, in], float32 [out, num_groups], and 8s of the
        scales' shape.
    """
    groups = weight.reshape(len(weight), -1, group_size)
    high, low = groups.max(axis=2, keepdims=True), groups.min(axis=2, keepdims=True)
    scales = np.maximum(np.abs(high / np.float32(7)), np.abs(low / np.float32(-8)))
    codes = np.clip(np.rint(groups / scales).astype(np.int32), -8, 7) + 8
    flat = scales[:, :, 0]
    return codes.reshape(weight.shape), flat, np.full(flat.shape, 8)


def uint4_zero_points(
    weight: np.ndarray, group_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Upstream's rule with a zero-point per group: 16 codes between minimum and maximum.

    Mirrors `vllm/model_executor/layers/quantization/utils/quant_utils.py:556` `quantize_weights`.

    Returns:
        `(codes, scales, zeros)`: int32 0..15 [out, in], float32 and int32 [out, num_groups].
    """
    groups = weight.reshape(len(weight), -1, group_size)
    high, low = groups.max(axis=2, keepdims=True), groups.min(axis=2, keepdims=True)
    scales = np.maximum(high - low, np.float32(1e-5)) / np.float32(15)
    zeros = np.clip(np.rint(np.abs(low / scales)), 0, 15).astype(np.int32)
    codes = np.clip(np.rint(groups / scales).astype(np.int32) + zeros, 0, 15)
    return codes.reshape(weight.shape), scales[:, :, 0], zeros[:, :, 0]


def int4_of(
    rule: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray, np.ndarray]],
    group_size: int,
    bits_per_zero: int,
) -> Scheme:
    """A layer by one of the rules above; scales are kept as float16."""

    def scheme(weight: np.ndarray, inputs: Inputs) -> Stored:
        codes, scales, zeros = rule(weight, group_size)
        packed = INT4.pack_int4(codes - 8)
        scales = scales.astype(np.float16)

        def decode() -> np.ndarray:
            unpacked = INT4.unpack_int4(packed).reshape(len(weight), -1, group_size)
            steps = scales.astype(np.float32)[:, :, None]
            back = (unpacked + (8 - zeros[:, :, None])).astype(np.float32) * steps
            return back.reshape(weight.shape)

        overhead = scales.nbytes + scales.size * bits_per_zero // 8
        return Stored(decode, packed.nbytes + overhead, overhead)

    return scheme


# ------------------------------------------------------------------ FP8


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest E4M3 number, ties to even, float32; beyond ±448 the largest one.

    1 sign, 4 exponent and 3 mantissa bits: normal numbers from 2^-6, below that steps of 2^-9.
    """
    x = np.asarray(x, dtype=np.float32)
    _, exponent = np.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3)
    return np.clip(np.rint(x / step) * step, -E4M3_MAX, E4M3_MAX).astype(np.float32)


def e4m3_table() -> np.ndarray:
    """The value of each byte, float32 [256]: 127 from zero up, NaN, and their negatives."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp((8 + mantissa).astype(np.float32), exponent - 10)
    positive = np.where(exponent == 0, np.ldexp(mantissa.astype(np.float32), -9), normal)
    half = np.append(positive, np.float32(np.nan)).astype(np.float32)
    return np.concatenate([half, -half])


E4M3 = e4m3_table()


def e4m3_bytes(x: np.ndarray) -> np.ndarray:
    """The nearest E4M3 numbers as bytes, uint8."""
    nearest = to_e4m3(x)
    code = np.searchsorted(E4M3[:127], np.abs(nearest)).astype(np.uint8)
    return code | (np.signbit(nearest).astype(np.uint8) << 7)


def fp8_weight(weight: np.ndarray) -> Stored:
    """One float32 scale per tensor, as the online FP8 of the pinned tree keeps it."""
    scale = np.abs(weight).max() / np.float32(E4M3_MAX)
    codes = e4m3_bytes(weight / scale)
    return Stored(lambda: E4M3[codes] * scale, codes.nbytes + 4, 4)


def fp8_weight_only(weight: np.ndarray, inputs: Inputs) -> Stored:
    """FP8 weights, activations as they are: what a GPU without FP8 products runs."""
    return fp8_weight(weight)


def fp8_w8a8(weight: np.ndarray, inputs: Inputs) -> Stored:
    """FP8 weights per tensor and FP8 activations with a scale per token, chosen at run time."""
    stored = fp8_weight(weight)
    return Stored(stored.decode, stored.weight_bytes, stored.scale_bytes, fp8_per_token)


def fp8_per_token(x: np.ndarray) -> np.ndarray:
    """Each row through E4M3 with its own scale."""
    scale = np.abs(x).max(axis=1, keepdims=True).astype(np.float32) / np.float32(E4M3_MAX)
    scale[scale == 0] = 1
    return to_e4m3(x / scale) * scale


# ------------------------------------------------------------------ int8 activations (lab 06-04)


def int8_per_token(x: np.ndarray) -> np.ndarray:
    """Each row through int8 with its own scale, chosen at run time."""
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    scale[scale == 0] = 1
    return np.rint(x / scale) * scale


def int8_static(largest: float) -> Activation:
    """All rows through int8 with one scale, chosen by calibration; what exceeds it is clipped."""
    scale = largest / 127

    def activation(x: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(x / x.dtype.type(scale)), -127, 127) * x.dtype.type(scale)

    return activation


def w8a8_static(weight: np.ndarray, inputs: Inputs) -> Stored:
    """One scale for the weight, one for the activations."""
    stored = int8_tensor(weight, inputs)
    activation = int8_static(float(np.abs(inputs.sample).max()))
    return Stored(stored.decode, stored.weight_bytes + 4, stored.scale_bytes + 4, activation)


def w8a8_dynamic(weight: np.ndarray, inputs: Inputs) -> Stored:
    """A scale per output channel and per token."""
    stored = int8_channel(weight, inputs)
    return Stored(stored.decode, stored.weight_bytes, stored.scale_bytes, int8_per_token)


def smoothed(scheme: Scheme, alpha: float = 0.5) -> Scheme:
    """`scheme` after a factor per input channel has moved from the activations to the weight.

    `s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)`; X is divided by s, W multiplied. Only where s can
    be folded into a norm; elsewhere `scheme` alone. Lab 06-04 teaches it.
    """

    def made(weight: np.ndarray, inputs: Inputs) -> Stored:
        if not inputs.foldable:
            return scheme(weight, inputs)
        loud, heavy = np.abs(inputs.sample).max(axis=0), np.abs(weight).max(axis=0)
        alive = (loud > 0) & (heavy > 0)
        s = np.ones_like(loud)
        s[alive] = loud[alive] ** alpha / heavy[alive] ** (1 - alpha)
        stored = scheme(weight * s, Inputs(inputs.sample / s, inputs.foldable))
        activation = stored.activation
        assert activation is not None

        def smooth(x: np.ndarray) -> np.ndarray:
            return activation(x / s.astype(x.dtype))

        return Stored(stored.decode, stored.weight_bytes, stored.scale_bytes, smooth)

    return made
