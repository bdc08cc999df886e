"""Lab 19-06: a mock interview loop. What is asked, what an answer is worth, what to read again.

The course's `INTERVIEW.md` files are the bank. Nothing here reads an answer: you answer aloud, and
say of yourself what happened. The rules make a number of it, the same for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RAPID = (0, 1, 2, 3)
"""Session 1: two questions from each of these phases, shuffled."""
SYSTEMS = (4, 5, 6, 7, 8)
"""Session 2: one question from each, with another of the same phase as its follow-up."""
BREADTH = (12, 14, 16, 17)
"""Session 5: one question from each."""
NUM_SYMPTOMS = 2
ROWS = {
    "fundamentals": (0, 1),
    "memory": (2,),
    "throughput": (3, 18),
    "kernels and precision": (4, 5, 6, 7),
    "latency": (8, 9),
    "scale-out": (10, 15),
    "productisation": (11, 12, 14, 16),
    "hardware": (17,),
}
"""The rows of CAREER.md's map, and the phases that train each."""


@dataclass(frozen=True, slots=True)
class Loop:
    """What one sitting asks. A question is `(phase, text)`."""

    rapid: tuple[tuple[int, str], ...]
    """Session 1, 30 minutes: eight."""
    systems: tuple[tuple[int, str, str], ...]
    """Session 2, 45 minutes: five, `(phase, text, follow-up)`."""
    scenario: Mapping[str, Any]
    """Session 3, 60 minutes: one design."""
    symptoms: tuple[Mapping[str, Any], ...]
    """Session 4, 30 minutes: two."""
    breadth: tuple[tuple[int, str], ...]
    """Session 5, 15 minutes: four."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What happened with one question, in your own judgement."""

    row: str
    """Of the map."""
    derived: bool
    """You got there yourself, aloud or in writing."""
    followups_ok: bool
    """And the follow-up held."""
    peeked: bool
    """You looked something up."""
    knew_of: bool
    """You had heard of it."""
    arithmetic_exists: bool
    """The model answer has a number in it."""
    arithmetic_shown: bool
    """Yours had it, with its sum."""


def load_bank(root: Path) -> dict[int, list[str]]:
    """The questions of every phase that has some, by its number.

    A question is a heading `## Q3. Text` of `phase-NN-*/INTERVIEW.md`; the text alone is kept.
    Other headings are none.
    """
    raise NotImplementedError


def draw(
    bank: Mapping[int, Sequence[str]],
    seed: int,
    scenarios: Sequence[Mapping[str, Any]],
    symptoms: Sequence[Mapping[str, Any]],
    breadth: Sequence[int] = BREADTH,
) -> Loop:
    """One loop; of the same arguments always the same one, and of another seed another.

    No question comes twice, as a follow-up or otherwise. The module's own random state is neither
    read nor changed.

    Args:
        bank: questions by phase.
        seed: decides everything.
        scenarios: one is drawn.
        symptoms: two are drawn.
        breadth: the phases of session 5.

    Raises:
        ValueError: a phase has too few questions; the message names it and how many are needed.
    """
    raise NotImplementedError


def rows_of(phases: Iterable[int]) -> set[str]:
    """The rows that questions of these phases are about; phase 13 belongs to none."""
    raise NotImplementedError


def score(a: Answer) -> int:
    """0 to 3.

    3: derived, and the follow-ups held. 2: derived, and they did not. 1: heard of. 0: nothing. A
    look somewhere, and a sum that was there to be shown and was not, each leave at most 2.
    """
    raise NotImplementedError


def matrix(answers: Iterable[Answer]) -> dict[str, int | None]:
    """The score of every row of the map, in its order: the lowest of its answers.

    None: no answer was about it.
    """
    raise NotImplementedError


def revision_list(matrix: Mapping[str, int | None], rows: Mapping[str, Sequence[int]]) -> list[int]:
    """Which phases to read again: those of rows scored 0 or 1, then those of rows never asked.

    Each of the two parts is sorted.
    """
    raise NotImplementedError


def compare(
    old: Mapping[str, int | None], new: Mapping[str, int | None]
) -> dict[str, tuple[int, int]]:
    """Rows that were scored both times and have changed: before, after; in the order of `new`."""
    raise NotImplementedError
