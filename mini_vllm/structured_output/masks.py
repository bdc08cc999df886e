"""Rows of bits: one per token, 32 to a word, as xgrammar and the real engine pack them.

Promises: token t is bit t % 32 of word t // 32, 1 is allowed, a word of -1 allows all its tokens. A
state's row is worked out once and kept with the state; a row that is handed out is not changed.
Mirrors `vllm/v1/structured_output/utils.py:44` `apply_grammar_bitmask`.
"""

from __future__ import annotations

import numpy as np

from mini_vllm.structured_output.machine import Machine, State
from mini_vllm.structured_output.vocabulary import Vocabulary

FULL = -1
"""A word whose 32 tokens are all allowed."""


def num_words(vocab_size: int) -> int:
    """Words of a row."""
    return -(-vocab_size // 32)


def allocate_bitmask(num_rows: int, vocab_size: int) -> np.ndarray:
    """[num_rows, words] int32, everything allowed."""
    return np.full((num_rows, num_words(vocab_size)), FULL, np.int32)


def pack(allowed: int, vocab_size: int) -> np.ndarray:
    """[words] int32 of a number whose bit t stands for token t.

    Of 40 tokens with 0, 31, 32 and 39 allowed it is [-2147483647, 129].
    """
    words = num_words(vocab_size)
    row = np.frombuffer(allowed.to_bytes(4 * words, "little"), np.dtype("<i4"))
    return row.astype(np.int32)


def unpack(row: np.ndarray, vocab_size: int) -> np.ndarray:
    """[vocab_size] bool of a row [words]."""
    bits = np.unpackbits(row.astype("<i4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)


def row_of(machine: Machine, state: State, vocabulary: Vocabulary) -> np.ndarray:
    """[words] int32: the tokens that may follow; read-only, kept with the state."""
    found = state.kept.get(vocabulary)
    if found is None:
        found = pack(vocabulary.allowed(machine, state), vocabulary.size)
        found.flags.writeable = False
        state.kept[vocabulary] = found
    return found


def forbidden(machine: Machine, state: State, vocabulary: Vocabulary) -> np.ndarray:
    """[vocab_size] bool: the tokens that may not follow; read-only, kept with the state."""
    key = vocabulary, "forbidden"
    found = state.kept.get(key)
    if found is None:
        found = ~unpack(row_of(machine, state, vocabulary), vocabulary.size)
        found.flags.writeable = False
        state.kept[key] = found
    return found


def apply_row(logits: np.ndarray, row: np.ndarray) -> np.ndarray:
    """A new row [vocab_size] of logits, those of forbidden tokens -inf; see `pack` for `row`."""
    return np.where(unpack(row, len(logits)), logits, -np.inf).astype(logits.dtype)
