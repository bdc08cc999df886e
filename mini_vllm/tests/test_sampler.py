"""From logits to a token: worked values, the order of the filters, randomness."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm.sampler import (
    Sampler,
    SamplingParams,
    _apply_min_p,
    _apply_top_k,
    _apply_top_p,
    softmax,
)
from mini_vllm.tests.support import for_all

SAMPLER = Sampler()


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities))


def survivors(logits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.isfinite(logits)).tolist()


def drawn(logits: np.ndarray, n: int = 200, **params) -> set[int]:
    """Every token that n draws of one generator give."""
    rng = np.random.default_rng(0)
    wishes = SamplingParams(**params)
    return {SAMPLER.sample(logits, wishes, rng) for _ in range(n)}


# ------------------------------------------------------------------ softmax


def testsoftmax_of_large_logits_is_exact_to_four_digits():
    assert softmax(np.array([1000.0, 1001.0, 1002.0])).round(4).tolist() == [
        0.09,
        0.2447,
        0.6652,
    ]


def testsoftmax_gives_masked_logits_probability_zero():
    assert softmax(np.array([-np.inf, 0.0, -np.inf])).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(("temperature", "top"), [(0.5, 0.8668), (1.0, 0.6652), (2.0, 0.5065)])
def test_a_low_temperature_sharpens_and_a_high_one_flattens(temperature, top):
    assert round(float(softmax(np.array([2.0, 1.0, 0.0]) / temperature).max()), 4) == top


# ------------------------------------------------------------------ filters


@pytest.mark.parametrize(
    ("k", "kept"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (0, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_largest(k, kept):
    assert survivors(_apply_top_k(np.array([1.0, 4.0, 0.0, 3.0]), k)) == kept


def test_top_k_minus_one_or_beyond_the_vocabulary_keeps_all():
    logits = np.array([1.0, 2.0])
    assert survivors(_apply_top_k(logits, -1)) == survivors(_apply_top_k(logits, 9)) == [0, 1]


def test_top_k_keeps_ties_with_the_kth():
    assert survivors(_apply_top_k(np.array([2.0, 1.0, 2.0, 2.0]), 2)) == [0, 2, 3]


@pytest.mark.parametrize(("p", "count"), [(0.4, 1), (0.75, 2), (0.9, 3), (0.96, 4), (1e-9, 1)])
def test_top_p_keeps_the_smallest_sufficient_set(p, count):
    assert survivors(_apply_top_p(logs(0.5, 0.3, 0.15, 0.05), p)) == list(range(count))


def test_top_p_maps_back_to_the_original_places():
    assert survivors(_apply_top_p(logs(0.05, 0.3, 0.15, 0.5), 0.75)) == [1, 3]


def test_top_p_keeps_the_token_that_crosses_and_breaks_ties_by_id():
    assert survivors(_apply_top_p(logs(0.4, 0.4, 0.2), 0.5)) == [0, 1]
    assert survivors(_apply_top_p(logs(0.25, 0.25, 0.25, 0.25), 0.4)) == [0, 1]


def test_top_p_on_a_boundary_follows_float64_not_paper():
    """0.5 + 0.3 is a little under 0.8 after log and exp, so the third token survives too."""
    assert survivors(_apply_top_p(logs(0.5, 0.3, 0.15, 0.05), 0.8)) == [0, 1, 2]


def test_min_p_drops_what_is_much_less_likely_than_the_best():
    assert survivors(_apply_min_p(logs(0.5, 0.3, 0.15, 0.05), 0.4)) == [0, 1]
    assert survivors(_apply_min_p(logs(0.5, 0.3, 0.15, 0.05), 0.0)) == [0, 1, 2, 3]


@pytest.mark.slow
@for_all(
    lambda st: st.lists(st.integers(-50, 50).map(lambda n: n / 10), min_size=1, max_size=12),
    lambda st: st.integers(0, 12),
    lambda st: st.floats(0.01, 1.0),
    lambda st: st.floats(0.0, 1.0),
    max_examples=200,
)
def test_every_filter_keeps_the_likeliest_token_and_its_logits(values, k, p, min_p):
    logits = np.array(values)
    for filtered in (
        _apply_top_k(logits, k),
        _apply_top_p(logits, p),
        _apply_min_p(logits, min_p),
    ):
        kept = survivors(filtered)
        assert int(np.argmax(logits)) in kept
        assert filtered[kept].tolist() == logits[kept].tolist()


# ------------------------------------------------------------------ the order of the pipeline


def test_top_k_runs_before_top_p():
    """After k=2 the masses are 0.571 and 0.429, so p=0.55 keeps one; p first would keep two."""
    assert drawn(logs(0.4, 0.3, 0.2, 0.1), temperature=1.0, top_k=2, top_p=0.55) == {0}


def test_top_p_sees_the_mass_renormalised_over_top_k():
    """After k=3 the first two hold 0.778 of the mass, enough for 0.75; p first would keep three."""
    assert drawn(logs(0.4, 0.3, 0.2, 0.1), temperature=1.0, top_k=3, top_p=0.75) == {0, 1}


def test_temperature_runs_before_top_p():
    """At T=0.5 the first two hold 0.833 of the mass; temperature last would keep three."""
    assert drawn(logs(0.4, 0.3, 0.2, 0.1), temperature=0.5, top_p=0.75) == {0, 1}


def test_min_p_runs_before_top_k_and_top_p():
    """Upstream's order: min-p 0.6 leaves two tokens; their masses make p=0.5 keep one."""
    assert drawn(logs(0.4, 0.3, 0.2, 0.1), temperature=1.0, min_p=0.6, top_p=0.5) == {0}


# ------------------------------------------------------------------ greedy and random


def test_greedy_takes_the_lowest_id_on_ties():
    assert SAMPLER.sample(np.array([1.0, 3.0, 3.0]), SamplingParams()) == 1


def test_greedy_ignores_every_other_knob_and_the_generator():
    class NoGenerator:
        def __getattribute__(self, name):
            raise AssertionError(f"greedy sampling used rng.{name}")

    params = SamplingParams(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9, seed=3)
    assert SAMPLER.sample(np.array([0.0, 5.0, 1.0]), params, NoGenerator()) == 1


def test_a_seed_alone_repeats_the_same_draw_and_a_generator_moves_on():
    logits, params = np.zeros(1000), SamplingParams(temperature=1.0, seed=4)
    assert len({SAMPLER.sample(logits, params) for _ in range(5)}) == 1
    rng = np.random.default_rng(4)
    assert len({SAMPLER.sample(logits, params, rng) for _ in range(5)}) == 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_callers_logits_are_never_changed(dtype):
    logits = np.array([2.0, 1.0, 0.5, -1.0], dtype=dtype)
    before = logits.copy()
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.8, min_p=0.1, seed=0)
    SAMPLER.sample(logits, params)
    assert np.array_equal(logits, before)


@pytest.mark.slow
def test_draws_follow_the_probabilities():
    """20,000 draws with a fixed seed; chi-square of 3 degrees under 16.3 (p = 0.001)."""
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    rng, params, n = np.random.default_rng(0), SamplingParams(temperature=1.0), 20_000
    logits = np.log(probabilities)
    counts = np.bincount([SAMPLER.sample(logits, params, rng) for _ in range(n)], minlength=4)
    chi_square = float(((counts - n * probabilities) ** 2 / (n * probabilities)).sum())
    assert chi_square < 16.3
