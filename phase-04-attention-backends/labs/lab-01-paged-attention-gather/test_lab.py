"""What lab 04-01 pins: paging changes addresses only, and streaming changes memory only.

float64 throughout; inputs are of order 1, so 1e-12 holds for any order of summation.
"""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

TOLERANCE = 1e-12
LN2 = math.log(2.0)


def scatter(K, V, block_size, num_blocks, block_table, fill=np.nan):
    """Caches in which row t of K and V lies where the table puts it; all other rows hold `fill`."""
    k_cache = np.full((num_blocks, block_size, K.shape[1]), fill)
    v_cache = np.full((num_blocks, block_size, V.shape[1]), fill)
    for t in range(len(K)):
        place = block_table[t // block_size], t % block_size
        k_cache[place], v_cache[place] = K[t], V[t]
    return k_cache, v_cache


def sequence(seq_len, seed=0, d=8, d_v=6):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(d), rng.standard_normal((seq_len, d)), rng.standard_normal(
        (seq_len, d_v)
    )  # fmt: skip


def softmax_product(scores, V):
    weights = np.exp(scores - scores.max())
    return weights @ V / weights.sum()


def largest_difference(got, expected):
    """Largest absolute difference; infinite for another shape or a value that is no number."""
    got = np.asarray(got if got is not None else [], dtype=float)
    expected = np.asarray(expected, dtype=float)
    if got.shape != expected.shape or not np.isfinite(got).all():
        return math.inf
    return float(np.abs(got - expected).max())


def assert_attention(lab, seq_len, block_size, table, num_blocks, why, seed=0, tolerance=TOLERANCE):
    """The paged result for a scattered random sequence equals numpy's softmax over all keys."""
    q, K, V = sequence(seq_len, seed)
    caches = scatter(K, V, block_size, num_blocks, table)
    expected = softmax_product(K @ q / math.sqrt(len(q)), V)
    with np.errstate(all="ignore"):
        got = lab.paged_online_attention(q, *caches, table, seq_len)
    difference = largest_difference(got, expected)
    assert difference <= tolerance, (
        f"{seq_len} tokens, blocks of {block_size}, table {table}: {why}.\n"
        f"expected {expected}\ncame     {got}\nlargest difference: {difference:.3g}"
    )


# --- the worked example ---------------------------------------------------------------------------


def test_hand_trace_two_blocks(lab):
    V = np.zeros((4, 4))
    V[:, 0] = 1, 2, 3, 4
    scores = np.array([0, LN2, 2 * LN2, 3 * LN2])
    first = lab.softmax_step(lab.empty_state(4), scores[:2], V[:2])
    got = [first.m, first.denom, float(first.acc[0])]
    assert np.allclose(got, [LN2, 1.5, 2.5], atol=TOLERANCE), (
        "block 0, scores 0 and ln 2, values 1 and 2: the maximum is ln 2, the weights are 1/2 and "
        "1, so denom is 1.5 and acc is 1/2 x 1 + 1 x 2 = 2.5.\n"
        f"expected m, denom, acc = [{LN2:.4f}, 1.5, 2.5]\ncame     {got}"
    )
    assert scores[1] == LN2 and V[1, 0] == 2, (
        "softmax_step changed its arguments: the scores were 0 and ln 2, the values 1 and 2. "
        "`scores -= m` and `np.exp(..., out=...)` write into the caller's array, and values are a "
        f"view of the cache.\nexpected scores [0, 0.6931], values [1, 2]\ncame     scores "
        f"{scores[:2]}, values {V[:2, 0]}"
    )
    second = lab.softmax_step(first, scores[2:], V[2:])
    got = [second.m, second.denom, float(second.acc[0])]
    assert np.allclose(got, [3 * LN2, 1.875, 6.125], atol=TOLERANCE), (
        "block 1, scores ln 4 and ln 8: the maximum rises from ln 2 to ln 8, so corr = 1/4 and "
        "both sums shrink by it: denom 0.375 + 1.5, acc 0.625 + 5.5.\n"
        f"expected m, denom, acc = [{3 * LN2:.4f}, 1.875, 6.125]\ncame     {got}"
    )
    K = np.zeros((4, 4))
    K[:, 0] = scores
    caches = scatter(K, V, 2, 5, [4, 1])
    got = lab.paged_online_attention(np.array([2.0, 0, 0, 0]), *caches, [4, 1], 4)
    assert largest_difference(got, [49 / 15, 0, 0, 0]) <= TOLERANCE, (
        "q = [2, 0, 0, 0], d = 4, table [4, 1]: scores are 2 x K[:, 0] / sqrt(4), the ones above, "
        f"and acc / denom = 6.125 / 1.875 = 49/15.\nexpected [3.26667, 0, 0, 0]\ncame     {got}"
    )


def test_the_other_order_gives_the_same_sums(lab):
    V = np.array([[1.0], [2.0], [3.0], [4.0]])
    scores = np.array([0, LN2, 2 * LN2, 3 * LN2])
    later = lab.softmax_step(lab.empty_state(1), scores[2:], V[2:])
    state = lab.softmax_step(later, scores[:2], V[:2])
    got = [state.m, state.denom, float(state.acc[0])]
    assert np.allclose(got, [3 * LN2, 1.875, 6.125], atol=TOLERANCE), (
        "the second block first: corr is 1 for the first one, whose weights are 1/8 and 1/4. Order "
        f"must not matter.\nexpected m, denom, acc = [{3 * LN2:.4f}, 1.875, 6.125]\ncame     {got}"
    )
    assert float(later.acc[0]) == 5.5, (
        "softmax_step must return a new state and leave the old one alone (a split that is merged "
        f"twice would be counted twice); its acc was 5.5 and is now {later.acc[0]}"
    )


def test_dense_attention_is_a_softmax(lab):
    q, K, V = sequence(11)
    before, expected = q.copy(), softmax_product(K @ q / math.sqrt(8), V)
    got = lab.dense_attention(q, K, V)
    assert largest_difference(got, expected) <= TOLERANCE, (
        f"softmax(K q / sqrt(d)) V for 11 keys, d = 8.\nexpected {expected}\ncame     {got}"
    )
    assert np.array_equal(q, before), (
        f"q was changed; its caller uses it again.\nexpected {before}\ncame     {q}"
    )
    with np.errstate(all="ignore"):
        got = lab.dense_attention(q, 1000 * K, V)
    expected = softmax_product(1000 * K @ q / math.sqrt(8), V)
    assert largest_difference(got, expected) <= 1e-9, (
        "with scores in the thousands exp overflows unless the largest score is subtracted first.\n"
        f"expected {expected}\ncame     {got}"
    )


# --- paging ---------------------------------------------------------------------------------------


def test_matches_dense_block_aligned(lab):
    why = "paged attention must equal attention over contiguous keys"
    for seed in range(4):
        assert_attention(lab, 16, 4, [3, 1, 7, 0], 8, why, seed)


def test_matches_dense_partial_last_block(lab):
    why = "13 tokens are 3 blocks and one row of a fourth: ceil(13 / 4) = 4 blocks, and 1 valid row"
    assert_attention(lab, 13, 4, [3, 1, 7, 0], 8, why)


def test_paging_invariance(lab):
    q, K, V = sequence(12, 5)
    outputs = []
    for table in ([0, 1, 2], [7, 3, 5]):
        caches = scatter(K, V, 4, 8, table)
        outputs.append(np.asarray(lab.paged_online_attention(q, *caches, table, 12)))
    assert np.array_equal(*outputs), (
        "the same 12 tokens in blocks [0, 1, 2] and in [7, 3, 5] must give the same bits: the "
        "table changes addresses, not values.\n"
        f"in [0, 1, 2] {outputs[0]}\nin [7, 3, 5] {outputs[1]}"
    )


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_length_and_block_size(lab, block_size):
    for seq_len in range(1, 18):
        needed = -(-seq_len // block_size)
        rng = np.random.default_rng(seq_len)
        table = rng.permutation(needed + 2)[:needed].tolist()
        why = "every length from 1 to 17 must work"
        assert_attention(lab, seq_len, block_size, table, needed + 2, why, seq_len)


def test_single_token_returns_v0(lab):
    q, K, V = sequence(1, 3)
    caches = scatter(K, V, 4, 3, [2])
    got = lab.paged_online_attention(q, *caches, [2], 1)
    assert largest_difference(got, V[0]) <= TOLERANCE, (
        f"one key has weight 1, so the output is its value.\nexpected {V[0]}\ncame     {got}"
    )


# --- the running softmax --------------------------------------------------------------------------


def state_of(lab, scores, V, block_size):
    state = lab.empty_state(V.shape[1])
    for start in range(0, len(scores), block_size):
        stop = start + block_size
        state = lab.softmax_step(state, scores[start:stop], V[start:stop])
    return state


def test_max_rises_every_block(lab):
    scores, V = np.linspace(-6, 6, 16), np.eye(16)
    state = state_of(lab, scores, V, 4)
    got, expected = state.acc / state.denom, softmax_product(scores, V)
    assert largest_difference(got, expected) <= TOLERANCE, (
        "scores rise from block to block, so each one rescales all that was summed before: acc and "
        "denom alike. Values are unit vectors, so the output is the weight of each token; compare "
        f"the first blocks.\nexpected {expected}\ncame     {got}"
    )


def test_max_in_first_block(lab):
    scores, V = np.linspace(6, -6, 16), np.eye(16)
    state = state_of(lab, scores, V, 4)
    got, expected = state.acc / state.denom, softmax_product(scores, V)
    assert largest_difference(got, expected) <= TOLERANCE and abs(state.m - 6) <= TOLERANCE, (
        "the largest score, 6, is in the first block: corr is 1 from then on and m stays 6.\n"
        f"expected m 6 and weights {expected}\ncame     m {state.m} and weights {got}"
    )


def test_scores_up_to_1000_stay_finite(lab):
    rng = np.random.default_rng(8)
    for low, high in ((-1000, 1000), (900, 1000), (-1000, -900)):
        scores, V = rng.uniform(low, high, 24), rng.standard_normal((24, 3))
        with np.errstate(all="ignore"):
            state = state_of(lab, scores, V, 4)
            got = np.asarray(state.acc) / state.denom
        expected = softmax_product(scores, V)
        assert largest_difference(got, expected) <= 1e-9, (
            f"scores between {low} and {high}: float64 overflows at exp(709.8) and gives 0 below "
            "exp(-745). Subtracting the running maximum keeps one weight at 1.\n"
            f"expected {expected}\ncame     {got}"
        )


def test_a_small_weight_counts(lab):
    scores, V = np.array([0.0, -1.0, -24.0, -25.0]), np.array([[1.0], [2.0], [3e12], [4e12]])
    state = state_of(lab, scores, V, 2)
    got, expected = state.acc / state.denom, softmax_product(scores, V)
    assert largest_difference(got / expected, [1.0]) <= TOLERANCE, (
        "the second block's scores are 24 below the maximum, so its weights are about 1e-11, and "
        "its values about 1e12. A block is left out by nobody's threshold: attention is exact.\n"
        f"expected {expected}\ncame     {got}"
    )


# --- what is read ---------------------------------------------------------------------------------


def test_poisoned_cache_never_read(lab):
    q, K, V = sequence(10, 4)
    expected = softmax_product(K @ q / math.sqrt(8), V)
    for fill in (np.nan, 0.0, 1e6):
        caches = scatter(K, V, 4, 9, [5, 2, 8], fill)
        with np.errstate(all="ignore"):
            got = lab.paged_online_attention(q, *caches, [5, 2, 8], 10)
        difference = largest_difference(got, expected)
        assert difference <= TOLERANCE, (
            f"10 tokens in blocks 5, 2 and 8; everything that is not theirs holds {fill}: the "
            "other blocks, and rows 2 and 3 of block 8. A reused block holds what its last owner "
            "left, and a weight of 0 does not help: 0 x NaN is NaN.\n"
            f"expected {expected}\ncame     {got}"
        )


def test_nan_of_the_sequence_comes_out(lab):
    for name, expected in (
        ("value", [False, False, True, False, False, False]),
        ("key", [True] * 6),
    ):
        q, K, V = sequence(10, 4)
        (V if name == "value" else K)[6, 2] = np.nan
        caches = scatter(K, V, 4, 9, [5, 2, 8])
        with np.errstate(all="ignore"):
            got = np.asarray(lab.paged_online_attention(q, *caches, [5, 2, 8], 10), dtype=float)
        assert np.isnan(got).tolist() == expected, (
            f"token 6 is of the sequence and its {name} has a NaN in place 2: a value's comes out "
            "in that place, a key's makes the score NaN and with it everything. Code that replaces "
            "NaN passes over garbage it should not have read, and hides a layer that is broken.\n"
            f"expected NaN {expected}\ncame     {got}"
        )


def test_table_tail_never_dereferenced(lab):
    q, K, V = sequence(7, 6)
    expected = softmax_product(K @ q / math.sqrt(8), V)
    for tail in ([-1], [10**6, -1], [0, 0, 0]):
        caches = scatter(K, V, 4, 6, [3, 1])
        try:
            got = lab.paged_online_attention(q, *caches, [3, 1, *tail], 7)
        except IndexError as error:
            pytest.fail(
                f"7 tokens need 2 table entries; the table is [3, 1, {str(tail)[1:-1]}], and an "
                f"entry beyond them was followed: {error}",
                pytrace=False,
            )
        assert largest_difference(got, expected) <= TOLERANCE, (
            f"7 tokens need 2 table entries; what follows, {tail}, means nothing (padding, or "
            f"blocks handed out ahead).\nexpected {expected}\ncame     {got}"
        )


class Watched(np.ndarray):
    """A cache that notes which blocks each access touches. What it returns is a plain array."""

    def __array_finalize__(self, other):
        self.reads = None

    def __getitem__(self, key):
        out = super().__getitem__(key)
        if self.reads is not None:
            self.reads.append(np.unique(self.block_of[key]).tolist())
        return out.view(np.ndarray) if isinstance(out, np.ndarray) else out


def watched(cache):
    """`cache` as a `Watched` with an empty list of reads."""
    out = cache.view(Watched)
    out.block_of = np.broadcast_to(np.arange(len(cache))[:, None, None], cache.shape)
    out.reads = []
    return out


def test_each_block_is_read_once(lab):
    q, K, V = sequence(30, 7)
    table = [6, 0, 9, 3, 11, 7, 2, 5]
    k_cache, v_cache = (watched(cache) for cache in scatter(K, V, 4, 12, table))
    lab.paged_online_attention(q, k_cache, v_cache, table, 30)
    expected = sorted([block] for block in table)
    for name, cache in (("K", k_cache), ("V", v_cache)):
        assert sorted(cache.reads) == expected, (
            f"30 tokens, blocks of 4: {name} must be read through cache[physical block], each of "
            "the 8 blocks once and by itself. A second pass, as for a maximum first and a sum "
            "later, doubles the traffic, and decode has nothing but traffic.\n"
            f"expected accesses {expected}\ncame              {sorted(cache.reads)}"
        )


def peak_bytes(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_sequence(lab):
    peaks = {}
    for num_blocks in (4, 512):
        seq_len = num_blocks * 16
        q, K, V = sequence(seq_len, 1)
        table = list(range(num_blocks))[::-1]
        caches = scatter(K, V, 16, num_blocks, table)
        result = []

        def call(q=q, caches=caches, table=table, seq_len=seq_len, result=result):
            result.append(lab.paged_online_attention(q, *caches, table, seq_len))

        call()  # so that what is allocated once is not counted
        peaks[seq_len] = peak_bytes(call)
        expected = softmax_product(K @ q / math.sqrt(8), V)
        assert largest_difference(result[0], expected) <= TOLERANCE, (
            f"{seq_len} tokens in {num_blocks} blocks.\nexpected {expected}\ncame     {result[0]}"
        )
    assert peaks[8192] - peaks[64] < 16_384, (
        "a row of 8,192 scores is 65,536 bytes. On a GPU such a row does not fit beside the keys, "
        "so only a State may live from one block to the next.\n"
        f"expected about as many bytes for 8,192 tokens as for 64\ncame     {peaks}"
    )


def test_inputs_stay_as_they_were(lab):
    q, K, V = sequence(9, 2)
    caches = scatter(K, V, 4, 4, [2, 0, 3], fill=0.0)
    before = [array.copy() for array in (q, *caches)]
    table = [2, 0, 3]
    first = np.asarray(lab.paged_online_attention(q, *caches, table, 9)).copy()
    for name, array, copy in zip(("q", "k_cache", "v_cache"), (q, *caches), before, strict=True):
        assert np.array_equal(array, copy), (
            f"{name} was changed. The cache belongs to the engine, and q is used by others; an "
            "in-place `*=` is the usual way to do it by mistake"
        )
    again = np.asarray(lab.paged_online_attention(q, *caches, table, 9))
    assert table == [2, 0, 3] and np.array_equal(first, again), (
        f"a second call must give the same: first {first}, then {again}; the table is {table}"
    )


def test_bad_seq_len_raises(lab):
    q, K, V = sequence(8, 2)
    caches = scatter(K, V, 4, 4, [2, 0], fill=0.0)
    got = lab.paged_online_attention(q, *caches, [2, 0], 8)
    assert largest_difference(got, softmax_product(K @ q / math.sqrt(8), V)) <= TOLERANCE, (
        f"8 tokens fill a table of two blocks of 4 and are allowed; came {got}"
    )
    for seq_len, why in ((0, "softmax over nothing"), (-3, "negative"), (9, "beyond the table")):
        try:
            with np.errstate(all="ignore"):
                got = lab.paged_online_attention(q, *caches, [2, 0], seq_len)
        except ValueError:
            continue
        except Exception as error:
            got = repr(error)
        pytest.fail(
            f"seq_len {seq_len} ({why}) with a table of two blocks of 4 must raise ValueError; "
            f"came {got}",
            pytrace=False,
        )
