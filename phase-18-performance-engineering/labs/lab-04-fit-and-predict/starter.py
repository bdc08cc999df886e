"""Lab 18-04: the time of a step from what it computes, fitted on measured steps, and its limits.

A step is its rows: for each request (new tokens, tokens computed before). Times are seconds.
Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Rows = Sequence[tuple[int, int]]
"""(new tokens, tokens computed before) of each request of a step."""
FEATURES = ("step", "tokens", "prefill_pairs", "decode_context")


@dataclass(frozen=True, slots=True)
class Timed:
    """A step that was measured."""

    rows: tuple[tuple[int, int], ...]
    seconds: float


def features(rows: Rows) -> tuple[float, ...]:
    """What a step is charged for, in the order of `FEATURES`.

    step: 1. tokens: new tokens of all rows. prefill_pairs: pairs of query and key, of the rows with
    more than one new token: token i of a row (from 0) sees `before + i + 1` keys. decode_context:
    keys read by the rows with one new token, itself among them.

    Raises:
        ValueError: no rows, a row without a new token, or a negative number.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cost:
    """Prices, and the range that they were fitted on."""

    prices: tuple[float, ...]
    """Seconds per unit of each of `FEATURES`, 0 or more."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Least and largest value of each feature among the fitted steps."""

    def seconds(self, rows: Rows) -> float:
        """The time of a step.

        Raises:
            ValueError: a feature outside of low to high, where nothing was measured; the message
                names the feature, its value and the range.
        """
        raise NotImplementedError


def nonnegative(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x of 0 or more with the least |table @ x - target|.

    Args:
        table: [steps, features], float64; a column may be 0 everywhere, and then its x is 0.
        target: [steps].

    Returns:
        [features].
    """
    raise NotImplementedError


def fit(steps: Sequence[Timed]) -> Cost:
    """The non-negative prices with the least mean squared relative error, predicted / measured - 1.

    Raises:
        ValueError: fewer than three steps per feature, or a time that is not above 0.
    """
    raise NotImplementedError


def time_to_first_token(cost: Cost, prompt_len: int, budget: int) -> float:
    """Of a prompt on an idle server whose steps have at most `budget` tokens.

    Raises:
        ValueError: a prompt or budget below 1, or a step that the cost refuses.
    """
    raise NotImplementedError
