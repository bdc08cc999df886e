"""Citations and includes as a reader on GitHub meets them: linked to the pinned commit.

A citation becomes the text of a link; an include directive goes into an HTML comment, with a link
to its lines under it. Promises: linking twice changes nothing; what a page says and how many lines
it has before the book fills it stay as they were; a link that leads elsewhere than its text says
is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from course.truth import citations, symbols
from course.truth.citations import Citation, Finding

PIN = "0decac0"
BLOB = "https://github.com/vllm-project/vllm/blob"

_LINKED = re.compile(
    r"\[(?P<text>`(?P<path>[\w./-]+):(?P<first>\d+)(?:-(?P<last>\d+))?`"
    r"[ \t]*\n?[ \t>#*]*`[^`\n]+`)\]\((?P<url>" + re.escape(BLOB) + r"[^()\s]*)\)"
)
_COMMENTED = re.compile(
    r"^(?P<lead>[ \t>]*)<!-- ?(?P<directive>\{\{#upstream [^}\n]*\}\}) ?-->\n"
    r"(?P=lead)\[`[^`\n]+` `[^`\n]+`\]\(" + re.escape(BLOB) + r"/[^()\s]*\)[ \t]*$",
    re.MULTILINE,
)
_ANY_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\([^()\s]*\)")


def address(path: str, first: int, last: int) -> str:
    """Lines of a file at the pinned commit."""
    lines = f"#L{first}" if first == last else f"#L{first}-L{last}"
    return f"{BLOB}/{PIN}/{path}{lines}"


def linked(text: str, page: Path, root: Path, tree: Path) -> str:
    """`text`, that of a page, with every citation linked and every include directive commented.

    An include whose symbol is not at the pin, or that does not stand alone on its line, is left.
    """
    starts = _starts(text)
    found, _ = citations.in_text(text, page, root)
    for citation in sorted(found, key=lambda c: (c.line, c.column), reverse=True):
        at = starts[citation.line - 1] + citation.column
        if citation.first:
            text = _link_citation(text, at)
        elif citation.symbol:
            text = _comment_include(text, starts[citation.line - 1], citation, tree)
    return refreshed(text)


def _link_citation(text: str, at: int) -> str:
    if any(link.start() < at < link.end() for link in _ANY_LINK.finditer(text)):
        return text
    spans = re.compile(r"`([^`\n]+)`[ \t]*\n?[ \t>#*]*`[^`\n]+`").match(text, at)
    if not spans:
        return text
    return f"{text[:at]}[{spans[0]}]({BLOB}){text[spans.end() :]}"  # refreshed when all are linked


def _comment_include(text: str, start: int, citation: Citation, tree: Path) -> str:
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    alone = re.fullmatch(r"([ \t>]*)(\{\{#upstream [^}\n]*\}\})[ \t]*", text[start:end])
    extents = symbols.lookup(symbols.symbols(tree / citation.path), citation.symbol)
    if not alone or not extents:
        return text
    lead, directive = alone.groups()
    first, last = extents[0]
    link = f"[`{citation.path}:{first}-{last}` `{citation.symbol}`]({BLOB})"
    return f"{text[:start]}{lead}<!--{directive}-->\n{lead}{link}{text[end:]}"


def refreshed(text: str) -> str:
    """`text` with the address of each linked citation made to lead where its text says."""
    return _LINKED.sub(lambda match: f"[{match['text']}]({_meant(match)})", text)


def _meant(match: re.Match[str]) -> str:
    first = int(match["first"])
    return address(match["path"], first, int(match["last"] or first))


def unlinked(text: str) -> str:
    """`text` as it was before `linked`, line for line: links under directives leave empty lines."""
    text = _COMMENTED.sub(lambda m: f"{m['lead']}{m['directive']}\n{m['lead'].rstrip()}", text)
    return _LINKED.sub(lambda match: match["text"], text)


def cited(page: Path, root: Path) -> tuple[list[Citation], list[Finding]]:
    """The citations of one file, each once however it is linked, and what looks like one.

    An include and the link that stands under it for readers on GitHub are one citation.
    """
    text = page.read_text(encoding="utf-8")
    return citations.in_text(unlinked(text) if page.suffix == ".md" else text, page, root)


def astray(page: Path, text: str) -> Iterator[Finding]:
    """The linked citations of a page that lead elsewhere than their text says."""
    for match in _LINKED.finditer(text):
        if match["url"] != _meant(match):
            line = text.count("\n", 0, match.start()) + 1
            yield Finding(page, line, f"the link leads to {match['url']}: course cite link --write")


def _starts(text: str) -> list[int]:
    starts = [0]
    for line in text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts
