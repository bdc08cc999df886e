"""The last hand on a page that mdBook wrote: for a phone, and for a link that is shared.

Promises: no word of a page changes; names in code break after `_`, `/` and `.` and nowhere else;
a table that is too wide for a phone can be stacked row by row, each cell with its column's name;
every figure leads to itself alone; what a shared link shows is the page's own title and words.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from course.site.colours import coloured

IMAGE = "social.png"
"""The picture of a shared link, in `book/` and at the root of the site."""
ADDRESS = "COURSE_SITE"
"""The environment variable with the address that the site will have: some readers of a shared link
take a picture only from a full address."""
DESCRIPTION_LIMIT = 200
NOWHERE, OFFLINE = "404.html", "offline.js"
TEXT = "text"
"""The name of a page's <main>."""
PHONE = 36
"""Characters that fit side by side in the columns of a table at 390 pixels."""

_MAIN = re.compile(r"(<main>)(.*)(</main>)", re.DOTALL)
_PIECE = re.compile(
    r"<script\b.*?</script>|<math\b.*?</math>|<!--.*?-->|<(?:[^<>\"']|\"[^\"]*\"|'[^']*')*>|[^<]+|<",
    re.DOTALL,
)
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t([hd])((?: [^>]*)?)>(.*?)</t\1>", re.DOTALL)
_FORMULA = re.compile(r"<math\b.*?</math>", re.DOTALL)
_TAG = re.compile(r"\[(?:CPU-OK|GPU-OPT|GPU-REQ)\]")
_BREAK = re.compile(r"(?<=\w)([_/.]+)(?=\w)")
_LONG_NAME = re.compile(r"[\w./]{8,}")
_MAY = "\u200b"


def finish(root: Path, site: Path) -> None:
    """Go over every page of the finished site, and put the picture of shared links beside them."""
    image = root / "book" / IMAGE
    if image.is_file():
        shutil.copyfile(image, site / IMAGE)
    for file in sorted(site.rglob("*.html")):
        made = file.read_text(encoding="utf-8")
        main = _MAIN.search(made)
        if main is None:
            continue
        inside = breakable(side_notes(named_boxes(main[2])))
        inside = coloured(figures_open(tables_stack(inside)))
        made = made[: main.start(2)] + inside + made[main.end(2) :]
        made = skippable(made)
        path = file.relative_to(site)
        if image.is_file() and path.name != "toc.html":
            made = shared(made, main[2], path.as_posix(), os.environ.get(ADDRESS, ""))
        file.write_text(made, encoding="utf-8")


def last(root: Path, site: Path) -> None:
    """What stands beside the pages: a page for addresses that lead nowhere, and what keeps the site
    readable offline. Called when everything else is there: it names the build by its bytes."""
    base = urlsplit(os.environ.get(ADDRESS, "")).path.rstrip("/") + "/"
    (site / NOWHERE).write_text(nowhere(base), encoding="utf-8")
    worker = root / "book" / OFFLINE
    if not worker.is_file():
        return
    build = hashlib.sha256()
    for path in sorted(path for path in site.rglob("*") if path.is_file() and path.name != OFFLINE):
        build.update(path.relative_to(site).as_posix().encode())
        build.update(hashlib.sha256(path.read_bytes()).digest())
    text = worker.read_text(encoding="utf-8")
    made = text.replace('const BUILD = "";', f'const BUILD = "{build.hexdigest()[:12]}";', 1)
    (site / OFFLINE).write_text(made, encoding="utf-8")


def nowhere(base: str) -> str:
    """The page of a dead address; `base` is the path of the site, since it is shown at any depth.

    It carries its own few rules: what its site's styles are called is another page's to know.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>No page here</title>
<base href="{html.escape(base)}">
<style>
:root {{ color-scheme: light dark; font: 1.1em/1.5 system-ui, sans-serif; }}
main {{ max-width: 36em; margin: 15vh auto; padding: 0 1em; }}
</style>
</head>
<body>
<main>
<h1>No page here</h1>
<p>The address leads to no page of this site: it was mistyped, or the page has moved.</p>
<p><a href="index.html">The first page</a> lists every phase; its search finds every section.</p>
</main>
</body>
</html>
"""


def skippable(page: str) -> str:
    """The page with a first link that leads past bar and list to its text."""
    link = f'<a class="skip-link" href="#{TEXT}">Skip to the text</a>'
    page = re.sub(r"(<body\b[^>]*>)", lambda body: f"{body[0]}\n        {link}", page, count=1)
    return page.replace("<main>", f'<main id="{TEXT}" tabindex="-1">', 1)


def words(piece: str) -> str:
    """The text of a piece of HTML, on one line."""
    piece = re.sub(r"<(script|math|style)\b.*?</\1>", "", piece, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", piece)).split())


# ------------------------------------------------------------------ tables


def tables_stack(text: str) -> str:
    """Give each cell the name of its column, and mark the tables that a phone has no room for."""
    return _TABLE.sub(lambda table: _stacked(table[0]), text)


def _stacked(table: str) -> str:
    rows = [
        [
            words(_FORMULA.sub(_as_text, cell[3]).replace("<wbr>", _MAY))
            for cell in _CELL.finditer(row)
        ]
        for row in _ROW.findall(table)
    ]
    if len(rows) < 2:
        return table
    names = [name.replace(_MAY, "") for name in rows[0]]

    def labelled(row: re.Match[str]) -> str:
        place = iter(names)

        def cell(match: re.Match[str]) -> str:
            name = next(place, "")
            if match[1] == "h" or not name:
                return match[0]
            return f'<td{match[2]} data-label="{html.escape(name)}">{match[3]}</td>'

        return _CELL.sub(cell, row[0])

    mark = '<table class="stack">' if too_wide(rows) else "<table>"
    return mark + _ROW.sub(labelled, table).removeprefix("<table>")


def _as_text(formula: re.Match[str]) -> str:
    """The signs of a formula as one part: it is never broken."""
    return "".join(re.sub(r"<[^>]+>", "", formula[0]).split())


def too_wide(rows: list[list[str]]) -> bool:
    """Whether a table's rows stand one under the other on a phone.

    Args:
        rows: the texts of the cells, the names of the columns first; a zero-width space stands
            where a word may be broken.
    """
    columns = max(map(len, rows))
    if columns < 2:
        return False
    room = PHONE - 2 * columns  # what the padding leaves
    parts = [[_longest_part(row[i]) if i < len(row) else 0 for row in rows] for i in range(columns)]
    lines = max(sum(map(len, row)) for row in rows) / room
    return sum(map(max, parts)) > room or lines > 3


def _longest_part(text: str) -> int:
    """Characters of the longest part that is not broken."""
    parts = re.split(rf"\s+|{_MAY}|(?<=[a-z]-)(?=[a-z])", text)
    return max(map(len, parts), default=0)


# ------------------------------------------------------------------ names and tags


def _in_parts(name: re.Match[str]) -> str:
    return _BREAK.sub(r"\1<wbr>", name[0])


def breakable(text: str) -> str:
    """Allow long names in code to break after `_`, `/` and `.`; keep a tag on one line."""
    out = []
    fenced = code = 0
    for piece in _PIECE.findall(text):
        if piece.startswith("<"):
            fenced += piece.startswith("<pre") - (piece == "</pre>")
            code += (piece == "<code>") - (piece == "</code>" and code > 0)
        elif fenced:
            pass
        elif code:
            piece = _LONG_NAME.sub(_in_parts, piece)
        else:
            piece = _TAG.sub(lambda m: f'<span class="tag">{m[0]}</span>', piece)
        out.append(piece)
    return "".join(out)


# ------------------------------------------------------------------ citations beside the text


_CITED = (
    r'<a href="https://github\.com/vllm-project/vllm/blob/[^"]*"><code>[^<]*</code></a>'
    r"(?:<abbr\b[^>]*>[^<]*</abbr>)?(?:\s<code>[^<]*</code>)?"
)
_CITATIONS = re.compile(rf"\s?\(({_CITED}(?:(?:,|;|,?\sand)\s{_CITED})*)\)")
_FOLDER = re.compile(r"(<a [^>]*><code>)((?:\w+/)+)(?=[^<]*</code></a>)")


def side_notes(text: str) -> str:
    """Citations in brackets as notes: beside the text where there is room, short on a phone.

    The brackets and the folders stay in the page, for those who hear, search or print it; book.css
    says where they are seen.
    """

    def noted(match: re.Match[str]) -> str:
        inside = _FOLDER.sub(r'\1<span class="folder">\2</span>', match[1])
        return (
            f'<span class="side"><span class="bracket"> (</span>{inside}'
            '<span class="bracket">)</span></span>'
        )

    return _CITATIONS.sub(noted, text)


# ------------------------------------------------------------------ lists of tasks


_BOX = re.compile(r'<input (?=[^>]*\bdisabled\b)([^>]*type="checkbox"[^>]*?)( ?/?)>')


def named_boxes(text: str) -> str:
    """Give the box before each task of a list a name, for those who hear the page."""
    return _BOX.sub(r'<input \1 aria-label="task"\2>', text)


# ------------------------------------------------------------------ figures


_ZOOM = re.compile(
    r'<label class="checkbox-label"><input class="checkbox-img"[^>]*>'
    r'(<img [^>]*\bsrc="[^"]+\.svg"[^>]*>)<span class="img-wrapper"><img [^>]*></span></label>'
)


def figures_open(text: str) -> str:
    """Make each figure a link to itself alone; book.js shows it over the page instead.

    The theme's own way, a hidden checkbox and a second picture, would be an unseen stop.
    """
    text = _ZOOM.sub(r"\1", text)
    out = []
    links = 0
    folds: list[bool] = []  # of the open <div>s: is it a widget?
    for piece in _PIECE.findall(text):
        if piece.startswith("<div"):
            folds.append("data-widget=" in piece)
        elif piece == "</div>" and folds:
            folds.pop()
        links += piece.startswith("<a ") - (piece == "</a>")
        if piece.startswith("<img ") and not links and not any(folds):
            source = re.search(r'\bsrc="([^"]+\.svg)"', piece)
            if source:
                piece = f'<a class="figure" href="{source[1]}" title="Open large">{piece}</a>'
        out.append(piece)
    return "".join(out)


# ------------------------------------------------------------------ shared links


def shared(page: str, main: str, path: str, address: str) -> str:
    """The page with its own description and the tags that a shared link is shown by.

    Args:
        page: the whole page; `main` is its text.
        path: the page in the site, with slashes.
        address: of the site, or "": then the picture's place is given from the page.
    """
    site_title = re.search(r'<h1 class="menu-title">(.*?)</h1>', page, re.DOTALL)
    heading = re.search(r"<h1\b[^>]*>(.*?)</h1>", main, re.DOTALL)
    name = words(site_title[1]) if site_title else ""
    title = words(heading[1]) if heading else name
    about = description(main)
    home = address.rstrip("/") + "/" if address else "../" * path.count("/")
    tags = {
        "og:type": "website" if path == "index.html" else "article",
        "og:site_name": name,
        "og:title": title,
        "og:description": about,
        "og:image": home + IMAGE,
        "og:image:alt": "Requests of an engine's run, one row each, step by step",
        "twitter:card": "summary_large_image",
    }
    if address:
        tags["og:url"] = home + path
    lines = [
        f'<meta {"name" if key.startswith("twitter") else "property"}="{key}" '
        f'content="{html.escape(value)}">'
        for key, value in tags.items()
        if value
    ]
    if about:
        own = f'<meta name="description" content="{html.escape(about)}">'
        page = re.sub(r'<meta name="description" content="[^"]*">', lambda _: own, page, count=1)
    return page.replace("</head>", "    " + "\n        ".join(lines) + "\n    </head>", 1)


def description(main: str) -> str:
    """The first paragraph of a page's own words, cut at a word."""
    for attributes, inside in re.findall(r"<p((?: [^>]*)?)>(.*?)</p>", main, re.DOTALL):
        text = words(inside)
        if attributes or len(text) < 40:
            continue
        if len(text) > DESCRIPTION_LIMIT:
            text = text[: DESCRIPTION_LIMIT - 1].rsplit(" ", 1)[0].rstrip(",;:") + "\u2026"
        return text
    return ""
