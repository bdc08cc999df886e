"""`course new lab`: what it writes is a sound lab but for the words to fill in."""

from __future__ import annotations

import pytest

from course.learning.labs import find_labs
from course.truth import new_lab


def fill_in(lab) -> None:
    for name in new_lab.WRITTEN:
        path = lab.folder / name
        path.write_text(path.read_text().replace(new_lab.MARK, "Said"), encoding="utf-8")


@pytest.mark.slow
def test_the_skeleton_passes_selfcheck_once_it_is_filled_in(course, little_course):
    said = course("new", "lab", "90", "count-blocks").out
    assert "labs/lab-02-count-blocks/solution.py" in said
    (lab,) = (lab for lab in find_labs(little_course) if lab.id == "90-02")
    assert sorted(path.name for path in lab.folder.iterdir()) == sorted(new_lab.WRITTEN)
    assert course("starters", "90-02").code == 0
    ran = course("selfcheck", "90-02")
    assert ran.code == 1 and "lines still say FILL IN: lab.yaml:2, lab.yaml:11" in ran.out
    assert ran.out.count("\n      ") == 1, "it is the only thing to mend"
    (lab.folder / "README.md").unlink()
    fill_in(lab)
    assert course("starters", "90-02").code == 0
    ran = course("selfcheck", "90-02")
    assert ran.code == 0 and "2 tests, 3 misconceptions caught, 0 labs to mend" in ran.out


@pytest.mark.slow
def test_the_first_page_holds_what_the_three_files_say(course, little_course):
    course("new", "lab", "90", "count-blocks")
    lab = find_labs(little_course)[-1]
    fill_in(lab)
    said = course("starters", "90-02").out
    assert "README.md is written" in said and "predictions.yaml is written" in said
    page = (lab.folder / "README.md").read_text()
    assert page.startswith("# Lab 90-02: Said what the learner builds, as an order [CPU-OK]\n")
    assert "- `num_blocks(num_tokens, block_size)`: Said what must hold" in page
    assert "- `test_bad_arguments_are_refused`: Said: an argument" in page
    assert (lab.folder / "predictions.yaml").read_text().endswith("not committed\nblocks:\n")
    (lab.folder / "README.md").write_text("A writer's page.\n")
    course("starters", "90-02")
    assert (lab.folder / "README.md").read_text() == "A writer's page.\n"


def test_a_new_phase_is_begun_by_its_folders_name(course, little_course):
    assert course("new", "lab", "phase-91-other", "first", "--number", "4").code == 0
    lab = find_labs(little_course)[-1]
    assert (lab.id, lab.phase) == ("91-04", "phase-91-other")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["90", "Count_Blocks"], "slug 'Count_Blocks' must be lower-case words"),
        (["17", "count"], "There is no phase '17'. There are: 90."),
        (["90", "count", "--number", "1"], "lab 01 of phase-90-little is lab-01-blocks-1 already"),
        (["90", "count", "--number", "100"], "number 100 must be 1 to 99"),
    ],
)
def test_what_cannot_be_begun_is_refused_in_words(course, arguments, complaint):
    ran = course("new", "lab", *arguments)
    assert ran.code == 2 and complaint in ran.err
