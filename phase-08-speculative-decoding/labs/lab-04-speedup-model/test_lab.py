"""What lab 08-04 pins: the arithmetic that decides whether drafts pay, and for how many."""

from __future__ import annotations

import numpy as np
import pytest

from labkit import refused, same

ALPHAS = (0.2, 0.3, 0.5, 0.7, 0.9)
COSTS = (0.05, 0.1, 0.2, 0.3, 0.5)
BEST = ((1, 1, 0, 0, 0), (2, 1, 1, 0, 0), (3, 2, 1, 1, 0), (6, 4, 3, 2, 1), (13, 10, 7, 5, 3))


def near(got, expected, why, atol=5e-4):
    right = isinstance(got, int | float) and abs(got - expected) <= atol
    assert right, f"{why}\nexpected {expected} within {atol:g}\ncame     {got}"


# --- tokens per run -------------------------------------------------------------------------------


def test_expected_tokens_formula(lab):
    table = (1, 1.7, 2.19, 2.533, 2.7731, 2.94117, 3.058819, 3.1411733, 3.19882131)
    for k, expected in enumerate(table):
        near(
            lab.expected_tokens_per_verify(0.7, k),
            expected,
            f"E(.7, {k}): the run's own token, and draft i with probability .7**i",
            1e-9,
        )
    for alpha, k, expected in ((0.0, 0, 1), (0.0, 5, 1), (0.4, 0, 1), (1.0, 0, 1), (1.0, 5, 6)):
        near(lab.expected_tokens_per_verify(alpha, k), expected, f"E({alpha}, {k})", 1e-12)


def test_expected_tokens_matches_simulation(lab):
    rng = np.random.default_rng(0)
    for alpha, k in ((0.7, 5), (0.4, 3), (0.9, 8)):
        kept = rng.random((200_000, k)) < alpha
        mean = 1 + np.cumprod(kept, axis=1).sum(axis=1).mean()
        near(
            lab.expected_tokens_per_verify(alpha, k),
            float(mean),
            f"200,000 simulated runs, alpha {alpha}, k {k}: leading run and one token more",
            0.01 * mean,
        )


def test_ceiling(lab):
    for alpha in ALPHAS:
        for k in range(0, 41, 5):
            got = lab.expected_tokens_per_verify(alpha, k)
            assert 1 <= got <= 1 / (1 - alpha) + 1e-12, (
                f"E({alpha}, {k}): a run gives at least one token, and below 1 / (1 - alpha) "
                f"however many are drafted\nexpected 1 to {1 / (1 - alpha):.4f}\ncame     {got}"
            )


def test_diminishing_returns_in_k(lab):
    for alpha in ALPHAS:
        for k in range(1, 12):
            more = lab.expected_tokens_per_verify(alpha, k) - lab.expected_tokens_per_verify(
                alpha, k - 1
            )
            near(more, alpha**k, f"what draft {k} adds at alpha {alpha}: alpha**{k}", 1e-9)


def test_alpha_near_one_is_stable(lab):
    for gap in (1e-6, 1e-9, 1e-12, 1e-15):
        near(
            lab.expected_tokens_per_verify(1 - gap, 5),
            6 - 15 * gap,
            f"E(1 - {gap:g}, 5): 6 - 15 * {gap:g}; a quotient with 1 - alpha below loses it",
            1e-10,
        )


# --- speedup --------------------------------------------------------------------------------------


def test_eagle_like_numbers(lab, record_property):
    for (alpha, k, c), expected in (
        ((0.7, 5, 0.05), 2.35294), ((0.75, 5, 0.05), 2.63047), ((0.7, 3, 0.1), 1.94846)
    ):  # fmt: skip
        near(
            lab.speedup(alpha, k, c),
            expected,
            f"speedup({alpha}, {k}, {c}): E over one step of the target and {k} of the drafter",
            1e-4,
        )
    record_property("measured.gain", lab.speedup(0.7, 5, 0.1))


def test_spec_decode_can_lose(lab):
    near(lab.speedup(0.2, 5, 0.5), 0.35712, "speedup(.2, 5, .5): slower than without drafts", 1e-4)
    near(
        lab.speedup(0.0, 4, 0.1), 1 / 1.4, "nothing is ever kept: the drafter's time is lost", 1e-9
    )
    near(lab.speedup(0.6, 0, 0.3), 1.0, "k = 0: plain decoding, whatever alpha and c are", 1e-12)


def test_free_drafter_always_wins(lab):
    for alpha in ALPHAS:
        for k in (1, 4, 9):
            got = lab.speedup(alpha, k, 0.0)
            near(
                got,
                lab.expected_tokens_per_verify(alpha, k),
                f"c = 0 in this model: the speedup is the tokens per run, alpha {alpha}, k {k}",
                1e-12,
            )
            assert got > 1, f"free drafts at alpha {alpha} gain; came {got}"


# --- the best k -----------------------------------------------------------------------------------


def test_optimal_k_table(lab, record_property):
    for alpha, row in zip(ALPHAS, BEST, strict=True):
        for c, expected in zip(COSTS, row, strict=True):
            same(lab.optimal_k(alpha, c), expected, f"optimal_k({alpha}, {c}), up to 20")
    record_property("measured.best_k", lab.optimal_k(0.5, 0.1))


def test_tie_returns_smaller_k(lab):
    for alpha, c in ((0.3, 0.3), (0.2, 0.2)):
        same(
            lab.optimal_k(alpha, c),
            0,
            f"optimal_k({alpha}, {c}): one draft gains exactly what it costs, so none",
        )
    same(lab.optimal_k(0.0, 0.0), 0, "optimal_k(0, 0): every k is as good as none, so none")


def test_the_largest_k_is_a_bound(lab):
    same(lab.optimal_k(1.0, 0.0), 20, "optimal_k(1, 0): free and always right, so all of 20")
    same(lab.optimal_k(0.9, 0.05, 4), 4, "optimal_k(.9, .05, 4): best of 0 to 4")
    same(lab.optimal_k(0.9, 0.05, 0), 0, "optimal_k(.9, .05, 0): nothing but 0 to choose from")
    same(
        lab.optimal_k(0.95, 0.01, 60), 40, "optimal_k(.95, .01, 60): beyond 20 where it is allowed"
    )


def test_worth_it_iff_alpha_exceeds_cost(lab):
    for alpha in np.linspace(0, 1, 41):
        for c in np.linspace(0, 1.2, 49):
            if abs(alpha - c) > 1e-9:
                got = lab.optimal_k(float(alpha), float(c))
                assert (got > 0) == (alpha > c), (
                    f"optimal_k({alpha:.3f}, {c:.3f}): some k pays exactly if alpha > c, since the "
                    f"first draft is the best one\nexpected {'above ' * int(alpha > c)}0"
                    f"\ncame     {got}"
                )


def test_optimal_k_grows_with_alpha_and_shrinks_with_cost(lab):
    grid = [[lab.optimal_k(a / 20, c / 20) for c in range(1, 15)] for a in range(1, 20)]
    for row in grid:
        assert row == sorted(row, reverse=True), (
            f"a dearer drafter never calls for more drafts\ncame     {row}"
        )
    for column in zip(*grid, strict=True):
        assert list(column) == sorted(column), (
            f"a better drafter never calls for fewer drafts\ncame     {list(column)}"
        )


# --- from what was measured -----------------------------------------------------------------------

LLAMA = (0.7296, 0.5208, 0.3545)
QWEN = (0.6541, 0.3993, 0.2020)


def test_published_rates(lab):
    near(
        lab.expected_tokens_from_rates(LLAMA),
        2.6049,
        "EAGLE-3 on Llama-3.1-8B, upstream's own rates: 1 + .7296 + .5208 + .3545, each the share "
        "of runs that kept this draft",
        1e-9,
    )
    near(lab.expected_tokens_from_rates(QWEN), 2.2554, "and on Qwen3-8B", 1e-9)
    near(lab.expected_tokens_from_rates([]), 1.0, "no drafts: the run's own token", 1e-12)


def test_rates_never_grow(lab):
    for rates in ([0.5, 0.6], [1.2], [0.3, -0.1]):
        refused(
            lambda rates=rates: lab.expected_tokens_from_rates(rates),
            f"rates {rates}: a draft is kept only if all before it were, so 1 down to 0",
        )


def test_alpha_behind_a_mean_length(lab):
    near(lab.alpha_from_mean_length(2.8, 5), 0.6773, "2.8 tokens a run at k = 5", 2e-4)
    near(lab.alpha_from_mean_length(3.8, 5), 0.8126, "3.8 tokens a run at k = 5", 2e-4)
    alpha = lab.alpha_from_mean_length(sum(LLAMA) + 1, 3)
    near(alpha, 0.7183, "EAGLE-3 on Llama-3.1-8B, as if all positions were alike", 2e-4)
    for k in (1, 4, 12):
        for known in (0.0, 0.25, 0.6, 0.95, 1.0):
            length = lab.expected_tokens_per_verify(known, k)
            near(lab.alpha_from_mean_length(length, k), known, f"back from E({known}, {k})", 1e-7)


def test_cost_behind_a_measured_speedup(lab):
    near(
        lab.implied_draft_cost(1.9, 2.8, 5),
        0.0947,
        "1.9 times faster, 2.8 tokens a run, k = 5: the run took 2.8 / 1.9 steps of the target",
        1e-4,
    )
    for alpha, k, c in ((0.7, 5, 0.05), (0.3, 2, 0.4), (0.9, 8, 0.0)):
        length = lab.expected_tokens_per_verify(alpha, k)
        near(
            lab.implied_draft_cost(lab.speedup(alpha, k, c), length, k),
            c,
            f"back from speedup({alpha}, {k}, {c})",
            1e-9,
        )
    assert lab.implied_draft_cost(3.2, 2.8, 5) < 0, (
        "a speedup above the tokens per run: the cost comes out negative, which says that a "
        "measurement is wrong; it must not be hidden"
    )


@pytest.mark.parametrize(
    "call",
    [
        "expected_tokens_per_verify(1.1, 3)", "expected_tokens_per_verify(-0.1, 3)",
        "expected_tokens_per_verify(float('nan'), 3)", "expected_tokens_per_verify(0.5, -1)",
        "speedup(0.5, 3, -0.1)", "speedup(2.0, 0, 0.1)", "optimal_k(0.5, 0.1, -1)",
        "optimal_k(1.5, 0.1, 0)", "alpha_from_mean_length(0.9, 5)",
        "alpha_from_mean_length(6.1, 5)", "alpha_from_mean_length(1.0, 0)",
        "implied_draft_cost(0.0, 2.0, 3)", "implied_draft_cost(1.5, 0.5, 3)",
        "implied_draft_cost(1.5, 2.0, 0)",
    ],
)  # fmt: skip
def test_what_is_refused(lab, call):
    refused(lambda: eval(call, vars(lab)), call)
