"""What a learner has done, kept in `.course/progress.json` and derived from results.

Promises: a lab counts as passed only while the graded file is byte for byte the one that passed;
an interruption or a crash never loses what was there, nor does a second terminal; an unreadable
file is moved aside, never overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from course.files import locked, write_atomically
from course.learning import starters
from course.learning.grading import Report
from course.learning.labs import Lab, find_labs
from course.learning.predictions import Answer

FOLDER = ".course"
LONGEST_FAILURE = 2000

PASSED, STARTED, CHANGED, NEW = "passed", "started", "changed", "new"
"""States of a lab: passed; graded and not passed; edited since it was graded; untouched."""


@dataclass(slots=True)
class Entry:
    """The last grading of one lab, and the hints unfolded so far."""

    digest: str = ""
    passed: int = 0
    total: int = 0
    ok: bool = False
    first_failing: str = ""
    failure: str = ""
    """What that test said, cut at LONGEST_FAILURE characters: hints are chosen by it."""
    graded_at: str = ""
    hints: dict[str, int] = field(default_factory=dict)
    predictions: dict[str, list[Answer]] = field(default_factory=dict)
    """What was predicted and what was measured, by name: the first pair counts and stays."""


def _entry(data: Any) -> Entry:
    """An entry as it was written.

    Raises:
        TypeError: a key is unknown, or a value is of another type than was written.
    """
    entry = Entry(**data)
    blank = Entry()
    for name in Entry.__slots__:
        if type(getattr(entry, name)) is not type(getattr(blank, name)):
            raise TypeError(
                f"{name} is {getattr(entry, name)!r}: need a {type(getattr(blank, name)).__name__}"
            )
    if not all(isinstance(count, int) for count in entry.hints.values()):
        raise TypeError(f"hints is {entry.hints!r}: need a whole number for each test")
    if not all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(x, int | float | str) for x in pair)
        for pair in entry.predictions.values()
    ):
        raise TypeError(f"predictions is {entry.predictions!r}: need a pair for each question")
    return entry


class Progress:
    """All entries, by lab id. Every change is on disk when the method returns."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / FOLDER / "progress.json"
        self.notice = ""
        self.entries = self._read()

    def _read(self) -> dict[str, Entry]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            return {lab_id: _entry(entry) for lab_id, entry in data["labs"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            aside = self.path.with_suffix(f".unreadable-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
            self.notice = f"{FOLDER}/progress.json could not be read ({error}); "
            try:
                self.path.replace(aside)
            except OSError as refused:
                self.notice += f"nor moved aside ({refused}): nothing is kept."
            else:
                self.notice += (
                    f"it was moved to {aside.name}. `course check --all` grades everything anew."
                )
            return {}

    def _write(self) -> None:
        labs = {lab_id: asdict(self.entries[lab_id]) for lab_id in sorted(self.entries)}
        write_atomically(self.path, json.dumps({"version": 1, "labs": labs}, indent=1) + "\n")

    def _change(self, change: Callable[[], None]) -> None:
        """Apply `change` to what is on disk now, with every other process waiting.

        Where nothing can be written this process at least knows of the change.
        """
        try:
            with locked(self.path.with_name("lock")):
                self.entries = self._read()
                change()
                self._write()
        except OSError:
            change()
            raise

    def entry(self, lab: Lab) -> Entry:
        """The lab's entry; an empty one when it was never graded."""
        return self.entries.get(lab.id) or Entry()

    def state(self, lab: Lab) -> str:
        """PASSED, STARTED, CHANGED or NEW, from the files as they are now."""
        entry = self.entry(lab)
        if entry.digest and entry.digest == digest_of(lab):
            if not entry.ok and self._untouched(lab):
                return NEW
            return PASSED if entry.ok else STARTED
        return NEW if self._untouched(lab) else CHANGED

    def _untouched(self, lab: Lab) -> bool:
        if not lab.solution.is_file():  # nobody can tell: what was graded is no longer the same
            return not self.entry(lab).digest
        return starters.is_current(lab)

    def record(
        self, lab: Lab, report: Report, compared: Mapping[str, tuple[Answer, Answer]] | None = None
    ) -> None:
        """Keep the outcome of a grading, for the files that have the report's digest.

        Args:
            compared: by name, what was predicted and what was measured.

        Raises:
            OSError: it cannot be kept.
        """
        failed = report.failed

        def change() -> None:
            self.entries[lab.id] = Entry(
                digest=report.digest,
                passed=len(report.passed),
                total=len(report.passed) + len(failed),
                ok=report.ok,
                first_failing=failed[0].name if failed else _function(report.stuck_test),
                failure=failed[0].message[:LONGEST_FAILURE] if failed else "",
                graded_at=datetime.now(UTC).isoformat(timespec="seconds"),
                hints=self.entry(lab).hints,
                predictions={
                    **{name: list(pair) for name, pair in (compared or {}).items()},
                    **self.entry(lab).predictions,
                },
            )

        self._change(change)

    def unfold(self, lab: Lab, key: str, available: int) -> int:
        """One more hint is shown, of the `available` under `key`; how many are unfolded now.

        Raises:
            OSError: it cannot be kept.
        """
        count = 0

        def change() -> None:
            nonlocal count
            entry = self.entries.setdefault(lab.id, Entry())
            count = entry.hints[key] = min(entry.hints.get(key, 0) + 1, available)

        self._change(change)
        return count

    def fold(self, lab: Lab) -> None:
        """Forget the lab's result and hints, as after a reset; what was predicted stays.

        Raises:
            OSError: that cannot be kept.
        """

        def change() -> None:
            self.entries[lab.id] = Entry(predictions=self.entry(lab).predictions)

        self._change(change)

    def next_lab(self, labs: Sequence[Lab], after: Lab | None = None) -> Lab | None:
        """The first lab, in course order, that is not passed; every lab has a part for a CPU.

        With `after` the search begins behind that lab, and comes round to the labs before it.
        """
        start = labs.index(after) + 1 if after in labs else 0
        around = [*labs[start:], *labs[:start]]
        return next((lab for lab in around if self.state(lab) != PASSED), None)


def digest_of(lab: Lab) -> str:
    """sha256 over starter, tests and solution: what a result is a result of."""
    digest = hashlib.sha256()
    for path in (lab.starter, lab.test_file, lab.solution):
        digest.update(path.read_bytes() if path.is_file() else b"")
        digest.update(b"\0")
    return digest.hexdigest()


def current_lab(root: Path, progress: Progress, cwd: Path | None = None) -> Lab | None:
    """The lab whose folder the learner stands in, else the next one to pass."""
    labs = find_labs(root)
    here = (cwd or Path.cwd()).resolve()
    for lab in labs:
        folder = lab.folder.resolve()
        if folder == here or folder in here.parents:
            return lab
    return progress.next_lab(labs)


def _function(test_id: str) -> str:
    return test_id.rpartition("::")[2].partition("[")[0]
