"""What lab 06-01 pins: an int8 grid per output channel, its error bound, its bytes, its guards."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

EXAMPLE = np.array([[0.5, -0.9, 0.25, 2.0], [100, -40, 25, -12.5], [0, 0, 0, 0]], np.float32)


def rel(a, b) -> float:
    """Norm of the error over norm of the exact one, over all elements."""
    return float(np.linalg.norm(np.asarray(a, float) - b) / np.linalg.norm(np.asarray(b, float)))


def gaussian(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@contextmanager
def refused(named, why):
    """A ValueError whose message says `named`; fails, with `why`, where none comes."""
    try:
        yield
    except ValueError as error:
        assert named in str(error), (
            f"{why}: the ValueError should say {named!r}, so that its reader knows what to mend.\n"
            f"came {str(error)!r}"
        )
    else:
        pytest.fail(f"{why}: expected a ValueError that says {named!r}, none came", pytrace=False)


def test_the_worked_example(lab):
    q, scales = lab.quantize_per_channel(EXAMPLE)
    assert q.dtype == np.int8 and scales.dtype == np.float32 and scales.shape == (3,), (
        "quantize_per_channel returns int8 codes and float32 scales of shape [out_features]: came "
        f"{q.dtype}, {scales.dtype} {scales.shape}"
    )
    assert np.allclose(scales, [2 / 127, 100 / 127, 1.0], rtol=1e-6), (
        "a row's scale is its largest magnitude over 127; a row of zeros gets 1.\n"
        f"expected [0.015748 0.787402 1.]\ncame     {scales}"
    )
    codes = [[32, -57, 16, 127], [127, -51, 32, -16], [0, 0, 0, 0]]
    assert q.tolist() == codes, (
        "codes are W / scale of the row, rounded to the nearest integer.\n"
        f"expected {codes}\ncame     {q.tolist()}"
    )
    back = lab.dequantize(q, scales)
    assert back.dtype == np.float32 and np.allclose(
        back[0], [0.503937, -0.897638, 0.251969, 2.0], atol=1e-6
    ), (
        "dequantize multiplies each row by its scale, in float32.\n"
        f"expected [0.503937 -0.897638 0.251969 2.]\ncame     {back[0]} ({back.dtype})"
    )
    one, scale = lab.quantize_per_tensor(EXAMPLE)
    assert isinstance(scale, float) and abs(scale - 100 / 127) < 1e-6, (
        f"per tensor there is one scale, a Python float of 100 / 127 = 0.787402; came {scale!r}"
    )
    assert one[0].tolist() == [1, -1, 0, 3], (
        "under the scale of the loud row, the quiet row keeps three codes.\n"
        f"expected [1, -1, 0, 3]\ncame     {one[0].tolist()}"
    )
    tensor_back = lab.dequantize(one, scale)
    assert 0.00241 < rel(back, EXAMPLE) < 0.00245 and rel(tensor_back[0], EXAMPLE[0]) > 0.2370, (
        "the whole matrix errs by 0.00243 per channel and 0.00541 per tensor, row 0 by 0.00221 and "
        f"0.2375; came {rel(back, EXAMPLE):.5f}, {rel(tensor_back, EXAMPLE):.5f}, "
        f"{rel(back[0], EXAMPLE[0]):.5f}, {rel(tensor_back[0], EXAMPLE[0]):.4f}"
    )
    y = lab.quant_linear(np.array([[1.0, 2, 3, 4], [0, 1, 0, -1]]), q, scales)
    expected = [[7.464567, 44.881890, 0], [-2.897638, -27.559055, 0]]
    assert np.allclose(y, expected, atol=1e-5), (
        f"quant_linear is x @ dequantized.T.\nexpected {expected}\ncame     {y.tolist()}"
    )


def test_negative_dominated_row(lab):
    W = np.array([[-4.0, 1.0, 0.5, -0.25], [-3.0, -2.0, -1.0, -0.5]], np.float32)
    q, scales = lab.quantize_per_channel(W)
    assert q[:, 0].tolist() == [-127, -127], (
        "the largest magnitude of a row gets the largest code, whatever its sign: expected -127 "
        f"twice, came {q[:, 0].tolist()}. max(W) is not max|W|."
    )
    assert np.allclose(scales, [4 / 127, 3 / 127], rtol=1e-6), (
        f"expected [{4 / 127:.6f} {3 / 127:.6f}]\ncame     {scales}"
    )
    for matrix, largest in ((W, 4), (W[1:], 3)):
        _, scale = lab.quantize_per_tensor(matrix)
        assert abs(scale - largest / 127) < 1e-6, (
            f"per tensor too, also for a matrix of one row: expected {largest / 127:.6f}, came "
            f"{scale}"
        )


def test_square_matrix_scale_axis(lab):
    W = gaussian((8, 8)) * 2.0 ** np.arange(-4, 4, dtype=np.float32)[:, None]  # loud rows last
    q, scales = lab.quantize_per_channel(W)
    assert np.allclose(scales, np.abs(W).max(axis=1) / 127, rtol=1e-6), (
        "scales belong to output channels, the rows of [out_features, in_features]. On a square "
        "matrix the wrong axis has the right shape.\n"
        f"expected {np.abs(W).max(axis=1) / 127}\ncame     {scales}"
    )
    back = lab.dequantize(q, scales)
    worst = max(rel(back[o], W[o]) for o in range(8))
    assert worst < 0.02, (
        f"every row must come back within 2 %; the worst errs by {worst:.3f}. q * scales without "
        "scales[:, None] multiplies columns, and on a square matrix numpy does not object."
    )


def test_roundtrip_error_small(lab):
    for shape in ((100, 100), (64, 4096), (7, 3)):
        W = gaussian(shape)
        for name in ("quantize_per_channel", "quantize_per_tensor"):
            q, scales = getattr(lab, name)(W)
            error = np.abs(lab.dequantize(q, scales).astype(float) - W)
            bound = np.asarray(scales, float) / 2 * (1 + 1e-5)
            bound = bound[:, None] if np.ndim(scales) else bound
            worst = float((error / bound).max())
            assert worst <= 1, (
                f"{name}, {shape}: the nearest grid point is at most half a step away, so no "
                f"element may err by more than scale / 2; one errs by {worst:.2f} times that. "
                "Truncating, or a scale that does not reach the largest weight, does this."
            )
        q, scales = lab.quantize_per_channel(W)
        came = rel(lab.dequantize(q, scales), W)
        assert 0.002 < came < 0.01, (
            f"Gaussian weights {shape}: 255 codes give an error below 1 % of the norm (and above "
            f"0.2 %, or something is not quantized); came {came:.4f}"
        )


def test_memory_saving_about_4x(lab):
    W = gaussian((100, 100))
    q, scales = lab.quantize_per_channel(W)
    assert lab.memory_bytes(W) == 40_000, (
        f"100 x 100 float32 take 40,000 bytes; came {lab.memory_bytes(W)}"
    )
    assert lab.memory_bytes(W.astype(np.float16)) == 20_000, (
        "memory_bytes is the size of the array as it is: 20,000 bytes for 100 x 100 float16, came "
        f"{lab.memory_bytes(W.astype(np.float16))}"
    )
    came = lab.memory_bytes_quant(q, scales)
    assert came == 10_400, (
        f"10,000 codes of 1 byte and 100 scales of 4 bytes are 10,400 bytes; came {came}. "
        "Scales are stored too."
    )
    came = lab.memory_bytes_quant(*lab.quantize_per_tensor(W))
    assert came == 10_004, (
        f"per tensor: 10,000 codes and one scale of 4 bytes are 10,004 bytes; came {came}"
    )


def test_per_channel_beats_per_tensor_on_outlier(lab):
    for seed in (0, 1):
        W = gaussian((64, 64), seed)
        W[3] *= 100
        others = np.arange(64) != 3
        errors = {}
        for name in ("quantize_per_channel", "quantize_per_tensor"):
            back = lab.dequantize(*getattr(lab, name)(W))
            errors[name] = rel(back[others], W[others])
        assert errors["quantize_per_channel"] < 0.01, (
            "one row 100 times louder than the rest must not touch the other rows when each has "
            f"its own scale: expected below 0.01, came {errors['quantize_per_channel']:.4f}"
        )
        assert errors["quantize_per_tensor"] > 0.3, (
            "under one shared scale the loud row sets the step for all: the other rows should err "
            f"by more than 0.3, came {errors['quantize_per_tensor']:.4f}. Is the scale shared?"
        )


def test_quant_linear_matches_fp_matmul(lab):
    W, x = gaussian((48, 96)), gaussian((2, 5, 96), seed=1)
    q, scales = lab.quantize_per_channel(W)
    y = lab.quant_linear(x, q, scales)
    assert y.shape == (2, 5, 48), f"[2, 5, 96] through [48, 96] gives [2, 5, 48]; came {y.shape}"
    came = rel(y, x @ W.T)
    assert came < 0.015, (
        "rounding errors of the weights are independent, so the output errs by about as much as "
        f"the weights: expected below 0.015, came {came:.4f}. Activations are not quantized here."
    )
    doubled = lab.quant_linear(x.astype(np.float64), q, scales)
    assert y.dtype == np.float32 and doubled.dtype == np.float64, (
        "the result has the dtype of x, so that an engine in float64 stays in float64; came "
        f"{y.dtype} and {doubled.dtype}"
    )


def test_zero_and_denormal_rows(lab):
    tiny = np.float32(1e-44)  # a denormal: divided by 127 it is 0
    small = np.float32(2e-43)  # divided by 127 it is the smallest denormal, too coarse a step
    W = np.array([[0, 0], [tiny, -tiny], [small, -small], [1, -1]], np.float32)
    try:
        with np.errstate(divide="raise", invalid="raise"):
            q, scales = lab.quantize_per_channel(W)
            of_tensors = [
                lab.quantize_per_tensor(np.full((2, 3), value, np.float32))[1]
                for value in (np.float32(0), tiny)
            ]
    except (FloatingPointError, ValueError) as error:
        pytest.fail(
            f"a scale of 0 was divided by or passed on ({error}). Look at the scales, not at the "
            "weights: a row of 1e-44 is not zero, but 1e-44 / 127 is 0 in float32"
        )
    assert scales[:2].tolist() == [1.0, 1.0] and of_tensors == [1.0, 1.0], (
        "where the scale is 0 in float32 use 1.0: for a row or tensor of zeros, and for one of "
        f"1e-44, whose scale underflows.\nexpected [1.0, 1.0] for rows and for tensors\n"
        f"came     {scales[:2].tolist()} and {of_tensors}"
    )
    assert q[:2].tolist() == [[0, 0], [0, 0]], f"those rows have codes 0; came {q[:2].tolist()}"
    assert q[2].tolist() == [127, -127], (
        "2e-43 / 127 rounds to a denormal so coarse that the quotient is 143: without the clip it "
        f"wraps in int8. Expected [127, -127], came {q[2].tolist()}"
    )
    assert np.isfinite(lab.dequantize(q, scales)).all(), "NaN or infinity came back"


def test_clip_external_scale(lab):
    W = np.array([[0.5, 1.27, 1.28, 5.0], [-0.5, -1.27, -1.28, -5.0]], np.float32)
    q = lab.quantize_with_scale(W, 0.01)
    expected = [[50, 127, 127, 127], [-50, -127, -127, -127]]
    assert q.dtype == np.int8 and q.tolist() == expected, (
        "a scale from elsewhere may be too small for some weights. They get the last code of their "
        "side; a cast without a clip turns 128 into -128, and -128 is not a code here.\n"
        f"expected {expected}\ncame     {q.tolist()} ({q.dtype})"
    )
    per_row = lab.quantize_with_scale(np.array([[300.0, 254.0], [1.0, 0.5]]), np.array([2.0, 0.01]))
    assert per_row.tolist() == [[127, 127], [100, 50]], (
        "one scale per row, weights of 300 under a step of 2: clip the code, not the weight.\n"
        f"expected [[127, 127], [100, 50]]\ncame     {per_row.tolist()}"
    )
    for scale in (0.0, -1.0, np.nan, np.inf, np.array([1.0, 0.0]), np.ones(3), np.ones((2, 1))):
        why = f"scale={scale!r} is not positive and finite, of shape () or [out_features]"
        with refused("scale", why):
            lab.quantize_with_scale(W, scale)


def test_negation_symmetry(lab):
    halves = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 127.0]], np.float32)  # scale 1: ties
    q, _ = lab.quantize_per_channel(halves)
    assert q.tolist() == [[0, 2, 2, 0, -2, -2, 127]], (
        "ties go to the even code, as np.rint and the GPU's conversion do.\n"
        f"expected [[0, 2, 2, 0, -2, -2, 127]]\ncame     {q.tolist()}"
    )
    q = lab.quantize_with_scale(np.array([[45.5], [143.5]], np.float32), np.array([7, 41]))
    assert q.tolist() == [[6], [4]], (
        "45.5 / 7 = 6.5 and 143.5 / 41 = 3.5 are ties, exactly. Times the reciprocal of the scale, "
        "which is rounded itself, they are not.\n"
        f"expected [[6], [4]]\ncame     {q.tolist()}"
    )
    W = np.vstack([gaussian((16, 7)), halves])
    (q, scales), (minus_q, minus_scales) = (lab.quantize_per_channel(M) for M in (W, -W))
    assert np.array_equal(minus_q, -q) and np.array_equal(minus_scales, scales), (
        "the grid is symmetric, so -W has the same scales and the negated codes; "
        f"{int((minus_q != -q).sum())} codes differ"
    )


def test_requantize_is_idempotent(lab):
    W = gaussian((32, 64))
    q, scales = lab.quantize_per_channel(W)
    again, scales_again = lab.quantize_per_channel(lab.dequantize(q, scales))
    assert np.array_equal(again, q) and np.allclose(scales_again, scales, rtol=1e-6), (
        "weights that lie on the grid must come back unchanged: the largest of a row is code 127, "
        f"so the second scale equals the first. {int((again != q).sum())} of {q.size} codes moved. "
        "A divisor other than 127 moves them."
    )


def test_bad_input_is_refused_and_good_input_kept(lab):
    for bad in (np.zeros(4), np.zeros((2, 2, 2)), np.zeros((0, 4)), [[1.0, np.nan]], [[np.inf, 1]]):
        for name in ("quantize_per_channel", "quantize_per_tensor"):
            with refused("W ", f"{name} of {np.array(bad)!r}: call check_matrix first"):
                getattr(lab, name)(np.array(bad))
    W = gaussian((4, 8))
    W[2] = 0
    kept = W.copy()
    lab.quantize_per_channel(W)
    lab.quantize_per_tensor(W)
    lab.quantize_with_scale(W, np.full(4, 0.1, np.float32))
    assert np.array_equal(W, kept), "the caller's weights changed: they may be needed again"
    scales = np.array([1.0, 2.0], np.float32)
    q = np.array([[1, 2], [3, 4]], np.int8)
    lab.dequantize(q, scales)
    assert q.tolist() == [[1, 2], [3, 4]] and scales.tolist() == [1.0, 2.0], (
        "dequantize changed its arguments"
    )


def test_any_float_dtype_goes_in(lab):
    W = gaussian((6, 16)).astype(np.float16)  # exact in all three
    q, scales = lab.quantize_per_channel(W.astype(np.float32))
    one, scale = lab.quantize_per_tensor(W.astype(np.float32))
    for dtype in (np.float16, np.float64):
        same, same_scales = lab.quantize_per_channel(W.astype(dtype))
        assert same_scales.dtype == np.float32 and np.array_equal(same_scales, scales), (
            f"a checkpoint in {dtype.__name__} gets float32 scales, computed in float32: work with "
            f"what check_matrix returns.\nexpected {scales} (float32)\n"
            f"came     {same_scales} ({same_scales.dtype})"
        )
        other, other_scale = lab.quantize_per_tensor(W.astype(dtype))
        assert isinstance(other_scale, float) and other_scale == scale, (
            f"per tensor, {dtype.__name__}: the scale has a float32's value.\n"
            f"expected {scale!r}\ncame     {other_scale!r}"
        )
        assert np.array_equal(same, q) and np.array_equal(other, one), (
            f"the same weights in {dtype.__name__} must give the same codes; "
            f"{int((same != q).sum() + (other != one).sum())} differ"
        )


def test_linear_is_a_part_of_the_engine(lab):
    weight, bias, x = gaussian((6, 8)), gaussian((6,), 1), gaussian((3, 8), 2)
    q, scales = lab.quantize_per_channel(weight)
    plain = lab.Linear(weight)
    held = [v for v in vars(plain).values() if isinstance(v, np.ndarray)]
    assert sum(v.nbytes for v in held) == 6 * 8 + 6 * 4, (
        "the layer holds codes and scales, 48 + 24 bytes, and not the weight it was built from; it "
        f"holds arrays of {sorted(v.nbytes for v in held)} bytes"
    )
    assert np.allclose(plain(x), x @ lab.dequantize(q, scales).T, atol=1e-6), (
        "Linear(weight)(x) is quant_linear(x, q, scales)"
    )
    with_bias = lab.Linear(weight, bias)
    first = with_bias(x)
    assert np.allclose(first, plain(x) + bias, atol=1e-6), (
        "the bias is added to the product, in floating point.\n"
        f"expected {(plain(x) + bias)[0]}\ncame     {first[0]} (first token)"
    )
    assert np.array_equal(with_bias(x), first), "calling the layer twice gives the same"
    assert with_bias(x.astype(np.float64)).dtype == np.float64, (
        "float64 in, float64 out: the engine's equality tests run in float64"
    )
