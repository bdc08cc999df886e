"""Lab 09-04: randomness that belongs to a request, and not to the batch it happens to be in.

One row of logits [vocab_size] comes with the id of the request it is of; rows of many requests come
in any order. What holds throughout:

- G1: a request's tokens depend on its seed, its logits and how many tokens it has drawn, on nobody
  else's.
- G2: a greedy token takes no randomness: no generator is made for it, and none moves.
- G3: a sampled token takes exactly one number from the request's generator.
- G4: a request's generator lives from its first draw until `finish`.

The engine keeps it so: `vllm/v1/worker/gpu_input_batch.py:39` `CachedRequestState.generator`.
"""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of a row, float64 (given)."""
    scores = np.asarray(logits, dtype=np.float64)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


class PerRequestSampler:
    """Chooses tokens for any number of live requests."""

    def __init__(self) -> None:
        """No request is live."""
        raise NotImplementedError

    def sample(
        self,
        request_id: str,
        logits: np.ndarray,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> int:
        """The request's next token, a Python int.

        Temperature 0 is the argmax, the lowest id of equal ones. Above it, the token is one
        `choice(vocab_size, p=softmax(logits / temperature))` of the request's generator, which is
        `np.random.default_rng(seed)` with the seed that its first draw came with. Seeds that come
        later are ignored; without one the operating system decides.

        A trace: uniform logits over 1,000 ids and seed 7 give 625, 897, 775, 225, 300, ... (numpy
        2.4.6), whoever else draws in between.

        Args:
            request_id: whose row this is.
            logits: [vocab_size], any float dtype, not changed.
            temperature: 0 or more; may be another at every call.
            seed: of the request.

        Raises:
            ValueError: temperature is not 0 or more. Nothing is kept of such a call.
        """
        raise NotImplementedError

    def finish(self, request_id: str) -> None:
        """The request has ended: nothing of it is kept. An id that is not live is fine.

        Whoever has the id next begins anew, with a seed of their own.
        """
        raise NotImplementedError

    def active_ids(self) -> set[str]:
        """Ids that have a generator; a set of the caller's own."""
        raise NotImplementedError


def keyed_sample(logits: np.ndarray, temperature: float, seed: int, position: int) -> int:
    """Part B: a token without any state, a function of its arguments alone.

    Over all positions of a request the tokens are independent draws from
    `softmax(logits / temperature)`; temperature 0 is the argmax, the lowest id of equal ones. The
    same arguments always give the same token, in any order, in any process. Another seed, or
    another position, gives independent noise: (seed 1, position 2) has nothing to do with (2, 1).
    At most 4 * vocab_size random numbers are drawn, wherever the position is.

    Args:
        logits: [vocab_size], not changed.
        temperature: 0 or more.
        seed, position: 0 or more, below 2**64.

    Raises:
        ValueError: temperature is not 0 or more.

    Source: `vllm/v1/worker/gpu/sample/gumbel.py:79` `gumbel_block_argmax`, whose noise is made of
    seed, position and token id.
    """
    raise NotImplementedError
