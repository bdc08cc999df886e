"""What lab 04-04 pins: partials merge exactly, in any order and any grouping; empty ones vanish.

float64, inputs of order 1: 1e-12 holds for any order of summation. The tests at the end compare the
given Triton kernels with the lab's own partials, interpreted on a CPU or compiled on a GPU.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from course.files import load_module
from labkit.modules import sibling

HERE = Path(__file__).parent
TOLERANCE = 1e-12
LN2 = math.log(2.0)


def dense(q, K, V):
    scores = K @ q / math.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ V / weights.sum()


def sequence(n, seed=0, d=8, d_v=5, spread=1.0):
    rng = np.random.default_rng(seed)
    return (
        spread * rng.standard_normal(d),
        rng.standard_normal((n, d)),
        rng.standard_normal((n, d_v)),
    )


def largest_difference(got, expected):
    """Largest absolute difference; infinite for another shape or a value that is no number."""
    got = np.asarray(got if got is not None else [], dtype=float)
    expected = np.asarray(expected, dtype=float)
    if got.shape != expected.shape or not np.isfinite(got).all():
        return math.inf
    return float(np.abs(got - expected).max(initial=0.0))


def parts_of(lab, q, K, V, cuts):
    pieces = zip(np.split(K, cuts), np.split(V, cuts), strict=True)
    return [lab.attend_partial(q, keys, values) for keys, values in pieces]


# --- the worked example ---------------------------------------------------------------------------


def halves(lab):
    K, V = np.zeros((4, 4)), np.zeros((4, 1))
    K[:, 0], V[:, 0] = np.arange(4) * LN2, [1, 2, 3, 4]
    q = np.array([2.0, 0, 0, 0])
    return lab.attend_partial(q, K[:2], V[:2]), lab.attend_partial(q, K[2:], V[2:])


def flat(partial):
    m, denom, acc = partial
    return [float(m), float(denom), *np.asarray(acc, dtype=float).ravel().tolist()]


def test_two_halves_by_hand(lab):
    a, b = halves(lab)
    q = np.array([2.0, 0, 0, 0])
    lab.attend_partial(q, np.ones((2, 4)), np.ones((2, 1)))
    assert q[0] == 2, (
        "attend_partial changed q, and the next part needs it as it was. (q *= scale writes into "
        f"the caller's array.)\nexpected [2, 0, 0, 0]\ncame     {q}"
    )
    for name, got, expected in (
        ("first half, scores 0 and ln 2, values 1 and 2", flat(a), [LN2, 1.5, 2.5]),
        ("second half, scores ln 4 and ln 8, values 3 and 4", flat(b), [3 * LN2, 1.5, 5.5]),
    ):
        assert np.allclose(got, expected, atol=TOLERANCE), (
            f"{name}: weights 1/2 and 1 relative to the half's own maximum, summed, not divided.\n"
            f"expected (m, denom, acc) {expected}\ncame     {got}"
        )
    got = flat(lab.merge_two(a, b))
    assert np.allclose(got, [3 * LN2, 1.875, 6.125], atol=TOLERANCE), (
        "the first half is exp(ln 2 - ln 8) = 1/4 of its size in the units of the second: denom "
        "1.5/4 + 1.5, acc 2.5/4 + 5.5.\n"
        f"expected (m, denom, acc) {[3 * LN2, 1.875, 6.125]}\ncame     {got}"
    )
    got = lab.merge_partials([a, b])
    assert largest_difference(got, [49 / 15]) <= TOLERANCE, (
        "6.125 / 1.875 = 49/15, the number of labs 04-01 and 04-03. (The plain mean of the two "
        f"halves' outputs, 5/3 and 11/3, would be 8/3.)\nexpected [3.26667]\ncame     {got}"
    )


def test_the_halves_in_log_sum_exp_form(lab):
    (out_a, lse_a), (out_b, lse_b) = (lab.to_lse(part) for part in halves(lab))
    got = [float(out_a[0]), lse_a, float(out_b[0]), lse_b]
    expected = [5 / 3, math.log(3), 11 / 3, math.log(12)]
    assert np.allclose(got, expected, atol=TOLERANCE), (
        "each half's own output, acc / denom, and m + ln denom: ln 2 + ln 1.5 = ln 3, "
        f"ln 8 + ln 1.5 = ln 12.\nexpected {expected}\ncame     {got}"
    )
    out, lse = lab.merge_lse((out_a, lse_a), (out_b, lse_b))
    got = [float(out[0]), lse]
    assert np.allclose(got, [49 / 15, math.log(15)], atol=TOLERANCE), (
        "weights 3/15 and 12/15: (3 x 5/3 + 12 x 11/3) / 15 = 49/15, and ln(3 + 12).\n"
        f"expected {[49 / 15, math.log(15)]}\ncame     {got}"
    )


# --- partitions -----------------------------------------------------------------------------------


def test_one_partition_is_just_attention(lab):
    q, K, V = sequence(50)
    got = lab.partitioned_attention(q, K, V, 1)
    assert largest_difference(got, dense(q, K, V)) <= TOLERANCE, (
        f"one part holds all keys.\nexpected {dense(q, K, V)}\ncame     {got}"
    )


@pytest.mark.parametrize("num_partitions", [2, 3, 7, 32, 100])
def test_any_partition_count_matches_dense(lab, num_partitions):
    for seed in range(3):
        q, K, V = sequence(100, seed, spread=3.0)
        got = lab.partitioned_attention(q, K, V, num_partitions)
        assert largest_difference(got, dense(q, K, V)) <= TOLERANCE, (
            f"100 keys in {num_partitions} parts, each with its own maximum and denominator.\n"
            f"expected {dense(q, K, V)}\ncame     {got}"
        )


def test_more_partitions_than_keys(lab):
    q, K, V = sequence(3, 4)
    with np.errstate(all="ignore"):
        got = lab.partitioned_attention(q, K, V, 8)
    assert largest_difference(got, dense(q, K, V)) <= TOLERANCE, (
        "3 keys in 8 parts: five are empty. A kernel's grid has a fixed number of splits, and "
        f"short requests leave some of them without keys.\n"
        f"expected {dense(q, K, V)}\ncame     {got}"
    )


def test_a_part_of_one_key(lab):
    for num_keys, num_partitions in ((7, 4), (5, 3), (2, 2)):
        q, K, V = sequence(num_keys, num_keys)
        got = lab.partitioned_attention(q, K, V, num_partitions)
        assert largest_difference(got, dense(q, K, V)) <= TOLERANCE, (
            f"{num_keys} keys in {num_partitions} parts: the last has one key, and it counts.\n"
            f"expected {dense(q, K, V)}\ncame     {got}"
        )


def test_bad_counts_raise(lab):
    q, K, V = sequence(3)
    for call, what in (
        (lambda: lab.partitioned_attention(q, K, V, 0), "0 partitions"),
        (lambda: lab.partitioned_attention(q, K, V, -2), "-2 partitions"),
        (lambda: lab.merge_partials([]), "a merge of nothing: its size is unknown"),
    ):
        try:
            got = call()
        except ValueError as error:
            if "array_split" in str(error) or "number sections" in str(error):
                pytest.fail(f"{what}: raise your own ValueError, which names the argument")
            continue
        except Exception as error:
            got = repr(error)
        pytest.fail(f"{what} must raise ValueError; came {got}", pytrace=False)


# --- the laws -------------------------------------------------------------------------------------


def test_merge_is_order_invariant(lab):
    q, K, V = sequence(60, 5, spread=3.0)
    partials = parts_of(lab, q, K, V, [7, 20, 21, 45])
    expected = dense(q, K, V)
    orders = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1], [1, 0, 3, 2, 4]]
    for order in orders:
        got = lab.merge_partials([partials[i] for i in order])
        assert largest_difference(got, expected) <= TOLERANCE, (
            f"five parts merged in the order {order} must give attention over all keys. Splits "
            f"finish in any order.\nexpected {expected}\ncame     {got}"
        )


def test_merge_is_hierarchical(lab):
    q, K, V = sequence(64, 6, spread=3.0)
    a, b, c, d = parts_of(lab, q, K, V, [5, 30, 47])
    two, fold = lab.merge_two, lab.merge_partials
    for name, got in (
        ("((a b) (c d))", fold([two(two(a, b), two(c, d))])),
        ("(a (b (c d)))", fold([two(a, two(b, two(c, d)))])),
        ("(((a b) c) d)", fold([two(two(two(a, b), c), d)])),
        ("((d a) (c b))", fold([two(two(d, a), two(c, b))])),
    ):
        assert largest_difference(got, dense(q, K, V)) <= TOLERANCE, (
            f"{name}: a merged partial must be a partial like any other, so that warps, programs "
            f"and GPUs can merge in a tree.\nexpected {dense(q, K, V)}\ncame     {got}"
        )


def test_regrouping_moves_only_roundings(lab):
    worst = {"state": 0.0, "lse": 0.0}
    for seed in range(60):
        q, K, V = sequence(30, seed, spread=10.0 ** (seed % 3))
        a, b, c = parts_of(lab, q, K, V, [4 + seed % 9, 20])
        left = lab.merge_two(lab.merge_two(a, b), c)
        right = lab.merge_two(a, lab.merge_two(b, c))
        worst["state"] = max(worst["state"], largest_difference(
            left.acc / left.denom, right.acc / right.denom
        ))  # fmt: skip
        a, b, c = (lab.to_lse(part) for part in (a, b, c))
        left_out, left_lse = lab.merge_lse(lab.merge_lse(a, b), c)
        right_out, right_lse = lab.merge_lse(a, lab.merge_lse(b, c))
        # Rounding an lse of size L moves a weight by about L * 2**-52.
        bound = 64 * 2**-52 * (1 + abs(left_lse)) * (1 + np.abs(V).max())
        got = max(largest_difference(left_out, right_out), abs(left_lse - right_lse))
        assert got <= bound, (
            f"seed {seed}: (a b) c and a (b c) in the form of output and lse may differ by "
            f"roundings, at most {bound:.2g}; they differ by {got:.3g}"
        )
    assert worst["state"] <= 1e-13, (
        "(a b) c and a (b c) must agree to a few roundings over 60 random cases.\n"
        f"expected at most 1e-13\ncame     {worst['state']:.3g}"
    )


def test_extreme_scores_do_not_overflow(lab):
    rng = np.random.default_rng(7)
    for shift, spread, first in (
        (1000.0, 1.0, -1), (-1000.0, 1.0, -1), (0.0, 800.0, -1), (0.0, 800.0, 1),
    ):  # fmt: skip
        # the largest score comes first, or last
        scores = shift + first * spread * np.sort(rng.uniform(-1, 1, 40))
        V = rng.standard_normal((40, 5))
        K, q = np.zeros((40, 4)), np.array([2.0, 0, 0, 0])
        K[:, 0] = scores
        expected = dense(q, K, V)
        with np.errstate(all="ignore"):
            try:
                got = lab.partitioned_attention(q, K, V, 6)
                parts = [lab.to_lse(part) for part in parts_of(lab, q, K, V, [9, 30])]
                other, _ = lab.merge_lse(lab.merge_lse(parts[0], parts[1]), parts[2])
            except OverflowError as error:
                pytest.fail(f"scores around {shift:g} by {spread:g}: {error}", pytrace=False)
        for form, value in (("partials", got), ("lse", other)):
            assert largest_difference(value, expected) <= 1e-9, (
                f"scores around {shift:g}, spread {spread:g}, merged as {form}: float64 overflows "
                "at exp(709.8), so only differences to the larger maximum may be exponentiated, "
                "whichever part it is in. (A score of "
                f"200 would not show it: exp(200) is 7e86.)\nexpected {expected}\ncame     {value}"
            )


def test_identity_element(lab):
    q, K, V = sequence(20, 8)
    empty = lab.attend_partial(q, K[:0], V[:0])
    got = flat(empty)
    assert got == [-math.inf, 0.0] + [0.0] * 5, (
        f"no keys: m = -inf, denom = 0, acc = zeros of V's width 5.\ncame {got}"
    )
    part = lab.attend_partial(q, K - 30.0, V)
    for name, merged in (
        ("identity first", lab.merge_two(empty, part)),
        ("identity last", lab.merge_two(part, empty)),
    ):
        assert flat(merged) == flat(part), (
            f"{name}: merging with no keys must change nothing, to the bit; its weight is "
            f"exp(-inf - m) = 0.\nexpected {flat(part)}\ncame     {flat(merged)}"
        )


def test_identity_merge_identity_is_not_nan(lab):
    q, K, V = sequence(4, 9)
    empty = lab.attend_partial(q, K[:0], V[:0])
    with np.errstate(all="ignore"):
        got = flat(lab.merge_two(empty, empty))
        out = np.asarray(lab.merge_partials([empty, empty, empty])).tolist()
    assert got == flat(empty), (
        "two empty parts are an empty part; -inf - (-inf) is NaN and must not be computed.\n"
        f"expected {flat(empty)}\ncame     {got}"
    )
    assert out == [0.0] * 5, (
        "parts without any key give zeros, as upstream's reduce_segments does, not 0 / 0.\n"
        f"expected {[0.0] * 5}\ncame     {out}"
    )


def test_merging_leaves_its_arguments_alone(lab):
    a, b = halves(lab)
    before = flat(a), flat(b)
    lab.merge_two(a, b)
    lab.merge_partials([a, b])
    assert (flat(a), flat(b)) == before, (
        "partials are read by others (a tree merges the same memory twice in a test run, a cascade "
        f"shares its prefix); `acc *=` changes them.\nbefore {before}\nafter  {(flat(a), flat(b))}"
    )


# --- the log-sum-exp form -------------------------------------------------------------------------


def test_lse_form_agrees(lab):
    for seed in range(5):
        q, K, V = sequence(40, seed, spread=4.0)
        parts = parts_of(lab, q, K, V, [3, 25])
        state = lab.merge_two(lab.merge_two(parts[0], parts[1]), parts[2])
        lse_parts = [lab.to_lse(part) for part in parts]
        out, lse = lab.merge_lse(lab.merge_lse(lse_parts[0], lse_parts[1]), lse_parts[2])
        expected, expected_lse = lab.to_lse(state)
        assert largest_difference(out, expected) <= TOLERANCE, (
            "merging (output, lse) must give the output of merging (m, denom, acc): a normalised "
            f"part is fine as long as its weight is kept.\nexpected {expected}\ncame     {out}"
        )
        assert abs(lse - expected_lse) <= TOLERANCE, (
            f"and its lse is m + ln denom of the whole.\nexpected {expected_lse}\ncame     {lse}"
        )


def test_lse_plus_inf_is_empty(lab):
    out = np.array([1.0, 2.0])
    for empty in (-math.inf, math.inf):
        other = np.zeros(2)
        for name, pair in (
            ("first", ((other, empty), (out, 0.7))),
            ("last", ((out, 0.7), (other, empty))),
        ):
            with np.errstate(all="ignore"):
                got, lse = lab.merge_lse(*pair)
            assert largest_difference(got, out) <= TOLERANCE and abs(lse - 0.7) <= TOLERANCE, (
                f"an empty part {name}, its lse {empty}: the other part stays as it is. One "
                "version of FlashAttention writes +inf for no keys, the next -inf.\n"
                f"expected {out}, 0.7\ncame     {got}, {lse}"
            )
        with np.errstate(all="ignore"):
            got, lse = lab.merge_lse((other, empty), (other, math.inf))
        assert largest_difference(got, [0, 0]) == 0 and lse == -math.inf, (
            f"two empty parts, lse {empty} and inf: zeros and -inf; came {got}, {lse}"
        )


# --- a shared prefix ------------------------------------------------------------------------------


def test_prefix_ends_before_every_query(lab):
    cases = (
        ((32, [600, 530, 512], 16), 512, "32 blocks of 16, and all queries come after them"),
        ((2, [5, 4], 2), 4, "two blocks of 2, queries at 5 and 4"),
        ((3, [3, 4], 2), 2, "6 shared tokens, but request 0's query is at position 3: it must not "
         "see tokens 4 and 5, and the prefix pass has no mask. 3, down to whole blocks of 2"),
        ((4, [63, 64, 90], 16), 48, "63 is one token short of the fourth block"),
        ((0, [10, 20], 16), 0, "nothing in common"),
        ((3, [0, 40], 16), 0, "a request whose prompt has just begun"),
    )  # fmt: skip
    for arguments, expected, why in cases:
        got = lab.cascade_prefix_len(*arguments)
        assert got == expected, (
            f"cascade_prefix_len{arguments} (common blocks, computed tokens, block size): {why}.\n"
            f"expected {expected}\ncame     {got}"
        )


class Counted(np.ndarray):
    """An array that counts the operations it, or a view of it, takes part in."""

    def __new__(cls, array):
        out = array.view(cls)
        out.used = []
        return out

    def __array_finalize__(self, other):
        self.used = getattr(other, "used", [])

    def __array_ufunc__(self, ufunc, method, *inputs, **more):
        self.used.append(ufunc.__name__)
        plain = [np.asarray(i) if isinstance(i, Counted) else i for i in inputs]
        return getattr(ufunc, method)(*plain, **more)

    def __array_function__(self, function, types, args, kwargs):
        self.used.append(function.__name__)
        plain = [np.asarray(a) if isinstance(a, Counted) else a for a in args]
        return function(*plain, **kwargs)


def test_cascade_reads_the_prefix_once(lab):
    rng = np.random.default_rng(10)
    Q, prefix_v = rng.standard_normal((8, 6)), rng.standard_normal((50, 4))
    prefix_k = rng.standard_normal((50, 6))
    suffixes = [(3 * rng.standard_normal((n, 6)), rng.standard_normal((n, 4))) for n in range(1, 9)]
    k_seen, v_seen = Counted(prefix_k.copy()), Counted(prefix_v.copy())
    got = np.asarray(lab.cascade_attention(Q, k_seen, v_seen, suffixes))
    expected = np.stack(
        [
            dense(q, np.concatenate([prefix_k, k]), np.concatenate([prefix_v, v]))
            for q, (k, v) in zip(Q, suffixes, strict=True)
        ]
    )
    assert largest_difference(got, expected) <= TOLERANCE, (
        "8 requests share 50 keys and have 1 to 8 of their own: each must get attention over all "
        f"of its keys.\nexpected {expected[:2]} ...\ncame     {got[:2]} ..."
    )
    assert max(len(k_seen.used), len(v_seen.used)) <= 3, (
        "the prefix must go through memory once for all queries, as in Q @ prefix_k.T; a loop over "
        "requests reads it 8 times, which is what a cascade is there to avoid.\n"
        "expected at most 3 operations on prefix_k and on prefix_v\n"
        f"came     {len(k_seen.used)} and {len(v_seen.used)}"
    )


def test_cascade_takes_no_prefix_request_by_request(lab, monkeypatch):
    rng = np.random.default_rng(12)
    attend_partial, lengths = lab.attend_partial, []

    def watch(q, K, V):
        lengths.append(len(K))
        return attend_partial(q, K, V)

    monkeypatch.setattr(lab, "attend_partial", watch)
    Q = rng.standard_normal((5, 6))
    suffixes = [(rng.standard_normal((2, 6)), rng.standard_normal((2, 4))) for _ in Q]
    got = lab.cascade_attention(
        Q, rng.standard_normal((50, 6)), rng.standard_normal((50, 4)), suffixes
    )
    assert np.shape(got) == (5, 4), (
        f"5 requests, values of 4: expected (5, 4), came {np.shape(got)}"
    )
    assert 50 not in lengths, (
        "the 50 keys of the prefix went into attend_partial, which takes one query: so they are "
        f"read once per request.\nexpected calls with 2 keys\ncame     {lengths}"
    )


def test_each_query_has_its_own_maximum_over_the_prefix(lab):
    rng = np.random.default_rng(13)
    Q, size = rng.standard_normal((4, 6)), np.array([1.0, 900.0, 0.01, 30.0])
    Q *= size[:, None]
    prefix_k, prefix_v = rng.standard_normal((20, 6)), rng.standard_normal((20, 4))
    suffixes = [(0.01 * rng.standard_normal((2, 6)), rng.standard_normal((2, 4))) for _ in Q]
    expected = np.stack(
        [
            dense(q, np.concatenate([prefix_k, k]), np.concatenate([prefix_v, v]))
            for q, (k, v) in zip(Q, suffixes, strict=True)
        ]
    )
    with np.errstate(all="ignore"):
        got = lab.cascade_attention(Q, prefix_k, prefix_v, suffixes)
    assert largest_difference(got, expected) <= 1e-9, (
        f"four queries {size.tolist()} times as long, one product with the prefix: a maximum that "
        "belongs to another row leaves exp with 0 or infinity.\n"
        f"expected {expected}\ncame     {got}"
    )


def test_cascade_without_a_prefix(lab):
    rng = np.random.default_rng(11)
    Q = rng.standard_normal((3, 6))
    suffixes = [(rng.standard_normal((n, 6)), rng.standard_normal((n, 4))) for n in (1, 5, 2)]
    expected = [dense(q, k, v) for q, (k, v) in zip(Q, suffixes, strict=True)]
    with np.errstate(all="ignore"):
        got = lab.cascade_attention(Q, np.zeros((0, 6)), np.zeros((0, 4)), suffixes)
    assert largest_difference(got, expected) <= TOLERANCE, (
        f"an empty prefix is the identity.\nexpected {expected}\ncame     {got}"
    )


# --- the kernels ----------------------------------------------------------------------------------


def check_kernels(lab, arrays, cases, tile, tolerance, where):
    """The kernels' partials and outputs against attend_partial and merge_partials."""
    for number, case in enumerate(cases):
        names = ("query", "k_cache", "v_cache", "block_tables", "m", "denom", "acc", "out")
        query, k_cache, v_cache, tables, m, denom, acc, out = (
            arrays[f"{number}/{name}"] for name in names
        )
        group, splits = case["heads"] // case["kv_heads"], case["splits"]
        for r, seq_len in enumerate(case["seq_lens"]):
            table = tables[r, : -(-seq_len // 16)].astype(int)
            num_tiles = -(-seq_len // tile)
            per_split = -(-num_tiles // splits) * tile
            for head in range(case["heads"]):
                K, V = (
                    c[table, :, head // group].reshape(-1, case["dim"]) for c in (k_cache, v_cache)
                )
                parts = [
                    lab.attend_partial(query[r, head], K[i:j], V[i:j])
                    for i, j in ((min(s * per_split, seq_len), min((s + 1) * per_split, seq_len))
                                 for s in range(splits))
                ]  # fmt: skip
                at = f"{where}, {case}, request {r}, head {head}"
                for s, part in enumerate(parts if splits > 1 else []):
                    # the kernel's m is in base 2: 2 ** m2 = e ** (m2 ln 2)
                    got = [m[r, head, s] * LN2, denom[r, head, s]]
                    expected = [part.m, part.denom]
                    same = got == expected or np.allclose(
                        got, expected, rtol=tolerance, atol=tolerance
                    )
                    assert same, (
                        f"{at}, split {s}: (m in base e, denom).\n"
                        f"expected {expected}\ncame     {got}"
                    )
                    if part.denom:
                        assert np.allclose(
                            acc[r, head, s], part.acc, rtol=tolerance, atol=tolerance * part.denom
                        ), f"{at}, split {s}: acc.\nexpected {part.acc}\ncame     {acc[r, head, s]}"
                expected = lab.merge_partials(parts)
                assert np.allclose(out[r, head], expected, rtol=tolerance, atol=tolerance), (
                    f"{at}: the merge.\nexpected {expected}\ncame     {out[r, head]}"
                )


@pytest.fixture(scope="module")
def run_module():
    return load_module(HERE / "run.py", "_lab_04_04_run")


def run_interpreted(*arguments):
    """`run.py` in a child process, where Triton interprets kernels: it decides when imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it comes with torch for CUDA on Linux)")
    return subprocess.run(
        [sys.executable, str(HERE / "run.py"), *map(str, arguments)],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """Inputs and results of the kernels, interpreted once for all tests of this file."""
    path = tmp_path_factory.mktemp("kernels") / "cases.npz"
    said = run_interpreted("--export", path)
    assert said.returncode == 0, f"run.py --export failed:\n{said.stderr[-2000:]}"
    return np.load(path)


@pytest.mark.torch
def test_the_interpreted_kernels_leave_your_partials(lab, run_module, interpreted):
    check_kernels(lab, interpreted, run_module.CASES, 64, 2e-5, "interpreted, float32")


@pytest.mark.torch
def test_the_run_script_without_a_gpu(lab):
    q, K, V = sequence(5)
    got = lab.partitioned_attention(q, K, V, 2)
    assert largest_difference(got, dense(q, K, V)) <= TOLERANCE, f"write the lab first; came {got}"
    said = run_interpreted("--dry-run")
    assert said.returncode == 0, f"run.py --dry-run failed:\n{said.stderr[-2000:]}"
    lines = said.stdout.splitlines()
    assert len(lines) == 4 and all("not measured" in line for line in lines), (
        f"two contexts with one and two splits are four lines without a time; it said\n"
        f"{said.stdout}"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_compiled_kernels_leave_your_partials(lab, gpu_device, run_module, dtype):
    arrays = run_module.run_cases(dtype, str(gpu_device))
    tolerance = {"float16": 4e-3, "float32": 2e-5}[dtype]
    check_kernels(lab, arrays, run_module.CASES, 64, tolerance, f"on the GPU, {dtype}")


@pytest.mark.gpu
def test_splits_agree_on_a_gpu(lab, gpu_device, run_module):
    import torch

    kernels = sibling(__file__, "kernels")
    arguments = run_module.argparse.Namespace(heads=32, kv_heads=8, head_dim=128)
    tensors = run_module.uniform(arguments, 2, 20_000, str(gpu_device))
    outputs = {n: kernels.flash_decoding(**tensors, num_splits=n).out for n in (1, 2, 16, 64)}
    group = [lab.attend_partial(np.ones(2), np.zeros((n, 2)), np.ones((n, 1))) for n in (1, 3)]
    assert lab.merge_two(*group).denom == 4, "four equal scores have a denominator of 4"
    for splits, out in outputs.items():
        worst = float((out.float() - outputs[1].float()).abs().max())
        assert worst <= 1e-3 and torch.isfinite(out).all(), (
            f"20,000 keys in {splits} splits differ from one split by {worst:.2e}; in float16 "
            "roundings explain 1e-3 at most"
        )
