"""Questions of a phase's quiz, and its exercises with code, put under what they belong to.

Promises: a box stands before the first fold of its question, so that the answer is not read on
the way to it; where the answers of a part stand open, as in a table, there is no box; what the box
holds is `quiz.document`, which a script draws, and without one the page is as it was. Code is asked
for in words that stand without a script too, with the command that grades it.
"""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from course.learning import exercises, quiz
from course.learning.exercises import Exercise
from course.learning.quiz import Question

PAGES = ("EXERCISES.md", "INTERVIEW.md", "READING.md")
FOLDER = Path(__file__).resolve().parents[2] / "book" / "places"
SCRIPTS = ("quiz", "asks", "answers")
"""Of that folder, in the order in which they load."""

_HEADING = re.compile(r"(#{2,4}) (.+)")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def embed(page: Path, text: str, depth: int, hold: Callable[[str], str]) -> str:
    """`text` with a box for each question of the phase's quiz that comes from this page.

    Args:
        page: the page in the repository; its phase's quiz lies beside it.
        depth: folders between the page and the root of the site.
        hold: keeps a piece of HTML out of reach of what reads the page after this.
    """
    rows = text.split("\n")
    boxes = spots(page, rows)
    if not boxes:
        return text
    for row in sorted(boxes, reverse=True):
        rows[row:row] = [hold(_box(question)) + "\n" for question in boxes[row]]
    up = "../" * depth
    scripts = "".join(f'<script defer src="{address(name, up)}"></script>' for name in SCRIPTS)
    return "\n".join(rows) + f"\n\n{hold(scripts)}\n"


@cache
def questions(phase: Path) -> tuple[Question, ...]:
    """The sound questions of a phase's quiz; its own check names the others."""
    path = phase / quiz.FILE
    return tuple(quiz.load(path)[0]) if path.is_file() else ()


@cache
def coded(phase: Path) -> tuple[Exercise, ...]:
    """The sound exercises of a phase that are answered with code."""
    path = phase / exercises.FILE
    return tuple(exercises.load(path)[0]) if path.is_file() else ()


def with_code(page: Path) -> bool:
    """Whether a page has an exercise that is answered with code."""
    return any(next(places(each, page.name), "") for each in coded(page.parent))


def spots(page: Path, rows: list[str]) -> dict[int, list[Question | Exercise]]:
    """By row of the page: the questions and exercises whose boxes stand before it."""
    boxes: dict[int, list[Question | Exercise]] = {}
    asked: list[Question | Exercise] = [*questions(page.parent), *coded(page.parent)]
    for question in asked if page.name in PAGES else ():
        for place in places(question, page.name):
            row = spot(rows, place)
            if row is not None:
                boxes.setdefault(row, []).append(question)
                break
    return boxes


def on_page(page: Path) -> list[Question | Exercise]:
    """The questions and exercises that can be answered on a page, in its order."""
    boxes = spots(page, page.read_text(encoding="utf-8").split("\n"))
    return [question for row in sorted(boxes) for question in boxes[row]]


def places(question: Question | Exercise, name: str) -> Iterator[str]:
    """Where on the page `name` a question comes from: what follows the comma of its sources."""
    for source in question.source.split(";"):
        page, _, place = source.partition(",")
        if page.strip() == name:
            yield place.strip()


def spot(rows: list[str], place: str) -> int | None:
    """The row of the first fold under the heading that `place` names; None without one.

    Args:
        place: a number ("4"), one with a Q ("Q4"), a number and words, or a heading's words.
    """
    wanted = re.fullmatch(r"Q?(\d+)(?:[.:)] .*)?", place)
    level = 0
    for row, heading, line in _outside_fences(rows):
        if heading:
            depth, title = len(heading[1]), heading[2].replace("`", "").casefold()
            if level and depth <= level:
                return None
            if wanted:
                found = re.match(r"q?(\d+)[.:)] ", title)
                here = found is not None and found[1] == wanted[1]
            else:
                here = place.casefold() in title
            level = level or (depth if here else 0)
        elif level and line.startswith("<details"):
            return row
    return None


def _outside_fences(rows: list[str]) -> Iterator[tuple[int, re.Match[str] | None, str]]:
    fence = ""
    for row, line in enumerate(rows):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip("`~"):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield row, _HEADING.match(line), line


def address(name: str, up: str) -> str:
    """Where a script of FOLDER lies in the site; `up` leads from the page to its root."""
    return f"{up}book/places/{name}.js?v={_version(name)}"


@cache
def _version(name: str) -> str:
    """Of a script's content, so that no browser keeps an old one."""
    return hashlib.sha256((FOLDER / f"{name}.js").read_bytes()).hexdigest()[:8]


def _box(question: Question | Exercise) -> str:
    if isinstance(question, Exercise):
        data = exercises.document(question).replace("</", "<\\/")
        words = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(question.ask, quote=False))
        return (
            f'<div class="answer-box" id="answer-{question.id}" data-question="{question.id}" '
            f"data-code>"
            f'<p class="answer-ask" id="answer-{question.id}-ask">{words}</p>'
            f'<p class="answer-command">At a terminal: '
            f"<code>course exercise {question.id}</code></p>"
            f'<script type="application/json">{data}</script></div>'
        )
    data = quiz.document([question])[1:-1].replace("</", "<\\/")
    return (
        f'<div class="answer-box" data-question="{question.id}" hidden>'
        f'<script type="application/json">{data}</script></div>'
    )
