"""The spine is a way of labs that exist, at the hours that its page tells."""

from __future__ import annotations

from course.learning import spines
from course.learning.labs import find_labs, find_root


def test_the_spine_is_about_twenty_six_hours_of_labs_in_course_order_of_phases():
    labs = spines.of(find_labs(find_root()))
    assert [lab.id for lab in labs] == list(spines.SPINE)
    assert 24 * 60 <= sum(lab.manifest.minutes for lab in labs) <= 27 * 60
    phases = [lab.phase for lab in labs]
    assert phases == sorted(phases)


def test_the_command_says_what_is_left(course, little_course, monkeypatch):
    monkeypatch.setattr(spines, "SPINE", ("90-00",))
    said = course("--spine")
    assert said.code == 0 and "5 min of labs left on the spine" in said.out
    assert "build   write a part of an engine" in said.out
    assert "--spine goes with no command" in course("--spine", "check").err
