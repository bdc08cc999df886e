"""What lab 04-03 pins: a causal mask is a bound per row, and a chunk is a prefill with an offset.

float64, inputs of order 1: 1e-12 holds for any order of summation.
"""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.attention import paged_attention as shipped_attention

TOLERANCE = 1e-12


def scatter(K, V, block_size, num_blocks, block_table, fill=np.nan):
    """Caches in which row t of K and V lies where the table puts it; all other rows hold `fill`."""
    k_cache = np.full((num_blocks, block_size, K.shape[1]), fill)
    v_cache = np.full((num_blocks, block_size, V.shape[1]), fill)
    write(k_cache, v_cache, K, V, block_table, 0, len(K))
    return k_cache, v_cache


def write(k_cache, v_cache, K, V, block_table, start, stop):
    block_size = k_cache.shape[1]
    for t in range(start, stop):
        place = block_table[t // block_size], t % block_size
        k_cache[place], v_cache[place] = K[t], V[t]


def sequence(seq_len, seed=0, d=8, d_v=6):
    rng = np.random.default_rng(seed)
    shapes = ((seq_len, d), (seq_len, d), (seq_len, d_v))
    return tuple(rng.standard_normal(shape) for shape in shapes)


def expected_rows(Q, K, V, start_pos=0, window=None, scale=None):
    """Masked softmax over all keys at once, independent of the lab."""
    positions = start_pos + np.arange(len(Q))[:, None]
    keys = np.arange(len(K))[None, :]
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    scale = Q.shape[1] ** -0.5 if scale is None else scale
    scores = np.where(visible, Q @ K.T * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ V / weights.sum(axis=1, keepdims=True)


def assert_rows(got, expected, start_pos, what, tolerance=TOLERANCE):
    """`start_pos`: position of row 0, or an array with the position of each row."""
    positions = np.arange(len(expected)) + start_pos if np.ndim(start_pos) == 0 else start_pos
    got = np.asarray(got if got is not None else [], dtype=float)
    assert got.shape == expected.shape, f"{what}: expected shape {expected.shape}, came {got.shape}"
    difference = np.abs(got - expected).max(axis=1)
    bad = np.flatnonzero(~(difference <= tolerance))
    if len(bad):
        row = int(bad[0])
        why = (
            "NaN comes from a slot that no token was written to (they hold NaN, and 0 * NaN is "
            "NaN), or from -inf less -inf.\n"
        )
        pytest.fail(
            f"{what}\n{len(bad)} of {len(got)} rows are wrong; the first is row {row}, at position "
            f"{positions[row]}: it sees keys 0 to {positions[row]}, or its window of them.\n"
            f"{why if np.isnan(got[row]).any() else ''}"
            f"expected {expected[row]}\ncame     {got[row]}",
            pytrace=False,
        )


TABLE = [6, 2, 9, 4]


# --- rows and their bounds ------------------------------------------------------------------------


def closed_form(num_rows):
    """Q, K, V with scores t ln 2 and values t + 1: every answer is a fraction."""
    Q = np.tile([2.0, 0, 0, 0], (num_rows, 1))
    K, V = np.zeros((num_rows, 4)), np.zeros((num_rows, 1))
    K[:, 0], V[:, 0] = np.arange(num_rows) * math.log(2), np.arange(num_rows) + 1
    return Q, K, V


def test_closed_form_rows(lab):
    Q, K, V = closed_form(6)
    expected = np.array([[1], [5 / 3], [17 / 7], [49 / 15], [129 / 31], [107 / 21]])
    why = (
        "scores t ln 2, so the weights are 1, 2, 4, ...; values t + 1. Position p sees keys 0 to "
        "p: 1, then (1 + 2*2)/3 = 5/3, then (1 + 4 + 12)/7 = 17/7"
    )
    assert_rows(lab.dense_causal_attention(Q.copy(), K, V), expected, 0, f"dense: {why}")
    caches = scatter(K, V, 2, 5, [3, 0, 2])
    got = lab.paged_causal_prefill_attention(Q, *caches, [3, 0, 2])
    assert_rows(got, expected, 0, f"paged, blocks of 2: {why}")


def test_inputs_stay_as_they_were(lab):
    Q, K, V = sequence(9, 15)
    caches = scatter(K, V, 4, 10, TABLE)
    given = {"Q": Q, "K": K, "V": V, "k_cache": caches[0], "v_cache": caches[1]}
    before = {name: array.copy() for name, array in given.items()}
    for name, arguments in (
        ("dense_causal_attention", (Q, K, V)),
        ("paged_causal_prefill_attention", (Q, *caches, TABLE)),
    ):
        got = getattr(lab, name)(*arguments)
        assert np.shape(got) == (9, 6), f"{name}: expected shape (9, 6), came {np.shape(got)}"
        changed = [key for key in given if not np.array_equal(given[key], before[key], True)]
        assert not changed, (
            f"{name} changed {changed}. A slice of Q is a view, so `q *= scale` in a tile writes "
            "into the caller's batch.\nexpected changed []\n"
            f"came     changed {changed}"
        )


def test_dense_rows_from_any_start(lab):
    Q, K, V = sequence(9)
    for start in (0, 3, 8):
        for window in (None, 1, 4):
            got = lab.dense_causal_attention(Q[start:], K, V, start, window)
            expected = expected_rows(Q[start:], K, V, start, window)
            assert_rows(got, expected, start, f"dense, rows {start} to 8, window {window}")


def test_full_prefill_from_position_zero(lab):
    Q, K, V = sequence(13, 1)
    caches = scatter(K, V, 4, 10, TABLE)
    got = lab.paged_causal_prefill_attention(Q, *caches, TABLE)
    assert_rows(got, expected_rows(Q, K, V), 0, "13 tokens in 4 blocks of 4, one chunk")


def test_mid_sequence_chunk(lab):
    Q, K, V = sequence(9, 2)
    caches = scatter(K, V, 4, 10, TABLE)
    got = lab.paged_causal_prefill_attention(Q[5:], *caches, TABLE, 5)
    expected = expected_rows(Q[5:], K, V, 5)
    assert_rows(
        got, expected, 5,
        "a chunk of positions 5 to 8 of a sequence of 9: its rows see what was computed before the "
        "chunk as well",
    )  # fmt: skip


def test_chunked_equals_one_shot(lab):
    Q, K, V = sequence(12, 3)
    caches = scatter(K, V, 4, 10, TABLE)
    whole = lab.paged_causal_prefill_attention(Q, *caches, TABLE)
    parts = [
        lab.paged_causal_prefill_attention(Q[:5], *caches, TABLE, 0),
        lab.paged_causal_prefill_attention(Q[5:], *caches, TABLE, 5),
    ]
    assert_rows(np.concatenate(parts), expected_rows(Q, K, V), 0, "12 tokens as chunks of 5 and 7")
    assert_rows(np.concatenate(parts), np.asarray(whole), 0, "5 + 7 against one chunk of 12", 1e-9)


def test_causality_future_tokens_are_invisible(lab):
    Q, K, V = sequence(8, 4)
    caches = scatter(K, V, 4, 10, TABLE)
    before = np.asarray(lab.paged_causal_prefill_attention(Q, *caches, TABLE))
    for cache in caches:
        cache[TABLE[1], 3] += 1000.0
    after = np.asarray(lab.paged_causal_prefill_attention(Q, *caches, TABLE))
    changed = np.flatnonzero((before != after).any(axis=1)).tolist()
    assert changed == [7], (
        "1,000 was added to K and V of the last of 8 tokens. Rows 0 to 6 must not see it, to the "
        "last bit; row 7 must, or it does not see itself.\n"
        f"expected rows that change [7]\ncame     {changed}"
    )


@pytest.mark.parametrize("chunks", [[5, 7], [4, 4, 4], [11, 1], [1] * 12])
def test_progressive_cache(lab, chunks):
    Q, K, V = sequence(12, 5)
    expected = expected_rows(Q, K, V)
    k_cache, v_cache = np.full((10, 4, 8), np.nan), np.full((10, 4, 6), np.nan)
    start = 0
    for chunk in chunks:
        stop = start + chunk
        write(k_cache, v_cache, K, V, TABLE, start, stop)
        got = lab.paged_causal_prefill_attention(Q[start:stop], k_cache, v_cache, TABLE, start)
        what = (
            f"chunks {chunks}: positions {start} to {stop - 1} are written, then attended; slots "
            "of later positions still hold NaN, and 0 x NaN is NaN, so they may not be read at all"
        )
        assert_rows(got, expected[start:stop], start, what)
        start = stop


def test_nan_a_row_sees_comes_out(lab):
    Q, K, V = sequence(12, 5)
    K[2, 1], V[6, 2] = np.nan, np.nan
    caches = scatter(K, V, 4, 10, TABLE)
    with np.errstate(all="ignore"):
        got = lab.paged_causal_prefill_attention(Q[1:], *caches, TABLE, 1, tile=1)
    whole = np.isnan(np.asarray(got, dtype=float)).all(axis=1).tolist()
    assert whole == [False] + [True] * 10, (
        "the key of token 2 has a NaN, so every row from position 2 on is NaN and row 1 is not.\n"
        f"expected rows of NaN {[False] + [True] * 10}\ncame     {whole}"
    )
    K[2, 1] = 0.0
    caches = scatter(K, V, 4, 10, TABLE)
    with np.errstate(all="ignore"):
        got = lab.paged_causal_prefill_attention(Q[6:], *caches, TABLE, 6)
    found = np.isnan(np.asarray(got, dtype=float)).any(axis=0).tolist()
    assert found == [False, False, True, False, False, False] and np.isnan(got[:, 2]).all(), (
        "rows 6 to 11 see token 6, whose value has a NaN in place 2, so each of them has one "
        "there. Code that replaces NaN passes over slots it should not have read, and hides a "
        f"layer that is broken.\nexpected NaN in column 2 only, every row\ncame\n{got}"
    )


def test_chunk_of_one_is_decode(lab):
    Q, K, V = sequence(11, 6)
    caches = scatter(K, V, 4, 10, TABLE)
    got = lab.paged_causal_prefill_attention(Q[10:], *caches, TABLE, 10)
    what = "one row at position 10 of 11: a decode step is a chunk of one that sees everything"
    assert_rows(got, expected_rows(Q[10:], K, V, 10), 10, what)


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 3, 4, 16])
def test_tile_size_changes_nothing(lab, tile):
    Q, K, V = sequence(13, 7)
    K = K * np.linspace(0.1, 6, 13)[:, None]  # maxima move at different places in different rows
    for start in (0, 6):
        caches = scatter(K, V, 4, 10, TABLE)
        got = lab.paged_causal_prefill_attention(Q[start:], *caches, TABLE, start, tile=tile)
        expected = expected_rows(Q[start:], K, V, start)
        what = (
            f"tiles of {tile} rows, rows {start} to 12: each row has a maximum and sums of its own"
        )
        assert_rows(got, expected, start, what)


def test_scores_far_from_zero(lab):
    rng = np.random.default_rng(13)
    Q, V = np.tile([2.0, 0, 0, 0], (9, 1)), rng.standard_normal((9, 3))
    for middle in (-1000, 1000, -20_000):
        K = np.zeros((9, 4))
        K[:, 0] = middle + rng.standard_normal(9)
        caches = scatter(K, V, 4, 10, TABLE)
        with np.errstate(all="ignore"):
            got = lab.paged_causal_prefill_attention(Q, *caches, TABLE)
        what = (
            f"all scores are near {middle}: exp(1000) overflows and exp(-1000) is 0, so a row's "
            "maximum has to be its own from its first key on, and no number of yours, such as 0 or "
            "-10,000, may stand for 'no key' or 'hidden': it may be the largest"
        )
        assert_rows(got, expected_rows(Q, K, V), 0, what, 1e-9)


def test_float32_in_float32_out(lab):
    rows = [array.astype(np.float32) for array in sequence(9, 14)]
    caches = [c.astype(np.float32) for c in scatter(*rows[1:], 4, 10, TABLE)]
    calls = {
        "dense_causal_attention": tuple(rows),
        "attend_tile": (rows[0], np.arange(9), *caches, TABLE, 0.3),
        "paged_causal_prefill_attention": (rows[0], *caches, TABLE),
        "varlen_causal_attention": (rows[0], *caches, [TABLE], [0, 9], [9]),
    }
    batch = Batch([TABLE], [0, 9], [9])
    calls["paged_attention"] = (
        rows[0][:, None],
        np.stack([caches[0]] * 2)[:, :, :, None],
        batch,
        1,
    )
    for name, arguments in calls.items():
        got = np.asarray(getattr(lab, name)(*arguments)).dtype
        assert got == np.float32, (
            f"{name}: the output has the dtype of the queries, as the next layer expects.\n"
            f"expected float32\ncame     {got}"
        )


class Batch:
    """What `paged_attention` takes from the engine's `ForwardBatch`."""

    def __init__(self, block_tables, query_start_loc, seq_lens, block_size=4):
        self.block_tables = np.array(block_tables)
        self.query_start_loc = np.array(query_start_loc)
        self.seq_lens = np.array(seq_lens)
        self.num_reqs, self.block_size = len(seq_lens), block_size


class Watched(np.ndarray):
    """A cache that notes which blocks each access touches. What it returns is a plain array."""

    def __array_finalize__(self, other):
        self.reads = None

    def __getitem__(self, key):
        out = super().__getitem__(key)
        if self.reads is not None:
            self.reads += np.unique(self.block_of[key]).tolist()
        return out.view(np.ndarray) if isinstance(out, np.ndarray) else out


def watched(cache):
    """`cache` as a `Watched` with an empty list of reads."""
    out = cache.view(Watched)
    out.block_of = np.broadcast_to(np.arange(len(cache))[:, None, None], cache.shape)
    out.reads = []
    return out


def test_a_tile_reads_a_block_once(lab):
    Q, K, V = sequence(13, 8)
    cases = (
        (0, 1, 28, "row at a time: 4 x 1 + 4 x 2 + 4 x 3 + 4"),
        (0, 4, 10, "tiles of 4: 1 + 2 + 3 + 4"),
        (0, 16, 4, "one tile: each block once"),
        (5, 4, 7, "rows 5 to 12: tiles 5-8 and 9-12 reach into blocks 2 and 3: 3 + 4"),
        (12, 16, 4, "a decode row reads every block, for itself alone"),
    )
    for start, tile, expected, why in cases:
        k_cache, v_cache = (watched(cache) for cache in scatter(K, V, 4, 10, TABLE))
        lab.paged_causal_prefill_attention(Q[start:], k_cache, v_cache, TABLE, start, tile=tile)
        got = (len(k_cache.reads), len(v_cache.reads))
        assert got == (expected, expected), (
            f"13 tokens, blocks of 4, rows {start} to 12, tile {tile} ({why}). Queries are outer "
            "and keys inner: a block is read once per tile, up to the tile's last position, and "
            f"shared by the rows.\nexpected {expected} block reads of K and of V\ncame     {got}"
        )


def test_a_tile_keeps_nothing_per_key(lab):
    peaks = {}
    for num_blocks in (4, 256):
        seq_len, table = 16 * num_blocks, list(range(num_blocks))[::-1]
        Q, K, V = sequence(seq_len, 17)
        caches = scatter(K, V, 16, num_blocks, table)
        arguments = (Q[-4:], np.arange(seq_len - 4, seq_len), *caches, table, 8**-0.5)
        got = lab.attend_tile(*arguments)  # so that what is allocated once is not counted
        expected = expected_rows(Q[-4:], K, V, seq_len - 4)
        assert_rows(got, expected, seq_len - 4, f"the last 4 of {seq_len} rows in a tile")
        tracemalloc.start()
        lab.attend_tile(*arguments)
        peaks[seq_len] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[4096] - peaks[64] < 32_768, (
        "4 rows of 4,096 scores are 131,072 bytes, and the gathered keys twice that. A tile "
        "has room for one block of scores, and for m, denom and acc of each row.\n"
        f"expected about as many bytes for 4,096 keys as for 64\ncame     {peaks}"
    )


# --- windows --------------------------------------------------------------------------------------


def test_window_rows(lab):
    Q, K, V = closed_form(9)
    expected = np.array([[1.0]] + [[p + 2 / 3] for p in range(1, 9)])
    caches = scatter(K, V, 2, 6, [3, 0, 2, 5, 1])
    for tile in (1, 4, 16):
        with np.errstate(all="ignore"):
            got = lab.paged_causal_prefill_attention(
                Q, *caches, [3, 0, 2, 5, 1], tile=tile, window=2
            )
        assert_rows(
            got, expected, 0,
            f"window 2, tile {tile}: position p sees keys p - 1 and p with weights 1 and 2, so "
            "(p + 2(p + 1))/3 = p + 2/3. In a tile, a block may hold keys for some rows and none "
            "for others; what is -inf - (-inf)?",
        )  # fmt: skip


def test_windows_of_every_size(lab):
    Q, K, V = sequence(13, 9)
    caches = scatter(K, V, 4, 10, TABLE)
    for window in (1, 2, 4, 5, 12, 13, 50):
        for start, tile in ((0, 16), (0, 3), (7, 4)):
            with np.errstate(all="ignore"):
                got = lab.paged_causal_prefill_attention(
                    Q[start:], *caches, TABLE, start, tile=tile, window=window
                )
            expected = expected_rows(Q[start:], K, V, start, window)
            assert_rows(got, expected, start, f"window {window}, rows {start} to 12, tile {tile}")


def test_left_of_the_window_is_never_read(lab):
    Q, K, V = sequence(13, 10)
    start, far = 9, [10**6, *TABLE[1:]]  # with window 4, rows 9 to 12 see keys 6 to 12
    for window, table in ((4, TABLE), (4, far), (5, TABLE), (5, far)):
        expected, first = expected_rows(Q[start:], K, V, start, window), start - window + 1
        caches = scatter(K, V, 4, 10, TABLE)
        for cache in caches:
            cache[TABLE[0]] = np.nan
            cache[TABLE[1], : first - 4] = np.nan
        try:
            with np.errstate(all="ignore"):
                got = lab.paged_causal_prefill_attention(
                    Q[start:], *caches, table, start, window=window
                )
        except IndexError as error:
            pytest.fail(
                f"window {window}, rows 9 to 12: nobody sees keys 0 to {first - 1}, so block 0 of "
                f"the sequence may have been freed; its table entry was followed: {error}",
                pytrace=False,
            )
        what = f"window {window}, rows 9 to 12: keys 0 to {first - 1} hold NaN; no row sees them"
        assert_rows(got, expected, start, what)


# --- ragged batches -------------------------------------------------------------------------------


def ragged(query_lens, seq_lens, seed=11, block_size=4):
    """Separate sequences, one cache: per request Q, K, V; caches; tables; offsets."""
    rng = np.random.default_rng(seed)
    per_request = [sequence(n, seed + i) for i, n in enumerate(seq_lens)]
    needed = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(needed) + 3
    ids = rng.permutation(num_blocks).tolist()
    k_cache, v_cache = np.full((num_blocks, 4, 8), np.nan), np.full((num_blocks, 4, 6), np.nan)
    tables, rows = [], []
    for (Q, K, V), count, query_len in zip(per_request, needed, query_lens, strict=True):
        tables.append([ids.pop() for _ in range(count)] + [-1])
        write(k_cache, v_cache, K, V, tables[-1], 0, len(K))
        rows.append(Q[len(Q) - query_len :])
    offsets = [0, *np.cumsum(query_lens).tolist()]
    return per_request, np.concatenate(rows), k_cache, v_cache, tables, offsets


def assert_ragged(lab, query_lens, seq_lens, why, **options):
    per_request, Q, k_cache, v_cache, tables, offsets = ragged(query_lens, seq_lens)
    try:
        got = lab.varlen_causal_attention(Q, k_cache, v_cache, tables, offsets, seq_lens, **options)
    except IndexError as error:
        pytest.fail(
            f"{why}: query_start_loc {offsets}, seq_lens {seq_lens}. A block beyond a request's "
            f"last one was looked up ({error}); the tables have {[len(t) - 1 for t in tables]} "
            "blocks. "
            "Does every row start where its request's new tokens start, at seq_len - query_len?",
            pytrace=False,
        )
    assert np.shape(got) == (len(Q), 6), (
        f"{why}: expected shape {(len(Q), 6)}, came {np.shape(got)}"
    )
    for r, (_, K, V) in enumerate(per_request):
        rows, start = slice(offsets[r], offsets[r + 1]), seq_lens[r] - query_lens[r]
        if query_lens[r]:
            expected = expected_rows(
                Q[rows], K, V, start, options.get("window"), options.get("scale")
            )
            what = (
                f"{why}: query_start_loc {offsets}, seq_lens {seq_lens}; request {r} owns rows "
                f"{offsets[r]} to {offsets[r + 1] - 1} and starts at position "
                f"{seq_lens[r]} - {query_lens[r]} = {start}"
            )
            assert_rows(got[rows], expected, start, what)


def test_varlen_mixed_batch(lab):
    assert_ragged(lab, [1, 5, 9], [7, 11, 9], "a decode, a chunk and a whole prompt")
    assert_ragged(lab, [20, 1, 1], [22, 1, 30], "a chunk longer than a tile, two decodes")


def test_varlen_options_reach_every_request(lab, monkeypatch):
    assert_ragged(lab, [1, 5, 9], [7, 11, 9], "window 3", window=3)
    assert_ragged(lab, [20, 3], [26, 3], "tile 64: more rows than TILE_ROWS at once", tile=64)
    assert_ragged(lab, [2, 3], [5, 3], "scale 0: every key weighs the same", scale=0.0)
    attend_tile, rows = lab.attend_tile, []

    def watch(q, *others, **more):
        rows.append(len(q))
        return attend_tile(q, *others, **more)

    monkeypatch.setattr(lab, "attend_tile", watch)
    assert_ragged(lab, [1, 5, 9], [7, 11, 9], "scale 0.1, tile 4", scale=0.1, tile=4)
    assert rows == [1, 4, 1, 4, 4, 1], (
        "requests of 1, 5 and 9 rows in tiles of 4: no tile is larger, and none has rows of two "
        f"requests.\nexpected rows per tile [1, 4, 1, 4, 4, 1]\ncame     {rows}"
    )


def test_varlen_requests_without_rows(lab):
    assert_ragged(lab, [0, 3, 0, 1, 0], [5, 6, 0, 4, 9], "requests that are not in this step")
    Q, K, V = sequence(5)
    got = lab.paged_causal_prefill_attention(Q[:0], *scatter(K, V, 4, 10, TABLE), TABLE, 5)
    assert np.shape(got) == (0, 6), f"a chunk without rows: expected shape (0, 6), came {got!r}"


def test_varlen_rejects_bad_offsets(lab):
    _, Q, k_cache, v_cache, tables, _ = ragged([3, 4], [5, 6])
    assert len(lab.varlen_causal_attention(Q, k_cache, v_cache, tables, [0, 3, 7], [5, 6])) == 7, (
        "query_start_loc [0, 3, 7] with seq_lens [5, 6] is right and gives 7 rows"
    )
    cases = (
        ([0, 3, 6], [5, 6], "ends before the last row: row 6 would never be written"),
        ([0, 8, 7], [9, 6], "decreases: request 1 would have -1 rows"),
        ([0, 3, 7], [2, 6], "request 0 has 3 rows and 2 tokens: it would start at position -1"),
        ([1, 3, 7], [5, 6], "starts at 1: row 0 belongs to nobody"),
        ([0, 7], [7, 6], "two offsets for two requests: three are needed"),
        ([0, 3, 7, 7], [5, 6], "four offsets for two requests: whose is the third part?"),
    )
    for offsets, seq_lens, why in cases:
        try:
            lab.varlen_causal_attention(Q, k_cache, v_cache, tables, offsets, seq_lens)
        except ValueError:
            continue
        except Exception as error:
            why += f" (raised {error!r})"
        pytest.fail(
            f"query_start_loc {offsets}, seq_lens {seq_lens}: {why}. Must raise ValueError",
            pytrace=False,
        )


# --- inside the engine ----------------------------------------------------------------------------

PROMPTS = (
    "A block table maps positions",
    "A block table maps positions to blocks",
    "Every layer reads the cache",
    "A block table maps positions to memory",
)
SETTINGS = {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 24, "dtype": "float64"}


class Recorded:
    """The shipped model on a small pool: every step's batch, and what layer 0 was given and gave.

    19 usable blocks of 4 and a budget of 24 tokens, so that prompts are cut into chunks, prefixes
    are found in the cache and requests are preempted. float64, so that equality does not depend
    on the shapes of the batches.
    """

    def __init__(self, attention=shipped_attention):
        self.calls, self.logits, self.preempted, self.cached = [], [], 0, 0
        self._attention, self._seen = attention, None
        parts = EngineParts(attention=self._record)
        engine = LLMEngine(parts=parts, **SETTINGS)
        engine.observers.append(self._note)
        execute = engine.runner.execute

        def watch(plan):
            logits = execute(plan)
            self.logits.append(logits)
            return logits

        engine.runner.execute = watch
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        results = [engine.generate(list(PROMPTS[i : i + 3]), params) for i in (0, 1)]
        self.tokens = [r.outputs[0].token_ids for group in results for r in group]

    def _note(self, plan):
        self.preempted += len(plan.preempted_req_ids)
        self.cached += sum(plan.num_cached_tokens.values())

    def _record(self, query, layer_cache, batch, scale):
        out = self._attention(query, layer_cache, batch, scale)
        if batch is not self._seen:  # the first layer of a step
            self._seen = batch
            self.calls.append((query.copy(), layer_cache.copy(), batch, scale, np.array(out)))
        return out


@pytest.fixture(scope="module")
def shipped():
    recorded = Recorded()
    chunks = sum(int((np.diff(call[2].query_start_loc) > 1).sum()) for call in recorded.calls)
    found = recorded.preempted, recorded.cached, chunks
    assert min(found) >= 1 and chunks > 6, (
        f"the run must have preemptions, cached tokens and chunks of prompts: {found}"
    )
    return recorded


def test_varlen_on_the_engines_schedule(lab, shipped):
    for step, (query, cache, batch, scale, expected) in enumerate(shipped.calls):
        head = step % query.shape[1]
        kv_head = head * cache.shape[3] // query.shape[1]
        got = lab.varlen_causal_attention(
            query[:, head],
            cache[0, :, :, kv_head],
            cache[1, :, :, kv_head],
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            scale=scale,
        )
        what = (
            f"step {step} of the mini engine, layer 0, head {head}: query_start_loc "
            f"{batch.query_start_loc.tolist()}, seq_lens {batch.seq_lens.tolist()}"
        )
        ends = zip(np.diff(batch.query_start_loc), batch.seq_lens, strict=True)
        positions = np.concatenate([np.arange(stop - count, stop) for count, stop in ends])
        assert_rows(got, expected[:, head], positions, what, 1e-10)


def test_heads_of_a_group_share_a_tile(lab, monkeypatch):
    rng = np.random.default_rng(12)
    calls = []
    attend_tile = lab.attend_tile

    def watch(q, positions, *others, **more):
        calls.append((len(q), np.asarray(positions).tolist()))
        return attend_tile(q, positions, *others, **more)

    batch = Batch([[3, 0, 5], [1, 4, 0]], [0, 10, 11], [11, 6])
    query = rng.standard_normal((11, 4, 8))
    cache = rng.standard_normal((2, 6, 4, 2, 8))
    monkeypatch.setattr(lab, "attend_tile", watch)
    got = lab.paged_attention(query, cache, batch, 0.3)
    for head in range(4):
        for r, (rows, start) in enumerate(((slice(0, 10), 1), (slice(10, 11), 5))):
            K, V = (cache[i, batch.block_tables[r], :, head // 2].reshape(12, 8) for i in (0, 1))
            expected = expected_rows(query[rows, head], K, V, start, scale=0.3)
            what = f"query head {head} reads KV head {head // 2} of 2, request {r}, scale 0.3"
            assert_rows(np.asarray(got)[rows, head], expected, start, what)
    got_calls = sorted(calls)
    first, second = ([p for p in range(*ends) for _ in (0, 1)] for ends in ((1, 9), (9, 11)))
    expected_calls = sorted([(16, first), (4, second), (2, [5, 5])] * 2)
    assert got_calls == expected_calls, (
        "10 prompt tokens from position 1 and a decode at position 5; 4 query heads on 2 KV heads. "
        "A tile of 16 rows holds 8 tokens of both heads of a group, token by token; so per KV head "
        "attend_tile is called for 8 tokens, for 2, and for the decode. One call per query head "
        "would read every block twice.\n"
        f"expected (rows, positions) {expected_calls}\ncame     {got_calls}"
    )


def test_a_group_wider_than_a_tile(lab):
    rng = np.random.default_rng(16)
    query = rng.standard_normal((3, 20, 8))
    cache = rng.standard_normal((2, 2, 4, 1, 8))
    why = "20 query heads on one KV head: the tile has to hold one token of all of them"
    try:
        got = np.asarray(lab.paged_attention(query, cache, Batch([[1, 0]], [0, 3], [6]), 0.3))
    except ValueError as error:
        pytest.fail(
            f"{why}. TILE_ROWS // 20 is 0, and at least one token goes into a tile; raised "
            f"{error!r}",
            pytrace=False,
        )
    K, V = (cache[i, [1, 0], :, 0].reshape(8, 8) for i in (0, 1))
    for head in (0, 15, 16, 19):
        expected = expected_rows(query[:, head], K, V, 3, scale=0.3)
        assert_rows(got[:, head], expected, 3, f"{why}; head {head}")


@pytest.mark.slow
def test_the_engine_runs_on_your_attention(lab, shipped):
    yours = Recorded(lab.paged_attention)
    assert yours.tokens == shipped.tokens, (
        "greedy output of the shipped model in float64, with your attention in every layer, under "
        f"chunking, cached prefixes and {shipped.preempted} preemptions.\n"
        f"expected {shipped.tokens}\ncame     {yours.tokens}"
    )
    worst = max(
        float(np.abs(got - expected).max())
        for got, expected in zip(yours.logits, shipped.logits, strict=True)
    )
    assert worst <= 1e-9, (
        "the logits behind those tokens must agree too; they reach about 30, and four layers let "
        f"roundings grow.\nexpected differences up to 1e-9\ncame     {worst:.3g}"
    )
