"""A phone, a keyboard and paper: the site where no wide screen and no mouse is at hand."""

from __future__ import annotations

import io
import re
import unicodedata

import pytest

pytestmark = pytest.mark.browser

GUIDE = "phase-02-paged-attention/00-guide.html"
DIVE = "phase-02-paged-attention/01-deep-dive.html"
CHEAT = "phase-02-paged-attention/CHEATSHEET.html"
LAB = "phase-02-paged-attention/labs/lab-01-block-allocator/index.html"
SMALL_TARGETS = """() => [...document.querySelectorAll("button, label.icon-button")]
    .map((node) => [node.getBoundingClientRect(), node.ariaLabel || node.textContent])
    .filter(([box]) => box.width && box.right > 0 && (box.width < 43.9 || box.height < 43.9))
    .map(([box, name]) => `${name.trim()}: ${box.width.toFixed(0)} x ${box.height.toFixed(0)}`)"""
PAPER = 688
"""Pixels between the margins of an A4 sheet, as book.css sets them."""


@pytest.fixture
def phone(open_page):
    """Open a page as on a phone that is touched."""
    return lambda path, **settings: open_page(path, width=390, touch=True, **settings)


# ------------------------------------------------------------------ tables, names, tags, buttons


def test_a_wide_table_stacks_on_a_phone_with_the_names_of_its_columns(phone):
    page = phone(CHEAT)
    table = page.locator("table.stack, table").first
    cells = table.locator("tbody tr").first.locator("td")
    names = table.locator("thead th").all_inner_texts()
    first, second = cells.nth(0).bounding_box(), cells.nth(1).bounding_box()
    assert second["y"] >= first["y"] + first["height"], "the cells of a row stand side by side"
    shown = cells.nth(1).evaluate("(cell) => getComputedStyle(cell, '::before').content")
    assert shown == f'"{names[1]}"'


def test_a_wide_table_stands_as_a_table_where_there_is_room(open_page):
    cells = open_page(CHEAT).locator("table.stack tbody tr").first.locator("td")
    assert cells.nth(0).bounding_box()["y"] == cells.nth(1).bounding_box()["y"]


@pytest.mark.parametrize("path", ["index.html", GUIDE, CHEAT, LAB])
def test_every_button_has_room_for_a_finger(phone, path):
    page = phone(path)
    page.wait_for_load_state("networkidle")
    assert page.evaluate(SMALL_TARGETS) == []
    page.evaluate("document.querySelector('main').innerHTML = '<button>x</button>'")
    assert page.evaluate(SMALL_TARGETS) != [], "the check sees no small button"


# ------------------------------------------------------------------ figures


def test_a_tap_opens_a_figure_at_its_own_size_and_escape_closes_it(phone):
    page = phone(LAB)
    link = page.locator("a.figure").first
    link.tap()
    large = page.locator("dialog.figure-large img")
    natural = large.evaluate("(image) => image.decode().then(() => image.naturalWidth)")
    assert large.bounding_box()["width"] >= max(390, natural) - 1
    assert large.get_attribute("alt") == link.locator("img").get_attribute("alt")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0
    assert page.evaluate(SMALL_TARGETS) == []
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert link.evaluate("(node) => node === document.activeElement"), "the focus is lost"


def test_a_figure_opens_and_closes_by_keyboard_and_the_page_stays(open_page):
    page = open_page(LAB)
    address = page.url
    page.locator("a.figure").first.focus()
    page.keyboard.press("Enter")
    page.locator("dialog.figure-large[open]").wait_for()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Close").press("Enter")
    page.locator("dialog").wait_for(state="detached")
    assert page.url == address and page.complaints == []


def test_without_javascript_a_figure_leads_to_itself(open_page, site):
    page = open_page(LAB, javascript=False)
    target = page.locator("a.figure").first.get_attribute("href")
    assert target.endswith(".svg") and ((site / LAB).parent / target).is_file()


# ------------------------------------------------------------------ long pages


def test_a_long_piece_shows_how_it_begins_and_a_button_shows_the_rest(phone):
    page = phone(DIVE)
    button = page.locator("main button.whole", has_text=re.compile("^Show all .* lines$")).first
    lines = int(button.inner_text().split()[2])
    box = button.locator("xpath=preceding-sibling::*[1]").element_handle()
    height = (
        "(box) => (box.querySelector('pre:last-of-type') ?? box).getBoundingClientRect().height"
    )
    assert box.evaluate(height) <= 240 < lines * 16
    button.tap()
    page.wait_for_function("(box) => !box.classList.contains('cut')", arg=box)
    assert box.evaluate(height) >= lines * 16
    assert not box.evaluate("(box) => box.nextElementSibling.matches('button.whole')")


def test_nothing_is_cut_where_there_is_room(open_page):
    page = open_page(DIVE)
    assert page.locator("main .cut").count() == page.locator("button.whole").count() == 0


def test_a_page_of_more_than_twenty_screens_folds_and_a_link_opens_its_section(phone, url):
    page = phone(GUIDE, folded=True)
    page.locator("button.unfold").first.wait_for()
    assert page.evaluate("document.documentElement.scrollHeight <= 20 * innerHeight")
    assert page.evaluate(SMALL_TARGETS) == []
    heads = page.locator("main > h2[id]")
    inside = heads.nth(1).locator("xpath=following-sibling::div[1]")
    assert not inside.locator("p").first.is_visible()
    heads.nth(1).tap()
    assert inside.locator("p").first.is_visible()
    heads.nth(1).tap()
    assert not inside.locator("p").first.is_visible()
    last = heads.last.get_attribute("id")
    page.goto(f"{url}{GUIDE}#{last}")
    page.wait_for_function(
        "(id) => document.getElementById(id).querySelector('[aria-expanded=true]')", arg=last
    )


def test_a_reader_who_opens_all_sections_finds_them_open_on_the_next_page(phone, url):
    page = phone(GUIDE, folded=True)
    page.get_by_role("button", name=re.compile("^Open all ")).tap()
    assert page.evaluate("document.documentElement.scrollHeight > 20 * innerHeight")
    page.goto(url + GUIDE.replace("02-paged-attention", "04-attention-backends"))
    page.get_by_role("button", name="Fold the sections").wait_for()
    assert page.locator("main h2 [aria-expanded=false]").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
def test_the_glossary_shows_the_terms_with_the_words_that_are_typed(open_page, width):
    page = open_page("GLOSSARY.html", width=width, folded=True)
    page.get_by_label("Terms with").fill("null BLOCK")
    shown = page.locator("main h3:visible").all_inner_texts()
    assert "Null block" in shown and len(shown) < 10
    page.get_by_label("Terms with").fill("no such term")
    assert page.locator(".filter output").inner_text().startswith("0 of ")


# ------------------------------------------------------------------ citations beside the text


def test_a_citation_in_brackets_stands_beside_its_line_where_there_is_room(open_page):
    page = open_page(DIVE)
    note = page.locator("main > p .side").first
    text = note.locator("xpath=ancestor::p[1]").bounding_box()
    box = note.bounding_box()
    assert box["x"] >= text["x"] + text["width"] and box["y"] + box["height"] > text["y"]
    assert re.fullmatch(r" \(\S+\.py:\d.*\)", note.text_content())
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") == 0


def test_on_a_phone_it_names_the_file_and_the_link_has_the_whole_path(phone):
    note = phone(DIVE).locator("main .side").first
    assert not note.locator(".folder").first.is_visible()
    assert "/blob/" in note.locator("a").first.get_attribute("href")


# ------------------------------------------------------------------ keys and order


def test_an_arrow_in_a_focused_code_box_scrolls_it_and_turns_no_page(open_page):
    page = open_page(GUIDE, width=600)
    address = page.url
    box = page.locator("pre > code[tabindex='0']").first
    box.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("(box) => box.scrollLeft > 0", arg=box.element_handle())
    assert page.url == address
    box.evaluate("(node) => node.blur()")
    with page.expect_navigation():
        page.keyboard.press("ArrowRight")
    assert page.url != address


def test_the_last_page_of_a_phase_leads_to_the_next_phase(open_page):
    page = open_page(CHEAT)
    page.get_by_role("link", name="Next phase").click()
    assert page.url.endswith("phase-03-continuous-batching-scheduler/index.html")


def test_the_list_of_pages_shows_one_phase_and_unfolds_the_others(open_page):
    page = open_page(GUIDE)
    parts = page.locator(".sidebar .part-title > button")
    unfolded = parts.evaluate_all(
        "(nodes) => nodes.filter((n) => n.ariaExpanded === 'true').map((n) => n.textContent)"
    )
    assert unfolded == ["02 PagedAttention"]
    other = page.locator('.sidebar a[href$="phase-03-continuous-batching-scheduler/00-guide.html"]')
    assert not other.is_visible()
    page.get_by_role("button", name=re.compile("^03 ")).press("Enter")
    assert other.is_visible()


# ------------------------------------------------------------------ paper


@pytest.mark.parametrize("theme", ["light", "navy"])
@pytest.mark.parametrize("path", [GUIDE, DIVE, LAB])
def test_paper_shows_the_chapter_and_cuts_nothing_at_the_right(open_page, path, theme):
    page = open_page(path, width=PAPER, theme=theme)
    page.emulate_media(media="print")
    shown = page.evaluate(
        """(paper) => {
        const visible = (node) => node.getClientRects().length > 0;
        const apart = ["#mdbook-sidebar", "#mdbook-menu-bar", ".nav-wrapper", ".nav-wide-wrapper",
            ".phase-strip", ".neighbours", "pre > .buttons"];
        return {
            apart: apart.filter((name) => [...document.querySelectorAll(name)].some(visible)),
            left: document.querySelector("main").getBoundingClientRect().left,
            cut: [...document.querySelectorAll("main :is(p, pre, code, table, img, math, svg, li)")]
                .filter((node) => visible(node) && (node.getBoundingClientRect().right > paper + 1
                    || node.matches("pre > code") && node.scrollWidth > node.clientWidth + 1))
                .map((node) => node.outerHTML.slice(0, 120)),
            background: getComputedStyle(document.body).backgroundColor,
            scheme: getComputedStyle(document.documentElement).colorScheme,
            dark: [...document.querySelectorAll("main code")].filter((code) => {
                const colour = getComputedStyle(code).backgroundColor;
                const [red, , , alpha] = colour.match(/[\\d.]+/g).map(Number);
                return alpha !== 0 && red < 200;
            }).length,
            split: [...document.querySelectorAll("main img")]
                .filter((image) => getComputedStyle(image).breakInside !== "avoid").length,
        };
    }""",
        PAPER,
    )
    assert shown == {
        "apart": [], "left": 0, "cut": [], "background": "rgb(255, 255, 255)",
        "scheme": "light", "split": 0, "dark": 0,
    }  # fmt: skip


def test_a_printed_chapter_has_its_whole_text_on_a_few_sheets(open_page):
    pypdf = pytest.importorskip("pypdf", reason="needs pypdf")
    page = open_page(GUIDE, theme="navy")
    title = page.locator("main h1").inner_text()
    ends = page.locator("main h2").all_inner_texts()
    sheets = pypdf.PdfReader(io.BytesIO(page.pdf(format="A4", prefer_css_page_size=True))).pages
    texts = [" ".join(unicodedata.normalize("NFKC", s.extract_text()).split()) for s in sheets]
    text = " ".join(texts)
    assert 8 <= len(sheets) <= 30
    assert title in texts[0]
    assert [heading for heading in ends if heading not in text] == []
    for elsewhere in ("03 Guide", "Lab 03-01", "Next phase", "Deep dive Mini-build"):
        assert elsewhere not in text, "the list of pages is printed"
    assert all(len(sheet.split()) > 5 for sheet in texts), "an empty sheet"
