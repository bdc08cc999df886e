"""Lab 02-04: paged decode attention as Triton kernels, and the arithmetic that says how fast.

Part A needs numpy only: the recurrence the kernels run, how they split the keys, the bytes they
move. Part B is the same attention in torch, block by block. Parts C and D are the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

try:
    import triton
    import triton.language as tl
except ImportError:  # part A works without
    triton = tl = None

if TYPE_CHECKING:
    import torch

TILE = 64
"""Keys a program of version two takes per turn of its loop: four blocks of 16, or two of 32."""
ROWS = 16
"""Query heads in a tile, the used ones and padding: the fewest rows `tl.dot` takes."""
PROGRAMS_PER_SM = 16
"""Programs wanted per streaming multiprocessor: a few at a time, several rounds."""
MIN_KEYS, MAX_KEYS = 128, 1024
"""Fewest and most keys of one split."""
LOG2_E = 1.4426950408889634


def kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit`; where Triton is missing, the plain function, which nobody can launch."""
    return function if triton is None else triton.jit(function)


# --- Part A: the recurrence, the splits, the bytes ------------------------------------------------


class Partial(NamedTuple):
    """Attention over some of the keys, in a form that more keys can be added to."""

    largest: float
    """Largest score so far; -inf before the first."""
    total: float
    """Sum of exp(score - largest)."""
    weighted: np.ndarray
    """Sum of exp(score - largest) * value: [head_dim]."""


def nothing_seen(head_dim: int) -> Partial:
    """Before the first key."""
    return Partial(-math.inf, 0.0, np.zeros(head_dim))


def absorb(partial: Partial, scores: np.ndarray, values: np.ndarray) -> Partial:
    """Add a tile of keys. Never looks at earlier tiles again, and changes no argument.

    A trace: nothing seen, then scores 0 and ln 2 with values 3 and 6: largest ln 2, total 1.5,
    weighted 7.5. Then score 3 ln 2 with value 1: total 1.375, weighted 2.875.

    Args:
        partial: what has been seen so far.
        scores: [n] scaled scores of the tile's keys, n >= 1.
        values: [n, head_dim].

    Source: Milakov and Gimelshein, arXiv 1805.02867, with the values carried along as in
    FlashAttention, arXiv 2205.14135.
    """
    raise NotImplementedError


def merge(partials: Sequence[Partial]) -> np.ndarray:
    """The output over all keys of several partials, which saw different keys: [head_dim].

    A partial that saw no key adds nothing. At least one has seen one. Their largest scores may be
    any distance apart.

    Source: `vllm/v1/attention/ops/triton_decode_attention.py:549` `_fwd_kernel_stage2`.
    """
    raise NotImplementedError


def split_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, tile: int, keys_per_split: int
) -> np.ndarray:
    """What version two computes for one query head: splits, tiles in a split, one merge.

    Split i owns keys i * keys_per_split up to the next split's first, starts from nothing, and
    computes nothing from another split's keys: they run side by side.

    Args:
        q: [head_dim].
        keys: [seq_len, head_dim]; values the same. seq_len >= 1.
        tile: keys per turn.
        keys_per_split: keys per split; the last split may have fewer.

    Returns:
        [head_dim], with scores scaled by head_dim ** -0.5.
    """
    raise NotImplementedError


class Splits(NamedTuple):
    """How version two cuts the keys of every request."""

    keys_per_split: int
    num_splits: int
    """Of the longest request; shorter ones leave some of them empty."""


def plan_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, num_sms: int) -> Splits:
    """Enough programs to fill the GPU, none too short to be worth merging.

    Without splits there is one program per request and KV head. Splitting each request into w
    makes w times as many; w is the smallest whole number that gives PROGRAMS_PER_SM for each SM.
    Keys per split are then ceil(max_seq_len / w), rounded up to whole tiles, not below MIN_KEYS
    and not above MAX_KEYS. Only numbers the host knows are used: asking the GPU for the sum of
    the lengths would make the host wait for it.
    """
    raise NotImplementedError


class Traffic(NamedTuple):
    """Bytes between memory and chip for one layer's decode attention."""

    kv: int
    """K and V of every position, read once per KV head."""
    tables: int
    """Block ids in use, int32; the KV heads' programs share one reading."""
    queries: int
    """Queries read and outputs written."""
    partials: int
    """Results of splits, written by one kernel and read by the next."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def decode_traffic(
    seq_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
    block_size: int,
    keys_per_split: int,
) -> Traffic:
    """Bytes version two must move, everything counted once.

    A request of n tokens has ceil(n / keys_per_split) splits in use. Each leaves, per query head,
    head_dim + 1 fp32 numbers, written once and read once. When the longest request needs one
    split only, the kernel writes the output itself and there are no partials at all.
    """
    raise NotImplementedError


def decode_flops(seq_lens: Sequence[int], num_heads: int, head_dim: int) -> int:
    """Multiplications and additions of both products: q with each key, weights with each value."""
    raise NotImplementedError


def least_microseconds(num_bytes: float, flops: float, bandwidth: float, peak: float) -> float:
    """A roofline: the slower of moving and computing.

    Args:
        num_bytes, flops: of the work.
        bandwidth: bytes per second.
        peak: FLOP per second.
    """
    raise NotImplementedError


# --- Part B: torch, block by block ----------------------------------------------------------------


def paged_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_len: int,
) -> torch.Tensor:
    """One request, in a Python loop over its blocks: the debugger of the kernels. Any device.

    Args:
        q: [num_heads, head_dim].
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides; v_cache the same.
        block_table: int32 [at least ceil(seq_len / block_size)]. Entries beyond those mean
            nothing.
        seq_len: positions to attend to, at least 1.

    Returns:
        [num_heads, head_dim], dtype of `q`. Everything between is float32.
    """
    raise NotImplementedError


# --- Part C: one program per head and request -----------------------------------------------------


@kernel
def one_head_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    scale,
    q_seq,
    q_head,
    kv_block,
    kv_slot,
    kv_head,
    table_seq,
    out_seq,
    out_head,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Program (head, request): one query head walks the blocks of its request, one at a time.

    `scale` has log2(e) multiplied in, so weights are exp2. Arguments named like `q_seq` are
    strides in numbers: element (s, h, d) of q is at q_ptr + s * q_seq + h * q_head + d. K and V
    share their strides. GROUP query heads share a KV head.
    """
    raise NotImplementedError


def paged_attention_v1(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Launch `one_head_kernel` (given).

    Args:
        query: [num_seqs, num_heads, head_dim], head_dim a power of two.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim]; v_cache of the same shape and
            strides.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], each at least 1.

    Returns:
        [num_seqs, num_heads, head_dim], dtype of `query`.
    """
    import torch

    _check(query, k_cache, v_cache)
    out = torch.empty_like(query)
    num_seqs, num_heads, head_dim = query.shape
    one_head_kernel[(num_heads, num_seqs)](
        out,
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        head_dim**-0.5 * LOG2_E,
        query.stride(0),
        query.stride(1),
        *k_cache.stride()[:3],
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=num_heads // k_cache.shape[2],
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim,
    )
    return out


# --- Part D: split keys, grouped heads ------------------------------------------------------------


@kernel
def split_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    seq_lens_ptr,
    scale,
    q_seq,
    q_head,
    kv_block,
    kv_slot,
    kv_head,
    table_seq,
    out_seq,
    out_head,
    num_splits,
    keys_per_split,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (KV head, split, request): all query heads of a group over one split's keys.

    A tile of TILE keys spans several blocks, so its block ids are a vector, one per key. The
    group's queries are the first GROUP of ROWS rows; the other rows are 0 and never stored. Both
    products are `tl.dot` with `input_precision="ieee"`, the weights cast to V's dtype for the
    second. UPCAST: cast Q, K and V to float32 first (for float32 caches, and for bfloat16 in the
    interpreter, whose `tl.dot` cannot take it).

    A split that begins at or beyond the request's end returns at once. With one split the output
    is written; with more, `weighted / total` goes to row (request, head, split) of partial_ptr,
    [num_seqs, num_heads, num_splits, HEAD_DIM] fp32, and `largest + log2(total)` to that of
    lse_ptr, [num_seqs, num_heads, num_splits] fp32.
    """
    raise NotImplementedError


@kernel
def merge_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    out_seq,
    out_head,
    num_splits,
    keys_per_split,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (head, request): weigh the splits in use by 2 ** lse, CHUNK at a time.

    A split's result is already divided by its own total, so its share of the whole is
    2 ** lse over the sum of 2 ** lse. Rows of splits beyond ceil(seq_len / keys_per_split) were
    never written: they hold anything.
    """
    raise NotImplementedError


def paged_attention_v2(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    keys_per_split: int | None = None,
    tile: int = TILE,
    num_warps: int = 4,
    num_stages: int = 3,
) -> torch.Tensor:
    """Launch `split_kernel`, and `merge_kernel` where there is more than one split (given).

    Args:
        query, k_cache, v_cache, block_tables, seq_lens: as `paged_attention_v1`.
        max_seq_len: at least the largest of `seq_lens`; a Python number, so that nothing waits.
        keys_per_split: default is that of `plan_splits`.
        tile, num_warps, num_stages: keys per turn and how the compiler lays a program out.

    Returns:
        [num_seqs, num_heads, head_dim], dtype of `query`.
    """
    import torch

    _check(query, k_cache, v_cache)
    num_seqs, num_heads, head_dim = query.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    if keys_per_split is None:
        plan = plan_splits(num_seqs, num_kv_heads, max_seq_len, count_sms(query.device))
        keys_per_split = plan.keys_per_split
    num_splits = -(-max_seq_len // keys_per_split)
    out = torch.empty_like(query)
    shape = (num_seqs, num_heads, num_splits)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    interpreted_bf16 = query.dtype is torch.bfloat16 and not query.is_cuda
    split_kernel[(num_kv_heads, num_splits, num_seqs)](
        out,
        partial,
        lse,
        query,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        head_dim**-0.5 * LOG2_E,
        query.stride(0),
        query.stride(1),
        *k_cache.stride()[:3],
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        num_splits,
        keys_per_split,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TILE=tile,
        ROWS=ROWS,
        UPCAST=query.dtype is torch.float32 or interpreted_bf16,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        merge_kernel[(num_heads, num_seqs)](
            out,
            partial,
            lse,
            seq_lens,
            out.stride(0),
            out.stride(1),
            num_splits,
            keys_per_split,
            HEAD_DIM=head_dim,
            CHUNK=16,
        )
    return out


def count_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; elsewhere 132, an H100's, to plan for (given)."""
    import torch

    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Refuse what the kernels would read wrongly."""
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError("k_cache and v_cache must agree in shape and strides")
    if k_cache.stride(3) != 1 or query.stride(2) != 1:
        raise ValueError("the numbers of one head must lie side by side: last stride 1")
    num_heads, num_kv_heads = query.shape[1], k_cache.shape[2]
    if num_heads % num_kv_heads or num_heads // num_kv_heads > ROWS:
        raise ValueError(
            f"{num_heads} query heads on {num_kv_heads} KV heads: need equal groups of at most "
            f"{ROWS}"
        )
