"""Since when, and until when, releases decide a workload as one of them does: with few questions.

    course bisect workload.yaml --field num_scheduled_tokens --bad 0.22.1

Promises: the four releases on both sides of the two changes are asked, and one further on each
side. What is assumed of the others is that they decide as those asked beside them; where one that
is asked contradicts this, all are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.decisions import FIELDS, Parting, decide, parting
from conformance.real_core import core_of
from conformance.workloads import Workload


@dataclass(frozen=True, slots=True)
class Stretch:
    """The releases without a gap that are bad, around one that is known to be."""

    last_good: str | None
    """The release before the first bad one; None: there is no older one."""
    first_bad: str
    last_bad: str
    first_good: str | None
    """The release after the last bad one; None: there is no newer one."""
    asked: dict[str, bool]
    """Which releases were asked, in that order, and whether each is bad."""
    elsewhere: tuple[str, ...]
    """Bad ones outside the stretch: found where the verdict came and went, and all were asked."""


def stretch(
    versions: Sequence[str], bad: str, is_bad: Callable[[str], bool], every: bool = False
) -> Stretch:
    """The first bad and the first good release around `bad`, by bisection on both sides.

    Args:
        versions: the oldest first, no two alike.
        bad: one of them, which is bad: it is not asked.
        is_bad: the verdict; asked at most once for each.
        every: ask all of them.

    Raises:
        ValueError: `bad` is not one of `versions`.
    """
    if bad not in versions:
        raise ValueError(f"bad={bad!r}: need one of {', '.join(versions)}")
    asked = {bad: True}

    def says(place: int) -> bool:
        version = versions[place]
        if version not in asked:
            asked[version] = is_bad(version)
        return asked[version]

    def change(inside: int, outside: int) -> int:
        """The bad place farthest towards `outside`, a place beyond the last that may be bad."""
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            if says(middle):
                inside = middle
            else:
                outside = middle
        return inside

    at = versions.index(bad)
    first, last = change(at, -1), change(at, len(versions))
    beside = {place: first <= place <= last for place in (first - 2, first + 1, last - 1, last + 2)}
    surprises = [p for p, bad in beside.items() if 0 <= p < len(versions) and says(p) != bad]
    if every or surprises:
        verdicts = [says(place) for place in range(len(versions))]
        first = max((place + 1 for place in range(at) if not verdicts[place]), default=0)
        goods = (place - 1 for place in range(at, len(versions)) if not verdicts[place])
        last = min(goods, default=len(versions) - 1)
    return Stretch(
        versions[first - 1] if first else None,
        versions[first],
        versions[last],
        versions[last + 1] if last + 1 < len(versions) else None,
        asked,
        tuple(v for place, v in enumerate(versions) if asked.get(v) and not first <= place <= last),
    )


@dataclass(frozen=True, slots=True)
class History:
    """What releases made of a workload."""

    stretch: Stretch
    came: Parting | None
    """Where the last good and the first bad release part, in that order; None: nothing is older."""
    went: Parting | None
    """The same of the last bad and the first good one."""
    left_out: dict[str, str]
    """Releases that cannot decide this workload, and why."""


def bisect(
    workload: Workload,
    versions: Sequence[str],
    fields: Sequence[str],
    bad: str,
    every: bool = False,
) -> History:
    """Since when and until when releases decide a workload as `bad` does.

    Args:
        workload: what is decided.
        versions: the releases to look at, the oldest first.
        fields: which of `decisions.FIELDS` count as the decision.
        bad: the release that decides so.
        every: ask all of them.

    Raises:
        ArchiveError, LoadError: a release that is asked is not here, or does not load.
        ValueError: an unknown field, or `bad` is not among `versions` or cannot decide it.
    """
    if unknown := [field for field in fields if field not in FIELDS]:
        raise ValueError(f"field={unknown[0]!r}: need one of {', '.join(FIELDS)}")
    decided = {bad: decide(workload, core_of(bad))}
    left_out: dict[str, str] = {}

    def is_bad(version: str) -> bool:
        if version not in decided:
            try:
                decided[version] = decide(workload, core_of(version))
            except ValueError as error:
                left_out[version] = str(error)
                raise _LeftOutError from None
        return parting(decided[bad], decided[version], fields) is None

    while True:
        able = [version for version in versions if version not in left_out]
        try:
            found = stretch(able, bad, is_bad, every)
        except _LeftOutError:
            continue
        break
    came = went = None
    if found.last_good is not None:
        came = parting(decided[found.last_good], decided[found.first_bad], fields)
    if found.first_good is not None:
        went = parting(decided[found.last_bad], decided[found.first_good], fields)
    return History(found, came, went, left_out)


class _LeftOutError(Exception):
    """A release cannot decide the workload: begin again without it."""
