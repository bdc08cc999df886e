"""Lab 09-03: search for the most probable sequence, and see what searching wider does.

A *hypothesis* is a sequence of token ids and the sum of their log-probabilities; while it may still
be extended it is *live*. What holds throughout:

- W1: after every step at most `beam_width` hypotheses survive, the best of all children of all live
  ones: pruning knows no parents.
- W2: a child that ends in EOS competes for its place like any other, and is never extended.
- W3: scores are sums of logarithms; they are comparable at one length.
- W4: equal scores are told apart by the token ids, the smaller sequence first.

No upstream counterpart in the engine core: vLLM's own beam search lives in front of it,
`vllm/entrypoints/generate/beam_search/offline.py:27` `BeamSearchOfflineMixin.beam_search`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LogProbFn = Callable[[tuple[int, ...]], np.ndarray]
"""The ids said so far to the log-probabilities [vocab_size] of the next one; -inf is impossible, at
least one entry is finite. A call is a run of the model."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence (given)."""

    tokens: tuple[int, ...]
    score: float
    """Sum of the tokens' log-probabilities, EOS included."""
    finished: bool
    """Whether the last token is EOS."""


def greedy_decode(fn: LogProbFn, max_len: int, eos_id: int | None = None) -> Hypothesis:
    """The likeliest token at every step, the lowest id of equal ones.

    Args:
        fn: the model.
        max_len: most tokens, EOS included.
        eos_id: the token that ends a sequence; None: there is none.

    Raises:
        ValueError: `max_len` is below 1.
    """
    raise NotImplementedError


def beam_search(
    fn: LogProbFn,
    beam_width: int,
    max_len: int,
    eos_id: int | None = None,
    alpha: float = 0.0,
) -> list[Hypothesis]:
    """The best sequences that a beam of this width finds.

    The search begins with the empty sequence and ends when nothing is live, or at `max_len` tokens.
    Among its results are finished ones of any length and those live at the end. While it goes on
    hypotheses are compared by score; at the end all are ranked by `score / len(tokens) ** alpha`.

    A trace: the first token is A (.6) or B (.4), after A come C (.51) or D (.49), after B come C
    (.9) or D (.1); max_len 2. Width 1 finds AC, .306; width 2 finds BC, .36, and AC.

    Args:
        fn: the model. Asked once per live hypothesis and step, and never about a sequence that
            ends in EOS.
        beam_width: most hypotheses that survive a step.
        max_len, eos_id: as in `greedy_decode`.
        alpha: 0 ranks by score; 1 by the mean log-probability of a token.

    Returns:
        Best first, at most `beam_width`.

    Raises:
        ValueError: `beam_width` or `max_len` is below 1.
    """
    raise NotImplementedError
