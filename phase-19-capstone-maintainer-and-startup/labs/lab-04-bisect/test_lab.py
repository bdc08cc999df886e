"""What lab 19-04 pins: the right stretch, with few questions, and a verdict that comes and goes."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

from labkit import same

HERE = Path(__file__).resolve().parent
FLIPPED = "42656"


@cache
def verdicts() -> dict[str, dict[str, bool]]:
    """Of each exhibit of the museum, which releases have it; as the releases' own code ran."""
    return json.loads((HERE / "recordings" / "verdicts.json").read_text(encoding="utf-8"))


class Counted:
    """`ask`, with a list of what was asked; nothing may be asked twice."""

    def __init__(self, said: dict[str, bool], known: str) -> None:
        self.said, self.known, self.asked = said, known, []

    def __call__(self, version: str) -> bool:
        assert version in self.said, f"asked {version!r}; need one of {', '.join(self.said)}"
        assert version != self.known, f"asked {version}, which is known to be bad"
        assert version not in self.asked, f"asked {version} twice, after {self.asked}"
        self.asked.append(version)
        return self.said[version]


def around(said: dict[str, bool], bad: str) -> tuple[str, str | None]:
    """The stretch around `bad`, by looking at every verdict."""
    versions = list(said)
    first = last = versions.index(bad)
    while first and said[versions[first - 1]]:
        first -= 1
    while last + 1 < len(versions) and said[versions[last + 1]]:
        last += 1
    return versions[first], versions[last + 1] if last + 1 < len(versions) else None


def most(said: dict[str, bool], bad: str) -> int:
    """As many questions as a bisection on both sides may need."""
    at = list(said).index(bad)
    return sum(math.ceil(math.log2(n + 1)) for n in (at, len(said) - at - 1))


def line(said: dict[str, bool]) -> str:
    return "".join("X" if bad else "." for bad in said.values())


def test_worked_example(lab):
    """A place beside the change; one question more than needed."""
    asked: list[int] = []

    def says(place: int) -> bool:
        asked.append(place)
        return place <= 5

    same(lab.change(3, 8, says), 5, "the last bad place between 3, bad, and 8, beyond the last:")
    assert len(asked) <= 3, f"4 places lie between: at most 3 questions; came {asked}"
    same(lab.change(5, -1, lambda place: place >= 2), 2, "downwards, bad from 2 on:")
    same(lab.change(4, 5, says), 4, "nothing lies between 4 and 5:")
    same(lab.change(0, -1, says), 0, "the oldest is bad:")


def test_the_first_bad_and_the_first_good(lab, record_property):
    """The last bad one given as the first good one; nothing older, or nothing newer."""
    total, cases = 0, 0
    for number, said in verdicts().items():
        if number == FLIPPED:
            continue
        for bad in (version for version, verdict in said.items() if verdict):
            ask = Counted(said, bad)
            same(
                lab.fewest(list(said), bad, ask), around(said, bad),
                f"{number}, {line(said)}, {bad} known, first bad and first good of {list(said)}:",
            )  # fmt: skip
            assert len(ask.asked) <= most(said, bad), (
                f"{number}, {line(said)}, {bad} known: at most {most(said, bad)} questions; "
                f"came {len(ask.asked)}: {ask.asked}"
            )
            total, cases = total + len(ask.asked), cases + 1
    record_property("measured.questions", round(total / cases, 1))


def test_a_verdict_that_comes_and_goes(lab, record_property):
    """42656: bad, good, bad again, good; plain bisection may name the wrong stretch."""
    said = verdicts()[FLIPPED]
    ask = Counted(said, "0.27.1")
    record_property("measured.plain", lab.fewest(list(said), "0.27.1", ask)[0])
    for bad in (version for version, verdict in said.items() if verdict):
        ask = Counted(said, bad)
        same(
            lab.careful(list(said), bad, ask, 3), around(said, bad),
            f"42656, {line(said)}, {bad} known, with 3 spare questions; asked {ask.asked}:",
        )  # fmt: skip


def drawn(rng: random.Random) -> tuple[dict[str, bool], str]:
    """Verdicts that come and go, and a bad one."""
    said, verdict = {}, rng.random() < 0.5
    for place in range(rng.randint(3, 24)):
        if rng.random() < 0.25:
            verdict = not verdict
        said[f"0.{place}.0"] = verdict
    bad = rng.choice(list(said))
    said[bad] = True
    return said, bad


def test_enough_spare_questions_leave_nothing_unknown(lab):
    """A good one is found and the change beside it is not looked for; the wrong side is moved."""
    for seed in range(300):
        said, bad = drawn(random.Random(seed))
        ask = Counted(said, bad)
        same(
            lab.careful(list(said), bad, ask, len(said)), around(said, bad),
            f"drawn verdicts {seed}, {line(said)}, {bad} known; asked {ask.asked}:",
        )  # fmt: skip


def test_without_spare_questions_it_is_bisection(lab):
    """More is asked than was granted."""
    for seed in range(100):
        said, bad = drawn(random.Random(seed))
        plain, none, some = (Counted(said, bad) for _ in range(3))
        expected: Any = lab.fewest(list(said), bad, plain)
        same(lab.careful(list(said), bad, none, 0), expected, f"drawn {seed}, {line(said)}, {bad}:")
        same(len(none.asked), len(plain.asked), f"questions without spare ones, drawn {seed}:")
        lab.careful(list(said), bad, some, 1)
        versions = list(said)
        first, end = expected
        inside = versions[versions.index(first) : versions.index(end) if end else len(said)]
        open_ = [version for version in inside if version not in (bad, *plain.asked)]
        assert bool(open_) == (len(some.asked) > len(plain.asked)), (
            f"drawn {seed}, {line(said)}, {bad} known, one spare question: between the ends "
            f"{open_} were not asked; expected one question more where there are some, came "
            f"{len(some.asked)} and {len(plain.asked)} without it"
        )
        bound = len(plain.asked) + 1 + math.ceil(math.log2(len(said) + 1))
        assert len(some.asked) <= bound, (
            f"drawn {seed}, {line(said)}, {bad} known, one spare question: at most {bound} in all; "
            f"came {len(some.asked)}: {some.asked}"
        )
