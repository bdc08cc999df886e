"""Citations: found in pages and docstrings, checked against the pinned tree, moved to another.

A citation is two adjacent code spans, `path:line` and the symbol: the line is where the symbol is
defined, or a range that lies inside it (or around it). Promises: what passes here points a reader
at the very line that defines the thing named. Mirrors nothing upstream.
"""

from __future__ import annotations

import ast
import bisect
import functools
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("vllm", "tests", "csrc", "docs", "benchmarks", "examples", "cmake", "docker", "tools")
"""Folders of the pinned tree; a code span that begins with one of these and a line cites."""

AMBIGUOUS = ("tests", "docs", "benchmarks", "examples", "tools")
"""Those of them this repository might have too: what lies here is not a citation."""

_SPAN = re.compile(r"(?<!`)`(?!`)([^`\n]+)`(?!`)")
_LINES = r"(?P<first>\d+)(?:-(?P<last>\d+))?"
_CITED = re.compile(
    rf"^(?P<path>(?:{'|'.join(ROOTS)})/[\w./-]*\.\w+):(?P<lines>{_LINES})$", re.ASCII
)
_LOOKS_CITED = re.compile(rf"^(?:{'|'.join(ROOTS)})/[\w./-]*\.\w+\s*[:#@]", re.ASCII)
_BARE_PATH = re.compile(r"^(?:vllm|csrc)/[\w./-]*\w\.\w+$", re.ASCII)
_SHORT = re.compile(rf"^[\w./-]*\w\.(?:py|cu|cuh|cpp|h|md|ya?ml|toml):{_LINES}$", re.ASCII)
_SYMBOL = re.compile(r"^~?[A-Za-z_][\w]*(?:(?:\.|::|->)~?[A-Za-z_]\w*)*(?:\(\))?$", re.ASCII)
_INCLUDE = re.compile(r"\{\{#upstream\s+(?P<path>\S+)(?:\s+(?P<symbol>\S+))?\s*\}\}")
_NOT_OURS = ("upstream", "build", "node_modules", "testdata", "scratch", "__pycache__")


@dataclass(frozen=True, slots=True)
class Citation:
    """One citation, or an include directive (`first == 0`), and where it stands."""

    page: Path
    line: int
    column: int
    path: str
    first: int
    last: int
    symbol: str

    @property
    def text(self) -> str:
        if not self.first and not self.symbol:
            return f"`{self.path}`"
        if not self.first:
            return f"{{{{#upstream {self.path} {self.symbol}}}}}"
        lines = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"`{self.path}:{lines}` `{self.symbol}`"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong at one place of one page."""

    page: Path
    line: int
    text: str


# ------------------------------------------------------------------ finding them


def pages(root: Path, paths: Iterable[Path] = ()) -> list[Path]:
    """Every .md and .py file under `paths` (default: the repository), caches left out."""
    found: set[Path] = set()
    for start in list(paths) or [root]:
        start = start.resolve()
        if start.is_file():
            found.add(start)
            continue
        for suffix in ("*.md", "*.py"):
            for path in start.rglob(suffix):
                inside = path.relative_to(start).parts[:-1]
                if not any(map(is_skipped, inside)):
                    found.add(path)
    return sorted(found)


def is_skipped(folder: str) -> bool:
    """Whether a folder of this name holds no pages of ours: environments and caches are hidden."""
    return folder.startswith(".") or folder in _NOT_OURS


def in_file(page: Path, root: Path) -> tuple[list[Citation], list[Finding]]:
    """The citations of one file, and the spans that look like one and are not."""
    text = page.read_text(encoding="utf-8")
    chunks = _docstrings_and_comments(text) if page.suffix == ".py" else _prose(text)
    citations: list[Citation] = []
    findings: list[Finding] = []
    for line_number, chunk in chunks:
        _scan(page, root, line_number, chunk, citations, findings)
    return citations, findings


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The page as one chunk, its fenced code blanked out."""
    lines, fence = text.split("\n"), ""
    for number, line in enumerate(lines):
        stripped = line.lstrip(" >")
        mark = re.match(r"(`{3,}|~{3,})", stripped)
        if fence:
            if mark and stripped.startswith(fence) and not stripped.strip("`~ "):
                fence = ""
            lines[number] = ""
        elif mark:
            fence = mark[1]
            lines[number] = ""
    yield 1, "\n".join(lines)


def _docstrings_and_comments(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings (any string that is a statement of its own) and runs of comments."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            segment = ast.get_source_segment(text, node)
            if isinstance(node.value.value, str) and segment:
                yield node.lineno, segment
    run: list[str] = []
    start = previous = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != previous + 1 and run:
            yield start, "\n".join(run)
            run = []
        if not run:
            start = token.start[0]
        run.append(" " * token.start[1] + token.string)
        previous = token.start[0]
    if run:
        yield start, "\n".join(run)


def _scan(
    page: Path,
    root: Path,
    line_number: int,
    chunk: str,
    citations: list[Citation],
    findings: list[Finding],
) -> None:
    starts = [0]
    for text in chunk.split("\n"):
        starts.append(starts[-1] + len(text) + 1)

    def place(offset: int) -> tuple[int, int]:
        row = bisect.bisect_right(starts, offset) - 1
        return line_number + row, offset - starts[row]

    for match in _INCLUDE.finditer(chunk):
        line, column = place(match.start())
        if _inside_code(chunk, match.start()):
            continue
        if "\n" in match[0]:
            findings.append(Finding(page, line, "an include directive stands on one line"))
            continue
        citations.append(Citation(page, line, column, match["path"], 0, 0, match["symbol"] or ""))
    spans = list(_SPAN.finditer(chunk))
    for index, span in enumerate(spans):
        content = span[1].strip()
        cited = _CITED.match(content)
        line, column = place(span.start())
        if not cited:
            if problem := _unknown_form(content, page, root):
                findings.append(Finding(page, line, f"`{content}` {problem}"))
            elif _BARE_PATH.match(content):  # a path alone must exist, and says no more
                citations.append(Citation(page, line, column, content, 0, 0, ""))
            continue
        if content.startswith(AMBIGUOUS) and (root / cited["path"]).exists():
            continue
        following = spans[index + 1] if index + 1 < len(spans) else None
        gap = chunk[span.end() : following.start()] if following else None
        symbol = following[1].strip() if following else ""
        if gap is None or not re.fullmatch(r"[ \t]*\n?[ \t>#*]*", gap) or not gap:
            symbol = ""
        if not symbol or _CITED.match(symbol):
            findings.append(
                Finding(page, line, f"`{content}` names no symbol: write `path:line` `Symbol`")
            )
            continue
        citations.append(
            Citation(
                page,
                line,
                column,
                cited["path"],
                int(cited["first"]),
                int(cited["last"] or cited["first"]),
                symbol,
            )
        )


def _unknown_form(content: str, page: Path, root: Path) -> str:
    """Why a span that looks like a citation is none; empty when it does not look like one."""
    path = content.split(":")[0]
    if (root / path).exists() or (page.parent / path).exists():
        return ""  # a file of this repository
    if _LOOKS_CITED.match(content):
        return "is not of the form `path:line` or `path:a-b`"
    if _SHORT.match(content):
        return "is no path from the root of the pinned tree: write it whole"
    return ""


def _inside_code(chunk: str, offset: int) -> bool:
    """Whether `offset` lies in an inline code span (an include that is being talked about)."""
    line_start = chunk.rfind("\n", 0, offset) + 1
    return chunk.count("`", line_start, offset) % 2 == 1


# ------------------------------------------------------------------ symbols of the pinned tree


@functools.lru_cache(maxsize=4096)
def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())


@functools.lru_cache(maxsize=4096)
def symbols(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Every symbol of a Python file: dotted name to its (first line, last line), in file order.

    Functions, classes, methods, nested functions; module and class level names; attributes of
    instances (`Class.name` for `self.name = ...`, its first assignment in `__init__` first).
    """
    found: dict[str, list[tuple[int, int]]] = {}
    _collect(ast.parse("\n".join(_lines(path))).body, "", "", found)
    return found


def _collect(
    body: list[ast.stmt], prefix: str, owner: str, found: dict[str, list[tuple[int, int]]]
) -> None:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            found.setdefault(name, []).append((node.lineno, node.end_lineno or node.lineno))
            own = name if isinstance(node, ast.ClassDef) else owner
            _collect(node.body, f"{name}.", own, found)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            for target in _targets(node):
                extent = (node.lineno, node.end_lineno or node.lineno)
                if isinstance(target, ast.Name):
                    found.setdefault(f"{prefix}{target.id}", []).append(extent)
                elif (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in ("self", "cls")
                    and owner
                ):
                    found.setdefault(f"{owner}.{target.attr}", []).append(extent)
        for inner in _blocks(node):
            _collect(inner, prefix, owner, found)


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.expr]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The statement lists of if, for, while, with, try and match."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(node, name, None)
        if isinstance(inner, list):
            yield inner
    for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield handler.body


def lookup(table: dict[str, list[tuple[int, int]]], symbol: str) -> list[tuple[int, int]]:
    """Where `symbol` is defined; a name without its class is found where it is unique."""
    name = symbol.removesuffix("()").replace("::", ".")
    if name in table:
        return table[name]
    tails = [extents for dotted, extents in table.items() if dotted.endswith(f".{name}")]
    return tails[0] if len(tails) == 1 else []


# ------------------------------------------------------------------ checking


def check(root: Path, tree: Path, paths: Iterable[Path] = ()) -> tuple[int, list[Finding]]:
    """Check every citation under `paths` against `tree`; how many there are, and what is wrong."""
    count, findings = 0, []
    for page in pages(root, paths):
        citations, problems = in_file(page, root)
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
    if citation.last > len(_lines(path)) or citation.last < citation.first:
        return f"the file has {len(_lines(path))} lines"
    if not _SYMBOL.match(citation.symbol) and path.suffix == ".py":
        return f"{citation.symbol!r} is not a symbol: write Class.method, a function or a constant"
    if path.suffix != ".py":
        return _textual_problem(citation, path)
    extents = lookup(symbols(path), citation.symbol)
    if not extents:
        return _no_symbol(citation, path)
    if not citation.first:
        return ""
    if citation.first == citation.last:
        if any(citation.first == first for first, _ in extents):
            return ""
        where = ", ".join(str(first) for first, _ in extents[:3])
        return f"the symbol is defined on line {where}, not {citation.first}"
    for first, last in extents:
        inside = first <= citation.first and citation.last <= last
        around = citation.first <= first and last <= citation.last
        if inside or around:
            return ""
    first, last = extents[0]
    return (
        f"the symbol spans lines {first}-{last}, which do not hold {citation.first}-{citation.last}"
    )


def _no_symbol(citation: Citation, path: Path) -> str:
    name = citation.symbol.removesuffix("()")
    owners = [dotted for dotted in symbols(path) if dotted.endswith(f".{name}")]
    if len(owners) > 1:
        return f"the file defines it {len(owners)} times: say which ({', '.join(owners[:4])})"
    return "the file defines no such symbol"


def _textual_problem(citation: Citation, path: Path) -> str:
    """For anything but Python: the last part of the symbol stands in the lines cited."""
    name = re.split(r"\.|::|->", citation.symbol.removesuffix("()"))[-1]
    if not citation.first:
        return "" if any(name in line for line in _lines(path)) else "the file does not hold it"
    if any(name in line for line in _lines(path)[citation.first - 1 : citation.last]):
        return ""
    near = [n for n, line in enumerate(_lines(path), 1) if name in line]
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

    A range keeps its place inside the symbol as it was in `pinned`. Where a file other than
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
        near = [n for n, line in enumerate(_lines(path), 1) if name in line]
        if not near:
            return gone
        best = min(near, key=lambda n: abs(n - citation.first))
        return Move(citation, best, best + length)
    extents = lookup(symbols(path), citation.symbol)
    if not extents:
        return gone
    nearest = min(extents, key=lambda extent: abs(extent[0] - citation.first))
    if not length:
        return Move(citation, nearest[0], nearest[0])
    offset = 0
    old = pinned / citation.path
    if old.is_file():
        before = lookup(symbols(old), citation.symbol)
        if before:
            offset = max(0, citation.first - before[0][0])
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
        write(page, "\n".join(lines))
    return count


def _span_text(path: str, first: int, last: int) -> str:
    return f"`{path}:{first}`" if first == last else f"`{path}:{first}-{last}`"


def source_of(tree: Path, symbol: str) -> list[tuple[str, int, int]]:
    """Every place under `tree/vllm` that defines `symbol`: (path, first line, last line).

    Files are parsed only when they hold the last part of the name, so this stays quick.
    """
    name = symbol.removesuffix("()").rpartition(".")[2]
    found = []
    for path in sorted((tree / "vllm").rglob("*.py")):
        if not any(name in line for line in _lines(path)):
            continue
        table = symbols(path)
        exact = table.get(symbol.removesuffix("()"))
        extents = exact or [
            extent
            for dotted, several in table.items()
            if dotted.endswith(f".{symbol}") and dotted.count(".") <= symbol.count(".") + 1
            for extent in several[:1]
        ]
        for first, last in extents[:1] if exact else extents:
            found.append((path.relative_to(tree).as_posix(), first, last))
    return found
