"""Lab 06-01: int8 weights with one scale per output channel, and the linear layer that uses them.

`check_matrix` is given. The recipe (largest magnitude over 127, round to even, clip, multiply back)
is that of `vllm/model_executor/layers/quantization/online/int8.py:56`
`Int8OnlineMoEMethod._quantize_weights`; the arrays are those that
`vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_int8.py:39`
`CompressedTensorsW8A8Int8.create_weights` allocates.
"""

from __future__ import annotations

import numpy as np

QMAX = 127
"""Largest code. -128 is left unused, so that the grid is the same on both sides of zero."""


def check_matrix(W: np.ndarray) -> np.ndarray:
    """`W` as a float32 array; the caller's array is never changed.

    Raises:
        ValueError: `W` is not [out_features, in_features], is empty, or holds NaN or infinity.
    """
    W = np.asarray(W)
    if W.ndim != 2 or W.size == 0:
        raise ValueError(f"W has shape {W.shape}: need [out_features, in_features], not empty")
    with np.errstate(over="ignore"):
        W = W.astype(np.float32)
    if not np.isfinite(W).all():
        raise ValueError("W holds NaN or infinity (as float32): no scale can represent that")
    return W


def quantize_per_channel(W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and one scale per output channel (row).

    Args:
        W: [out_features, in_features], any float dtype; never changed.

    Returns:
        `(q, scales)`: int8 [out_features, in_features] with codes -127..127, and float32
        [out_features], `max|W[o]| / 127`. Where that is 0 in float32 (a row of zeros, or one so
        small that the division underflows), the scale is 1.0.

    Raises:
        ValueError: as `check_matrix`.
    """
    W = check_matrix(W)
    scales = np.abs(W).max(axis=1) / np.float32(QMAX)
    scales[scales == 0] = 1.0
    return quantize_with_scale(W, scales), scales


def quantize_per_tensor(W: np.ndarray) -> tuple[np.ndarray, float]:
    """Codes and a single scale for the whole matrix: `max|W| / 127`, or 1.0 where that is 0.

    Returns:
        `(q, scale)`: int8 [out_features, in_features] and a Python float with a float32's value.

    Raises:
        ValueError: as `check_matrix`.
    """
    W = check_matrix(W)
    scale = float(np.abs(W).max() / np.float32(QMAX)) or 1.0
    return quantize_with_scale(W, scale), scale


def quantize_with_scale(W: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Codes under a scale that somebody else chose: a checkpoint, a calibration run.

    Args:
        W: [out_features, in_features].
        scale: one positive number, or [out_features].

    Returns:
        int8 [out_features, in_features]: the code from -127 to 127 that is nearest to `W / scale`,
        ties to even; whatever lies beyond has the last code of its side.

    Raises:
        ValueError: as `check_matrix`; a scale that is not positive and finite, or whose shape is
            neither () nor [out_features].
    """
    W = check_matrix(W)
    scale = np.asarray(scale, dtype=np.float32)
    if scale.shape not in ((), (len(W),)):
        raise ValueError(f"scale has shape {scale.shape}: need () or ({len(W)},)")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise ValueError("scale must be positive and finite: codes are W / scale")
    if scale.ndim:
        scale = scale[:, None]  # [out_features, 1]
    return np.clip(np.rint(W / scale), -QMAX, QMAX).astype(np.int8)


def dequantize(q: np.ndarray, scales: np.ndarray | float) -> np.ndarray:
    """The weights that the codes stand for.

    Args:
        q: int8 [out_features, in_features].
        scales: [out_features], or one number.

    Returns:
        float32 [out_features, in_features]: `q[o] * scales[o]`.
    """
    scales = np.asarray(scales, dtype=np.float32)
    if scales.ndim:
        scales = scales[:, None]  # [out_features, 1]
    return q.astype(np.float32) * scales


def quant_linear(x: np.ndarray, q: np.ndarray, scales: np.ndarray | float) -> np.ndarray:
    """`x @ W.T` with the weights that the codes stand for.

    Args:
        x: [..., in_features], float32 or float64; the result keeps the dtype.
        q: int8 [out_features, in_features].
        scales: [out_features], or one number.

    Returns:
        [..., out_features].
    """
    return x @ dequantize(q, scales).T


def memory_bytes(W: np.ndarray) -> int:
    """Bytes of the array as it is."""
    return W.nbytes


def memory_bytes_quant(q: np.ndarray, scales: np.ndarray | float) -> int:
    """Bytes of codes and scales together; a scale takes 4 bytes, also when it is a Python float."""
    return q.nbytes + 4 * np.size(scales)


class Linear:
    """The engine's linear layer, with weights kept as int8: `course run --mine` uses it.

    Called as the engine calls its own, `Linear(weight, bias, name)(x)`, with a name such as
    "model.layers.0.mlp.down_proj". It keeps `q` and `scales` and drops the weight it was given.
    """

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> None:
        """Args: weight [out_features, in_features]; bias [out_features] or None; name: unused."""
        self.q, self.scales = quantize_per_channel(weight)
        self.bias = bias

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        y = quant_linear(x, self.q, self.scales)
        return y if self.bias is None else y + self.bias
