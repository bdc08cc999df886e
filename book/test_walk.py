"""What a walk through the site as a newcomer found, kept mended."""

from __future__ import annotations

import pytest

from book.test_live import beside
from book.test_site import barriers, page_with
from course.site import widgets

pytestmark = pytest.mark.browser

GUIDE = "phase-02-paged-attention/00-guide.html"
PSEUDO = "phase-03-continuous-batching-scheduler/CHEATSHEET.html"
FRAME = 'main a.figure[href*="/film-"]'


def test_a_figure_on_a_phone_scrolls_in_its_own_box_and_says_that_it_opens(open_page):
    page = open_page(GUIDE, width=390, touch=True)
    link = page.locator("main a.figure").first
    image = link.locator("img")
    natural = image.evaluate("(node) => node.decode().then(() => node.naturalWidth)")
    assert image.bounding_box()["width"] >= min(natural, 700) - 1, "its words are too small"
    assert link.evaluate("(node) => node.scrollWidth > node.clientWidth"), "nothing to scroll"
    said = link.evaluate("(node) => getComputedStyle(node, '::after').content")
    assert "Open large" in said
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


@pytest.mark.parametrize("theme", ["light", "navy"])
def test_frames_fold_where_the_film_plays_and_nothing_is_barred(open_page, theme):
    page = open_page(GUIDE, width=390, touch=True, theme=theme)
    frames = page.locator(FRAME)
    assert frames.count() > 0
    assert not any(frames.nth(place).is_visible() for place in range(frames.count()))
    fold = page.locator("details", has=page.locator('a.figure[href*="/film-"]')).first
    summary = fold.locator("summary")
    assert summary.inner_text() == fold.locator("img").get_attribute("alt")
    summary.click()
    assert frames.first.is_visible()
    assert barriers(page, "main details") == []


def test_without_javascript_the_frames_of_the_film_stand_in_the_text(open_page):
    frames = open_page(GUIDE, javascript=False).locator(FRAME)
    assert frames.count() > 0
    assert all(frames.nth(place).is_visible() for place in range(frames.count()))


def test_a_figure_is_one_stop_of_the_keyboard(open_page):
    page = open_page(GUIDE)
    page.locator("main a.figure").first.focus()
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.closest('.checkbox-label')") is None
    assert page.locator("main .checkbox-img").count() == 0


def test_what_is_wrong_with_a_request_is_in_sight_where_it_is_typed(open_page):
    page = open_page(width=390, touch=True, prepare=beside)
    page.get_by_role("button", name="Run it yourself").click()
    page.locator(".live-edit > summary").click()
    field = page.locator(".live-edit input[type=number]").last
    field.fill("-3")
    field.press("Tab")
    trouble = page.locator(".live-trouble:not(:empty)")
    trouble.wait_for()
    box = trouble.bounding_box()
    assert 0 <= box["y"] < 900 - box["height"], "the message is out of sight"


def test_pseudocode_leaves_no_complaint_on_the_console(open_page):
    said = []
    page = open_page(PSEUDO, prepare=lambda page: page.on("console", lambda m: said.append(m.text)))
    page.wait_for_load_state("networkidle")
    assert page.locator("main pre").count() > 0
    assert said == []


def test_the_choices_of_a_question_stay_in_their_box(open_page):
    page = open_page("phase-04-attention-backends/EXERCISES.html", width=390, touch=True)
    page.locator(".answer-choices").first.wait_for()
    out = page.locator(".answer-choices label").evaluate_all(
        """(nodes) => nodes.filter((node) => {
            const own = node.getBoundingClientRect();
            const room = node.closest(".answer-box").getBoundingClientRect();
            return node.scrollWidth > node.clientWidth || own.right > room.right
                || own.height < 43.9;
        }).map((node) => node.textContent)"""
    )
    assert out == []


def test_short_cells_of_a_stacked_row_share_a_line(open_page):
    page = open_page("benchmarks/index.html", width=390, touch=True)
    cells = page.locator("table.stack tbody tr").first.locator("td")
    boxes = [cells.nth(place).bounding_box() for place in range(cells.count())]
    assert boxes[1]["y"] >= boxes[0]["y"] + boxes[0]["height"]
    assert boxes[1]["y"] == boxes[2]["y"], "two numbers take two lines"
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


def test_a_page_says_where_it_is_told_what_a_later_release_changed(open_page):
    page = open_page("phase-04-attention-backends/00-guide.html")
    page.locator(".drift-line a").click()
    assert page.url.endswith("SINCE_THE_PIN.html")


@pytest.mark.parametrize(("width", "shown"), [(390, True), (1280, False)])
def test_a_timeline_that_scrolls_says_so(open_page, width, shown):
    hint = open_page("index.html", width=width).locator(".widget-hint").first
    hint.wait_for(state="visible" if shown else "hidden")


# ------------------------------------------------------------------ every widget under a finger

LEAST_LETTER = 11  # pixels
PLOTTED = """(host) => [...host.querySelectorAll("svg text")]
    .filter((node) => node.getClientRects().length)
    .map((node) => [node.textContent, node.getBoundingClientRect(),
        parseFloat(getComputedStyle(node).fontSize) * node.getScreenCTM().a])"""
SMALL_LETTERS = f"""(host) => ({PLOTTED})(host).filter(([, , size]) => size < {LEAST_LETTER})
    .map(([text, , size]) => `${{size.toFixed(1)}} px: ${{text}}`)"""
COVERED = f"""(host) => {{
    const found = [], all = ({PLOTTED})(host);
    const room = host.getBoundingClientRect();
    all.forEach(([text, box], i) => {{
        if (box.right > room.right + 1 || box.left < room.left - 1) found.push(`cut: ${{text}}`);
        for (const [other, its] of all.slice(i + 1)) {{
            const wide = Math.min(box.right, its.right) - Math.max(box.left, its.left);
            const high = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
            if (wide > 2 && high > 4) found.push(`${{text}} over ${{other}}`);
        }}
    }});
    return found;
}}"""
UNTOUCHABLE = """(host) => [...host.querySelectorAll("button, select, input, textarea, summary")]
    .filter((node) => !node.closest("label:has([type=checkbox], [type=radio])"))
    .concat([...host.querySelectorAll("label:has([type=checkbox], [type=radio])")])
    .map((node) => [node.getBoundingClientRect(),
        node.ariaLabel || node.textContent || node.dataset.input || node.tagName])
    .filter(([box]) => box.width && (box.width < 43.9 || box.height < 43.9))
    .map(([box, name]) => `${name.trim()}: ${box.width.toFixed(0)} x ${box.height.toFixed(0)}`)"""


@pytest.fixture
def widget_on_a_phone(site, open_page):
    """A widget on its page, drawn, on a phone; its folds are open."""

    def find(name: str):
        page = open_page(page_with(site, name), width=390, touch=True)
        host = page.locator(f'[data-widget="{name}"][data-ready]').first
        host.wait_for(state="attached")
        for fold in host.locator("details").all():
            fold.evaluate("(node) => { node.open = true; }")
        return host

    return find


@pytest.mark.parametrize("name", widgets.NAMES)
def test_on_a_phone_a_widget_has_large_letters_apart_and_room_for_a_finger(widget_on_a_phone, name):
    host = widget_on_a_phone(name)
    assert host.evaluate(SMALL_LETTERS) == []
    assert host.evaluate(COVERED) == []
    assert host.evaluate(UNTOUCHABLE) == []


def test_the_checks_of_a_widget_see_what_is_small_and_what_is_covered(widget_on_a_phone):
    host = widget_on_a_phone("roofline")
    host.evaluate(
        """(node) => {
        node.querySelector("svg").innerHTML = '<text x="9" y="30">ab</text>'.repeat(2)
            + '<text x="9" y="90" style="font-size: 6px">c</text>';
        const small = document.createElement("button");
        small.style.minWidth = "0";
        node.querySelector("section").append(small);
    }"""
    )
    assert host.evaluate(SMALL_LETTERS) == ["6.0 px: c"]
    assert host.evaluate(COVERED) == ["ab over ab"]
    assert len(host.evaluate(UNTOUCHABLE)) == 1


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_vllms_own_lines_are_stepped_with_the_values_of_a_run(open_page, width, theme):
    page = open_page(
        "phase-03-continuous-batching-scheduler/01-deep-dive.html", width=width, theme=theme
    )
    box = page.locator('.code-walk[data-symbol="Scheduler._preempt_request"]')
    box.get_by_role("button", name="Step through it").click()
    values = box.locator(".walk-values > div", has_text="request.num_preemptions")
    assert values.locator("dd").inner_text() == "0"
    assert "request.status == RequestStatus.RUNNING" in box.locator(".walk-where").inner_text()
    lit = page.locator(".walk-lit")
    top = lit.bounding_box()["y"]
    box.get_by_role("combobox", name="Whose change").select_option("request.num_preemptions")
    box.get_by_role("button", name="To the next change of").click()
    assert values.locator("dd").inner_text() == "1" and lit.bounding_box()["y"] > top
    assert values.get_attribute("class") == "walk-changed"
    box.get_by_role("button", name="Last line").click()
    assert box.locator(".walk-where").inner_text() == "Returns None"
    assert barriers(page, ".upstream") == [] and page.complaints == []
    box.get_by_role("button", name="Put the steps away").click()
    assert lit.count() == 0 and not values.is_visible()
