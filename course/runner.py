"""Run one lab's tests in this process and write what happened as JSON lines.

The child side of grading: `python -m course.runner JOB.json`. Every event is on disk before
the next thing runs, so a crash or a kill leaves a readable record. Only this process ever
executes a learner's code. Mirrors nothing upstream.
"""

from __future__ import annotations

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
        self.began = 0.0

    def write(self, **event: Any) -> None:
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

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.began = _processor_seconds()
        self.write(event="start", test=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "setup":
            self.failure = None
        if report.outcome != "passed" and self.failure is None:
            self.failure = {
                "outcome": "skipped" if report.skipped else report.outcome,
                "when": call.when,
                **_describe(call, report),
            }
        if call.when == "teardown":
            callspec = getattr(item, "callspec", None)
            lab_file = str(callspec.params.get("lab", "")) if callspec else ""
            variant = next((n for n, v in self.variants.items() if str(v["file"]) == lab_file), "")
            self.write(
                event="result",
                test=item.nodeid,
                name=getattr(item, "originalname", item.name),
                variant=variant,
                seconds=_processor_seconds() - self.began,
                **(self.failure or {"outcome": "passed"}),
            )
        return report


def _describe(call: pytest.CallInfo[None], report: pytest.TestReport) -> dict[str, Any]:
    """What a reader needs of a failure: its message, its type, and the graded file's frame."""
    if call.excinfo is None:
        return {"message": str(report.longrepr)}
    error = call.excinfo.value
    if report.skipped:
        return {"message": str(getattr(error, "msg", "") or error)}
    own = isinstance(error, pytest.fail.Exception)
    # Assertion rewriting has put its comparison behind the author's message already.
    text = str(getattr(error, "msg", "")) if own else _text_of(error)
    frames = [
        {"file": frame.filename, "line": frame.lineno, "name": frame.name}
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    wanted = ("starter.py", "solution.py", "test_lab.py")
    frames = [f for f in frames if Path(str(f["file"])).name in wanted]
    for frame in frames:
        frame["code"] = linecache.getline(str(frame["file"]), int(str(frame["line"]))).strip()
    return {
        "error": "Failed" if own else type(error).__name__,
        "message": text[:LONGEST_MESSAGE] + (" ..." if len(text) > LONGEST_MESSAGE else ""),
        "frames": frames[:1] + frames[-1:] if len(frames) > 1 else frames,
        "printed": report.capstdout[-LONGEST_MESSAGE:],
    }


def _processor_seconds() -> float:
    """Of this process and its ended children: what a test costs, however busy the machine is."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} whose text cannot be printed>"


def _limit_memory(bytes_: int) -> None:
    """Turn a runaway list into a MemoryError instead of a frozen machine, where the OS can."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = bytes_ if hard == resource.RLIM_INFINITY else min(bytes_, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    except (ImportError, OSError, ValueError):
        pass


def _end_with(parent: int) -> None:
    """Leave as soon as the process that wants the results is gone: nobody would stop us then."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(job_file: str) -> int:
    """Run the job described in `job_file`; the exit status is pytest's own."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    if job["memory"]:
        _limit_memory(job["memory"])
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with (
        open(job["events"], "w", encoding="utf-8") as events,
        open(job["stack"], "w", encoding="utf-8") as stack,
    ):
        # Needs neither the GIL nor the main thread: says where the code is, then ends the process.
        faulthandler.dump_traceback_later(job["time_limit"], exit=True, file=stack)
        recorder = Recorder(events, job["variants"])
        recorder.write(event="begin")
        status = pytest.main(
            [
                *job["args"],
                "-q",
                "-p",
                "no:cacheprovider",
                # pytest's own faulthandler would cancel the time limit after the first failure.
                "-p",
                "no:faulthandler",
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
