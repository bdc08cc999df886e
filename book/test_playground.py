"""The playground in a real browser, with the same Python beside the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from book.beside import beside
from book.test_site import barriers
from conformance.real_core import why_not
from course.site import live, live_real, vllm_live

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
PAGE = "PLAYGROUND.html"


@pytest.fixture
def playground(open_page):
    """The playground at rest, or with the run of a fragment."""

    def find(fragment: str = "", **settings: Any) -> Any:
        page = open_page(PAGE + fragment, prepare=beside(vllm_live), **settings)
        page.locator('[data-widget="vllm-live"][data-ready]').wait_for()
        return page

    return find


def decide(page: Any) -> None:
    page.get_by_role("button", name="Let both decide").click()
    page.locator(".live-question button").first.wait_for()


def columns(page: Any) -> list[int]:
    """How many steps of each chart have a cell."""
    drawn = "[...table.querySelectorAll('td:not(.line-absent)')].map((cell) => cell.cellIndex)"
    return page.locator(".live .line-scroll table").evaluate_all(
        f"(tables) => tables.map((table) => new Set({drawn}).size)"
    )


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "navy"])
def test_a_prediction_comes_before_what_both_decide(playground, width, theme):
    page = playground(width=width, theme=theme)
    decide(page)
    begin = live.defaults()
    told = vllm_live.play(begin["settings"], begin["requests"])
    frames = enumerate(told["real"])
    at = next(place for place, frame in frames if frame["total"] and frame["total"]["preempted"])
    assert columns(page) == [at - 1, at - 1]
    assert page.locator(".real-verdict").inner_text() == ""
    page.locator(".live-question").get_by_role("button", name="E", exact=True).click()
    assert "Right: E." in page.locator(".live-question").inner_text()
    assert columns(page) == [31, 31]
    assert (
        page.locator(".real-verdict").inner_text().startswith("31 steps, the same in vLLM 0.22.1")
    )
    sides = page.locator("[data-side]")
    assert sides.count() == 2
    for side in sides.all():
        facts = side.locator(".vllm-facts dd").all_inner_texts()
        assert facts[0].split() == told["real"][at]["running"]
        assert [int(b) for b in facts[3].split()] == told["real"][at]["pool"]["free"]
    assert page.locator(".real-other").count() == 0
    assert barriers(page, ".live") == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []


def test_another_run_hides_what_was_decided_and_two_edits_are_both_kept(playground):
    page = playground()
    decide(page)
    page.get_by_role("button", name="Show me").click()
    page.get_by_label("outputs of A").fill("3")
    page.get_by_label("outputs of B").fill("4")
    page.get_by_label("outputs of B").press("Tab")
    assert page.locator(".vllm-pair").is_hidden()
    decide(page)
    assert "r=3.0.0.Each+step" in page.url and "r=4.0.0.The+scheduler" in page.url


def test_the_address_holds_the_run(playground):
    page = playground()
    page.locator('input[data-setting="blocks"]').evaluate(
        "(field) => { field.value = 14; field.dispatchEvent(new Event('input')); }"
    )
    decide(page)
    fragment = page.url.partition("#")[2]
    assert fragment.startswith("vllm=0.22.1&beside=0.22.1&live=1&blocks=14")
    again = playground(f"#{fragment}")
    again.locator(".live-question button").first.wait_for()
    assert again.locator('input[data-setting="blocks"]').input_value() == "14"


def test_a_link_that_leads_nowhere_is_said(playground):
    page = playground("#vllm=9.9.9&beside=0.22.1&live=1&r=4.0.0.a&at=0")
    page.wait_for_function("document.querySelector('.live-trouble').textContent !== ''")
    assert "release='9.9.9': not here; there are" in page.locator(".live-trouble").inner_text()


@pytest.mark.skipif(bool(why_not("0.33.0")), reason=why_not("0.33.0"))
def test_the_first_difference_is_said_and_marked_in_both(playground):
    page = playground()
    page.get_by_label("Release of vLLM").select_option("0.33.0")
    page.get_by_label("Rules of mini_vllm").select_option("0.22.1")
    decide(page)
    page.get_by_role("button", name="Show me").click()
    assert "Step 12 is the first that differs" in page.locator(".real-verdict").inner_text()
    assert page.locator(".vllm-parts").all_inner_texts() == ["12", "12"]
    assert page.locator(".real-other").count() >= 2


def test_a_site_that_was_built_without_the_tree_says_how_to_get_it(open_page):
    here = json.dumps(live_real.releases(), separators=(",", ":"))

    def without(page: Any) -> None:
        def changed(route: Any) -> None:
            html = route.fetch().text()
            assert here in html
            route.fulfill(body=html.replace(here, "[]"), content_type="text/html")

        beside(vllm_live)(page)
        page.route(f"**/{PAGE}", changed)

    page = open_page(PAGE, prepare=without)
    page.locator('[data-widget="vllm-live"][data-ready]').wait_for()
    box = page.locator('[data-widget="vllm-live"] .live')
    assert "cannot ask vLLM" in box.inner_text()
    assert "course upstream fetch" in box.inner_text()
    assert box.locator("img").count() == 1
