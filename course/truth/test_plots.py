"""Plots: matplotlib lays out, our elements draw, the bytes repeat, and importing needs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from course.learning.labs import CourseError
from course.truth.figures import GREY, INK, ORANGE, Svg, num
from course.truth.plots import Axes


@pytest.fixture
def svg() -> Svg:
    pytest.importorskip("matplotlib", reason="plots need the figures extra")
    return Svg(300, 200, "A plot")


def elements(svg: Svg, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg.render()).iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def plot(svg: Svg) -> Axes:
    axes = Axes(svg, (40, 20, 200, 100), (1, 100), (0, 10), log_x=True)
    axes.frame("requests", "tokens < a step", (1, 10, 100), {0: "none", 10: "ten"})
    return axes


def test_points_stand_where_the_scales_say(svg):
    axes = plot(svg)
    assert [round(axes.x(value), 6) for value in (1, 10, 100)] == [40, 140, 240]
    assert [round(axes.y(value), 6) for value in (0, 5, 10)] == [120, 70, 20]


def test_ticks_are_worded_as_given_or_by_the_library(svg):
    plot(svg)
    words = [text.text for text in elements(svg, "text")]
    assert words == ["1", "10", "100", "requests", "none", "ten", "tokens < a step"]


def test_ticks_that_are_not_given_are_chosen(svg):
    axes = Axes(svg, (40, 20, 200, 100), (0, 4000), (0, 1))
    axes.frame("", "")
    words = [text.text for text in elements(svg, "text")]
    assert "1,000" in words and "0.5" in words


def test_without_a_frame_axes_are_scales_only(svg):
    Axes(svg, (40, 20, 200, 100), (0, 1), (0, 1)).curve([(0, 0), (1, 1)], ORANGE)
    (path,) = elements(svg, "path")
    assert path.attrib["d"] == "M40 120L240 20" and not elements(svg, "text")


def test_ink_and_grid_follow_the_theme_and_colours_stay(svg):
    axes = plot(svg)
    axes.rule(y=5, stroke=INK, dash=None)
    axes.curve([(1, 0), (100, 10)], ORANGE, dash="6 4")
    axes.label(1, 1, "here")
    drawn = svg.render()
    assert "ink-line" in drawn and "grid-line" in drawn and 'class="ink"' in drawn
    assert f'stroke="{ORANGE}" stroke-dasharray="6 4"' in drawn
    body = drawn.partition("</style>")[2]
    assert not {INK, "#000000", GREY} & set(re.findall("#[0-9a-f]{6}", body)), "fixed colours"


def test_dots_and_bars_carry_their_tips(svg):
    axes = plot(svg)
    axes.dots([(10, 5)], ORANGE, radius=3)
    axes.bars([(10, 4)], ORANGE, width=2, tips=["four & more"])
    (circle,) = elements(svg, "circle")
    assert (circle.attrib["r"], circle[0].text) == ("3", "10, 5")
    assert "four & more" in [title.text for title in elements(svg, "title")]


def test_a_legend_names_what_has_a_name(svg):
    axes = plot(svg)
    axes.curve([(1, 0), (100, 10)], ORANGE, name="a curve")
    axes.curve([(1, 1), (100, 9)], ORANGE)
    before = len(elements(svg, "path"))
    axes.legend(250, 20)
    assert "a curve" in [text.text for text in elements(svg, "text")]
    assert len(elements(svg, "path")) == before + 1


def test_the_same_calls_give_the_same_bytes_whatever_the_machines_settings(svg):
    import matplotlib

    def drawn() -> str:
        canvas = Svg(300, 200, "A plot")
        plot(canvas).curve([(1, 0), (100, 10)], ORANGE)
        return canvas.render()

    before = drawn()
    matplotlib.rcParams.update({"lines.linewidth": 9, "font.size": 30, "axes.grid": False})
    assert drawn() == before
    assert not re.search(r" id=|clip-path|\d\.\d{3}", before)
    assert num(1.256) == "1.26"


@pytest.mark.slow
def test_importing_needs_no_library_and_plotting_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from course.truth.plots import Axes; from course.truth.figures import Svg\n"
        "Axes(Svg(9, 9, 't'), (0, 0, 9, 9), (0, 1), (0, 1))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert CourseError.__name__ in ran.stderr and "uv run --extra figures" in ran.stderr
