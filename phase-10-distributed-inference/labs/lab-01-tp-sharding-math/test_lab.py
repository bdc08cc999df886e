"""What lab 10-01 pins: shards that are the weight, one sum for a pair of layers, real slices."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from conformance import parts
from labkit import refused, same

X = np.array([[1.0, 2, 3, 4]])
W = np.array([[1.0, 0, 2, 0], [0, 1, 0, 1], [1, 1, 1, 1], [2, 0, 0, -1]])
W1 = np.array([[1.0, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, -1], [1, 1, -1, 0]])
W2 = np.array([[1.0, 2, 3, 4], [0, 1, 0, 1]])
RANKS = (1, 2, 4, 8)


class Spy(np.ndarray):
    """An array that notes the operands of every product it goes into."""

    products: ClassVar[list] = []

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [np.asarray(each) for each in inputs]
        if out is not None:
            kwargs["out"] = tuple(np.asarray(each) for each in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        if ufunc.__name__ in ("matmul", "matvec", "vecmat"):
            Spy.products.append([each.shape for each in plain])
        return result.view(Spy) if isinstance(result, np.ndarray) else result

    def __array_function__(self, function, types, args, kwargs):
        def bare(each):
            if isinstance(each, Spy):
                return np.asarray(each)
            return type(each)(map(bare, each)) if isinstance(each, list | tuple) else each

        if function.__name__ in ("dot", "einsum", "tensordot", "inner", "multi_dot"):
            Spy.products.append([each.shape for each in args if isinstance(each, np.ndarray)])
        result = function(*bare(args), **kwargs)
        if isinstance(result, list | tuple):
            return type(result)(map(watched, result))
        return watched(result)

    def dot(self, other, out=None):
        return np.dot(self, other)


def watched(result):
    """An array as a `Spy`; anything else as it is."""
    return result.view(Spy) if isinstance(result, np.ndarray) else result


def spied(*arrays):
    """The arrays, watched from now on."""
    Spy.products = []
    return [np.array(each).view(Spy) for each in arrays]


def wires(lab):
    """A `Comm` that keeps what it was handed."""

    class Kept(lab.Comm):
        def __init__(self):
            super().__init__()
            self.handed = []

        def all_reduce(self, parts):
            self.handed.append(("all_reduce", [np.array(part) for part in parts]))
            return super().all_reduce(parts)

        def all_gather(self, parts):
            self.handed.append(("all_gather", [np.array(part) for part in parts]))
            return super().all_gather(parts)

    return Kept()


def names(comm):
    return [name for name, _ in comm.handed]


def whole(rng, *shape):
    """Small whole numbers in float64: sums of them are exact, in whatever order."""
    return rng.integers(-4, 5, shape).astype(np.float64)


def close(got, expected, why):
    """float64: products in another order differ by some 1e-14; 1e-10 leaves room, and no bug."""
    got = np.asarray(got)
    assert got.shape == expected.shape, (
        f"{why}: shape\nexpected {expected.shape}\ncame     {got.shape}"
    )
    most = float(np.abs(got - expected).max(initial=0))
    assert np.allclose(got, expected, rtol=1e-10, atol=1e-10), (
        f"{why}\nexpected {np.round(expected[0][:6], 4).tolist()} in the first row\n"
        f"came     {np.round(got[0][:6], 4).tolist()}, furthest off {most:.3g}"
    )


def silu(x):
    return x / (1 + np.exp(-x))


def dense_attention(lab, x, Wqkv, Wo, heads, kv_heads):
    """The definition, on one rank."""
    q, k, v = np.split(x @ Wqkv.T, np.cumsum([heads, kv_heads]) * (Wo.shape[1] // heads), axis=1)
    rows = [each.reshape(len(x), -1, Wo.shape[1] // heads) for each in (q, k, v)]
    return lab.attend(*rows) @ Wo.T


# --- worked examples ------------------------------------------------------------------------------


def test_worked_example(lab):
    comm = wires(lab)
    same(lab.column_parallel(X, W, 2, comm).tolist(), [[7, 6, 10, -2]], "x W^T by columns")
    same(
        [part.tolist() for _, handed in comm.handed for part in handed],
        [[[7, 6]], [[10, -2]]],
        "what two ranks hand over to be put side by side",
    )
    comm = wires(lab)
    same(lab.row_parallel(X, W, 2, comm=comm).tolist(), [[7, 6, 10, -2]], "x W^T by rows")
    same(
        [part.tolist() for _, handed in comm.handed for part in handed],
        [[[1, 2, 3, 2]], [[6, 4, 7, -4]]],
        "what two ranks hand over to be added up: each knows a part of every sum",
    )
    same(lab.mlp_tp(X, W1, W2, 2)[0].tolist(), [[1, 0]], "relu(x W1^T) W2^T on two ranks")


# --- shards ---------------------------------------------------------------------------------------


def test_shards_put_together_are_the_weight(lab):
    weight = np.arange(48.0).reshape(8, 6)
    for world in (1, 2, 4, 8):
        shards = [lab.shard_columns(weight, rank, world) for rank in range(world)]
        same(
            np.concatenate(shards).tolist(), weight.tolist(),
            f"columns: shards of {world} ranks, one below the other (T1)",
        )  # fmt: skip
        bias = [lab.shard_columns(weight[:, 0], rank, world) for rank in range(world)]
        same(np.concatenate(bias).tolist(), weight[:, 0].tolist(), "a bias goes with its outputs")
    for world in (1, 2, 3, 6):
        shards = [lab.shard_rows(weight, rank, world) for rank in range(world)]
        same(
            np.concatenate(shards, axis=1).tolist(), weight.tolist(),
            f"rows: shards of {world} ranks, side by side (T1)",
        )  # fmt: skip


def test_a_rank_owns_its_shard(lab):
    weight = np.arange(96.0).reshape(8, 12)
    for name, shard in (
        ("shard_columns", lab.shard_columns(weight, 1, 2)),
        ("shard_rows", lab.shard_rows(weight, 1, 2)),
        ("shard_merged", lab.shard_merged(weight, [4, 4], 1, 2)),
        ("shard_qkv", lab.shard_qkv(weight, 4, 2, 1, 2)),
        ("shard_columns on one rank", lab.shard_columns(weight, 0, 1)),
    ):
        assert not np.shares_memory(shard, weight), (
            f"{name}: a view keeps the whole weight in memory for as long as the shard lives, so "
            "nothing was saved (T3)\nexpected an array of its own\ncame     a view"
        )


def test_merged_takes_a_share_of_each(lab):
    rows = np.arange(8.0)[:, None]
    came = [lab.shard_merged(rows, [4, 4], rank, 2)[:, 0].tolist() for rank in (0, 1)]
    same(
        came,
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        "gate rows 0 to 3 above up rows 4 to 7, two ranks: each has matching halves of both. A "
        "plain slice gives rank 0 all of gate and none of up",
    )
    refused(lambda: lab.shard_merged(rows, [6, 4], 0, 2), "sizes of 10 rows in a weight of 8")


def test_qkv_by_heads(lab, record_property):
    rows = np.arange(8.0)[:, None]  # q0 q1 q2 q3 k0 k1 v0 v1, of one row each
    name = ["q0", "q1", "q2", "q3", "k0", "k1", "v0", "v1"]

    def held(world):
        shards = [lab.shard_qkv(rows, 4, 2, rank, world)[:, 0].astype(int) for rank in range(world)]
        return [" ".join(name[row] for row in shard) for shard in shards]

    same(held(1), [" ".join(name)], "one rank has everything")
    same(held(2), ["q0 q1 k0 v0", "q2 q3 k1 v1"], "two ranks, 4 query and 2 KV heads: whole groups")
    four = held(4)
    same(
        four,
        ["q0 k0 v0", "q1 k0 v0", "q2 k1 v1", "q3 k1 v1"],
        "four ranks, 2 KV heads: each is held twice, by the neighbours whose queries read it",
    )
    kept = sum(each.count("k") + each.count("v") for each in four)
    record_property("measured.kv_copies", kept / 4)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", RANKS)
def test_column_reconstructs(lab, num_ranks):
    rng = np.random.default_rng(num_ranks)
    x, weight = rng.standard_normal((5, 24)), rng.standard_normal((16, 24))
    comm = wires(lab)
    close(
        lab.column_parallel(x, weight, num_ranks, comm),
        x @ weight.T,
        f"{num_ranks} ranks, W 16 x 24",
    )
    same(
        [(name, [part.shape for part in handed]) for name, handed in comm.handed],
        [("all_gather", [(5, 16 // num_ranks)] * num_ranks)],
        f"one gather, of 5 rows and {16 // num_ranks} outputs from each of {num_ranks} ranks",
    )


@pytest.mark.parametrize("num_ranks", RANKS)
def test_row_reconstructs(lab, num_ranks):
    rng = np.random.default_rng(num_ranks)
    x, weight = rng.standard_normal((5, 24)), rng.standard_normal((16, 24))
    comm = wires(lab)
    close(
        lab.row_parallel(x, weight, num_ranks, comm=comm),
        x @ weight.T,
        f"{num_ranks} ranks, W 16 x 24",
    )
    same(
        [(name, [part.shape for part in handed]) for name, handed in comm.handed],
        [("all_reduce", [(5, 16)] * num_ranks)],
        "one all-reduce: every rank has an addend of the whole output, not a piece of it",
    )


def test_whole_numbers_agree_exactly(lab):
    rng = np.random.default_rng(3)
    x, weight, down = whole(rng, 3, 8), whole(rng, 16, 8), whole(rng, 5, 16)
    dense, mlp = x @ weight.T, np.maximum(x @ weight.T, 0) @ down.T
    for num_ranks in RANKS:
        for name, came, expected in (
            ("column_parallel", lab.column_parallel(x, weight, num_ranks), dense),
            ("row_parallel", lab.row_parallel(x, weight, num_ranks), dense),
            ("mlp_tp", lab.mlp_tp(x, weight, down, num_ranks)[0], mlp),
        ):  # fmt: skip
            same(
                np.asarray(came).tolist(), expected.tolist(),
                f"{name}, {num_ranks} ranks: sums of whole numbers are exact, so is the result",
            )  # fmt: skip


def test_bias_is_added_once(lab):
    rng = np.random.default_rng(4)
    x, weight, bias = whole(rng, 3, 8), whole(rng, 4, 8), np.array([100.0, 200, 300, 400])
    for num_ranks in RANKS:
        same(
            lab.row_parallel(x, weight, num_ranks, bias).tolist(), (x @ weight.T + bias).tolist(),
            f"{num_ranks} ranks: a bias that every rank adds comes out {num_ranks} times",
        )  # fmt: skip


def test_mlp_matches_dense_with_one_all_reduce(lab):
    rng = np.random.default_rng(5)
    x, up, down = (
        rng.standard_normal((5, 12)),
        rng.standard_normal((32, 12)),
        rng.standard_normal((7, 32)),
    )
    for num_ranks in RANKS:
        comm = wires(lab)
        y, count = lab.mlp_tp(x, up, down, num_ranks, comm)
        close(y, np.maximum(x @ up.T, 0) @ down.T, f"{num_ranks} ranks")
        same(
            (names(comm), count), (["all_reduce"], 1),
            f"{num_ranks} ranks: collectives that were used, and the count returned. A function of "
            "single hidden units does not mind a cut between them: nothing is gathered there (T4)",
        )  # fmt: skip
        same(
            [part.shape for part in comm.handed[0][1]], [(5, 7)] * num_ranks,
            "addends, one from each rank",
        )  # fmt: skip
        again = lab.mlp_tp(x, up, down, num_ranks, comm)[1]
        same(again, 1, "the count of a second call over the same wires: its own, not both")


def test_rank_count_invariance(lab):
    rng = np.random.default_rng(6)
    x, up, down = (
        rng.standard_normal((2, 10)),
        rng.standard_normal((24, 10)),
        rng.standard_normal((9, 24)),
    )
    one = np.asarray(lab.mlp_tp(x, up, down, 1)[0])
    for num_ranks in (2, 3, 4, 6, 8, 12, 24):
        close(lab.mlp_tp(x, up, down, num_ranks)[0], one, f"{num_ranks} ranks against one")


def test_swiglu_takes_matching_halves(lab):
    rng = np.random.default_rng(7)
    x, gate, up = (rng.standard_normal(shape) for shape in ((3, 8), (16, 8), (16, 8)))
    down = rng.standard_normal((6, 16))
    expected = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    for num_ranks in RANKS:
        comm = wires(lab)
        came = lab.swiglu_tp(x, np.concatenate([gate, up]), down, num_ranks, comm)
        close(came, expected, f"{num_ranks} ranks: row i of gate belongs to row i of up")
        same(names(comm), ["all_reduce"], f"{num_ranks} ranks: collectives (T4)")


@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_attention_matches_dense(lab, kv_heads):
    rng = np.random.default_rng(kv_heads)
    x, Wo = rng.standard_normal((6, 10)), rng.standard_normal((10, 24))
    Wqkv = rng.standard_normal(((8 + 2 * kv_heads) * 3, 10))
    expected = dense_attention(lab, x, Wqkv, Wo, 8, kv_heads)
    for num_ranks in RANKS:
        comm = wires(lab)
        came = lab.attention_tp(x, Wqkv, Wo, 8, kv_heads, num_ranks, comm)
        close(came, expected, f"8 query heads, {kv_heads} KV heads, {num_ranks} ranks")
        same(
            names(comm),
            ["all_reduce"],
            f"{num_ranks} ranks: collectives of an attention layer (T4)",
        )


# --- what it costs --------------------------------------------------------------------------------


def test_no_rank_touches_a_whole_weight(lab, record_property, monkeypatch):
    for name in ("shard_columns", "shard_rows", "shard_merged", "shard_qkv"):
        plain = getattr(lab, name)  # a copy by np.array is no Spy any more
        monkeypatch.setattr(lab, name, lambda *given, plain=plain: watched(plain(*given)))
    rng = np.random.default_rng(8)
    for name, shapes, call in (
        ("column_parallel", [(16, 24)], lambda x, w: lab.column_parallel(x, w, 4)),
        ("row_parallel", [(16, 24)], lambda x, w: lab.row_parallel(x, w, 4)),
        ("mlp_tp", [(16, 24), (12, 16)], lambda x, a, b: lab.mlp_tp(x, a, b, 4)),
        ("swiglu_tp", [(32, 24), (12, 16)], lambda x, a, b: lab.swiglu_tp(x, a, b, 4)),
    ):
        x, *weights = spied(rng.standard_normal((5, 24)), *map(rng.standard_normal, shapes))
        call(x, *weights)
        assert Spy.products, (
            f"{name}: expected products by @, np.matmul, np.dot or np.einsum, of slices of what "
            "was given; came none"
        )
        used = [int(np.prod(s)) for pair in Spy.products for s in pair if 5 not in s]
        quarter = max(int(np.prod(shape)) // 4 for shape in shapes)
        assert max(used) <= quarter, (
            f"{name} on 4 ranks, numbers of a weight that go into one product: a rank multiplies "
            "with its own quarter; who multiplies with more has more in memory (T2)\n"
            f"expected at most {quarter}\ncame     {max(used)}"
        )
        same(
            sum(used), sum(int(np.prod(shape)) for shape in shapes),
            f"{name} on 4 ranks, numbers of weights that go into all products: each once",
        )  # fmt: skip
    record_layer(lab, record_property)


def record_layer(lab, record_property):
    """One decoder layer on four ranks: its collectives."""
    rng = np.random.default_rng(80)
    x, Wqkv, Wo, gate_up, down = (
        rng.standard_normal(shape) for shape in ((2, 8), (32, 8), (8, 16), (32, 8), (8, 16))
    )
    comm = wires(lab)
    lab.attention_tp(x, Wqkv, Wo, 4, 2, 4, comm)
    lab.swiglu_tp(x, gate_up, down, 4, comm)
    record_property("measured.collectives", len(comm.handed))


def test_partials_in_half_precision_round(lab, record_property):
    rng = np.random.default_rng(9)
    x, weight = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((16, 4096), (256, 4096))
    )
    once = (x @ weight.T).astype(np.float16)
    shares = {}
    for num_ranks in (2, 8):
        partial = [
            (lab.shard_rows(x, rank, num_ranks) @ lab.shard_rows(weight, rank, num_ranks).T)
            for rank in range(num_ranks)
        ]
        total = np.zeros_like(once)
        for part in partial:  # on its way from rank to rank the sum is float16 too
            total = total + part.astype(np.float16)
        shares[num_ranks] = 100 * float(np.mean(total != once))
    assert 5 < shares[2] < shares[8] < 95, (
        "outputs that change when partial sums are float16, and so is each sum of them, in "
        "percent at 2 and at 8 ranks: more ranks, more roundings\n"
        f"expected 5 < 2 ranks < 8 ranks < 95\ncame     {shares}"
    )
    record_property("measured.rounded", shares[8])


# --- bad input ------------------------------------------------------------------------------------


def test_inputs_unchanged(lab):
    rng = np.random.default_rng(10)
    x, a, b, bias = (rng.standard_normal(s) for s in ((3, 8), (16, 8), (8, 8), (8,)))
    before = [each.copy() for each in (x, a, b, bias)]
    lab.column_parallel(x, a, 2)
    lab.row_parallel(x, b, 2, bias)
    lab.mlp_tp(x, a, rng.standard_normal((8, 16)), 2)
    lab.swiglu_tp(x, a, b, 2)
    lab.attention_tp(x, a, b, 4, 2, 2)
    shard = lab.shard_columns(a, 0, 2)
    shard *= 0
    changed = [
        name
        for name, now, was in zip(("x", "a", "b", "bias"), (x, a, b, bias), before, strict=True)
        if not np.array_equal(now, was)
    ]
    same(changed, [], "arrays of the caller that were changed (T5)")


def test_what_does_not_divide_is_refused(lab):
    x = np.ones((2, 6))
    for call, why in (
        (lambda: lab.column_parallel(x, np.ones((5, 6)), 2), "5 outputs on 2 ranks"),
        (lambda: lab.row_parallel(x, np.ones((4, 6)), 4), "6 inputs on 4 ranks"),
        (lambda: lab.mlp_tp(x, np.ones((9, 6)), np.ones((2, 9)), 2), "9 hidden units on 2 ranks"),
        (lambda: lab.swiglu_tp(x, np.ones((18, 6)), np.ones((2, 9)), 2), "9 gates on 2 ranks"),
        (lambda: lab.shard_qkv(np.ones((8, 6)), 4, 2, 0, 3), "4 query heads on 3 ranks"),
        (lambda: lab.shard_qkv(np.ones((18, 6)), 12, 3, 0, 4), "3 KV heads on 4 ranks"),
        (lambda: lab.shard_qkv(np.ones((20, 6)), 14, 3, 0, 7), "3 KV heads on 7 ranks"),
        (lambda: lab.column_parallel(x, np.ones((4, 6)), 0), "no rank"),
        (lambda: lab.row_parallel(x, np.ones((4, 6)), 0), "no rank"),
        (lambda: lab.mlp_tp(x, np.ones((4, 6)), np.ones((2, 4)), -1), "-1 ranks"),
        (lambda: lab.shard_columns(x, 2, 2), "rank 2 of 2: they count from 0"),
        (lambda: lab.shard_rows(x, -1, 2), "rank -1"),
    ):
        refused(call, f"{why}: a floor would drop the rest in silence; it")


# --- the real layers ------------------------------------------------------------------------------


def rows_of(lab, case, weight, rank):
    """A rank's shard of a recorded layer's weight."""
    world = case["world"]
    if case["layer"] == "column":
        return lab.shard_columns(weight, rank, world)
    if case["layer"] == "merged":
        return lab.shard_merged(weight, case["sizes"], rank, world)
    return lab.shard_qkv(weight, case["heads"], case["kv_heads"], rank, world)


def test_the_real_layers_hold_the_same_rows(lab):
    found = {"column": 0, "merged": 0, "qkv": 0, "copies": 0, "refused": 0}
    for case in parts.load("tp_shards"):
        if case["layer"] == "row":
            continue
        rows = case.get("out") or sum(case.get("sizes", []))
        rows = rows or (case["heads"] + 2 * case["kv_heads"]) * case["head_dim"]
        weight = np.arange(float(rows * case["in"])).reshape(rows, case["in"])
        shown = {k: v for k, v in case.items() if k not in ("ranks", "in")}
        if "error" in case:
            refused(
                lambda c=case, w=weight: rows_of(lab, c, w, 0), f"vLLM asserts on {shown}; this"
            )
            found["refused"] += 1
            continue
        for rank, expected in enumerate(case["ranks"]):
            same(
                rows_of(lab, case, weight, rank).tolist(), weight[expected].tolist(),
                f"rank {rank} of {shown}: the real layer holds rows {expected}",
            )  # fmt: skip
        found[case["layer"]] += 1
        found["copies"] += case["layer"] == "qkv" and case["world"] > case["kv_heads"]
    assert min(found.values()) >= 3, f"cases that were met: expected 3 of each; came {found}"


def test_the_real_row_layer_gives_the_same_partials(lab):
    met = 0
    for case in parts.load("tp_shards"):
        if case["layer"] != "row":
            continue
        x, weight, bias = (np.array(case[name], np.float64) for name in ("x", "weight", "bias"))
        if "error" in case:
            refused(lambda a=(x, weight, case["world"]): lab.row_parallel(*a), "10 inputs, 4 ranks")
            continue
        comm = wires(lab)
        lab.row_parallel(x, weight, case["world"], bias, comm)
        same(
            [part.tolist() for _, handed in comm.handed for part in handed], case["partials"],
            f"W {case['out']} x {case['in']}, {case['world']} ranks: what each real rank gives "
            "before anything is added up",
        )  # fmt: skip
        met += 1
    assert met == 5, f"recorded layers: expected 5; came {met}"
