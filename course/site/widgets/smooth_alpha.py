"""SmoothQuant's alpha: what moves from activations to weights, and what is left of the error.

Promises: the browser's arithmetic is `smoothed`, which is the lab's. Mirrors
`vllm/_custom_ops.py:2059` `scaled_int8_quant`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NEEDS = ("decide",)


def _int8(values: np.ndarray) -> np.ndarray:
    scale = float(np.abs(values).max()) / 127 or 1.0
    back: np.ndarray = np.clip(np.rint(values / scale), -127, 127) * scale
    return back


def quiet_error(X: np.ndarray, W: np.ndarray) -> float:
    """Relative error of what the channels but `LOUD` add to X @ W.T, both sides in int8."""
    quiet = [channel for channel in range(X.shape[1]) if channel not in LOUD]
    exact = X[:, quiet] @ W[:, quiet].T
    got = _int8(X)[:, quiet] @ _int8(W)[:, quiet].T
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def smoothed(X: np.ndarray, W: np.ndarray, alpha: float) -> dict[str, Any]:
    """Channel maxima after smoothing, and the error with one scale per tensor.

    Args:
        X: float64 [tokens, channels]; W: float64 [out, channels]; no channel of either is all 0.
    """
    s = np.abs(X).max(axis=0) ** alpha / np.abs(W).max(axis=0) ** (1 - alpha)
    X_s, W_s = X / s, W * s
    return {
        "x": np.abs(X_s).max(axis=0).tolist(), "w": np.abs(W_s).max(axis=0).tolist(),
        "error": quiet_error(X_s, W_s),
    }  # fmt: skip


LOUD = (3, 9)
"""Channels of the widget's X that the reader makes louder."""


def layer() -> tuple[np.ndarray, np.ndarray]:
    """X [24, 12] and W [24, 12] of unit normal numbers, as in lab 06-04, rounded to two digits."""
    rng = np.random.default_rng(4)
    return rng.standard_normal((24, 12)).round(2), rng.standard_normal((24, 12)).round(2)


def louder(X: np.ndarray, loud: float) -> np.ndarray:
    """X [tokens, channels] with the channels `LOUD` that many times as large."""
    spiked = X.copy()
    spiked[:, LOUD] *= loud
    return spiked


def document() -> dict[str, Any]:
    """The widget's document."""
    X, W = layer()
    spiked = {loud: louder(X, loud) for loud in (1, 20, 80)}
    plain = {str(loud): quiet_error(each, W) for loud, each in spiked.items()}
    at = {alpha: smoothed(spiked[80], W, alpha)["error"] for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)}
    best = min(at, key=lambda alpha: at[alpha])
    gain = f"{plain['80'] / at[0.5]:.0f} times"
    questions = [
        {"ask": "Two channels of X are 80 times louder. How much smaller is the others' error at "
         "alpha 0.5 than without smoothing?", "loud": 80, "alpha": 0.5, "answer": gain,
         "choices": sorted({"2 times", gain, "80 times"}, key=lambda c: int(c.split()[0])),
         "because": "The square root of the loudness is left on either side."},
        {"ask": "Of 0, 0.5 and 1, which alpha is best here?", "loud": 80, "alpha": best,
         "answer": f"{best:g}", "choices": ["0", "0.5", "1"],
         "because": "At 0 X has all the trouble, at 1 W."},
    ]  # fmt: skip
    return {
        "X": X.tolist(), "W": W.tolist(), "loud": list(LOUD), "plain": plain,
        "questions": questions,
    }  # fmt: skip
