"""Lab 08-04: what drafts are worth, before anybody builds a drafter.

Symbols: `alpha`, the probability that a draft is kept if those before it were; `k` drafts a run;
`c`, one step of the drafter in units of one plain step of the target. A run costs one step
of the target and k of the drafter. Source: Leviathan et al., 2022, arXiv 2211.17192, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens_per_verify(alpha: float, k: int) -> float:
    """Tokens a run gives on average: one of its own and every draft of the leading run.

    A trace: alpha = .7, k = 2 gives 1 + .7 + .49 = 2.19.

    Args:
        alpha: in [0, 1].
        k: 0 or more.

    Returns:
        1 at k = 0 or alpha = 0, k + 1 at alpha = 1; exact to a few units in the last place
        for any alpha, also just below 1.

    Raises:
        ValueError: alpha is not in [0, 1], or k is negative.
    """
    raise NotImplementedError


def speedup(alpha: float, k: int, c: float) -> float:
    """Tokens per unit of time, over those of plain decoding. 1 is break-even.

    Args:
        alpha, k: as above.
        c: 0 or more.

    Raises:
        ValueError: as above, or c is negative.
    """
    raise NotImplementedError


def optimal_k(alpha: float, c: float, max_k: int = 20) -> int:
    """The k with the largest speedup; of several the smallest. 0 means: do not speculate.

    Args:
        alpha, c: as above.
        max_k: the largest k to consider, 0 or more.

    Raises:
        ValueError: as above, or max_k is negative.
    """
    raise NotImplementedError


def expected_tokens_from_rates(rates: Sequence[float]) -> float:
    """Tokens a run gives, from measured shares: nothing is assumed about one position and the next.

    Args:
        rates: `rates[i]` is the share of runs in which draft i, counted from 0, was kept, and so
            all before it.

    Raises:
        ValueError: a rate is not in [0, 1], or larger than the one before it.
    """
    raise NotImplementedError


def alpha_from_mean_length(length: float, k: int) -> float:
    """The alpha whose `expected_tokens_per_verify` at k is `length`, to within 1e-9.

    A trace: 2.8 tokens a run at k = 5 is alpha = 0.677.

    Raises:
        ValueError: k is below 1, or length is not in [1, k + 1].
    """
    raise NotImplementedError


def implied_draft_cost(measured: float, length: float, k: int) -> float:
    """The c behind a measured speedup: everything a run costs beyond one plain step, per draft.

    A trace: 1.90 times faster with 2.8 tokens a run: a run takes 2.8 / 1.9 = 1.474 steps, so five
    drafts cost .474 and one costs .095.

    Args:
        measured: time per token without drafts over time per token with them, above 0.
        length: tokens per run, at least 1.
        k: drafts per run, at least 1.

    Returns:
        Steps of the target per draft. It may be negative: then one of the three is wrong.

    Raises:
        ValueError: an argument is outside of what it may be.
    """
    raise NotImplementedError
