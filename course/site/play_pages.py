"""The Python blocks of the phases' pages, run as a page runs them, in Node.

`course book runtime --pages`: each block's output is the one the page shows, as
`course docs check` demands here; but for those that `play_excepted` names, which must fail.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from course.learning.labs import CourseError
from course.site import play, play_excepted, play_payload
from course.site.play_check import Worker
from course.truth import pages


def check(root: Path, done: Callable[[str, int, list[str]], None]) -> int:
    """Run the blocks of every phase's pages; the number of pages with a problem.

    Args:
        done: hears of each page as it ends: its name, its blocks, what is wrong.

    Raises:
        CourseError: there is no whole runtime, or no Node.
    """
    if why := play.problem(root):
        raise CourseError(f"What runs Python in the pages: {why}. Make it: course book runtime")
    bad = 0
    with tempfile.TemporaryDirectory(prefix="play-", dir=root / "build") as scratch:
        play_payload.write(root, Path(scratch))
        worker = Worker(root, Path(scratch))
        try:
            for page in pages.find(root, sorted(root.glob("phase-*"))):
                if pages.runnable(page):
                    problems = check_page(worker, root, page)
                    bad += bool(problems)
                    done(page.relative_to(root).as_posix(), len(pages.runnable(page)), problems)
        finally:
            worker.end()
    return bad


def check_page(worker: Worker, root: Path, page: Path) -> list[str]:
    """Run a page's blocks one after the other; what is wrong."""
    name = page.relative_to(root).as_posix()
    excepted = play_excepted.BLOCKS.get(name, {})
    problems = []
    pairs = pages.runnable(page)
    for index, (block, expected) in enumerate(pairs):
        where = f"{name}:{block.line}, block {index}"
        payload = {"page": name, "index": index, "code": block.text}
        try:
            result, _ = worker.call("block", payload, recycle=index + 1 == len(pairs))
        except CourseError as error:
            problems.append(f"{where}: {error}")
            break
        wrong = ""
        if result["error"]:
            wrong = str(result["error"]).splitlines()[-1]
        elif expected is not None and result["text"] != expected.text:
            wrong = pages.difference(page, expected, result["text"]).text
        if wrong and str(index) not in excepted:
            problems.append(f"{where}: {wrong}")
        elif not wrong and str(index) in excepted:
            problems.append(f"{where} need not be excepted: it runs in the page")
    return problems
