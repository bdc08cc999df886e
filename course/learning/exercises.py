"""`exercises.yaml` of a phase: exercises that are answered with code, and their tests.

An exercise has `id` ("02-bu-07": phase, and the number on the page), `source`, `ask`, `start` (what
the reader begins with), `code` (an answer), `test` (statements that assert on the answer's names,
each with a message), and `slips`: wrong answers, each `replace` and `with` in `code`, and `says`,
words of the message that names it. Promises: a file that loads has all of these, and what the
page's box holds is `document`; whether the tests hold is what `problems` runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from course.files import write_atomically
from course.learning import quiz
from course.learning.labs import CourseError
from course.play.judging import judge
from course.truth.citations import Finding
from labkit.yaml_files import read_yaml

FILE = "exercises.yaml"
FOLDER = "exercises"
"""Under `.course`: the reader's answers, one file an exercise."""
SECONDS = 30
"""How long an answer may run."""
TEXTS = ("id", "source", "ask", "start", "code", "test")


@dataclass(frozen=True, slots=True)
class Slip:
    """A wrong answer: `code` with one text replaced, and words of what the test says to it."""

    replace: str
    instead: str
    says: str


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise that is answered with code."""

    id: str
    source: str
    ask: str
    start: str
    code: str
    test: str
    slips: tuple[Slip, ...]


def files(root: Path, paths: Sequence[Path] = ()) -> list[Path]:
    """Every `exercises.yaml`, in course order; with `paths`, those in or at them."""
    found = sorted(root.resolve().glob(f"phase-*/{FILE}"))
    wanted = [path.resolve() for path in paths]
    return [f for f in found if not wanted or any(f == w or w in f.parents for w in wanted)]


def load(path: Path) -> tuple[list[Exercise], list[Finding]]:
    """The exercises of a file that are sound, and what is wrong with the others."""
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        return [], [Finding(path, 1, f"not valid YAML: {' '.join(str(error).split())}")]
    if not isinstance(data, list):
        return [], [Finding(path, 1, "must be a list of exercises")]
    found: list[Exercise] = []
    findings = []
    for place, item in enumerate(data):
        wrong = list(_wrong(item, path, {each.id for each in found}))
        name = item.get("id", place + 1) if isinstance(item, dict) else place + 1
        findings += [Finding(path, 1, f"exercise {name}: {problem}") for problem in wrong]
        if not wrong:
            slips = tuple(Slip(s["replace"], s["with"], s["says"]) for s in item["slips"])
            found.append(Exercise(**{key: item[key] for key in TEXTS}, slips=slips))
    return found, findings


def _wrong(item: Any, path: Path, taken: set[str]) -> Iterator[str]:
    if not isinstance(item, dict):
        yield f"must be a mapping of keys, not {item!r}"
        return
    for key in item.keys() - {*TEXTS, "slips"}:
        yield f"unknown key {key!r}"
    for key in TEXTS:
        if not isinstance(item.get(key), str) or not item[key].strip():
            yield f"{key} must be a text, not {item.get(key)!r}"
    slips = item.get("slips")
    if not isinstance(slips, list) or len(slips) < 2:
        yield "slips must be a list of at least two wrong answers"
    else:
        for slip in slips:
            if not isinstance(slip, dict) or slip.keys() != {"replace", "with", "says"}:
                yield f"a slip has replace, with and says, not {slip!r}"
            elif str(item.get("code")).count(slip["replace"]) != 1:
                yield f"slips: {slip['replace']!r} must stand in code exactly once"
    match = re.fullmatch(r"(\d\d)-bu-\d\d", str(item.get("id")))
    if not match:
        yield "the id must be phase, bu, number, as in 02-bu-07"
    elif match[1] != path.parent.name.partition("-")[2][:2]:
        yield f"the id does not agree with the folder {path.parent.name}"
    elif match[0] in taken:
        yield "the id is used twice"
    if isinstance(item.get("source"), str):
        for source in item["source"].split(";"):
            if problem := quiz.source_problem(path.parent, source.strip()):
                yield problem


def problems(exercise: Exercise) -> Iterator[str]:
    """What does not hold when an exercise's test runs on its answer, its start and its slips."""
    answer = judge(exercise.code, exercise.test)
    if not answer["right"]:
        yield f"the answer fails: {answer['said']}"
    if judge(exercise.start, exercise.test)["right"]:
        yield "what the reader begins with passes"
    for slip in exercise.slips:
        told = judge(exercise.code.replace(slip.replace, slip.instead), exercise.test)
        if told["right"]:
            yield f"with {slip.instead!r} the test passes"
        elif slip.says not in told["said"]:
            yield f"with {slip.instead!r} it says {told['said']!r}, not {slip.says!r}"


def document(exercise: Exercise) -> str:
    """What the page's box holds, as JSON."""
    keys = ("id", "ask", "start", "code", "test")
    return json.dumps({key: getattr(exercise, key) for key in keys}, ensure_ascii=False)


# ------------------------------------------------------------------ at the terminal


def every(root: Path) -> dict[str, Exercise]:
    """All exercises that are answered with code, by id.

    Raises:
        CourseError: a file is unsound.
    """
    found: dict[str, Exercise] = {}
    for path in files(root):
        exercises, findings = load(path)
        if findings:
            raise CourseError("\n".join(f"{path}: {finding.text}" for finding in findings))
        found |= {exercise.id: exercise for exercise in exercises}
    return found


def answer_file(progress: Path, exercise: Exercise) -> Path:
    """Where the reader's answer lies, in the folder of the progress."""
    return progress / FOLDER / f"{exercise.id}.py"


def begin(progress: Path, exercise: Exercise) -> bool:
    """Write what the reader begins with; False where an answer is there already.

    Raises:
        OSError: it cannot be written.
    """
    path = answer_file(progress, exercise)
    if path.is_file():
        return False
    words = "".join(f"# {line}\n" for line in wrapped(f"{exercise.id}: {exercise.ask}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{words}\n{exercise.start}")
    return True


def wrapped(text: str, width: int = 96) -> list[str]:
    """A text in lines, for comments."""
    import textwrap

    return textwrap.wrap(text, width)


def grade(root: Path, exercise: Exercise, code: str) -> dict[str, Any]:
    """What `judge` says, from a process of its own that ends after `SECONDS`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "course.play.judging"],
            input=json.dumps({"code": code, "test": exercise.test}),
            capture_output=True,
            text=True,
            cwd=root,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"right": False, "said": f"No end after {SECONDS} s.", "line": None, "printed": ""}
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()[-1:] or ["it ended without an answer"]
        return {"right": False, "said": said[0], "line": None, "printed": ""}
    return result
