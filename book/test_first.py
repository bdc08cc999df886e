"""The lab on the home page, and what a site keeps for a reader without a network."""

from __future__ import annotations

import functools
import gzip
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from book.test_site import barriers
from course.site.widgets import first_lab

ROOT = Path(__file__).resolve().parents[1]
MENDED = first_lab.SHIPPED.replace(first_lab.NEVER, first_lab.MENDED)


@pytest.mark.parametrize(("width", "theme"), [(390, "navy"), (1280, "light")])
def test_the_mend_makes_the_timeline_whole_and_leads_to_the_first_lab(open_page, width, theme):
    page = open_page("index.html", width=width, theme=theme)
    weights = {}
    page.on("response", lambda r: weights.update({r.url: len(gzip.compress(r.body(), 6))}))
    page.reload()
    page.wait_for_load_state("networkidle")
    assert sum(weights.values()) < 120_000, sum(weights.values())
    box = page.locator(".first-lab")
    rows = box.locator('tr[data-request="C"] td')
    assert set(rows.evaluate_all("(n) => n.map((td) => td.dataset.kind)")) == {"absent", "waiting"}
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    assert barriers(page, ".first-lab") == []
    box.get_by_role("textbox").fill(MENDED)
    page.keyboard.press("Control+Enter")
    assert box.locator(".first-said").inner_text().startswith("Whole. 11 steps")
    shown = rows.all_inner_texts()
    assert [text for text in shown if text] == ["14", "14", "12", "1", "1", "1", "1"]
    assert asked == [], "the answer was ready"
    assert barriers(page, ".first-lab") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box.locator(".first-on a").click()
    assert "lab-01-kv-cache-speedup" in page.url and page.complaints == []


def test_the_hint_shows_the_line_and_then_mends_it(open_page):
    box = open_page("index.html").locator(".first-lab")
    box.get_by_role("button", name="Hint").click()
    area = box.get_by_role("textbox")
    marked = area.evaluate("(node) => node.value.slice(node.selectionStart, node.selectionEnd)")
    assert marked == first_lab.NEVER
    box.get_by_role("button", name="Mend it for me").click()
    assert area.input_value() == MENDED and box.get_attribute("data-state") == "whole"


def test_an_edit_that_is_not_ready_is_run_in_the_page(site, open_page):
    if not (site / "play" / "index.js").is_file():
        pytest.skip("needs course book runtime")
    box = open_page("index.html").locator(".first-lab")
    text = MENDED.replace("min(wanted, budget)", "sorted((wanted, budget))[0]")
    box.get_by_role("textbox").fill(text)
    box.get_by_role("button", name="Run").click()
    assert "Python runs it here" in box.locator(".first-said").inner_text()
    box.locator(".first-said", has_text="Whole. 11 steps").wait_for()


def test_what_was_read_is_there_offline_and_a_new_build_is_seen_at_once(browser, tmp_path):
    worker = (ROOT / "book" / "offline.js").read_text(encoding="utf-8")
    (tmp_path / "offline.js").write_text(worker, encoding="utf-8")
    (tmp_path / "a.js").write_text("document.title = 'ran'", encoding="utf-8")
    page_text = "<!doctype html><h1>{}</h1><script src=a.js></script>"
    (tmp_path / "index.html").write_text(page_text.format("first"), encoding="utf-8")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = browser.new_context()
    context.set_default_timeout(180_000)
    try:
        page = context.new_page()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        page.goto(url)
        page.evaluate("""async () => {
            await navigator.serviceWorker.register("offline.js");
            const { active } = await navigator.serviceWorker.ready;
            const loaded = performance.getEntriesByType("resource").map((each) => each.name);
            active.postMessage({ loaded: [location.href, ...loaded] });
        }""")
        page.wait_for_function("async () => await caches.match('a.js') && caches.match('/')")
        (tmp_path / "index.html").write_text(page_text.format("second"), encoding="utf-8")
        page.reload()
        assert page.locator("h1").inner_text() == "second", "the network comes first"
        again = "async () => (await (await caches.match('/')).text()).includes('second')"
        page.wait_for_function(again)
    finally:
        server.shutdown()
        server.server_close()
    try:
        page.reload()
        assert (page.locator("h1").inner_text(), page.title()) == ("second", "ran")
        page.goto(f"{url}other.html")
        assert "There is no network" in page.locator("p").inner_text()
    finally:
        context.close()
