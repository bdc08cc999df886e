"""Where a reader is, answers given in the page, and the search: in a real browser."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest

from book.test_site import LOOKS, TOO_WIDE, barriers
from course.site import answers, book_site
from course.site.local import Local

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[1]
PHASE = "phase-02-paged-attention"
LANDING = f"{PHASE}/index.html"
LABS_ONLY = "phase-19-capstone-maintainer-and-startup/index.html"
EXERCISES = f"{PHASE}/EXERCISES.html"
AT = "2026-11-20T10:00:00.000Z"
FIRST_ANSWER_LIMIT = 100_000
"""Bytes, compressed, that the first answer may need: half a second at 1.6 Mbit/s."""
SIDEBAR_SCREENS = 2.6


def kept(**parts) -> str:
    """What the browser keeps, as CourseStore writes it."""
    empty = {"version": 1, "edits": {}, "older": {}, "results": {}, "answers": {}, "read": {}}
    return json.dumps(empty | parts)


def passed(*labs: str) -> dict:
    return {lab: {"passed": 9, "total": 9, "ok": True, "at": AT} for lab in labs}


@pytest.fixture
def open_with(open_page):
    """Open a page in a browser that keeps something already."""

    def open_(path: str, document: str, **settings):
        page = open_page(path, **settings)
        page.evaluate("text => localStorage.setItem('course', text)", document)
        page.reload()
        return page

    return open_


# ------------------------------------------------------------------ landing pages


@pytest.mark.parametrize(("width", "theme"), LOOKS)
@pytest.mark.parametrize("path", [LANDING, LABS_ONLY, EXERCISES])
def test_pages_with_places_fit_and_have_no_serious_barrier(open_with, path, width, theme):
    answers = {"02-ex-01": {"given": "7.5", "right": True, "at": AT},
               "02-ex-02": {"given": "2", "right": False, "at": AT}}  # fmt: skip
    document = kept(results=passed("02-01", "19-05"), answers=answers)
    page = open_with(path, document, width=width, theme=theme)
    assert page.evaluate(TOO_WIDE) == []
    assert barriers(page) == []
    assert page.complaints == []


def test_without_javascript_a_landing_page_leads_everywhere_and_shows_no_progress(open_page):
    page = open_page(LANDING, javascript=False)
    assert page.locator(".place-map a").count() == 13
    assert page.get_by_role("link", name="Start with the guide").is_visible()
    assert not page.locator(".place-now").is_visible()
    page = open_page(EXERCISES, javascript=False)
    assert page.locator(".answer-box").count() > 5
    assert not any(box.is_visible() for box in page.locator(LINES).all())


def test_a_landing_page_prints_its_map_and_not_its_buttons(open_with):
    page = open_with(LANDING, kept(results=passed("02-01")))
    page.emulate_media(media="print")
    assert page.locator(".place-map").is_visible()
    for gone in (".place-start", ".place-now", ".place-bar >> nth=0", ".neighbours"):
        assert not page.locator(gone).first.is_visible(), gone


def test_the_home_page_leads_to_landing_pages(open_page):
    page = open_page()
    link = page.locator("main table").get_by_role("link", name="02 PagedAttention")
    assert link.get_attribute("href") == LANDING


# ------------------------------------------------------------------ progress


def test_what_is_done_has_a_tick_in_the_list_and_on_the_landing_page(open_with):
    read = {f"{PHASE}/00-guide.html": AT}
    page = open_with(LANDING, kept(results=passed("02-01", "02-02"), read=read))
    for list_ in (".sidebar", ".place-map"):
        ticked = page.locator(f"{list_} a.place-done").evaluate_all(
            "(links) => links.map((link) => link.href.split('02-paged-attention/').at(-1))"
        )
        assert sorted(ticked) == [
            "00-guide.html",
            "labs/lab-01-block-allocator/index.html",
            "labs/lab-02-fragmentation-viz/index.html",
        ], list_
    bar = page.locator(".place-now progress")
    assert (bar.get_attribute("value"), bar.get_attribute("max")) == ("3", "12")
    assert page.locator(".place-now").inner_text().startswith("3 of 12 done")
    assert page.get_by_role("button", name="02 PagedAttention 3 of 12").is_visible()


def test_a_lab_that_did_not_pass_has_no_tick(open_with):
    failed = {"02-01": {"passed": 8, "total": 9, "ok": False, "at": AT}}
    page = open_with(LANDING, kept(results=failed))
    assert page.locator("a.place-done").count() == 0
    assert page.locator(".place-count").count() == 0


def test_a_lab_that_passes_has_its_tick_at_once(open_page):
    page = open_page(LANDING)
    page.evaluate("CourseStore.saveResult('02-05', {passed: 9, total: 9, ok: true})")
    ticked = page.locator(".place-map a.place-done").all_text_contents()
    assert ticked == ["02-05 Share and evict (done)"]
    assert page.locator(".sidebar a.place-done").count() == 1


def test_the_home_page_shows_a_bar_for_what_was_begun_and_where_to_go_on(open_with):
    page = open_with("index.html", kept(read={f"{PHASE}/00-guide.html": AT}))
    assert page.locator("main table .place-bar").all_inner_texts() == ["1 of 12 done"]
    on = page.get_by_role("link", name="Continue: Lab 02-02")
    on.click()
    assert page.url.endswith("labs/lab-02-fragmentation-viz/index.html")


def test_a_newcomer_sees_no_progress_at_all(open_page):
    page = open_page()
    assert page.locator(".place-bar, .place-home, .place-count, .place-done").count() == 0


def test_a_page_counts_as_read_once_its_end_was_seen(open_page):
    page = open_page(f"{PHASE}/00-guide.html")
    link = page.locator(".sidebar a.active").first
    assert "place-done" not in (link.get_attribute("class") or "")
    page.locator(".neighbours").scroll_into_view_if_needed()
    page.locator(".sidebar a.active.place-done").first.wait_for()
    page.goto(page.url.replace("00-guide.html", "index.html"))
    assert page.locator(".place-map a.place-done").all_text_contents() == ["Guide (done)"]


def test_continue_leads_back_to_the_section_that_was_left(open_page, url):
    page = open_page(f"{PHASE}/01-deep-dive.html")
    heading = page.locator("main h2[id]").nth(3)
    name = heading.get_attribute("id")
    page.locator(f"main h2[id='{name}']").scroll_into_view_if_needed()
    page.evaluate("(id) => document.getElementById(id).scrollIntoView()", name)
    page.goto(url + LANDING)
    on = page.get_by_role("link", name="Continue: 02 Deep dive")
    assert on.get_attribute("href").endswith(f"01-deep-dive.html#{name}")


def test_the_list_of_pages_is_about_two_screens_when_folded(open_page, site, url):
    page = open_page()
    paths = [LANDING, LABS_ONLY, EXERCISES, "GLOSSARY.html", "index.html"]
    unfolded = sorted(site.glob("phase-*/INTERVIEW.html"))  # one page unfolds its whole phase
    paths += [path.relative_to(site).as_posix() for path in unfolded]
    found = {}
    for path in paths:
        page.goto(url + path, wait_until="domcontentloaded")
        height = page.evaluate("document.querySelector('mdbook-sidebar-scrollbox').scrollHeight")
        found[path] = height / 900
    assert {path: screens for path, screens in found.items() if screens > SIDEBAR_SCREENS} == {}


def test_on_a_phone_the_list_opens_at_this_page(open_page):
    page = open_page("phase-12-structured-outputs/00-guide.html", width=390, touch=True)
    page.get_by_role("button", name="Toggle Table of Contents").tap()
    page.wait_for_function(
        """() => {
        const box = document.querySelector(".sidebar a.active").getBoundingClientRect();
        return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight;
    }"""
    )


def test_labs_that_passed_with_the_command_have_their_tick_under_serve(browser, site):
    local = Local(ROOT)
    told = {"02-01": {"state": "passed"}, "02-02": {"state": "changed"}}
    local._progress = lambda: {"labs": told, "next": None}  # type: ignore[method-assign]
    with book_site.serving(site, 0, threading.Lock(), local) as address:
        page = browser.new_page()
        page.goto(address)
        page.goto(address.partition("?")[0] + LANDING)
        page.locator(".place-map a.place-done").first.wait_for()
        assert page.locator(".place-map a.place-done").all_text_contents() == [
            "02-01 Build the paged block allocator (done)"
        ]
        page.close()


# ------------------------------------------------------------------ answers


def box(page, name: str):
    return page.locator(f'.answer-box[data-question="{name}"]')


def test_an_answer_is_checked_explained_and_kept(open_page):
    page = open_page(EXERCISES)
    own = box(page, "02-ex-01")
    explained = "Only the last block is partial"
    assert explained not in page.locator("main").inner_text()
    own.get_by_role("textbox").fill("16")
    own.get_by_role("textbox").press("Enter")
    assert "Not this. Wanted: a number in slots, exactly. Try again" in own.inner_text()
    assert explained not in own.inner_text()
    own.get_by_role("textbox").fill("15/2 slots")
    own.get_by_role("button", name="Check").click()
    assert "Right." in own.inner_text() and explained in own.inner_text()
    page.reload()
    assert box(page, "02-ex-01").get_by_role("textbox").input_value() == "15/2 slots"
    assert explained in box(page, "02-ex-01").inner_text()
    page.goto(page.url.replace("EXERCISES", "index"))
    count = len(answers.on_page(ROOT / "phase-02-paged-attention" / "EXERCISES.md"))
    assert f"1 of {count} right" in page.locator(".place-map").inner_text()


def test_a_choice_is_made_by_keyboard_and_the_answer_shown_on_demand(open_page):
    page = open_page(EXERCISES)
    own = box(page, "02-ex-03")
    own.get_by_role("button", name="Check").click()
    assert own.inner_text().endswith("Wanted: one of these, and one only.")
    own.get_by_role("radio").nth(1).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "Not this." in own.inner_text()
    own.get_by_role("button", name="Show the answer").press("Enter")
    assert "The answer: It leaves the free queue and its ref_cnt becomes 1" in own.inner_text()
    assert page.url.endswith(EXERCISES), "an arrow key turned the page"


def test_what_cannot_be_read_as_a_number_is_said_to_be_so(open_page):
    own = box(open_page(EXERCISES), "02-ex-01")
    own.get_by_role("textbox").fill("seven or eight")
    own.get_by_role("button", name="Check").click()
    assert "That cannot be read. Wanted: a number in slots" in own.inner_text()


LINES = ".answer-box:not([data-code])"
ANSWER_ALL = """(lines) => [...document.querySelectorAll(lines)].filter((box) => {
    const question = JSON.parse(box.querySelector("script").textContent);
    const { choices, choice, number, unit, accept, where } = question;
    if (choices.length) box.querySelectorAll("[type=radio]")[choices.indexOf(choice)].click();
    else box.querySelector("[type=text]").value =
        where || (number === null ? accept[0] : `${number} ${unit}`);
    box.querySelector("[type=submit]").click();
    return box.dataset.state !== "right";
}).map((box) => box.dataset.question)"""


@pytest.mark.parametrize("name", ["EXERCISES", "INTERVIEW", "READING"])
def test_every_box_of_the_course_takes_its_own_answer(open_page, site, url, name):
    page = open_page()
    wrong = []
    for path in sorted(site.glob(f"phase-*/{name}.html")):
        page.goto(url + path.relative_to(site).as_posix())
        wrong += page.evaluate(ANSWER_ALL, LINES)
    assert wrong == [] and page.complaints == []


# ------------------------------------------------------------------ search


def results(page, query: str) -> list[str]:
    page.locator("#course-searchbar").fill(query)
    page.locator("#course-searchstatus").get_by_text(f"“{query}”").wait_for()
    return page.locator("#course-searchresults a").evaluate_all(
        "(links) => links.map((link) => link.getAttribute('href'))"
    )


@pytest.mark.parametrize("key", ["s", "/"])
def test_the_search_is_used_by_keyboard_alone(open_page, key):
    page = open_page(f"{PHASE}/00-guide.html")
    page.keyboard.press(key)
    page.keyboard.type("preemption")
    page.locator("#course-searchresults li").first.wait_for()
    assert "preempt" in page.locator("#course-searchresults").inner_text().lower()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    target = page.locator("#course-searchresults a").first.get_attribute("href")
    assert page.evaluate("document.activeElement.getAttribute('href')") == target
    page.keyboard.press("Enter")
    page.wait_for_url(target)
    marked = page.evaluate("CSS.highlights.get('course-search').size")
    assert marked > 0
    assert page.complaints == []


def test_escape_closes_the_search_and_enter_takes_the_first(open_page):
    page = open_page()
    page.get_by_role("button", name="Search").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("null block")
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    assert page.evaluate("document.activeElement.id") == "course-search-toggle"
    page.keyboard.press("s")
    page.keyboard.type("null block")
    page.keyboard.press("Enter")
    page.wait_for_url("**/GLOSSARY.html?highlight=null+block#null-block")


def test_a_letter_that_is_typed_into_a_field_opens_no_search(open_page):
    page = open_page(EXERCISES)
    box(page, "02-ex-01").get_by_role("textbox").press("s")
    assert page.locator("dialog[open]").count() == 0


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_the_search_fits_and_has_no_serious_barrier(open_page, width, theme):
    page = open_page(width=width, theme=theme, touch=width < 600)
    page.get_by_role("button", name="Search").click()
    assert len(results(page, "chunked prefill")) == 20
    page.locator("#course-searchresults mark").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.evaluate("document.querySelector('dialog').scrollWidth <= innerWidth")
    assert barriers(page, "dialog") == []


def test_a_word_that_nothing_has_is_said_to_have_no_result(open_page):
    page = open_page()
    page.keyboard.press("s")
    assert results(page, "zyzzyva") == []
    assert page.locator("#course-searchstatus").inner_text().startswith("No results for")


def test_each_query_of_the_list_finds_its_page(open_page):
    """Before typos, questions and synonyms were looked at: 68 of 100 first, 81 among three.

    The ranking was set with these queries in view: they are a floor and not a measure.
    """
    page = open_page()
    queries = json.loads((ROOT / "book" / "search_queries.json").read_text(encoding="utf-8"))
    found = page.evaluate(
        """async (queries) => {
        const meta = document.querySelector('meta[name="course-search"]');
        const [, name] = meta.content.match(/index-(\\w+)/);
        const rows = [];
        for (const [query] of queries) rows.push(await CourseSearch.find(query, name));
        return rows.map((row) => row.map((result) => result.path));
    }""",
        queries,
    )

    def short(path: str) -> str:
        parts = path.removesuffix(".html").split("/")
        if parts[0].startswith("phase-"):
            parts[0] = parts[0][6:8]
        if parts[1:2] == ["labs"] and len(parts) > 3:
            parts[2:] = [parts[2][:6]]
        return "/".join(parts)

    first, missed = 0, []
    for (query, wanted), paths in zip(queries, found, strict=True):
        pages = list(dict.fromkeys(map(short, paths)))
        first += pages[:1] != [] and pages[0] in wanted
        if not set(pages[:3]) & set(wanted):
            missed.append((query, pages[:3]))
    assert len(missed) <= 3, missed
    assert first >= 85, first


def test_nothing_of_the_search_is_loaded_before_it_is_opened_and_little_then(open_page, site):
    page = open_page()
    page.wait_for_load_state("networkidle")
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    loaded = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert not [name for name in page.evaluate(loaded) if "/search/" in name]
    page.keyboard.press("s")
    results(page, "preemption")
    needed = [url for url in fetched if "/index-" in url or "/shard-" in url]
    files = [site / "search" / url.rpartition("/")[2] for url in needed]
    size = sum(len(gzip.compress(file.read_bytes())) for file in files)
    assert 0 < size < FIRST_ANSWER_LIMIT, (size, needed)
    assert not list(site.glob("searchindex*")) and not list(site.glob("elasticlunr*"))
