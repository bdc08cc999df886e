"""Lab 00-01: generate the same tokens with and without a KV cache, and count the work.

`KVWork`, `compute_kv` and `next_token` are given. Write `generate_no_cache` and
`generate_with_cache`; `generate_with_cache_lazy` is the stretch, graded last. The attention
layer that writes and reads the real cache is
`vllm/model_executor/layers/attention/attention.py:437` `Attention.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VOCAB_SIZE = 257


@dataclass(slots=True)
class KVWork:
    """A meter: one unit is the K and V of one token at one position, in every layer.

    `calls` keeps what was computed, in order, as `(token, position)`.
    """

    units: int = 0
    calls: list[tuple[int, int]] = field(default_factory=list)

    def compute_kv(self, token: int, position: int) -> None:
        """Compute K and V of `token` at `position`: one unit of work."""
        self.units += 1
        self.calls.append((token, position))


def compute_kv(token: int, position: int, work: KVWork) -> None:
    """Compute K and V of `token` at `position`, counted in `work`."""
    work.compute_kv(token, position)


def next_token(tokens: list[int]) -> int:
    """The stand-in for a model: a token that depends on every token before it, in order.

    32-bit FNV-1a over the ids, folded into the vocabulary. Like greedy decoding, it has no
    randomness, and like attention it reads the whole context.

    Raises:
        ValueError: `tokens` is empty.
    """
    if not tokens:
        raise ValueError("tokens is empty: a model needs at least one token of context")
    state = 2166136261
    for token in tokens:
        state = ((state ^ token) * 16777619) & 0xFFFFFFFF
    return (state >> 16) % VOCAB_SIZE


def generate_no_cache(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """Append `n_new` tokens to `prompt`, computing K and V of everything at every step.

    Each step calls `compute_kv` once for every (token, position) present, in order from
    position 0, and then appends `next_token(tokens)`. With P prompt tokens, step i (from 0)
    costs P + i units.

    Args:
        prompt: token ids, at least one; never changed.
        n_new: how many tokens to append, 0 or more.
        work: the meter to count in; a fresh one when None.

    Returns:
        The whole sequence, prompt first, and the units of this call alone.

    Raises:
        ValueError: `prompt` is empty or `n_new` is negative.
    """
    raise NotImplementedError


def generate_with_cache(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """Append `n_new` tokens to `prompt`, computing K and V of each position once.

    First `compute_kv` for each prompt token (the prefill). Then, at each step, append
    `next_token(tokens)` and compute K and V of that token alone, at its own position. The last
    token's K and V are computed too, although nothing reads them yet: P + n_new units.

    Args, returns and raises as `generate_no_cache`.
    """
    raise NotImplementedError


def generate_with_cache_lazy(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """As `generate_with_cache`, but K and V of a token are computed when the next one needs them.

    The state the real engine keeps: between steps `num_computed_tokens` trails `num_tokens` by
    one (`vllm/v1/request.py:145` `Request.num_computed_tokens`, `vllm/v1/request.py:239`
    `Request.num_tokens`), and the last sampled token costs nothing until the step that reads it.
    For n_new >= 1 that is P + n_new - 1 units; for n_new = 0 it is none.
    """
    raise NotImplementedError
