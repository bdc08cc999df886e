"""Grade lab files in a child process and hand back plain records.

Promises: returns within the time limit whatever the graded code does; never raises because of
that code; runs nothing of it in this process; a test that has no result is never passed over.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course import processes

TIME_LIMIT = 60.0
MEMORY_LIMIT = 4 * 2**30
STARTING = 15.0
"""Seconds on top, for the process to start; the child watches the limit itself."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of code a failure passed through."""

    file: str
    line: int
    name: str
    code: str

    @property
    def where(self) -> str:
        return f"{Path(self.file).name}, line {self.line}"


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test on one variant. `outcome`: passed, failed, error (before the test), skipped.

    `seconds` are those of the processor.
    """

    __test__ = False

    name: str
    test_id: str
    outcome: str
    seconds: float = 0.0
    variant: str = ""
    error: str = ""
    message: str = ""
    frames: tuple[Frame, ...] = ()
    printed: str = ""
    measured: dict[str, float | str] = field(default_factory=dict)
    """What the test measured, by the name of the prediction it answers."""


@dataclass(slots=True)
class Report:
    """What one child process did.

    `trouble` says in words why the run is incomplete: out of time, a dead process, a test file
    that cannot be collected, tests without a result. Empty when every test has one. `digest` is
    that of the files graded, "" when they changed meanwhile or were not asked for.
    """

    results: list[TestResult] = field(default_factory=list)
    trouble: str = ""
    stuck_test: str = ""
    output: str = ""
    digest: str = ""

    def of(self, variant: str) -> list[TestResult]:
        return [result for result in self.results if result.variant == variant]

    @property
    def failed(self) -> list[TestResult]:
        return [result for result in self.results if result.outcome in ("failed", "error")]

    @property
    def passed(self) -> list[TestResult]:
        return [result for result in self.results if result.outcome == "passed"]

    @property
    def ok(self) -> bool:
        return bool(self.passed) and not self.failed and not self.trouble


def run(
    root: Path,
    test_file: Path,
    *,
    impl: str = "starter",
    variants: dict[str, tuple[Path, Sequence[str] | None]] | None = None,
    extra_args: Sequence[str] = (),
    expected: Sequence[str] = (),
    time_limit: float = TIME_LIMIT,
    memory: int = MEMORY_LIMIT,
    follow: Callable[[list[dict[str, Any]]], bool] | None = None,
) -> Report:
    """Run `test_file` in a child process.

    Args:
        root: the repository root, whose conftest.py and pyproject.toml apply.
        impl: the file the `lab` fixture loads when there are no variants.
        variants: name to (file, test functions to run on it, None for all).
        extra_args: further arguments of pytest.
        expected: test functions that must have a result.
        time_limit: seconds for the tests; the process and its children are then ended.
        memory: bytes of data the process may hold, where the system can limit it; 0 for no limit.
        follow: hears ten times a second which events are new, perhaps none; True ends the run.

    Raises:
        ValueError: the time limit is not a number above 0 and at most a day.
    """
    processes.seconds("time_limit", time_limit)
    with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        job = {
            "root": str(root),
            "args": [str(test_file), *extra_args],
            "events": str(scratch / "events.jsonl"),
            "stack": str(scratch / "stack.txt"),
            "time_limit": time_limit,
            "memory": memory,
            "variants": {
                name: {"file": str(file), "tests": None if tests is None else list(tests)}
                for name, (file, tests) in (variants or {}).items()
            },
        }
        (scratch / "job.json").write_text(json.dumps(job), encoding="utf-8")
        env = {
            **os.environ,
            "LAB_IMPL": impl,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUTF8": "1",
            # One lab is small: more threads than one only slow it down beside another.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTEST_ADDOPTS": "",
            # Labs use no plugins, and loading the installed ones takes longer than the tests.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "NO_COLOR": "1",
        }
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
        )
        follower = _Follower(scratch / "events.jsonl", follow) if follow else None
        ran = processes.run(
            [sys.executable, "-m", "course.learning.runner", str(scratch / "job.json")],
            cwd=root,
            env=env,
            time_limit=time_limit + STARTING,
            unwanted=follower.look if follower else None,
        )
        if follower:
            follower.look()
        return _read(scratch, ran, expected, time_limit)


@dataclass(slots=True)
class _Follower:
    """Hands on the events of a run while they are written."""

    path: Path
    follow: Callable[[list[dict[str, Any]]], bool]
    at: int = 0

    def look(self) -> bool:
        lines: list[bytes] = []
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.at)
                whole, newline, _ = file.read().rpartition(b"\n")
            self.at += len(whole) + len(newline)
            lines = whole.splitlines()
        return self.follow([json.loads(line) for line in lines if line])


def _read(scratch: Path, ran: processes.Ran, expected: Sequence[str], time_limit: float) -> Report:
    report = Report(output=ran.output)
    events = _events(scratch / "events.jsonl")
    running = ""
    collected: list[str] = []
    for event in events:
        if event["event"] == "collected":
            collected = event["tests"]
        elif event["event"] == "start":
            running = event["test"]
        elif event["event"] == "result":
            running = ""
            report.results.append(
                TestResult(
                    name=event["name"],
                    test_id=event["test"],
                    outcome=_outcome(event),
                    seconds=event["seconds"],
                    variant=event["variant"],
                    error=event.get("error", ""),
                    message=event.get("message", ""),
                    frames=tuple(Frame(**frame) for frame in event.get("frames", ())),
                    printed=event.get("printed", ""),
                    measured=event.get("measured", {}),
                )
            )
        elif event["event"] == "collect-error":
            report.trouble = "The test file could not be read:\n" + event["message"]
    report.stuck_test = running
    name = _function(running)
    during = f" in {name}" if running else ""
    stack = scratch / "stack.txt"
    if ran.ended == "asked":
        report.trouble = f"Stopped{during}."
    elif ran.ended == "output":
        report.trouble = (
            f"More than {processes.OUTPUT_LIMIT // 2**20} MiB were printed{during}.\n"
            "Look for a loop that prints without end."
        )
    elif ran.code is None or (stack.exists() and stack.stat().st_size):
        place = _place(stack)
        report.trouble = (
            f"Out of time: after {time_limit:g} s the tests were still running{during}."
            + (f"\nYour code was at {place}." if place else "")
            + "\nLook for a loop that never ends: a condition that never becomes false, or a "
            "queue that is never emptied."
        )
    elif not events or events[-1]["event"] != "end":
        report.trouble = (
            f"The Python process ended{during} with {_exit(ran.code)}, before the tests were done."
            + ("\n" + _tail(ran.output) if ran.output.strip() else "")
        )
    elif ran.code in (3, 4) or (ran.code == 2 and not report.trouble and not collected):
        report.trouble = "The tests could not be started:\n" + _tail(ran.output)
    elif not report.trouble and not collected:
        report.trouble = "There are no tests here."
    elif not report.trouble and (left := _without_result(report, collected, expected)):
        report.trouble = f"Without a result, since the tests ended early: {', '.join(left)}."
    return report


def _without_result(report: Report, collected: list[str], expected: Sequence[str]) -> list[str]:
    """The tests that were found, or must be there, and have no result."""
    ids = {result.test_id for result in report.results}
    names = {result.name for result in report.results}
    left = [_function(each) for each in collected if each not in ids]
    return list(dict.fromkeys([*left, *(name for name in expected if name not in names)]))


def _outcome(event: dict[str, Any]) -> str:
    """A failure before the test began is an error, as pytest calls it."""
    if event["outcome"] == "failed" and event["when"] == "setup":
        return "error"
    return str(event["outcome"])


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:  # the last line of a killed process
                break
    return events


def _function(test_id: str) -> str:
    return re.sub(r"\[.*", "", test_id.rpartition("::")[2])


def _place(stack: Path) -> str:
    """The innermost frame of the graded file in a faulthandler dump."""
    if not stack.exists():  # the process never came so far
        return ""
    pattern = r'File "[^"\n]*(starter\.py|solution\.py)", line (\d+) in (\S+)'
    found = re.search(pattern, stack.read_text(encoding="utf-8", errors="replace"))
    return f"{found[1]}, line {found[2]}, in {found[3]}" if found else ""


def _exit(code: int) -> str:
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


def _tail(text: str, lines: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
