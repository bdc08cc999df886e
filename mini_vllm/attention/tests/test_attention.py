"""Paged attention: the fast path gives the values of the readable reference, and both are causal.

Tolerance 1e-12 in float64: inputs are standard normal and an output is a weighted mean, so values
stay below 10 and a sum over a few hundred terms loses at most some hundred times 1e-16.
"""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm.attention import paged_attention, paged_attention_reference, write_kv
from mini_vllm.batch import ForwardBatch
from mini_vllm.tests.support import for_all

TOLERANCE = 1e-12
GARBAGE = 1e3


def ragged_batch(
    lengths: list[tuple[int, int]], block_size: int, seed: int = 0
) -> tuple[ForwardBatch, int]:
    """A batch of requests, each (tokens before this step, tokens in it), on scattered blocks.

    Returns:
        The batch and the number of blocks the cache needs.
    """
    rng = np.random.default_rng(seed)
    counts = np.array([new for _, new in lengths])
    seq_lens = np.array([old + new for old, new in lengths])
    blocks_per_request = -(-seq_lens // block_size)
    num_blocks = 1 + int(blocks_per_request.sum())
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(lengths), int(blocks_per_request.max())), dtype=np.int64)
    for row, needed in enumerate(blocks_per_request):
        tables[row, :needed] = [next(ids) for _ in range(needed)]
    starts = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(lengths)), counts)
    positions = np.concatenate([np.arange(old, old + new) for old, new in lengths])
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    return ForwardBatch(
        token_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=tables,
        logits_indices=starts[1:] - 1,
        block_size=block_size,
    ), num_blocks


def random_inputs(batch, num_blocks, num_kv_heads, group, head_dim, seed=0, dtype=np.float64):
    """Query and cache; slots that no sequence owns hold large garbage."""
    rng = np.random.default_rng(seed)
    shape = (2, num_blocks, batch.block_size, num_kv_heads, head_dim)
    cache = np.full(shape, GARBAGE)
    for table, length in zip(batch.block_tables, batch.seq_lens, strict=True):
        for position in range(length):
            block, offset = table[position // batch.block_size], position % batch.block_size
            cache[:, block, offset] = rng.standard_normal((2, num_kv_heads, head_dim))
    query = rng.standard_normal((len(batch.positions), num_kv_heads * group, head_dim))
    return query.astype(dtype), cache.astype(dtype)


@pytest.mark.slow
@for_all(
    lambda st: st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([1, 1, 1, 2, 3, 7])), min_size=1, max_size=6
    ),
    lambda st: st.integers(1, 5),
    lambda st: st.integers(1, 3),
    lambda st: st.integers(1, 4),
    lambda st: st.integers(1, 4),
    max_examples=100,
)
def test_the_fast_path_equals_the_reference_on_ragged_batches(
    lengths, block_size, num_kv_heads, group, half_dim
):
    batch, num_blocks = ragged_batch(lengths, block_size)
    query, cache = random_inputs(batch, num_blocks, num_kv_heads, group, 2 * half_dim)
    fast = paged_attention(query, cache, batch, 0.4)
    reference = paged_attention_reference(query, cache, batch, 0.4)
    assert np.abs(fast - reference).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [
        [(length, 1) for length in range(1, 120, 3)],
        [(99, 1)] * 30,
        [(10, 290)],
        [(200, 60), (0, 1), (31, 1), (3, 5)],
    ],
    ids=["decodes of all lengths", "equal decodes", "more than a query tile", "mixed"],
)
def test_the_fast_path_equals_the_reference_on_large_batches(lengths):
    batch, num_blocks = ragged_batch(lengths, 16)
    query, cache = random_inputs(batch, num_blocks, 1, 2, 4)
    fast = paged_attention(query, cache, batch, 0.5)
    assert np.abs(fast - paged_attention_reference(query, cache, batch, 0.5)).max() < TOLERANCE


def test_the_fast_path_equals_the_reference_in_float32_to_its_rounding():
    batch, num_blocks = ragged_batch([(20, 1), (5, 9), (33, 1)], 4)
    query, cache = random_inputs(batch, num_blocks, 2, 2, 8, dtype=np.float32)
    fast = paged_attention(query, cache, batch, 0.35)
    assert fast.dtype == np.float32
    assert np.abs(fast - paged_attention_reference(query, cache, batch, 0.35)).max() < 1e-5


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_reference])
def test_attention_equals_the_dense_formula(attention):
    """One sequence, gathered by hand: softmax(QK^T * scale + mask) V, head by head."""
    batch, num_blocks = ragged_batch([(4, 3)], 2)
    query, cache = random_inputs(batch, num_blocks, 2, 2, 4)
    flat = cache[:, batch.block_tables[0]].reshape(2, -1, 2, 4)[:, :7]
    out = attention(query, cache, batch, 0.5)
    for head in range(4):
        keys, values = flat[0, :, head // 2], flat[1, :, head // 2]
        scores = query[:, head] @ keys.T * 0.5
        scores[np.arange(7) > batch.positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        assert np.abs(out[:, head] - weights @ values).max() < TOLERANCE


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_reference])
def test_the_first_token_sees_only_itself(attention):
    batch, num_blocks = ragged_batch([(0, 3)], 4)
    query, cache = random_inputs(batch, num_blocks, 1, 2, 4)
    own = cache[1, batch.block_tables[0, 0], 0, 0]
    assert np.abs(attention(query, cache, batch, 0.5)[0] - own).max() < TOLERANCE


@pytest.mark.parametrize("attention", [paged_attention, paged_attention_reference])
@pytest.mark.parametrize("lengths", [[(5, 1)], [(3, 3)]], ids=["decode", "prefill"])
def test_a_position_beyond_the_query_has_no_influence(attention, lengths):
    batch, num_blocks = ragged_batch(lengths, 8)
    query, cache = random_inputs(batch, num_blocks, 1, 1, 4)
    first = attention(query, cache, batch, 0.5)[0]
    cache[:, batch.block_tables[0, 0], batch.positions[0] + 1 :] = -GARBAGE
    assert np.array_equal(attention(query, cache, batch, 0.5)[0], first)


def test_inputs_are_not_changed():
    batch, num_blocks = ragged_batch([(3, 1), (2, 4)], 4)
    query, cache = random_inputs(batch, num_blocks, 2, 2, 4)
    before = query.copy(), cache.copy()
    paged_attention(query, cache, batch, 0.5)
    assert np.array_equal(query, before[0])
    assert np.array_equal(cache, before[1])


def test_write_kv_fills_exactly_the_mapped_slots():
    cache = np.zeros((2, 3, 4, 1, 2))
    key, value = np.ones((3, 1, 2)), np.full((3, 1, 2), 2.0)
    write_kv(cache, key, value, np.array([4, 11, 6]))
    slots = cache.reshape(2, 12, 2)
    assert np.flatnonzero(slots[0, :, 0]).tolist() == [4, 6, 11]
    assert slots[1, [4, 6, 11]].tolist() == [[2.0, 2.0]] * 3
    assert slots.sum() == 3 * 2 * 1.0 + 3 * 2 * 2.0
