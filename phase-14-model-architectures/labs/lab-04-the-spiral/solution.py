"""Lab 14-04: a prefix that several kinds of layers must agree on, and how a release lost it.

Layers of one kind keep blocks of the whole prompt, layers of another only of a window. A prefix is
hit when every kind has what it needs of it. With a drafter that reads hidden states each kind gives
up the last block of its hit, since the states behind it are not in the cache. What holds:

- H1: a hit is a number of whole blocks, and at least one token of the prompt is left to compute.
- H2: every kind has what it needs of the hit, as its `look_up` says.
- H3: with a drafter every kind has found one block more than the hit, and left it out.
- H4: a longer hit is not given up without a reason: no kind refused it.

Sources: `vllm/v1/core/kv_cache_coordinator.py:503`
`HybridKVCacheCoordinator.find_longest_cache_hit` at the pin, and the same method in 0.14.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SIZE = 4
"""Tokens per block."""


class Walk(NamedTuple):
    """How a hit was found."""

    hit: int
    """Blocks."""
    calls: list[tuple[int, int]]
    """Each look-up on the way: the place of the kind, and the blocks that it found."""


@dataclass(frozen=True)
class Kind:
    """The layers of one kind, and the blocks of the prompt that are in the cache for them."""

    window: int | None
    """Tokens that a token sees, itself included; None: all before it."""
    cached: frozenset[int]

    def look_up(self, most_tokens: int, drops: bool) -> int:
        """The longest prefix, in blocks, of at most `most_tokens` that these layers can begin from.

        Without a window every block of the prefix must be there. With one, only those that the next
        token sees, and the search goes from the right. With `drops` one block more must be there,
        the last, and is left out of the result.
        """
        most = most_tokens // SIZE
        if self.window is None:
            found = 0
            while found < most and found in self.cached:
                found += 1
            return found - (drops and found > 0)
        needed = -(-(self.window - 1) // SIZE) + drops
        run = 0
        for block in reversed(range(most)):
            run = run + 1 if block in self.cached else 0
            if run == needed:
                return block + run - drops
        return run - (drops and run > 0)


def spiral(kinds: Sequence[Kind], num_tokens: int) -> Walk:
    """The hit of a prompt under a drafter as 0.14.0 decided it, look-up by look-up.

    Full attention comes first in `kinds`, if it is there. A trace: full attention and a window of
    8, ten blocks cached for both, 40 tokens: full attention finds 8 blocks, the window 7, then 6,
    5, 4, 3, 2, 1, 0 and 0 again. The hit is 0.
    """
    calls: list[tuple[int, int]] = []
    length = num_tokens - 1
    known: int | None = None
    while True:
        now = length
        for place, kind in enumerate(kinds):
            if kind.window is None and known is not None:
                now = now // SIZE * SIZE
                continue
            found = kind.look_up(now, True)
            calls.append((place, found))
            now = found * SIZE
            if kind.window is None:
                known = found
        if now >= length:
            return Walk(length // SIZE, calls)
        length = now


def mended(kinds: Sequence[Kind], num_tokens: int) -> Walk:
    """The hit as it should be (H1 to H4), look-up by look-up as the pin finds it.

    A trace, as above: full attention finds 8 blocks, the window 8. The hit is 8: of the ten blocks
    one holds the last token, and one is left out.
    """
    calls: list[tuple[int, int]] = []
    most = length = num_tokens - 1
    known, dropped = False, set[int]()
    while True:
        now = length
        for place, kind in enumerate(kinds):
            if kind.window is None and known:
                now = now // SIZE * SIZE
                continue
            drops = place not in dropped
            found = kind.look_up(min(now + SIZE, most) if drops else now, drops)
            calls.append((place, found))
            if drops:
                dropped.add(place)
            elif found * SIZE < now:
                dropped.clear()
            now = found * SIZE
            known = known or kind.window is None
        simple = len(kinds) == 2 and kinds[0].window is None
        if now >= length or simple:
            return Walk(min(now, length) // SIZE, calls)
        length = now
