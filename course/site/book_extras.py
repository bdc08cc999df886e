"""What the book adds to a page: where you are in the phase, what it takes, definitions, widgets.

Promises: nothing here changes a word of the page; a widget that a page names and that is not there
is refused by page and line.
"""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from course.learning import manifest
from course.learning.labs import phase_title
from course.site import widgets
from course.site.addresses import href, phase_of
from course.truth import curriculum, pages
from course.truth.citations import Finding

WORDS_PER_MINUTE = 200
LINES_OF_CODE_PER_MINUTE = 30
"""How fast a page is taken to be read: a slow pace for prose, a slower one for code."""

SHORT = {
    "README.md": "Overview",
    "00-guide.md": "Guide",
    "01-deep-dive.md": "Deep dive",
    "02-mini-build.md": "Mini-build",
    "labs/README.md": "Labs",
    "READING.md": "Reading lab",
    "EXERCISES.md": "Exercises",
    "INTERVIEW.md": "Interview",
    "CHEATSHEET.md": "Cheat sheet",
}
_WIDGET = re.compile(
    r"^<!-- widget: (?P<name>[\w-]+) -->(?:\n+(?P<figure>!\[[^\]]*\]\([^)]+\)))?", re.MULTILINE
)
_TITLE = re.compile(r"^# .+$", re.MULTILINE)


@functools.cache
def definitions(glossary: Path) -> dict[str, str]:
    """Anchor to definition: what stands in the first paragraph under each heading."""
    if not glossary.is_file():
        return {}
    text = glossary.read_text(encoding="utf-8")
    found = re.findall(r"^###? (.+)\n\n((?:[^#\n].*\n)+)", text, re.MULTILINE)
    return {pages.slug_of(plain(term)): plain(definition) for term, definition in found}


def define_terms(root: Path, text: str) -> str:
    """Give each link to a term of the glossary its definition as the link's title."""
    known = definitions(root / "GLOSSARY.md")

    def titled(match: re.Match[str]) -> str:
        definition = known.get(match[2], "").replace('"', "'")
        return f'{match[1]} "{definition}")' if definition else match[0]

    return re.sub(r"(\]\((?:[^()\s]*/)?GLOSSARY\.md#([\w-]+))\)", titled, text)


def plain(markdown: str) -> str:
    """The words of a line of Markdown, citations and table bars left out, on one line."""
    text = re.sub(r"`[^`]*:\d+[^`]*`(?:\s*`[^`]*`)?", "", markdown)  # citations
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[*`|]", " ", re.sub(r"<[^>]+>", "", text))
    text = re.sub(r"\(\s*[,;]*\s*\)", "", " ".join(text.split()))
    text = re.sub(r"\s+([.,;:)])", r"\1", text)
    return re.sub(r"(?<!\.)\.\.(?!\.)", ".", text).strip(" -:")  # a citation stood between them


def minutes_to_read(text: str) -> int:
    """Whole minutes, at least one."""
    words = lines = 0
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            lines += token.content.count("\n")
        elif token.type == "inline":
            words += len(token.content.split())
    return max(1, round(words / WORDS_PER_MINUTE + lines / LINES_OF_CODE_PER_MINUTE))


def frame(root: Path, page: Path, text: str, listed: Sequence[Path]) -> str:
    """`text` with the phase's strip and the page's facts under the title, neighbours at the end.

    Args:
        root: the repository; `page` is a page of it, `text` what the book shows of it.
        listed: the pages of the book, in reading order.
    """
    phase = phase_of(root, page)
    if phase is None:
        return text
    facts = _facts(page) if page.is_file() else ""
    top = f"\n{_strip(phase, page)}\n{facts}\n"
    match = _TITLE.search(text)
    if match:
        place = f"{_place(phase)}\n\n"
        text = text[: match.start()] + place + match[0] + "\n" + top + text[match.end() :]
    return f"{text.rstrip()}\n\n{_neighbours(root, phase, page, listed)}\n"


def _strip(phase: Path, page: Path) -> str:
    items = []
    for name, title in SHORT.items():
        target = phase / name
        if not target.is_file() and name != "README.md":  # that one is made with the book
            continue
        here = target == page
        inside = name == "labs/README.md" and (phase / "labs") in page.parents and not here
        current = ' aria-current="page"' if here else ' class="phase-inside"' if inside else ""
        items.append(f'<a href="{href(page, target)}"{current}>{title}</a>')
    number, *words = phase.name.split("-")[1:]
    label = html.escape(f"Phase {number}, {' '.join(words)}")
    return f'<nav class="phase-strip" aria-label="{label}">{"".join(items)}</nav>'


def _place(phase: Path) -> str:
    """Which phase of how many: they are numbered from 00."""
    number = phase.name.split("-")[1]
    return (
        f'<p class="phase-place">Phase {number}, {int(number) + 1} of {len(curriculum.PHASES)}</p>'
    )


def _facts(page: Path) -> str:
    minutes = minutes_to_read(page.read_text(encoding="utf-8"))
    facts = [f"{minutes} min to read"]
    if (page.parent / "lab.yaml").is_file():
        lab = manifest.load(page.parent / "lab.yaml")
        facts += [f"about {lab.minutes} min to do", f"<code>course check {lab.id}</code>"]
        facts.insert(1, f"{lab.kind}: {html.escape(manifest.KINDS[lab.kind])}")
        if (page.parent / "run.py").is_file():
            facts.append(f"with a GPU: <code>course gpu run {lab.id}</code>")
    return f'<p class="page-facts">{" · ".join(facts)}</p>\n'


def _neighbours(root: Path, phase: Path, page: Path, listed: Sequence[Path]) -> str:
    own = [other for other in listed if other.is_relative_to(phase)]
    at = own.index(page)
    links = []
    for place, word in ((at - 1, "Previous"), (at + 1, "Next")):
        if 0 <= place < len(own):
            title = html.escape(name_of(phase, own[place]))
            links.append(
                f'<a class="{word.lower()}-page" href="{href(page, own[place])}">'
                f"<small>{word}</small>{title}</a>"
            )
    end = own[-1]
    if page == end:
        after = [other for other in listed[listed.index(end) + 1 :] if phase_of(root, other)]
        if after:
            title = html.escape(phase_title(root / after[0].relative_to(root).parts[0]))
            links.append(
                f'<a class="next-page" href="{href(page, after[0])}">'
                f"<small>Next phase</small>{title}</a>"
            )
    return f'<nav class="neighbours" aria-label="Before and after this page">{"".join(links)}</nav>'


def name_of(phase: Path, page: Path) -> str:
    """What the links to a page call it: short where every phase has one."""
    short = SHORT.get(page.relative_to(phase).as_posix())
    if short:
        return short
    match = _TITLE.search(page.read_text(encoding="utf-8"))
    return match[0].lstrip("# ").replace("`", "") if match else page.stem


def fold_until_passed(page: Path, text: str) -> str:
    """Mark what a lab's tests pin: a folded part that stays folded until the lab is passed.

    The mark is `class="until-passed"` with the lab's id in `data-lab`, for a script to act on.
    """
    lab = manifest.id_of(page.parent)
    if lab is None:
        return text
    pins = r"<details>(\s*<summary>\s*What (?:the tests pin|each test pins)\b)"
    return re.sub(pins, rf'<details class="until-passed" data-lab="{lab}">\1', text)


# ------------------------------------------------------------------ widgets


def embed_widgets(
    page: Path,
    text: str,
    depth: int,
    hold: Callable[[str], str],
    findings: list[Finding],
) -> str:
    """Put each `<!-- widget: NAME -->` and the figure under it into a host for that widget.

    Args:
        depth: folders between the page and the root of the site.
        hold: keeps a piece of HTML out of reach of what reads the page after this.
    """
    rows = page.read_text(encoding="utf-8").split("\n") if page.is_file() else []
    scripts = ["widget"]

    def host(match: re.Match[str]) -> str:
        name = match["name"]
        line = rows.index(f"<!-- widget: {name} -->") + 1
        if name not in widgets.NAMES:
            known = ", ".join(widgets.NAMES)
            findings.append(Finding(page, line, f"no widget is called {name}; there are {known}"))
            return match["figure"] or ""
        if not match["figure"]:
            findings.append(Finding(page, line, "a widget needs a figure in the next paragraph"))
            return ""
        scripts.extend(s for s in widgets.scripts(name) if s not in scripts)
        data = f'<script type="application/json">{widgets.embedded(name)}</script>'
        opening = hold(f'<div class="widget" data-widget="{name}">\n{data}')
        return f"{opening}\n\n{match['figure']}\n\n{hold('</div>')}\n"

    text = _WIDGET.sub(host, text)
    if len(scripts) > 1:
        up = "../" * depth
        tags = "".join(
            f'<script defer src="{up}book/widgets/{name}.js"></script>' for name in scripts
        )
        text += f"\n\n{hold(tags)}\n"
    return text
