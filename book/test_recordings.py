"""The page of recordings in a real browser: the sample, a file dropped, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from book.beside import beside
from book.test_site import barriers
from course.site import play, recordings

pytestmark = pytest.mark.browser
PAGE = "RECORDINGS.html"
FILE = recordings.SAMPLE


@pytest.fixture
def opened(open_page):
    """The page with its sample, Python beside it."""

    def find(prepare: Any = None, **settings: Any) -> Any:
        page = open_page(PAGE, prepare=prepare or beside(recordings), **settings)
        page.locator('[data-widget="flight-timeline"][data-ready]').wait_for()
        return page

    return find


def drop(page: Any, name: str, data: bytes | int) -> None:
    """Let a file fall on the page, as a hand does; a number is that of its bytes."""
    page.evaluate(
        """([name, data]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([new Uint8Array(data)], name));
            const options = { dataTransfer: carried, bubbles: true, cancelable: true };
            document.querySelector(".flight-drop").dispatchEvent(new DragEvent("drop", options));
        }""",
        [name, data if isinstance(data, int) else list(data)],
    )


def rows(page: Any) -> dict[str, list[list[str]]]:
    """Kind and text of each cell of the table, by request."""
    return page.locator(".flight table tbody tr").evaluate_all(
        """(rows) => Object.fromEntries(rows.map((row) => [row.dataset.request,
            [...row.cells].slice(1).map((cell) => [cell.dataset.kind, cell.textContent])]))"""
    )


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_the_sample_is_there_at_once_and_its_steps_and_reasons_are_the_recordings(
    opened, width, theme
):
    page = opened(width=width, theme=theme)
    told = recordings.sample()
    start = int(page.locator(".flight").get_attribute("data-from"))
    drawn = rows(page)
    for request in told["requests"]:
        at = {s: cell for cell in request["cells"] for s in range(cell[0], cell[1] + 1)}
        cells = [at.get(step) for step in range(start, start + 40)]
        if any(cells):
            kinds = [cell[2] if cell else "absent" for cell in cells]
            assert [kind for kind, _ in drawn[request["id"]]] == kinds
            tokens = [str(cell[3] or "") if cell else "" for cell in cells]
            assert [text.replace("×", "") for _, text in drawn[request["id"]]] == tokens
        else:
            assert request["id"] not in drawn
    page.get_by_label("Request", exact=True).select_option("13")
    lines = page.locator(".flight-why li").all_inner_texts()
    assert len(lines) == len(told["requests"][13]["why"])
    assert all(line.endswith(text) for line, (_, text) in
               zip(lines, told["requests"][13]["why"], strict=True))  # fmt: skip
    assert barriers(page, ".flight") == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.complaints == []


def test_what_is_refused_is_said_and_leaves_what_was_there(opened):
    page = opened()
    before = page.locator(".flight .widget-title").inner_text()
    for name, data, why in (
        ("notes.txt", b"hello\n", "notes.txt, line 1: not JSON"),
        ("a.0002.jsonl", b"{}\n", "a: segments 0 to 1 were rotated away"),
        ("big.jsonl", recordings.MOST_BYTES + 1, "a page opens at most 8 MiB"),
    ):
        drop(page, name, data)
        said = page.locator(".flight [role=alert]")
        said.filter(has_text=why).wait_for()
        assert page.locator(".flight .widget-title").inner_text() == before


def test_two_prompts_are_compared_as_the_command_compares_them(opened):
    page = opened()
    page.get_by_label("Request", exact=True).select_option("1")
    page.get_by_label("Compare its prompt with").select_option("0")
    page.locator(".flight-parts").filter(has_text="the first 7 blocks of 16 are equal").wait_for()


@pytest.mark.slow
@pytest.mark.skipif(bool(play.problem(recordings.ROOT)), reason="needs course book runtime")
def test_a_file_is_read_by_the_pages_own_python_and_goes_nowhere(opened):
    sent: list[str] = []

    def listening(page: Any) -> None:
        page.on("request", lambda r: sent.append(r.url) if r.method != "GET" else None)

    page = opened(prepare=listening)
    drop(page, "mine.0000.jsonl.gz", FILE.read_bytes()[:-900])
    page.locator(".flight .widget-title").filter(has_text="mine.0000.jsonl.gz").wait_for()
    assert page.locator(".flight [role=alert]").inner_text() == "the file is cut here"
    page.get_by_label("Request", exact=True).select_option("9")
    assert "is preempted" in page.locator(".flight-why").inner_text()
    page.get_by_label("Request", exact=True).select_option("1")
    page.get_by_label("Compare its prompt with").select_option("0")
    page.locator(".flight-parts").filter(has_text="the first 7 blocks of 16 are equal").wait_for()
    assert sent == [] and page.complaints == []
