"""`course hunt`: a reference with one known wrong line, to be mended, or told apart by a test.

The lines are the labs' own misconceptions: each is shown by `course selfcheck` to fail a test, so
none is drawn that behaves like the right one. Promises: the same lab and seed give the same line;
neither the line nor what it stands for is named before it is found; nothing of the learner's own
lab is touched, and what they wrote in an older hunt is kept. What is written lies in
`.course/hunts/LAB`.
"""

from __future__ import annotations

import ast
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from course.files import write_atomically
from course.learning import grading, manifest
from course.learning.grading import Report, TestResult
from course.learning.labs import CourseError, Lab
from course.learning.manifest import Misconception
from course.learning.progress import FOLDER, PASSED, Progress

LEVELS = {
    1: "the message of the test that fails",
    2: "the calls that led to a failure, and nothing of the test",
    3: "nothing: write tests that tell wrong solutions from the right one",
}
REVIEW_AFTER = timedelta(days=14)
"""A lab passed so long ago comes back with one line wrong."""
FILE, TESTS = "hunt.py", "test_hunt.py"
CALLS = 12
"""Of level 2: calls shown, the last before the failure."""

TEMPLATE = '''"""Your tests of lab {id}. `lab` is the module under test.

Each must pass on the reference.
A wrong solution counts as caught when at least one of your tests fails on it.
"""


def test_mine(lab):
    assert lab is not None, "replace this by something that a wrong solution gets wrong"
'''


@dataclass(slots=True)
class Hunt:
    """One hunt, as it is kept. The wrong line follows from lab, seed and level."""

    lab: str
    level: int
    seed: int
    began: str
    checks: int = 0
    found: str = ""
    """When; empty until then."""
    score: int = 0
    """Of level 3: how many of the lab's wrong solutions the tests caught, at best."""
    of: int = 0

    @property
    def is_open(self) -> bool:
        return not self.found


def folder_of(root: Path, lab: Lab) -> Path:
    """Where a lab's hunt lies."""
    return root / FOLDER / "hunts" / lab.id


def read(root: Path, lab: Lab) -> Hunt | None:
    """The lab's newest hunt; None where there is none that can be read."""
    try:
        text = (folder_of(root, lab) / "hunt.json").read_text(encoding="utf-8")
        return Hunt(**json.loads(text))
    except (OSError, ValueError, TypeError):
        return None


def keep(root: Path, lab: Lab, hunt: Hunt) -> None:
    """Write a hunt down."""
    path = folder_of(root, lab) / "hunt.json"
    write_atomically(path, json.dumps(asdict(hunt), indent=1) + "\n")


def pool(lab: Lab) -> list[Misconception]:
    """The lab's misconceptions of one line: what a hunt draws from."""
    return [
        item
        for item in lab.manifest.misconceptions
        if len(item.replace.strip().splitlines()) == 1 and len(item.with_.strip().splitlines()) == 1
    ]


def drawn(lab: Lab, seed: int) -> Misconception:
    """The wrong line of a seed.

    Raises:
        CourseError: the lab has none of one line.
    """
    found = pool(lab)
    if not found:
        raise CourseError(f"Lab {lab.id} has no wrong answer of one line, so nothing to hunt.")
    return random.Random(f"{lab.id}:{seed}").choice(found)


def wrong_text(lab: Lab, item: Misconception) -> str:
    """The reference with `item` put in."""
    return manifest.wrong_solution(lab.solution.read_text(encoding="utf-8"), item)


def begin(root: Path, lab: Lab, level: int, seed: int) -> tuple[Hunt, Path | None]:
    """Write a hunt's files; what lay there gives way.

    Returns:
        The hunt, and where a file is kept that the learner had changed in the one before.

    Raises:
        CourseError: an unknown level, a lab without wrong answers of one line, or a changed file
            that cannot be kept.
    """
    if level not in LEVELS:
        raise CourseError(f"--level {level}: need 1, 2 or 3")
    item = drawn(lab, seed)
    folder = folder_of(root, lab)
    copy = _keep_changed(root, lab)
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "captured", "*.md", "*.py", "lab.yaml")
    shutil.copytree(lab.folder, folder, ignore=ignored)  # it may read the files beside it
    if level == 3:
        write_atomically(folder / TESTS, TEMPLATE.format(id=lab.id))
    else:
        write_atomically(folder / FILE, wrong_text(lab, item))
    hunt = Hunt(lab.id, level, seed, datetime.now(UTC).isoformat(timespec="seconds"))
    keep(root, lab, hunt)
    return hunt, copy


def _keep_changed(root: Path, lab: Lab) -> Path | None:
    """Copy what the learner wrote in the hunt that lies there; None where that is nothing."""
    hunt, folder = read(root, lab), folder_of(root, lab)
    for name in (FILE, TESTS):
        file = folder / name
        if not file.is_file() or (name == FILE and hunt is not None and not hunt.is_open):
            continue  # what is found is the reference
        data = file.read_bytes()
        if name == TESTS:
            given = TEMPLATE.format(id=lab.id)
        else:
            given = wrong_text(lab, drawn(lab, hunt.seed)) if hunt is not None else ""
        if data != given.encode():
            stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
            copy = root / FOLDER / "backup" / f"hunt-{lab.id}-{stamp}.py"
            try:
                write_atomically(copy, data)
            except OSError as error:
                raise CourseError(f"{file} could not be kept ({error}).") from None
            return copy
    return None


def due(root: Path, labs: list[Lab], progress: Progress, now: datetime | None = None) -> list[Lab]:
    """Passed labs that come back: passed and last hunted long enough ago, the oldest first."""
    now = now or datetime.now(UTC)
    found: list[tuple[datetime, Lab]] = []
    for lab in labs:
        if progress.state(lab) != PASSED or not pool(lab):
            continue
        last = _time(progress.entry(lab).graded_at)
        hunt = read(root, lab)
        if hunt is not None:
            if hunt.is_open:
                continue
            last = max(last, _time(hunt.found))
        if now - last >= REVIEW_AFTER:
            found.append((last, lab))
    return [lab for _, lab in sorted(found, key=lambda pair: (pair[0], pair[1].id))]


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


# ------------------------------------------------------------------ running


def run_tests(root: Path, lab: Lab, file: Path, tests: list[str] | None = None) -> Report:
    """The lab's tests on a file."""
    return grading.run(
        root, lab.test_file, impl="solution", variants={"hunt": (file, tests)},
        extra_args=["-m", "not gpu"],
        memory=grading.MEMORY_LIMIT if lab.manifest.tag == "CPU-OK" else 0,
    )  # fmt: skip


def evidence(root: Path, lab: Lab, hunt: Hunt) -> tuple[TestResult | None, list[str]]:
    """What a hunt shows at its beginning: the first failure, and the calls that led to it.

    Level 1 shows the failure, level 2 the calls. Both come from running the drawn line.
    """
    item = drawn(lab, hunt.seed)
    folder = folder_of(root, lab)
    watched = folder / "watched.py"
    write_atomically(watched, watched_text(lab, item))
    try:
        report = run_tests(root, lab, watched, [item.caught_by])
    finally:
        watched.unlink(missing_ok=True)
    failed = next(iter(report.failed), None)
    return failed, calls_of(lab, failed.printed) if failed else []


def watched_text(lab: Lab, item: Misconception) -> str:
    """The reference with `item` put in, which prints the calls of the learner's functions."""
    names = list(lab.manifest.yours)
    text = wrong_text(lab, item)
    return f"{text}\n\nfrom labkit.calls import watch as _w\n\n_w(globals(), {names!r})\n"


def calls_of(lab: Lab, printed: str) -> list[str]:
    """Of what a watched text printed, the last calls."""
    begins = tuple(_said(lab.manifest.yours))
    return [line for line in printed.splitlines() if line.startswith(begins)][-CALLS:]


def _said(names: Sequence[str]) -> list[str]:
    return [f"{name}(" for name in names] + [f"{name}." for name in names]


def changed_line(lab: Lab, item: Misconception) -> tuple[int, str, str]:
    """Where the wrong line stands, what the reference says there, and what it said wrongly."""
    right = lab.solution.read_text(encoding="utf-8").splitlines()
    wrong = wrong_text(lab, item).splitlines()
    for number, (a, b) in enumerate(zip(right, wrong, strict=False), 1):
        if a != b:
            return number, a.strip(), b.strip()
    raise AssertionError("wrong_solution changes at least one line")


def test_names(text: str) -> list[str]:
    """The tests of a learner's file.

    Raises:
        CourseError: it is not Python, or holds no test.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise CourseError(f"{TESTS}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:  # null bytes
        raise CourseError(f"{TESTS} is not Python: {error}") from None
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[:4] == "test"]
    if not names:
        raise CourseError(f"{TESTS} holds no function that begins with test")
    return names


def score(root: Path, lab: Lab) -> tuple[Report, list[Misconception], list[Misconception]]:
    """Level 3: the learner's tests on the reference and on every wrong solution of the lab.

    Returns:
        What the reference did, the wrong solutions caught, and those that were not. Tests that
        fail on the reference catch nothing.

    Raises:
        CourseError: the tests are no Python, or hold no test.
    """
    file = folder_of(root, lab) / TESTS
    try:
        test_names(file.read_text(encoding="utf-8"))
    except OSError:
        raise CourseError(f"{file} is gone. Begin again: course hunt {lab.id} --level 3") from None
    except UnicodeDecodeError as error:
        raise CourseError(f"{file.name} is not Python: {error}") from None
    scratch = folder_of(root, lab) / "variants"
    ignored = shutil.ignore_patterns("__pycache__", "captured", "*.md", "*.py", "lab.yaml")
    variants: dict[str, tuple[Path, Any]] = {}
    items = {item.name: item for item in lab.manifest.misconceptions}
    try:
        for name in ["", *items]:
            place = scratch / (name or "-")
            shutil.copytree(lab.folder, place, ignore=ignored)
            text = wrong_text(lab, items[name]) if name else lab.solution.read_text("utf-8")
            (place / "solution.py").write_text(text, encoding="utf-8")
            variants[name or "reference"] = (place / "solution.py", None)
        report = grading.run(
            root, file, impl="solution", variants=variants,
            memory=grading.MEMORY_LIMIT if lab.manifest.tag == "CPU-OK" else 0,
        )  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    right = report.of("reference")
    good = bool(right) and all(result.outcome == "passed" for result in right)
    caught = [
        item
        for name, item in items.items()
        if good and any(result.outcome == "failed" for result in report.of(name))
    ]
    return report, caught, [item for item in items.values() if item not in caught]
