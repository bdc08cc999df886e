"""What lab 02-06 pins: paging moves keys and values about and changes nothing else.

Tolerance 1e-12 in float64. Inputs are standard normal and an output is a weighted mean, so values
stay below 10, and two orders of adding a few hundred of them differ by some hundred times 1e-16.
"""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from conformance import parts
from conformance.features.attention import paged_attention as recorder
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.attention import paged_attention as shipped_attention

BLOCK_SIZE = 16
TOLERANCE = 1e-12


def dense(q, k, v, scale=None):
    """Textbook attention on contiguous K and V [seq_len, kv_heads, dim] for one query."""
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("hd,shd->hs", q, k) * (q.shape[1] ** -0.5 if scale is None else scale)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hs,shd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def paged_case(seed, seq_len, num_heads=4, num_kv_heads=4, head_dim=8, fill=0.0, spare_blocks=0):
    """A sequence scattered over a cache: q, contiguous k and v, both caches and the table.

    Places that belong to no token hold `fill`. Written here by plain loops, not by the lab.
    """
    rng = np.random.default_rng(seed)
    needed = -(-seq_len // BLOCK_SIZE)
    num_blocks = needed + spare_blocks + 3
    table = rng.permutation(np.arange(1, num_blocks))[: needed + spare_blocks].tolist()
    q = rng.standard_normal((num_heads, head_dim))
    k, v = rng.standard_normal((2, seq_len, num_kv_heads, head_dim))
    k_cache, v_cache = np.full((2, num_blocks * BLOCK_SIZE, num_kv_heads, head_dim), float(fill))
    for position in range(seq_len):
        slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        k_cache[slot], v_cache[slot] = k[position], v[position]
    return q, k, v, k_cache, v_cache, table


def largest_difference(got, expected) -> float:
    """Largest absolute difference; infinite where shapes differ or a value is no number."""
    got = np.asarray(got, dtype=float)
    if got.shape != expected.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - expected).max())


# --- the write map --------------------------------------------------------------------------------


def test_slot_mapping_formula(lab):
    cases = (
        ((0, 3), [64, 65, 66], "block 4 begins at slot 4 x 16 = 64"),
        ((14, 4), [78, 79, 16, 17], "position 16 is the first of the second block, which is 1"),
        ((35, 1), [115], "position 35 is offset 3 of the third block: 7 x 16 + 3"),
        ((47, 1), [127], "position 47 is the last slot of the third block"),
        ((20, 0), [], "no tokens, no slots"),
    )
    for (start, count), expected, why in cases:
        got = lab.build_slot_mapping([4, 1, 7], 16, start, count)
        assert isinstance(got, np.ndarray) and got.dtype == np.int64, (
            f"a slot mapping is an int64 array (a slot may exceed 2**31); came {got!r}"
        )
        assert got.tolist() == expected, (
            f"table [4, 1, 7], block size 16, start {start}, {count} tokens: {why}.\n"
            f"expected {expected}\ncame     {got.tolist()}"
        )
    got = lab.build_slot_mapping(np.array([2, 5, 3], dtype=np.int32), 4, 3, 6).tolist()
    assert got == [11, 20, 21, 22, 23, 12], (
        "table [2, 5, 3] as int32, block size 4, start 3, 6 tokens: slot 11 ends block 2, four "
        f"slots of block 5, one of block 3.\nexpected [11, 20, 21, 22, 23, 12]\ncame     {got}"
    )


def test_slots_are_counted_in_64_bits(lab):
    table = np.array([2**28, 1], dtype=np.int32)  # the dtype tables have, in the engine and in vLLM
    got = lab.build_slot_mapping(table, 16, 15, 2).tolist()
    assert got == [2**32 + 15, 16], (
        "block 2**28 of 16 slots begins at slot 2**32. Ids fit into int32, slots need not: widen "
        f"before you multiply.\nexpected {[2**32 + 15, 16]}\ncame     {got}"
    )


def test_a_token_beyond_the_table_is_refused(lab):
    got = lab.build_slot_mapping([4, 1, 7], 16, 40, 8).tolist()
    assert got == list(range(120, 128)), f"positions 40 to 47 still fit; came {got}"
    for start, count, why in ((48, 1, "one past the end"), (40, 9, "the last of nine")):
        try:
            got = lab.build_slot_mapping([4, 1, 7], 16, start, count)
        except IndexError:
            continue
        pytest.fail(
            f"three blocks of 16 hold positions 0 to 47. start={start}, {count} tokens ({why}) "
            f"must raise IndexError: any slot returned belongs to somebody else.\ncame {got}"
        )
    for start, count in ((-1, 2), (3, -1)):
        try:
            got = lab.build_slot_mapping([4, 1, 7], 16, start, count)
        except ValueError:
            continue
        pytest.fail(
            f"start={start}, num_tokens={count} must raise ValueError: numpy takes a negative "
            f"index from the end, so the mistake would pass unseen.\ncame {got}"
        )


def test_write_then_gather_round_trips(lab):
    rng = np.random.default_rng(0)
    new_k, new_v = rng.standard_normal((2, 35, 2, 8))
    k_cache, v_cache = np.zeros((2, 10 * BLOCK_SIZE, 2, 8))
    slots = lab.build_slot_mapping([4, 1, 7], BLOCK_SIZE, 0, 35)
    lab.write_kv(k_cache, v_cache, new_k, new_v, slots)
    for position, slot in ((0, 64), (15, 79), (16, 16), (34, 114)):
        assert np.array_equal(k_cache[slot], new_k[position]), (
            f"K of position {position} must lie in slot {slot} of the K cache after the write"
        )
        assert np.array_equal(v_cache[slot], new_v[position]), (
            f"V of position {position} must lie in slot {slot} of the V cache after the write"
        )


def test_chunked_writes_equal_one_shot(lab):
    rng = np.random.default_rng(1)
    new_k, new_v = rng.standard_normal((2, 40, 2, 8))
    at_once = np.zeros((2, 10 * BLOCK_SIZE, 2, 8))
    chunked = np.zeros_like(at_once)
    table = [9, 2, 5]
    lab.write_kv(*at_once, new_k, new_v, lab.build_slot_mapping(table, BLOCK_SIZE, 0, 40))
    for start, stop in ((0, 13), (13, 29), (29, 39), (39, 40)):
        slots = lab.build_slot_mapping(table, BLOCK_SIZE, start, stop - start)
        lab.write_kv(*chunked, new_k[start:stop], new_v[start:stop], slots)
    assert at_once.any(), "write_kv left the caches empty; it must change them in place"
    different = np.flatnonzero((at_once != chunked).any(axis=(0, 2, 3)))
    assert different.size == 0, (
        "40 tokens written as 13 + 16 + 10 + 1 must leave the same cache as one write. A chunk "
        f"that starts at position 13 begins in the middle of a block.\nslots that differ: "
        f"{different.tolist()}"
    )


def test_only_mapped_slots_change(lab):
    k_cache, v_cache = np.full((2, 6 * BLOCK_SIZE, 2, 4), 7.0)
    slots = np.array([33, 32, 80], dtype=np.int64)
    lab.write_kv(k_cache, v_cache, np.ones((3, 2, 4)), np.full((3, 2, 4), 2.0), slots)
    for name, cache, value in (("K", k_cache, 1.0), ("V", v_cache, 2.0)):
        changed = np.flatnonzero((cache != 7.0).any(axis=(1, 2))).tolist()
        assert changed == [32, 33, 80], (
            f"three tokens go to slots 33, 32 and 80 of the {name} cache, and nothing else may "
            f"change: other slots hold other requests' tokens.\nexpected [32, 33, 80]\n"
            f"came     {changed}"
        )
        assert (cache[[32, 33, 80]] == value).all(), (
            f"the {name} cache must hold the new {name}, all heads of it; came {cache[32]}"
        )


def test_negative_slots_are_skipped(lab):
    k_cache, v_cache = np.zeros((2, 3 * BLOCK_SIZE, 1, 2))
    new = np.arange(1.0, 9.0).reshape(4, 1, 2)
    lab.write_kv(k_cache, v_cache, new, -new, np.array([20, -1, 21, -1]))
    for name, cache, expected in (("K", k_cache, new), ("V", v_cache, -new)):
        written = np.flatnonzero(cache.any(axis=(1, 2))).tolist()
        assert written == [20, 21], (
            "slots [20, -1, 21, -1]: the second and fourth token are padding and go nowhere. In "
            "numpy index -1 is the last row, so unskipped padding lands in the last block, which "
            f"is somebody's ({name} cache).\nexpected rows [20, 21]\ncame     rows {written}"
        )
        assert np.array_equal(cache[[20, 21]], expected[[0, 2]]), (
            f"slot 20 gets token 0 and slot 21 gets token 2 ({name} cache); "
            f"came {cache[[20, 21]].tolist()}"
        )
    k_cache, v_cache = np.zeros((2, 3 * BLOCK_SIZE, 1, 2))
    lab.write_kv(k_cache, v_cache, new, new, np.array([0, -2, 5, -(2**40)]))
    written = np.flatnonzero(k_cache.any(axis=(1, 2))).tolist()
    assert written == [0, 5], (
        "slots [0, -2, 5, -2**40]: every negative slot is padding, not -1 alone, and slot 0 is a "
        f"slot like any other.\nexpected rows [0, 5]\ncame     rows {written}"
    )


# --- the read map ---------------------------------------------------------------------------------


def test_two_positions_by_hand(lab):
    k_cache, v_cache = np.zeros((2, 4 * 2, 1, 4))
    k_cache[6, 0, 0] = 1.0  # table [3, 1], block size 2: positions 0, 1, 2 are slots 6, 7, 2
    v_cache[6, 0], v_cache[7, 0], v_cache[2, 0] = 4.0, 8.0, 100.0
    q = np.array([[2 * np.log(3.0), 0.0, 0.0, 0.0]])
    got = np.asarray(lab.attend_one(q, k_cache, v_cache, [3, 1], 2, 2))
    assert got.shape == (1, 4), f"one head of 4 numbers in, one out: (1, 4); came {got.shape}"
    assert np.allclose(got, 5.0, atol=TOLERANCE), (
        "scores: (2 ln 3) / sqrt(4) = ln 3 for position 0 and 0 for position 1, so the weights are "
        "3/4 and 1/4, and 3/4 x 4 + 1/4 x 8 = 5. Position 2 is not part of seq_len 2.\n"
        f"expected 5\ncame     {got[0].tolist()}"
    )
    got = np.asarray(lab.attend_one(q, k_cache, v_cache, [3, 1], 3, 2))
    assert np.allclose(got, 24.0, atol=1e-10), (
        "with seq_len 3 the weights are 3/5, 1/5, 1/5: 12/5 + 8/5 + 100/5 = 24.\n"
        f"expected 24\ncame     {got[0].tolist()}"
    )


def test_paged_matches_dense_exactly(lab):
    for seed, seq_len in enumerate((1, 2, 15, 16, 17, 31, 33, 64, 130)):
        q, k, v, k_cache, v_cache, table = paged_case(seed, seq_len)
        got = lab.attend_one(q, k_cache, v_cache, table, seq_len, BLOCK_SIZE)
        difference = largest_difference(got, dense(q, k, v))
        assert difference <= TOLERANCE, (
            f"{seq_len} tokens over blocks {table}: attention through the table must equal "
            f"attention on contiguous K and V to {TOLERANCE:g}, since only addresses differ.\n"
            f"largest difference: {difference:.3g}"
        )


def test_partial_tail_block_is_masked(lab):
    for seed in range(4):
        q, k, v, k_cache, v_cache, table = paged_case(seed, 35)
        expected = dense(q, k, v)
        tail = [table[2] * BLOCK_SIZE + offset for offset in range(3, BLOCK_SIZE)]
        for k_poison, v_poison in ((0.0, 1e6), (np.nan, np.nan)):
            k_cache[tail], v_cache[tail] = k_poison, v_poison
            got = lab.attend_one(q, k_cache, v_cache, table, 35, BLOCK_SIZE)
            difference = largest_difference(got, expected)
            assert difference <= TOLERANCE, (
                "35 tokens fill 2 blocks and 3 slots of a third. The other 13 slots were filled "
                f"with K={k_poison}, V={v_poison}, and the output changed. Unused slots hold what "
                "the block's last owner left there; not even NaN may come through, and 0 x NaN is "
                f"NaN.\nlargest difference: {difference:.3g}"
            )


def test_a_weight_of_zero_does_not_remove_nan(lab, record_property):
    q, k, v, k_cache, v_cache, table = paged_case(2, 35, fill=np.nan)
    weights = np.append(np.full(35, 1 / 35), 0.0)
    masked = weights @ np.append(v[:, 0, 0], np.nan)  # what a mask on the scores leaves to do
    got = np.asarray(lab.attend_one(q, k_cache, v_cache, table, 35, BLOCK_SIZE), dtype=float)
    difference = largest_difference(got, dense(q, k, v))
    assert np.isnan(masked) and difference <= TOLERANCE, (
        "the unused slots hold NaN. A weight of 0 for them gives 0 x NaN = NaN in every sum, so "
        f"only rows that are not read do no harm.\nlargest difference: {difference:.3g}"
    )
    record_property("measured.masked", "NaN" if np.isnan(masked) else "right")


def test_indirection_is_the_identity(lab, record_property):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 8))
    k, v = rng.standard_normal((2, 50, 2, 8))
    outputs = []
    for table in ([1, 2, 3, 4], [9, 3, 11, 6]):
        k_cache, v_cache = np.zeros((2, 12 * BLOCK_SIZE, 2, 8))
        slots = lab.build_slot_mapping(table, BLOCK_SIZE, 0, 50)
        lab.write_kv(k_cache, v_cache, k, v, slots)
        outputs.append(np.asarray(lab.attend_one(q, k_cache, v_cache, table, 50, BLOCK_SIZE)))
    assert np.array_equal(outputs[0], outputs[1]), (
        "the same tokens in blocks [1, 2, 3, 4] and in [9, 3, 11, 6] must give the same bits: the "
        "same numbers are added in the same order.\nlargest difference: "
        f"{np.abs(outputs[0] - outputs[1]).max():.3g}"
    )
    assert largest_difference(outputs[0], dense(q, k, v)) <= TOLERANCE, (
        "both layouts agree with each other, but not with attention on contiguous K and V"
    )
    record_property(
        "measured.layouts",
        "the same bits" if np.array_equal(*outputs) else "equal up to rounding",
    )


def test_an_extra_table_block_is_ignored(lab):
    q, k, v, k_cache, v_cache, table = paged_case(5, 20, spare_blocks=2, fill=np.nan)
    got = lab.attend_one(q, k_cache, v_cache, table, 20, BLOCK_SIZE)
    difference = largest_difference(got, dense(q, k, v))
    assert difference <= TOLERANCE, (
        "20 tokens need 2 blocks; the table has 4, two of them handed out ahead of use. seq_len "
        f"says how much to read, not the table's length.\nlargest difference: {difference:.3g}"
    )
    beyond = [*table[:2], 10**6, 10**6]
    try:
        got = lab.attend_one(q, k_cache, v_cache, beyond, 20, BLOCK_SIZE)
    except IndexError:
        pytest.fail(
            "entries of the table beyond ceil(seq_len / block_size) mean nothing and must not be "
            "followed; here they were 1,000,000, and following them raised IndexError",
            pytrace=False,
        )
    assert largest_difference(got, dense(q, k, v)) <= TOLERANCE, (
        "table entries beyond the sequence's end changed the output"
    )


def test_large_scores_do_not_overflow(lab):
    for sign in (1.0, -1.0):
        q, k, v, k_cache, v_cache, table = paged_case(6, 33)
        k_cache, k = k_cache + sign * 500.0, k + sign * 500.0
        q = np.abs(q)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            got = lab.attend_one(q, k_cache, v_cache, table, 33, BLOCK_SIZE)
        difference = largest_difference(got, dense(q, k, v))
        assert difference <= 1e-9, (
            f"scores near {sign * 1e3:g}: exp(1000) is infinite and exp(-1000) is 0 in float64, so "
            "a plain softmax gives NaN. Subtract the largest score first; the weights stay the "
            f"same.\nlargest difference: {difference:.3g}"
        )
    q, k, v, k_cache, v_cache, table = paged_case(6, 33)
    k[:-1], k[-1] = -1000.0 * q, 1000.0 * q
    lab.write_kv(k_cache, v_cache, k, v, lab.build_slot_mapping(table, BLOCK_SIZE, 0, 33))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        got = lab.attend_one(q, k_cache, v_cache, table, 33, BLOCK_SIZE)
    difference = largest_difference(got, v[-1])
    assert difference <= TOLERANCE, (
        "the last position's score is thousands above all others, so the output is its V. Only the "
        "largest score may be subtracted: below the first one or the mean, exp still overflows.\n"
        f"largest difference: {difference:.3g}"
    )


def test_query_heads_share_kv_heads(lab):
    for num_heads, num_kv_heads in ((4, 2), (8, 2), (6, 1), (6, 3)):
        q, k, v, k_cache, v_cache, table = paged_case(8, 21, num_heads, num_kv_heads)
        got = lab.attend_one(q, k_cache, v_cache, table, 21, BLOCK_SIZE)
        difference = largest_difference(got, dense(q, k, v))
        assert difference <= TOLERANCE, (
            f"{num_heads} query heads, {num_kv_heads} KV heads: neighbours share, so head h reads "
            f"KV head h // {num_heads // num_kv_heads}.\nlargest difference: {difference:.3g}"
        )
    q, k, v, k_cache, v_cache, table = paged_case(9, 21)
    got = lab.attend_one(q, k_cache, v_cache, table, 21, BLOCK_SIZE, 0.5)
    difference = largest_difference(got, dense(q, k, v, 0.5))
    assert difference <= TOLERANCE, (
        "a scale that is given (0.5) replaces the default head_dim ** -0.5.\n"
        f"largest difference: {difference:.3g}"
    )


def test_a_scale_of_zero_is_a_scale(lab):
    q, _, v, k_cache, v_cache, table = paged_case(9, 21)
    got = lab.attend_one(q, k_cache, v_cache, table, 21, BLOCK_SIZE, 0.0)
    difference = largest_difference(got, v.mean(axis=0))
    assert difference <= TOLERANCE, (
        "scale 0.0 makes all scores 0 and the output the mean of V. Only None stands for the "
        f"default; 0.0 is false in Python, too.\nlargest difference: {difference:.3g}"
    )


def test_reading_changes_nothing_and_hides_nothing(lab):
    q, _, _, k_cache, v_cache, table = paged_case(11, 35, fill=np.nan)
    before = [array.copy() for array in (q, k_cache, v_cache)]
    lab.attend_one(q, k_cache, v_cache, table, 35, BLOCK_SIZE)
    arrays = (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
    for (name, array), old in zip(arrays, before, strict=True):
        assert np.array_equal(array, old, equal_nan=True), (
            f"attend_one must not change {name}: other heads, layers and requests read it after "
            "you, and a slot you clean up is somebody's"
        )
    slot = table[1] * BLOCK_SIZE + 4  # position 20
    v_cache[slot] = np.nan
    got = np.asarray(lab.attend_one(q, k_cache, v_cache, table, 35, BLOCK_SIZE))
    assert np.isnan(got).all(), (
        "position 20 belongs to the sequence and its V is NaN: the output is NaN. Turned into 0 it "
        f"hides a broken layer behind a plausible text\nexpected NaN\ncame     {got.tolist()}"
    )


def test_memory_follows_the_sequence_not_the_cache(lab):
    q, _, _, k_cache, v_cache, table = paged_case(12, 20)
    layer_cache = np.zeros((2, 4096, BLOCK_SIZE, 4, 8))  # 2 x 16 MiB
    big_k, big_v = layer_cache.reshape(2, -1, 4, 8)
    big_k[: len(k_cache)], big_v[: len(v_cache)] = k_cache, v_cache
    batch = SimpleNamespace(
        block_tables=np.array([table]),
        query_start_loc=np.array([0, 1]),
        positions=np.array([19]),
        seq_lens=np.array([20]),
        block_size=BLOCK_SIZE,
        num_reqs=1,
    )
    for name, call in (
        ("attend_one", lambda: lab.attend_one(q, big_k, big_v, table, 20, BLOCK_SIZE)),
        ("paged_attention", lambda: lab.paged_attention(q[None], layer_cache, batch, 8**-0.5)),
    ):
        tracemalloc.start()
        try:
            got = call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert got is not None and peak < 2**20, (
            f"{name}, 20 tokens of 512 bytes K and V in a cache of 32 MiB: rows of the sequence "
            "are gathered, and the cache stays where it is. It fills the GPU: there is no room for "
            f"a second one, and no time to copy it per layer.\nexpected below 1 MiB\n"
            f"came     {peak / 2**20:.1f} MiB"
        )


def test_the_output_has_the_dtype_of_the_query(lab):
    q, k, v, k_cache, v_cache, table = paged_case(10, 21)
    q, k_cache, v_cache = (array.astype(np.float32) for array in (q, k_cache, v_cache))
    got = lab.attend_one(q, k_cache, v_cache, table, 21, BLOCK_SIZE)
    assert got.dtype == np.float32, (
        "float32 in, float32 out: an output that is wider makes everything behind it wider, at "
        f"twice the memory.\nexpected float32\ncame     {got.dtype}"
    )
    difference = largest_difference(got, dense(q.astype(float), k, v))
    assert difference <= 1e-5, (
        f"and the values are those of float64 up to rounding.\nlargest difference: {difference:.3g}"
    )
    narrow = [cache.astype(np.float16) for cache in (k_cache, v_cache)]
    got = lab.attend_one(q, *narrow, table, 21, BLOCK_SIZE)
    assert got.dtype == np.float32, (
        "float32 queries over a float16 cache: a cache may be narrower than the model, and what "
        f"goes on through the model is as wide as q.\nexpected float32\ncame     {got.dtype}"
    )


# --- inside the engine ----------------------------------------------------------------------------

PROMPTS = (
    "The scheduler decides which requests run and how many tokens each of them gets. ",
    "The scheduler decides which requests run and how many blocks each of them holds. ",
    "A block is",
)


class Watched:
    """The shipped model's run on a small pool, step by step, with what each step was given.

    19 usable blocks and a budget of 40 tokens: prompts are cut into chunks, prefixes are shared
    and decodes run beside prefills. float64, so that equality does not depend on batch shapes.
    """

    def __init__(self, attention=shipped_attention) -> None:
        self.calls: list[tuple] = []
        self.batches: list = []
        self.logits: list[np.ndarray] = []
        self._attention = attention
        self.engine = LLMEngine(
            num_blocks=20,
            block_size=16,
            max_num_batched_tokens=40,
            dtype="float64",
            parts=EngineParts(attention=self._record),
        )
        execute = self.engine.runner.execute

        def watched(plan):
            logits = execute(plan)
            self.logits.append(logits)
            return logits

        self.engine.runner.execute = watched
        results = self.engine.generate(list(PROMPTS), SamplingParams(max_tokens=8))
        self.token_ids = [result.outputs[0].token_ids for result in results]

    def _record(self, query, layer_cache, batch, scale):
        out = self._attention(query, layer_cache, batch, scale)
        if len(self.batches) == 0 or self.batches[-1] is not batch:  # the first layer of a step
            self.batches.append(batch)
            self.calls.append((query.copy(), layer_cache.copy(), batch, scale, out.copy()))
        return out


def test_slots_of_the_mini_engine(lab):
    watched = Watched()
    for step, batch in enumerate(watched.batches):
        for i in range(batch.num_reqs):
            first, stop = batch.query_start_loc[i], batch.query_start_loc[i + 1]
            start = int(batch.positions[first])
            table = batch.block_tables[i]
            got = lab.build_slot_mapping(table, batch.block_size, start, int(stop - first))
            expected = batch.slot_mapping[first:stop].tolist()
            assert np.asarray(got).tolist() == expected, (
                f"step {step}, request {i}: {stop - first} tokens from position {start}, table "
                f"{table.tolist()}; the engine writes them to these slots.\n"
                f"expected {expected}\ncame     {np.asarray(got).tolist()}"
            )


def test_attention_of_the_shipped_model(lab):
    watched = Watched()
    query, cache, batch, scale, _ = watched.calls[2]
    expected = shipped_attention(query, cache, batch, 3 * scale)
    calls = [*enumerate(watched.calls), (2, (query, cache, batch, 3 * scale, expected))]
    for step, (query, cache, batch, scale, expected) in calls:
        got = lab.paged_attention(query, cache, batch, scale)
        got = np.zeros(0) if got is None else np.asarray(got)
        assert got.shape == expected.shape, (
            f"step {step}: one output per query token and head, {expected.shape}; came {got.shape}"
        )
        worst = np.abs(got - expected).max(axis=(1, 2))
        worst = np.where(np.isnan(worst), np.inf, worst)
        token = int(worst.argmax())
        request = int(np.searchsorted(batch.query_start_loc, token, side="right")) - 1
        assert worst[token] <= TOLERANCE, (
            f"step {step}, first layer of the shipped model, scale {scale:g}: query token {token} "
            f"of {len(query)} belongs to request {request} and sits at position "
            f"{batch.positions[token]}, so it sees {batch.positions[token] + 1} positions of that "
            f"request's table.\nlargest difference there: {worst[token]:.3g}"
        )


def test_it_answers_what_vllms_kernel_answers(lab):
    for case in parts.load("paged_attention"):
        query, cache, batch, scale = recorder.make(case)
        expected = recorder.output_of(case)
        difference = largest_difference(lab.paged_attention(query, cache, batch, scale), expected)
        assert difference <= 1e-5, (
            f"{case['what']}: what the attention kernel of vLLM v0.22.1's CPU build answered, in "
            f"float32. Query lengths {case['query_lens']}, sequence lengths {case['seq_lens']}, "
            f"{case['num_heads']} heads over {case['kv']}, blocks of {case['block_size']}. Outputs "
            "reach 3.6, and two orders of adding in float32 leave them about 1e-6 apart. Slots "
            f"that no request may read hold 10,000.\nlargest difference: {difference:.3g}"
        )


@pytest.mark.slow
def test_the_engine_runs_on_your_attention(lab):
    shipped, yours = Watched(), Watched(lab.paged_attention)
    assert yours.token_ids == shipped.token_ids, (
        "greedy output of the shipped model, in float64, with your attention in every layer.\n"
        f"expected {shipped.token_ids}\ncame     {yours.token_ids}"
    )
    for step, (got, expected) in enumerate(zip(yours.logits, shipped.logits, strict=True)):
        difference = largest_difference(got, expected)
        assert difference <= 1e-9, (
            f"step {step}: the logits behind those tokens must agree too. Logits reach about 30, "
            f"and four layers let roundings grow, so 1e-9.\nlargest difference: {difference:.3g}"
        )
