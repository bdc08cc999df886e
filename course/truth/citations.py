"""Citations, found in pages, docstrings and comments.

A citation is two adjacent code spans, `path:line` and the symbol. Promises: what looks like one and
is none is a finding; fenced code cites nothing.
"""

from __future__ import annotations

import ast
import bisect
import io
import os
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOTS = ("vllm", "tests", "csrc", "docs", "benchmarks", "examples", "cmake", "docker", "tools")
"""Folders of the pinned tree; a code span that begins with one of these and a line cites."""

AMBIGUOUS = ("tests", "docs", "benchmarks", "examples", "tools")
"""Those of them this repository might have too: what lies here is not a citation."""

PROJECT = (".buildkite", ".github")
"""Folders with the project's own rules; this repository's own are hidden from pages as well."""

PROJECT_FILES = ("AGENTS.md", "RELEASE.md", ".pre-commit-config.yaml")
"""Files in the root of the pinned tree that no page of ours could mean."""

_SPAN = re.compile(r"(?<!`)`(?!`)([^`\n]+)`(?!`)")
_LINES = r"(?P<first>\d+)(?:-(?P<last>\d+))?"
_PROJECT = "|".join(
    [rf"(?:{'|'.join(map(re.escape, PROJECT))})/[\w./-]*\w", *map(re.escape, PROJECT_FILES)]
)
_CITED = re.compile(
    rf"^(?P<path>(?:{'|'.join(ROOTS)})/[\w./-]*\.\w+|{_PROJECT}):(?P<lines>{_LINES})$", re.ASCII
)
_LOOKS_CITED = re.compile(rf"^(?:{'|'.join(ROOTS)})/[\w./-]*\.\w+\s*[:#@]", re.ASCII)
_BARE_PATH = re.compile(r"^(?:vllm|csrc)/[\w./-]*\w\.\w+$", re.ASCII)
_SHORT = re.compile(rf"^[\w./-]*\w\.(?:py|cu|cuh|cpp|h|md|ya?ml|toml):{_LINES}$", re.ASCII)
SYMBOL = re.compile(r"^~?[A-Za-z_][\w]*(?:(?:\.|::|->)~?[A-Za-z_]\w*)*(?:\(\))?$", re.ASCII)
_INCLUDE = re.compile(r"\{\{#upstream\s+(?P<path>\S+)(?:\s+(?P<symbol>\S+))?\s*\}\}")
_ANSWER = re.compile(
    rf"^\s+(?:where: )?\"(?P<path>(?:{'|'.join(ROOTS)})/\S+:[\d-]+) (?P<symbol>\S+)\"", re.ASCII
)
"""In quiz.yaml: what `where` gives, and the keys of its `wrong`."""
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


def pages(root: Path, paths: Iterable[Path] = ()) -> list[Path]:
    """Every .md, .py and quiz.yaml under `paths` (default: the repository), caches left out."""
    found: set[Path] = set()
    for start in list(paths) or [root]:
        start = start.resolve()
        if start.is_file():
            found.add(start)
            continue
        found.update(files_below(start, (".md", ".py", "quiz.yaml")))
    return sorted(found)


def files_below(start: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files below a folder that end so. Skipped folders are not entered: an environment may be
    built or removed there meanwhile."""
    for folder, folders, names in os.walk(start):
        folders[:] = [name for name in folders if not is_skipped(name)]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes))


def is_skipped(folder: str) -> bool:
    """Whether a folder of this name holds no pages of ours: environments and caches are hidden."""
    return folder.startswith(".") or folder in _NOT_OURS


def in_file(page: Path, root: Path) -> tuple[list[Citation], list[Finding]]:
    """The citations of one file, and the spans that look like one and are not."""
    return in_text(page.read_text(encoding="utf-8"), page, root)


def in_text(text: str, page: Path, root: Path) -> tuple[list[Citation], list[Finding]]:
    """The same of `text`, as if it stood in `page`."""
    chunks = _CHUNKS.get(page.suffix, _prose)(text)
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


def _segment(lines: list[str], node: ast.Expr) -> str:
    """The text of `node`; `ast.get_source_segment` splits the whole file for each node."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    kept = [line.encode() for line in lines[first : last + 1]]
    kept[-1] = kept[-1][: node.end_col_offset]
    kept[0] = kept[0][node.col_offset :]
    return b"\n".join(kept).decode()


def _docstrings_and_comments(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings (any string that is a statement of its own) and runs of comments."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                yield node.lineno, _segment(lines, node)
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


def _answers(text: str) -> Iterator[tuple[int, str]]:
    """The lines of the tree that answer a quiz's questions, or do not, as citations."""
    for number, line in enumerate(text.split("\n"), 1):
        if match := _ANSWER.match(line):
            yield number, f"`{match['path']}` `{match['symbol']}`"


_CHUNKS = {".py": _docstrings_and_comments, ".yaml": _answers}


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
