"""What the studies share: the shipped model run on a text, with any linear layer, and its loss.

Promises: every number comes from `mini_vllm`'s own transformer; nothing is timed. Mirrors nothing
upstream.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.models.loader import Checkpoint, load_checkpoint
from mini_vllm.models.transformer import Linear, Transformer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


TEXTS = ("prose", "code", "german", "numbers", "scripts")
LAYERS = (
    "lm_head",
    *(f"{i}.{name}" for i in range(4) for name in ("qkv", "o", "gate_up", "down")),
)
"""The shipped model's linear layers, in the order in which the transformer builds them."""


@functools.cache
def checkpoint() -> Checkpoint:
    """The shipped model."""
    return load_checkpoint("byte-llama")


def text_of(name: str) -> list[int]:
    """The bytes of one of the texts beside this file, as token ids."""
    return list((HERE / "texts" / f"{name}.txt").read_bytes())


def model_of(
    linear: Callable[..., Any] = Linear, weights: dict[str, np.ndarray] | None = None
) -> Transformer:
    """The shipped model in float64, with another linear layer or other weights if given."""
    shipped = checkpoint()
    return Transformer(shipped.config, weights or shipped.weights, "float64", linear=linear)


def logits_of(model: Transformer, tokens: list[int]) -> np.ndarray:
    """One forward pass over all tokens: float64 [num_tokens, vocab_size], a row per position."""
    count, (layers, heads, dim) = len(tokens), model.kv_shape
    blocks = -(-count // 16)
    positions = np.arange(count)
    batch = ForwardBatch(
        token_ids=np.array(tokens),
        positions=positions,
        slot_mapping=positions,
        query_start_loc=np.array([0, count]),
        seq_lens=np.array([count]),
        block_tables=np.arange(blocks)[None, :],
        logits_indices=positions,
        kv_cache=np.zeros((layers, 2, blocks, 16, heads, dim)),
    )
    return model.forward(batch)


def bits_per_byte(logits: np.ndarray, tokens: list[int]) -> float:
    """Mean of -log2 p(next byte) over all bytes but the first."""
    log_p = log_probabilities(logits[:-1])
    return float(-log_p[np.arange(len(log_p)), tokens[1:]].mean())


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """log2 of softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))) / np.log(2)


def divergence(exact: np.ndarray, got: np.ndarray) -> float:
    """Mean over positions of KL(exact || got) in bits: what `got` loses where `exact` is true.

    Never below 0, so it does not let luck on one text pass for quality.
    """
    log_p, log_q = log_probabilities(exact), log_probabilities(got)
    return float((np.exp2(log_p) * (log_p - log_q)).sum(axis=-1).mean())


class Listener:
    """A linear factory that keeps the inputs of every layer it makes."""

    def __init__(self) -> None:
        self.layers: list[_Listening] = []

    def __call__(self, weight: np.ndarray, bias: np.ndarray | None, name: str) -> _Listening:
        self.layers.append(_Listening(weight, bias, name))
        return self.layers[-1]

    def inputs(self) -> dict[str, np.ndarray]:
        """Layer name to its inputs [num_tokens, in_features]; forgets them."""
        found = {n: np.concatenate(x.seen) for n, x in zip(LAYERS, self.layers, strict=True)}
        for layer in self.layers:
            layer.seen.clear()
        return found


class _Listening(Linear):
    def __init__(self, weight: np.ndarray, bias: np.ndarray | None, name: str) -> None:
        super().__init__(weight, bias, name)
        self.seen: list[np.ndarray] = []

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.seen.append(x.copy())
        return super().__call__(x)


def relative(got: np.ndarray, exact: np.ndarray) -> float:
    """Norm of the error over the norm of what is exact; 0 where both are 0."""
    size = float(np.linalg.norm(exact))
    return float(np.linalg.norm(got - exact)) / size if size else 0.0


def rounded(value: Any) -> Any:
    """Floats to six significant digits, everything else as it is."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(saved: dict[str, Any], out: Path, name: str) -> None:
    """Save a result as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


def measured(name: str) -> dict[str, Any]:
    """A result that is committed."""
    return json.loads((HERE / "measured" / name).read_text(encoding="utf-8"))
