"""What the shipped model does with a text: its bytes, where each head looks, and what may follow.

Promises: the weights are those of the queries and cached keys that the engine's own attention was
handed, and the logits are the engine's own row; `look` is what a page calls, as the book does.
Mirrors `vllm/model_executor/models/llama.py:124` `LlamaAttention`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from course.site.play_pins import RUNTIME_BYTES
from mini_vllm import LLMEngine, Request, SamplingParams
from mini_vllm.attention import paged_attention
from mini_vllm.batch import ForwardBatch
from mini_vllm.parts import EngineParts
from mini_vllm.sampler import probabilities

MOST_BYTES = 48
RECORDED = ("A cache keeps what", "for i in range(n")
"""Texts whose answers the page holds."""

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def weights_of(
    query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
) -> np.ndarray:
    """How much of each earlier value goes into a position's result, of a batch of one request.

    Args:
        query: [n, num_heads, head_dim]; the others as `paged_attention`'s.

    Returns:
        [num_heads, n, n], dtype of `query`; each row sums to 1, nothing is above the diagonal.
    """
    length, num_heads, head_dim = query.shape
    keys = layer_cache[0, batch.block_tables[0]].reshape(-1, layer_cache.shape[3], head_dim)
    keys = np.repeat(keys[:length], num_heads // keys.shape[1], axis=1)
    scores = np.einsum("qhd,khd->hqk", query, keys) * scale
    scores[:, np.triu(np.ones((length, length), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    summed: np.ndarray = weights / weights.sum(axis=2, keepdims=True)
    return summed


class Watched:
    """An engine whose attention is watched, and its last row of logits."""

    def __init__(self) -> None:
        self.maps: list[np.ndarray] = []
        self.row = np.empty(0)

        def attend(
            query: np.ndarray, layer_cache: np.ndarray, batch: ForwardBatch, scale: float
        ) -> np.ndarray:
            self.maps.append(weights_of(query, layer_cache, batch, scale))
            return paged_attention(query, layer_cache, batch, scale)

        def keep(request: Request, row: np.ndarray) -> np.ndarray:
            self.row = row.copy()
            return row

        self.engine = LLMEngine(
            dtype="float64", enable_prefix_caching=False, parts=EngineParts(attention=attend)
        )
        self.engine.row_sampler.logits_processors = [keep]

    def read(self, data: bytes) -> None:
        """One step over a whole text: a map per layer, and the row behind its last byte."""
        self.maps.clear()
        self.engine.generate([list(data)], SamplingParams(max_tokens=1, ignore_eos=True))


_watched = functools.cache(Watched)


def look(text: str) -> dict[str, Any]:
    """What the page draws of a text.

    Args:
        text: 1 to `MOST_BYTES` bytes in UTF-8.

    Returns:
        `bytes`; `maps`: per layer and head the rows below the diagonal, one after the other, each
        weight in thousandths as two digits in base 36; `logits`: [257] to three decimals.

    Raises:
        ValueError: no text, or too long a one.
    """
    if not isinstance(text, str) or not 1 <= len(data := text.encode()) <= MOST_BYTES:
        size = len(text.encode()) if isinstance(text, str) else type(text).__name__
        raise ValueError(f"text: {size} bytes; need 1 to {MOST_BYTES}")
    watched = _watched()
    watched.read(data)
    return {
        "bytes": list(data),
        "maps": [[_packed(head) for head in layer] for layer in watched.maps],
        "logits": [round(float(logit), 3) for logit in watched.row],
    }


def _packed(weights: np.ndarray) -> str:
    rows = np.rint(1000 * weights[np.tril_indices(len(weights))]).astype(int)
    return "".join(DIGITS[n // 36] + DIGITS[n % 36] for n in rows)


def kept(logits: list[float], temperature: float, top_p: float) -> list[float]:
    """The law [257] of the next byte under the two sliders; temperature 0 takes the likeliest."""
    if temperature == 0:
        return [float(token == int(np.argmax(logits))) for token in range(len(logits))]
    params = SamplingParams(temperature=temperature, top_p=top_p)
    return [float(share) for share in probabilities(np.array(logits), params)]


QUESTIONS: tuple[tuple[str, str, float, float, str], ...] = (
    ("18 bytes, and no position looks ahead. How many squares of a head's map may be filled?",
     "squares", 1.0, 1.0,
     "Row i has i + 1 of them: 1 + 2 + ... + 18."),
    ("Temperature 1, top-p 0.9. How many of the 257 tokens are left for the next byte?",
     "left", 1.0, 0.9,
     "Two have less than 0.9 of the mass together, so a third is kept."),
    ("The same top-p at temperature 2. How many?", "left", 2.0, 0.9,
     "Heat flattens the law: more tokens are needed for 0.9."),
    ("Temperature 0.5, top-p 0.9. How many?", "left", 0.5, 0.9,
     "Cold sharpens it: the likeliest alone has more than 0.9."),
)  # fmt: skip
"""What is asked of the first text, what answers, temperature and top-p."""


def document() -> dict[str, Any]:
    """The widget's document."""
    texts = {text: look(text) for text in RECORDED}
    first = texts[RECORDED[0]]
    length = len(first["bytes"])
    questions = []
    for ask, kind, temperature, top_p, because in QUESTIONS:
        left = sum(share > 0 for share in kept(first["logits"], temperature, top_p))
        answer = length * (length + 1) // 2 if kind == "squares" else left
        knobs = {"temperature": temperature, "top_p": top_p}
        questions.append({"ask": ask, "answer": answer, "because": because, **knobs})
    return {
        "texts": texts, "most": MOST_BYTES, "questions": questions, "bytes": RUNTIME_BYTES,
    }  # fmt: skip
