"""`course hunt`: what is drawn, what is told before and after, and what a learner's tests catch."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from course.conftest import REPOSITORY
from course.learning import hunts
from course.learning.labs import find_labs, pick
from course.learning.progress import Progress
from labkit.calls import LONGEST, watch

WRONG, RIGHT = "num_tokens // block_size", "-(-num_tokens // block_size)"
WHY = "A block is full or it is not there, so I divide."
LABS = find_labs(REPOSITORY)


@pytest.fixture
def lab(little_course):
    return find_labs(little_course)[0]


def test_a_seed_draws_one_line_and_other_seeds_draw_others():
    lab = pick(LABS, "02-01")
    assert hunts.drawn(lab, 5) == hunts.drawn(lab, 5)
    assert len({hunts.drawn(lab, seed).name for seed in range(60)}) > len(hunts.pool(lab)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("lab", [lab for lab in LABS if hunts.pool(lab)], ids=lambda lab: lab.id)
def test_every_line_of_the_pool_changes_one_place_of_its_reference(lab):
    for item in hunts.pool(lab):
        number, right, wrong = hunts.changed_line(lab, item)
        assert number > 0 and right != wrong


@pytest.mark.slow
def test_a_hunt_shows_the_failure_and_neither_the_line_nor_its_reason(course, little_course, lab):
    ran = course("hunt", "90-00", "--seed", "1")
    assert ran.code == 0
    assert "17 tokens need a second block of 16: expected 2, came 1" in ran.out
    assert WHY not in ran.out and WRONG not in ran.out
    text = (hunts.folder_of(little_course, lab) / "hunt.py").read_text()
    assert WRONG in text and RIGHT not in text
    assert "floor" not in (hunts.folder_of(little_course, lab) / "hunt.json").read_text()


@pytest.mark.slow
def test_level_two_shows_calls_and_no_test(course):
    ran = course("hunt", "90-00", "--level", "2", "--seed", "1")
    assert "num_blocks(17, 16) -> 1" in ran.out
    assert "expected" not in ran.out and "test_rounds_up" not in ran.out


@pytest.mark.slow
def test_it_is_found_when_the_line_is_mended(course, little_course, lab):
    course("hunt", "90-00", "--seed", "1")
    ran = course("hunt", "--check")  # the open one
    assert ran.code == 1 and "Not yet. 1 check so far." in ran.out and WHY not in ran.out
    file = hunts.folder_of(little_course, lab) / "hunt.py"
    file.write_text(file.read_text().replace(WRONG, RIGHT))
    ran = course("hunt", "90-00", "--check")
    assert ran.code == 0
    assert "Found, with 2 checks." in ran.out and WHY in ran.out
    kept = hunts.read(little_course, lab)
    assert kept is not None and kept.checks == 2 and not kept.is_open


@pytest.mark.slow
def test_level_three_counts_the_wrong_solutions_that_tests_of_ones_own_catch(
    course, little_course, lab
):
    course("hunt", "90-00", "--level", "3")
    file = hunts.folder_of(little_course, lab) / "test_hunt.py"
    for body, said, code in (
        ("assert lab.num_blocks(16, 16) == 1", "0 of 1 wrong solutions caught.", 1),
        ("assert lab.num_blocks(17, 16) == 2", "1 of 1 wrong solutions caught.", 0),
        ("assert lab.num_blocks(17, 16) == 1", "A test of yours fails on the reference", 1),
    ):
        file.write_text(f"def test_mine(lab):\n    {body}\n")
        ran = course("hunt", "90-00", "--check")
        assert (said in ran.out, ran.code) == (True, code)
    file.write_text("def mine(lab: pass")
    assert "line 1" in course("hunt", "90-00", "--check").err
    file.write_bytes(b"\xff\xfe")
    assert "test_hunt.py is not Python" in course("hunt", "90-00", "--check").err
    file.write_text("def mine(lab): pass")
    assert "no function that begins with test" in course("hunt", "90-00", "--check").err


@pytest.mark.slow
def test_a_lab_passed_two_weeks_ago_is_due_until_its_hunt_is_found(course, little_course, lab):
    lab.starter.write_text(f"def num_blocks(num_tokens, block_size):\n    return {RIGHT}\n")
    course("check", "90-00")
    progress, labs = Progress(little_course), find_labs(little_course)
    later = datetime.now(UTC) + hunts.REVIEW_AFTER + timedelta(minutes=1)
    assert hunts.due(little_course, labs, progress) == []
    assert hunts.due(little_course, labs, progress, later) == [lab]
    hunt, _ = hunts.begin(little_course, lab, 1, 0)
    assert hunts.due(little_course, labs, progress, later) == []  # it is open
    hunt.found = later.isoformat()
    hunts.keep(little_course, lab, hunt)
    assert hunts.due(little_course, labs, progress, later) == []
    assert hunts.due(little_course, labs, progress, later + hunts.REVIEW_AFTER) == [lab]


@pytest.mark.slow
def test_what_was_written_in_a_hunt_is_kept_when_another_begins(course, little_course, lab):
    folder, backup = hunts.folder_of(little_course, lab), little_course / ".course" / "backup"
    course("hunt", "90-00", "--level", "3")
    assert "kept" not in course("hunt", "90-00", "--level", "3").out and not backup.exists()
    (folder / "test_hunt.py").write_text("# an evening's work\n")
    assert "is kept as .course/backup/hunt-90-00-" in course("hunt", "90-00", "--seed", "1").out
    (folder / "hunt.py").write_text("# half mended\n")
    course("hunt", "90-00", "--level", "2")
    texts = [file.read_text() for file in sorted(backup.iterdir())]
    assert texts == ["# an evening's work\n", "# half mended\n"]


@pytest.mark.slow
def test_what_cannot_be_hunted_is_refused_by_name(course, little_course, lab):
    for level in ("0", "4"):
        assert "need 1, 2 or 3" in course("hunt", "90-00", "--level", level).err
    assert "--check grades the one that is open" in course("hunt", "--check", "--seed", "3").err
    assert "No hunt is open in 90-00" in course("hunt", "90-00", "--check").err
    assert "No lab is passed yet" in course("hunt").err
    hunts.begin(little_course, lab, 1, 0)
    (hunts.folder_of(little_course, lab) / "hunt.json").write_text(json.dumps({"lab": 1}))
    assert hunts.read(little_course, lab) is None


def test_watched_calls_behave_as_before_and_are_said_in_bounded_lines():
    class Counter:
        def __init__(self):
            self.at = 0

        def add(self, number, *, twice=False):
            self.at += number * (2 if twice else 1)
            return self.at

        def fail(self):
            raise KeyError("x" * 1000)

        def items(self):
            yield self.at

    def long():
        return "y" * 10_000

    lines: list[str] = []
    module = {"Counter": Counter, "long": long}
    watch(module, ["Counter.add", "Counter.fail", "Counter.items", "long"], lines.append)
    counter = Counter()
    assert counter.add(2) == 2 and counter.add(3, twice=True) == 8
    with pytest.raises(KeyError):
        counter.fail()
    assert list(counter.items()) == [8] and len(module["long"]()) == 10_000
    assert lines[:3] == [
        "Counter.add(2) -> 2", "Counter.add(3, twice=True) -> 8", "Counter.fail() raises KeyError",
    ]  # fmt: skip
    assert len(lines) == 4 and len(lines[3]) <= LONGEST
