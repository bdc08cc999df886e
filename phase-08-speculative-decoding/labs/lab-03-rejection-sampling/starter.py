"""Lab 08-03: keep or replace a draft so that the text's law is the target's, exactly.

`p` is what the target would sample from at a position, `q` what the draft there was sampled from:
rows of probabilities over one vocabulary. Names follow
`vllm/v1/sample/rejection_sampler.py:392` `rejection_sample`. What holds throughout:

- R1: whatever q is, the token that comes out is distributed as p.
- R2: q decides how often a draft is kept, and nothing else.
- R3: the arrays that come in are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def checked(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`p` and `q` as float64 rows of probabilities (given).

    Raises:
        ValueError: not two rows of one length, a negative entry, or a sum off 1 by more than 1e-6.
    """
    rows = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if rows[0].ndim != 1 or rows[0].shape != rows[1].shape:
        raise ValueError(f"p, q: shapes {rows[0].shape}, {rows[1].shape}; need one row each, equal")
    for name, row in zip("pq", rows, strict=True):
        if not (row >= 0).all() or abs(row.sum() - 1) > 1e-6:
            raise ValueError(f"{name}={row}: need probabilities, none negative, with sum 1")
    return rows


def accept_prob(p_x: float, q_x: float) -> float:
    """Probability to keep a draft x that was drawn from q, given p(x) and q(x).

    A draft that q never draws (`q_x` of 0 or less) is not kept: 0.0.
    """
    raise NotImplementedError


def residual_distribution(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The law to draw from where a draft was not kept: what p has more than q, made a law again.

    A trace: p = (.5, .3, .15, .05) and q uniform over four leave (.25, .05, 0, 0), which is
    (5/6, 1/6, 0, 0).

    Args:
        p, q: [vocab], as `checked` accepts them.

    Returns:
        [vocab], float64, a new array with sum 1. Where p has nowhere more than q, up to 1e-12 in
        all, a copy of p.

    Raises:
        ValueError: as `checked`.
    """
    raise NotImplementedError


def expected_acceptance_rate(p: np.ndarray, q: np.ndarray) -> float:
    """Probability that a draft drawn from q is kept: alpha.

    Args:
        p, q: [vocab], as `checked` accepts them.

    Raises:
        ValueError: as `checked`.
    """
    raise NotImplementedError


def speculative_token(p: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> tuple[int, bool]:
    """One position: draw a draft from q, keep it or replace it (R1).

    Args:
        p, q: [vocab], rows of probabilities; not checked here.
        rng: where all randomness comes from.

    Returns:
        The token, and whether it is the draft, kept.
    """
    raise NotImplementedError


def draw(row: np.ndarray, rng: np.random.Generator) -> int:
    """A token by its probability (given)."""
    total = np.cumsum(row)
    return min(int(np.searchsorted(total, rng.random() * total[-1], side="right")), len(row) - 1)


def rejection_sample(
    draft_token_ids: Sequence[int],
    draft_probs: np.ndarray | None,
    target_probs: np.ndarray,
    bonus_token_id: int,
    uniforms: np.ndarray,
    exponentials: np.ndarray,
) -> list[int]:
    """What one request says in one run, from random numbers that were drawn before.

    Draft i is kept exactly if `p(x) / q(x) >= uniforms[i]`. The first one that is not kept is
    replaced and ends the run; if all are kept, the bonus token follows. The replacement is drawn
    from the residual without normalising it: of all tokens the one whose residual divided by its
    exponential is largest.

    Args:
        draft_token_ids: k drafts, also none.
        draft_probs: [k, vocab], the q of each draft; None if each draft was certain, its own
            q being 1 there and 0 elsewhere.
        target_probs: [k, vocab], the p of each draft's position.
        bonus_token_id: what the target says behind the last draft.
        uniforms: [k], each in [0, 1).
        exponentials: [vocab], one draw from Exp(1) per token, used wherever the run ends.

    Returns:
        1 to k + 1 token ids.
    """
    raise NotImplementedError
