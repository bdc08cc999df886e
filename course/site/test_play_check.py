"""What the check of the labs in the pages' worker finds; here the worker is pretended."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import grading
from course.learning.labs import CourseError, find_labs
from course.site import play_check, play_excepted, play_pages
from course.truth import pages

ROOT = Path(__file__).resolve().parents[2]
LAB = next(lab for lab in find_labs(ROOT) if lab.id == "02-02")
NAMES = LAB.test_names()
MEASURED = dict.fromkeys(LAB.manifest.predictions, 18.25)
CAUGHT_BY = LAB.manifest.misconceptions[0].caught_by


class Pretended:
    """A worker in which the solution passes and everything else fails; `ends` says otherwise."""

    def __init__(self) -> None:
        self.solution = LAB.solution.read_text(encoding="utf-8")
        self.starter = LAB.starter.read_text(encoding="utf-8")
        self.ends: dict[tuple[str, str], tuple[str, str]] = {}
        self.error = ""
        self.measured: dict[str, object] = dict(MEASURED)

    def call(self, kind, payload, **_):
        if self.error:
            raise CourseError(self.error)
        text = payload["files"]["starter.py"]
        who = {self.solution: "solution", self.starter: "starter"}.get(text, "wrong")
        events = []
        for name in payload["tests"] or NAMES:
            usual = ("passed" if who == "solution" else "failed", "")
            outcome, said = self.ends.get((who, name), usual)
            test = f"lab/test_lab.py::{name}"
            event = {"event": "result", "test": test, "outcome": outcome, "message": said}
            events.append({**event, "measured": self.measured if name == NAMES[0] else {}})
        return {"status": 0}, events


def report(**outcomes: str) -> grading.Report:
    results = [
        grading.TestResult(name, f"lab/test_lab.py::{name}", outcomes.get(name, "passed"))
        for name in NAMES
    ]
    results[0].measured.update(MEASURED)
    return grading.Report(results)


def problems(worker, here=None) -> list[str]:
    return play_check.check_lab(worker, LAB, here or report()).problems


def test_a_lab_that_ends_as_here_has_no_problem():
    assert problems(Pretended()) == []


def test_a_test_that_passes_here_and_fails_in_the_page_is_told_with_its_words():
    worker = Pretended()
    worker.ends["solution", NAMES[-1]] = ("failed", "32 bits")
    assert problems(worker) == [f"{NAMES[-1]}: passed here, failed in the page: 32 bits"]


def test_a_test_that_is_skipped_in_the_page_alone_is_told():
    worker = Pretended()
    worker.ends["solution", NAMES[-1]] = ("skipped", "no time")
    assert "passed here, skipped in the page" in problems(worker)[0]


def test_a_test_that_needs_the_pinned_tree_may_skip_itself_in_the_page():
    worker = Pretended()
    worker.ends["solution", NAMES[-1]] = ("skipped", "not here: course upstream fetch")
    assert problems(worker) == []


def test_a_test_that_the_page_does_not_run_is_told():
    here = report()
    here.results.append(grading.TestResult("test_more", "lab/test_lab.py::test_more", "passed"))
    assert problems(Pretended(), here) == ["test_more: passed here, absent in the page: "]


def test_a_starter_that_passes_a_test_is_told():
    worker = Pretended()
    worker.ends["starter", NAMES[0]] = ("passed", "")
    assert problems(worker) == [f"the starter passes {NAMES[0]}"]


def test_the_first_lab_of_each_phase_is_graded_with_what_must_fail():
    labs = find_labs(ROOT)
    firsts = play_check.firsts(labs)
    assert sorted(name[:2] for name in firsts) == sorted({lab.id[:2] for lab in labs})
    worker = Pretended()
    worker.ends["starter", NAMES[0]] = worker.ends["wrong", CAUGHT_BY] = ("passed", "")
    assert play_check.check_lab(worker, LAB, report(), wrong=False).problems == []


def test_a_misconception_that_its_test_does_not_catch_is_told():
    worker = Pretended()
    worker.ends["wrong", CAUGHT_BY] = ("passed", "")
    assert f"{CAUGHT_BY} does not catch {LAB.manifest.misconceptions[0].name}" in problems(worker)


@pytest.mark.parametrize(
    ("came", "told"), [(18.25 + 1e-9, False), (18.3, False), (20, True), (None, True)]
)
def test_a_prediction_that_the_page_measures_otherwise_or_not_is_told(came, told):
    worker = Pretended()
    name = next(iter(MEASURED))
    worker.measured[name] = came
    words = f"prediction {name}: 18.25 is measured here, {came} in the page"
    assert problems(worker) == ([words] if told else [])


def test_an_excepted_test_is_skipped_in_the_page_and_must_fail_when_it_is_not(monkeypatch):
    monkeypatch.setattr(play_excepted, "TESTS", {LAB.id: {NAMES[-1]: "starts a process"}})
    worker = Pretended()
    assert problems(worker) == [f"{NAMES[-1]} need not be excepted: it passes in the page"]
    worker.ends["solution", NAMES[-1]] = ("skipped", "starts a process")
    assert problems(worker) == []


def test_a_worker_that_dies_is_a_problem_of_the_lab_and_of_nothing_else():
    worker = Pretended()
    worker.error = "no end within the time limit"
    told = problems(worker)
    assert "the solution: no end within the time limit" in told
    assert f"{NAMES[0]}: passed here, absent in the page: " in told


def test_without_a_runtime_the_check_says_how_to_get_one(tmp_path):
    with pytest.raises(CourseError, match="course book runtime"):
        play_check.check(tmp_path, [LAB], print, set())
    with pytest.raises(CourseError, match="course book runtime"):
        play_pages.check(tmp_path, print)


class Printing:
    """A worker whose blocks answer with what is said for each."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)

    def call(self, kind, payload, **_):
        text, error = self.answers[payload["index"]]
        return {"text": text, "error": error}, []


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx\n```\n", "utf-8")
    assert len(pages.runnable(path)) == 2
    return path


def test_a_page_whose_blocks_say_what_it_shows_has_no_problem(page):
    worker = Printing(("1\n", None), ("", None))
    assert play_pages.check_page(worker, page.parent, page) == []


def test_another_output_and_an_error_are_told_by_line_and_block(page):
    worker = Printing(("2\n", None), ("", "Traceback\nNameError: x"))
    first, second = play_pages.check_page(worker, page.parent, page)
    assert first.startswith("page.md:1, block 0: ") and "output 2" in first
    assert second == "page.md:9, block 1: NameError: x"


def test_an_excepted_block_must_fail(page, monkeypatch):
    monkeypatch.setattr(play_excepted, "BLOCKS", {"page.md": {"1": "starts a process"}})
    worker = Printing(("1\n", None), ("", "OSError: no processes"))
    assert play_pages.check_page(worker, page.parent, page) == []
    worker = Printing(("1\n", None), ("", None))
    assert play_pages.check_page(worker, page.parent, page) == [
        "page.md:9, block 1 need not be excepted: it runs in the page"
    ]
