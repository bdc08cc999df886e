"""Drafts without a model: what followed the last few tokens when they occurred before.

Promises: the longest match of the context's end with `min_n` to `max_n` tokens, of those the
earliest, and what came after it. Token for token
`vllm/v1/spec_decode/ngram_proposer.py:131` `NgramProposer.propose`, without its prefix table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mini_vllm.config import whole

Lookup = Callable[[np.ndarray], Sequence[int]]
"""([num_tokens] context) to at most k drafts."""


def ngram_propose(
    context: np.ndarray, min_n: int, max_n: int, k: int, max_model_len: int | None = None
) -> list[int]:
    """What followed the earliest of the longest earlier matches of the context's end.

    A match may overlap the end it matches, but ends before it.

    Args:
        context: [num_tokens] int, the request's tokens so far.
        min_n, max_n: length of the n-gram in tokens, `1 <= min_n <= max_n`.
        k: most drafts.
        max_model_len: no draft at or beyond this position.

    Returns:
        0 to k token ids.

    Raises:
        ValueError: a length out of range.
    """
    whole("min_n", min_n, 1)
    whole("max_n", max_n, min_n)
    context = np.asarray(context)
    if max_model_len is not None:
        k = min(k, max_model_len - len(context))
    if k <= 0 or len(context) <= min_n:
        return []
    ends = np.flatnonzero(context[:-1] == context[-1])  # where a match may end, earliest first
    length = 1
    while length < max_n and len(ends):
        longer = ends[ends >= length]
        longer = longer[context[longer - length] == context[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if not len(ends) or length < min_n:
        return []
    start = int(ends[0]) + 1
    return context[start : start + k].tolist()


class NgramProposer:
    """Keeps each request's tokens as an array, so that a step costs what is new."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self._contexts: dict[str, tuple[np.ndarray, int]] = {}

    def propose(self, contexts: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Drafts for every request with something to say; `contexts` holds all tokens of each."""
        return {
            request_id: [int(token) for token in self.lookup(self._context(request_id, tokens))]
            for request_id, tokens in contexts.items()
        }

    def remove_request(self, request_id: str) -> None:
        """The request is gone."""
        self._contexts.pop(request_id, None)

    def _context(self, request_id: str, tokens: Sequence[int]) -> np.ndarray:
        """[len(tokens)] the tokens, of which only those since the last call are copied."""
        buffer, known = self._contexts.get(request_id, (np.empty(0, dtype=np.int64), 0))
        count = len(tokens)
        if count > len(buffer):
            larger = np.empty(2 * count, dtype=np.int64)
            larger[:known] = buffer[:known]
            buffer = larger
        buffer[known:count] = tokens[known:count]
        self._contexts[request_id] = buffer, count
        return buffer[:count]
