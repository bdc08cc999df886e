"""Given: flash decoding in Triton. A split leaves a `Partial` in memory, a second kernel merges.

The partial is that of lab 04-04, with one difference: `m` is in base 2, since the kernel computes
2 ** (score * log2(e)). An empty split stores the identity's m and denom, and nothing else.
Mirrors the 3D launch of `vllm/v1/attention/ops/triton_unified_attention.py:179`
`kernel_unified_attention` and `vllm/v1/attention/ops/triton_unified_attention.py:646`
`reduce_segments`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

TILE = 64
"""Keys per turn of the loop."""
ROWS = 16
"""Query heads in a tile, real ones and padding: the fewest rows `tl.dot` takes."""
LOG2_E = 1.4426950408889634


@triton.jit
def split_kernel(
    out_ptr, m_ptr, denom_ptr, acc_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, seq_lens_ptr,
    scale, q_seq, q_head, kv_block, kv_slot, kv_head, table_seq, num_splits,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, UPCAST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (KV head, split, request): the heads of a group over one split's tiles."""
    group, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    per_split = tl.cdiv(tl.cdiv(seq_len, TILE), num_splits) * TILE
    first = split * per_split
    last = tl.minimum(first + per_split, seq_len)
    rows, dims, keys = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, TILE)
    heads = group * GROUP + rows
    mine = rows < GROUP
    q_places = seq * q_seq + heads[:, None] * q_head + dims[None, :]
    q = tl.load(q_ptr + q_places, mask=mine[:, None], other=0.0)  # [ROWS, HEAD_DIM]
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    denom = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for start in range(first, last, TILE):
        positions = start + keys
        valid = positions < last
        entries = tables_ptr + seq * table_seq + positions // BLOCK_SIZE
        blocks = tl.load(entries, mask=valid, other=0).to(tl.int64)  # [TILE]
        places = blocks * kv_block + (positions % BLOCK_SIZE) * kv_slot + group * kv_head
        k = tl.load(k_ptr + places[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
        v = tl.load(v_ptr + places[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TILE]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        corr = tl.exp2(m - new_m)
        p = tl.exp2(scores - new_m[:, None])
        denom = denom * corr + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * corr[:, None], input_precision="ieee")
        m = new_m
    row = seq * tl.num_programs(0) * GROUP + heads
    if SPLIT:
        part = row * num_splits + split
        tl.store(m_ptr + part, m, mask=mine)
        tl.store(denom_ptr + part, denom, mask=mine)
        # A comparison, not `mine & (first < last)`: newer interpreters refuse a mask made by `&`.
        live = rows < tl.where(first < last, GROUP, 0)
        tl.store(acc_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=live[:, None])
    else:
        out = (acc / denom[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], out, mask=mine[:, None])


@triton.jit
def merge_kernel(
    out_ptr, m_ptr, denom_ptr, acc_ptr, num_splits, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Program (head, request): all partials of a row to the common maximum, one sum, one division.

    WIDTH is `num_splits` rounded up to a power of two.
    """
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    splits, dims = tl.arange(0, WIDTH), tl.arange(0, HEAD_DIM)
    part = row * num_splits + splits
    m = tl.load(m_ptr + part, mask=splits < num_splits, other=float("-inf"))
    denom = tl.load(denom_ptr + part, mask=splits < num_splits, other=0.0)
    used = m > float("-inf")
    acc = tl.load(
        acc_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=used[:, None], other=0.0
    )  # [WIDTH, HEAD_DIM]
    scale = tl.where(used, tl.exp2(m - tl.max(m, 0)), 0.0)
    total = tl.sum(denom * scale, 0)
    out = tl.sum(acc * scale[:, None], 0) / total
    tl.store(out_ptr + row * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty))


class Result(NamedTuple):
    """What `flash_decoding` leaves behind."""

    out: torch.Tensor
    """[num_seqs, num_heads, head_dim], dtype of the query."""
    m: torch.Tensor
    """fp32 [num_seqs, num_heads, num_splits], base 2; unwritten with one split."""
    denom: torch.Tensor
    """fp32, shape of `m`."""
    acc: torch.Tensor
    """fp32 [num_seqs, num_heads, num_splits, head_dim]; unwritten where m is -inf."""


def flash_decoding(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    num_splits: int,
) -> Result:
    """Paged decode attention of one step with the keys of each request in `num_splits` parts.

    Args:
        query: [num_seqs, num_heads, head_dim], contiguous, head_dim a power of two of at least 16.
        k_cache: [num_blocks, block_size, num_kv_heads, head_dim]; v_cache with the same strides.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], each at least 1.
        num_splits: 1 writes the output at once; more need a second kernel.
    """
    import torch

    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    if num_heads % num_kv_heads or num_heads // num_kv_heads > ROWS:
        raise ValueError(f"{num_heads} query heads on {num_kv_heads} KV heads: groups up to {ROWS}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or num_splits < 1:
        raise ValueError("need equal strides of K and V, the last 1, and num_splits of at least 1")
    query = query.contiguous()
    out = torch.empty_like(query)
    shape = (num_seqs, num_heads, num_splits)
    m = torch.empty(shape, dtype=torch.float32, device=query.device)
    denom = torch.empty_like(m)
    acc = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    interpreted_bf16 = query.dtype is torch.bfloat16 and not query.is_cuda
    split_kernel[(num_kv_heads, num_splits, num_seqs)](
        out, m, denom, acc, query, k_cache, v_cache, block_tables, seq_lens,
        head_dim**-0.5 * LOG2_E, query.stride(0), query.stride(1), *k_cache.stride()[:3],
        block_tables.stride(0), num_splits,
        GROUP=num_heads // num_kv_heads, BLOCK_SIZE=k_cache.shape[1], HEAD_DIM=head_dim,
        TILE=TILE, ROWS=ROWS, UPCAST=query.dtype is torch.float32 or interpreted_bf16,
        SPLIT=num_splits > 1, num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_splits > 1:
        merge_kernel[(num_heads, num_seqs)](
            out, m, denom, acc, num_splits,
            HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(num_splits),
        )  # fmt: skip
    return Result(out, m, denom, acc)
