"""The finished site in a real browser, for the tests of this folder.

Needs playwright, the book extra and a Chromium on the PATH; skips with a reason where one lacks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from course.files import locked
from course.learning.labs import CourseError, find_labs, pick
from course.site import book, book_site, local

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def site(browser):
    """The folder of the finished site, built now."""
    pytest.importorskip("latex2mathml", reason="needs the book extra")
    try:
        book.find_mdbook()
    except CourseError:
        pytest.skip("needs mdbook, from the book extra")
    tree = ROOT / "upstream"
    if not tree.is_dir():
        pytest.skip("needs the pinned tree: course upstream fetch")
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    built = ROOT / "build" / "book" / "built-for"
    with locked(built.with_suffix(".lock")):  # one of several processes builds it for all
        if not run or not built.is_file() or built.read_text() != run:
            assert book.build(ROOT, tree) == []
            built.write_text(run)
    return book.site_folder(ROOT)


@pytest.fixture(scope="session")
def url(site):
    """The site's address, below a path of its own, as on a shared host."""
    with book_site.serving(site.parent, 0) as address:
        yield f"{address}{site.name}/"


@pytest.fixture
def open_page(browser, url):
    """Open a page of the site; what the browser complained about is in `page.complaints`.

    Nothing moves by itself unless `motion` is asked for, and a long page's sections are open on a
    phone unless `folded` is; `prepare(page)` is called before it loads.
    """
    contexts = []

    def open_(
        path: str = "",
        *,
        width: int = 1280,
        theme: str = "light",
        javascript: bool = True,
        touch: bool = False,
        motion: bool = False,
        folded: bool = False,
        prepare: Callable[[Any], None] | None = None,
    ):
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            java_script_enabled=javascript,
            has_touch=touch,
            is_mobile=touch,
            reduced_motion="no-preference" if motion else "reduce",
        )
        context.set_default_timeout(180_000)
        contexts.append(context)
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda m: m.type == "error" and page.complaints.append(m.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on(
            "request",
            lambda r: r.url.startswith((url, "data:")) or page.complaints.append(f"left: {r.url}"),
        )
        if javascript:
            page.add_init_script(f"localStorage.setItem('mdbook-theme', '{theme}')")
            if not folded:
                page.add_init_script("localStorage.setItem('course-sections-open', 'true')")
        if prepare is not None:
            prepare(page)
        page.goto(url + path)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture
def checkout(tmp_path):
    """A course of one lab, 02-01, apart from this one."""
    root = tmp_path / "checkout"
    folder = pick(find_labs(ROOT), "02-01").folder
    shutil.copytree(folder, root / folder.relative_to(ROOT))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture
def at_home(site, browser, checkout):
    """That lab's page as `course book serve` sends it."""
    with book_site.serving(site, 0, None, local.Local(checkout)) as address:
        context = browser.new_context()
        context.set_default_timeout(180_000)
        page = context.new_page()
        page.goto(address)
        folder = find_labs(checkout)[0].folder.relative_to(checkout).as_posix()
        page.goto(f"{address.partition('?')[0]}{folder}/index.html")
        yield page
        context.close()
