"""What became of every citation by a later release: same, moved, changed or gone.

`same`: the file defines the symbol on the same lines with the same text. `moved`: the same text
elsewhere in the release. `changed`: the symbol is there and its text differs. `gone`: nothing of
that name is left, or, for what is not Python, no such line. Promises: judged by text alone, with
indentation and blank lines left out; the table kept in `book/drift/` is what this computes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from course.truth import citations, links, symbols
from course.truth.citations import Citation

SAME, MOVED, CHANGED, GONE = "same", "moved", "changed", "gone"
FATES = (SAME, MOVED, CHANGED, GONE)
FOLDER = Path("book", "drift")
"""One file per release, `VERSION.json`: citation -> [fate, place there or ""]."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one citation, and where it stands now (`path:line`, "" when gone)."""

    kind: str
    place: str


def cited_on(root: Path, paths: Iterable[Path] = ()) -> dict[Path, list[Citation]]:
    """The citations and includes of every page that has any."""
    found = {}
    for page in citations.pages(root, paths):
        if cited := links.cited(page, root)[0]:
            found[page] = cited
    return found


def fate_of(citation: Citation, pin: Path, later: Path) -> Fate:
    """What became of one citation.

    Args:
        citation: one that is exact at the pin.
        pin: the pinned tree.
        later: the tree of the later release.
    """
    if not citation.symbol:
        there = (later / citation.path).is_file()
        return Fate(SAME, citation.path) if there else Fate(GONE, "")
    if not citation.path.endswith(".py"):
        return _line_fate(citation, pin, later)
    before = symbols.lookup(symbols.symbols(pin / citation.path), citation.symbol)
    after: list[tuple[str, tuple[int, int]]] = []
    if (later / citation.path).is_file():
        extents = symbols.lookup(symbols.symbols(later / citation.path), citation.symbol)
        after = [(citation.path, extent) for extent in extents]
    if not after:
        after = [(path, (first, last)) for path, first, last in _elsewhere(later, citation.symbol)]
        if len(after) > 1:
            after = []  # several of that name: nobody can say which
    if not before or not after:
        return Fate(GONE, "")
    old = min(before, key=lambda extent: abs(extent[0] - citation.first))
    path, new = after[min(before.index(old), len(after) - 1)]
    if _text(pin / citation.path, old) != _text(later / path, new):
        return Fate(CHANGED, f"{path}:{_line_in(citation, old, pin, later / path, new)}")
    line = citation.first + new[0] - old[0] if citation.first else new[0]
    stayed = path == citation.path and new == old
    return Fate(SAME if stayed else MOVED, f"{path}:{line}")


def table(root: Path, pin: Path, later: Path) -> dict[str, Fate]:
    """Every different citation of the repository, as it is written, and its fate."""
    every = {c.text: c for cited in cited_on(root).values() for c in cited}
    return {text: fate_of(every[text], pin, later) for text in sorted(every)}


def per_page(root: Path, fates: dict[str, Fate]) -> Iterator[tuple[Path, Counter[str]]]:
    """How many citations of each page met which fate; unknown ones are left out."""
    for page, cited in cited_on(root).items():
        counts = Counter(fates[c.text].kind for c in cited if c.text in fates)
        if counts:
            yield page, counts


def write(path: Path, fates: dict[str, Fate]) -> None:
    """Keep a table: one line per citation, so that it diffs."""
    rows = (
        f"{json.dumps(text, ensure_ascii=False)}: {json.dumps([fate.kind, fate.place])}"
        for text, fate in fates.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def read(path: Path) -> dict[str, Fate]:
    """A kept table; empty when there is none."""
    if not path.is_file():
        return {}
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {text: Fate(*fate) for text, fate in kept.items()}


@lru_cache(maxsize=4)
def newest(root: Path) -> tuple[str, dict[str, Fate]]:
    """The newest release with a table, and the table; ("", {}) when there is none."""
    kept = sorted((root / FOLDER).glob("*.json"), key=lambda p: [int(n) for n in p.stem.split(".")])
    return (kept[-1].stem, read(kept[-1])) if kept else ("", {})


# ---------------------------------------------------------------------- parts


def _text(path: Path, extent: tuple[int, int]) -> list[str]:
    lines = symbols.lines_of(path)[extent[0] - 1 : extent[1]]
    return [line.strip() for line in lines if line.strip()]


@lru_cache(maxsize=2)
def _modules(tree: Path) -> tuple[tuple[Path, str], ...]:
    return tuple(
        (path, path.read_text(encoding="utf-8", errors="replace"))
        for path in sorted((tree / "vllm").rglob("*.py"))
    )


def _elsewhere(tree: Path, symbol: str) -> list[tuple[str, int, int]]:
    """Every place of the release that defines the whole name."""
    name = symbol.removesuffix("()")
    last = name.rpartition(".")[2]
    # What may define it, so that few modules are parsed: def, class, or a name assigned to.
    defined = re.compile(
        rf"\b(?:def|class)\s+{re.escape(last)}\b|\b{re.escape(last)}\b(?:[^=:\n]*[=:]|,?$)",
        re.MULTILINE,
    )
    found = []
    for path, text in _modules(tree):
        if last in text and defined.search(text):
            for extent in symbols.symbols(path).get(name, ())[:1]:
                found.append((path.relative_to(tree).as_posix(), *extent))
    return found


def _line_in(
    citation: Citation, old: tuple[int, int], pin: Path, path: Path, new: tuple[int, int]
) -> int:
    """The cited line within a changed body, where its text is still there once; else its start."""
    if not citation.first or citation.first == old[0]:
        return new[0]
    wanted = symbols.lines_of(pin / citation.path)[citation.first - 1].strip()
    lines = symbols.lines_of(path)[new[0] - 1 : new[1]]
    found = [new[0] + i for i, line in enumerate(lines) if line.strip() == wanted]
    return found[0] if len(found) == 1 else new[0]


def _line_fate(citation: Citation, pin: Path, later: Path) -> Fate:
    """Of a kernel, a configuration, a text: the cited lines as they are."""
    if not (later / citation.path).is_file():
        return Fate(GONE, "")
    before, after = (symbols.lines_of(tree / citation.path) for tree in (pin, later))
    wanted = [line.strip() for line in before[citation.first - 1 : citation.last]]
    size = len(wanted)
    places = [
        start + 1
        for start in range(len(after) - size + 1)
        if [line.strip() for line in after[start : start + size]] == wanted
    ]
    if citation.first in places:
        return Fate(SAME, f"{citation.path}:{citation.first}")
    if len(places) == 1:
        return Fate(MOVED, f"{citation.path}:{places[0]}")
    name = citation.symbol.removesuffix("()").split("::")[-1].split(".")[-1]
    named = [number for number, line in enumerate(after, 1) if name in line]
    return Fate(CHANGED, f"{citation.path}:{named[0]}") if named else Fate(GONE, "")
