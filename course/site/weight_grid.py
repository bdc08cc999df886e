"""Weights that snap to the codes of a format, SmoothQuant's alpha, and what each format writes.

Promises: the weights are the shipped model's; the browser's arithmetic is `snapped` and `smoothed`,
which are the labs'; every text is one that the shipped model wrote with its layers in that format.
Mirrors `vllm/_custom_ops.py:2059` `scaled_int8_quant`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Linear

FORMATS = ("int8", "int4", "E4M3")
SHARED = {"tensor": "the whole matrix", "channel": "a row", "group": "a group"}
"""Who shares a scale."""

ROWS, COLUMNS, GROUP = 4, 16, 4
"""The piece of a matrix that is shown, and its groups."""
GROUP_OF_TEXT = 32
"""Group of the texts: a whole row of the model is 256 or 768 long."""
MOST = 0.6

PROMPT = "The server reads the request and "
NUM_TOKENS = 64


def points(name: str) -> list[float]:
    """The values of a format that are not negative."""
    from course.site.widgets import FORMATS as KNOWN

    return list(KNOWN[name]["points"])


def snapped(weights: np.ndarray, name: str, shared: str, group: int = GROUP) -> np.ndarray:
    """`weights` (float64 [rows, columns]) as the codes of a format can say them, absmax scales."""
    from course.site.widgets import round_to_points

    known = points(name)
    parts = {
        "tensor": weights.reshape(1, -1), "channel": weights, "group": weights.reshape(-1, group),
    }[shared]  # fmt: skip
    scale = np.abs(parts).max(axis=1, keepdims=True) / known[-1]
    scale[scale == 0] = 1.0
    back = np.take(known, round_to_points(np.abs(parts) / scale, known)) * scale
    return (np.sign(parts) * back).reshape(weights.shape)


def piece() -> np.ndarray:
    """Four rows of the last layer's gate, from loud to quiet, rounded to three digits."""
    gate = load_checkpoint("byte-llama").weights["model.layers.3.mlp.gate_proj.weight"]
    part = gate[:, :COLUMNS].astype(np.float64)
    loud = np.argsort(-np.abs(part).max(axis=1))
    wanted = [next(row for row in loud if np.abs(part[row]).max() < top) for top in _LOUDNESS]
    return np.round(part[wanted], 3)


_LOUDNESS = (0.5, 0.3, 0.15, 0.06)


@functools.cache
def texts() -> dict[str, Any]:
    """What the shipped model writes after `PROMPT`, by "format shared", and "as shipped"."""
    found = {"as shipped": _written(None)}
    for name in FORMATS:
        for shared in SHARED:
            found[f"{name} {shared}"] = _written((name, shared))
    return found


def _written(scheme: tuple[str, str] | None) -> str:
    def linear(weight: np.ndarray, bias: np.ndarray | None, name: str) -> Linear:
        if scheme is None or "lm_head" in name:
            return Linear(weight, bias, name)
        return Linear(snapped(weight, *scheme, group=GROUP_OF_TEXT), bias, name)

    engine = LLMEngine(dtype="float64", parts=EngineParts(linear=linear))
    (result,) = engine.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    return result.outputs[0].text


# ------------------------------------------------------------------ SmoothQuant


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


def smooth_alpha() -> dict[str, Any]:
    """The document of the second widget, with examples of `smoothed`."""
    X, W = layer()
    examples, plain = [], {}
    for loud in (1, 20, 80):
        spiked = X.copy()
        spiked[:, LOUD] *= loud
        plain[str(loud)] = quiet_error(spiked, W)
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
            examples.append({"loud": loud, "alpha": alpha, **smoothed(spiked, W, alpha)})
    at = {e["alpha"]: e["error"] for e in examples if e["loud"] == 80}
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
        "questions": questions, "examples": examples,
    }  # fmt: skip


# ------------------------------------------------------------------ the document


def weight_grid() -> dict[str, Any]:
    """The widget's document, with examples of `snapped`."""
    weights = piece()
    spiked = weights.copy()
    spiked[3, 0] = MOST
    examples = [
        {"weights": W.tolist(), "format": name, "shared": shared,
         "back": snapped(W, name, shared).tolist()}
        for W in (weights, spiked) for name in FORMATS for shared in SHARED
    ]  # fmt: skip

    def zeros(W: np.ndarray, name: str, shared: str) -> int:
        return int((snapped(W, name, shared)[3] == 0).sum())

    asked = (
        ("int4, one scale for the matrix. How many of the last row's 16 weights become 0?",
         weights, "int4", "tensor", "The loudest weight of the matrix sets the step for all."),
        ("The same with a scale per row?", weights, "int4", "channel",
         "The row's own loudest weight sets its step."),
        (f"The last row's first weight becomes {MOST}, a scale per row. How many of the 16 are 0?",
         spiked, "int4", "channel", "One loud neighbour takes the codes of all that share it."),
        ("The same weight in E4M3. How many?", spiked, "E4M3", "channel",
         "A floating-point grid is fine near 0."),
    )  # fmt: skip
    questions = []
    for ask, W, name, shared, because in asked:
        answer = zeros(W, name, shared)
        choices = sorted({answer, 0, 4, 15, 16})
        questions.append({"ask": ask, "weights": W.tolist(), "format": name, "shared": shared,
                          "answer": answer, "choices": choices, "because": because})  # fmt: skip
    from course.site.widgets import FORMATS as KNOWN

    return {
        "weights": weights.tolist(), "points": {name: KNOWN[name]["points"] for name in FORMATS},
        "shared": SHARED, "group": GROUP, "group_of_text": GROUP_OF_TEXT, "most": MOST,
        "prompt": PROMPT, "texts": texts(), "questions": questions, "examples": examples,
    }  # fmt: skip
