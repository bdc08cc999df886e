"""`course words`: how long each page is, counted as `wc -w` does, and how long it may be.

A guide is counted without its fenced blocks, which a reader runs. Promises: only pages that git
tracks count, so that a reader's notes do not; where there is no git, every page of a phase.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

BUDGETS = (
    (GUIDE := r"phase-[^/]+/00-guide\.md", 3400),
    (r"phase-[^/]+/01-deep-dive\.md", 3000),
    (r"phase-[^/]+/02-mini-build\.md", 1200),
    (r"phase-[^/]+/EXERCISES\.md", 2000),
    (r"phase-[^/]+/READING\.md", 600),
    (r"phase-[^/]+/INTERVIEW\.md", 2500),
    (r"phase-[^/]+/CHEATSHEET\.md", 450),
    (r"phase-[^/]+/labs/README\.md", 350),
    (r"phase-[^/]+/labs/lab-[^/]+/README\.md", 900),
    (r"phase-[^/]+/(?:experiments|studies)/.*", 1000),
    (r".*", 1300),
)
"""Which pages, and the most words each may have; the first that fits counts."""

FENCED = re.compile(rb"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)

FIRST_PHASES = tuple(f"{number:02d}" for number in range(7))
FIRST_PHASES_LIMIT = 121_000
"""Words that the phases 00 to 06 may have together."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page's path from the root, its words and its budget."""

    path: str
    words: int
    budget: int

    @property
    def phase(self) -> str:
        """The phase's number, as in "03"."""
        return self.path.partition("-")[2][:2]

    @property
    def over(self) -> int:
        """Words above the budget, 0 within it."""
        return max(0, self.words - self.budget)


def count(root: Path) -> list[Page]:
    """The pages of the phases, in the order of their paths."""
    counted = []
    for path in _tracked(root):
        text = (root / path).read_bytes()
        words = len((FENCED.sub(b"", text) if re.fullmatch(GUIDE, path) else text).split())
        budget = next(most for pattern, most in BUDGETS if re.fullmatch(pattern, path))
        counted.append(Page(path, words, budget))
    return counted


def _tracked(root: Path) -> list[str]:
    """Paths of the pages below phase folders: those git knows and that are still there."""
    command = ["git", "ls-files", "-z", "--", ":(glob)phase-*/**/*.md"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return sorted(path.relative_to(root).as_posix() for path in root.glob("phase-*/**/*.md"))
    paths = sorted(name for name in done.stdout.decode("utf-8").split("\0") if name)
    return [path for path in paths if (root / path).is_file()]


def totals(counted: list[Page]) -> dict[str, int]:
    """Words per phase, by its number."""
    found: dict[str, int] = {}
    for page in counted:
        found[page.phase] = found.get(page.phase, 0) + page.words
    return found
