"""What lab 02-04 pins: the recurrence, the splits and the bytes on any machine; the kernels in
Triton's interpreter where torch and Triton are installed; the same kernels compiled on a GPU.

Tolerances follow what is rounded. float16 keeps 11 bits: an output between 1 and 2 rounds by up to
0.0005, weights by as much, and 0.001 still refuses an accumulator in float16. bfloat16 keeps 8.
The interpreter cuts bfloat16 off instead of rounding it, so there the bound is twice as wide.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from course.files import load_module

HERE = Path(__file__).parent


def _load_harness():
    return load_module(HERE / "harness.py", "harness")


harness = _load_harness()
Case = harness.Case

INTERPRETED = {"float16": 1e-3, "bfloat16": 1.6e-2, "float32": 1e-5}
COMPILED = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5}


def softmax_attention(scores, values):
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


def tiles_of(scores, values, tile):
    return [(scores[i : i + tile], values[i : i + tile]) for i in range(0, len(scores), tile)]


def walk(lab, scores, values, tile):
    partial = lab.nothing_seen(values.shape[1])
    for some_scores, some_values in tiles_of(scores, values, tile):
        partial = lab.absorb(partial, some_scores, some_values)
    return partial


# --- Part A: the recurrence -----------------------------------------------------------------------


def test_the_recurrence_by_hand(lab):
    ln2 = math.log(2.0)
    partial = lab.absorb(lab.nothing_seen(1), np.array([0.0, ln2]), np.array([[3.0], [6.0]]))
    got = (partial.largest, partial.total, partial.weighted.tolist())
    assert np.allclose([got[0], got[1], got[2][0]], [ln2, 1.5, 7.5]), (
        "scores 0 and ln 2: the largest is ln 2, so the weights are 1/2 and 1; their sum is 1.5 "
        f"and 1/2 x 3 + 1 x 6 = 7.5.\nexpected (0.693, 1.5, [7.5])\ncame     {got}"
    )
    partial = lab.absorb(partial, np.array([3 * ln2]), np.array([[1.0]]))
    got = (partial.largest, partial.total, partial.weighted.tolist())
    assert np.allclose([got[0], got[1], got[2][0]], [3 * ln2, 1.375, 2.875]), (
        "then a score of 3 ln 2: the maximum rises by 2 ln 2, so all that was summed shrinks by "
        "1/4. Sum: 1.5/4 + 1 = 1.375; values: 7.5/4 + 1 = 2.875.\n"
        f"expected (2.079, 1.375, [2.875])\ncame     {got}"
    )
    got = np.asarray(lab.merge([partial])).tolist()
    assert np.allclose(got, [2.875 / 1.375]), (
        f"the output is the weighted values over the total: 2.875 / 1.375 = 2.0909; came {got}"
    )


def test_tiles_do_not_change_the_result(lab):
    rng = np.random.default_rng(0)
    scores, values = 3 * rng.standard_normal(130), rng.standard_normal((130, 8))
    expected = softmax_attention(scores, values)
    for tile in (1, 7, 16, 64, 130):
        got = lab.merge([walk(lab, scores, values, tile)])
        assert np.allclose(got, expected, rtol=0, atol=1e-12), (
            f"130 keys in tiles of {tile}: the result must be that of one softmax over all keys. "
            "When a tile raises the maximum, both the total and the values so far must shrink.\n"
            f"expected {expected[:3]} ...\ncame     {np.asarray(got)[:3]} ..."
        )


def test_scores_far_from_zero(lab):
    rng = np.random.default_rng(1)
    for shift, why in (
        (-1000.0, "all far below 0: a maximum that starts at 0 makes every weight exp(-1000) = 0"),
        (1000.0, "all far above 0: exp(1000) without the maximum is infinite"),
    ):
        scores, values = rng.standard_normal(40) + shift, rng.standard_normal((40, 4))
        expected = softmax_attention(scores, values)
        with np.errstate(all="ignore"):
            got = lab.merge([walk(lab, scores, values, 16)])
        assert np.allclose(got, expected, rtol=0, atol=1e-9), (
            f"scores around {shift:g} ({why}).\nexpected {expected}\ncame     {got}"
        )


def test_splits_merge_to_the_whole(lab):
    rng = np.random.default_rng(2)
    scores, values = 4 * rng.standard_normal(100), rng.standard_normal((100, 4))
    expected = softmax_attention(scores, values)
    for cuts in ((50,), (1, 99), (10, 20, 90)):
        pieces = zip(np.split(scores, cuts), np.split(values, cuts), strict=True)
        partials = [walk(lab, some, rows, 16) for some, rows in pieces]
        got = lab.merge(partials)
        assert np.allclose(got, expected, rtol=0, atol=1e-12), (
            f"100 keys split at {cuts}: each split has a maximum of its own, so totals and values "
            "must be brought to a common one before they are added.\n"
            f"expected {expected}\ncame     {got}"
        )


def test_a_partial_is_not_used_up(lab):
    rng = np.random.default_rng(7)
    scores, values = rng.standard_normal(20), rng.standard_normal((20, 4))
    partial = walk(lab, scores[:10], values[:10], 10)
    outs = [
        np.asarray(lab.merge([lab.absorb(partial, scores[10:], values[10:])])) for _ in range(2)
    ]
    expected = softmax_attention(scores, values)
    assert all(np.allclose(out, expected, rtol=0, atol=1e-12) for out in outs), (
        "the same partial continued twice with the same tile: absorb returns a new partial and "
        f"leaves its arguments as they are.\nexpected twice {expected}\ncame     {outs}"
    )


def test_splits_thousands_apart_merge(lab):
    rng = np.random.default_rng(8)
    values = rng.standard_normal((20, 4))
    scores = np.concatenate([rng.standard_normal(10) - 2000.0, rng.standard_normal(10) + 2000.0])
    expected = softmax_attention(scores, values)
    parts = [walk(lab, scores[:10], values[:10], 10), walk(lab, scores[10:], values[10:], 10)]
    for partials in (parts, parts[::-1]):
        try:
            with np.errstate(all="ignore"):
                got = np.asarray(lab.merge(partials))
        except OverflowError as error:
            got = np.full(4, np.nan)
            pytest.fail(f"bring totals to the largest of all maxima, no other: {error}")
        assert np.allclose(got, expected, rtol=0, atol=1e-12), (
            "two splits whose largest scores lie 4,000 apart: only against the largest of all is "
            f"every exponent at most 0.\nexpected {expected}\ncame     {got}"
        )


def test_an_empty_split_adds_nothing(lab):
    rng = np.random.default_rng(3)
    scores, values = rng.standard_normal(20) - 30.0, rng.standard_normal((20, 4))
    expected = softmax_attention(scores, values)
    full, empty = walk(lab, scores, values, 16), lab.nothing_seen(4)
    for partials in ([full, empty], [empty, full, empty]):
        with np.errstate(all="ignore"):
            got = np.asarray(lab.merge(partials))
        assert np.allclose(got, expected, rtol=0, atol=1e-12), (
            "a request shorter than the longest leaves splits empty (largest -inf, total 0): they "
            f"weigh nothing, and -inf - (-inf) must not occur.\nexpected {expected}\ncame     {got}"
        )


def test_split_attention_equals_softmax(lab):
    rng = np.random.default_rng(4)
    for seq_len in (1, 63, 64, 65, 300):
        q, keys = 2 * rng.standard_normal(16), rng.standard_normal((seq_len, 16))
        values = rng.standard_normal((seq_len, 16))
        expected = softmax_attention(keys @ q / 4.0, values)
        for keys_per_split in (64, 100, 4096):
            got = lab.split_attention(q, keys, values, 64, keys_per_split)
            assert np.allclose(got, expected, rtol=0, atol=1e-12), (
                f"{seq_len} keys, {keys_per_split} per split, tiles of 64, head_dim 16 (scale "
                f"1/4).\nexpected {expected[:3]} ...\ncame     {np.asarray(got)[:3]} ..."
            )


def test_split_attention_works_as_the_kernels_do(lab, monkeypatch):
    rng = np.random.default_rng(5)
    starts, tiles, merged, seen = [], [], [], []
    absorb, merge = lab.absorb, lab.merge

    def watched_absorb(partial, scores, values):
        starts.append(partial.total == 0)
        tiles.append(len(scores))
        seen.extend(np.asarray(scores).tolist())
        return absorb(partial, scores, values)

    def watched_merge(partials):
        merged.append(len(partials))
        return merge(partials)

    monkeypatch.setattr(lab, "absorb", watched_absorb)
    monkeypatch.setattr(lab, "merge", watched_merge)
    [q], (keys, values) = rng.standard_normal((1, 8)), rng.standard_normal((2, 300, 8))
    lab.split_attention(q, keys, values, 64, 128)
    got = (tiles, [i for i, fresh in enumerate(starts) if fresh], merged)
    expected = ([64, 64, 64, 64, 44], [0, 2, 4], [3])
    assert got == expected, (
        "300 keys, 128 per split, tiles of 64: splits of 128, 128 and 44 keys, so tiles of 64, 64 "
        "| 64, 64 | 44; tiles 0, 2 and 4 start from nothing_seen; one merge of three. A split that "
        "went on from the one before could not run beside it.\n"
        f"expected (tiles, fresh starts, merges) {expected}\ncame     {got}"
    )
    assert np.allclose(seen, keys @ q * 8**-0.5, rtol=0, atol=1e-12), (
        "absorb is given the scaled scores themselves. A maximum over all keys taken off before "
        "needs every split to wait for every other one"
    )


# --- Part A: splits, bytes, time ------------------------------------------------------------------


def test_plan_by_hand(lab):
    cases = (
        ((64, 8, 4096, 132), (832, 5), "2,112 programs wanted, 512 without splits: w = 5; 820 keys "
         "are 13 tiles"),
        ((1, 8, 4096, 132), (128, 32), "w = 264 would leave 16 keys each; 128 is the least"),
        ((1, 8, 100, 132), (128, 1), "100 keys fit one split"),
        ((264, 8, 512, 132), (512, 1), "2,112 programs already: w = 1"),
        ((512, 8, 32768, 132), (1024, 32), "w = 1, but 1,024 is the most: a longer split would "
         "still run when all others are done"),
        ((16, 8, 8192, 108), (640, 13), "an A100's 108 SMs: w = ceil(1,728 / 128) = 14; 586 keys "
         "are 10 tiles, and 13 such splits cover 8,192"),
    )  # fmt: skip
    for arguments, expected, why in cases:
        got = lab.plan_splits(*arguments)
        assert tuple(got or ()) == expected, (
            f"plan_splits{arguments} (requests, KV heads, longest, SMs): {why}.\n"
            f"expected (keys_per_split, num_splits) {expected}\ncame     {got}"
        )


def test_every_plan_covers_the_keys(lab):
    for num_seqs in (1, 3, 17, 64, 300):
        for kv_heads in (1, 2, 8):
            for longest in (1, 63, 64, 1000, 4096, 32768):
                got = lab.plan_splits(num_seqs, kv_heads, longest, 132)
                where = f"plan_splits({num_seqs}, {kv_heads}, {longest}, 132) = {got}"
                assert got is not None and got.keys_per_split % lab.TILE == 0, (
                    f"{where}: a split is a whole number of tiles of {lab.TILE}, or its last turn "
                    "would work on keys of the next split"
                )
                assert lab.MIN_KEYS <= got.keys_per_split <= lab.MAX_KEYS, (
                    f"{where}: a split has {lab.MIN_KEYS} to {lab.MAX_KEYS} keys"
                )
                covered = got.keys_per_split * got.num_splits
                assert covered - got.keys_per_split < longest <= covered, (
                    f"{where}: the splits must cover {longest} keys with none left over"
                )


def test_traffic_by_hand(lab):
    got = lab.decode_traffic([4096] * 64, 32, 8, 128, 2, 16, 832)
    expected = (1_073_741_824, 65_536, 1_048_576, 10_567_680)
    assert tuple(got or ()) == expected, (
        "64 requests of 4,096 tokens, 32 query heads on 8 KV heads of 128, 2 bytes, blocks of 16, "
        "832 keys a split: K and V 2 x 262,144 x 8 x 128 x 2 = 1 GiB; 64 x 256 ids of 4 bytes; "
        "64 x 32 x 128 x 2 bytes in and as many out; 64 x 5 splits x 32 heads x 129 fp32 numbers, "
        f"written and read.\nexpected (kv, tables, queries, partials) {expected}\n"
        f"came     {tuple(got or ())}"
    )
    assert got.total == 1_085_423_616, f"their sum is 1,085,423,616; came {got.total}"


def test_traffic_of_ragged_requests(lab):
    got = lab.decode_traffic([1, 16, 17, 1000], 4, 2, 64, 2, 16, 256)
    expected = (2 * 1034 * 2 * 64 * 2, 4 * (1 + 1 + 2 + 63), 2 * 4 * 4 * 64 * 2, 2 * 7 * 4 * 65 * 4)
    assert tuple(got or ()) == expected, (
        "lengths 1, 16, 17, 1000: K and V of 1,034 positions (a kernel reads no unused slot), "
        "1 + 1 + 2 + 63 table entries, 1 + 1 + 1 + 4 splits in use.\n"
        f"expected (kv, tables, queries, partials) {expected}\ncame     {tuple(got or ())}"
    )
    got = lab.decode_traffic([1, 16, 17, 250], 4, 2, 64, 2, 16, 256)
    assert got is not None and got.partials == 0, (
        "one split is enough for the longest: the kernel writes outputs, no partials; "
        f"expected 0, came {got.partials if got else None}"
    )
    wide, narrow = (lab.decode_traffic([512], heads, 2, 64, 2, 16, 512) for heads in (16, 2))
    assert wide.kv == narrow.kv, (
        "16 query heads on 2 KV heads read the same K and V as 2 query heads: that is what the "
        f"grouped tile is for; came {wide.kv} and {narrow.kv}"
    )


def test_traffic_of_other_shapes(lab):
    got = lab.decode_traffic([100, 33], 64, 32, 64, 1, 32, 128)
    expected = (2 * 133 * 32 * 64, 4 * (4 + 2), 2 * 2 * 64 * 64, 0)
    assert tuple(got or ()) == expected, (
        "one byte a number, blocks of 32, 32 KV heads: dtype_bytes counts for K, V and queries, "
        "4 + 2 blocks hold 100 and 33 tokens, and however many KV heads there are, they share one "
        f"reading of the table.\nexpected (kv, tables, queries, partials) {expected}\n"
        f"came     {tuple(got or ())}"
    )


def test_flops_by_hand(lab):
    got = lab.decode_flops([4096] * 64, 32, 128)
    assert got == 4_294_967_296, (
        "262,144 keys x 32 query heads x 128 x (a product and a sum) x 2 products = 2**32; "
        f"expected 4,294,967,296, came {got}"
    )
    got = lab.decode_flops([1, 2], 3, 5)
    assert got == 180, f"3 keys x 3 heads x 5 x 4 = 180; came {got}"


def test_the_slower_half_decides(lab, record_property):
    got = lab.least_microseconds(1_085_423_616, 2**32, 3.35e12, 989e12)
    assert got is not None and abs(got - 324.007) < 0.01, (
        "1,085,423,616 bytes at 3.35e12 a second are 324 microseconds; 2**32 FLOP at 989e12 are "
        f"4.3. The slower one counts.\nexpected 324.007\ncame     {got}"
    )
    got = lab.least_microseconds(1e6, 1e12, 1e12, 1e14)
    assert abs(got - 10_000) < 1e-6, (
        "1 MB at 1e12 B/s is 1 microsecond, 1e12 FLOP at 1e14 are 10,000; they overlap, so the "
        f"time is 10,000; came {got}"
    )
    traffic = lab.decode_traffic([4096] * 64, 32, 8, 128, 2, 16, 832)
    flops = lab.decode_flops([4096] * 64, 32, 128)
    moving = lab.least_microseconds(traffic.total, 0, 3.35e12, 989e12)
    assert moving > lab.least_microseconds(0, flops, 3.35e12, 989e12), (
        "decode attention on an H100's numbers waits for memory"
    )
    record_property("measured.flop_per_byte", flops / traffic.total)
    record_property("measured.partials", 100 * traffic.partials / traffic.total)


# --- Part B: torch --------------------------------------------------------------------------------


def assert_close(got, expected, tolerance, what):
    """Within `tolerance` times max(1, |expected|), everywhere."""
    got = np.asarray(got, dtype=np.float64)
    assert got.shape == expected.shape, f"{what}: expected shape {expected.shape}, came {got.shape}"
    bad = np.argwhere(~(np.abs(got - expected) <= tolerance * np.maximum(1, np.abs(expected))))
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        difference = np.abs(got - expected)
        worst = "NaN" if np.isnan(difference).any() else f"{difference.max():.3g}"
        pytest.fail(
            f"{what}\n{len(bad)} of {got.size} numbers differ from the float64 reference by more "
            f"than {tolerance:g}; the largest difference is {worst}.\n"
            f"first at (request, head, dim) {place}: expected {expected[place]:.6f}, "
            f"came {got[place]:.6f}",
            pytrace=False,
        )


def torch_outputs(lab, case):
    tensors = harness.make_tensors(case)
    outs = [
        lab.paged_attention_torch(
            tensors["query"][i], tensors["k_cache"], tensors["v_cache"],
            tensors["block_tables"][i], length,
        )
        for i, length in enumerate(case.seq_lens)
    ]  # fmt: skip
    for out in outs:
        assert out is not None and out.dtype == tensors["query"].dtype, (
            f"the output has the dtype of q, {tensors['query'].dtype}; came {out}"
        )
    return np.stack([out.double().numpy() for out in outs]), harness.reference(tensors)


@pytest.mark.torch
def test_torch_version_matches_the_reference(lab):
    for case in (
        Case((1, 15, 16, 17, 31, 33, 128, 130), 8, 8),
        Case((33, 128), 8, 2, 128, 32, "bfloat16"),
        Case((130, 17), 6, 2, 64, 16, "float32"),
        Case((130, 17), 6, 2, 64, 16, "float32", interleaved=True),
        Case((500,), 2, 2, seed=3, value_mean=1.0),
    ):
        got, expected = torch_outputs(lab, case)
        assert_close(got, expected, COMPILED[case.dtype], f"torch version, {case}")


@pytest.mark.torch
def test_torch_version_reads_only_the_sequence(lab):
    case = Case((35, 16, 1), unused=float("nan"), foreign_entries=2, dtype="float32")
    try:
        got, expected = torch_outputs(lab, case)
    except IndexError as error:
        pytest.fail(
            "table entries beyond ceil(seq_len / block_size) point outside the cache here, and "
            f"one was followed: {error}",
            pytrace=False,
        )
    assert_close(got, expected, 1e-5, f"unused slots and blocks hold NaN: {case}")


@pytest.mark.torch
def test_torch_version_on_extreme_scores(lab):
    for sign in (1, -1):
        case = Case((130, 40), sign=sign, spread=40.0, seed=2)
        got, expected = torch_outputs(lab, case)
        assert_close(got, expected, 1e-3, f"every score has the sign {sign:+d}: {case}")


# --- Parts C and D: the kernels, interpreted ------------------------------------------------------


def interpreted(lab, version, case, why):
    """Run a version on `case` in Triton's interpreter and compare with float64."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it comes with torch for CUDA on Linux)")
    answer = harness.child(interpret=True).ask(
        {"file": str(lab.__file__), "call": "run", "version": version, "case": case}
    )
    if "skip" in answer:
        pytest.skip(answer["skip"])
    what = f"version {version}, interpreted: {why}.\n{case}"
    if "error" in answer:
        pytest.fail(f"{what}\n{answer['error']}", pytrace=False)
    assert_close(answer["out"], answer["expected"], INTERPRETED[case.dtype], what)


@pytest.mark.torch
def test_version_one_matches_the_reference(lab):
    why = "lengths around block borders"
    interpreted(lab, 1, Case((1, 15, 16, 17, 31, 33, 128, 130), 2, 1), why)
    interpreted(lab, 1, Case((33, 70), 4, 1, 128, 32, "bfloat16"), "blocks of 32, head size 128")
    interpreted(lab, 1, Case((40, 5), 6, 2, 64, 16, "float32"), "float32, groups of 3")


@pytest.mark.torch
def test_version_one_reads_only_the_sequence(lab):
    case = Case((35, 16, 1), unused=float("nan"), foreign_entries=2)
    interpreted(lab, 1, case, "unused slots hold NaN: mask K and V when loading, with other=0")
    interpreted(
        lab, 1, Case((40, 3), interleaved=True), "strides that are not those of a packed cache"
    )


@pytest.mark.torch
def test_version_one_on_extreme_scores(lab):
    for sign in (1, -1):
        case = Case((130, 40), sign=sign, spread=40.0, seed=2)
        interpreted(lab, 1, case, f"every score has the sign {sign:+d}")


@pytest.mark.torch
def test_version_one_accumulates_in_float32(lab):
    case = Case((500,), 2, 2, seed=3, value_mean=1.0)
    interpreted(lab, 1, case, "sums that grow to hundreds; float16 counts them in halves")


@pytest.mark.torch
def test_version_two_matches_the_reference(lab):
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim, block_size in ((64, 16), (128, 32)):
            case = Case((1, 16, 17, 130), 4, 2, head_dim, block_size, dtype)
            interpreted(lab, 2, case, "one or two splits")


@pytest.mark.torch
def test_version_two_groups_of_every_size(lab):
    for group in range(1, 9):
        case = Case((70, 130), 2 * group, 2, seed=group, dtype="float32")
        interpreted(lab, 2, case, f"{group} query heads share a KV head")


@pytest.mark.torch
def test_version_two_merges_ragged_splits(lab):
    for per_split in (64, 128, 1024):
        case = Case((1, 64, 65, 129, 300), seed=4, keys_per_split=per_split)
        interpreted(lab, 2, case, f"{per_split} keys per split, short requests beside long ones")
    many = Case((1200, 3), 2, 1, seed=5, keys_per_split=64)
    interpreted(lab, 2, many, "19 splits: more than one CHUNK to merge")


@pytest.mark.torch
def test_version_two_reads_only_the_sequence(lab):
    for per_split in (64, None):
        case = Case((35, 150, 1), unused=float("nan"), foreign_entries=2, keys_per_split=per_split)
        interpreted(lab, 2, case, "unused slots hold NaN, foreign table entries lead nowhere")
    interpreted(
        lab, 2, Case((40, 3), interleaved=True), "strides that are not those of a packed cache"
    )


@pytest.mark.torch
def test_version_two_on_extreme_scores(lab):
    for sign in (1, -1):
        case = Case((130, 40), sign=sign, spread=40.0, seed=2, keys_per_split=64)
        interpreted(lab, 2, case, f"every score has the sign {sign:+d}")


@pytest.mark.torch
def test_version_two_accumulates_in_float32(lab):
    case = Case((900,), 2, 2, seed=6, value_mean=1.0, keys_per_split=1024)
    interpreted(lab, 2, case, "sums that grow to hundreds; float16 counts them in halves")


@pytest.mark.torch
def test_places_do_not_fit_32_bits(lab):
    for version in (1, 2):
        case = Case((40,), 2, 1, far=True)
        interpreted(lab, version, case, "block id x elements per block exceeds 2**31")


@pytest.mark.torch
def test_kernels_compile_for_an_h100(lab):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it comes with torch for CUDA on Linux)")
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 3):
        pytest.skip(f"triton {version} describes its arguments to the compiler in another way")
    split = {"GROUP": 4, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "TILE": 64, "ROWS": 16}
    for name, constants in (
        ("one_head_kernel", {"GROUP": 4, "BLOCK_SIZE": 16, "HEAD_DIM": 128}),
        ("merge_kernel", {"HEAD_DIM": 128, "CHUNK": 16}),
        ("split_kernel", {**split, "UPCAST": False}),
    ):
        answer = harness.child(interpret=False).ask(
            {
                "file": str(lab.__file__), "call": "compile", "name": name, "dtype": "fp16",
                "constants": constants,
            }
        )  # fmt: skip
        assert "ptx" in answer, (
            f"{name} must compile for a GPU of compute capability 9.0. The interpreter takes more "
            f"Python than the compiler does.\n{answer.get('error')}"
        )
    ptx = answer["ptx"]
    assert "mma.sync" in ptx, (
        "split_kernel's products must run on the tensor cores (mma instructions in the PTX): "
        "tl.dot on 16-bit operands"
    )
    wide = [line for line in ptx.splitlines() if "cp.async" in line and "0x10" in line]
    assert wide, (
        "split_kernel must fetch K and V asynchronously, 16 bytes a thread (cp.async in the PTX): "
        "row places must be a multiple of a stride plus tl.arange over the head, in one tl.load"
    )


@pytest.mark.torch
def test_the_run_script_without_a_gpu(lab):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it comes with torch for CUDA on Linux)")
    job = {"file": str(lab.__file__), "call": "main", "script": str(HERE / "run.py")}
    job["arguments"] = ["--dry-run", "--file", str(lab.__file__)]
    answer = harness.child(interpret=True).ask(job)
    assert "printed" in answer, f"run.py --dry-run must end well; it said:\n{answer.get('error')}"
    for word in ("v1", "v2", "sdpa", "splits of", "not measured"):
        assert word in answer["printed"], (
            f"run.py --dry-run must print {word!r}; it printed:\n{answer['printed']}"
        )


# --- Parts C and D: the kernels, compiled ---------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32])
def test_both_versions_on_a_gpu(lab, gpu_device, dtype, head_dim, block_size):
    for group in range(1, 9):
        case = Case(
            (1, 15, 16, 17, 130, 1000, 4096), 2 * group, 2, head_dim, block_size, dtype,
            seed=group, unused=float("nan"), foreign_entries=3,
        )  # fmt: skip
        tensors = harness.make_tensors(case, gpu_device)
        expected = harness.reference(tensors)
        for version in (1, 2):
            got = harness.run_version(lab, version, case, tensors).double().cpu().numpy()
            assert_close(got, expected, COMPILED[dtype], f"version {version} on the GPU: {case}")


@pytest.mark.gpu
def test_long_and_ragged_on_a_gpu(lab, gpu_device):
    case = Case((1, 32768, 77, 9000, 20000, 16), 32, 8, 128, 16, "float16", unused=float("nan"))
    tensors = harness.make_tensors(case, gpu_device)
    expected = harness.reference(tensors)
    for version in (1, 2):
        got = harness.run_version(lab, version, case, tensors).double().cpu().numpy()
        assert_close(got, expected, 1e-3, f"version {version} on the GPU: {case}")
