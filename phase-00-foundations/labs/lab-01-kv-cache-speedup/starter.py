"""Lab 00-01: generate the same tokens with and without a KV cache, and count the work.

A model that sees earlier tokens through their K and V alone, a store for K and V, and a meter are
given; the three generators are the lab. The attention layer that writes and reads the real cache
is `vllm/model_executor/layers/attention/attention.py:437` `Attention.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

VOCAB_SIZE = 257
PRIME = 2_147_483_647


class KV(NamedTuple):
    """What one token at one position leaves for later positions to read; one number each."""

    key: int
    value: int


@dataclass(slots=True)
class KVWork:
    """Given. A meter: one unit is the K and V of one token at one position, in every layer.

    `calls` keeps what was computed, in order, as `(token, position)`.
    """

    units: int = 0
    calls: list[tuple[int, int]] = field(default_factory=list)


class KVStore:
    """Given. K and V of the positions 0, 1, 2, ... of one sequence: the cache.

    Positions enter once and in order. The store does not compute and does not count.
    """

    def __init__(self) -> None:
        self._rows: list[KV] = []

    def __len__(self) -> int:
        """How many positions it holds."""
        return len(self._rows)

    def write(self, position: int, kv: KV) -> None:
        """Keep the K and V of the next position.

        Raises:
            ValueError: `position` is held already, or leaves a gap.
        """
        held = len(self._rows)
        if 0 <= position < held:
            raise ValueError(
                f"position={position} is in the store already: K and V are computed once and never "
                f"change. It holds {held}, so the next position is {held}"
            )
        if position != held:
            raise ValueError(
                f"position={position} leaves a gap: the store holds {held}, so the next position "
                f"is {held}"
            )
        self._rows.append(kv)

    def read(self, num_positions: int) -> list[KV]:
        """K and V of the positions 0 to num_positions - 1, which must be all that it holds.

        Raises:
            ValueError: some are missing, or some are later than that.
        """
        held = len(self._rows)
        if held < num_positions:
            raise ValueError(
                f"position {held} is missing from the store: a token at position "
                f"{num_positions - 1} reads positions 0 to {num_positions - 1}, its own too, and "
                f"the store holds {held}"
            )
        if held > num_positions:
            raise ValueError(
                f"position {held - 1} in the store is later than position {num_positions - 1}, "
                "which reads it: a token never reads what comes after it"
            )
        return self._rows


def compute_kv(token: int, position: int, work: KVWork) -> KV:
    """Given. Compute K and V of `token` at `position`: one unit in `work`. The same every time."""
    work.units += 1
    work.calls.append((token, position))
    return KV(
        key=(token * 48_271 + position * 69_621 + 16_807) % PRIME,
        value=(token * 40_692 + position * 39_373 + 20_011) % PRIME,
    )


def next_token(token: int, position: int, store: KVStore) -> int:
    """Given. The model: the token that follows `token` at `position`.

    It is shown one token and makes a query of it. All else it knows it reads from `store`: K and
    V of every position up to this one. As in attention the query meets each key, and what comes
    out weighs that position's value. A softmax would round; this sum is taken modulo a prime, so
    that it is exact and every position counts.

    Raises:
        ValueError: the store does not hold exactly the positions 0 to `position`.
    """
    query = token * 30_269 + position * 30_307 + 1
    mixed = sum(query * kv.key % PRIME * kv.value for kv in store.read(position + 1))
    return mixed % PRIME % VOCAB_SIZE


def generate_no_cache(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """Append `n_new` tokens to `prompt`; nothing is remembered from step to step.

    Every step begins with an empty store and computes K and V of every token that is there, in
    order. With P prompt tokens, step i (from 0) costs P + i units: [4, 2] and two steps log
    `(4, 0), (2, 1)` and then `(4, 0), (2, 1), (t, 2)`, where t is the token of the first step.

    Args:
        prompt: token ids, at least one; never changed.
        n_new: how many tokens to append, 0 or more. Each is what `next_token` says.
        work: the meter to count in; a fresh one when None.

    Returns:
        The whole sequence, prompt first, and the units of this call alone.

    Raises:
        ValueError: `prompt` is empty or `n_new` is negative; nothing is computed then.
    """
    raise NotImplementedError


def generate_with_cache(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """The same tokens from one store: K and V of each position are computed once and kept.

    A token's K and V are in the store as soon as the token is known, the last one's too, which
    nothing reads: P + n_new units, also for `n_new` 0. [4, 2] and two steps log
    `(4, 0), (2, 1), (t, 2), (u, 3)`.

    Args, returns and raises as `generate_no_cache`.
    """
    raise NotImplementedError


def generate_with_cache_lazy(
    prompt: list[int], n_new: int, work: KVWork | None = None
) -> tuple[list[int], int]:
    """As `generate_with_cache`, but K and V of a token are computed when a step needs them.

    The state the real engine keeps: between steps `num_computed_tokens` trails `num_tokens` by
    one (`vllm/v1/request.py:145` `Request.num_computed_tokens`, `vllm/v1/request.py:239`
    `Request.num_tokens`), and the last sampled token costs nothing until the step that reads it.
    For n_new >= 1 that is P + n_new - 1 units; for n_new = 0 it is none. [4, 2] and two steps log
    `(4, 0), (2, 1), (t, 2)`.
    """
    raise NotImplementedError
