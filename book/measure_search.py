"""How long a phone waits for its first search result: 4x slower, 1.6 Mbit/s, round trips of 150 ms.

Run `python book/measure_search.py [SITE]` with playwright and a Chromium; SITE is a finished site,
by default the one `course book build` made. Files are sent compressed, as hosts do. A site with
mdBook's own search is measured as well, for comparison. Two waits are printed: from the key that
opens the search, with the word typed at once, and for a second word after that.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import shutil
import statistics
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).resolve().parents[1] / "build" / "book" / "html"
RUNS = 5
WORDS = ("preemption", "rejection sampling")
PHONE = {
    "offline": False,
    "latency": 150,
    "downloadThroughput": 1.6e6 / 8,
    "uploadThroughput": 0.75e6 / 8,
}
OURS = ("#course-searchbar", "#course-searchresults li a")
MDBOOK = ("#mdbook-searchbar", "#mdbook-searchresults li a")


class Compressed(SimpleHTTPRequestHandler):
    """Sends every text compressed."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def send_head(self):  # type: ignore[no-untyped-def]
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if path.is_dir() else path
        if not path.is_file():
            self.send_error(404)
            return None
        body = gzip.compress(path.read_bytes(), 6)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return BytesIO(body)

    def copyfile(self, source, outputfile):  # type: ignore[no-untyped-def]
        with contextlib.suppress(ConnectionError):  # a page that was left
            super().copyfile(source, outputfile)


def waits(page: Page, address: str) -> tuple[float, float, int]:
    """Seconds to the first answer and to the second, and the bytes that search had to fetch."""
    page.goto(address)
    page.wait_for_load_state("networkidle")
    field, result = OURS if page.locator('meta[name="course-search"]').count() else MDBOOK
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", PHONE)
    session.send("Emulation.setCPUThrottlingRate", {"rate": 4})
    fetched = []
    session.on("Network.loadingFinished", lambda event: fetched.append(event["encodedDataLength"]))
    script = """([field, result, word, press]) => new Promise((done) => {
        const began = performance.now();
        const seen = () => {
            const first = document.querySelector(result);
            if (first && first.closest("ul").dataset.old !== first.textContent) {
                first.closest("ul").dataset.old = first.textContent;
                requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)));
            } else setTimeout(seen, 5);
        };
        if (press) document.body.dispatchEvent(new KeyboardEvent("keydown",
            {key: "s", code: "KeyS", keyCode: 83, which: 83, bubbles: true, cancelable: true}));
        const type = () => {
            const input = document.querySelector(field);
            if (!input || input.disabled) return setTimeout(type, 5);
            input.value = word;
            for (const name of ["input", "keyup"])
                input.dispatchEvent(new Event(name, {bubbles: true}));
            seen();
        };
        type();
    })"""
    first = page.evaluate(script, [field, result, WORDS[0], True]) / 1000
    size = int(sum(fetched))
    second = page.evaluate(script, [field, result, WORDS[1], False]) / 1000
    return first, second, size


def main() -> None:
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Compressed, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    found = []
    with sync_playwright() as playwright:
        for _ in range(RUNS):
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 390, "height": 844})
            page.set_default_timeout(180_000)
            found.append(waits(page, f"http://127.0.0.1:{server.server_address[1]}/index.html"))
            browser.close()
    server.shutdown()
    first, second, sizes = zip(*found, strict=True)
    print(f"fetched for the first: {statistics.median(sizes) / 1000:.0f} kB")
    for name, column in {"first answer": first, "second answer": second}.items():
        low, middle, high = min(column), statistics.median(column), max(column)
        print(f"{name}: {low:.2f} / {middle:.2f} / {high:.2f} s (min / median / max of {RUNS})")


if __name__ == "__main__":
    main()
