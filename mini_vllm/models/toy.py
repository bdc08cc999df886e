"""A scripted stand-in for a language model, for work on scheduling alone.

Promises: row i of the logits depends on nothing but the seed, the last token and its position, and
is bit-identical alone or in a batch. It never reads the KV cache, so it proves nothing about one;
the real model is in `transformer.py`.
"""

from __future__ import annotations

import numpy as np

from mini_vllm.batch import ForwardBatch

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class ToyModel:
    """Deterministic logits from a mix of (seed, token, position, vocabulary index)."""

    def __init__(self, vocab_size: int = 257, seed: int = 0) -> None:
        """Prepare the vocabulary's mixing keys.

        Raises:
            ValueError: `vocab_size` below 1.
        """
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size}: need at least 1")
        self._keys = _mix(
            np.arange(vocab_size, dtype=np.uint64) + _mix(np.array([seed], np.uint64))
        )

    def logits(self, last_tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float64 logits in [-1, 1) of shape [batch, vocab_size].

        Args:
            last_tokens: token ids, shape [batch].
            positions: index of each of those tokens in its sequence, shape [batch].
        """
        tokens = np.asarray(last_tokens, dtype=np.uint64)
        where = np.asarray(positions, dtype=np.uint64)
        rows = _mix(tokens * np.uint64(65537) + _mix(where))  # [batch]
        bits = _mix(rows[:, None] ^ self._keys[None, :])  # [batch, vocab_size]
        return (bits >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """The model protocol: one row of logits per entry of `batch.logits_indices`."""
        rows = batch.logits_indices
        return self.logits(batch.token_ids[rows], batch.positions[rows])


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values elementwise; the finaliser of splitmix64 (Steele et al., 2014)."""
    values = (values + _MULTIPLIER).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
