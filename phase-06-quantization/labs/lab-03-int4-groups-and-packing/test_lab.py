"""What lab 06-03 pins: groups along a row, scales as stored, and every bit in its place."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from conformance import parts

EXAMPLE = np.array([[0.7, -0.36, 0.1, 0, 7, -3.6, 1, 0.26]], np.float32)
EIGHT = np.array([[-7, -5, -3, -1, 1, 3, 5, 7]], np.int8)
LAYOUTS = ("compressed-tensors", "gptq", "awq")


def rel(a, b) -> float:
    """Norm of the error over norm of the exact one, over all elements."""
    return float(np.linalg.norm(np.asarray(a, float) - b) / np.linalg.norm(np.asarray(b, float)))


def gaussian(shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def roundtrip(lab, W, group_size):
    return lab.dequantize_grouped(*lab.quantize_grouped(W, group_size), group_size)


def hexes(words) -> list[str]:
    return [f"{word:08X}" for word in np.asarray(words).view(np.uint32).ravel()]


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
    q, scales = lab.quantize_grouped(EXAMPLE, 4)
    assert q.dtype == np.int8 and q.tolist() == [[7, -4, 1, 0, 7, -4, 1, 0]], (
        "in groups of 4 both halves of the row keep their shape: each group's largest weight is "
        f"code 7.\nexpected [[7, -4, 1, 0, 7, -4, 1, 0]]\ncame     {q.tolist()} ({q.dtype})"
    )
    assert scales.shape == (1, 2) and np.allclose(scales, [[0.0999756, 1.0]], rtol=1e-5), (
        "one scale per group, largest magnitude / 7 as a float16, [out_features, num_groups].\n"
        f"expected [[0.0999756 1.]]\ncame     {scales.tolist()} ({scales.dtype})"
    )
    wide, one = lab.quantize_grouped(EXAMPLE, 8)
    assert wide.tolist() == [[1, 0, 0, 0, 7, -4, 1, 0]] and one.tolist() == [[1.0]], (
        "in one group of 8 the loud half sets the step and the quiet half is nearly erased.\n"
        f"expected [[1, 0, 0, 0, 7, -4, 1, 0]] with scale 1.0\ncame     {wide.tolist()}, {one}"
    )
    assert np.array_equal(lab.quantize_grouped(EXAMPLE, -1)[0], wide), (
        "group_size -1 is one group per row"
    )
    back = lab.dequantize_grouped(q, scales, 4)
    expected = [0.699829, -0.399902, 0.0999756, 0, 7, -4, 1, 0]
    assert back.dtype == np.float32 and np.allclose(back[0], expected, atol=1e-5), (
        "each code times the scale of its own group, in float32.\n"
        f"expected {expected}\ncame     {back[0].tolist()} ({back.dtype})"
    )


def test_groups_do_not_straddle_rows(lab):
    W = np.array([[1, 2, 3, 4], [10, 20, 30, 40], [100, 200, 300, 400]], np.float32)
    _, scales = lab.quantize_grouped(W, 2)
    expected = np.float16([[2 / 7, 4 / 7], [20 / 7, 40 / 7], [200 / 7, 400 / 7]])
    assert scales.shape == (3, 2) and np.array_equal(scales, expected), (
        "group g of row o holds the weights g * size to (g + 1) * size of that row.\n"
        f"expected {expected.tolist()}\ncame     {scales.tolist()}"
    )
    other = lab.dequantize_grouped(np.full((3, 4), 7, np.int8), scales, 2)
    maxima = [[2, 2, 4, 4], [20, 20, 40, 40], [200, 200, 400, 400]]
    assert np.allclose(other, maxima, rtol=1e-3), (
        "code 7 everywhere gives back each group's largest weight.\n"
        f"expected about {maxima}\ncame     {other.tolist()}"
    )
    with refused("scales", "scales [2, 3] for codes [3, 4] in groups of 2, not to be broadcast"):
        lab.dequantize_grouped(np.zeros((3, 4), np.int8), scales.T, 2)
    with refused("scales", "scales [1, 2] for codes [3, 4]: numpy would use the row for all three"):
        lab.dequantize_grouped(np.zeros((3, 4), np.int8), scales[:1], 2)
    with refused("group_size", "dequantize_grouped of rows of 4 in groups of 3"):
        lab.dequantize_grouped(np.zeros((3, 4), np.int8), scales, 3)


def test_scales_are_stored_in_float16_and_used_as_stored(lab):
    q, scales = lab.quantize_grouped(np.array([[0.7, 0.64995, -0.64995, 0.0]]), 4)
    assert scales.dtype == np.float16, f"scales are float16, 2 bytes each; came {scales.dtype}"
    assert q.tolist() == [[7, 7, -7, 0]], (
        "0.7 / 7 = 0.1 is stored as 0.09998. The reader multiplies by the stored scale, so divide "
        "by that one: 0.64995 is then 6.501 steps, not 6.4995.\n"
        f"expected [[7, 7, -7, 0]]\ncame     {q.tolist()}"
    )


def test_pack_unpack_roundtrip_is_exact(lab):
    for codes, expected in (([-7, 7, 0, 1], ["F1", "98"]), ([-8, -1], ["70"])):
        packed = lab.pack_int4(np.array([codes], np.int8))
        came = [f"{int(byte) & 0xFF:02X}" for byte in packed.ravel()]
        assert packed.dtype == np.uint8 and came == expected, (
            f"pack_int4({codes}): add 8, the even index in the low nibble, the odd one in the high."
            f"\nexpected {expected} (uint8)\ncame     {came} ({packed.dtype})"
        )
    q = np.random.default_rng(0).integers(-8, 8, (16, 64)).astype(np.int8)
    q[0, :16] = np.arange(-8, 8)
    packed = lab.pack_int4(q)
    assert packed.shape == (16, 32), f"64 codes of 4 bits are 32 bytes; came {packed.shape}"
    back = lab.unpack_int4(packed)
    assert back.dtype == np.int8 and np.array_equal(back, q), (
        "unpack_int4(pack_int4(q)) is q, bit for bit: packing loses nothing. First row:\n"
        f"expected {q[0, :16].tolist()} (int8)\ncame     {back[0, :16].tolist()} ({back.dtype})"
    )


def test_grouped_roundtrip_error_bounded(lab):
    W = gaussian((16, 256))
    q, scales = lab.quantize_grouped(W, 32)
    assert int(np.abs(q).max()) == 7, (
        f"codes run from -7 to 7 and the largest weight of a group gets 7; came {np.abs(q).max()}"
    )
    error = np.abs(lab.dequantize_grouped(q, scales, 32).astype(float) - W)
    bound = np.repeat(scales.astype(float), 32, axis=1) * 0.5 * 1.01
    assert (error <= bound).all(), (
        "no weight moves by more than half a step of its group; the worst moves "
        f"{float((error / bound).max()):.2f} times that"
    )
    came = rel(lab.dequantize_grouped(q, scales, 32), W)
    assert 0.05 < came < 0.15, (
        f"Gaussian weights in groups of 32 err by about 0.095 of their norm; came {came:.4f}"
    )


def test_ties_go_to_the_even_code(lab):
    q, scales = lab.quantize_grouped(np.array([[49, 45.5], [287, 143.5]], np.float32), 2)
    assert scales.tolist() == [[7], [41]] and q.tolist() == [[7, 6], [7, 4]], (
        "scales 49 / 7 and 287 / 7; 45.5 / 7 = 6.5 and 143.5 / 41 = 3.5 are ties, exactly. Times "
        "the reciprocal of the scale, which is rounded itself, they are not.\n"
        f"expected [[7], [41]], [[7, 6], [7, 4]]\ncame     {scales.tolist()}, {q.tolist()}"
    )


def test_smaller_groups_capture_local_magnitude(lab):
    rng = np.random.default_rng(0)
    band = np.repeat(10.0 ** rng.uniform(-1, 1, 16), 64)  # the loudness changes every 64 inputs
    W = rng.standard_normal((32, 1024)) * band
    small, large = (roundtrip(lab, W, size) for size in (16, 256))
    assert rel(small, W) < 0.7 * rel(large, W), (
        "loudness that changes along the row is what groups are for: expected about 0.085 at 16 "
        f"and 0.158 at 256, came {rel(small, W):.3f} and {rel(large, W):.3f}. Do your groups lie "
        "along the row?"
    )
    quiet = band < 1
    fine, coarse = rel(small[:, quiet], W[:, quiet]), rel(large[:, quiet], W[:, quiet])
    assert fine * 4 < coarse, (
        "the quiet stretches are where it shows: expected 0.085 at 16 and 0.80 at 256, came "
        f"{fine:.3f} and {coarse:.3f}"
    )


def test_memory_about_8x_smaller_than_fp32(lab):
    W = gaussian((1024, 1024))
    for group_size, expected in ((128, 540_672), (16, 655_360)):
        q, scales = lab.quantize_grouped(W, group_size)
        came = lab.memory_bytes_grouped(lab.pack_int4(q), scales)
        assert came == expected, (
            f"1024 x 1024 in groups of {group_size}: 524,288 bytes of codes and "
            f"{1024 * 1024 // group_size:,} scales of 2 bytes are {expected:,}; came {came:,}. "
            f"({W.nbytes / expected:.2f} times less than float32)"
        )


def test_bytes_are_those_of_the_arrays(lab):
    packed, scales = np.zeros((4, 6), np.uint8), np.zeros((4, 3), np.float32)
    came = lab.memory_bytes_grouped(packed, scales)
    assert came == 72, f"24 bytes of codes and 12 scales of 4 bytes: expected 72, came {came}"


def test_group_scale_overhead_is_the_tradeoff(lab):
    W = gaussian((8, 256))
    counts = {size: lab.quantize_grouped(W, size)[1].size for size in (16, 128, 256, -1)}
    assert counts == {16: 128, 128: 16, 256: 8, -1: 8}, (
        "a scale per group: 8 rows of 256 have 8 * 256 / group_size of them.\n"
        f"expected {{16: 128, 128: 16, 256: 8, -1: 8}}\ncame     {counts}"
    )
    errors = {size: rel(roundtrip(lab, W, size), W) for size in (16, 64, 256)}
    assert errors[16] < errors[64] < errors[256], (
        f"what the extra scales buy is a smaller error; came {errors}"
    )


def test_a_spike_affects_one_group(lab):
    W = gaussian((4, 64))
    spiked = W.copy()
    spiked[2, 37] = 50.0
    changed = np.argwhere(roundtrip(lab, W, 16) != roundtrip(lab, spiked, 16))
    rows, columns = set(changed[:, 0].tolist()), changed[:, 1]
    assert rows == {2} and columns.min() >= 32 and columns.max() < 48, (
        "a spike at [2, 37] may change the group it lies in, row 2, inputs 32..47, and nothing "
        f"else; changed were rows {sorted(rows)}, inputs {columns.min()}..{columns.max()}"
    )


def test_zero_underflow_and_overflow_groups(lab):
    smallest = 2.0**-24  # the smallest positive float16
    W = np.array([[0, 0, 1e-7, -1e-7, 9.5 * smallest, -9.5 * smallest, 1, -1]], np.float32)
    try:
        with np.errstate(divide="raise", invalid="raise"):
            q, scales = lab.quantize_grouped(W, 2)
    except FloatingPointError as error:
        pytest.fail(f"something was divided by 0 ({error}): replace scales that are 0 as stored")
    assert scales[0, :2].tolist() == [1.0, 1.0] and q[0, :4].tolist() == [0, 0, 0, 0], (
        "a scale that is 0 as stored becomes 1.0: for a group of zeros and for one of 1e-7, whose "
        f"scale of 1.4e-8 underflows in float16. Came {scales[0, :2].tolist()}, {q[0, :4].tolist()}"
    )
    assert scales[0, 2] == np.float16(smallest) and q[0, 4:6].tolist() == [7, -7], (
        "the scale of the third group rounds down to the smallest float16, so its weights are 9.5 "
        f"steps away and must be clipped to ±7. Came scale {scales[0, 2]!r}, {q[0, 4:6].tolist()}"
    )
    assert np.isfinite(lab.quantize_grouped(np.full((1, 2), 4.5e5), 2)[1]).all(), (
        "4.5e5 / 7 = 64,286 still fits into float16"
    )
    for large in (4.7e5, 1e30):
        with refused("float16", f"{large:g} / 7 is infinite in float16"):
            lab.quantize_grouped(np.array([[1.0, 1.0, large, 0.0]]), 2)


def test_bad_input_is_refused_and_good_input_kept(lab):
    W = gaussian((2, 96))
    for group_size in (64, 97, 192, 0, -2):
        why = (
            f"rows of 96 cannot be cut into groups of {group_size}; dropping or padding the last "
            "group changes the model silently"
        )
        with refused("group_size", why):
            lab.quantize_grouped(W, group_size)
    for bad in (np.zeros(4), np.array([[1.0, np.nan]])):
        with refused("W ", f"quantize_grouped of {bad!r}: call check_matrix first"):
            lab.quantize_grouped(bad, 2)
    for codes in ([[8, 0]], [[-9, 0]], [[1, 2, 3]]):
        with refused("codes", f"pack_int4({codes}): call check_codes first"):
            lab.pack_int4(np.array(codes))
    for codes in ([[8] * 8], [[0] * 12]):
        with refused("codes", f"pack_words({codes}): call check_codes first"):
            lab.pack_words(np.array(codes))
    for function in (lab.pack_layout, lab.unpack_layout):
        with refused(
            "layout", f"{function.__name__} of layout 'marlin', which is not one of three"
        ):
            function(np.zeros((8, 8), np.int32), "marlin")
    kept, q = W.copy(), np.full((2, 8), -8, np.int8)
    lab.quantize_grouped(W, 16)
    lab.pack_int4(q)
    lab.pack_words(q)
    assert np.array_equal(W, kept) and (q == -8).all(), "an argument was changed in place"


def test_eight_codes_in_a_word(lab):
    for name, expected in (("STANDARD", "FDB97531"), ("AWQ", "FB73D951")):
        words = lab.pack_words(EIGHT, getattr(lab, name))
        assert words.dtype == np.int32 and words.shape == (1, 1) and hexes(words) == [expected], (
            f"pack_words({EIGHT[0].tolist()}, {name}): nibble k, from the low end, holds "
            f"q[order[k]] + 8.\nexpected [{expected}] (int32)\ncame     {hexes(words)} "
            f"({words.dtype}, {words.shape})"
        )
        back = lab.unpack_words(words, getattr(lab, name))
        assert back.dtype == np.int8 and np.array_equal(back, EIGHT), (
            f"unpack_words with the same order gives the codes back.\nexpected {EIGHT.tolist()}\n"
            f"came     {back.tolist()} ({back.dtype})"
        )
    mixed = lab.unpack_words(lab.pack_words(EIGHT, lab.AWQ))
    assert mixed.tolist() == [[-7, -3, 1, 5, -5, -1, 3, 7]], (
        "an AWQ word read in the standard order gives eight plausible codes in the wrong places: "
        "nothing raises, the model is just broken.\n"
        f"expected [[-7, -3, 1, 5, -5, -1, 3, 7]]\ncame     {mixed.tolist()}"
    )


def test_words_of_any_shape(lab):
    rng = np.random.default_rng(8)
    for shape in ((16,), (2, 8), (3, 2, 24)):
        q = rng.integers(-8, 8, shape).astype(np.int8)
        try:
            words = lab.pack_words(q)
            came = (words.shape, lab.unpack_words(words).tolist())
        except ValueError as error:
            came = repr(error)
        assert came == ((*shape[:-1], shape[-1] // 8), q.tolist()), (
            f"codes of shape {shape}: the last axis is packed, whatever stands in front of it, and "
            f"comes back.\ncame {came}"
        )


def test_layouts_equal_the_reference_packers(lab):
    cases = [case for case in parts.load("quantization_layouts") if case["kind"] == "pack"]
    for case in cases:
        q = np.array(case["codes"]).T - 8  # recorded as [in_features, out_features]
        for layout in LAYOUTS:
            expected = np.array(case[layout], dtype=np.uint32)
            words = lab.pack_layout(q, layout)
            assert words.dtype == np.int32 and words.shape == expected.shape, (
                f"{layout} of {q.shape[0]} outputs and {q.shape[1]} inputs is int32 "
                f"{expected.shape}; came {words.dtype} {words.shape}"
            )
            assert hexes(words) == hexes(expected), (
                f"{layout}, {q.shape[0]} outputs, {q.shape[1]} inputs: not the words that vLLM's "
                f"reference packer gives.\nexpected {hexes(expected)[:6]} ...\n"
                f"came     {hexes(words)[:6]} ..."
            )


def test_words_of_a_checkpoint_come_back(lab):
    cases = [case for case in parts.load("quantization_layouts") if case["kind"] == "unpack"]
    for case in cases:
        words = np.array(case["words"], dtype=np.uint32).view(np.int32)
        expected = np.array(case["codes"]).T - 8
        q = lab.unpack_layout(words, case["layout"])
        assert q.dtype == np.int8 and q.shape == expected.shape, (
            f"{case['layout']} words {words.shape} hold int8 codes {expected.shape}, "
            f"[out_features, in_features]; came {q.dtype} {q.shape}"
        )
        wrong = np.argwhere(q != expected)
        column = int(wrong[0, 1]) if len(wrong) else 0
        assert not len(wrong), (
            f"{case['layout']}: vLLM reads other codes from these words, {len(wrong)} of {q.size}. "
            f"The codes of input {column}, output after output:\n"
            f"expected {expected[:, column].tolist()}\ncame     {q[:, column].tolist()}"
        )
        assert np.array_equal(lab.pack_layout(q, case["layout"]), words), (
            f"{case['layout']}: packing what was unpacked must give the same words"
        )


def test_linear_is_a_part_of_the_engine(lab):
    weight, bias, x = gaussian((6, 256)), gaussian((6,), 1), gaussian((3, 256), 2)
    layer = lab.Linear(weight, bias)
    held = [v for v in vars(layer).values() if isinstance(v, np.ndarray) and v is not bias]
    assert sum(v.nbytes for v in held) == 6 * 128 + 6 * 2 * 2, (
        "the layer holds packed codes and float16 scales, 768 + 24 bytes, and not the weight; it "
        f"holds arrays of {sorted(v.nbytes for v in held)} bytes"
    )
    expected = x @ roundtrip(lab, weight, 128).T + bias
    assert np.allclose(layer(x), expected, atol=1e-4), (
        "Linear(weight, bias)(x) is x @ dequantized.T + bias, in groups of 128"
    )
    assert np.array_equal(layer(x), layer(x)), "calling the layer twice gives the same"
    assert layer(x.astype(np.float64)).dtype == np.float64, (
        "float64 in, float64 out: the engine's equality tests run in float64"
    )
    odd = gaussian((4, 72))
    assert np.allclose(lab.Linear(odd)(odd), odd @ roundtrip(lab, odd, -1).T, atol=1e-4), (
        "rows of 72 are no multiple of 128: one group per row then, as group_size -1"
    )
    for width in (200, 328):
        wide = gaussian((2, width))
        try:
            layer = lab.Linear(wide)
        except ValueError as error:
            pytest.fail(f"rows of {width} are no multiple of 128; came {error!r}")
        assert np.allclose(layer(wide), wide @ roundtrip(lab, wide, -1).T, atol=1e-4), (
            f"rows of {width} are wider than 128 and no multiple of it: one group per row"
        )
