"""What lab 07-03 pins: tiles change what is read and nothing else; one launch serves all experts.

Integer matrices are compared bit for bit: their sums are exact in any order.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from labkit import refused, same

HERE = Path(__file__).parent
SHAPES = ((64, 48, 32, 16, 16, 8), (37, 23, 19, 8, 8, 8), (1, 40, 64, 8, 16, 16),
          (5, 7, 3, 64, 64, 64), (30, 20, 10, 1, 1, 1), (33, 9, 50, 4, 32, 7))  # fmt: skip


def integers(seed, m, n, k):
    rng = np.random.default_rng(seed)
    return rng.integers(-9, 10, (m, k)), rng.integers(-9, 10, (k, n))


# --- the product ----------------------------------------------------------------------------------


def test_tiles_that_divide(lab):
    a, b = integers(0, 64, 48, 32)
    got = lab.tiled_gemm(lab.SlowMatrix(a), lab.SlowMatrix(b), 16, 16, 8)
    assert np.array_equal(got, a @ b), (
        f"integers in tiles of 16 x 16 x 8 give the exact product; first row expected "
        f"{(a @ b)[0, :6]}, came {None if got is None else np.asarray(got)[0, :6]}"
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_that_do_not_divide(lab, shape):
    m, n, k, *tiles = shape
    a, b = integers(1, m, n, k)
    got = lab.tiled_gemm(lab.SlowMatrix(a), lab.SlowMatrix(b), *tiles)
    assert np.array_equal(got, a @ b), (
        f"{m} x {n} x {k} (m, n, k) in tiles {tiles}: the last tiles are smaller, and every "
        f"element of the inner size belongs to one of them"
    )


def test_floats_and_their_dtype(lab):
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((40, 33)), rng.standard_normal((33, 21))
    whole = lab.tiled_gemm(lab.SlowMatrix(a), lab.SlowMatrix(b), 16, 16, 8)
    assert np.abs(whole - a @ b).max() < 1e-12, "float64: equal to rounding"
    single = [part.astype(np.float32) for part in (a, b)]
    got = lab.tiled_gemm(*(lab.SlowMatrix(part) for part in single), 16, 16, 8)
    assert got.dtype == np.float32, f"float32 times float32 stays float32; came {got.dtype}"
    difference = np.abs(got - a @ b).max()
    assert difference < 1e-4, f"float32: off by {difference}"


def test_bad_shapes_and_tiles_are_refused(lab):
    a, b = (lab.SlowMatrix(np.ones(shape)) for shape in ((4, 3), (3, 4)))
    refused(lambda: lab.tiled_gemm(a, a, 2, 2, 2), "4 x 3 times 4 x 3")
    for tiles in ((0, 2, 2), (2, 0, 2), (2, 2, 0), (-1, 2, 2)):
        refused(lambda tiles=tiles: lab.tiled_gemm(a, b, *tiles), f"tiles {tiles}")


# --- what it reads --------------------------------------------------------------------------------


def test_traffic_by_hand(lab, record_property):
    same(lab.naive_traffic(2, 3, 4), 48, "24 products with two factors each")
    same(lab.naive_traffic(1024, 1024, 1024), 2_147_483_648, "two thousand million elements")
    same(lab.tiled_traffic(1024, 1024, 1024, 128, 128), 16_777_216,
         "8 column tiles read all of a once each, 8 row tiles all of b")  # fmt: skip
    same(
        lab.tiled_traffic(37, 23, 19, 8, 8), 4294, "3 column tiles x 37 x 19, 5 row tiles x 19 x 23"
    )
    same(lab.tiled_traffic(1, 4096, 4096, 128, 128), 4096 * 32 + 4096 * 4096,
         "one row: b is read once, whatever the tile")  # fmt: skip
    same(
        lab.tiled_traffic(6, 6, 6, 1, 1), lab.naive_traffic(6, 6, 6), "tiles of 1 x 1 reuse nothing"
    )
    record_property("measured.one_row", lab.reuse_factor(1, 4096, 4096, 128, 128))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_loads_that_are_counted_are_the_formula(lab, shape):
    m, n, k, *tiles = shape
    a, b = (lab.SlowMatrix(part) for part in integers(3, m, n, k))
    lab.tiled_gemm(a, b, *tiles)
    expected = lab.tiled_traffic(m, n, k, tiles[0], tiles[1])
    assert a.loaded + b.loaded == expected, (
        f"{m} x {n} x {k} in tiles {tiles}: {a.loaded + b.loaded} elements were read, and "
        f"tiled_traffic says {expected}"
    )
    small = a.largest <= tiles[0] * tiles[2] and b.largest <= tiles[2] * tiles[1]
    assert small, (
        f"no read may be larger than a tile, {tiles[0]} x {tiles[2]} or {tiles[2]} x {tiles[1]}: "
        f"the largest were {a.largest} and {b.largest} elements, which fast memory does not hold"
    )


def test_reuse_is_the_harmonic_mean_of_the_tile(lab, record_property):
    for tile_m, tile_n in ((128, 128), (256, 16), (256, 128), (64, 256), (1, 1)):
        expected = 2 * tile_m * tile_n / (tile_m + tile_n)
        for k in (64, 1024):
            got = lab.reuse_factor(1024, 1024, k, tile_m, tile_n)
            assert math.isclose(got, expected), (
                f"tile {tile_m} x {tile_n}, inner size {k}, which cancels\nexpected {expected}\n"
                f"came     {got}"
            )
    record_property("measured.thin_tile", lab.reuse_factor(1024, 1024, 1024, 256, 16))


def test_one_row_has_nothing_to_reuse(lab):
    for tile_n in (1, 128, 4096):
        got = lab.reuse_factor(1, 4096, 4096, 128, tile_n)
        assert got <= 2, (
            f"one row, tiles 128 x {tile_n}: each weight is used once, so at most 2 (x is reused); "
            f"came {got}"
        )
    got = lab.reuse_factor(64, 4096, 4096, 64, 4096)
    assert math.isclose(got, 2 * 64 * 4096 / (64 + 4096)), f"64 rows reuse each weight; came {got}"


def test_larger_tiles_read_less_and_need_more_room(lab):
    rng = np.random.default_rng(5)
    for _ in range(50):
        m, n, k, tile_m, tile_n = (int(v) for v in rng.integers(1, 200, 5))
        less = lab.tiled_traffic(m, n, k, 2 * tile_m, 2 * tile_n)
        more = lab.tiled_traffic(m, n, k, tile_m, tile_n)
        turned = lab.tiled_traffic(n, m, k, tile_n, tile_m)
        assert less <= more, f"{m} x {n} x {k}: doubling {tile_m} x {tile_n} reads {less} > {more}"
        assert turned == more, f"transposed, the same is read: {turned} and {more}"
    sizes = [lab.fast_memory_bytes(t, t, 32, 2) for t in (64, 128, 144, 160)]
    same(sizes, [24_576, 81_920, 101_376, 122_880],
         "two input tiles of 2 bytes, 4-byte sums: 144 fits 99 KiB, 160 does not")  # fmt: skip


# --- all experts in one launch --------------------------------------------------------------------


def child(lab, what):
    """The harness on this lab's file, in a process of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it comes with torch for CUDA on Linux)")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    if what == "compile":
        del environment["TRITON_INTERPRET"]
    return subprocess.run(
        [sys.executable, str(HERE / "harness.py"), str(lab.__file__), what], env=environment,
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.torch
def test_the_interpreted_kernel_is_the_product_of_every_pair(lab):
    said = child(lab, "interpret")
    assert said.returncode == 0, (
        f"the kernel must run in Triton's interpreter:\n{said.stderr[-2000:]}"
    )
    errors = json.loads(said.stdout.splitlines()[-1])
    assert max(errors.values()) < 1e-5, (
        f"float32 against float64, largest error of each case: {errors}; 1e9 stands for NaN, which "
        "a row that nobody wrote may hold"
    )


@pytest.mark.torch
def test_the_kernel_compiles_for_an_h100(lab):
    said = child(lab, "compile")
    assert said.returncode == 0, f"compute capability 9.0, no GPU needed:\n{said.stderr[-2000:]}"
    assert "mma.sync" in said.stdout or "wgmma" in said.stdout, (
        "the product must run on the tensor cores: tl.dot on 16-bit operands"
    )


@pytest.mark.torch
def test_the_run_script_without_a_gpu(lab):
    same(lab.naive_traffic(2, 3, 4), 48, "write the lab first: 24 products with two factors each")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (it comes with torch for CUDA on Linux)")
    said = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--dry-run", "--file", str(HERE / "solution.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert said.returncode == 0, f"run.py --dry-run failed:\n{said.stderr[-2000:]}"
    errors = [
        float(line.split("error ")[1].split(",")[0])
        for line in said.stdout.splitlines()
        if "not measured" in line
    ]
    assert len(errors) == 4 and max(errors) < 1e-5, (
        f"a layer by two launches and by a loop, for 1 and 5 tokens, equal float64:\n{said.stdout}"
    )


@pytest.mark.gpu
def test_the_compiled_kernel_is_the_product_of_every_pair(lab, gpu_device):
    from course.files import load_module

    errors = load_module(HERE / "harness.py", "harness").errors(lab, "float16", str(gpu_device))
    assert max(errors.values()) < 1e-2, f"float16 inputs and results, sums in float32: {errors}"
