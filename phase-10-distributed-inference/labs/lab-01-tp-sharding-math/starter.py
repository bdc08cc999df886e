"""Lab 10-01: a layer cut in pieces, one for each rank, and the one sum that puts it together.

A weight is W [out, in], and y = x W^T. Cut between its rows, every rank needs all of x and has a
part of y: a column-parallel layer. Cut between its columns, every rank needs its part of x and has
an addend of all of y: a row-parallel one. What holds throughout:

- T1: the ranks' shards are the weight: nothing is lost, and only KV heads are held more than once.
- T2: a rank multiplies with its own shard and with nothing else.
- T3: what a rank holds is its own memory, so that the whole weight can be forgotten.
- T4: a column-parallel layer followed by a row-parallel one costs one all-reduce and no gather.
- T5: nobody's array is changed.

Sources: `vllm/model_executor/layers/linear.py:410` `ColumnParallelLinear`,
`vllm/model_executor/layers/linear.py:975` `QKVParallelLinear`,
`vllm/model_executor/layers/linear.py:1392` `RowParallelLinear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Comm:
    """The wires between the ranks (given). It is handed what each rank has, in rank order."""

    def __init__(self) -> None:
        self.all_reduces = 0
        self.all_gathers = 0

    def all_reduce(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Every rank receives the sum of all parts, which have one shape."""
        self.all_reduces += 1
        return np.sum(parts, axis=0)

    def all_gather(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Every rank receives all parts side by side, along the last axis."""
        self.all_gathers += 1
        return np.concatenate(parts, axis=-1)


def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0), element by element (given)."""
    return np.maximum(x, 0)


def silu(x: np.ndarray) -> np.ndarray:
    """x sigmoid(x), element by element (given)."""
    return x / (1 + np.exp(-x))


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention over whole heads (given).

    Args:
        q: [n, heads, head_dim].
        k, v: [n, kv_heads, head_dim]; query head h reads KV head h // (heads // kv_heads).

    Returns:
        [n, heads * head_dim], heads side by side.
    """
    n, heads, head_dim = q.shape
    k, v = (np.repeat(each, heads // k.shape[1], axis=1) for each in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * head_dim)


def divide(size: int, world: int, what: str) -> int:
    """size / world, which must be whole; a ValueError otherwise (given)."""
    if size % world:
        raise ValueError(f"{what}: {size} is not divisible by {world} ranks")
    return size // world


def check_rank(rank: int, world: int) -> None:
    """A ValueError for what is no rank (given)."""
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank={rank}, world={world}: need 0 <= rank < world")


def shard_columns(weight: np.ndarray, rank: int, world: int) -> np.ndarray:
    """What a rank holds of a column-parallel weight: its share of the outputs (T1, T3).

    A trace: [[1, 2], [3, 4], [5, 6], [7, 8]], rank 1 of 2: [[5, 6], [7, 8]].

    Args:
        weight: [out, in], or a bias [out].

    Returns:
        [out / world, in], or [out / world]: an array of its own, the outputs in their order.

    Raises:
        ValueError: out is not divisible by world, or there is no such rank.
    """
    raise NotImplementedError


def shard_rows(weight: np.ndarray, rank: int, world: int) -> np.ndarray:
    """What a rank holds of a row-parallel weight: its share of the inputs (T1, T3).

    A trace: [[1, 2, 3, 4], [5, 6, 7, 8]], rank 1 of 2: [[3, 4], [7, 8]]. The last axis of an
    activation x [n, in] is cut in the same way.

    Args:
        weight: [out, in].

    Returns:
        [out, in / world]: an array of its own.

    Raises:
        ValueError: in is not divisible by world, or there is no such rank.
    """
    raise NotImplementedError


def shard_merged(weight: np.ndarray, sizes: Sequence[int], rank: int, world: int) -> np.ndarray:
    """What a rank holds of several column-parallel weights stored as one, as gate and up are.

    A trace: rows g0 g1 g2 g3 u0 u1 u2 u3 of sizes [4, 4], rank 0 of 2: g0 g1 u0 u1.

    Args:
        weight: [sum(sizes), in].
        sizes: rows of each of them, from the top.

    Returns:
        [sum(sizes) / world, in]: the rank's share of each, in the same order.

    Raises:
        ValueError: a size is not divisible by world, or they do not add up to the rows.
    """
    raise NotImplementedError


def shard_qkv(
    weight: np.ndarray, num_heads: int, num_kv_heads: int, rank: int, world: int
) -> np.ndarray:
    """What a rank holds of q, k and v stored as one: whole heads (T1).

    With fewer KV heads than ranks a rank holds one KV head, and neighbouring ranks the same.

    A trace: heads q0 q1 q2 q3 k0 k1 v0 v1. Two ranks: rank 0 has q0 q1 k0 v0. Four: rank 1 has
    q1 k0 v0, and rank 2 q2 k1 v1.

    Args:
        weight: [(num_heads + 2 num_kv_heads) head_dim, in].

    Returns:
        The rank's heads of q, of k and of v, one below the other.

    Raises:
        ValueError: num_heads is not divisible by world; or neither of num_kv_heads and world by the
            other; or the rows are not that many heads; or there is no such rank.
    """
    raise NotImplementedError


def column_parallel(
    x: np.ndarray, W: np.ndarray, num_ranks: int, comm: Comm | None = None
) -> np.ndarray:
    """A column-parallel layer on its own: y = x W^T, put together at its end (T2).

    A trace: x [[1, 2, 3, 4]], W [[1, 0, 2, 0], [0, 1, 0, 1], [1, 1, 1, 1], [2, 0, 0, -1]], two
    ranks: [7, 6] and [10, -2] give [[7, 6, 10, -2]].

    Args:
        x: [n, in], which every rank has.
        W: [out, in].
        comm: the wires; new ones unless given.

    Returns:
        [n, out].

    Raises:
        ValueError: num_ranks below 1, or out is not divisible by it.
    """
    raise NotImplementedError


def row_parallel(
    x: np.ndarray,
    W: np.ndarray,
    num_ranks: int,
    bias: np.ndarray | None = None,
    comm: Comm | None = None,
) -> np.ndarray:
    """A row-parallel layer on its own: y = x W^T + bias (T2).

    A trace: x and W as in `column_parallel`, two ranks: [1, 2, 3, 2] and [6, 4, 7, -4] add up to
    [[7, 6, 10, -2]].

    Args:
        x: [n, in], of which every rank uses its part.
        W: [out, in].
        bias: [out].

    Returns:
        [n, out].

    Raises:
        ValueError: num_ranks below 1, or in is not divisible by it.
    """
    raise NotImplementedError


def mlp_tp(
    x: np.ndarray, W1: np.ndarray, W2: np.ndarray, num_ranks: int, comm: Comm | None = None
) -> tuple[np.ndarray, int]:
    """A whole MLP, relu(x W1^T) W2^T, over ranks (T2, T4).

    A trace: x [[1, 2, 3, 4]], W1 [[1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, -1], [1, 1, -1, 0]],
    W2 [[1, 2, 3, 4], [0, 1, 0, 1]], two ranks: [1, 0] and [0, 0] add up to [[1, 0]].

    Args:
        x: [n, in].
        W1: [hidden, in].
        W2: [out, hidden].

    Returns:
        [n, out], and how many all-reduces it took; with one rank the same number, of one part each.

    Raises:
        ValueError: num_ranks below 1, or hidden is not divisible by it.
    """
    raise NotImplementedError


def swiglu_tp(
    x: np.ndarray, gate_up: np.ndarray, down: np.ndarray, num_ranks: int, comm: Comm | None = None
) -> np.ndarray:
    """The MLP of a Llama: (silu(x gate^T) * (x up^T)) down^T, gate and up as one weight (T2, T4).

    Args:
        x: [n, in].
        gate_up: [2 hidden, in], gate above up.
        down: [out, hidden].

    Returns:
        [n, out].

    Raises:
        ValueError: as `mlp_tp`.
    """
    raise NotImplementedError


def attention_tp(
    x: np.ndarray,
    Wqkv: np.ndarray,
    Wo: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    num_ranks: int,
    comm: Comm | None = None,
) -> np.ndarray:
    """A whole attention layer, by heads (T2, T4).

    Args:
        x: [n, in], one sequence.
        Wqkv: [(num_heads + 2 num_kv_heads) head_dim, in].
        Wo: [out, num_heads head_dim].

    Returns:
        [n, out].

    Raises:
        ValueError: as `shard_qkv`.
    """
    raise NotImplementedError
