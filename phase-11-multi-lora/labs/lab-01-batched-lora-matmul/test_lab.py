"""What lab 11-01 pins: each row its own adapter, thin products only, and launches that suffice."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from conformance import recording
from labkit import refused, same

W3 = np.array([[1.0, 0, 0], [0, 1, 0]])
X3 = np.array([[1.0, 2, 3], [1, 0, -1], [2, 1, 0]])
ONE = (np.array([[1.0, 1, 1]]), np.array([[1.0], [2]]))
TWO = (np.array([[1.0, 0, 0]]), np.array([[-1.0], [1]]))


class Work:
    """What numpy was asked while `Counted` arrays went through it."""

    def __init__(self):
        self.products = []  # (shapes of the operands, shape of the result)
        self.results = []  # shapes of all results

    def multiplications(self):
        """Of all products: size of the result times the length of what is summed over."""
        total = 0
        for (left, *_), result in self.products:
            total += int(np.prod(result)) * left[-1]
        return total


class Counted(np.ndarray):
    """An array that notes every operation it goes through, and so does what comes out."""

    work = Work()

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        plain = [np.asarray(each) for each in inputs]
        if out is not None:
            kwargs["out"] = tuple(np.asarray(each) for each in out)
        result = getattr(ufunc, method)(*plain, **kwargs)
        return self._noted(ufunc.__name__, plain, result if out is None else out[0])

    def __array_function__(self, function, types, args, kwargs):
        def bare(each):
            if isinstance(each, Counted):
                return np.asarray(each)
            return type(each)(map(bare, each)) if isinstance(each, list | tuple) else each

        def arrays(each):
            if isinstance(each, np.ndarray):
                return [np.asarray(each)]
            if isinstance(each, list | tuple):
                return [found for one in each for found in arrays(one)]
            return []

        result = function(*bare(args), **{key: bare(value) for key, value in kwargs.items()})
        return self._noted(function.__name__, arrays(args), result)

    def dot(self, other, out=None):
        result = np.asarray(self).dot(np.asarray(other))
        return self._noted("dot", [np.asarray(self), np.asarray(other)], result)

    def take(self, *args, **kwargs):
        return np.take(self, *args, **kwargs)

    def repeat(self, *args, **kwargs):
        return np.repeat(self, *args, **kwargs)

    def __getitem__(self, key):
        result = super().__getitem__(key)
        Counted.work.results.append(np.shape(result))
        return result

    @staticmethod
    def _noted(name, operands, result):
        if not isinstance(result, np.ndarray):
            return result
        if any(np.may_share_memory(result, each) for each in operands):
            return result.view(Counted)  # transposed or reshaped, or written in place
        Counted.work.results.append(result.shape)
        if name in ("matmul", "dot", "einsum", "tensordot", "inner", "multi_dot", "matvec"):
            shapes = [each.shape for each in operands if each.ndim]
            Counted.work.products.append((shapes, result.shape))
        return np.asarray(result).view(Counted)


def counted(*arrays):
    """The arrays, watched from now on."""
    Counted.work = Work()
    return [np.array(each).view(Counted) for each in arrays]


def make(rng, num, sizes, ranks):
    """x, W, adapters by id from 0 on, scalings."""
    into, out = sizes
    x, W = rng.standard_normal((num, into)), rng.standard_normal((out, into))
    adapters = {
        number: (rng.standard_normal((rank, into)), rng.standard_normal((out, rank)))
        for number, rank in enumerate(ranks)
    }
    return x, W, adapters, {number: 0.5 + number for number in adapters}


def row_by_row(x, W, adapters, ids, scalings):
    """The definition, with W + s B A built for each row."""
    found = []
    for row, number in zip(x, ids, strict=True):
        pair = None if number == -1 else adapters[number]
        merged = W if pair is None else W + scalings[number] * (pair[1] @ pair[0])
        found.append(merged @ row)
    return np.array(found).reshape(len(x), len(W))


def close(got, expected, why):
    got = np.asarray(got)
    assert got.shape == expected.shape, (
        f"{why}: shape\nexpected {expected.shape}\ncame     {got.shape}"
    )
    where = np.abs(got - expected).max(axis=1) > 1e-9 if len(got) else np.zeros(0, bool)
    if not where.any():
        return
    row = int(np.argmax(where))
    raise AssertionError(
        f"{why}: rows {np.flatnonzero(where)[:8].tolist()} differ, first row {row}\n"
        f"expected {np.round(expected[row][:6], 4).tolist()}\n"
        f"came     {np.round(got[row][:6], 4).tolist()}"
    )


# --- one adapter ----------------------------------------------------------------------------------


def test_worked_example(lab):
    close(
        lab.lora_delta(X3[:1], *ONE, 0.5),
        np.array([[3.0, 6]]),
        "x [[1, 2, 3]], A [[1, 1, 1]], B [[1], [2]], scaling .5: shrunk to 6, expanded, halved",
    )
    close(
        lab.apply_batched(X3, W3, {1: ONE, 2: TWO}, [1, -1, 2], {1: 0.5, 2: 2.0}),
        np.array([[4.0, 8], [1, 0], [-2, 5]]),
        "the three rows of the worked example: adapter 1, the base, adapter 2",
    )


def test_delta_equals_merged_weight(lab):
    rng = np.random.default_rng(1)
    for into, out, rank in ((5, 7, 2), (9, 4, 3), (6, 6, 6)):
        x, _, adapters, _ = make(rng, 8, (into, out), [rank])
        (A, B) = adapters[0]
        what = f"in {into}, out {out}, rank {rank}: the same as with the weight .75 B A"
        close(lab.lora_delta(x, A, B, 0.75), x @ (0.75 * B @ A).T, what)


def test_delta_rank_at_most_r(lab):
    rng = np.random.default_rng(2)
    x, _, adapters, _ = make(rng, 40, (30, 20), [3])
    rank = int(np.linalg.matrix_rank(lab.lora_delta(x, *adapters[0], 2.0)))
    same(rank, 3, "40 random rows through 3 columns: everything an adapter of rank 3 can say")


def test_zero_b_is_identity(lab):
    rng = np.random.default_rng(3)
    x, W, adapters, scalings = make(rng, 6, (5, 4), [2, 3])
    adapters[0] = (adapters[0][0], np.zeros((4, 2)))
    ids = [0, 1, 0, -1, 0, 0]
    expected = row_by_row(x, W, adapters, ids, scalings)
    got = lab.apply_batched(x, W, adapters, ids, scalings)
    close(got, expected, "adapter 0 has B = 0, as every adapter before training: the base's output")


# --- many -----------------------------------------------------------------------------------------


def test_batched_equals_per_row(lab):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        x, W, adapters, scalings = make(rng, 33, (12, 9), [1, 4, 2, 8])
        ids = rng.integers(-1, 4, size=33)
        close(
            lab.apply_batched(x, W, adapters, ids, scalings),
            row_by_row(x, W, adapters, ids.tolist(), scalings),
            f"seed {seed}, ranks 1, 4, 2, 8, scalings .5 to 3.5, ids {ids[:10].tolist()}... (D1)",
        )


def test_base_rows_equal_pure_base(lab):
    rng = np.random.default_rng(5)
    x, W, adapters, scalings = make(rng, 10, (7, 6), [2, 2])
    adapters[2] = None
    ids = [-1, 0, 2, -1, 1, 2, 0, -1, 2, 1]
    got = lab.apply_batched(x, W, adapters, ids, scalings)
    base = [place for place, number in enumerate(ids) if number in (-1, 2)]
    close(
        np.asarray(got)[base],
        (x @ W.T)[base],
        "rows of id -1, and of an adapter that leaves this layer as it is (None, no scaling)",
    )


def test_minus_one_never_indexes_last(lab):
    rng = np.random.default_rng(6)
    x, W, adapters, scalings = make(rng, 5, (7, 6), [2, 3])
    slots, factors = list(adapters.values()), list(scalings.values())
    for ids in ([-1] * 5, [0, -1, 1, -1, 0]):
        close(
            lab.apply_batched(x, W, slots, ids, factors),
            row_by_row(x, W, adapters, ids, scalings),
            f"ids {ids} and adapters as a list: Python's [-1] is the last one, here it is the base",
        )


def test_row_permutation_equivariant(lab):
    rng = np.random.default_rng(7)
    x, W, adapters, scalings = make(rng, 24, (8, 5), [2, 3, 1])
    ids = rng.integers(-1, 3, size=24)
    got = np.asarray(lab.apply_batched(x, W, adapters, ids, scalings))
    for _ in range(4):
        order = rng.permutation(24)
        close(
            lab.apply_batched(x[order], W, adapters, ids[order], scalings),
            got[order],
            "the same rows in another order: the same outputs in that order",
        )


def test_empty_and_all_base(lab):
    rng = np.random.default_rng(8)
    x, W, adapters, scalings = make(rng, 4, (6, 3), [2])
    close(
        lab.apply_batched(x[:0], W, adapters, [], scalings), np.zeros((0, 3)), "no rows: (0, out)"
    )
    close(lab.apply_batched(x, W, {}, [-1] * 4, {}), x @ W.T, "all rows the base's, no adapters")


def test_float32_stays(lab):
    rng = np.random.default_rng(9)
    x, W, adapters, scalings = make(rng, 6, (6, 3), [2, 2])
    x, W = x.astype(np.float32), W.astype(np.float32)
    small = {n: (A.astype(np.float32), B.astype(np.float32)) for n, (A, B) in adapters.items()}
    got = lab.apply_batched(x, W, small, [0, 1, -1, 0, 1, -1], scalings)
    same(str(got.dtype), "float32", "float32 rows and weights: no copy in float64 on the way out")
    same(str(lab.lora_delta(x, *small[0], 0.5).dtype), "float32", "and the delta alone")


def test_inputs_unchanged(lab):
    rng = np.random.default_rng(10)
    x, W, adapters, scalings = make(rng, 6, (6, 6), [2, 2])
    ids = np.array([1, 0, -1, 1, 0, 0])
    before = [each.copy() for each in (x, W, ids, *adapters[0], *adapters[1])]
    first = lab.apply_batched(x, W, adapters, ids, scalings)
    lab.lora_delta(x, *adapters[0], 2.0)
    now = [x, W, ids, *adapters[0], *adapters[1]]
    names = ("x", "W", "adapter_ids", "A of 0", "B of 0", "A of 1", "B of 1")
    changed = [n for n, a, b in zip(names, before, now, strict=True) if not np.array_equal(a, b)]
    same(changed, [], "arrays of the caller that were changed (D4)")
    first[:] = 0
    again = lab.apply_batched(x, W, adapters, ids, scalings)
    close(
        again, row_by_row(x, W, adapters, ids.tolist(), scalings), "and the result is a new array"
    )


def test_bad_ids_raise(lab):
    slots, factors = [ONE, TWO], [1.0, 1.0]
    for ids, why in (
        ([0, 1], "two ids for three rows"),
        ([0, 1, 1, 0], "four ids for three rows"),
        ([0, -2, 1], "-2 would index a list from its end"),
        ([0, 2, 1], "there is no adapter 2"),
    ):
        refused(lambda ids=ids: lab.apply_batched(X3, W3, slots, ids, factors), f"ids {ids}: {why}")
    refused(
        lambda: lab.apply_batched(X3, W3, {1: ONE, 2: TWO}, [1, 2, -1], {1: 1.0}),
        "no scaling for adapter 2",
    )


# --- what it costs --------------------------------------------------------------------------------


def batch_of_64(lab):
    """64 rows of 4 adapters and the base; the work they made. n 64, in 24, out 40, ranks 2."""
    rng = np.random.default_rng(11)
    x, W, adapters, scalings = make(rng, 64, (24, 40), [2, 2, 2, 2, 2])
    flat = [each for pair in adapters.values() for each in pair]
    x, W, *flat = counted(x, W, *flat)
    adapters = {n: (flat[2 * n], flat[2 * n + 1]) for n in adapters}
    ids = [(7 * place) % 5 - 1 for place in range(64)]
    got = lab.apply_batched(x, W, adapters, ids, scalings)
    assert Counted.work.products, (
        "no matrix product of numpy went through your code; write products with @, np.matmul, "
        "np.dot or np.einsum\nexpected some\ncame     none"
    )
    assert np.shape(got) == (64, 40), f"expected shape (64, 40); came {np.shape(got)}"
    return Counted.work


def test_one_shared_base_matmul(lab):
    work = batch_of_64(lab)
    found = [
        (shapes, result)
        for shapes, result in work.products
        if any(sorted(shape) == [24, 40] for shape in shapes)
    ]
    same(
        [sorted(result) for _, result in found],
        [[40, 64]],
        "products with W (40 x 24): one, over all 64 rows, base or not (D2). Reading W is what a "
        "decode step costs",
    )


def test_two_products_for_each_adapter(lab, record_property):
    work = batch_of_64(lab)
    count = len(work.products)
    assert count <= 9, (
        "64 rows of 4 adapters and the base: one product with W and two for each adapter that "
        f"occurs, not some for each row (D2)\nexpected at most 9\ncame     {count}"
    )
    record_property("measured.products", count)


def test_each_row_is_multiplied_once(lab, record_property):
    work = batch_of_64(lab)
    adapted = sum((7 * place) % 5 - 1 >= 0 for place in range(64))
    need = 64 * 24 * 40 + adapted * 2 * (24 + 40)
    count = work.multiplications()
    assert count <= need, (
        "multiplications: 64 rows through W, and those with an adapter through its A and B. A "
        "delta of all rows for each adapter, most of it masked away, is work for nothing\n"
        f"expected at most {need:,}\ncame     {count:,}"
    )
    x, A, B = counted(np.ones((4, 512)), np.ones((2, 512)), np.ones((512, 2)))
    lab.lora_delta(x, A, B, 1.0)
    record_property("measured.overhead", 100 * Counted.work.multiplications() / (4 * 512 * 512))


def test_never_materializes_ba(lab):
    work = batch_of_64(lab)
    built = [shape for shape in work.results if sorted(shape) == [24, 40]]
    same(built, [], "arrays as large as W on the way: B A is never built, nor W + s B A (D3)")
    most = max((int(np.prod(shape)) for shape in work.results), default=0)
    assert most <= 64 * 40, (
        "the largest array on the way: no larger than the output, so no A or B is gathered for "
        f"each row (D3)\nexpected at most 2,560 numbers\ncame     {most:,}"
    )
    x, A, B = counted(np.ones((6, 30)), np.ones((2, 30)), np.ones((20, 2)))
    lab.lora_delta(x, A, B, 0.5)
    same(
        [sorted(result) for _, result in Counted.work.products],
        [[2, 6], [6, 20]],
        "lora_delta of 6 rows, in 30, out 20, rank 2: shrink to (6, 2), expand to (6, 20)",
    )


# --- what a launch costs --------------------------------------------------------------------------


@functools.cache
def launches():
    """Batches, and the grids with which the pin's two kernels were launched for them."""
    path = Path(recording.__file__).parent / "recordings" / "parts" / "grids.jsonl.gz"
    return [line for line in recording.lines(path) if "ids" in line]


def worst(rows, groups, block):
    """The most blocks of any batch: every way to spread the rows over the groups, tried."""
    most = {0: 0}  # by rows so far
    for _ in range(groups):
        grown = {}
        for used, blocks in most.items():
            for count in range(rows - used + 1):
                total = blocks + -(-count // block)
                grown[used + count] = max(grown.get(used + count, 0), total)
        most = grown
    return max(most.values())


def test_programs_for_every_batch(lab):
    got = lab.num_programs(64, 8, 32)
    same(got, 9, "64 rows, 8 groups, blocks of 32: one row in each of seven groups, 57 in the last")
    for rows in range(13):
        for groups in range(1, 6):
            for block in (1, 2, 3, 5, 16):
                same(
                    lab.num_programs(rows, groups, block), worst(rows, groups, block),
                    f"{rows} rows, {groups} groups, blocks of {block}: the most that a batch "
                    "needs, every batch tried",
                )  # fmt: skip


def test_fewer_than_the_pin_launches(lab, record_property):
    for line in launches():
        ids, block = line["ids"], line["adapters"]["block"]
        active, rows = len(set(ids)), sum(each >= 0 for each in ids)
        for kernel, most, got in (
            ("the shrink kernel, every slot", line["adapters"]["fixed"],
             lab.num_programs(len(ids), line["groups"], block)),
            ("the shrink kernel, active slots", line["adapters"]["active"],
             lab.num_programs(len(ids), active, block)),
            ("the experts' kernel", line["experts"]["launched"],
             lab.num_programs(rows, line["groups"], block)),
        ):  # fmt: skip
            assert 0 < got <= most, (
                f"{line['name']}, {len(ids)} rows, {line['groups']} groups, blocks of {block}: "
                f"vLLM launches {kernel} with {most} programs\nexpected 1 to {most}\ncame     {got}"
            )
    four = next(line for line in launches() if line["name"] == "four adapters and the base")
    record_property("measured.launched", four["adapters"]["fixed"])


def checked(lab, ids, groups, block):
    """An assignment, with every rule of it."""
    what = f"ids {np.asarray(ids)[:12].tolist()}..., {groups} groups, blocks of {block}"
    programs = lab.assign(ids, groups, block)
    same(len(programs), lab.num_programs(len(ids), groups, block), f"{what}: programs")
    seen = []
    for number, (group, rows) in enumerate(programs):
        rows = np.asarray(rows).tolist()
        assert len(rows) <= block, f"{what}: program {number} has {len(rows)} rows"
        same({ids[row] for row in rows}, {group} if rows else set(), f"{what}: groups of its rows")
        if not rows:
            same(group, -1, f"{what}: program {number} has nothing to do")
        seen += rows
    want = [row for row, each in enumerate(ids) if each >= 0]
    same(sorted(seen), want, f"{what}: each row with a group once, rows of the base never")


def test_each_row_in_one_program(lab):
    checked(lab, [0, 0, -1, 1, 1, 0], 2, 2)
    for line in launches():
        checked(lab, line["ids"], line["groups"], line["adapters"]["block"])
    rng = np.random.default_rng(15)
    for _ in range(150):
        groups, block = int(rng.integers(1, 9)), int(rng.choice([1, 2, 3, 8]))
        ids = rng.integers(-1, groups, size=int(rng.integers(0, 40)))
        checked(lab, ids, groups, block)


def test_the_worst_batch_has_its_programs(lab):
    for groups, block in ((4, 3), (8, 32), (3, 1)):
        ids = [*range(groups - 1), *[groups - 1] * (2 * block + 1)]
        checked(lab, ids, groups, block)
    checked(lab, [], 4, 2)
    checked(lab, [-1] * 9, 4, 2)
    for ids in ([0, 4], [0, -2]):
        refused(lambda ids=ids: lab.assign(ids, 4, 2), f"ids {ids} of four groups")


# --- against the pinned tree ----------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.upstream
def test_the_grids_are_those_of_the_pin(lab):
    from conformance.features.lora import grids

    for made, kept in zip(grids.cases(), launches(), strict=True):
        same(made, kept, f"{kept['name']}: launched again by the pinned code")
        checked(lab, made["ids"], made["groups"], made["adapters"]["block"])


def upstream_file(path):
    """A file of the pinned tree that needs torch and nothing else, as a module."""
    root = Path(importlib.util.find_spec("vllm").origin).parent
    spec = importlib.util.spec_from_file_location("pinned_" + Path(path).stem, root / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.torch
@pytest.mark.upstream
def test_the_real_torch_form_agrees_while_a_slot_is_empty(lab):
    import torch

    ops = upstream_file("lora/ops/torch_ops/lora_ops.py")
    rng = np.random.default_rng(14)
    x, W, adapters, _ = make(rng, 20, (12, 9), [3, 3])
    ids = rng.integers(-1, 2, size=20)
    A = torch.zeros(3, 3, 12, dtype=torch.float64)
    B = torch.zeros(3, 9, 3, dtype=torch.float64)
    for slot, pair in adapters.items():
        A[slot], B[slot] = map(torch.from_numpy, pair)
    shrunk, y = torch.zeros(20, 3, dtype=torch.float64), torch.from_numpy(x @ W.T)
    index = torch.from_numpy(ids)
    ops.bgmv_shrink(torch.from_numpy(x), A, shrunk, index, 1.0)
    ops.bgmv_expand(shrunk, B, y, index, True)
    slots = [*adapters.values(), None]
    close(
        lab.apply_batched(x, W, slots, ids, [1.0, 1.0, 1.0]),
        y.numpy(),
        "vLLM's torch form on two adapters in three slots: its -1 reads the last slot, which is 0",
    )
