"""A hunt in a page: what is drawn, what is shown of it, and what it was once it is found.

The rules are those of `course/learning/hunts.py`. Promises: the same lab and seed give the line
that `course hunt` gives; nothing here says which line it is, or what it stands for, but `found`
and `thoughts`, which a page calls when it has been found. Called by `book/play/desk-hunt.js`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course.learning import hunts
from course.learning.labs import CourseError, Lab
from course.learning.manifest import id_of

TESTS = hunts.TESTS


def _lab(lab: str) -> Lab:
    for folder in sorted(Path.cwd().glob(f"phase-{lab[:2]}-*/labs/lab-{lab[3:]}-*")):
        if id_of(folder) == lab:
            return Lab(folder.resolve(), lab)
    raise CourseError(f"there is no lab {lab!r}")


def begin(lab: str, level: int, seed: int) -> dict[str, Any]:
    """What a hunt begins with.

    Returns:
        `text`, what the reader edits. At level 1 and 2 also `run`, the text whose failure is the
        evidence, and `tests`, what to run on it; at level 3 `of`, how many wrong solutions there
        are.
    """
    if level not in hunts.LEVELS:
        raise ValueError(f"level={level!r}: need 1, 2 or 3")
    found = _lab(lab)
    item = hunts.drawn(found, seed)
    if level == 3:
        return {"text": hunts.TEMPLATE.format(id=lab), "of": len(found.manifest.misconceptions)}
    text = hunts.wrong_text(found, item)
    run = text if level == 1 else hunts.watched_text(found, item)
    return {"text": text, "run": run, "tests": [item.caught_by]}


def calls(lab: str, printed: str) -> list[str]:
    """Of what a watched text printed, the last calls of the lab's own functions."""
    return hunts.calls_of(_lab(lab), printed)


def found(lab: str, seed: int) -> dict[str, Any]:
    """The drawn line, once it is mended: its number, both texts, what its writer thought."""
    it = _lab(lab)
    item = hunts.drawn(it, seed)
    line, right, wrong = hunts.changed_line(it, item)
    return {"line": line, "right": right, "wrong": wrong, "why": item.why}


def thoughts(lab: str, numbers: Sequence[int]) -> list[str]:
    """What the writers of wrong solutions thought, by their numbers among `variants`, from 1."""
    return [
        item.why
        for number, item in enumerate(_lab(lab).manifest.misconceptions, 1)
        if number in numbers
    ]


def variants(folder: Path, lab: str, tests: str) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Write level 3's files beside the lab's own: the tests, the reference, every wrong solution.

    Returns:
        The file of tests, and the variants as `course.learning.runner.Recorder` takes them: "0",
        the reference, and a number for each wrong solution, whose name would tell it.

    Raises:
        CourseError: the tests are not Python, or hold no test.
    """
    it = Lab(folder, lab)
    hunts.test_names(tests)
    (folder / TESTS).write_text(tests, encoding="utf-8")
    texts = [it.solution.read_text(encoding="utf-8")]
    texts += [hunts.wrong_text(it, item) for item in it.manifest.misconceptions]
    made: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(texts):
        file = folder / f"hunted_{number}.py"
        file.write_text(text, encoding="utf-8")
        made[str(number)] = {"file": str(file), "tests": None}
    return folder / TESTS, made
