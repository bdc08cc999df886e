"""Progress follows the files: a result counts for exactly the text it was a result of."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from course import files
from course.conftest import REPOSITORY
from course.files import write_atomically
from course.learning.grading import Report, TestResult
from course.learning.labs import Lab, find_labs
from course.learning.progress import CHANGED, NEW, PASSED, STARTED, Progress, current_lab, digest_of


def outcome(lab: Lab, *outcomes: str) -> Report:
    """A report of the lab as it is now."""
    results = [TestResult(f"test_{n}", f"f::test_{n}", o) for n, o in enumerate(outcomes)]
    return Report(results, digest=digest_of(lab))


@pytest.fixture
def labs(little_course):
    return find_labs(little_course)


@pytest.fixture
def progress(little_course):
    return Progress(little_course)


def edit(lab) -> None:
    lab.starter.write_text(lab.starter.read_text() + "# mine\n", encoding="utf-8")


def test_an_untouched_lab_is_new(progress, labs):
    assert progress.state(labs[0]) == NEW


def test_other_line_ends_are_no_edit(progress, labs):
    labs[0].starter.write_bytes(labs[0].starter.read_bytes().replace(b"\n", b"\r\n"))
    assert progress.state(labs[0]) == NEW


def test_an_edited_lab_that_was_never_graded_is_changed(progress, labs):
    edit(labs[0])
    assert progress.state(labs[0]) == CHANGED


def test_a_lab_with_a_failing_test_is_started_and_remembers_the_first(progress, labs):
    edit(labs[0])
    progress.record(labs[0], outcome(labs[0], "passed", "failed", "failed"))
    assert progress.state(labs[0]) == STARTED
    assert progress.entry(labs[0]).first_failing == "test_1"


def test_a_passed_lab_stays_passed_for_another_process(progress, labs, little_course):
    edit(labs[0])
    progress.record(labs[0], outcome(labs[0], "passed", "skipped"))
    assert Progress(little_course).state(labs[0]) == PASSED


def test_editing_a_passed_lab_asks_for_a_new_grading(progress, labs):
    progress.record(labs[0], outcome(labs[0], "passed"))
    edit(labs[0])
    assert progress.state(labs[0]) == CHANGED


def test_changing_the_tests_asks_for_a_new_grading_too(progress, labs):
    edit(labs[0])
    progress.record(labs[0], outcome(labs[0], "passed"))
    labs[0].test_file.write_text(labs[0].test_file.read_text() + "\n", encoding="utf-8")
    assert progress.state(labs[0]) == CHANGED


def test_nothing_but_skipped_tests_is_no_pass(progress, labs):
    progress.record(labs[0], outcome(labs[0], "skipped"))
    assert progress.state(labs[0]) != PASSED


def test_the_next_lab_is_the_first_that_is_not_passed(progress, labs):
    edit(labs[0])
    progress.record(labs[0], outcome(labs[0], "passed"))
    assert progress.next_lab(labs) == labs[1]


def test_after_a_lab_comes_the_one_behind_it_and_then_what_was_left_out(progress, labs):
    assert progress.next_lab(labs, after=labs[0]) == labs[1]
    edit(labs[1])
    progress.record(labs[1], outcome(labs[1], "passed"))
    assert progress.next_lab(labs, after=labs[1]) == labs[0]


def test_the_current_lab_is_the_one_the_learner_stands_in(progress, labs, little_course):
    assert current_lab(little_course, progress, cwd=labs[1].folder) == labs[1]


def test_hints_unfold_one_at_a_time_and_stop_at_the_last(progress, labs):
    assert [progress.unfold(labs[0], "test_rounds_up", 2) for _ in range(3)] == [1, 2, 2]


def test_two_terminals_do_not_undo_each_others_entries(little_course, labs):
    watching, asking = Progress(little_course), Progress(little_course)
    asking.unfold(labs[0], "test_rounds_up", 1)
    watching.record(labs[0], outcome(labs[0], "failed"))
    watching.record(labs[1], outcome(labs[1], "failed"))
    assert Progress(little_course).entry(labs[0]).hints == {"test_rounds_up": 1}


def test_an_unreadable_progress_file_is_moved_aside_not_overwritten(little_course, labs):
    path = little_course / ".course" / "progress.json"
    write_atomically(path, '{"version": 1, "labs": {"90-00"')
    progress = Progress(little_course)
    assert progress.state(labs[0]) == NEW and "could not be read" in progress.notice
    kept = list(path.parent.glob("progress.unreadable-*.json"))
    assert [file.read_text() for file in kept] == ['{"version": 1, "labs": {"90-00"']


def test_an_interruption_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    write_atomically(path, "old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_the_progress_file_is_plain_json_with_a_version(progress, labs, little_course):
    progress.record(labs[0], outcome(labs[0], "passed"))
    data = json.loads((little_course / ".course" / "progress.json").read_text())
    assert data["version"] == 1 and data["labs"]["90-00"]["passed"] == 1


def test_a_result_counts_for_the_text_that_was_graded_and_no_other(progress, labs):
    edit(labs[0])
    report = outcome(labs[0], "passed")
    edit(labs[0])  # saved between the grading and its recording
    progress.record(labs[0], report)
    assert progress.state(labs[0]) == CHANGED


RECORDING = """\
import sys
from dataclasses import replace
from pathlib import Path
from course.learning.grading import Report
from course.learning.labs import find_labs
from course.learning.progress import Progress
root, name = Path(sys.argv[1]), sys.argv[2]
lab = find_labs(root)[0]
for number in range(20):
    Progress(root).record(replace(lab, id=f"{name}-{number}"), Report())
"""


@pytest.mark.slow
def test_many_graders_at_once_lose_nothing(little_course):
    pytest.importorskip("fcntl", reason="files are locked on POSIX systems")
    graders = [
        subprocess.Popen(
            [sys.executable, "-c", RECORDING, str(little_course), f"p{n}"], cwd=REPOSITORY
        )
        for n in range(4)
    ]
    assert [grader.wait() for grader in graders] == [0] * 4
    assert len(Progress(little_course).entries) == 80


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5_000,
        '{"labs": {"90-00": {"hints": []}}}',
        '{"labs": {"90-00": {"hints": {"test_a": "one"}}}}',
        '{"labs": {"90-00": {"ok": "yes"}}}',
        '{"labs": []}',
        "\xff",
    ],
)
def test_a_progress_file_nobody_here_wrote_is_moved_aside(little_course, labs, text):
    path = little_course / ".course" / "progress.json"
    write_atomically(path, text.encode("latin-1"))
    assert "could not be read" in Progress(little_course).notice
    (kept,) = path.parent.glob("progress.unreadable-*.json")
    assert kept.read_bytes() == text.encode("latin-1")


def test_where_nothing_can_be_written_the_progress_opens_and_says_so(little_course, labs):
    (little_course / ".course").write_text("in the way")
    progress = Progress(little_course)
    assert "nothing is kept" in progress.notice
    edit(labs[0])
    with pytest.raises(OSError):
        progress.record(labs[0], outcome(labs[0], "passed"))
    assert progress.state(labs[0]) == PASSED, "this process knows it all the same"
