"""Lab 04-01: attention through a block table that never holds more than one block of scores.

`dense_attention` is the definition, `softmax_step` adds one block of keys to a running softmax, and
`paged_online_attention` walks the block table with it. One query, one head, float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class State(NamedTuple):
    """A softmax over the keys seen so far, not yet divided by its denominator."""

    m: float
    """Largest score seen; -inf before the first."""
    denom: float
    """Sum of exp(score - m)."""
    acc: np.ndarray
    """[d_v], sum of exp(score - m) * value."""


def empty_state(d_v: int) -> State:
    """Before the first key (given)."""
    return State(-math.inf, 0.0, np.zeros(d_v))


def dense_attention(q: np.ndarray, K: np.ndarray, V: np.ndarray) -> np.ndarray:
    """softmax(K q / sqrt(d)) V with all scores at once: the definition to compare with.

    Args:
        q: [d].
        K: [n, d], n >= 1.
        V: [n, d_v].

    Returns:
        [d_v], finite for finite scores of any size; no argument is changed.
    """
    raise NotImplementedError


def softmax_step(state: State, scores: np.ndarray, values: np.ndarray) -> State:
    """The state over the keys of `state` and one more block: what one pass over both would leave.

    A trace: scores 0 and ln 2 with values 1 and 2 leave m = ln 2, denom = 1.5, acc = 2.5; after
    scores ln 4 and ln 8 with values 3 and 4 it is ln 8, 1.875, 6.125.

    Args:
        state: of the keys before.
        scores: [n] scaled scores of the block, n >= 1.
        values: [n, d_v].

    Returns:
        A new state; no argument is changed.

    Source: `vllm/v1/attention/ops/triton_attention_helpers.py:361` `softmax_step`.
    """
    raise NotImplementedError


def paged_online_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: Sequence[int],
    seq_len: int,
) -> np.ndarray:
    """One query over a paged cache, block after block; no input is changed.

    Reads each block of the sequence once, K and V together, and keeps a `State` between blocks:
    memory does not grow with `seq_len`. Rows beyond the sequence and table entries beyond its
    last block are never used.

    Args:
        q: [d].
        k_cache: [num_blocks, block_size, d].
        v_cache: [num_blocks, block_size, d_v].
        block_table: physical block ids, first positions first; may be longer than needed.
        seq_len: keys to attend to.

    Returns:
        [d_v].

    Raises:
        ValueError: `seq_len` below 1, or more than the table's blocks hold.

    Source: `vllm/v1/attention/ops/triton_unified_attention.py:179` `kernel_unified_attention`.
    """
    raise NotImplementedError
