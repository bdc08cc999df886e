"""Lab 09-01: the order of a sampler, found from what vLLM's own sampler did.

Every stage takes one row [vocab_size] of any float dtype, works in float64 and returns a new array.
Two stages are yours. The order in which all of them act is a guess that `Order` is to mend:
`vllm/v1/sample/sampler.py:20` `Sampler` was recorded stage by stage. What holds throughout:

- P1: what a request edits reaches a greedy row too.
- P2: a token at -inf has probability 0 whatever follows; nothing brings it back but an edit.
- P3: no array and no list that comes in is changed, whatever a processor does to what it is given.
- P4: randomness is one draw from the generator that is given; a greedy row draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Given. The logits divided by T.

    Raises:
        ValueError: T is not above 0 (0 means greedy, which is no division).
    """
    if not T > 0.0:
        raise ValueError(f"T={T}: need a temperature above 0")
    return np.asarray(logits, dtype=np.float64) / T


def apply_top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Given. The k largest logits, the others -inf, as in lab 00-03.

    What equals the k-th largest stays too. k of 0 or less, or of vocab_size or more, keeps all.
    """
    scores = np.array(logits, dtype=np.float64)
    if 0 < k < len(scores):
        scores[scores < np.partition(scores, -k)[-k]] = -np.inf
    return scores


def apply_top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Given. The smallest set of likeliest tokens whose probabilities reach p, as in lab 00-03.

    A token stays while the mass of the likelier ones is less than p; of two equally likely ones the
    lower id counts as the likelier. Probabilities are those of the row given.

    Raises:
        ValueError: p is outside (0, 1].
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"p={p}: need a value in (0, 1]")
    scores = np.array(logits, dtype=np.float64)
    if p == 1.0:
        return scores
    order = np.argsort(-scores, kind="stable")
    probabilities = softmax(scores[order])
    dropped = np.cumsum(probabilities) - probabilities >= p
    scores[order[dropped]] = -np.inf
    return scores


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
    """Given. Processors, one after the other; itself one."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        """The processors, in the order in which they are to act."""
        self.processors = tuple(processors)

    def __call__(self, logits: np.ndarray, ctx: Context) -> np.ndarray:
        """The row after all of them; without any, a float64 copy.

        A processor gets a copy of what the one before it returned, and `ctx`. One that writes into
        the row it was given must be seen neither by the caller nor by the one before it, and what
        is returned belongs to nobody else (P3). Each is called once.
        """
        scores = np.array(logits, dtype=np.float64)
        for processor in self.processors:
            scores = np.array(processor(scores, ctx), dtype=np.float64)
        return scores


# --- one token ------------------------------------------------------------------------------------


class Guess:
    """Given. The stages in the order in which people name them. vLLM's is another."""

    def law(
        self,
        logits: np.ndarray,
        params: Any,
        generated: Sequence[int],
        processors: Sequence[LogitsProcessor] = (),
    ) -> np.ndarray:
        """The law of the next token, [vocab_size].

        Args:
            logits: [vocab_size].
            params: an object with the fields of `Knobs`.
            generated: ids so far, for the penalty. Processors find a copy under `ctx["generated"]`,
                made anew for every call.
            processors: in the order in which they act; each is called once per call.
        """
        if params.temperature == 0.0:
            return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
        scores = apply_temperature(logits, params.temperature)
        scores = apply_top_k(scores, params.top_k)
        scores = apply_top_p(scores, params.top_p)
        scores = apply_min_p(scores, params.min_p)
        scores = apply_repetition_penalty(scores, generated, params.repetition_penalty)
        scores = Pipeline(processors)(scores, {"generated": list(generated)})
        return softmax(scores)


class Order(Guess):
    """The same stages in vLLM's order.

    Recorded, three of the rows that the guess gets wrong:

        row                     asked                                      vLLM, then the guess
        -1, 2.062, .375, .562   temperature 1.5, bias -3.25 on id 1        .139 .122 .347 .393
                                                                           .151 .045 .377 .427
        1000 1000 1001 1000     temperature .3, top_k 2, min_p .8,         1/3 1/3 0 1/3
                                bias -3.25 on id 2                         0 0 1 0
        1, 2, 0, 0              top_k 3, top_p 1e-6, penalty 8 on          1 0 0 0
                                ids 1, 2, 3; ids 1 and 3 banned            0 1 0 0

    Must hold, besides every recorded row: P1 to P4. The law of a greedy row is 1 at one token, the
    lowest id of equal ones. No temperature but 0 is greedy. A ValueError where a field that the row
    uses is out of range, and where the processors leave no token.
    """


def final_distribution(
    logits: np.ndarray,
    params: Any,
    generated: Sequence[int],
    processors: Sequence[LogitsProcessor] = (),
) -> np.ndarray:
    """Given. The law of the next token, by your `Order`."""
    return Order().law(logits, params, generated, processors)


STAGES: dict[str, Callable[[np.ndarray, Knobs], np.ndarray]] = {
    "bias": lambda row, knobs: row + (np.arange(len(row)) == 0),
    "penalty": lambda row, knobs: apply_repetition_penalty(row, [0], knobs.repetition_penalty),
    "temperature": lambda row, knobs: apply_temperature(row, knobs.temperature),
    "min_p": lambda row, knobs: apply_min_p(row, knobs.min_p),
    "top_k": lambda row, knobs: apply_top_k(row, knobs.top_k),
    "top_p": lambda row, knobs: apply_top_p(row, knobs.top_p),
}
"""Given. Every stage as a function of a row. "bias" is a processor that adds 1 to id 0, which is
also what "penalty" takes as said before."""


def witness(first: str, second: str) -> tuple[np.ndarray, Knobs] | None:
    """A row and knobs on which two stages, in the other order, give another law.

    The recordings can only show an order where it matters, so this is what a recorder has to ask
    for. The two laws, softmax after both stages, differ by 0.01 or more at some token. None where
    no row and no knobs do that: those two may change places.

    Args:
        first, second: two of the names in `STAGES`.

    Returns:
        A row of 2 to 12 finite logits, and `Knobs` with a temperature above 0.
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
