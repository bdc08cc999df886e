"""Habits of prose that slow a reader down, counted per page: `course words` shows the worst.

The list is that of CONTRIBUTING, as far as a pattern can see it. A count says where to read; a
person decides, and nothing fails on it. Code, tables of values and quoted text are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHOWN = 10
"""Pages that are listed."""
LEAST_WORDS = 150
"""A page with fewer says nothing by its share."""

HABITS = {
    "negated noun": re.compile(
        r"(?<!here )\b(?:is|are|was|were|be) no (?!(?:longer|more|less|slower|smaller|larger|better"
        r"|worse|faster|other|matter)\b)[a-z]+"
    ),
    "a person for a component": re.compile(
        r"\b(?:somebody|nobody|anybody|everybody|whoever|whom)\b", re.IGNORECASE
    ),
    "told, asked, given back": re.compile(
        r"\b(?:is|are) (?:told|asked|handed|given back|spoken)\b|\bspeaks? for\b|\basks? in turn\b"
    ),
    "sentences glued": re.compile(r"[a-z)`]; [a-z`]"),
}
"""By name, the pattern that sees it."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,}).*?^ {0,3}\1`*~*[ \t]*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`[^`\n]*`")
_NOT_PROSE = re.compile(r"^(?:\||#|<|!\[|- \[|>).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Habit:
    """A page's habits: how many of each, and the words they stand in."""

    path: str
    words: int
    found: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.found.values())

    @property
    def share(self) -> float:
        """Habits per thousand words."""
        return 1000 * self.total / max(1, self.words)


def prose(text: str) -> str:
    """The running text of a page: no code, headings, tables, pictures and quotations."""
    text = _FENCE.sub("", text)
    text = _NOT_PROSE.sub("", text)
    return _SPAN.sub("`x`", text)


def of(path: str, text: str) -> Habit:
    """What one page has."""
    read = prose(text)
    found = {name: len(pattern.findall(read)) for name, pattern in HABITS.items()}
    return Habit(path, len(read.split()), found)


def worst(root: Path, paths: Iterable[str]) -> list[Habit]:
    """The pages with the most habits to a thousand words, the worst first; none without any."""
    counted = [of(path, (root / path).read_text(encoding="utf-8")) for path in paths]
    counted = [page for page in counted if page.words >= LEAST_WORDS and page.total]
    return sorted(counted, key=lambda page: (-page.share, page.path))[:SHOWN]
