"""The landing page of each phase: its promise, its hours, the way through, what you will have.

Promises: nothing on it is typed that can be counted or read elsewhere: its words are the guide's
opening and the course's table, its times those of the pages and labs, its parts those that labs
supply; a page that does not exist is not promised. It is made when the book is staged, and stands
at `README.md` of the phase, where no file is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

from course.learning import mine
from course.learning.labs import Lab, find_labs, phase_title
from course.site import addresses, answers, book_extras
from course.truth import curriculum

PAGE = "README.md"
"""Where a landing page stands in its phase; the book shows it as the folder's index."""
GUIDE, LABS = "00-guide.md", "labs/README.md"
TELLS = {
    GUIDE: "the ideas, from nothing; it stops where each lab can be done",
    "01-deep-dive.md": "the same in vLLM's source",
    "02-mini-build.md": "the same in mini_vllm",
    "READING.md": "where vLLM decides it: answered with a path and a line",
    "EXERCISES.md": "questions to answer in writing",
    "INTERVIEW.md": "questions to answer aloud",
    "CHEATSHEET.md": "one screen, for afterwards",
}
_IMAGE = re.compile(r"!\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def page_of(phase: Path) -> Path:
    """The landing page of a phase: no file of the repository."""
    return phase / PAGE


def is_landing(root: Path, page: Path) -> bool:
    """Whether a page is one of those made here."""
    phase = addresses.phase_of(root, page)
    return phase is not None and page == page_of(phase)


def to_landings(home: str) -> str:
    """The home page's text, its table of phases leading to the landing pages."""
    table = re.compile(r"(?<=<!-- curriculum -->).*?(?=<!-- /curriculum -->)", re.DOTALL)
    link = re.compile(rf"\]\((phase-[^/()\s]+)/(?:{re.escape(GUIDE)}|{re.escape(LABS)})\)")
    return table.sub(lambda rows: link.sub(rf"](\1/{PAGE})", rows[0]), home)


def landing(root: Path, phase: Path, order: Sequence[Path]) -> str:
    """The landing page's Markdown, as if it stood in the phase's folder.

    Args:
        order: the pages of the book, in reading order.
    """
    labs = [lab for lab in find_labs(root) if lab.folder.is_relative_to(phase)]
    number, _, name = phase_title(phase).partition(" ")
    guided = (phase / GUIDE).is_file()
    if not guided and int(number) < len(curriculum.PHASES):
        name = curriculum.PHASES[int(number)][0]
    goal = _goal(int(number)) if guided else ""
    first = phase / (GUIDE if guided else LABS)
    parts = [
        f"# {name}",
        f'<p class="place-goal">{html.escape(goal)}</p>' if goal else "",
        f'<p class="page-facts">{time_told(phase, labs)}</p>',
        f'<div class="place-now" data-phase="{phase.name}" hidden></div>',
        opening(phase, int(number)),
        f'<p class="place-start"><a href="{_href(phase, first)}">'
        f"{'Start with the guide' if guided else 'Start with the labs'}</a></p>",
        picture(phase, labs),
        "## The way through",
        _way(phase, labs, order),
        "## What you will have" if labs else "",
        outcome(labs),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _goal(number: int) -> str:
    """What the table on the home page says, as a sentence's beginning."""
    if number >= len(curriculum.PHASES):
        return ""
    goal = curriculum.PHASES[number][1]
    return goal[:1].upper() + goal[1:]


def opening(phase: Path, number: int) -> str:
    """The guide's first paragraph, said of the phase; "" where it has none."""
    guide = phase / GUIDE
    if not guide.is_file():
        return ""
    blocks = re.split(r"\n{2,}", guide.read_text(encoding="utf-8").strip())
    words = next((block for block in blocks if not block.startswith(("#", "<", "!", "```"))), "")
    return re.sub(r"\b([Tt])his page\b", r"\1his phase", words)


def picture(phase: Path, labs: Sequence[Lab]) -> str:
    """The first picture of the guide, or of a lab, as Markdown."""
    for page in (phase / GUIDE, *(lab.folder / "README.md" for lab in labs)):
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        if match := _IMAGE.search(text):
            figure = (page.parent / match[2]).resolve()
            if figure.is_relative_to(phase):
                return f"![{match[1]}]({figure.relative_to(phase).as_posix()})"
    return ""


# ------------------------------------------------------------------ times


def minutes_of(page: Path) -> int:
    """To read a page of the repository."""
    return book_extras.minutes_to_read(page.read_text(encoding="utf-8"))


def hours(minutes: int) -> str:
    """Minutes as a reader plans them: hours from two on, in halves below ten."""
    if minutes < 120:
        return f"{minutes} minutes"
    value = round(minutes / 30) / 2 if minutes < 600 else round(minutes / 60)
    return f"{value:g} hours"


def time_told(phase: Path, labs: Sequence[Lab]) -> str:
    """How long the phase takes, in a line."""
    pages = [phase / name for name in TELLS if (phase / name).is_file()]
    reading = sum(map(minutes_of, pages)) + sum(
        minutes_of(lab.folder / "README.md") for lab in labs
    )
    doing = sum(lab.manifest.minutes for lab in labs)
    count = f"{len(labs)} lab{'s' * (len(labs) != 1)}"
    told = [f"About {hours(reading + doing)}", f"{hours(reading)} to read"]
    if labs:
        told.append(f"{hours(doing)} for {count}")
    if (phase / "EXERCISES.md").is_file():
        told.append("answering exercises comes on top")
    return " · ".join(told)


# ------------------------------------------------------------------ the way


def _way(phase: Path, labs: Sequence[Lab], order: Sequence[Path]) -> str:
    """The pages in reading order with their minutes; the labs beneath the guide that names them."""
    steps = []
    inner = "".join(_lab_step(phase, lab) for lab in labs)
    nested = f'\n<ol class="place-labs">\n{inner}</ol>\n' if inner else ""
    for name, tells in TELLS.items():
        page = phase / name
        if not page.is_file():
            continue
        own = answers.on_page(page)
        asked = f' data-questions="{" ".join(q.id for q in own)}"' if own else ""
        told = f"{html.escape(tells)}{_checked(len(own))}"
        link = f'<a href="{_href(phase, page)}">{book_extras.SHORT[name]}</a>'
        facts = f"<small>{minutes_of(page)} min</small>"
        steps.append(
            f"<li{asked}>{link} {facts} <span>{told}</span>{nested if name == GUIDE else ''}</li>\n"
        )
    if not (phase / GUIDE).is_file():
        steps = [_lab_step(phase, lab) for lab in labs] + steps
    made = f'<ol class="place-map">\n{"".join(steps)}</ol>'
    further = [page for page in order if page.is_relative_to(phase) and _is_further(phase, page)]
    if further:
        links = ", ".join(
            f'<a href="{_href(phase, page)}">{html.escape(book_extras.name_of(phase, page))}</a>'
            for page in further
        )
        made += f'\n<p class="place-further">Also here: {links}</p>'
    return made


def _lab_step(phase: Path, lab: Lab) -> str:
    told = lab.manifest
    link = (
        f'<a href="{_href(phase, lab.folder / "README.md")}">{lab.id} {html.escape(told.title)}</a>'
    )
    return f"<li>{link} <small>{told.minutes} min, {told.kind}, {told.tag}</small></li>\n"


def _checked(count: int) -> str:
    return f"; {count} answers can be checked on the page" if count else ""


def _is_further(phase: Path, page: Path) -> bool:
    """Whether a page of the phase is none that every phase has, and no lab's own."""
    inside = page.relative_to(phase)
    lab = inside.parts[0] == "labs" and inside.name == PAGE
    return inside.as_posix() not in book_extras.SHORT and not lab


def _href(phase: Path, page: Path) -> str:
    return addresses.href(page_of(phase), page)


# ------------------------------------------------------------------ what you will have


def outcome(labs: Sequence[Lab]) -> str:
    """What the labs make: code of one's own, by how many tests it is checked, which parts run."""
    if not labs:
        return ""
    yours = sum(len(lab.manifest.yours) for lab in labs)
    tests = sum(len(lab.test_names()) for lab in labs if lab.test_file.is_file())
    text = f"{yours} functions and classes of your own, checked by {tests} tests."
    parts = [
        (lab, lab.manifest.part, mine.attribute_of(lab.manifest.part))
        for lab in labs
        if lab.manifest.part
    ]
    if not parts:
        return text
    rows = "\n".join(
        f"* `{name}`, the engine's `{part}`, from lab "
        f"[{lab.id}]({lab.folder.relative_to(lab.folder.parents[1]).as_posix()}/README.md): "
        f"`{mine.command(part)}`"
        for lab, part, name in parts
    )
    if len(parts) == 1:
        told = "One of the labs supplies a part of the engine. Once it has passed"
    else:
        told = f"{len(parts)} labs supply a part of the engine. Once one has passed"
    return f"{text}\n\n{told}, the command beside it calls what you wrote:\n\n{rows}"
