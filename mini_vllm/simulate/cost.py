"""What a step costs, in seconds: few terms with a meaning, fitted on steps that were timed.

Promises: a cost is never negative and never guessed: a step that leaves the range on which it was
fitted, by more than a tenth of its width, is refused by the name of the feature. `fit` is a
least-squares fit of relative errors with coefficients of 0 or more, so that no term can pay for
another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mini_vllm.lora.request import adapter_of
from mini_vllm.plan import SchedulerOutput

FORMAT = 1
CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Sizes at which a server captures graphs by default: `vllm/config/vllm.py:1597`
`VllmConfig._set_cudagraph_sizes`. A batch between two of them is padded."""

MARGIN = 0.1
"""By how much of its width the range that was timed may be left, on either side."""


class CostError(ValueError):
    """A step that the cost knows nothing about, or a cost that cannot be read."""


@dataclass(slots=True)
class StepWork:
    """What one plan has the model do."""

    tokens: int = 0
    """Tokens computed, all requests together."""
    padded: int = 0
    """`tokens` as a captured graph runs them."""
    requests: int = 0
    prefill_pairs: int = 0
    """Pairs of query and key of requests that compute several tokens."""
    decode_context: int = 0
    """Keys read by requests that compute one token."""
    drafts: int = 0
    """Draft tokens verified."""
    adapters: int = 0
    """Distinct adapters."""

    def add(self, num_new: int, start: int) -> None:
        """Count a request that computes `num_new` tokens behind `start` others."""
        self.tokens += num_new
        self.requests += 1
        if num_new == 1:
            self.decode_context += start + 1
        else:
            self.prefill_pairs += num_new * start + num_new * (num_new + 1) // 2


FEATURES = tuple(each.name for each in fields(StepWork))


def padded_size(num_tokens: int, sizes: Sequence[int] = CAPTURE_SIZES) -> int:
    """The smallest captured size that holds `num_tokens`; themselves above the largest."""
    return next((size for size in sizes if size >= num_tokens), num_tokens)


_PADDED = [padded_size(number) for number in range(CAPTURE_SIZES[-1] + 1)]


def work_of(plan: SchedulerOutput) -> StepWork:
    """The work of a plan that has not been updated yet."""
    counts, starts = plan.num_scheduled_tokens, plan.num_computed_tokens
    tokens = pairs = context = 0
    for request in plan.scheduled_requests:
        number = counts[request.request_id]
        start = starts[request.request_id] if starts else request.num_computed_tokens
        tokens += number
        if number == 1:
            context += start + 1
        else:
            pairs += number * start + number * (number + 1) // 2
    padded = _PADDED[tokens] if tokens < len(_PADDED) else tokens
    work = StepWork(tokens, padded, len(plan.scheduled_requests), pairs, context)
    if plan.spec_token_ids:
        work.drafts = sum(map(len, plan.spec_token_ids.values()))
    if any(request.extra_keys for request in plan.scheduled_requests):
        adapters = {adapter_of(request) for request in plan.scheduled_requests} - {None}
        work.adapters = len(adapters)
    return work


class StepCost(Protocol):
    """What the simulator's clock needs."""

    def seconds(self, work: StepWork) -> float:
        """How long the model runs. Raises CostError where that is not known."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A constant and a price per unit of each feature."""

    terms: Mapping[str, float]
    """Seconds per unit of a feature; "step" is the constant."""
    source: str
    """Where it comes from, or that it is made up."""
    hull: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Least and largest value of each feature that was timed; empty: made up, so unbounded."""
    bands: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of steps that only decode, and of others: 5th and 95th percentile of measured / fitted."""
    host: float = 0.0
    """Seconds between two steps that the model does not run: scheduling, in- and output."""

    def __post_init__(self) -> None:
        for name, value in [*self.terms.items(), ("host", self.host)]:
            if name not in ("step", "host", *FEATURES):
                raise CostError(f"terms[{name!r}]: need one of step, {', '.join(FEATURES)}")
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise CostError(f"{name}={value!r}: need seconds, 0 or more")

    def seconds(self, work: StepWork) -> float:
        """Of one step.

        Raises:
            CostError: outside of what was timed.
        """
        for name, (low, high) in self.hull.items():
            value, margin = getattr(work, name), MARGIN * (high - low)
            if not low - margin <= value <= high + margin:
                raise CostError(
                    f"{name}={value}: the cost was fitted on {low:g} to {high:g} ({self.source})"
                )
        return self.price(work)

    def price(self, work: StepWork) -> float:
        """What the terms come to, wherever they were fitted."""
        total = self.terms.get("step", 0.0)
        for name, price in self.terms.items():
            if name != "step":
                total += price * getattr(work, name)
        return total

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        found = {"cost": FORMAT, **asdict(self)}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def load_cost(text: str) -> LinearCost:
    """A cost from a file, or spelled out, as in `step=6e-3,tokens=1e-5`.

    Raises:
        CostError: neither, or a term that does not exist.
    """
    path = Path(text)
    if "=" in text and not path.exists():
        return _spelled(text)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise CostError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict) or found.get("cost") != FORMAT:
        raise CostError(f"{path}: need an object with cost={FORMAT}")
    try:
        hull, bands = (
            {name: (float(low), float(high)) for name, (low, high) in found.get(key, {}).items()}
            for key in ("hull", "bands")
        )
        return LinearCost(found["terms"], found["source"], hull, bands, found.get("host", 0.0))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CostError(f"{path}: {error}") from None


def _spelled(text: str) -> LinearCost:
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            terms[name.strip()] = float(value)
        except ValueError:
            raise CostError(f"{part!r}: need NAME=SECONDS, such as tokens=1e-5") from None
    host = terms.pop("host", 0.0)
    return LinearCost(terms, "made up on the command line", host=host)


# ------------------------------------------------------------------ fitting


def fit(
    steps: Iterable[tuple[StepWork, float]],
    source: str,
    features: Sequence[str] = ("tokens", "prefill_pairs", "decode_context"),
    host: float = 0.0,
) -> LinearCost:
    """The non-negative cost with the least mean squared relative error.

    Args:
        steps: work and measured seconds, above 0.
        source: said wherever the cost is used: hardware, model, release.
        features: of `FEATURES`; a constant is always among the terms.

    Raises:
        CostError: fewer than three steps per term, an unknown feature, a time of 0.
    """
    timed = list(steps)
    need = 3 * (len(features) + 1)
    if len(timed) < need:
        raise CostError(f"{len(timed)} steps: need at least {need} for {len(features)} features")
    if unknown := set(features) - set(FEATURES):
        raise CostError(f"features={sorted(unknown)}: need some of {', '.join(FEATURES)}")
    seconds = np.array([each for _, each in timed])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise CostError(
            f"timed holds a step of {seconds[~(seconds > 0) | np.isinf(seconds)][0]:g} seconds: "
            "need finite times above 0"
        )
    values = np.array([[getattr(work, name) for name in features] for work, _ in timed], float)
    table = np.column_stack([np.ones(len(timed)), values])  # [steps, terms]
    prices = nonnegative_least_squares(table / seconds[:, None], np.ones(len(timed)))
    ratio = seconds / np.maximum(table @ prices, 1e-300)
    decodes = np.array([work.prefill_pairs == 0 for work, _ in timed])
    bands = {
        name: tuple(np.quantile(ratio[chosen], (0.05, 0.95)).tolist())
        for name, chosen in (("decode", decodes), ("prefill", ~decodes))
        if chosen.any()
    }
    low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
    return LinearCost(
        dict(zip(("step", *features), prices.tolist(), strict=True)), source,
        dict(zip(features, zip(low, high, strict=True), strict=True)), bands, host,
    )  # fmt: skip


def nonnegative_least_squares(table: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x of 0 or more with the least |table @ x - target|, float64.

    An active set that grows by the steepest column and shrinks where a solution would go below 0
    (Lawson and Hanson, Solving Least Squares Problems, chapter 23).

    Args:
        table: [rows, columns].
        target: [rows].
    """
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    table = table / scale
    x, used = np.zeros(table.shape[1]), np.zeros(table.shape[1], bool)
    for _ in range(3 * table.shape[1]):
        slope = table.T @ (target - table @ x)
        slope[used] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= 1e-12 * np.linalg.norm(target):
            break
        used[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[used] = np.linalg.lstsq(table[:, used], target, rcond=None)[0]
            below = used & (trial <= 0)
            if not below.any():
                break
            step = np.min(x[below] / (x[below] - trial[below]))
            x = x + step * (trial - x)
            used &= x > 1e-15
        x = trial
    return x / scale


def error_of(cost: StepCost, steps: Iterable[tuple[StepWork, float]]) -> dict[str, float]:
    """How far a cost is from steps that were timed: relative errors, and how many it refuses."""
    errors: list[float] = []
    refused = 0
    for work, seconds in steps:
        try:
            errors.append(abs(cost.seconds(work) / seconds - 1))
        except CostError:
            refused += 1
    found: dict[str, Any] = {"steps": len(errors), "refused": refused}
    if errors:
        found["median"], found["p95"] = np.quantile(errors, (0.5, 0.95)).tolist()
    return found
