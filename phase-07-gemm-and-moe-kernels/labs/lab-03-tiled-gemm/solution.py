"""Lab 07-03: a GEMM in tiles whose traffic is counted, and a grouped one as a kernel.

`tiled_gemm`, `naive_traffic`, `tiled_traffic`, `reuse_factor` and `fast_memory_bytes` need numpy;
`grouped_kernel` is a Triton kernel: all experts of a layer in one launch. `SlowMatrix` and
`grouped_gemm`, which launches the kernel, are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

try:
    import triton
    import triton.language as tl
except ImportError:  # the arithmetic works without
    triton = tl = None

if TYPE_CHECKING:
    import torch


class SlowMatrix:
    """A matrix in slow memory: it is read through `load`, and every element read is counted."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self.shape = values.shape
        self.loaded = 0
        """Elements read so far."""
        self.largest = 0
        """Elements of the largest read."""

    def load(self, rows: slice, columns: slice) -> np.ndarray:
        """A copy of a rectangle. A slice that reaches over the edge is refused, not cut."""
        for part, size in ((rows, self.shape[0]), (columns, self.shape[1])):
            if not 0 <= part.start <= part.stop <= size:
                raise IndexError(f"rows {rows}, columns {columns} of a matrix {self.shape}")
        found = self._values[rows, columns].copy()
        self.loaded += found.size
        self.largest = max(self.largest, found.size)
        return found


def tiled_gemm(a: SlowMatrix, b: SlowMatrix, tile_m: int, tile_n: int, tile_k: int) -> np.ndarray:
    """The product of two matrices in slow memory, one output tile after the other.

    Reads no rectangle larger than tile_m x tile_k of `a` and tile_k x tile_n of `b`, and reads each
    of them once for an output tile. Sizes need not be multiples of the tiles.

    Args:
        a: [m, k].
        b: [k, n].

    Returns:
        [m, n], in the dtype the product of two elements has.

    Raises:
        ValueError: inner sizes differ, or a tile below 1.
    """
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ValueError(f"a is {a.shape}, b is {b.shape}: the inner sizes must agree")
    if min(tile_m, tile_n, tile_k) < 1:
        raise ValueError(f"tiles {tile_m}, {tile_n}, {tile_k}: need at least 1")
    out = None
    for i in range(0, m, tile_m):
        rows = slice(i, min(i + tile_m, m))
        for j in range(0, n, tile_n):
            columns = slice(j, min(j + tile_n, n))
            total = None
            for p in range(0, k, tile_k):
                inner = slice(p, min(p + tile_k, k))
                product = a.load(rows, inner) @ b.load(inner, columns)
                total = product if total is None else total + product
            if out is None:
                out = np.empty((m, n), dtype=total.dtype)
            out[rows, columns] = total
    return out


def naive_traffic(m: int, n: int, k: int) -> int:
    """Elements read when each of the m x n x k products fetches both of its factors."""
    return 2 * m * n * k


def tiled_traffic(m: int, n: int, k: int, tile_m: int, tile_n: int) -> int:
    """Elements `tiled_gemm` reads, stores not counted; exact, for any sizes.

    A trace: 37 x 23 x 19 (m, n, k) in tiles of 8 x 8 are 4,294 elements, and 1,024 cubed in tiles
    of 128 x 128 are 16,777,216.
    """
    return m * k * math.ceil(n / tile_n) + k * n * math.ceil(m / tile_m)


def reuse_factor(m: int, n: int, k: int, tile_m: int, tile_n: int) -> float:
    """How often an element is used for each time it is read: naive over tiled traffic."""
    return naive_traffic(m, n, k) / tiled_traffic(m, n, k, tile_m, tile_n)


def fast_memory_bytes(tile_m: int, tile_n: int, tile_k: int, element_bytes: int) -> int:
    """Bytes a tile needs close by: its two input tiles, and sums of 4 bytes for its outputs.

    A trace: 128 x 128 x 32 of 2-byte elements is 81,920.
    """
    return (tile_m * tile_k + tile_k * tile_n) * element_bytes + tile_m * tile_n * 4


# --- all experts in one launch --------------------------------------------------------------------


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`; where Triton is missing, the plain function, which nobody can launch."""
    return function if triton is None else triton.jit(function)


@kernel
def grouped_kernel(
    x_ptr, w_ptr, out_ptr, sorted_ids_ptr, expert_ids_ptr, weights_ptr, num_padded_ptr,
    num_pairs, N, K, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (block of pairs, tile of columns): the pairs of one expert times its matrix.

    Pair p is a row of the result; its input is row p // TOP_K of x. Entry i of `sorted_ids` is the
    pair of row i, and `num_pairs` is padding; blocks of BLOCK_M entries belong to one expert, which
    `expert_ids` names. Blocks from entry `num_padded` on do nothing. K need not be a multiple of
    BLOCK_K, nor N of BLOCK_N. Sums are float32; with WEIGHTED a row is multiplied by its pair's
    entry of `weights` before it is rounded to the result's dtype.

    x [num_tokens, K], w [num_experts, N, K], out [num_pairs, N]: all contiguous, places in an
    expert's matrix counted in 64 bits.

    Source: `vllm/model_executor/layers/fused_moe/fused_moe.py:295` `fused_moe_kernel`.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    if block * BLOCK_M < tl.load(num_padded_ptr):
        pairs = tl.load(sorted_ids_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        expert = tl.load(expert_ids_ptr + block).to(tl.int64)
        real = pairs < num_pairs
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        x_rows = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * K
        w_rows = w_ptr + expert * N * K + columns[None, :].to(tl.int64) * K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            places = start + inner
            x = tl.load(
                x_rows + places[None, :],
                mask=tl.where(real[:, None], places[None, :], K) < K, other=0.0,
            )  # fmt: skip
            w = tl.load(
                w_rows + places[:, None],
                mask=tl.where(columns[None, :] < N, places[:, None], K) < K, other=0.0,
            )  # fmt: skip
            total = tl.dot(x, w, total, input_precision="ieee")
        if WEIGHTED:
            total = total * tl.load(weights_ptr + pairs, mask=real, other=0.0)[:, None]
        tl.store(
            out_ptr + pairs.to(tl.int64)[:, None] * N + columns[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=tl.where(real[:, None], columns[None, :], N) < N,
        )


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_padded: torch.Tensor,
    top_k: int,
    num_pairs: int,
    weights: torch.Tensor | None = None,
    blocks: tuple[int, int, int] = (16, 64, 64),
) -> torch.Tensor:
    """Launch `grouped_kernel`; `weights` [num_pairs] float32, or None. Returns [num_pairs, N]."""
    import torch

    n, k = w.shape[1:]
    out = torch.empty((num_pairs, n), dtype=x.dtype, device=x.device)
    block_m, block_n, block_k = blocks
    grid = (triton.cdiv(len(sorted_ids), block_m), triton.cdiv(n, block_n))
    grouped_kernel[grid](
        x, w, out, sorted_ids, expert_ids, x if weights is None else weights, num_padded,
        num_pairs, n, k, TOP_K=top_k, WEIGHTED=weights is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return out
