"""Finding the course and the lab a learner means."""

from __future__ import annotations

import pytest

from course.conftest import REPOSITORY
from course.learning.labs import CourseError, find_labs, find_root, pick


def test_the_root_is_found_from_inside_a_lab_folder(little_course):
    assert find_root(little_course / "phase-90-little" / "labs") == little_course.resolve()


def test_outside_a_checkout_the_tools_own_repository_is_the_root(tmp_path):
    assert find_root(tmp_path) == REPOSITORY.resolve()


def test_labs_come_in_course_order(little_course):
    assert [lab.id for lab in find_labs(little_course)] == ["90-00", "90-01"]


def test_the_order_within_a_phase_is_that_of_the_labs_page(little_course):
    page = little_course / "phase-90-little" / "labs" / "README.md"
    first, second = (lab.folder.name for lab in find_labs(little_course))
    page.write_text(f"[b]({second}/README.md), [a]({first}/README.md), [b]({second}/README.md)")
    assert [lab.id for lab in find_labs(little_course)] == ["90-01", "90-00"]
    page.write_text(f"[b]({second}/README.md), the other is not linked")
    assert [lab.id for lab in find_labs(little_course)] == ["90-01", "90-00"]


@pytest.mark.parametrize("name", ["90-01", "90-1", "90.1", "blocks-1", "lab-01-blocks-1"])
def test_a_lab_goes_by_its_number_or_a_part_of_its_folders_name(little_course, name):
    assert pick(find_labs(little_course), name).id == "90-01"


def test_a_lab_goes_by_the_path_of_a_file_in_it(little_course, monkeypatch):
    monkeypatch.chdir(little_course)
    path = "phase-90-little/labs/lab-01-blocks-1/starter.py"
    assert pick(find_labs(little_course), path).id == "90-01"


def test_an_ambiguous_name_is_refused_with_the_candidates(little_course):
    with pytest.raises(CourseError, match=r"fits several labs: 90-00 .*, 90-01 "):
        pick(find_labs(little_course), "blocks")


def test_an_unknown_name_is_refused_with_the_labs_there_are(little_course):
    with pytest.raises(CourseError, match=r"There is no lab '17-03'. The labs are: 90-00, 90-01."):
        pick(find_labs(little_course), "17-03")
