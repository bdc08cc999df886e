"""Which statements of the guides and cheat sheets are otherwise at a later release.

    python -m conformance.releases.statements [--write]

`statements.yaml` is the data: read it for what each field is. `--write` puts a table for each phase
into SINCE_THE_PIN.md. The site marks the headings of the sections that are named here.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from labkit.tables import markdown_table, write_section

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("statements.yaml")
PAGE = ROOT / "SINCE_THE_PIN.md"
SHORT = {"00-guide.md": "guide", "CHEATSHEET.md": "cheat sheet"}
HEADER = ["where", "the page says", "since", "there", "how"]


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement that is no longer so."""

    at: str
    """`page#section`."""
    says: str
    since: str
    """The first release where it is otherwise."""
    now: str
    place: str
    """`path:line` at the newest release; of what is gone, the path alone."""
    has: str = ""
    """Text that begins there."""
    lacks: str = ""
    """Or text that is no longer in that file."""
    then: str = ""
    """How `has` was spelt at `since`, where it was spelt another way."""
    run: str = ""
    """The test that ran it; empty where it was read."""

    @property
    def page(self) -> str:
        """Relative to the repository."""
        return self.at.partition("#")[0]

    @property
    def section(self) -> str:
        """The anchor of the heading."""
        return self.at.partition("#")[2]

    @property
    def phase(self) -> str:
        """Two digits."""
        return phase_of(self.at)


@dataclass(frozen=True, slots=True)
class Unknown:
    """One statement of which it cannot be told here."""

    at: str
    says: str
    why: str


def phase_of(at: str) -> str:
    """The phase of a place, as two digits."""
    return at.removeprefix("phase-")[:2]


def anchor_of(phase: str) -> str:
    """The anchor of a phase's part on SINCE_THE_PIN.md."""
    return f"phase-{phase}"


@functools.cache
def load(path: Path = DATA) -> tuple[str, tuple[Statement, ...], tuple[Unknown, ...]]:
    """The release that the pages were compared with, what is otherwise there, and what is unknown.

    Raises:
        ValueError: an entry has a field that is not known, lacks one, or has not one of two.
    """
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    try:
        statements = tuple(Statement(**entry) for entry in data["statements"])
        unknown = tuple(Unknown(**entry) for entry in data["unknown"])
    except TypeError as error:
        raise ValueError(f"{path.name}: {error}") from None
    for each in statements:
        if bool(each.has) == bool(each.lacks):
            raise ValueError(f"{path.name}: {each.at}, {each.says!r}: need one of has and lacks")
    return str(data["release"]), statements, unknown


def how(statement: Statement) -> str:
    """How it is known, as the table says it."""
    if statement.run:
        return f"run: `{statement.run.rpartition('::')[2]}`"
    file, _, line = statement.place.partition(":")
    short = file.removeprefix("vllm/")
    return f"read: {short}, {f'line {line}' if line else f'where `{statement.lacks}` is gone'}"


def where(at: str) -> str:
    """A link to a section."""
    page, _, section = at.partition("#")
    number = section.partition("-")[0]
    name = SHORT[Path(page).name]
    named = name == "guide" and number.isdigit()
    shown = f"{name}, {number}" if named else name
    return f"[{shown}]({at})"


def part(phase: str, statements: Iterable[Statement], unknown: Iterable[Unknown]) -> str:
    """A phase's heading, table and what cannot be told."""
    rows = [[where(s.at), s.says, s.since, s.now, how(s)] for s in statements]
    lines = [f"### Phase {phase}", "", markdown_table(HEADER, rows) if rows else "Nothing."]
    told = [f"{where(u.at)}, {u.says} ({u.why})" for u in unknown]
    if told:
        lines += ["", f"Cannot be told here: {'; '.join(told)}."]
    return "\n".join(lines)


def text() -> str:
    """The generated section."""
    release, statements, unknown = load()
    num_run = sum(bool(s.run) for s in statements)
    phases = sorted({s.phase for s in statements} | {phase_of(u.at) for u in unknown})
    parts = [
        f"{len(statements)} statements are otherwise at {release}, {num_run} of them run and "
        f"{len(statements) - num_run} read; of {len(unknown)} it cannot be told here.",
        *(
            part(
                phase,
                [s for s in statements if s.phase == phase],
                [u for u in unknown if phase_of(u.at) == phase],
            )
            for phase in phases
        ),
    ]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.releases.statements", description=__doc__
    )
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write_section("statements", text(), PAGE)
    else:
        print(text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
