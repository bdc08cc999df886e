"""Run one lab's tests in this process and write what happened as JSON lines.

The child side of grading: `python -m course.learning.runner JOB.json`. Every event is on disk
before the next thing runs, so a crash or a kill leaves a readable record. Only this process ever
executes a learner's code.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import linecache
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import pytest

LONGEST_MESSAGE = 4000
LARGEST_FILE = 64 * 2**20
"""Bytes of any one file written while grading: what a test prints is such a file too."""
UNUSED = (
    "doctest", "legacypath", "pastebin", "setuponly", "setupplan", "stepwise", "threadexception",
    "unittest", "unraisableexception",
)  # fmt: skip
"""Plugins of pytest that no lab uses: a tenth of the time that grading takes beside the tests."""


class Recorder:
    """A pytest plugin: writes one line per event, and runs the file variants it is given.

    `variants` maps a name to `{"file": path, "tests": [names] or None}`; the `lab` fixture is
    then parametrised over them, so one session grades the solution, the starter and every
    misconception.
    """

    def __init__(self, out: IO[str], variants: dict[str, dict[str, Any]]) -> None:
        self.out = out
        self.variants = variants
        self.failure: dict[str, Any] | None = None
        self.running: pytest.Item | None = None
        self.began = 0.0
        self.process = os.getpid()

    def write(self, **event: Any) -> None:
        if os.getpid() != self.process:  # a fork of the graded code has no say
            os._exit(1)
        self.out.write(json.dumps(event) + "\n")
        self.out.flush()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if self.variants and "lab" in metafunc.fixturenames:
            names = [
                name
                for name, variant in self.variants.items()
                if variant["tests"] is None or metafunc.function.__name__ in variant["tests"]
            ]
            metafunc.parametrize(
                "lab",
                [pytest.param(self.variants[n]["file"], id=f"variant={n}") for n in names],
                indirect=True,
                scope="module",
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(event="collect-error", message=str(report.longrepr)[-LONGEST_MESSAGE:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(event="collected", tests=[item.nodeid for item in session.items])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.running = item

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """The graded code raised KeyboardInterrupt or pytest.exit, which end every test."""
        if self.running is None:
            self.write(event="collect-error", message=repr(excinfo.value))
            return
        told = {"message": _text_of(excinfo.value), "frames": _frames(excinfo.value)}
        self._result(self.running, {"outcome": "failed", "when": "call",
                                    "error": type(excinfo.value).__name__, **told})  # fmt: skip

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.began = _processor_seconds()
        self.write(event="start", test=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Say when the graded file itself is read: a loop there is in no test."""
        if fixturedef.argname != "lab":
            return (yield)
        self.write(event="reading", on=True)
        try:
            return (yield)
        finally:
            self.write(event="reading", on=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "setup":
            self.failure = None
        if report.outcome != "passed" and self.failure is None:
            told = _describe(call, report)
            by_starter = report.skipped and any(
                Path(str(frame["file"])).name == "starter.py" for frame in told.get("frames", ())
            )
            outcome = "failed" if by_starter else "skipped" if report.skipped else report.outcome
            self.failure = {"outcome": outcome, "when": call.when, **told}
            if told.get("printed_too_much"):
                item.session.shouldstop = "a test printed without end"
        if call.when == "teardown":
            measured = dict(item.user_properties)
            self._result(
                item,
                self.failure or {"outcome": "passed"},
                measured={
                    name.removeprefix("measured."): _plain(value)
                    for name, value in measured.items()
                    if str(name).startswith("measured.")
                },
            )
            self.running = None
        return report

    def _result(self, item: pytest.Item, outcome: dict[str, Any], **more: Any) -> None:
        callspec = getattr(item, "callspec", None)
        lab_file = str(callspec.params.get("lab", "")) if callspec else ""
        self.write(
            event="result",
            test=item.nodeid,
            name=getattr(item, "originalname", item.name),
            variant=next((n for n, v in self.variants.items() if str(v["file"]) == lab_file), ""),
            seconds=_processor_seconds() - self.began,
            **more,
            **outcome,
        )


def _plain(value: object) -> object:
    """A measured value as JSON can hold it; a numpy scalar becomes the number it is."""
    item = getattr(value, "item", None)
    value = item() if callable(item) else value
    return value if isinstance(value, bool | int | float | str) else str(value)


def _describe(call: pytest.CallInfo[None], report: pytest.TestReport) -> dict[str, Any]:
    """What a reader needs of a failure: its message, its type, and the graded file's frame."""
    if call.excinfo is None:
        return {"message": str(report.longrepr)}
    error = call.excinfo.value
    if report.skipped:
        text = str(getattr(error, "msg", "") or error)
        return {"error": "Skipped", "message": text, "frames": _frames(error)}
    own = isinstance(error, pytest.fail.Exception)
    # Assertion rewriting has put its comparison behind the author's message already.
    text = str(getattr(error, "msg", "")) if own else _text_of(error)
    too_much = isinstance(error, OSError) and error.errno == errno.EFBIG
    if too_much:
        text = (
            f"more than {LARGEST_FILE // 2**20} MiB were printed, or written to one file: "
            "look for a loop that prints without end"
        )
    return {
        "error": "Failed" if own else type(error).__name__,
        "message": text[:LONGEST_MESSAGE] + (" ..." if len(text) > LONGEST_MESSAGE else ""),
        "frames": _frames(error),
        "printed": report.capstdout[-LONGEST_MESSAGE:],
        "printed_too_much": too_much,
    }


def _frames(error: BaseException) -> list[dict[str, Any]]:
    """The first and the last frame of the lab's own files."""
    wanted = ("starter.py", "solution.py", "test_lab.py")
    frames: list[dict[str, Any]] = [
        {"file": frame.filename, "line": frame.lineno, "name": frame.name}
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).name in wanted
    ]
    for frame in frames:
        frame["code"] = linecache.getline(str(frame["file"]), int(frame["line"])).strip()
    return frames[:1] + frames[-1:] if len(frames) > 1 else frames


def _processor_seconds() -> float:
    """Of this process and its ended children: what a test costs, however busy the machine is."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose text cannot be printed>"


def _limit(memory: int) -> None:
    """Turn a runaway list, and a runaway print, into an error, where the system can.

    Args:
        memory: bytes of data this process may hold; 0 for no limit.
    """
    try:
        import resource
    except ImportError:
        return
    for kind, wanted in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, LARGEST_FILE)):
        if wanted:
            try:
                _, hard = resource.getrlimit(kind)
                soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(kind, (soft, hard))
            except (OSError, ValueError):
                pass


def _end_at(deadline: float, stack: IO[str]) -> None:
    """Say where the code is and leave, when `deadline` (of the monotonic clock) has come."""
    time.sleep(max(0.0, deadline - time.monotonic()))
    faulthandler.dump_traceback(stack)
    stack.flush()
    os._exit(1)


def main(job_file: str) -> int:
    """Run the job described in `job_file`; the exit status is pytest's own."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    _limit(job["memory"])
    with (
        open(job["events"], "w", encoding="utf-8") as events,
        open(job["stack"], "w", encoding="utf-8") as stack,
    ):
        # Needs neither the GIL nor the main thread: says where the code is, then ends the process.
        # The thread does the same a moment later, for code that has cancelled this.
        faulthandler.dump_traceback_later(job["time_limit"], exit=True, file=stack)
        late = time.monotonic() + job["time_limit"] + 0.5
        threading.Thread(target=_end_at, args=(late, stack), daemon=True).start()
        recorder = Recorder(events, job["variants"])
        recorder.write(event="begin")
        status = pytest.main(
            [
                *job["args"],
                "-q",
                # pytest's own faulthandler would cancel the time limit after the first failure.
                *(f"-pno:{name}" for name in ("cacheprovider", "faulthandler", *UNUSED)),
                "--no-header",
                "--tb=no",
                f"--rootdir={job['root']}",
                f"--config-file={Path(job['root']) / 'pyproject.toml'}",
            ],
            plugins=[recorder],
        )
        faulthandler.cancel_dump_traceback_later()
        recorder.write(event="end", status=int(status))
    return int(status)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    # A learner's leftover threads must not keep the process alive.
    os._exit(code)
