"""What lab 08-03 pins: a law, in closed form where it can be had, and by counting where not."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import parts
from labkit import refused, same

P = np.array([0.5, 0.3, 0.15, 0.05])
UNIFORM = np.full(4, 0.25)
DRAWS = 40_000
WITHIN = 4.5 * (0.25 / DRAWS) ** 0.5
"""4.5 standard errors of a frequency near 1/2: less than 1 in 100,000 right answers is beyond."""


def close(got, expected, why, atol=1e-12):
    got = None if got is None else np.asarray(got)
    right = got is not None and got.shape == np.shape(expected)
    assert right and np.allclose(got, expected, rtol=0, atol=atol), (
        f"{why}\nexpected {np.asarray(expected)}\ncame     {got}"
    )


def laws(count, seed):
    """Pairs of laws: dense, with zeros, and nearly equal ones."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        size = int(draw.integers(2, 9))
        p, q = draw.dirichlet(np.full(size, 0.4), 2)
        if number % 3 == 1 and size > 2:
            p[draw.integers(size)] = q[draw.integers(size)] = 0.0
            p, q = p / p.sum(), q / q.sum()
        if number % 3 == 2:
            q = 0.9 * p + 0.1 * q
        yield p, q


def law_of(lab, p, q):
    """The exact law of one position, from the lab's own two functions."""
    keep = np.array([lab.accept_prob(a, b) for a, b in zip(p, q, strict=True)], dtype=float)
    return q * keep + (1 - (q * keep).sum()) * np.asarray(lab.residual_distribution(p, q))


def counted(lab, p, q, draws, seed):
    """Frequencies of the tokens, and the share of drafts kept."""
    rng = np.random.default_rng(seed)
    counts, kept = np.zeros(len(p)), 0
    for _ in range(draws):
        token, accepted = lab.speculative_token(p, q, rng)
        counts[token] += 1
        kept += accepted
    return counts / draws, kept / draws


# --- in closed form -------------------------------------------------------------------------------


def test_accept_prob_formula(lab):
    for p_x, q_x, expected in (
        (0.5, 0.25, 1.0), (0.15, 0.25, 0.6), (0.05, 0.25, 0.2), (0.3, 0.3, 1.0), (0.0, 0.4, 0.0),
        (0.2, 1.0, 0.2),
    ):  # fmt: skip
        close(lab.accept_prob(p_x, q_x), expected, f"accept_prob({p_x}, {q_x}): p/q, a probability")


def test_zero_draft_probability_rejects(lab):
    for q_x in (0.0, -0.1):
        same(
            lab.accept_prob(0.5, q_x),
            0.0,
            f"accept_prob(0.5, {q_x}): q never draws this token, so it is not kept, and nothing is "
            "divided by 0",
        )


def test_residual_is_the_renormalized_surplus(lab):
    close(
        lab.residual_distribution(P, UNIFORM),
        [5 / 6, 1 / 6, 0, 0],
        "residual of (.5, .3, .15, .05) against the uniform law: what p has more, .25 and .05, "
        "made a law again",
    )
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])
    close(lab.residual_distribution(p, q), p, "residual where p and q share nothing: p itself")
    same_law = lab.residual_distribution(P, P.copy())
    close(same_law, P, "residual of p against itself: no surplus, a copy of p, and no 0 / 0")
    assert same_law is not P, "a copy: the caller's array must not be handed back"


def test_residual_refuses_what_is_no_law(lab):
    for p, q, what in (
        (P, np.full(3, 1 / 3), "rows of two lengths"),
        (P, np.array([0.5, 0.5, 0.5, -0.5]), "a negative entry"),
        (2 * P, UNIFORM, "a sum of 2"),
        (P, np.full((1, 4), 0.25), "a matrix"),
    ):
        refused(lambda p=p, q=q: lab.residual_distribution(p, q), f"residual_distribution: {what}")
        refused(lambda p=p, q=q: lab.expected_acceptance_rate(p, q), f"the rate: {what}")


def test_acceptance_rate_is_the_overlap(lab, record_property):
    rate = lab.expected_acceptance_rate(P, UNIFORM)
    close(rate, 0.7, "alpha of (.5, .3, .15, .05) against the uniform law: .25 + .25 + .15 + .05")
    record_property("measured.alpha", float(rate))
    for p, q in laws(30, seed=1):
        kept = sum(b * lab.accept_prob(a, b) for a, b in zip(p, q, strict=True))
        close(
            lab.expected_acceptance_rate(p, q), kept, f"alpha is the mean of accept_prob; {p} {q}"
        )


def test_overlap_is_one_minus_tv(lab):
    for p, q in laws(30, seed=2):
        distance = abs(p - q).sum() / 2
        close(
            lab.expected_acceptance_rate(p, q),
            1 - distance,
            f"alpha = 1 - total variation distance; p {p}, q {q}",
        )


def test_exact_output_law_by_enumeration(lab, record_property):
    for p, q in [(P, UNIFORM), *laws(60, seed=3)]:
        close(
            law_of(lab, p, q),
            p,
            "the law of the token, from your accept_prob and residual_distribution: "
            f"q(x) kept, and the rest from the residual, must be p (R1); q {q}",
        )
    kept = np.array([b * lab.accept_prob(a, b) for a, b in zip(P, UNIFORM, strict=True)])
    record_property("measured.biased", float((kept + (1 - kept.sum()) * P)[0]))


def test_one_hot_drafter(lab):
    for x in range(4):
        q = np.eye(4)[x]
        close(
            lab.expected_acceptance_rate(P, q), P[x], f"a drafter certain of {x}: alpha is p({x})"
        )
        close(law_of(lab, P, q), P, f"a drafter certain of {x}: the law is p all the same")
        without = np.where(q > 0, 0, P)
        close(
            lab.residual_distribution(P, q),
            without / without.sum(),
            f"a drafter certain of {x}: the residual is p without {x}",
        )


# --- by counting ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_output_distribution_is_exactly_the_target(lab):
    for number, (p, q) in enumerate(((P, UNIFORM), (UNIFORM, P))):
        frequencies, _ = counted(lab, p, q, DRAWS // 2, seed=10 + number)
        within = WITHIN * 2**0.5
        assert np.abs(frequencies - p).max() < within, (
            f"{DRAWS // 2:,} tokens with drafts from {q}: their frequencies are p, within "
            f"{within:.4f} (4.5 standard errors), whatever q is (R1)\n"
            f"expected {p}\ncame     {frequencies.round(4)}"
        )


def test_the_statistic_that_upstream_uses(lab):
    draws = 10_000
    frequencies, _ = counted(lab, P, UNIFORM, draws, seed=20)
    chi2 = float((draws * (frequencies - P) ** 2 / P).sum())
    limit = 3 + 10 * (2 * 3) ** 0.5
    assert chi2 < limit, (
        "chi-squared of the frequencies against p, three degrees of freedom; a right sampler has 3 "
        f"on average\nexpected less than {limit:.1f}\ncame     {chi2:.1f}"
    )


@pytest.mark.slow
def test_the_share_of_kept_drafts_is_alpha(lab):
    draws = 5_000
    within = 4.5 * (0.25 / draws) ** 0.5
    for p, q in ((P, UNIFORM), (P, P[::-1].copy())):
        _, kept = counted(lab, p, q, draws, seed=30)
        alpha = np.minimum(p, q).sum()
        assert abs(kept - alpha) < within, (
            f"the share of drafts from {q} that were kept, of {draws:,}\n"
            f"expected {alpha:.3f} within {within:.3f}\ncame     {kept:.3f}"
        )


def test_identical_distributions_always_accept(lab):
    _, kept = counted(lab, P, P.copy(), 500, seed=40)
    same(kept, 1.0, "a drafter with the target's own law: every draft is kept")


def test_disjoint_distributions_never_accept(lab):
    p, q = np.array([0.5, 0.5, 0, 0]), np.array([0, 0, 0.5, 0.5])
    frequencies, kept = counted(lab, p, q, 500, seed=50)
    same(kept, 0.0, "a drafter that says what the target never does: no draft is kept")
    same(frequencies[2:].tolist(), [0.0, 0.0], "and none of its tokens comes out")


def test_inputs_not_mutated(lab):
    p, q = P.copy(), UNIFORM.copy()
    target, draft = np.stack([P, UNIFORM]), np.stack([UNIFORM, P])
    lab.residual_distribution(p, q)[0] = 9.0
    lab.residual_distribution(p, p)[0] = 9.0
    assert lab.expected_acceptance_rate(p, q) > 0, "alpha is above 0 where the laws overlap"
    lab.speculative_token(p, q, np.random.default_rng(0))
    for probs in (draft, None):
        lab.rejection_sample([3, 0], probs, target, 1, np.array([0.9, 0.9]), np.ones(4))
    close(p, P, "p belongs to the caller (R3)")
    close(q, UNIFORM, "q belongs to the caller (R3)")
    close(target, np.stack([P, UNIFORM]), "target_probs belongs to the caller (R3)")
    close(draft, np.stack([UNIFORM, P]), "draft_probs belongs to the caller (R3)")


# --- a run ----------------------------------------------------------------------------------------

ONES = np.ones(4)


def test_a_run_by_hand(lab):
    target = np.stack([P, P, P])
    draft = np.stack([UNIFORM] * 3)
    for drafts, probs, uniforms, exponentials, expected, why in (
        ([0, 2, 1], draft, [0.99, 0.59, 0.99], ONES, [0, 2, 1, 7], "ratios 2, .6, 1.2: all kept"),
        ([0, 2, 1], draft, [0.99, 0.61, 0.0], ONES, [0, 0], "2 has .6 < .61: replaced, the end"),
        ([3, 0, 0], draft, [0.21, 0.0, 0.0], [1, 0.1, 1, 1], [1], ".25 / 1 < .05 / .1"),
        ([3, 0, 0], draft, [0.21, 0.0, 0.0], [1, 1, 1e-9, 1], [0], "2 has no residual"),
        ([0, 0, 0], None, [0.5, 0.49, 0.51], ONES, [0, 0, 1], "certain drafts: .5 against u"),
        ([0, 1, 1], None, [0.6, 0.0, 0.0], [1, 9, 1, 0.1], [3], "p without 0: .3/9, .15, .05/.1"),
        ([], None, [], ONES, [7], "no drafts: the bonus token alone"),
    ):
        k = len(drafts)
        same(
            lab.rejection_sample(
                drafts, None if probs is None else probs[:k], target[:k], 7,
                np.array(uniforms), np.array(exponentials, dtype=float),
            ),
            expected,
            f"drafts {drafts}, uniforms {uniforms}, exponentials {list(exponentials)}: {why}",
        )  # fmt: skip


def test_greedy_is_the_limit_of_certain_drafts(lab):
    target = np.eye(4)[[2, 1, 3]]
    for drafts, expected in (([2, 1, 3], [2, 1, 3, 7]), ([2, 0, 3], [2, 1]), ([0, 1, 3], [2])):
        same(
            lab.rejection_sample(drafts, None, target, 7, np.full(3, 0.5), ONES),
            expected,
            f"a target certain of 2, 1, 3 and drafts {drafts}: the leading run and its own token",
        )


def test_a_draft_that_q_never_draws_is_replaced(lab):
    with np.errstate(divide="raise", invalid="raise"):
        got = lab.rejection_sample([2], np.array([[0.5, 0.5, 0, 0]]), P[None], 7, np.zeros(1), ONES)
    same(got, [2], "q(2) is 0: 2 is not kept, and what p has more than q, .15 at 2, replaces it")


@pytest.mark.slow
@pytest.mark.parametrize("certain", [False, True], ids=["drawn drafts", "certain drafts"])
def test_the_joint_law_of_two_positions(lab, certain):
    rng = np.random.default_rng(60)
    p0, p1, q0, q1 = np.array([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4], [0.5, 0.1, 0.4]])
    draws = 8_000
    first, second, longer = np.zeros(3), np.zeros(3), 0
    for _ in range(draws):
        drafts = [0, 2] if certain else [rng.choice(3, p=q0), rng.choice(3, p=q1)]
        got = lab.rejection_sample(
            drafts, None if certain else np.stack([q0, q1]), np.stack([p0, p1]), 1,
            rng.random(2), rng.standard_exponential(3),
        )  # fmt: skip
        first[got[0]] += 1
        if len(got) > 1:
            second[got[1]] += 1
            longer += 1
    for counts, total, p, words in (
        (first, draws, p0, "first tokens"), (second, longer, p1, "second tokens")
    ):  # fmt: skip
        within = 4.5 * (0.25 / max(total, 1)) ** 0.5
        assert total and np.abs(counts / total - p).max() < within, (
            f"{words} of {draws:,} runs: their frequencies are the target's, within {within:.4f}\n"
            f"expected {p}\ncame     {(counts / max(total, 1)).round(4)}"
        )


def test_runs_agree_with_the_real_sampler(lab):
    for number, case in enumerate(parts.load("rejection_sampler")):
        logits, first = np.array(case["logits"]), 0
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        laws = weights / weights.sum(axis=1, keepdims=True)
        certain = np.eye(laws.shape[1])[logits.argmax(axis=1)]  # the law at temperature 0
        for request, drafts in enumerate(case["drafts"]):
            rows = slice(first, first + len(drafts))
            first += len(drafts)
            greedy = case["is_greedy"][request]
            drawn = case["draft_probs"] is not None and not greedy
            got = lab.rejection_sample(
                drafts,
                np.array(case["draft_probs"])[rows] if drawn else None,
                (certain if greedy else laws)[rows],
                case["bonus"][request],
                np.maximum(np.array(case["uniforms"])[rows], 1e-9),
                np.array(case["exponentials"])[request],
            )
            same(
                got,
                case["tokens"][request],
                f"recorded from vLLM's rejection_sample: case {number}, request {request}, "
                f"{'greedy' if greedy else 'sampled'}, drafts {drafts}, uniforms "
                f"{case['uniforms'][rows.start : rows.stop]}",
            )
