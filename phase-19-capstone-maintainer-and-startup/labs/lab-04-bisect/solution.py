"""Lab 19-04: since when, and until when? The fewest releases asked.

`ask(version)` runs a workload on a release and says whether it is bad. It is counted. `versions`
are in the order of their release, and `bad` is one of them that is known to be bad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Ask = Callable[[str], bool]
Stretch = tuple[str, str | None]
"""The first bad release and the first good one behind it; None: the newest is bad."""


def change(at: int, outside: int, says: Callable[[int], bool]) -> int:
    """The last bad place on the way from `at` to `outside`, if the verdict changes once.

    Args:
        at: a place that is bad; it is not asked.
        outside: one that is good, or the place beyond the last one; above or below. Not asked.
        says: whether a place is bad.

    Asks at most `ceil(log2(n + 1))` places, n of them lie between. Example: `at` 3, `outside` 8,
    bad up to 5: asks 5, then 6 and returns 5.
    """
    while abs(outside - at) > 1:
        middle = (at + outside) // 2
        if says(middle):
            at = middle
        else:
            outside = middle
    return at


def fewest(versions: Sequence[str], bad: str, ask: Ask) -> Stretch:
    """The stretch of bad releases around `bad`, if there is only one.

    Asks nothing twice, and `bad` not at all. Below `bad` and above it lie releases, or none: where
    the oldest is bad, it is the first bad one.
    """
    at = versions.index(bad)
    first = change(at, -1, lambda place: ask(versions[place]))
    last = change(at, len(versions), lambda place: ask(versions[place]))
    return versions[first], versions[last + 1] if last + 1 < len(versions) else None


def careful(versions: Sequence[str], bad: str, ask: Ask, spare: int) -> Stretch:
    """As `fewest`, with `spare` further questions for a verdict that comes and goes.

    Each is about the middle of the widest run of releases that lie between the first and the last
    bad one and were not asked. A good one found there ends the stretch on its side: from the
    nearest release that is known to be bad, on the side of `bad`, the change is looked for again.
    Questions of that search are not spare ones. Ends early when nothing is left to ask. Example:
    XX..XX, the last known: `fewest` may say the first one, `careful` with 3 says the fifth.
    """
    at = versions.index(bad)
    known = {at: True, -1: False, len(versions): False}

    def says(place: int) -> bool:
        if place not in known:
            known[place] = ask(versions[place])
        return known[place]

    first, last = change(at, -1, says), change(at, len(versions), says)
    while spare > 0:
        asked = sorted(place for place in known if first <= place <= last)
        width, left = max(((b - a, a) for a, b in pairwise(asked)), default=(0, 0))
        if width < 2:
            break
        spare -= 1
        middle = left + width // 2
        if says(middle):
            continue
        if middle < at:
            first = change(min(p for p in known if p > middle and known[p]), middle, says)
        else:
            last = change(max(p for p in known if p < middle and known[p]), middle, says)
    return versions[first], versions[last + 1] if last + 1 < len(versions) else None
