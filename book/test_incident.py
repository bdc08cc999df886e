"""The page of incidents in a real browser: a cause held against a day, a knob, what is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from book.beside import beside
from book.test_desk import TOO_WIDE
from book.test_site import barriers
from course.incidents import judge
from course.site import play
from course.site.widgets import incident_days

pytestmark = pytest.mark.browser


@pytest.fixture
def opened(open_page):
    """The page, with Python beside it; `in_page`: in it."""

    def find(in_page: bool = False, **settings: Any) -> Any:
        prepare = None if in_page else beside(incident_days)
        page = open_page("INCIDENTS.html", prepare=prepare, **settings)
        page.locator('[data-widget="incident-days"][data-ready]').wait_for()
        return page, page.locator(".incident")

    return find


def hold(box: Any, cause: str) -> None:
    box.get_by_label("Cause").select_option(cause)
    box.get_by_role("button", name="Hold it against the recording").click()


def turn(box: Any, knob: str, value: str) -> None:
    box.get_by_label("Turn").select_option(knob)
    box.get_by_label("to", exact=True).fill(value)
    box.get_by_role("button", name="Replay the day").click()


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_a_cause_is_contradicted_or_stands_and_a_knob_is_turned_and_all_is_kept(
    opened, width, theme
):
    page, box = opened(width=width, theme=theme)
    box.get_by_label("Day").select_option("friday")
    day = judge.load("friday")
    shown = box.inner_text()
    assert day.told.complaint in shown and "Avg prompt throughput" in shown
    assert not box.locator(".incident-fix").is_visible()
    hold(box, "budget")
    found = judge.contradiction(day, "budget")
    box.get_by_text(f"{found.file}, line {found.line}, contradicts budget").wait_for()
    box.get_by_text(found.quoted[:60]).wait_for()
    assert not box.locator(".incident-fix").is_visible()
    hold(box, "max-num-seqs")
    box.get_by_text("Nothing that was recorded contradicts max-num-seqs.").wait_for()
    turn(box, "max_num_batched_tokens", "many")
    box.get_by_text("need a whole number").wait_for()
    turn(box, "max_num_batched_tokens", "4096")
    missed = judge.replay(day, "max_num_batched_tokens", "4096").missed
    box.get_by_text(f"Not yet: {missed}.").wait_for()
    turn(box, "max_num_seqs", "8")
    box.get_by_text("The limit holds with max_num_seqs=8.").wait_for()
    assert page.evaluate(TOO_WIDE) <= 0 and page.complaints == []
    assert barriers(page, ".incident") == []
    kept = json.loads(page.evaluate("CourseStore.exported()"))["incidents"]
    assert list(kept) == ["friday"] and kept["friday"].pop("at")
    fixed = {"cause": "max-num-seqs", "fix": "max_num_seqs=8", "replays": 2, "wrong": ["budget"]}
    assert kept["friday"] == fixed
    page.reload()
    box.get_by_label("Day").select_option("friday")
    box.get_by_text("The limit held with max_num_seqs=8.").wait_for()
    box.get_by_label("File").select_option("trace.jsonl.gz")
    box.get_by_role("button", name="Show all of it").click()
    box.locator(".incident-whole").get_by_text('"flight":1').wait_for()


def test_without_a_runtime_the_page_names_the_command(open_page):
    def bare(page: Any) -> None:
        page.route("**/play/index.js*", lambda route: route.fulfill(body=""))

    page = open_page("INCIDENTS.html", prepare=bare)
    page.locator(".incident").get_by_text("In a checkout: course incident").wait_for()
    assert page.locator(".incident button:enabled").count() == 0


@pytest.mark.slow
@pytest.mark.skipif(bool(play.problem(judge.ROOT)), reason="needs course book runtime")
def test_the_page_itself_judges_and_replays(opened):
    page, box = opened(in_page=True)
    hold(box, "preemption")
    box.get_by_text("metrics.txt, line").wait_for()
    hold(box, "head-needs-blocks")
    box.get_by_text("Nothing that was recorded contradicts head-needs-blocks.").wait_for()
    turn(box, "policy", "priority")
    box.get_by_text("The limit holds with policy=priority.").wait_for()
    assert page.complaints == []
