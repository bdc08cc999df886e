"""One page as the book shows it: includes, citations and formulas filled in, links turned.

Promises: what is in a code span or a fence stays as it is written; a page is text in and text
out, so it also reads well where it lies.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from course.learning.labs import CourseError
from course.site import answers, book_extras, code_walks, home, places, since_marks, tries
from course.site.addresses import SOURCE, source_link
from course.truth import checking, citations, drift, links, symbols
from course.truth.citations import Citation, Finding

COPY_LIMIT = 300_000
"""Bytes up to which a linked file that is not a page is copied into the book."""

_HELD = re.compile("\ue000(\\d+)\ue001")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\\[\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)((?:\s+\"[^\"]*\")?)\)"
)
_FRONT_MATTER = re.compile(r"\A---\n(?:[^\n]*\n)*?---\n")
"""What a model's card says to a hub, and to no reader; its lines stay counted."""
_DEFINITION = re.compile(r"^(\[[^\]]+\]:\s*)(\S+)", re.MULTILINE)
_MATH = re.compile(
    r"(?<![\\$])\$\$(?P<block>[^$]+?)\$\$(?!\$)"
    r"|(?<![\\$\w])\$(?=[^\s$])(?P<inline>[^$\n]*(?:\n[^$\n]+)?)(?<=[^\s\\])\$(?![\w$])"
)


def render(
    root: Path, tree: Path, page: Path, listed: Iterable[Path], source: str | None = None
) -> tuple[str, list[Path], list[Finding]]:
    """One page as mdBook shall read it, the files it needs beside it, and what is wrong.

    Args:
        source: the text of a page that is made with the book, and not a file.
    """
    text = links.unlinked(page.read_text(encoding="utf-8") if source is None else source)
    text = _FRONT_MATTER.sub(lambda match: "\n" * match[0].count("\n"), text)
    if page == root / "README.md":
        text = places.to_landings(text)
    cited, findings = citations.in_text(text, page, root)
    held: list[str] = []

    def hold(piece: str) -> str:
        held.append(piece)
        return f"\ue000{len(held) - 1}\ue001"

    release, fates = drift.newest(root)
    met: Counter[str] = Counter()
    num_cited = 0
    rows = text.split("\n")
    for citation in sorted(cited, key=lambda c: (c.line, c.column), reverse=True):
        row = rows[citation.line - 1]
        if citation.first == 0 and citation.symbol:
            if problem := checking.problem_of(citation, tree):
                findings.append(Finding(page, citation.line, f"{citation.text}: {problem}"))
                continue
            end = row.index("}}", citation.column) + 2
            piece = hold(include(tree, citation))
        else:
            end = row.index("`", citation.column + 1) + 1
            mark = ""
            num_cited += 1
            if fate := fates.get(citation.text):
                met[fate.kind] += 1
                mark = drift_mark(release, fate)
            piece = hold(f"[{row[citation.column : end]}]({source_link(citation)}){mark}")
        rows[citation.line - 1] = row[: citation.column] + piece + row[end:]
    if source is None:
        for line, mark in since_marks.of(root, page).items():
            rows[line - 1] += f"\n\n{hold(mark)}"
    if met:
        since = "../" * (len(page.relative_to(root).parts) - 1) + "SINCE_THE_PIN.html"
        told = since if (root / "SINCE_THE_PIN.md").is_file() else ""
        rows += ["", hold(drift_line(release, met, num_cited, told))]
    text = _hold_code("\n".join(rows), hold)
    depth = len(page.relative_to(root).parts) - 1
    text = book_extras.fold_until_passed(page, text)
    text = book_extras.embed_widgets(page, text, depth, hold, findings)
    text = home.dress(root, page, text, hold, findings)
    text = tries.embed(root, page, text, hold)
    text = answers.embed(page, text, depth, hold)
    if any(code_walks.of(c.path, c.symbol) for c in cited if c.first == 0):
        there = "".join(held)
        text += f"\n\n{hold(code_walks.scripts('../' * depth, there))}\n"
    if page.name != "GLOSSARY.md":
        text = book_extras.define_terms(root, text)
    text = _convert_math(page, text, hold, findings)
    files: list[Path] = []
    text = _convert_links(root, page, text, set(listed), files)
    while _HELD.search(text):
        text = _HELD.sub(lambda match: held[int(match[1])], text)
    return text, files, findings


def drift_mark(release: str, fate: drift.Fate) -> str:
    """A dot that says, when asked, what a later release made of the place before it."""
    if fate.kind == drift.SAME:
        return ""
    says = f"{fate.kind} in {release}" + (f": {fate.place}" if fate.place else "")
    return f'<abbr class="drift drift-{fate.kind}" title="{html.escape(says)}">\u00b0</abbr>'


def drift_line(release: str, met: Counter[str], places: int, told: str = "") -> str:
    """How much of what a page cites a later release has kept; `told` is the page that says more.

    Of `places`, those are counted that the release's table has: a newer citation is in none yet.
    """
    counted = ", ".join(f"{met[kind]} {kind}" for kind in drift.FATES if met[kind])
    compared = sum(met.values())
    later = f'<a href="{told}">In {release}</a>' if told else f"In {release}"
    later += "" if compared == places else f", of {compared} that were compared"
    marked = "" if met[drift.SAME] == compared else "; \u00b0 marks what differs"
    return (
        f'<p class="drift-line">Cites vLLM 0.22.1 in {places} '
        f"{'place' if places == 1 else 'places'}. {later}: {counted}{marked}.</p>\n"
    )


def include(tree: Path, citation: Citation) -> str:
    """The lines an include names, numbered, with their link and their licence.

    Raises:
        ValueError: the file does not define the symbol.
    """
    path = tree / citation.path
    extents = symbols.lookup(symbols.symbols(path), citation.symbol)
    if not extents:
        raise ValueError(f"symbol is {citation.symbol!r}: {citation.path} does not define it")
    first, last = extents[0]
    lines = path.read_text(encoding="utf-8").splitlines()[first - 1 : last]
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    code = "\n".join(line[indent:] for line in lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", code)), default=0))
    numbers = "\n".join(str(number) for number in range(first, last + 1))
    shown = html.escape(f"{citation.path}:{first}-{last}")
    return (
        f'<div class="upstream">\n<p class="upstream-source">'
        f'<a href="{SOURCE}/{citation.path}#L{first}-L{last}"><code>{shown}</code></a> '
        f"<code>{html.escape(citation.symbol)}</code></p>\n"
        f'<pre class="upstream-numbers" aria-hidden="true">{numbers}</pre>\n\n'
        f"{fence}{'python' if path.suffix == '.py' else ''}\n{code}\n{fence}\n\n"
        f"{code_walks.host(citation.path, citation.symbol)}"
        f'<p class="upstream-licence">From vLLM, copyright contributors to the vLLM project. '
        f"SPDX-License-Identifier: Apache-2.0 "
        f'(<a href="{SOURCE}/LICENSE">licence</a>).</p>\n</div>\n'
    )


def _hold_code(text: str, hold: Callable[[str], str]) -> str:
    """Put fenced blocks and code spans out of reach of what follows."""
    out: list[str] = []
    block: list[str] = []
    fence = ""
    for line in text.split("\n"):
        stripped = line.lstrip(" >")
        mark = re.match(r"(`{3,}|~{3,})", stripped)
        if fence:
            block.append(line)
            if mark and stripped.startswith(fence) and not stripped.strip("`~ "):
                out.append(hold("\n".join(block)))
                fence, block = "", []
        elif mark:
            fence, block = mark[1], [line]
        else:
            out.append(line)
    out += block
    return _CODE_SPAN.sub(lambda match: hold(match[0]), "\n".join(out))


def _convert_math(
    page: Path, text: str, hold: Callable[[str], str], findings: list[Finding]
) -> str:
    def convert(match: re.Match[str]) -> str:
        block = match["block"] is not None
        latex = " ".join((match["block"] if block else match["inline"]).split())
        try:
            return hold(mathml(latex, block))
        except ValueError as error:
            written = page.read_text(encoding="utf-8") if page.is_file() else ""
            line = written.count("\n", 0, max(0, written.find(match[0]))) + 1
            findings.append(Finding(page, line, str(error)))
            return match[0]

    return _MATH.sub(convert, text)


def mathml(latex: str, block: bool = False) -> str:
    """One formula as MathML on one line, safe inside Markdown.

    Raises:
        ValueError: the formula cannot be read.
        CourseError: the library is not installed.
    """
    try:
        from latex2mathml.converter import convert
    except ImportError:
        raise CourseError(needs("latex2mathml")) from None
    # The converter leaves an escaped underscore in a text as it is written.
    latex = re.sub(r"\\text(?:tt)?\{[^{}]*\}", lambda text: text[0].replace(r"\_", "_"), latex)
    try:
        made: str = convert(latex, display="block" if block else "inline")
    except Exception as error:  # the parser has many, none with a common base
        raise ValueError(
            f"latex is {latex!r}: not a formula ({type(error).__name__}: {error})"
        ) from error
    if unknown := re.search(r">\s*(?:\\|&#x0*5C;)([A-Za-z]+)", made):  # left as it was
        raise ValueError(f"latex is {latex!r}: not a formula (no command \\{unknown[1]})")
    # Between tags the text is still Markdown: what could mean something there becomes an entity.
    return re.sub(
        r"(?<=>)[^<]+",
        lambda match: re.sub(r"[*_\[\]`|~\\]", lambda c: f"&#{ord(c[0])};", match[0]),
        made.replace("\n", " "),
    )


def _convert_links(root: Path, page: Path, text: str, listed: set[Path], files: list[Path]) -> str:
    def convert(match: re.Match[str]) -> str:
        image, label, target, title = match.groups()
        if _LINK.search(label):  # an image inside a link
            label = _LINK.sub(convert, label)
        new = _destination(root, page, target, listed, files)
        return f"{image}[{label}]({new}{title})" if new else label

    def convert_definition(match: re.Match[str]) -> str:
        return match[1] + (_destination(root, page, match[2], listed, files) or match[2])

    return _DEFINITION.sub(convert_definition, _LINK.sub(convert, text))


def _destination(root: Path, page: Path, target: str, listed: set[Path], files: list[Path]) -> str:
    """What a link points at inside the book; "" when the book does not have it."""
    parts = urlsplit(target)
    if parts.scheme or target.startswith("//") or not parts.path:
        return target
    path = (page.parent / unquote(parts.path)).resolve()
    new, fragment = parts.path, f"#{parts.fragment}" if parts.fragment else ""
    if path.is_dir():
        path, new, fragment = path / "README.md", new.rstrip("/") + "/README.md", ""
    if path in listed:
        return re.sub(r"(^|/)README\.md$", r"\1index.md", new) + fragment
    if path.suffix == ".md" or not path.is_file() or path.stat().st_size > COPY_LIMIT:
        return ""
    files.append(path)
    return target


def linked_pages(root: Path, page: Path) -> Iterator[Path]:
    """The pages of the repository that a page links to, in order."""
    text = _hold_code(page.read_text(encoding="utf-8"), lambda _: "")
    targets = [match[3] for match in _LINK.finditer(text)]
    targets += [match[2] for match in _DEFINITION.finditer(text)]
    for target in targets:
        parts = urlsplit(target)
        if parts.path and not parts.scheme and not target.startswith("//"):
            path = (page.parent / unquote(parts.path)).resolve()
            path = path / "README.md" if path.is_dir() else path
            if path.suffix == ".md" and path.is_file() and path.is_relative_to(root):
                yield path


def needs(what: str) -> str:
    """What to run when a library or a binary of the book is missing."""
    return (
        f"The book is made with {what}, which is not installed: "
        "uv run --extra book course book build (or pip install -e '.[book]')"
    )
