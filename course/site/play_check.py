"""Every lab graded as a page grades it, in Node, beside its grading here.

`course book runtime --check`: each lab that a page can do passes with its solution, with the same
tests passed and skipped as here, and the same measured for its predictions. The first lab of each
phase, and a lab that is named, also fails with its starter and fails the test named for one of its
misconceptions; `course selfcheck` does that with every lab, outside the page. Runs
`book/play/worker.js` itself, over the payload that a site gets.
"""

from __future__ import annotations

import dataclasses
import json
import math
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from course.learning import grading, manifest
from course.learning.labs import CourseError, Lab
from course.site import play, play_excepted, play_payload

LANES = 2
TIME_LIMIT = 240.0
"""Seconds one grading in Node may take."""
TOGETHER = 900.0
"""Seconds the solutions of all labs may take here, one after the other."""
LARGEST = 700 * 2**20
"""Bytes of memory past which the worker begins anew, as in the page."""


@dataclass(slots=True)
class Verdict:
    """What one lab did in the page's worker. `problems` empty means it is sound there."""

    lab: Lab
    problems: list[str] = field(default_factory=list)
    passed: int = 0
    skipped: int = 0
    excepted: int = 0
    caught: str = ""
    seconds: float = 0.0
    """Wall-clock seconds of the solution's grading in Node."""
    native: float = 0.0
    """Of the same grading here, the processor's seconds of its tests."""


class Gradable(Protocol):
    """The page's worker, wherever it runs."""

    def call(self, kind: str, payload: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
        """The result of one call and its events; raises CourseError when there is none."""


class Worker:
    """The page's worker, in a Node process of its own; begun anew after a call that did not end."""

    def __init__(self, root: Path, played: Path) -> None:
        self.command = [_node(), str(root / "book/play/node.mjs"), str(played)]
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.last = 0

    def call(
        self, kind: str, payload: dict[str, Any], *, recycle: bool = True
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Send a message; its result and its events.

        Args:
            recycle: begin anew after this call if the memory has grown.

        Raises:
            CourseError: the worker answered with an error, died, or did not answer in time.
        """
        if self.process is None:
            self._start()
        assert self.process and self.process.stdin
        self.last += 1
        message = {"id": self.last, "kind": kind, "payload": payload}
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        events: list[dict[str, Any]] = []
        until = time.monotonic() + TIME_LIMIT
        while True:
            told = self._hear(until)
            if told.get("id") not in (0, self.last):
                continue
            if "error" in told:
                if told.get("fatal"):
                    self.end()
                raise CourseError(str(told["error"]))
            if "event" in told:
                events.append(told["event"])
            elif told["id"] == self.last:
                if recycle and told["memory"] > LARGEST:
                    self.end()
                return told["result"], events

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.lines = queue.Queue()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=_listen, args=(self.process, self.lines), daemon=True).start()

    def _hear(self, until: float) -> dict[str, Any]:
        """The worker's next message; what else it prints is kept for when it dies."""
        said: list[str] = []
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.end()
                raise CourseError("Node did not answer within the time limit") from None
            if line is None:
                self.end()
                raise CourseError("Node ended: " + " ".join(said)[-2000:])
            if line.startswith("{"):
                return json.loads(line)
            said.append(line.strip()[:300])


def _listen(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _node() -> str:
    found = shutil.which("node")
    if not found:
        raise CourseError("node is not installed: https://nodejs.org")
    return found


# ------------------------------------------------------------------ the check


def firsts(labs: Sequence[Lab]) -> set[str]:
    """The ids of the first lab of each phase that a page can do."""
    first: dict[str, str] = {}
    for lab in labs:
        if lab.id not in play_excepted.LABS:
            first.setdefault(lab.id.partition("-")[0], lab.id)
    return set(first.values())


def check(
    root: Path, labs: Sequence[Lab], done: Callable[[Verdict], None], wrong: set[str]
) -> list[Verdict]:
    """Grade `labs` in Node and here, `LANES` at a time; `done` hears of each as it ends.

    Args:
        wrong: the ids of the labs that are also graded with what must fail.

    Raises:
        CourseError: there is no whole runtime, or no Node.
    """
    if why := play.problem(root):
        raise CourseError(f"What runs Python in the pages: {why}. Make it: course book runtime")
    wanted = [lab for lab in labs if lab.id not in play_excepted.LABS]
    here = natively(root, wanted)
    todo: queue.SimpleQueue[Lab] = queue.SimpleQueue()
    for lab in wanted:
        todo.put(lab)
    verdicts: dict[str, Verdict] = {}
    telling = threading.Lock()

    def lane(worker: Worker) -> None:
        try:
            while True:
                lab = todo.get_nowait()
                verdict = check_lab(worker, lab, here[lab.id], lab.id in wrong)
                with telling:
                    verdicts[lab.id] = verdict
                    done(verdict)
        except queue.Empty:
            return
        finally:
            worker.end()

    with (
        tempfile.TemporaryDirectory(prefix="play-", dir=root / "build") as scratch,
        ThreadPoolExecutor(max_workers=LANES) as pool,
    ):
        played = Path(scratch)
        play_payload.write(root, played)
        lanes = [pool.submit(lane, Worker(root, played)) for _ in range(LANES)]
        for each in lanes:
            each.result()
    return [verdicts[lab.id] for lab in wanted]


def natively(root: Path, labs: Sequence[Lab]) -> dict[str, grading.Report]:
    """By lab, the grading of its solution here: of all of them in one process, where they end."""
    marks = ["-m", "not gpu and not torch and not upstream"]
    if not labs:
        return {}
    others = [str(lab.test_file) for lab in labs[1:]]
    report = grading.run(
        root,
        labs[0].test_file,
        impl="solution",
        extra_args=[*others, *marks],
        time_limit=TOGETHER,
        memory=0,
    )
    if report.trouble:  # which lab it was is said by running each alone
        return {
            lab.id: grading.run(root, lab.test_file, impl="solution", extra_args=marks)
            for lab in labs
        }
    found: dict[str, grading.Report] = {}
    for lab in labs:
        folder = f"{lab.folder.relative_to(root).as_posix()}/"
        own = [result for result in report.results if result.test_id.startswith(folder)]
        found[lab.id] = dataclasses.replace(report, results=own)
    return found


def check_lab(worker: Gradable, lab: Lab, report: grading.Report, wrong: bool = True) -> Verdict:
    """What a lab does in a page's worker, beside its grading here.

    Args:
        wrong: grade the starter and a misconception too; both must fail.
    """
    verdict = Verdict(lab)
    solution = lab.solution.read_text(encoding="utf-8")
    began = time.perf_counter()
    measured: dict[str, Any] = {}
    outcomes = _graded(worker, verdict, "the solution", solution, measured=measured)
    verdict.seconds = time.perf_counter() - began
    passed = [test for test, (outcome, _) in outcomes.items() if outcome == "passed"]
    verdict.passed, verdict.skipped = len(passed), len(outcomes) - len(passed)
    if wrong:
        starter = _graded(worker, verdict, "the starter", lab.starter.read_text(encoding="utf-8"))
        if stay := [test for test, (outcome, _) in starter.items() if outcome == "passed"]:
            verdict.problems.append(f"the starter passes {_short(stay[0])}")
        _catch(worker, verdict, solution, {_function(test) for test in passed})
    _still_excepted(worker, verdict, solution)
    verdict.native = sum(result.seconds for result in report.results)
    verdict.problems += _differences(lab, outcomes, report)
    verdict.problems += _unanswered(lab, measured, report)
    return verdict


def _catch(worker: Gradable, verdict: Verdict, solution: str, names: set[str]) -> None:
    """Put in the first misconception whose test runs in a page; that test must fail."""
    items = verdict.lab.manifest.misconceptions
    item = next((item for item in items if item.caught_by in names), None)
    if item is not None:
        wrong = manifest.wrong_solution(solution, item)
        caught = _graded(worker, verdict, item.name, wrong, [item.caught_by])
        if any(outcome == "failed" for outcome, _ in caught.values()):
            verdict.caught = item.name
        else:
            verdict.problems.append(f"{item.caught_by} does not catch {item.name}")
    elif items:
        verdict.problems.append("no misconception is caught by a test that runs in a page")


def _still_excepted(worker: Gradable, verdict: Verdict, solution: str) -> None:
    """A test that is skipped in pages and would pass there is skipped for nothing."""
    excepted = play_excepted.TESTS.get(verdict.lab.id, {})
    if not excepted:
        return
    verdict.excepted = len(excepted)
    told = _graded(worker, verdict, "the excepted tests", solution, list(excepted), skip={})
    for test, (outcome, _) in told.items():
        if outcome == "passed":
            verdict.problems.append(f"{_short(test)} need not be excepted: it passes in the page")


Outcomes = dict[str, tuple[str, str]]
"""By test, how it ended and what was said."""


def _graded(
    worker: Gradable,
    verdict: Verdict,
    what: str,
    text: str,
    tests: Sequence[str] | None = None,
    measured: dict[str, Any] | None = None,
    **more: Any,
) -> Outcomes:
    """Grade one text as the learner's; {} with a problem when the tests have no results.

    What the tests that pass measure is put into `measured`.
    """
    payload = {"lab": verdict.lab.id, "files": {"starter.py": text}, "tests": tests, **more}
    try:
        result, events = worker.call("grade", payload)
    except CourseError as error:
        verdict.problems.append(f"{what}: {error}")
        return {}
    for event in events:
        if event["event"] == "collect-error":
            verdict.problems.append(f"{what}: {event['message']}")
    if result["status"] not in (0, 1):
        verdict.problems.append(f"{what}: {result['output']}")
    results = [event for event in events if event["event"] == "result"]
    for each in results:
        if measured is not None and each["outcome"] == "passed":
            measured.update(each.get("measured", {}))
    return {e["test"]: (e["outcome"], e.get("message", "")) for e in results}


def _differences(lab: Lab, outcomes: Outcomes, report: grading.Report) -> Iterator[str]:
    """Tests that end otherwise in the page than here, and may not."""
    if report.trouble:
        yield f"here: {report.trouble}"
    excepted = play_excepted.TESTS.get(lab.id, {})
    here = {result.test_id: result.outcome for result in report.results}
    for name in excepted.keys() - {_function(test) for test in here}:
        yield f"{name} is excepted, and no test of this lab"
    for test, outcome in here.items():
        came, said = outcomes.get(test, ("absent", ""))
        skipped = came == "skipped" and (
            _function(test) in excepted or play_excepted.PINNED_TREE in said
        )
        if came != outcome and not skipped:
            yield f"{_short(test)}: {outcome} here, {came} in the page: {said[:500]}"
    for test in outcomes.keys() - here.keys():
        if outcomes[test][0] != "skipped":
            yield f"{_short(test)}: only in the page"


def _unanswered(lab: Lab, measured: dict[str, Any], report: grading.Report) -> Iterator[str]:
    """Predictions for which a page measures nothing, or another value than is measured here.

    A number may differ by what the question tolerates: a page's sums have another order.
    """
    passed = [result for result in report.results if result.outcome == "passed"]
    here = {name: value for result in passed for name, value in result.measured.items()}
    for name, question in lab.manifest.predictions.items():
        value, came = here.get(name), measured.get(name)
        if isinstance(value, int | float) and isinstance(came, int | float):
            same = math.isclose(value, came, rel_tol=max(1e-6, question.tolerance))
        else:
            same = value in (None, came)  # None: what measures it is skipped here too
        if not same:
            yield f"prediction {name}: {value} is measured here, {came} in the page"


def _short(test: str) -> str:
    return test.rpartition("::")[2]


def _function(test: str) -> str:
    return _short(test).partition("[")[0]
