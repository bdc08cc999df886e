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
    raise NotImplementedError


def fewest(versions: Sequence[str], bad: str, ask: Ask) -> Stretch:
    """The stretch of bad releases around `bad`, if there is only one.

    Asks nothing twice, and `bad` not at all. Below `bad` and above it lie releases, or none: where
    the oldest is bad, it is the first bad one.
    """
    raise NotImplementedError


def careful(versions: Sequence[str], bad: str, ask: Ask, spare: int) -> Stretch:
    """As `fewest`, with `spare` further questions for a verdict that comes and goes.

    Each is about the middle of the widest run of releases that lie between the first and the last
    bad one and were not asked. A good one found there ends the stretch on its side: from the
    nearest release that is known to be bad, on the side of `bad`, the change is looked for again.
    Questions of that search are not spare ones. Ends early when nothing is left to ask. Example:
    XX..XX, the last known: `fewest` may say the first one, `careful` with 3 says the fifth.
    """
    raise NotImplementedError
