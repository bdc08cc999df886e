"""Lab 04: int8 weights and activations with one scale each, and SmoothQuant.

Work in float64. No input may be changed. `_check_features` is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def quantize_per_tensor(X: np.ndarray) -> tuple[np.ndarray, float]:
    """int8 codes and one scale: scale = max|X| / 127, codes rint(X / scale) in [-127, 127].

    Args:
        X: any shape.

    Returns:
        (q int8 of X's shape, scale). Where the scale would be 0 it is 1.0, and all codes are 0.

    Source: static and dynamic int8 activations, `vllm/_custom_ops.py:2059` `scaled_int8_quant`.
    """
    X = np.asarray(X, dtype=np.float64)
    scale = float(np.abs(X).max(initial=0.0)) / 127
    if scale == 0.0:
        scale = 1.0
    return np.clip(np.rint(X / scale), -127, 127).astype(np.int8), scale


def fake_quant(X: np.ndarray) -> np.ndarray:
    """X as its int8 codes can say it: float64, X's shape, codes times scale."""
    q, scale = quantize_per_tensor(X)
    return q * scale  # int8 times a Python float is float64


def w8a8_matmul(X: np.ndarray, W: np.ndarray) -> np.ndarray:
    """X @ W.T with both sides in int8, one scale per tensor.

    Args:
        X: [tokens, in_features] activations.
        W: [out_features, in_features] weights.

    Returns:
        float64 [tokens, out_features].

    Raises:
        ValueError: in_features differ.

    Source: `vllm/_custom_ops.py:764` `cutlass_scaled_mm`, which multiplies the codes and applies
    both scales to the sum. Here the scales come first; the result is the same to rounding.
    """
    _check_features(X, W)
    return fake_quant(X) @ fake_quant(W).T


def smooth(
    X: np.ndarray, W: np.ndarray, alpha: float = 0.5
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move the size of loud input channels from X into W; X_s @ W_s.T is X @ W.T.

    Channel j of X is divided by s[j] and channel j of W multiplied by it, with
    s[j] = max|X[:, j]| ** alpha / max|W[:, j]| ** (1 - alpha). A channel whose maximum is 0 on
    either side has s[j] = 1.

    Args:
        X: [tokens, in_features] activations, or calibration samples of them.
        W: [out_features, in_features].
        alpha: share of the difficulty that goes to W, 0 to 1.

    Returns:
        (X_s like X, W_s like W, s [in_features]), float64, none of them shared with the inputs.

    Raises:
        ValueError: in_features differ; alpha outside [0, 1].

    Source: Xiao et al., arXiv 2211.10438, equation 4.
    """
    _check_features(X, W)
    X, W = np.asarray(X, dtype=np.float64), np.asarray(W, dtype=np.float64)
    s = _smoothing_factors(np.abs(X).max(axis=0), np.abs(W).max(axis=0), alpha)
    return X / s, W * s, s


def fold_into_norm(
    X: np.ndarray, gain: np.ndarray, weights: Sequence[np.ndarray], alpha: float = 0.5
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Smooth every projection behind one norm, with the division stored in the norm's gain.

    q, k and v read the same X, and X can be divided only once. So they share one s, made from the
    loudest of their weights in each channel.

    Args:
        X: [tokens, in_features] what the norm puts out, its gain applied: calibration samples.
        gain: [in_features] the norm's weight: it puts out normalized(h) * gain.
        weights: the projections that read X, each [out_features_i, in_features].
        alpha: as in `smooth`.

    Returns:
        (gain / s, [W * s for each W], s), float64.

    Raises:
        ValueError: as in `smooth`, for any of the weights.
    """
    for W in weights:
        _check_features(X, W)
    loudest = np.abs(np.concatenate(weights)).max(axis=0)  # [in_features]
    s = _smoothing_factors(np.abs(X).max(axis=0), loudest, alpha)
    return np.asarray(gain, dtype=np.float64) / s, [np.asarray(W) * s for W in weights], s


def _smoothing_factors(x_max: np.ndarray, w_max: np.ndarray, alpha: float) -> np.ndarray:
    """s [in_features] from the channel maxima of both sides."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha={alpha}: need a number from 0 to 1")
    x_max, w_max = x_max.astype(np.float64), w_max.astype(np.float64)
    s = np.ones(len(x_max))
    alive = (x_max > 0) & (w_max > 0)
    s[alive] = x_max[alive] ** alpha / w_max[alive] ** (1 - alpha)
    return s


def _check_features(X: np.ndarray, W: np.ndarray) -> None:
    """Both must be matrices over the same input features."""
    if np.ndim(X) != 2 or np.ndim(W) != 2 or np.shape(X)[1] != np.shape(W)[1]:
        raise ValueError(
            f"X has shape {np.shape(X)}, W {np.shape(W)}: need [tokens, in_features] and "
            "[out_features, in_features] with equal in_features"
        )
