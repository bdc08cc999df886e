"""The SVG writer: same bytes for same calls, well-formed XML, and a check that notices."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from course.truth.figures import Svg, collect, num, stale


def draw() -> str:
    svg = Svg(200, 100, "A <title> & more", "What it shows")
    svg.text(10, 20, 'a < b & "c"', bold=True, rotate=-90)
    svg.box(5, 5, 50, 30, ["one", "two"])
    svg.line(0, 0, 10, 10, arrow=True)
    svg.later(lambda: '<path d="M0 0"/>')
    return svg.render()


def test_rendering_is_well_formed_and_repeatable():
    assert draw() == draw()
    root = ElementTree.fromstring(draw())
    assert root.findtext("{http://www.w3.org/2000/svg}title") == "A <title> & more"


def test_text_follows_the_theme():
    assert "prefers-color-scheme:dark" in draw()


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, "1"), (1.256, "1.26"), (-0.001, "0"), (10, "10"), (0.5, "0.5")]
)
def test_coordinates_are_short(value, expected):
    assert num(value) == expected


def test_a_missing_a_changed_and_an_orphaned_figure_are_stale(tmp_path):
    figures = {"a.svg": lambda: "new", "b.svg": lambda: "b"}
    (tmp_path / "b.svg").write_text("b")
    assert stale(tmp_path, figures) == {"a.svg": "new"}
    (tmp_path / "a.svg").write_text("old")
    (tmp_path / "gone.svg").write_text("nobody draws it")
    assert stale(tmp_path, figures) == {"a.svg": "new", "gone.svg": ""}


@pytest.mark.slow
def test_the_command_writes_what_is_stale_and_check_says_it(course, little_course):
    folder = little_course / "phase-90-little" / "figures"
    folder.mkdir()
    (folder / "figures_a.py").write_text("FIGURES = {'a.svg': lambda: '<svg/>'}")
    ran = course("figures", "--check")
    assert ran.code == 1 and "phase-90-little/figures/a.svg is not what its script draws" in ran.out
    assert course("figures", "90").code == 0 and (folder / "a.svg").read_text() == "<svg/>"
    assert course("figures", "--check").out == "1 figures, all up to date\n"
    assert "There are no figures in '17'" in course("figures", "17").err


def test_figures_of_a_folder_are_collected_and_none_may_be_drawn_twice(tmp_path):
    (tmp_path / "figures_a.py").write_text("FIGURES = {'one.svg': lambda: 'a'}\n")
    (tmp_path / "figures_b.py").write_text("FIGURES = {'two.svg': lambda: 'b'}\n")
    (tmp_path / "other.py").write_text("raise AssertionError('not a figures_ file')\n")
    found = collect(tmp_path)
    assert {name: draw() for name, draw in found.items()} == {"one.svg": "a", "two.svg": "b"}
    (tmp_path / "figures_c.py").write_text("FIGURES = {'one.svg': lambda: 'c'}\n")
    with pytest.raises(ValueError, match=r"figures_c.py: one.svg is drawn twice"):
        collect(tmp_path)
