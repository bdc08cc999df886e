"""The SVG writer: same bytes for same calls, well-formed XML, and a check that notices."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from course.truth.figures import Axes, Svg, collect, num, write_or_check


def draw() -> str:
    svg = Svg(200, 100, "A <title> & more", "What it shows")
    svg.text(10, 20, 'a < b & "c"', bold=True, rotate=-90)
    svg.box(5, 5, 50, 30, ["one", "two"])
    svg.line(0, 0, 10, 10, arrow=True)
    axes = Axes(svg, (20, 10, 100, 50), (1, 100), (0, 10), log_x=True)
    axes.frame("x", "y", {1: "1", 10: "10"}, {0: "0", 10: "10"})
    axes.curve([(1, 0), (10, 5), (100, 10)], "#123456")
    axes.dots([(10, 5)], "#123456")
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


def test_log_axis_places_decades_evenly():
    axes = Axes(Svg(1, 1, "t"), (0, 0, 100, 100), (1, 100), (1, 100), log_x=True, log_y=True)
    assert (axes.x(1), axes.x(10), axes.x(100)) == (0, 50, 100)
    assert (axes.y(1), axes.y(100)) == (100, 0)


def test_check_reports_a_stale_or_missing_figure(tmp_path, capsys):
    figures = {"a.svg": draw}
    assert write_or_check(figures, tmp_path, ["--check"]) == 1
    assert write_or_check(figures, tmp_path, []) == 0
    assert write_or_check(figures, tmp_path, ["--check"]) == 0
    (tmp_path / "a.svg").write_text("old")
    assert write_or_check(figures, tmp_path, ["--check"]) == 1
    assert "a.svg" in capsys.readouterr().out


def test_figures_of_a_folder_are_collected_and_none_may_be_drawn_twice(tmp_path):
    (tmp_path / "figures_a.py").write_text("FIGURES = {'one.svg': lambda: 'a'}\n")
    (tmp_path / "figures_b.py").write_text("FIGURES = {'two.svg': lambda: 'b'}\n")
    (tmp_path / "other.py").write_text("raise AssertionError('not a figures_ file')\n")
    found = collect(tmp_path)
    assert {name: draw() for name, draw in found.items()} == {"one.svg": "a", "two.svg": "b"}
    (tmp_path / "figures_c.py").write_text("FIGURES = {'one.svg': lambda: 'c'}\n")
    with pytest.raises(ValueError, match=r"figures_c.py: one.svg is drawn twice"):
        collect(tmp_path)
