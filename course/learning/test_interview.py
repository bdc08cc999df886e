"""`course quiz --interview`: what is asked, what is kept, what is refused."""

from __future__ import annotations

import io
import json

import pytest

from course import terminal
from course.conftest import REPOSITORY
from course.files import load_module
from course.learning import interview
from course.learning.labs import CourseError


@pytest.fixture
def root(tmp_path):
    """The pages and the lab, with a folder of its own for what is kept."""
    (tmp_path / interview.LAB.parent).mkdir(parents=True)
    (tmp_path / interview.LAB).symlink_to(REPOSITORY / interview.LAB)
    for page in REPOSITORY.glob("phase-*/INTERVIEW.md"):
        (tmp_path / page.parent.name).mkdir(exist_ok=True)
        (tmp_path / page.parent.name / page.name).symlink_to(page)
    (tmp_path / interview.FOLDER).mkdir()
    return tmp_path


def sit(root, monkeypatch, lines, compare=None):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return interview.run(terminal.make_console(), root, 7, compare)


ALL_RIGHT = ["", "y", "y", "n", "y", "y"]
"""Answered, derived, the follow-up held, no look, a number exists, and it was shown."""


def test_a_loop_that_is_answered_well_is_kept_with_every_row(root, monkeypatch, capsys):
    lab = load_module(REPOSITORY / interview.LAB / "solution.py")
    loop = interview.drawn(terminal.make_console(), root, lab, 7)
    asked = list(interview.questions(lab, loop))
    assert sit(root, monkeypatch, ALL_RIGHT * len(asked)) == 0
    kept = json.loads((root / interview.FOLDER / interview.FILE).read_text(encoding="utf-8"))
    rows = {row for *_, own in asked for row in own}
    assert kept["seed"] == 7
    assert kept["rows"] == {row: 3 if row in rows else None for row in lab.ROWS}
    said = capsys.readouterr().out
    assert all(text.splitlines()[0][:30] in said for _, text, *_ in asked)


def test_a_loop_that_is_left_keeps_what_was_said(root, monkeypatch, capsys):
    assert sit(root, monkeypatch, [*ALL_RIGHT, "", "n", "n", "maybe", "n", "n"]) == 1
    kept = json.loads((root / interview.FOLDER / interview.FILE).read_text(encoding="utf-8"))
    assert 0 in kept["rows"].values() and None in kept["rows"].values()
    assert "'maybe': need y or n" in capsys.readouterr().out


def test_nothing_answered_writes_nothing(root, monkeypatch):
    assert sit(root, monkeypatch, []) == 0
    assert not (root / interview.FOLDER / interview.FILE).exists()


def test_a_matrix_of_before_is_compared_and_a_broken_one_refused(root, monkeypatch, capsys):
    old = root / "old.json"
    lab = load_module(REPOSITORY / interview.LAB / "solution.py")
    old.write_text(json.dumps({"rows": dict.fromkeys(lab.ROWS, 1)}), encoding="utf-8")
    sit(root, monkeypatch, ALL_RIGHT, old)
    assert ": 1, now 3" in capsys.readouterr().out
    for text in ("[]", '{"rows": {"memory": 7}}', "no"):
        old.write_text(text, encoding="utf-8")
        with pytest.raises(CourseError, match=r"old\.json"):
            sit(root, monkeypatch, ALL_RIGHT, old)


def test_a_phase_of_the_breadth_without_questions_is_named(root, monkeypatch, capsys):
    (root / "phase-12-structured-outputs" / "INTERVIEW.md").unlink()
    sit(root, monkeypatch, [])
    assert "Phase 12 has no INTERVIEW.md: it is not asked." in capsys.readouterr().out
    (root / "phase-02-paged-attention" / "INTERVIEW.md").unlink()
    with pytest.raises(CourseError, match="phase 02: 0 questions, and 2 are needed"):
        sit(root, monkeypatch, [])
