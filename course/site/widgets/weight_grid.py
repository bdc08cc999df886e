"""Weights that snap to the codes of a format, and what the model writes in each format.

Promises: the weights are the shipped model's; the browser's arithmetic is `snapped`, the lab's;
every text is one that the shipped model wrote with its layers in that format.
Mirrors `vllm/_custom_ops.py:2059` `scaled_int8_quant`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from course.site.widgets import code_points
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Linear

NEEDS = ("decide", "code-points")

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
    return list(code_points.FORMATS[name]["points"])


def snapped(weights: np.ndarray, name: str, shared: str, group: int = GROUP) -> np.ndarray:
    """`weights` (float64 [rows, columns]) as the codes of a format can say them, absmax scales."""
    known = points(name)
    parts = {
        "tensor": weights.reshape(1, -1), "channel": weights, "group": weights.reshape(-1, group),
    }[shared]  # fmt: skip
    scale = np.abs(parts).max(axis=1, keepdims=True) / known[-1]
    scale[scale == 0] = 1.0
    back = np.take(known, code_points.round_to_points(np.abs(parts) / scale, known)) * scale
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


def document() -> dict[str, Any]:
    """The widget's document."""
    weights = piece()
    spiked = weights.copy()
    spiked[3, 0] = MOST

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
    return {
        "weights": weights.tolist(), "points": {name: points(name) for name in FORMATS},
        "shared": SHARED, "group": GROUP, "group_of_text": GROUP_OF_TEXT, "most": MOST,
        "prompt": PROMPT, "texts": texts(), "questions": questions,
    }  # fmt: skip
