"""The finished site: whether it is whole, and serving it to this machine.

Promises: a dead link, a dead anchor and anything loaded from the network is found, by page and
line; while a new site takes the old one's place every request is answered from one of the two;
nothing outside the site is served.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from course.learning import predictions
from course.learning.labs import CourseError
from course.site import book_finish
from course.site.local import PREFIX, Local
from course.truth import citations
from course.truth.citations import Finding

SOURCES = (".md", ".svg", ".css", ".js", ".toml", ".png", ".yaml")


def changes(root: Path) -> Iterator[None]:
    """Yields after each save of what the site is made of; ends on Ctrl-C."""
    from watchfiles import watch

    def wanted(_change: object, name: str) -> bool:
        path = Path(name)
        inside = path.relative_to(root).parts[:-1] if path.is_relative_to(root) else ()
        made_of = path.suffix in SOURCES and path.name != predictions.FILE
        return made_of and not any(map(citations.is_skipped, inside))

    for _ in watch(root, watch_filter=wanted, raise_interrupt=False):
        yield


def publish(new: Path, site: Path) -> None:
    """Put the folder `new` in the place of `site`."""
    old = site.with_name(f"{site.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if site.exists():
        site.rename(old)
    new.rename(site)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def serving(
    site: Path, port: int, lock: threading.Lock | None = None, local: Local | None = None
) -> Iterator[str]:
    """Serve the site to this machine; the address.

    Args:
        lock: held while the folder changes: no file is opened meanwhile.
        local: answers the pages that are opened by the address given back.

    Raises:
        CourseError: the port is taken.
    """
    opening = lock or threading.Lock()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def end_headers(self) -> None:
            self.send_header("Cache-Control", "no-store")  # a reload shows what was built last
            self.send_header("X-Frame-Options", "DENY")
            self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
            super().end_headers()

        def send_error(
            self, code: int, message: str | None = None, explain: str | None = None
        ) -> None:
            page = site / book_finish.NOWHERE
            if code == HTTPStatus.NOT_FOUND and page.is_file():
                text = page.read_text(encoding="utf-8").replace("%", "%%")
                self.error_message_format = text
            super().send_error(code, message, explain)

        def do_GET(self) -> None:
            if local and self.path.startswith(PREFIX):
                local.answer(self)
            elif not (local and local.admit(self)):
                super().do_GET()

        def do_POST(self) -> None:
            if local and self.path.startswith(PREFIX):
                local.answer(self)
            else:
                self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

        def send_head(self) -> io.BytesIO | BinaryIO | None:
            with opening:
                try:
                    path = Path(self.translate_path(self.path))
                    inside = path.resolve().is_relative_to(site.resolve())
                except (ValueError, OSError):  # a null byte, a name too long, a loop of links
                    self.send_error(HTTPStatus.BAD_REQUEST)
                    return None
                if not inside:  # by a link in the site
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return None
                folder = urlsplit(self.path).path.endswith("/")
                page = path / "index.html" if folder else path
                if local and page.suffix == ".html" and page.is_file() and local.is_admitted(self):
                    return self.send_page(local.with_token(page.read_bytes()))
                return super().send_head()

        def copyfile(self, source: Any, outputfile: Any) -> None:
            with contextlib.suppress(ConnectionError):  # the reader has gone on to another page
                super().copyfile(source, outputfile)

        def send_page(self, page: bytes) -> io.BytesIO:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            return io.BytesIO(page)

        def list_directory(self, path: str | os.PathLike[str]) -> io.BytesIO | None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return None

    handler = functools.partial(Handler, directory=str(site))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        raise CourseError(f"port is {port}: {error}; --port 0 takes a free one") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        entrance = f"?key={local.key}" if local else ""
        yield f"http://127.0.0.1:{server.server_address[1]}/{entrance}"
    finally:
        server.shutdown()
        server.server_close()


class _Html(HTMLParser):
    """The ids of a page, where it links, and what it loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "href" in values:
            self.loads.append(values["href"])
        if "src" in values:
            self.loads.append(values["src"])


def check(root: Path, site: Path) -> list[Finding]:
    """Dead links and anchors, and anything loaded from the network, by page and line."""

    @functools.cache
    def parsed(path: Path) -> _Html:
        parser = _Html()
        parser.feed(path.read_text(encoding="utf-8"))
        return parser

    findings = []
    for file in sorted(site.rglob("*.html")):
        for target in parsed(file).loads:
            if urlsplit(target).netloc:
                findings.append(_on_page(root, site, file, target, "is loaded from the network"))
        for target in (*parsed(file).links, *parsed(file).loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                findings.append(_on_page(root, site, file, target, "leads nowhere in the book"))
            elif (
                path.suffix == ".html"
                and parts.fragment
                and unquote(parts.fragment) not in parsed(path).ids
            ):
                findings.append(_on_page(root, site, file, target, "has no such anchor"))
    return findings


def _on_page(root: Path, site: Path, file: Path, target: str, problem: str) -> Finding:
    """The finding at the line of the page that holds the target, as far as it can be told."""
    inside = file.relative_to(site).with_suffix(".md")
    page = root / inside
    if inside.name == "index.md" and not page.is_file():
        page = page.with_name("README.md")
    if not page.is_file():
        return Finding(file, 1, f"{target}: {problem}")
    rows = page.read_text(encoding="utf-8").split("\n")
    wanted = target.rpartition("#")[2] if "#" in target else target.replace(".html", ".md")
    at = next((number for number, row in enumerate(rows, 1) if wanted in row), 1)
    return Finding(page, at, f"{target}: {problem}")
