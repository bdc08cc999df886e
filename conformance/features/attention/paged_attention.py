"""Record what vLLM's own attention kernel answers over a paged cache.

A case is a ragged batch in float32: lengths, head counts, block
size and a seed, from which `make` draws queries, keys, values and shuffled block tables, and the
output of the kernel. Every slot that no request reads is full of large numbers, so that a read past
a sequence's end shows. The calls are those of
`vllm/v1/attention/backends/cpu_attn.py:292` `CPUAttentionBackendImpl.forward`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mini_vllm.batch import ForwardBatch

Case = dict[str, Any]

ABOUT = (
    "Inputs are drawn by conformance.recorders.paged_attention.make from the case's numbers. "
    "output: base64 of little-endian float32 [num_tokens, num_heads, head_dim] from vLLM's CPU "
    "kernel."
)
SHAPES: tuple[Case, ...] = (
    {"what": "one prompt", "query_lens": [21], "seq_lens": [21]},
    {"what": "decodes", "query_lens": [1] * 5, "seq_lens": [1, 16, 17, 100, 33]},
    {"what": "chunks and decodes", "query_lens": [1, 7, 16], "seq_lens": [65, 7, 52]},
    {"what": "a chunk of one token", "query_lens": [1, 1], "seq_lens": [2, 129]},
    {"what": "one KV head", "query_lens": [5, 1], "seq_lens": [37, 40], "num_heads": 8, "kv": 1},
    {"what": "as many KV heads", "query_lens": [3, 1], "seq_lens": [3, 90], "kv": 4},
    {"what": "heads of 128", "query_lens": [2, 1], "seq_lens": [18, 31], "head_dim": 128},
    {"what": "blocks of 32", "query_lens": [9, 1], "seq_lens": [41, 64], "block_size": 32},
    {"what": "a long sequence", "query_lens": [1, 4], "seq_lens": [1500, 700]},
)


class Inputs(NamedTuple):
    """What one call of attention reads."""

    query: np.ndarray
    """float32 [num_tokens, num_heads, head_dim]"""
    layer_cache: np.ndarray
    """float32 [2, num_blocks, block_size, num_kv_heads, head_dim], the step's own K and V in it"""
    batch: ForwardBatch
    scale: float


def make(case: Case) -> Inputs:
    """The inputs of a case; the same numbers for the same case."""
    rng = np.random.default_rng(case["seed"])
    heads, kv_heads, dim = case["num_heads"], case["kv"], case["head_dim"]
    size, lens = case["block_size"], np.array(case["seq_lens"])
    query_lens = np.array(case["query_lens"])
    num_needed = -(-lens // size)
    num_blocks = int(num_needed.sum()) + 3
    ids = 1 + rng.permutation(num_blocks - 1)
    tables = np.zeros((len(lens), num_needed.max()), dtype=np.int64)
    cache = np.full((2, num_blocks, size, kv_heads, dim), 1e4, dtype=np.float32)
    for row, (length, start) in enumerate(
        zip(lens, np.cumsum(num_needed) - num_needed, strict=True)
    ):
        tables[row, : num_needed[row]] = ids[start : start + num_needed[row]]
        slots = _slots(tables[row], range(length), size)
        flat = cache.reshape(2, num_blocks * size, kv_heads, dim)
        flat[:, slots] = rng.standard_normal((2, length, kv_heads, dim), dtype=np.float32)
    starts = lens - query_lens
    positions = [range(s, e) for s, e in zip(starts, lens, strict=True)]
    num_tokens = int(query_lens.sum())
    batch = ForwardBatch(
        token_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.concatenate([np.array(p) for p in positions]),
        slot_mapping=np.concatenate(
            [_slots(table, p, size) for table, p in zip(tables, positions, strict=True)]
        ),
        query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]),
        seq_lens=lens,
        block_tables=tables,
        logits_indices=np.cumsum(query_lens) - 1,
        block_size=size,
    )
    query = 2 * rng.standard_normal((num_tokens, heads, dim), dtype=np.float32)
    return Inputs(query, cache, batch, dim**-0.5)


def _slots(table: np.ndarray, positions: range, size: int) -> np.ndarray:
    where = np.array(positions)
    return np.asarray(table[where // size] * size + where % size)


def output_of(case: Case) -> np.ndarray:
    """The recorded output, float32 [num_tokens, num_heads, head_dim]."""
    flat = np.frombuffer(base64.b64decode(case["output"]), dtype="<f4")
    return flat.reshape(-1, case["num_heads"], case["head_dim"])


def kernel_output(inputs: Inputs) -> np.ndarray:
    """The same call on vLLM's CPU kernel: K and V written by its op, then attention."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    current_platform.import_kernels()
    query, batch = torch.from_numpy(inputs.query), inputs.batch
    _, num_heads, head_dim = query.shape
    _, num_blocks, size, kv_heads, _ = inputs.layer_cache.shape
    isa = _get_attn_isa(torch.float32, size, head_dim)
    shape = CPUAttentionBackend.get_kv_cache_shape(num_blocks, size, kv_heads, head_dim)
    key_cache, value_cache = torch.zeros(shape)
    # Every slot of the pool, garbage and all, through the op that writes.
    keys, values = torch.from_numpy(inputs.layer_cache.reshape(2, -1, kv_heads, head_dim))
    slots = torch.arange(num_blocks * size)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    start_loc = torch.from_numpy(batch.query_start_loc).to(torch.int32)
    seq_lens = torch.from_numpy(batch.seq_lens).to(torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        batch.num_reqs, num_heads, kv_heads, head_dim, seq_lens, torch.float32, start_loc,
        True, -1, isa, True,
    )  # fmt: skip
    out = torch.full_like(query, float("nan"))
    ops.cpu_attention_with_kv_cache(
        query, key_cache, value_cache, out, start_loc, seq_lens, inputs.scale, True, None, (-1, -1),
        torch.from_numpy(batch.block_tables).to(torch.int32), 0.0, plan, None,
    )  # fmt: skip
    assert out.isfinite().all(), "every element is written"
    answer: np.ndarray = out.numpy()
    return answer


def cases() -> Iterator[Case]:
    """Every shape with what the kernel answers."""
    common = {"num_heads": 4, "kv": 2, "head_dim": 64, "block_size": 16}
    for seed, shape in enumerate(SHAPES):
        case = {**common, **shape, "seed": seed}
        output = kernel_output(make(case)).astype("<f4")
        yield {**case, "output": base64.b64encode(output.tobytes()).decode()}
