"""Lab 00-01: generate the same tokens with and without a KV cache, and count the work.

The reference. `KVWork`, `compute_kv` and `next_token` are given; the two generators are the
lab. The attention layer that writes and reads the real cache is
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


def _check(prompt: list[int], n_new: int) -> None:
    """Raise ValueError for an empty prompt or a negative count."""
    if not prompt:
        raise ValueError("prompt is empty: give at least one token id")
    if n_new < 0:
        raise ValueError(f"n_new={n_new} is negative: give the number of tokens to add, 0 or more")


def generate_no_cache(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """Append `n_new` tokens to `prompt`, computing K and V of everything at every step.

    Args:
        prompt: token ids, at least one; never changed.
        n_new: how many tokens to append, 0 or more.
        work: the meter to count in; a fresh one when None.

    Returns:
        The whole sequence, prompt first, and the units of this call alone.

    Raises:
        ValueError: `prompt` is empty or `n_new` is negative.
    """
    _check(prompt, n_new)
    work = KVWork() if work is None else work
    before = work.units
    tokens = list(prompt)
    for _ in range(n_new):
        for position, token in enumerate(tokens):
            compute_kv(token, position, work)
        tokens.append(next_token(tokens))
    return tokens, work.units - before


def generate_with_cache(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """Append `n_new` tokens to `prompt`, computing K and V of each position once.

    First the prompt (the prefill), then each new token as it is appended (the decode steps).
    The last token's K and V are computed too, although nothing reads them yet.

    Args, returns and raises as `generate_no_cache`.
    """
    _check(prompt, n_new)
    work = KVWork() if work is None else work
    before = work.units
    tokens = list(prompt)
    for position, token in enumerate(tokens):
        compute_kv(token, position, work)
    for _ in range(n_new):
        tokens.append(next_token(tokens))
        compute_kv(tokens[-1], len(tokens) - 1, work)
    return tokens, work.units - before


def generate_with_cache_lazy(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """As `generate_with_cache`, but K and V of a token are computed when the next one needs them.

    The state the real engine keeps: between steps `num_computed_tokens` trails `num_tokens` by
    one (`vllm/v1/request.py:145` `Request.num_computed_tokens`, `vllm/v1/request.py:239`
    `Request.num_tokens`), and the last sampled token costs nothing until the step that reads it.
    """
    _check(prompt, n_new)
    work = KVWork() if work is None else work
    before = work.units
    tokens = list(prompt)
    num_computed_tokens = 0
    for _ in range(n_new):
        for position in range(num_computed_tokens, len(tokens)):
            compute_kv(tokens[position], position, work)
        num_computed_tokens = len(tokens)
        tokens.append(next_token(tokens))
    return tokens, work.units - before
