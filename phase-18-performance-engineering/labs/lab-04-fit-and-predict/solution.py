"""Lab 18-04: the time of a step from what it computes, fitted on measured steps, and its limits.

A step is its rows: for each request (new tokens, tokens computed before). Times are seconds.
Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

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
    if not rows or any(new < 1 or before < 0 for new, before in rows):
        raise ValueError(f"rows={rows!r}: need rows of 1 or more new tokens behind 0 or more")
    pairs = sum(n * before + n * (n + 1) // 2 for n, before in rows if n > 1)
    context = sum(before + 1 for n, before in rows if n == 1)
    return 1.0, float(sum(n for n, _ in rows)), float(pairs), float(context)


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
        values = features(rows)
        for name, value, low, high in zip(FEATURES, values, self.low, self.high, strict=True):
            if not low <= value <= high:
                raise ValueError(f"{name}={value:g}: the cost was fitted on {low:g} to {high:g}")
        return sum(price * value for price, value in zip(self.prices, values, strict=True))


def nonnegative(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x of 0 or more with the least |table @ x - target|.

    Args:
        table: [steps, features], float64; a column may be 0 everywhere, and then its x is 0.
        target: [steps].

    Returns:
        [features].
    """
    width = table.shape[1]
    best, least = np.zeros(width), float(target @ target)
    used = [column for column in range(width) if np.any(table[:, column])]
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            part = table[:, chosen]
            scale = np.linalg.norm(part, axis=0)
            x = np.linalg.lstsq(part / scale, target, rcond=None)[0] / scale
            error = float(np.sum((part @ x - target) ** 2))
            if np.all(x >= 0) and error < least:
                best, least = np.zeros(width), error
                best[list(chosen)] = x
    return best


def fit(steps: Sequence[Timed]) -> Cost:
    """The non-negative prices with the least mean squared relative error, predicted / measured - 1.

    Raises:
        ValueError: fewer than three steps per feature, or a time that is not above 0.
    """
    if len(steps) < 3 * len(FEATURES):
        raise ValueError(f"{len(steps)} steps: need at least {3 * len(FEATURES)}")
    seconds = np.array([each.seconds for each in steps])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise ValueError("a step of 0 seconds or none: need times above 0")
    values = np.array([features(each.rows) for each in steps])
    prices = nonnegative(values / seconds[:, None], np.ones(len(steps)))
    low, high = values.min(axis=0), values.max(axis=0)
    return Cost(tuple(prices.tolist()), tuple(low.tolist()), tuple(high.tolist()))


def time_to_first_token(cost: Cost, prompt_len: int, budget: int) -> float:
    """Of a prompt on an idle server whose steps have at most `budget` tokens.

    Raises:
        ValueError: a prompt or budget below 1, or a step that the cost refuses.
    """
    if prompt_len < 1 or budget < 1:
        raise ValueError(f"prompt_len={prompt_len}, budget={budget}: need 1 or more")
    starts = range(0, prompt_len, budget)
    return sum(cost.seconds([(min(budget, prompt_len - start), start)]) for start in starts)
