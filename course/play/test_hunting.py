"""A hunt as a page asks for it: what the terminal draws, and nothing told before it is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from course.conftest import REPOSITORY
from course.learning import hunts
from course.learning.labs import CourseError, find_labs, pick
from course.play import hunting

LAB = pick(find_labs(REPOSITORY), "02-01")


@pytest.fixture(autouse=True)
def in_the_course(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_a_seed_draws_what_it_draws_in_a_terminal_and_the_answer_names_nothing(level):
    for seed in range(12):
        drawn, item = hunting.begin("02-01", level, seed), hunts.drawn(LAB, seed)
        assert drawn["text"] == hunts.wrong_text(LAB, item)
        told = json.dumps(drawn)
        assert item.why not in told and item.name not in told


@pytest.mark.slow
def test_level_two_runs_a_text_that_says_its_calls():
    drawn = hunting.begin("02-01", 2, 3)
    assert drawn["run"].startswith(drawn["text"]) and "labkit.calls" in drawn["run"]
    printed = "mine\nBlockPool.touch([1]) -> None\nBlock.touch() -> 1\n"
    assert hunting.calls("02-01", printed) == ["BlockPool.touch([1]) -> None"]


def test_what_was_drawn_is_told_when_it_is_asked_for():
    item = hunts.drawn(LAB, 7)
    line, right, wrong = hunts.changed_line(LAB, item)
    told = {"line": line, "right": right, "wrong": wrong, "why": item.why}
    assert hunting.found("02-01", 7) == told


@pytest.mark.slow
def test_level_three_gives_every_solution_a_number_and_no_name(tmp_path):
    for name in ("lab.yaml", "solution.py"):
        (tmp_path / name).write_bytes((LAB.folder / name).read_bytes())
    tests = "def test_mine(lab):\n    assert lab\n"
    items = LAB.manifest.misconceptions
    file, made = hunting.variants(tmp_path, "02-01", tests)
    assert file.read_text(encoding="utf-8") == tests
    assert list(made) == [str(number) for number in range(len(items) + 1)]
    for number, item in enumerate(items, 1):
        text = Path(made[str(number)]["file"]).read_text(encoding="utf-8")
        assert text == hunts.wrong_text(LAB, item)
    assert hunting.thoughts("02-01", [2, 1]) == [items[0].why, items[1].why]
    assert hunting.begin("02-01", 3, 0) == {
        "text": hunts.TEMPLATE.format(id="02-01"), "of": len(items),
    }  # fmt: skip


@pytest.mark.parametrize("tests", ["def test_mine(lab:\n", "x = 1\n", "\0"])
def test_tests_that_are_none_are_refused_before_anything_is_written(tmp_path, tests):
    (tmp_path / "lab.yaml").write_bytes((LAB.folder / "lab.yaml").read_bytes())
    with pytest.raises(CourseError, match=r"test_hunt\.py"):
        hunting.variants(tmp_path, "02-01", tests)
    assert not (tmp_path / hunting.TESTS).exists()


def test_a_lab_or_a_level_that_is_not_there_is_refused():
    with pytest.raises(CourseError, match="no lab '99-01'"):
        hunting.begin("99-01", 1, 0)
    with pytest.raises(ValueError, match="need 1, 2 or 3"):
        hunting.begin("02-01", 4, 0)
