"""Lab 09-01: a row of logits, edited, truncated and drawn from, in the engine's order.

Every function takes one row [vocab_size] of any float dtype, works in float64 and returns a new
array. The order is the engine's: `vllm/v1/sample/sampler.py:20` `Sampler`. What holds throughout:

- P1: edits (processors, penalty) come before the argmax of a greedy row, truncation comes after it.
- P2: a token at -inf has probability 0 whatever follows; nothing brings it back but an edit.
- P3: no array and no list that comes in is changed, whatever a processor does to what it is given.
- P4: randomness is one draw from the generator that is given; a greedy row draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mini_vllm import SamplingParams

Context = dict[str, Any]
"""What a processor may know: `{"generated": [token ids so far]}`."""


class LogitsProcessor(Protocol):
    """Anything that turns a row into a row of the same length (given)."""

    def __call__(self, logits: np.ndarray, ctx: Context) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a request asks for (given). 0 switches top_k and min_p off, 1 top_p and the penalty."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of a row, float64 (given); -inf gives 0, and at least one entry is finite."""
    scores = np.asarray(logits, dtype=np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


# --- truncation -----------------------------------------------------------------------------------


def apply_temperature(logits: np.ndarray, T: float) -> np.ndarray:
    """The logits divided by T.

    Raises:
        ValueError: T is not above 0 (0 means greedy, which is no division).
    """
    raise NotImplementedError


def apply_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """The k largest logits, the others -inf, as in lab 00-03.

    What equals the k-th largest stays too. k of 0 or less, or of vocab_size or more, keeps all.
    """
    raise NotImplementedError


def apply_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """The smallest set of likeliest tokens whose probabilities reach p, as in lab 00-03.

    A token stays while the mass of the likelier ones is less than p; of two equally likely ones the
    lower id counts as the likelier. Probabilities are those of the row given.

    Raises:
        ValueError: p is outside (0, 1].
    """
    raise NotImplementedError


def apply_min_p(logits: np.ndarray, min_p: float) -> np.ndarray:
    """Drop (-inf) every token less likely than `min_p` times the likeliest one.

    Probabilities are those of the row given. What lies exactly on the bound stays, and so does the
    likeliest token whatever `min_p` is; 0 keeps all.

    A trace: probabilities (.5, .2, .15, .1, .05) and min_p .35 have the bound .175: two stay.

    Raises:
        ValueError: `min_p` is outside [0, 1].

    Source: `vllm/v1/sample/logits_processor/builtin.py:101` `MinPLogitsProcessor.apply`.
    """
    raise NotImplementedError


# --- edits ----------------------------------------------------------------------------------------


def apply_repetition_penalty(
    logits: np.ndarray, generated_token_ids: Sequence[int], penalty: float
) -> np.ndarray:
    """Make tokens that occurred less likely (`penalty` above 1) or more likely (below 1).

    An id that occurred, once or often, changes once: a logit above 0 is divided by the penalty, any
    other multiplied by it. 1.0 changes nothing.

    A trace: logits (2, -1, 0, .5), ids 0, 1, 1, 2 and penalty 2 give (1, -2, 0, .5).

    Raises:
        ValueError: the penalty is not a finite number above 0, or an id is no index of the row.

    Source: `vllm/_custom_ops.py:360` `apply_repetition_penalties_torch`.
    """
    raise NotImplementedError


class Pipeline:
    """Processors, one after the other; itself one."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        """The processors, in the order in which they are to act."""
        self.processors = tuple(processors)

    def __call__(self, logits: np.ndarray, ctx: Context) -> np.ndarray:
        """The row after all of them; without any, a float64 copy.

        A processor gets a copy of what the one before it returned, and `ctx`. One that writes into
        the row it was given must be seen neither by the caller nor by the one before it, and what
        is returned belongs to nobody else (P3). Each is called once.
        """
        raise NotImplementedError


# --- one token ------------------------------------------------------------------------------------


def final_distribution(
    logits: np.ndarray,
    params: Any,
    generated: Sequence[int],
    processors: Sequence[LogitsProcessor] = (),
) -> np.ndarray:
    """The law of the next token, [vocab_size].

    Processors first, then the repetition penalty; a greedy row (temperature 0) has its law now: 1
    at the largest logit, the lowest id of equal ones, 0 elsewhere. Any other row goes on with
    temperature, min-p, top-k and top-p.

    Args:
        logits: [vocab_size].
        params: an object with the fields of `Knobs`.
        generated: ids so far, for the penalty. Processors find a copy under `ctx["generated"]`,
            made anew for every call.
        processors: in the order in which they act; each is called once per call.

    Raises:
        ValueError: a field that this row uses is out of range; or the processors leave no token.
    """
    raise NotImplementedError


def sample(
    logits: np.ndarray,
    params: Any,
    generated: Sequence[int],
    processors: Sequence[LogitsProcessor] = (),
    rng: np.random.Generator | None = None,
) -> int:
    """One token id by `final_distribution`, a Python int.

    A greedy row makes no generator and draws nothing. Any other is one
    `generator.choice(vocab_size, p=law)`, where the generator is `rng`, or without one
    `np.random.default_rng(params.seed)` (P4).

    Raises:
        ValueError: as `final_distribution`.
    """
    raise NotImplementedError


class Sampler:
    """Given. Your `sample` as an engine part: `course run --mine` generates with it.

    The engine edits the row before it asks a sampler, and keeps a generator per request.
    """

    def sample(
        self, logits: np.ndarray, params: SamplingParams, rng: np.random.Generator | None = None
    ) -> int:
        """The engine's interface: `mini_vllm/sampler.py`, `Sampler.sample`."""
        knobs = Knobs(
            params.temperature, params.top_k, params.top_p, params.min_p, seed=params.seed
        )
        return sample(logits, knobs, [], (), rng)
