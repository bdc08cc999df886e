"""Hunts on a lab's page and tries on the page of challenges, in a real browser.

The session of the page is played, but for the last test, which runs Python in the page.
"""

from __future__ import annotations

import json

import pytest

from book.test_desk import FAKE, LAB, TOO_WIDE, enter
from book.test_site import barriers

pytestmark = pytest.mark.browser

WHY, WRONG, RIGHT = "A block is full or it is not there.", "n // size", "-(-n // size)"
HUNTED = (
    FAKE.replace('{"02-01": {native: false}}', '{"02-01": {native: false, skip: {}}}')
    + """
document.addEventListener("DOMContentLoaded", () => {
    const session = window.CoursePlay.session();
    const graded = session.call;
    const WHY = "A block is full or it is not there.";
    play.asked = [];
    session.call = async (kind, payload, hear) => {
        if (kind !== "python") return graded(kind, payload, hear);
        play.asked.push(payload.function);
        return structuredClone(play.told[payload.function]);
    };
    play.told = {
        begin: {text: "return n // size", run: "n // size", tests: ["test_rounds_up"], of: 3},
        calls: ["blocks(17, 16) -> 1"],
        found: {line: 9, right: "-(-n // size)", wrong: "n // size", why: WHY},
        thoughts: [WHY],
    };
});
"""
)
FAILED = {
    "outcome": "failed",
    "when": "call",
    "error": "AssertionError",
    "frames": [],
    "printed": "",
}


def result(name: str, variant: str = "", **more) -> list[dict]:
    told = {"event": "result", "test": f"t.py::{name}", "name": name, "variant": variant}
    return [{"event": "start", "test": f"t.py::{name}"}, told | {"outcome": "passed"} | more]


def set_events(page, *results) -> None:
    told = [event for each in results for event in each]
    names = [event["test"] for event in told if event["event"] == "start"]
    page.evaluate(
        "(told) => { play.events = told }", [{"event": "collected", "tests": names}, *told]
    )


@pytest.fixture
def hunted(open_page):
    """The page of lab 02-01, its hunt unfolded."""

    def open_(**settings):
        page = open_page("social.png", **settings)
        page.add_init_script(HUNTED)
        page.goto(page.url.replace("social.png", LAB))
        enter(page)
        page.locator(".desk-hunt > summary").click()
        page.locator(".desk-hunt select").wait_for()
        return page, page.locator(".desk-hunt")

    return open_


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_a_hunt_names_its_line_when_it_is_found_and_not_before(hunted, width, theme):
    page, hunt = hunted(width=width, theme=theme)
    wrong = result("test_rounds_up", **FAILED, message="17 tokens: expected 2, came 1")
    set_events(page, wrong)
    hunt.get_by_role("button", name="Begin").click()
    hunt.get_by_text("expected 2, came 1").wait_for()
    assert page.evaluate("play.asked") == ["begin"]
    hunt.get_by_role("button", name="Check").click()
    hunt.get_by_text("1 of 1 tests fail. Not yet. 1 check so far.").wait_for()
    assert page.evaluate("play.asked") == ["begin"] and WHY not in hunt.inner_text()
    assert WHY not in page.evaluate("localStorage.getItem('course')")
    set_events(page, result("test_rounds_up"))
    hunt.get_by_role("button", name="Check").click()
    hunt.get_by_text("Found, with 2 checks.").wait_for()
    hunt.get_by_text(WHY).wait_for()
    said = hunt.locator("pre").all_inner_texts()
    assert [text.strip() for text in said] == [WRONG, RIGHT]
    assert page.evaluate(TOO_WIDE) <= 0 and page.complaints == []
    assert barriers(page, ".desk-hunt") == []
    kept = json.loads(page.evaluate("CourseStore.exported()"))["hunts"]["02-01"]
    assert (kept["level"], kept["checks"], bool(kept["found"])) == (1, 2, True)


def test_level_two_shows_calls_and_no_test(hunted):
    page, hunt = hunted()
    set_events(page, result("test_rounds_up", **FAILED, message="expected 2, came 1"))
    hunt.locator("select").select_option("2")
    hunt.get_by_role("button", name="Begin").click()
    hunt.get_by_text("blocks(17, 16) -> 1").wait_for()
    assert "expected 2" not in hunt.inner_text() and "test_rounds_up" not in hunt.inner_text()


def test_level_three_counts_the_solutions_that_ones_own_tests_catch(hunted):
    page, hunt = hunted()
    hunt.locator("select").select_option("3")
    hunt.get_by_role("button", name="Begin").click()
    hunt.get_by_text("Write tests that pass on the reference").wait_for()
    others = [result("test_mine", str(n), **(FAILED if n == 2 else {})) for n in (1, 2, 3)]
    set_events(page, result("test_mine", "0", **FAILED, message="no"), *others)
    hunt.get_by_role("button", name="Check").click()
    hunt.get_by_text("fails on the reference, so it tells nothing: test_mine: no").wait_for()
    set_events(page, result("test_mine", "0"), *others)
    hunt.get_by_role("button", name="Check").click()
    hunt.get_by_text("1 of 3 wrong solutions caught.").wait_for()
    hunt.get_by_text("2 wrong solutions pass your tests.").wait_for()
    assert page.evaluate("CourseStore.hunt('02-01').score") == 1


def test_a_line_that_fails_nothing_here_is_not_drawn(hunted):
    page, hunt = hunted()
    set_events(page, result("test_rounds_up"))
    hunt.get_by_role("button", name="Begin").click()
    hunt.get_by_text("no line was drawn that fails a test here").wait_for()
    assert page.evaluate("CourseStore.hunt('02-01')") is None


def test_a_hunt_is_there_after_a_reload_with_what_was_written(hunted):
    page, hunt = hunted()
    set_events(page, result("test_rounds_up", **FAILED, message="expected 2, came 1"))
    hunt.get_by_role("button", name="Begin").click()
    hunt.locator(".cm-content, textarea").wait_for()
    page.evaluate("CourseStore.saveHunt('02-01', {...CourseStore.hunt('02-01'), text: 'half'})")
    page.reload()
    enter(page)
    page.locator(".desk-hunt > summary").click()
    page.locator(".desk-hunt", has_text="half").wait_for()
    page.get_by_role("button", name="Show again what is known of it").wait_for()


def test_a_lab_passed_weeks_ago_comes_back_with_one_line_wrong(open_page):
    page = open_page("social.png")
    page.add_init_script(
        HUNTED
        + "document.addEventListener('DOMContentLoaded', () => CourseStore.saveResult('02-01',"
        " {passed: 2, total: 2, ok: true, at: '2026-01-01T00:00:00.000Z'}));"
    )
    page.goto(page.url.replace("social.png", LAB))
    enter(page)
    page.get_by_role("button", name="Hunt", exact=True).click()
    page.locator(".desk-hunt select").wait_for()


def test_at_home_the_hunt_is_there_too_and_without_a_runtime_its_command(at_home):
    at_home.add_init_script(HUNTED)
    at_home.reload()
    enter(at_home)
    set_events(at_home, result("test_rounds_up", **FAILED, message="expected 2, came 1"))
    at_home.locator(".desk-hunt > summary").click()
    at_home.locator(".desk-hunt").get_by_role("button", name="Begin").click()
    at_home.locator(".desk-hunt").get_by_text("expected 2, came 1").wait_for()
    bare = at_home.context.new_page()
    bare.route("**/play/index.js*", lambda route: route.fulfill(body=""))
    bare.goto(at_home.url)
    desk = enter(bare)
    assert "course hunt 02-01" in desk.inner_text() and not bare.locator(".desk-hunt").count()


# ------------------------------------------------------------------ tries

TRIES = [
    {"when": f"2026-02-0{day}T10:00:00+00:00", "digest": f"{day:012x}", "score": score, "fresh": 1,
     "seed": "s", "marks": [], "outcome": outcome, "why": why, "note": f"idea {day}", "text": "x"}
    for day, score, outcome, why in (
        (1, 90000, "kept", ""), (2, 95000, "rejected", ""),
        (3, 0, "rejected", "it never ends\n" + 4000 * "x"), (4, 30000, "kept", ""),
    )
]  # fmt: skip


def with_tries(page) -> None:
    data = {"format": "course-progress", "version": 1, "edits": {}, "results": {}, "answers": {},
            "read": {}, "tries": {"queue": {"tries": TRIES, "at": TRIES[-1]["when"]}}}  # fmt: skip
    page.evaluate("(text) => CourseStore.imported(text)", json.dumps(data))


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_tries_are_plotted_beside_the_marks_and_stay_when_taken_twice(open_page, width, theme):
    page = open_page("CHALLENGES.html", width=width, theme=theme)
    assert "once this browser has them" in page.locator(".tries").inner_text()
    with_tries(page)
    with_tries(page)
    page.reload()
    plot = page.locator(".tries svg")
    assert plot.locator("circle.tries-kept").count() == 2
    assert plot.locator("circle.tries-rejected").count() == 1
    assert plot.locator(".tries-none").count() == 1
    assert "vLLM's 37,030" in plot.text_content()
    page.locator(".tries summary").click()
    assert "it never ends" in page.locator(".tries table").inner_text()
    assert page.evaluate(TOO_WIDE) <= 0 and page.complaints == []
    assert barriers(page, ".tries") == []
    kept = json.loads(page.evaluate("CourseStore.exported()"))["tries"]["queue"]["tries"]
    assert kept == TRIES


# ------------------------------------------------------------------ Python in the page


def test_level_three_is_scored_by_python_in_the_page(site, open_page):
    if not (site / "play" / "index.js").is_file():
        pytest.skip("needs course book runtime")
    page = open_page("phase-03-continuous-batching-scheduler/labs/lab-01-scheduler-step/index.html")
    enter(page)
    page.locator(".desk-hunt > summary").click()
    hunt = page.locator(".desk-hunt")
    hunt.locator("select").select_option("3")
    hunt.get_by_role("button", name="Begin").click()
    hunt.get_by_text("Write tests that pass on the reference").wait_for()
    hunt.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text("def test_mine(lab):\n    assert lab.clamp(-3, 10, 4) == 0\n")
    hunt.get_by_role("button", name="Check").click()
    hunt.get_by_text("Caught: min of three numbers is enough.").wait_for()
    assert "of 52 wrong solutions caught" in hunt.locator(".desk-verdict").inner_text()
