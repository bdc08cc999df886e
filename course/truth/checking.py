"""Citations checked against the pinned tree, and moved to another.

Promises: what passes here begins at the definition of the thing named (its decorator or its
`def`), or lies inside it to cite a detail; a range that begins before it, ends behind it or merely
holds its name does not pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from course.truth import links
from course.truth.citations import SYMBOL, Citation, Finding, in_file, pages
from course.truth.symbols import classes, decorated, lines_of, lookup, symbols


def check(root: Path, tree: Path, paths: Iterable[Path] = ()) -> tuple[int, list[Finding]]:
    """Check every citation under `paths` against `tree`; how many there are, and what is wrong."""
    count = 0
    findings: list[Finding] = []
    for page in pages(root, paths):
        if page.suffix == ".md":
            findings += links.astray(page, page.read_text(encoding="utf-8"))
        citations, problems = links.cited(page, root)
        count += len(citations)
        findings += problems
        for citation in citations:
            if problem := problem_of(citation, tree):
                findings.append(Finding(page, citation.line, f"{citation.text}: {problem}"))
    return count, findings


def problem_of(citation: Citation, tree: Path) -> str:
    """What is wrong with one citation, in words; empty when it is exact."""
    path = tree / citation.path
    if not path.is_file():
        return "there is no such file at the pin"
    if not citation.first and not citation.symbol:
        return ""
    if citation.last > len(lines_of(path)) or citation.last < citation.first:
        return f"the file has {len(lines_of(path))} lines"
    if not SYMBOL.match(citation.symbol) and path.suffix == ".py":
        return f"{citation.symbol!r} is not a symbol: write Class.method, a function or a constant"
    if path.suffix != ".py":
        return _textual_problem(citation, path)
    extents = lookup(symbols(path), citation.symbol)
    if not extents:
        return _no_symbol(citation, path)
    if not citation.first:
        return ""
    return _place_problem(citation, path, extents)


def _place_problem(citation: Citation, path: Path, extents: list[tuple[int, int]]) -> str:
    """Why the lines are not those of the symbol; empty when they are."""
    heads = [(decorated(path).get(first, first), first, last) for first, last in extents]
    for head, first, last in heads:
        if head <= citation.first and citation.last <= last:
            inner = citation.first not in (head, first) and first in classes(path)
            return _nearer(citation, path, first) if inner else ""
    head, first, last = min(heads, key=lambda each: abs(each[1] - citation.first))
    begins = f"{first}" if head == first else f"{first} (its decorator on {head})"
    if citation.first == citation.last:
        return f"the symbol stands on lines {head}-{last}, not {citation.first}"
    if citation.first < head:
        return f"the range begins before the symbol, which begins on line {begins}"
    return f"the symbol spans lines {head}-{last}, which do not hold {citation.text.split('`')[1]}"


def _nearer(citation: Citation, path: Path, owner: int) -> str:
    """Which member of a class the lines are in, where one holds them all."""
    inside = [
        (last - first, dotted)
        for dotted, several in symbols(path).items()
        for first, last in several
        if first > owner
        and decorated(path).get(first, first) <= citation.first
        and citation.last <= last
    ]
    return f"these lines are {min(inside)[1]}: name it" if inside else ""


def _no_symbol(citation: Citation, path: Path) -> str:
    name = citation.symbol.removesuffix("()")
    owners = [dotted for dotted in symbols(path) if dotted.endswith(f".{name}")]
    if len(owners) > 1:
        return f"the file defines it {len(owners)} times: say which ({', '.join(owners[:4])})"
    return "the file defines no such symbol"


def _textual_problem(citation: Citation, path: Path) -> str:
    """For anything but Python: the first line holds the last part of the symbol.

    The C idiom `typedef struct { ... } name;` is cited from its first line to its last.
    """
    name = re.split(r"\.|::|->", citation.symbol.removesuffix("()"))[-1]
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    lines = lines_of(path)
    if not citation.first:
        return "" if any(map(word.search, lines)) else "the file does not hold it"
    if word.search(lines[citation.first - 1]):
        return ""
    closes = re.match(rf"\}}.*(?<!\w){re.escape(name)}\s*;", lines[citation.last - 1])
    if lines[citation.first - 1].startswith("typedef ") and closes:
        return ""
    near = [n for n, line in enumerate(lines, 1) if word.search(line)]
    if not near:
        return f"the file does not hold {name!r}"
    shown = ", ".join(str(n) for n in sorted(near, key=lambda n: abs(n - citation.first))[:3])
    return f"{name!r} does not stand there; it stands on line {shown}"


# ------------------------------------------------------------------ fixing


@dataclass(frozen=True, slots=True)
class Move:
    """A citation and the lines it should have; `first == 0` when the symbol is gone."""

    citation: Citation
    first: int
    last: int


def moves(root: Path, pinned: Path, tree: Path, paths: Iterable[Path] = ()) -> list[Move]:
    """For every citation that is not exact in `tree`: where its symbol stands there.

    A detail keeps its place inside the symbol as it was in `pinned`. Where a file other than
    Python holds the text several times, the nearest is proposed.
    """
    found = []
    for page in pages(root, paths):
        for citation in in_file(page, root)[0]:
            if citation.first and problem_of(citation, tree):
                found.append(_move(citation, pinned, tree))
    return found


def _move(citation: Citation, pinned: Path, tree: Path) -> Move:
    length = citation.last - citation.first
    path = tree / citation.path
    gone = Move(citation, 0, 0)
    if not path.is_file():
        return gone
    if path.suffix != ".py":
        name = re.split(r"\.|::|->", citation.symbol.removesuffix("()"))[-1]
        near = [n for n, line in enumerate(lines_of(path), 1) if name in line]
        if not near:
            return gone
        best = min(near, key=lambda n: abs(n - citation.first))
        return Move(citation, best, best + length)
    extents = lookup(symbols(path), citation.symbol)
    if not extents:
        return gone
    nearest = min(extents, key=lambda extent: abs(extent[0] - citation.first))
    offset = 0
    old = pinned / citation.path
    if old.is_file():
        before = lookup(symbols(old), citation.symbol)
        if before and before[0][0] <= citation.first <= before[0][1]:
            offset = citation.first - before[0][0]
    first = min(nearest[0] + offset, nearest[1])
    return Move(citation, first, min(first + length, nearest[1]))


def rewrite(moved: list[Move], write: Callable[[Path, str], None]) -> int:
    """Put the new lines into the pages; how many citations changed."""
    by_page: dict[Path, list[Move]] = {}
    for move in moved:
        if move.first:
            by_page.setdefault(move.citation.page, []).append(move)
    count = 0
    for page, own in by_page.items():
        lines = page.read_text(encoding="utf-8").split("\n")
        for move in sorted(own, key=lambda m: (m.citation.line, m.citation.column), reverse=True):
            row, column = move.citation.line - 1, move.citation.column
            old = _span_text(move.citation.path, move.citation.first, move.citation.last)
            at = lines[row].find(old, max(0, column - 1))
            if at < 0:
                at = lines[row].find(old)
            if at < 0:
                continue
            new = _span_text(move.citation.path, move.first, move.last)
            lines[row] = lines[row][:at] + new + lines[row][at + len(old) :]
            count += 1
        write(page, links.refreshed("\n".join(lines)))
    return count


def _span_text(path: str, first: int, last: int) -> str:
    return f"`{path}:{first}`" if first == last else f"`{path}:{first}-{last}`"
