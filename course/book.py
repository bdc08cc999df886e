"""The book: the repository's pages staged for mdBook, and the site it makes of them.

Promises: every page is in the table of contents or the build fails by its name; an include that
finds nothing, a citation that is not exact and a dead link fail by page and line; the site loads
nothing from the network. Mirrors nothing upstream.
"""

from __future__ import annotations

import contextlib
import functools
import html
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from course import citations, pages
from course.citations import Citation, Finding
from course.labs import CourseError

COMMIT = "0decac0d96c42b49572498019f0a0e3600f50398"
"""The pinned commit in full: what a permanent link names."""

SOURCE = f"https://github.com/vllm-project/vllm/blob/{COMMIT}"
FRONT = ("README", "SETUP", "UPSTREAM_PIN", "GLOSSARY", "CAREER", "PUBLISHING", "CHANGES")
CHAPTERS = ("00-guide.md", "01-deep-dive.md", "02-mini-build.md")
CLOSING = ("EXERCISES.md", "INTERVIEW.md", "CHEATSHEET.md")
COPY_LIMIT = 300_000
"""Bytes up to which a linked file that is not a page is copied into the book."""

_HELD = re.compile("\ue000(\\d+)\ue001")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\\[\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)((?:\s+\"[^\"]*\")?)\)"
)
_DEFINITION = re.compile(r"^(\[[^\]]+\]:\s*)(\S+)", re.MULTILINE)
_MATH = re.compile(
    r"(?<![\\$])\$\$(?P<block>[^$]+?)\$\$(?!\$)"
    r"|(?<![\\$\w])\$(?=[^\s$])(?P<inline>[^$\n]*(?:\n[^$\n]+)?)(?<=[^\s\\])\$(?![\w$])"
)


@dataclass(frozen=True, slots=True)
class Chapter:
    """An entry of the table of contents: a page, or a title whose page is not written yet."""

    page: Path | None
    depth: int
    title: str


@dataclass(slots=True)
class Contents:
    """The table of contents, in parts, and what is wrong with it."""

    parts: list[tuple[str, list[Chapter]]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def listed(self) -> list[Path]:
        """The pages, in reading order."""
        return [c.page for _, chapters in self.parts for c in chapters if c.page is not None]


# ------------------------------------------------------------------ the table of contents


def contents(root: Path) -> Contents:
    """Put every page of the repository in its place.

    Front matter, then the phases, then what the pages so far link to. A page that is required
    and missing, and a page that nothing lists or links, are findings on line 1 of that page.
    """
    root = root.resolve()
    found = Contents()
    front = [root / f"{name}.md" for name in FRONT]
    found.parts.append(("", [_chapter(page) for page in front if page.is_file()]))
    if not (root / "README.md").is_file():
        found.findings.append(Finding(root / "README.md", 1, "the book needs this page"))
    for phase in sorted(root.glob("phase-[0-9][0-9]-*")):
        found.parts.append((_phase_title(phase), list(_phase(phase, found.findings))))
    found.parts.append(("Reference", []))
    _add_linked(root, found)
    listed = set(found.listed())
    for page in pages.find(root):
        if page not in listed:
            found.findings.append(Finding(page, 1, "no chapter lists this page and none links it"))
    found.parts = [(title, chapters) for title, chapters in found.parts if chapters]
    return found


def _phase(phase: Path, findings: list[Finding]) -> Iterator[Chapter]:
    def required(page: Path, depth: int) -> Iterator[Chapter]:
        if page.is_file():
            yield _chapter(page, depth)
        else:
            findings.append(Finding(page, 1, "the book needs this page"))

    for name in CHAPTERS:
        yield from required(phase / name, 0)
    overview = phase / "labs" / "README.md"
    yield _chapter(overview) if overview.is_file() else Chapter(None, 0, "Labs")
    for lab in sorted((phase / "labs").glob("lab-[0-9][0-9]-*")):
        yield from required(lab / "README.md", 1)
    for name in CLOSING:
        yield from required(phase / name, 0)


def _add_linked(root: Path, found: Contents) -> None:
    """List the pages that listed pages link to: beneath their lab, in their phase, or last."""
    listed = set(found.listed())
    waiting = found.listed()
    while waiting:
        for target in _linked_pages(root, waiting.pop(0)):
            if target not in listed:
                listed.add(target)
                waiting.append(target)
                _place(root, found, target)


def _place(root: Path, found: Contents, page: Path) -> None:
    folder = page.relative_to(root).parts[0]
    for _, chapters in found.parts:
        own = [c.page for c in chapters if c.page and c.page.relative_to(root).parts[0] == folder]
        if not own or not folder.startswith("phase-"):
            continue
        for index, chapter in reversed(list(enumerate(chapters))):
            home = chapter.page.parent if chapter.page else None
            if home and home.parent.name == "labs" and page.is_relative_to(home):
                chapters.insert(index + 1, _chapter(page, chapter.depth + 1))
                return
        chapters.append(_chapter(page))
        return
    found.parts[-1][1].append(_chapter(page))


def _linked_pages(root: Path, page: Path) -> Iterator[Path]:
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


def _chapter(page: Path, depth: int = 0) -> Chapter:
    match = re.search(r"^# +(.+?)\s*#*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return Chapter(page, depth, match[1].replace("`", "") if match else page.stem)


def _phase_title(phase: Path) -> str:
    _, number, *words = phase.name.split("-")
    return f"{number} {' '.join(words).capitalize()}"


def summary(root: Path, found: Contents) -> str:
    """The text of mdBook's SUMMARY.md."""
    lines = ["# Summary", ""]
    for title, chapters in found.parts:
        if title:
            lines += [f"# {title}", ""]
        for chapter in chapters:
            name = re.sub(r"([\[\]<>_*])", r"\\\1", chapter.title)
            at = _staged(chapter.page.relative_to(root)).as_posix() if chapter.page else ""
            lines.append(f"{'  ' * chapter.depth}- [{name}]({at})")
        lines.append("")
    return "\n".join(lines)


def _staged(page: Path) -> Path:
    """Where a page stands in the book; a README is the index of its folder."""
    return page.with_name("index.md") if page.name == "README.md" else page


# ------------------------------------------------------------------ staging


def stage(root: Path, tree: Path, target: Path) -> list[Finding]:
    """Write SUMMARY.md, every page and every file they show into `target`, replacing it.

    Args:
        root: the repository.
        tree: the pinned upstream tree.
        target: the folder mdBook reads.

    Returns:
        What is wrong; the book is not to be built unless this is empty.
    """
    root = root.resolve()
    found = contents(root)
    findings = list(found.findings)
    _, cited = citations.check(root, tree, found.listed())
    findings += cited
    for page in found.listed():
        findings += pages.check_links(root, page)
    if findings:
        return findings
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    (target / "SUMMARY.md").write_text(summary(root, found), encoding="utf-8")
    listed = frozenset(found.listed())
    for page in found.listed():
        out = target / _staged(page.relative_to(root))
        out.parent.mkdir(parents=True, exist_ok=True)
        text, files, wrong = render(root, tree, page, listed)
        out.write_text(text, encoding="utf-8")
        findings += wrong
        for path in files:
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return findings


def render(
    root: Path, tree: Path, page: Path, listed: Iterable[Path]
) -> tuple[str, list[Path], list[Finding]]:
    """One page as mdBook shall read it, the files it needs beside it, and what is wrong."""
    text = page.read_text(encoding="utf-8")
    cited, findings = citations.in_file(page, root)
    held: list[str] = []

    def hold(piece: str) -> str:
        held.append(piece)
        return f"\ue000{len(held) - 1}\ue001"

    rows = text.split("\n")
    for citation in sorted(cited, key=lambda c: (c.line, c.column), reverse=True):
        row = rows[citation.line - 1]
        if citation.first == 0 and citation.symbol:
            if problem := citations.problem_of(citation, tree):
                findings.append(Finding(page, citation.line, f"{citation.text}: {problem}"))
                continue
            end = row.index("}}", citation.column) + 2
            piece = hold(include(tree, citation))
        else:
            end = row.index("`", citation.column + 1) + 1
            piece = hold(f"[{row[citation.column : end]}]({source_link(citation)})")
        rows[citation.line - 1] = row[: citation.column] + piece + row[end:]
    text = _hold_code("\n".join(rows), hold)
    text = _convert_math(page, text, hold, findings)
    files: list[Path] = []
    text = _convert_links(root, page, text, set(listed), files)
    while _HELD.search(text):
        text = _HELD.sub(lambda match: held[int(match[1])], text)
    return text, files, findings


def source_link(citation: Citation) -> str:
    """The cited lines at the pinned commit on GitHub."""
    if not citation.first:
        return f"{SOURCE}/{citation.path}"
    lines = f"#L{citation.first}"
    if citation.last != citation.first:
        lines += f"-L{citation.last}"
    return f"{SOURCE}/{citation.path}{lines}"


def include(tree: Path, citation: Citation) -> str:
    """The lines an include names, numbered, with their link and their licence.

    Raises:
        ValueError: the file does not define the symbol.
    """
    path = tree / citation.path
    extents = citations.lookup(citations.symbols(path), citation.symbol)
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
            source = page.read_text(encoding="utf-8")
            line = source.count("\n", 0, max(0, source.find(match[0]))) + 1
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
        raise CourseError(_needs("latex2mathml")) from None
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


# ------------------------------------------------------------------ the site


def source_folder(root: Path) -> Path:
    """What mdBook reads; `book.toml` names it too."""
    return root / "build" / "book" / "src"


def site_folder(root: Path) -> Path:
    """What mdBook writes; `book.toml` names it too."""
    return root / "build" / "book" / "html"


def find_mdbook() -> Path:
    """The mdbook binary: of this environment, else of the PATH.

    Raises:
        CourseError: there is none; the text says how to get it.
    """
    for name in ("mdbook", "mdbook.exe"):
        here = Path(sysconfig.get_path("scripts")) / name
        if here.is_file():
            return here
    found = shutil.which("mdbook")
    if not found:
        raise CourseError(_needs("mdbook"))
    return Path(found)


def _needs(what: str) -> str:
    return (
        f"The book is made with {what}, which is not installed: "
        "uv run --extra book course book build (or pip install -e '.[book]')"
    )


def build(root: Path, tree: Path) -> list[Finding]:
    """Stage the pages, run mdBook, and check what it wrote; what is wrong."""
    mdbook = find_mdbook()
    findings = stage(root, tree, source_folder(root))
    if findings:
        return findings
    done = subprocess.run([mdbook, "build", root], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CourseError(f"mdbook failed:\n{(done.stderr or done.stdout).strip()}")
    return check_site(root, site_folder(root))


def rebuild(root: Path) -> None:
    """Build again in a fresh process: nothing read before the change is remembered."""
    subprocess.run([sys.executable, "-m", "course.cli", "book", "build"], cwd=root, check=False)


def changes(root: Path) -> Iterator[None]:
    """Yields after each save of a page, a figure or a file of the theme; ends on Ctrl-C."""
    from watchfiles import watch

    def wanted(_change: object, name: str) -> bool:
        path = Path(name)
        inside = path.relative_to(root).parts[:-1] if path.is_relative_to(root) else ()
        return path.suffix in (".md", ".svg", ".css", ".js", ".toml", ".png") and not any(
            part in citations.SKIPPED_FOLDERS for part in inside
        )

    for _ in watch(root, watch_filter=wanted, raise_interrupt=False):
        yield


@contextlib.contextmanager
def serving(root: Path, port: int) -> Iterator[str]:
    """Serve the site to this machine; the address.

    Raises:
        CourseError: the port is taken.
    """

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def end_headers(self) -> None:
            self.send_header("Cache-Control", "no-store")  # a reload shows what was built last
            super().end_headers()

    handler = functools.partial(Quiet, directory=str(site_folder(root)))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except (OSError, OverflowError) as error:
        raise CourseError(f"port is {port}: {error}; --port 0 takes a free one") from None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


class _Html(HTMLParser):
    """The ids of a page, where it links, and what it loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "href" in values:
            self.loads.append(values["href"])
        if "src" in values:
            self.loads.append(values["src"])


def check_site(root: Path, site: Path) -> list[Finding]:
    """Dead links and anchors, and anything loaded from the network, by page and line."""

    @functools.cache
    def parsed(path: Path) -> _Html:
        parser = _Html()
        parser.feed(path.read_text(encoding="utf-8"))
        return parser

    findings = []
    for file in sorted(site.rglob("*.html")):
        for target in parsed(file).loads:
            if urlsplit(target).netloc:
                findings.append(_on_page(root, site, file, target, "is loaded from the network"))
        for target in (*parsed(file).links, *parsed(file).loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            path = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                findings.append(_on_page(root, site, file, target, "leads nowhere in the book"))
            elif (
                path.suffix == ".html"
                and parts.fragment
                and unquote(parts.fragment) not in parsed(path).ids
            ):
                findings.append(_on_page(root, site, file, target, "has no such anchor"))
    return findings


def _on_page(root: Path, site: Path, file: Path, target: str, problem: str) -> Finding:
    """The finding at the line of the page that holds the target, as far as it can be told."""
    inside = file.relative_to(site).with_suffix(".md")
    page = root / inside
    if inside.name == "index.md" and not page.is_file():
        page = page.with_name("README.md")
    if not page.is_file():
        return Finding(file, 1, f"{target}: {problem}")
    rows = page.read_text(encoding="utf-8").split("\n")
    wanted = target.rpartition("#")[2] if "#" in target else target.replace(".html", ".md")
    at = next((number for number, row in enumerate(rows, 1) if wanted in row), 1)
    return Finding(page, at, f"{target}: {problem}")
