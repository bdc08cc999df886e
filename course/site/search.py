"""The search of the site: an index in small parts, made of the finished pages.

Promises: the list of pages and headings is one file; postings lie in shards by the first letters
of their words, a page's text in a file of its own; each is loaded when it is asked for, as a
script, so that the search also works from a folder; names say their content, so nothing old is
kept by a browser. Words are cut and stemmed as `book/search-engine.js` does it, which ranks them.
A word that no page has is looked for in a list of all words, by the distance of its letters.
Neither mdBook's own search nor pagefind 1.5 did as well on the first 38 queries of
`book/search_queries.json` when they were compared: this one found the page first for 33 and among
three for 38, mdBook for 27 and 35, and pagefind, its pages weighed by kind, for 30 and 38, with
some 130 kB to load before the first answer, pages found for a word that none has, and no search
from a folder.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

FOLDER = "search"
SHARD = 14_000
"""Characters of postings in a file, or the few more that one word takes."""
TITLE, BODY, CODE = 6.0, 1.0, 0.5
"""What a word in a heading and in the text counts each time, and one in blocks of code once."""
SATURATION, LENGTH = 1.2, 0.4
"""BM25's k and b: how soon a repeated word counts less, how much a long section loses."""
LEVELS = 63
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""Digits of base 64, for postings."""

ENDINGS = (
    *(("ization", 2, "iz"), ("ation", 3, "at"), ("ion", 4, "")),
    *(("ing", 3, ""), ("ed", 3, ""), ("er", 4, ""), ("or", 4, "")),
)
"""What is cut, how many letters must be left, and what takes its place: the first that fits."""

_WORD = re.compile(r"[^\W_]+(?:[_.\-][^\W_]+)*")
_JOINT = re.compile(r"[_.\-]")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_TAG = re.compile(r" \[(?:CPU-OK|GPU-OPT|GPU-REQ)\]$")
_TEXT_TAGS = {"p", "li", "td", "th", "summary", "pre", "br", "dt", "dd", "div", "tr"}
_SKIPPED_CLASSES = {
    *("phase-strip", "neighbours", "page-facts", "phase-place", "drift-line", "upstream"),
    *("answer-box", "place-now", "place-start", "widget", "drift", "since-mark"),
}
_VOID = {"img", "br", "hr", "wbr", "input", "meta", "link"}


@dataclass(slots=True)
class Section:
    """What stands under a heading, up to the next."""

    anchor: str
    title: str = ""
    text: str = ""
    code: str = ""


@dataclass(slots=True)
class Page:
    """A page of the site in sections; the first is what stands above its second heading."""

    path: str
    crumb: str
    sections: list[Section] = field(default_factory=list)


# ------------------------------------------------------------------ words


def stem(word: str) -> str:
    """A word without the commonest endings of English: both sides of the search drop the same."""
    if len(word) < 4 or not word.isascii() or not word.isalpha():
        return word
    if word.endswith("ies"):
        word = word[:-3] + "y"
    elif word.endswith("sses"):
        word = word[:-2]
    elif word.endswith("s") and word[-2] not in "sui":
        word = word[:-1]
    for ending, least, kept in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= least:
            word = word[: -len(ending)] + kept
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def words(text: str) -> Iterator[tuple[str, float]]:
    """The words of a text as they are searched, each with its weight.

    A name such as `num_computed_tokens`, `n-gram` or `BlockPool` is one word, and its parts count
    half.
    """
    for match in _WORD.finditer(text):
        whole = match[0]
        parts = [part for piece in _JOINT.split(whole) for part in _CAMEL.split(piece)]
        if len(parts) == 1:
            yield stem(whole.lower()), 1.0
            continue
        joined = _JOINT.sub("", whole).lower()
        if len(joined) <= 40:
            yield joined, 1.0
        for part in parts:
            yield stem(part.lower()), 0.5


# ------------------------------------------------------------------ reading pages


class _Reader(HTMLParser):
    """The sections of a page's <main>."""

    def __init__(self) -> None:
        super().__init__()
        self.sections = [Section("")]
        self.open: list[tuple[str, bool]] = []  # tag, and whether what is inside is left out
        self.inside = False
        self.heading = False

    @property
    def skipping(self) -> bool:
        return any(skipped for _, skipped in self.open)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "main":
            self.inside = True
        if not self.inside:
            return
        if tag in _TEXT_TAGS:
            self._add(" ")
        if tag in _VOID:
            return
        classes = set(values.get("class", "").split())
        left_out = tag in ("script", "style", "math", "button") or bool(classes & _SKIPPED_CLASSES)
        if re.fullmatch(r"h[1-4]", tag) and values.get("id") and not self.skipping:
            if tag != "h1":
                self.sections.append(Section(values["id"]))
            self.heading = True
        self.open.append((tag, left_out))

    def handle_endtag(self, tag: str) -> None:
        if tag == "main":
            self.inside = False
        if not self.inside or tag not in {name for name, _ in self.open}:
            return
        while self.open.pop()[0] != tag:
            pass
        if re.fullmatch(r"h[1-4]", tag):
            self.heading = False
        elif tag in _TEXT_TAGS:
            self._add(" ")

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _add(self, data: str) -> None:
        if not self.inside or self.skipping:
            return
        section = self.sections[-1]
        if self.heading:
            section.title += data
        elif any(tag == "pre" for tag, _ in self.open):
            section.code += data
        else:
            section.text += data


def read(site: Path, file: Path) -> Page:
    """A page of the site, as it is searched."""
    made = file.read_text(encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", made, re.DOTALL)
    crumb = html.unescape(title[1]).rpartition(" - ")[0].strip() if title else ""
    reader = _Reader()
    reader.feed(made)
    sections = [
        Section(s.anchor, _TAG.sub("", _one_line(s.title)), _one_line(s.text), _one_line(s.code))
        for s in reader.sections
    ]
    sections[0].title = sections[0].title or crumb
    return Page(file.relative_to(site).as_posix(), crumb or sections[0].title, sections)


def _one_line(text: str) -> str:
    return " ".join(text.replace("\u200b", "").split())


# ------------------------------------------------------------------ the index


def impacts(sections: Sequence[Section]) -> list[dict[str, int]]:
    """For each section its words, each with what it says there: 1 to LEVELS."""
    counts: list[dict[str, float]] = []
    for section in sections:
        count: dict[str, float] = {}
        for text, weight in ((section.title, TITLE), (section.text, BODY)):
            for word, share in words(text):
                count[word] = count.get(word, 0) + weight * share
        for word, share in dict(words(section.code)).items():
            count[word] = count.get(word, 0) + CODE * share
        counts.append(count)
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / max(1, len(lengths)) or 1
    found = []
    for count, length in zip(counts, lengths, strict=True):
        room = SATURATION * (1 - LENGTH + LENGTH * length / mean)
        found.append({w: max(1, round(LEVELS * tf / (tf + room))) for w, tf in count.items()})
    return found


def encoded(postings: Sequence[tuple[int, int]]) -> str:
    """Postings as text: the step to the next section in digits of 5 bits, then the impact."""
    out, before = [], -1
    for section, impact in postings:
        step = section - before
        before = section
        while step > 31:
            out.append(ALPHABET[32 + step % 32])
            step //= 32
        out += [ALPHABET[step], ALPHABET[impact]]
    return "".join(out)


def shards(rows: Sequence[dict[str, int]]) -> Iterator[list[str]]:
    """Lines "word postings" in alphabetical order, in parts of about SHARD characters."""
    found: dict[str, list[tuple[int, int]]] = {}
    for section, row in enumerate(rows):
        for word, impact in row.items():
            found.setdefault(word, []).append((section, impact))
    part: list[str] = []
    size = 0
    for word in sorted(found):
        line = f"{word} {encoded(found[word])}"
        if part and size + len(line) > SHARD:
            yield part
            part, size = [], 0
        part.append(line)
        size += len(line) + 1
    if part:
        yield part


def vocabulary(rows: Sequence[dict[str, int]]) -> list[str]:
    """Words that a mistyped one may be meant for, the commonest first."""
    found = Counter(word for row in rows for word in row if word.isalpha() and 2 < len(word) < 21)
    return [word for word, _ in found.most_common()]


def write(site: Path) -> None:
    """Put the search beside the pages, and its name into each of them."""
    files = [
        file for file in sorted(site.rglob("*.html")) if file.name not in ("toc.html", "print.html")
    ]
    pages = [read(site, file) for file in files]
    folder = site / FOLDER
    folder.mkdir()
    texts = [
        _script(folder, "text", n, [_shown(section) for section in page.sections])
        for n, page in enumerate(pages)
    ]
    rows = impacts([section for page in pages for section in page.sections])
    parts = []
    for n, part in enumerate(shards(rows)):
        parts.append([part[0].partition(" ")[0], _script(folder, "shard", n, "\n".join(part))])
    listed = [
        [
            page.path,
            page.crumb,
            text,
            [s.title for s in page.sections],
            [s.anchor for s in page.sections],
        ]
        for page, text in zip(pages, texts, strict=True)
    ]
    known = _script(folder, "vocabulary", 0, " ".join(vocabulary(rows)))
    index = {"pages": listed, "shards": parts, "vocabulary": known}
    name = _script(folder, "index", 0, index)
    meta = f'<meta name="course-search" content="{FOLDER}/index-{name}.js">\n    </head>'
    for file in files:
        made = file.read_text(encoding="utf-8")
        file.write_text(made.replace("</head>", meta, 1), encoding="utf-8")


def _shown(section: Section) -> str:
    """What a result may quote."""
    return f"{section.text} {section.code}".strip()


def _script(folder: Path, kind: str, place: int, data: object) -> str:
    """Write a part that a page loads as a script; what stands for its content in its name."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    body = f'CourseSearch.take("{kind}",{place},{text});\n'
    name = hashlib.sha256(body.encode()).hexdigest()[:8]
    (folder / f"{kind}-{name}.js").write_text(body, encoding="utf-8")
    return name
