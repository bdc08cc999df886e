"""The museum's rooms in a real browser: first a decision, then who has the bug."""

from __future__ import annotations

from typing import Any

import pytest

from book.beside import beside
from book.test_site import barriers, page_with
from conformance.museum import EXHIBITS, mini
from course.site import live_real, play
from course.site.widgets import museum_rooms

pytestmark = pytest.mark.browser


@pytest.fixture
def museum(site, open_page):
    def find(prepare: Any = None, **settings: Any) -> Any:
        page = open_page(page_with(site, "museum-rooms"), prepare=prepare, **settings)
        page.locator('[data-widget="museum-rooms"][data-ready]').wait_for()
        return page

    return find


def decide(page: Any, number: int, room: str, step: int | None = None) -> None:
    """Choose a bug, say which rule breaks and in which step, and run it."""
    box = page.locator(".museum")
    box.get_by_label("A bug of vLLM").select_option(f"{number}: {EXHIBITS[number].title}")
    box.get_by_role("button", name=room, exact=True).click()
    if step is not None:
        box.locator('[data-input="step"]').fill(str(step))
    box.locator(".museum-go").click()


def answers(page: Any) -> list[tuple[str, str, list[str]]]:
    """How each answered, whether it has the bug, and its lines."""
    found = page.locator(".museum-answers > div")
    found.first.wait_for()
    return [
        (each.get_attribute("data-how"), each.get_attribute("data-broken") == "true",
         each.locator("li").all_inner_texts())
        for each in found.all()
    ]  # fmt: skip


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_a_bug_is_decided_before_it_is_shown_and_each_answer_says_where_it_is_from(
    museum, monkeypatch, width, theme
):
    monkeypatch.setattr(live_real, "releases", lambda: [])
    page = museum(beside(museum_rooms), width=width, theme=theme)
    box = page.locator(".museum")
    box.locator(".museum-go").click()
    box.get_by_text("Choose a rule first.").wait_for()
    box.get_by_role("button", name="order", exact=True).click()
    box.locator(".museum-go").click()
    box.get_by_text("Say a step first.").wait_for()
    assert box.locator(".museum-answers > div").count() == 0
    for number, room, step, verdict in (
        (49097, "order", 2, "progress; you said order. In step 2, as you said."),
        (37307, "progress", 3, "progress, as you said. In step 7; you said 3."),
        (33270, "accounting", None, "accounting, as you said."),
    ):
        decide(page, number, room, step)
        box.get_by_text(verdict, exact=True).wait_for()
        told = [(e["how"], e["broken"], e["lines"]) for e in museum_rooms.ask(number)]
        assert answers(page) == told
    assert "3 of 24 seen, 2 named at the first try" in box.inner_text()
    assert "No part of the mini engine has this bug" in box.inner_text()
    assert barriers(page, ".museum") == []
    beside_one_another = page.locator(".museum-answers").evaluate(
        "(e) => getComputedStyle(e).display"
    )
    assert beside_one_another == "grid"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []


def test_without_python_in_the_page_what_was_recorded_is_shown(museum):
    page = museum(lambda page: page.route("**/play/index.js*", lambda route: route.abort()))
    assert page.locator(".museum-go").inner_text() == "Show what was recorded"
    decide(page, 52482, "ownership")
    assert [how for how, _, _ in answers(page)] == ["recorded", "recorded"]


@pytest.mark.slow
@pytest.mark.skipif(bool(play.problem(live_real.ROOT)), reason="needs course book runtime")
def test_in_the_page_the_mini_part_and_the_pin_decide_line_by_line_alike(museum):
    page = museum()
    decide(page, 49097, "progress", 2)
    told = answers(page)
    assert [how for how, _, _ in told[:2]] == ["mini", "run"]
    assert told[0][2] == told[1][2]
    assert told[0][2] == list(mini.PARTS[49097].show().lines)
    assert page.complaints == []
