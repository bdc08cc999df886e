"""`course quiz --interview`: a loop over every phase's INTERVIEW.md, scored by the one who sits it.

Promises: nothing reads an answer. It asks what happened, and lab 19-06's rule makes a score of it;
a row that was not asked has none. What was said so far is kept when the loop is left early.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from course import terminal
from course.files import load_module, write_atomically
from course.learning.labs import CourseError
from course.learning.progress import FOLDER
from labkit.yaml_files import read_yaml

LAB = Path("phase-19-capstone-maintainer-and-startup", "labs", "lab-06-mock-staff-loop")
FILE = "matrix.json"
ASKED = (
    ("derived", "did you get there yourself"),
    ("followups_ok", "did the follow-up hold"),
    ("peeked", "did you look anything up"),
    ("knew_of", "had you heard of it"),
    ("arithmetic_exists", "is there a number in the model answer"),
    ("arithmetic_shown", "did yours have it, with its sum"),
)
"""What is asked after each question, by the field of an answer."""


def run(console: Console, root: Path, seed: int | None, compare: Path | None) -> int:
    """Ask one loop and write the matrix; 1 if a row is at 1 or below.

    Args:
        seed: which loop; None: the day's.
        compare: a matrix of before, to say what has changed.

    Raises:
        CourseError: the lab or a matrix is not there, or cannot be read.
    """
    lab = load_module(root / LAB / "solution.py")
    before = _read(compare) if compare else {}
    seed = int(date.today().strftime("%Y%m%d")) if seed is None else seed
    loop = drawn(console, root, lab, seed)
    answers: list[Any] = []
    say = terminal.say
    say(console, f"Loop {seed}. Answer aloud or in writing, then say what happened.", "bold")
    try:
        for head, text, page, rows in questions(lab, loop):
            say(console, f"\n{head}", "dim")
            say(console, text)
            if _line(console, "  your answer, then Enter: ") is None:
                break
            say(console, f"  {page}", "dim")
            said = _what_happened(console)
            if said is None:
                break
            answers += [lab.Answer(row=row, **said) for row in rows]
    except KeyboardInterrupt:
        console.print()
    return _result(console, root, lab, seed, answers, before)


def drawn(console: Console, root: Path, lab: ModuleType, seed: int) -> Any:
    """The loop of a seed. A phase of session 5 without questions is named and left out.

    Raises:
        CourseError: another phase has too few.
    """
    bank = lab.load_bank(root)
    absent = [phase for phase in lab.BREADTH if not bank.get(phase)]
    for phase in absent:
        terminal.say(console, f"Phase {phase:02d} has no INTERVIEW.md: it is not asked.", "yellow")
    material = read_yaml((root / LAB / "material.yaml").read_text(encoding="utf-8"))
    breadth = [phase for phase in lab.BREADTH if phase not in absent]
    try:
        return lab.draw(bank, seed, material["scenarios"], material["symptoms"], breadth)
    except ValueError as error:
        raise CourseError(str(error)) from None


def questions(lab: ModuleType, loop: Any) -> Iterator[tuple[str, str, str, list[str]]]:
    """Each question: its head, its text, where the model answer is, and the rows that it scores."""

    def rows(*phases: int) -> list[str]:
        return sorted(lab.rows_of(phases))

    def page(phase: int) -> str:
        return f"model answer: INTERVIEW.md of phase {phase:02d}"

    for phase, text in loop.rapid:
        yield "1 rapid fire, 3:45", text, page(phase), rows(phase)
    for phase, text, then in loop.systems:
        yield (
            "2 systems, 9:00 with the follow-up",
            f"{text}\n  Then: {then}",
            page(phase),
            rows(phase),
        )
    scenario = loop.scenario
    head = f"3 design, 60:00, {scenario['title']}"
    yield head, scenario["ask"], f"check: {scenario['check']}", list(scenario["rows"])
    for symptom in loop.symptoms:
        found = rows(*symptom["phases"])
        yield "4 debugging, 15:00", symptom["ask"], f"check: {symptom['check']}", found
    for phase, text in loop.breadth:
        yield "5 breadth, 3:45", text, page(phase), rows(phase)


def _what_happened(console: Console) -> dict[str, bool] | None:
    """The fields of an answer, each by y or n; None at the end of the input."""
    said: dict[str, bool] = {}
    for field, words in ASKED:
        if field == "followups_ok" and not said["derived"]:
            said[field] = False
            continue
        if field == "knew_of" and said["derived"]:
            said[field] = True
            continue
        if field == "arithmetic_shown" and not said["arithmetic_exists"]:
            said[field] = False
            continue
        while True:
            line = _line(console, f"  {words}? y/n: ")
            if line is None:
                return None
            if line.strip().casefold() in ("y", "yes", "n", "no"):
                said[field] = line.strip().casefold().startswith("y")
                break
            terminal.say(console, f"  {line.strip()!r}: need y or n", "yellow")
    return said


def _line(console: Console, prompt: str) -> str | None:
    console.print(prompt, end="")
    line = sys.stdin.readline()
    if not line or not sys.stdin.isatty():
        console.print()
    return line or None


def _result(
    console: Console, root: Path, lab: ModuleType, seed: int, answers: list[Any],
    before: Mapping[str, int | None],
) -> int:  # fmt: skip
    """Show and keep what came out."""
    say = terminal.say
    if not answers:
        say(console, "Nothing was answered; no matrix is written.")
        return 0
    found = lab.matrix(answers)
    for row, value in found.items():
        say(console, f"  {'-' if value is None else value}  {row}")
    again = ", ".join(f"{phase:02d}" for phase in lab.revision_list(found, lab.ROWS))
    say(console, f"Read again, weak rows first, then those not asked: {again or 'nothing'}.")
    for row, (old, new) in lab.compare(before, found).items():
        say(console, f"  {row}: {old}, now {new}")
    told = {"date": date.today().isoformat(), "seed": seed, "rows": found}
    write_atomically(root / FOLDER / FILE, json.dumps(told, indent=1) + "\n")
    say(console, f"{FOLDER}/{FILE} has it. Keep a copy to compare with in a month.", "dim")
    return int(any(value is not None and value <= 1 for value in found.values()))


def _read(path: Path) -> dict[str, int | None]:
    """The rows of a matrix. Raises CourseError where the file is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        sound = all(value is None or value in range(4) for value in rows.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CourseError(f"{path}: not a matrix of a loop ({error})") from None
    if not sound:
        raise CourseError(f"{path}: each of rows needs 0, 1, 2, 3 or null")
    return dict(rows)
