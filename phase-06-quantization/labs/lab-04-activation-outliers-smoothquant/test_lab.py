"""What lab 06-04 pins: the product stays, the error of int8 falls, and where each is measured."""

from __future__ import annotations

import numpy as np
import pytest

LOUD = (17, 101)
QUIET = np.setdiff1d(np.arange(256), LOUD)
X2 = np.array([[1.0, 100.0], [-2.0, 40.0]])
W2 = np.array([[0.4, 0.25], [1.0, -0.6]])


def rel(got, expected):
    """Relative error in the Frobenius norm; infinite when `got` is no array of that shape."""
    got = np.asarray(np.nan if got is None else got, dtype=np.float64)
    if got.shape != expected.shape:
        return float("inf")
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def setup(seed=0, loudness=80.0, channels=LOUD):
    """64 tokens, 256 channels of which two are loud, 128 outputs."""
    rng = np.random.default_rng(seed)
    X, W = rng.standard_normal((64, 256)), rng.standard_normal((128, 256))
    X[:, list(channels)] *= loudness
    return X, W


def smoothed(lab, X, W, *alpha):
    """`lab.smooth`, or three NaN matrices where it returned something else."""
    got = lab.smooth(X, W, *alpha)
    assert isinstance(got, tuple) and len(got) == 3, (
        f"smooth returns the tuple (X_s, W_s, s); came {type(got).__name__}"
    )
    return got


# --- W8A8 -----------------------------------------------------------------------------------------


def test_worked_example(lab):
    q, scale = lab.quantize_per_tensor(X2) or (None, None)
    assert np.array_equal(q, [[1, 127], [-3, 51]]) and abs(scale - 100 / 127) < 1e-12, (
        "X = [[1, 100], [-2, 40]]: the loudest value is 100, so the scale is 100/127 = 0.7874, and "
        "1 / 0.7874 = 1.27 rounds to 1, -2 / 0.7874 = -2.54 to -3.\n"
        f"expected [[1, 127], [-3, 51]] and 0.7874\ncame     {q} and {scale}"
    )
    assert q.dtype == np.int8, f"codes are stored as int8; came {q.dtype}"
    got = lab.w8a8_matmul(X2, W2)
    expected = np.array([[25.513051, -59.055118], [9.169818, -26.393453]])
    assert rel(got, expected) < 1e-6, (
        "both sides are quantized, each with its own single scale, 100/127 for X and 1/127 for W; "
        f"the exact product is [[25.4, -59], [9.2, -26]].\nexpected {expected}\ncame     {got}"
    )
    X_s, W_s, s = smoothed(lab, X2, W2)
    assert rel(s, np.array([2 / np.sqrt(2), 100 / np.sqrt(60)])) < 1e-12, (
        "alpha 0.5, maxima |X| per channel [2, 100], |W| [1, 0.6]: s = sqrt(ax / aw) = "
        f"[sqrt(2 / 1), sqrt(100 / 0.6)].\nexpected [1.41421, 12.90994]\ncame     {s}"
    )
    assert rel(X_s, X2 / s) < 1e-12 and rel(W_s, W2 * s) < 1e-12, (
        f"X is divided by s, W multiplied, channel by channel.\nexpected {X2 / s} and {W2 * s}\n"
        f"came     {X_s} and {W_s}"
    )


def test_zero_tensor(lab):
    with np.errstate(divide="raise", invalid="raise"):
        q, scale = lab.quantize_per_tensor(np.zeros((2, 3))) or (None, None)
    assert scale == 1.0 and q is not None and not q.any(), (
        "a tensor of zeros has no loudest value; its scale is 1 and its codes are 0, or 0 / 0 "
        f"spreads NaN.\nexpected scale 1.0, codes 0\ncame     {scale}, {q}"
    )
    with np.errstate(all="ignore"):
        q, scale = lab.quantize_per_tensor(np.full((2, 3), 2e-323)) or (None, None)
    assert scale == 1.0 and q is not None and not q.any(), (
        "2e-323 is not zero, and 2e-323 / 127 is: look at the scale, not at the tensor.\n"
        f"expected scale 1.0, codes 0\ncame     {scale}, {q}"
    )
    q, scale = lab.quantize_per_tensor(np.zeros((0, 6))) or (None, None)
    assert scale == 1.0 and np.shape(q) == (0, 6), (
        f"a batch without tokens: expected scale 1.0 and codes of shape (0, 6), came {scale}, {q}"
    )


def test_fake_quant_stays_within_half_a_step(lab):
    drawn = np.random.default_rng(3).standard_normal((5, 7, 11))
    step = np.abs(drawn).max() / 127
    for X, what in ((drawn, "as drawn"), (-drawn, "with the signs turned")):
        got = lab.fake_quant(X)
        assert np.shape(got) == X.shape, f"any shape goes in, the same comes out; {np.shape(got)}"
        worst = np.abs(got - X).max()
        assert worst <= step / 2 * (1 + 1e-9), (
            f"{what}: rounding to the nearest code errs by at most half a step, {step / 2:.5f}; "
            f"came {worst:.5f}. Cutting off the fraction errs by up to a whole one, and a scale "
            "that only saw one sign clips the other"
        )


def test_sixteen_bit_inputs_are_widened_first(lab):
    X, W = (A.astype(np.float16) for A in setup())
    wide_X, wide_W = X.astype(np.float64), W.astype(np.float64)
    got, expected = lab.fake_quant(X), lab.fake_quant(wide_X)
    differ = "all" if got is None or expected is None else int(np.sum(got != expected))
    assert got is not None and got.dtype == np.float64 and differ == 0, (
        "activations arrive in 16 bits. X / scale in float16 has an error of its own, of up to a "
        "32nd of a step at code 127, so some codes come out wrong: widen first.\n"
        f"expected float64, the values of X.astype(np.float64)\n"
        f"came     {getattr(got, 'dtype', None)}, {differ} of {X.size} values differ"
    )
    for name, got, expected in zip(
        ("X_s", "W_s", "s"),
        smoothed(lab, X, W),
        smoothed(lab, wide_X, wide_W),
        strict=True,
    ):
        assert got.dtype == np.float64 and rel(got, expected) < 1e-12, (
            f"smooth, {name}: float64 from the maxima on, whatever came in.\n"
            f"expected float64, as of widened inputs\n"
            f"came     {got.dtype}, error {rel(got, expected):.1e}"
        )


def test_shapes_that_do_not_fit_are_refused(lab):
    for X, W in ((np.ones((4, 1)), np.ones((3, 6))), (np.ones((4, 5)), np.ones((5, 6)))):
        calls = {
            "w8a8_matmul": (X, W),
            "smooth": (X, W),
            "fold_into_norm": (X, np.ones(X.shape[1]), [W]),
        }
        for name, arguments in calls.items():
            with pytest.raises(ValueError) as refused:
                getattr(lab, name)(*arguments)
            said = str(refused.value)
            assert str(X.shape[1]) in said and str(W.shape[1]) in said, (
                f"{name} of X {X.shape} and W {W.shape}: the in_features differ. One channel "
                f"against six would broadcast in silence. Name both; came {said!r}"
            )


def test_outliers_wreck_naive_w8a8(lab, record_property):
    X, W = setup()
    got = rel(lab.w8a8_matmul(X, W), X @ W.T)
    assert 0.05 < got < 0.08, (
        "two of 256 channels are 80 times as loud, so 254 channels share what the scale leaves "
        f"them, 6 of 255 codes.\nexpected an error of 0.064\ncame     {got:.4f}"
    )
    X, W = setup(loudness=1000.0)
    louder = rel(lab.w8a8_matmul(X, W), X @ W.T)
    assert 0.014 < louder < 0.02, (
        "1,000 times as loud, the two channels are nearly all of the norm, and they come out well: "
        f"the total error hides the ruin of the others.\nexpected 0.017\ncame     {louder:.4f}"
    )
    record_property("measured.louder", "it falls" if louder < got else "it rises")


def test_quiet_channel_damage(lab):
    X, W = setup()
    exact = X[:, QUIET] @ W[:, QUIET].T
    X_s, W_s, _ = smoothed(lab, X, W)
    naive = rel(lab.fake_quant(X)[:, QUIET] @ lab.fake_quant(W)[:, QUIET].T, exact)
    better = rel(lab.fake_quant(X_s)[:, QUIET] @ lab.fake_quant(W_s)[:, QUIET].T, exact)
    assert naive > 0.4 and better < 0.12, (
        "the contribution of the 254 quiet channels alone: the total error of 0.064 hides that "
        "theirs is 0.457, because the loud two dominate the norm; smoothed it is 0.086.\n"
        f"expected above 0.4 and below 0.12\ncame     {naive:.3f} and {better:.3f}"
    )


# --- smoothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_smoothing_is_mathematically_exact(lab, alpha):
    X, W = setup()
    X_s, W_s, _ = smoothed(lab, X, W, alpha)
    worst = np.abs(X_s @ W_s.T - X @ W.T).max() / np.abs(X @ W.T).max()
    assert worst < 1e-10, (
        f"alpha {alpha}: (X / s) @ (W * s).T is X @ W.T, term by term, up to float64 rounding. "
        f"Nothing is quantized here.\nexpected below 1e-10\ncame     {worst:.2e}"
    )


def test_smoothing_rescues_w8a8(lab):
    for seed in range(5):
        X, W = setup(seed)
        exact = X @ W.T
        X_s, W_s, _ = smoothed(lab, X, W)
        raw, better = rel(lab.w8a8_matmul(X, W), exact), rel(lab.w8a8_matmul(X_s, W_s), exact)
        assert raw / better > 3, (
            f"seed {seed}: smoothing at alpha 0.5 brings the error down 4 to 6 times (seed 0: "
            f"0.064 to 0.0155).\nexpected a factor above 3\ncame     {raw:.4f} to {better:.4f}"
        )


def test_no_outliers_means_little_to_gain(lab):
    X, W = setup(loudness=1)
    exact = X @ W.T
    X_s, W_s, _ = smoothed(lab, X, W)
    raw, better = rel(lab.w8a8_matmul(X, W), exact), rel(lab.w8a8_matmul(X_s, W_s), exact)
    assert raw < 0.02 and 0.5 * raw < better < 1.25 * raw, (
        "without loud channels int8 is fine as it is, and smoothing neither rescues nor ruins it.\n"
        f"expected 0.0139 and about the same\ncame     {raw:.4f} and {better:.4f}"
    )


def test_migration_actually_moved_the_magnitude(lab):
    X, W = setup()
    X_s, W_s, _ = smoothed(lab, X, W)

    def loudest_over_median(A):
        maxima = np.abs(A).max(axis=0)
        return maxima.max() / np.median(maxima)

    before, after = loudest_over_median(X), loudest_over_median(X_s)
    assert before / after > 5, (
        "the loudest channel of X over the median one falls, 78 to 10 at alpha 0.5.\n"
        f"expected a fall above 5 times\ncame     {before:.1f} to {after:.1f}"
    )
    was, now = np.abs(W).max(), np.abs(W_s).max()
    assert now > 4 * was, (
        "what X loses W gains: max|W| rises from 4.7 to 26.7. That is the price, and why alpha is "
        f"a compromise.\nexpected above {4 * was:.1f}\ncame     {now:.1f}"
    )


def test_alpha_endpoints(lab):
    X, W = setup()
    X[:, 40] *= 1e-9  # faint, not silent
    W[:, 41] *= 1e-9
    for alpha, side in ((1.0, 0), (0.0, 1)):
        maxima = np.abs(smoothed(lab, X, W, alpha)[side]).max(axis=0)
        assert np.allclose(maxima, 1, rtol=1e-6), (
            f"alpha {alpha:.0f}: s is {'max|X| per channel' if side == 0 else '1 / max|W|'}, so "
            f"every channel of {'X_s' if side == 0 else 'W_s'} ends with maximum 1. alpha is the "
            f"exponent of X. At 0.5 nobody notices.\ncame maxima {maxima.min():.3g} to "
            f"{maxima.max():.3g}"
        )


def test_half_alpha_equalises_column_maxima(lab):
    X, W = setup()
    X_s, W_s, _ = smoothed(lab, X, W, 0.5)
    x_max, w_max = np.abs(X_s).max(axis=0), np.abs(W_s).max(axis=0)
    expected = np.sqrt(np.abs(X).max(axis=0) * np.abs(W).max(axis=0))
    assert np.allclose(x_max, w_max) and np.allclose(x_max, expected), (
        "at alpha 0.5 both sides of a channel end at sqrt(ax * aw): the difficulty is halved.\n"
        f"expected {expected[:3]}\ncame     {x_max[:3]} and {w_max[:3]}"
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dead_channels(lab, alpha):
    X, W = setup()
    X[:, 3], W[:, 7] = 0, 0
    X[:, 9], W[:, 9] = 0, 0
    with np.errstate(all="ignore"):
        X_s, W_s, s = smoothed(lab, X, W, alpha)
    got = np.asarray(s, dtype=float)[[3, 7, 9]]
    assert got.tolist() == [1, 1, 1], (
        f"alpha {alpha}: channel 3 is silent in X, 7 in W, 9 in both. Nothing to balance: s is 1.\n"
        f"expected [1, 1, 1]\ncame     {got}"
    )
    for name, A in (("X_s", X_s), ("W_s", W_s), ("s", s)):
        assert np.isfinite(A).all(), f"alpha {alpha}: {name} holds {A[~np.isfinite(A)][0]}"


def test_alpha_outside_its_range_is_refused(lab):
    X, W = setup()
    for alpha in (-0.1, 1.1, float("nan")):
        for name, arguments in (("smooth", (X, W)), ("fold_into_norm", (X, np.ones(256), [W]))):
            with pytest.raises(ValueError) as refused:
                getattr(lab, name)(*arguments, alpha)
            assert "alpha" in str(refused.value), (
                f"{name}: alpha {alpha} is not from 0 to 1; say so. Came {refused.value}"
            )


def test_inputs_are_left_alone(lab):
    X, W = setup()
    X_before, W_before = X.copy(), W.copy()
    X_s, W_s, _ = smoothed(lab, X, W)
    lab.w8a8_matmul(X, W)
    assert np.array_equal(X, X_before) and np.array_equal(W, W_before), (
        "X /= s would change the caller's activations, and the next layer reads them too"
    )
    assert not (np.shares_memory(X, X_s) or np.shares_memory(W, W_s)), (
        "X_s and W_s are arrays of their own"
    )
    level = np.ones((2, 3))
    X_s, W_s, _ = smoothed(lab, level, level)
    assert not (np.shares_memory(level, X_s) or np.shares_memory(level, W_s)), (
        "with every s at 1 there is nothing to move, and X_s and W_s are still arrays of their own"
    )


def test_frozen_s_on_new_batch(lab):
    X, W = setup()
    _, W_s, s = smoothed(lab, X, W)
    for seed in (1, 2, 3):
        fresh, _ = setup(seed)
        exact = fresh @ W.T
        raw = rel(lab.w8a8_matmul(fresh, W), exact)
        better = rel(lab.w8a8_matmul(fresh / s, W_s), exact)
        assert better < raw / 3, (
            f"s from one batch, used on another (seed {seed}) whose loud channels are the same: "
            "that is how a smoothed checkpoint works. s has one entry per channel, none per "
            f"token.\nexpected below {raw / 3:.4f}\ncame     {better:.4f}"
        )


def test_moved_outliers_make_a_frozen_s_harmful(lab):
    X, W = setup()
    _, W_s, s = smoothed(lab, X, W)
    moved, _ = setup(1, channels=(5, 200))
    exact = moved @ W.T
    raw = rel(lab.w8a8_matmul(moved, W), exact)
    worse = rel(lab.w8a8_matmul(moved / s, W_s), exact)
    assert worse > raw > 0.05, (
        "the loud channels are others than at calibration: W now has two columns made loud for "
        "nothing, and X has two that nobody tamed.\n"
        f"expected more than {raw:.4f}\ncame     {worse:.4f}"
    )


# --- folding --------------------------------------------------------------------------------------


def norm_and_projections():
    rng = np.random.default_rng(5)
    hidden, gain = rng.standard_normal((40, 64)), rng.uniform(0.5, 1.5, 64)
    gain[[4, 30]] *= 60
    weights = [rng.standard_normal((n, 64)) * size for n, size in ((48, 1), (16, 3), (16, 0.2))]

    def rms_norm(h, g):
        return h / np.sqrt((h**2).mean(axis=1, keepdims=True) + 1e-6) * g

    return hidden, gain, weights, rms_norm


def test_fold_leaves_the_runtime_alone(lab):
    hidden, gain, weights, rms_norm = norm_and_projections()
    X = rms_norm(hidden, gain)
    new_gain, new_weights, _ = lab.fold_into_norm(X, gain, weights) or (None, [], None)
    assert len(new_weights) == 3, "one new weight for each that came in"
    for i, (W, W_s) in enumerate(zip(weights, new_weights, strict=True)):
        got = rel(rms_norm(hidden, new_gain) @ W_s.T, X @ W.T)
        assert got < 1e-12, (
            f"projection {i}: the norm with gain / s, then W * s, is what it was. No operation is "
            f"added, two stored tensors are different.\nexpected an error below 1e-12\n"
            f"came     {got:.2e}"
        )
    exact, stacked = X @ np.concatenate(weights).T, np.concatenate(new_weights)
    raw = rel(lab.w8a8_matmul(X, np.concatenate(weights)), exact)
    better = rel(lab.w8a8_matmul(rms_norm(hidden, new_gain), stacked), exact)
    assert better < 0.75 * raw, (
        f"and W8A8 of the fused q, k and v gains by it.\nexpected below {0.75 * raw:.4f}\n"
        f"came     {better:.4f}"
    )


def test_a_fold_checks_and_keeps_what_it_is_given(lab):
    hidden, gain, weights, rms_norm = norm_and_projections()
    X = rms_norm(hidden, gain)
    X[:, 3], weights[0][:, 7], weights[1][:, 7], weights[2][:, 7] = 0, 0, 0, 0
    before = [array.copy() for array in (X, gain, *weights)]
    with np.errstate(all="ignore"):
        new_gain, _, s = lab.fold_into_norm(X, gain, weights) or (None, [], None)
    assert np.isfinite(new_gain).all() and s[[3, 7]].tolist() == [1, 1], (
        "channel 3 is silent in X, 7 in all weights: s is 1 there, as in smooth.\n"
        f"expected [1, 1]\ncame     {s[[3, 7]]}"
    )
    kept = [np.array_equal(a, b) for a, b in zip(before, (X, gain, *weights), strict=True)]
    assert all(kept), f"X, gain and the weights must stay as they were; came {kept}"
    half = [array.astype(np.float16) for array in (X, gain, *weights)]
    got_gain, got_weights, _ = lab.fold_into_norm(half[0], half[1], half[2:])
    dtypes = [array.dtype.name for array in (got_gain, *got_weights)]
    assert dtypes == ["float64"] * 4, f"16-bit arrays give float64; came {dtypes}"
    narrow = [weights[0], np.ones((4, 1))]
    with pytest.raises(ValueError) as refused:
        lab.fold_into_norm(X, gain, narrow)
    assert "(4, 1)" in str(refused.value), (
        "the second weight has one input feature, which would broadcast in silence: every weight "
        f"is checked, and the message has its shape; came {refused.value}"
    )


def test_projections_behind_one_norm_share_s(lab):
    hidden, gain, weights, rms_norm = norm_and_projections()
    X = rms_norm(hidden, gain)
    for alpha in (0.5, 0.8):
        _, _, s = lab.fold_into_norm(X, gain, weights, alpha) or (None, None, None)
        loudest = np.max([np.abs(W).max(axis=0) for W in weights], axis=0)
        expected = np.abs(X).max(axis=0) ** alpha / loudest ** (1 - alpha)
        assert rel(s, expected) < 1e-12, (
            f"alpha {alpha}: X is divided once for q, k and v, so s takes the loudest of the three "
            f"in each channel.\nexpected {expected[:4]}\ncame     {s if s is None else s[:4]}"
        )
