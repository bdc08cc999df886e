"""The book: the repository's pages staged for mdBook, and the site it makes of them.

Promises: every page is in the table of contents or the build fails by its name; an include that
finds nothing, a citation that is not exact and a dead link fail by page and line; the site loads
nothing from the network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from course.learning.labs import CourseError, lab_folders, phase_title
from course.site import (
    addresses,
    book_extras,
    book_finish,
    book_pages,
    book_site,
    desk,
    places,
    play_payload,
    search,
    widgets,
)
from course.truth import checking, pages
from course.truth.citations import Finding

FRONT = (
    "README",
    "SETUP",
    "UPSTREAM_PIN",
    "SINCE_THE_PIN",
    "PLAYGROUND",
    "SPINE",
    "CHALLENGES",
    "INCIDENTS",
    "RECORDINGS",
    "GLOSSARY",
    "CAREER",
)
BACK = ("ARCHITECTURE", "CONTRIBUTING", "PUBLISHING", "CHANGES")
"""For who keeps the course, not for who takes it: after the phases."""
CHAPTERS = ("00-guide.md", "01-deep-dive.md", "02-mini-build.md")
HOME = "Home"
"""README in the list: its own title is the site's, and stands there already."""
LABS = "labs/README.md"
READING = "READING.md"
"""Where a phase has one."""
CLOSING = ("EXERCISES.md", "INTERVIEW.md", "CHEATSHEET.md")


@dataclass(frozen=True, slots=True)
class Chapter:
    """An entry of the table of contents: a page, or a title whose page is not written yet."""

    page: Path | None
    depth: int
    title: str
    made: bool = False
    """Made with the book: no file of the repository."""


@dataclass(slots=True)
class Contents:
    """The table of contents, in parts, and what is wrong with it."""

    parts: list[tuple[str, list[Chapter]]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def listed(self) -> list[Path]:
        """The pages of the repository, in reading order."""
        return [c.page for _, chapters in self.parts for c in chapters if c.page and not c.made]

    def order(self) -> list[Path]:
        """Every page of the book, in reading order."""
        return [c.page for _, chapters in self.parts for c in chapters if c.page]


# ------------------------------------------------------------------ the table of contents


def contents(root: Path) -> Contents:
    """Put every page of the repository in its place.

    Front matter, the phases, the back matter, then what the pages so far link to. A page that is
    required and missing, and a page that nothing lists or links, are findings on line 1 of it.
    """
    root = root.resolve()
    found = Contents()
    front = [root / f"{name}.md" for name in FRONT]
    found.parts.append(("", [_chapter(page) for page in front if page.is_file()]))
    if found.parts[0][1] and found.parts[0][1][0].page == root / "README.md":
        found.parts[0][1][0] = Chapter(root / "README.md", 0, HOME)
    if not (root / "README.md").is_file():
        found.findings.append(Finding(root / "README.md", 1, "the book needs this page"))
    for phase in sorted(root.glob("phase-[0-9][0-9]-*")):
        found.parts.append((phase_title(phase), list(_phase(phase, found.findings))))
    back = [root / f"{name}.md" for name in BACK]
    found.parts.append(("Reference", [_chapter(page) for page in back if page.is_file()]))
    _add_linked(root, found)
    listed = set(found.listed())
    for page in pages.find(root):
        home = addresses.phase_of(root, page)
        if home and not (home / CHAPTERS[0]).is_file() and not (home / LABS).is_file():
            continue  # a phase begins with its guide or with its labs; until then its pages wait
        if page not in listed:
            found.findings.append(Finding(page, 1, "no chapter lists this page and none links it"))
    found.parts = [(title, chapters) for title, chapters in found.parts if chapters]
    for _, chapters in found.parts:
        first = chapters[0].page
        if first is not None and (home := addresses.phase_of(root, first)):
            number = home.name.split("-")[1]
            title = f"{number} {book_extras.SHORT[places.PAGE]}"
            chapters.insert(0, Chapter(places.page_of(home), 0, title, made=True))
    return found


def _phase(phase: Path, findings: list[Finding]) -> Iterator[Chapter]:
    def required(name: str) -> Iterator[Chapter]:
        if (phase / name).is_file():
            yield _phase_chapter(phase, name)
        else:
            findings.append(Finding(phase / name, 1, "the book needs this page"))

    has_guide, has_labs = (phase / CHAPTERS[0]).is_file(), (phase / LABS).is_file()
    if not has_guide and not has_labs:
        return
    for name in CHAPTERS if has_guide else ():
        yield from required(name)
    yield _phase_chapter(phase, LABS) if has_labs else Chapter(None, 0, "Labs")
    for lab in lab_folders(phase / "labs"):
        if (lab / "README.md").is_file():
            yield _chapter(lab / "README.md", 1)
        else:
            findings.append(Finding(lab / "README.md", 1, "the book needs this page"))
    if (phase / READING).is_file():
        yield _phase_chapter(phase, READING)
    for name in CLOSING if has_guide else ():
        yield from required(name)


def _add_linked(root: Path, found: Contents) -> None:
    """List the pages that listed pages link to: beneath their lab, in their phase, or last."""
    listed = set(found.listed())
    waiting = found.listed()
    while waiting:
        for target in book_pages.linked_pages(root, waiting.pop(0)):
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
        closing = [i for i, chapter in enumerate(chapters) if _closes(chapter)]
        chapters.insert(closing[0] if closing else len(chapters), _chapter(page))
        return
    found.parts[-1][1].append(_chapter(page))


def _closes(chapter: Chapter) -> bool:
    """Whether a page is of a phase's last part, which a cheat sheet ends."""
    return chapter.page is not None and chapter.page.name in CLOSING


def _chapter(page: Path, depth: int = 0) -> Chapter:
    match = re.search(r"^# +(.+?)\s*#*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    title = match[1].replace("`", "") if match else page.stem
    return Chapter(page, depth, re.sub(r" \[[A-Z]+-[A-Z]+\]$", "", title))


def _phase_chapter(phase: Path, name: str) -> Chapter:
    """A page that every phase has, by its short name: the part of the list names the phase."""
    number = phase.name.split("-")[1]
    return Chapter(phase / name, 0, f"{number} {book_extras.SHORT[name]}")


def summary(root: Path, found: Contents) -> str:
    """The text of mdBook's SUMMARY.md."""
    lines = ["# Summary", ""]
    for title, chapters in found.parts:
        if title:
            lines += [f"# {title}", ""]
        for chapter in chapters:
            name = re.sub(r"([\[\]<>_*])", r"\\\1", chapter.title)
            at = staged(chapter.page.relative_to(root)).as_posix() if chapter.page else ""
            lines.append(f"{'  ' * chapter.depth}- [{name}]({at})")
        lines.append("")
    return "\n".join(lines)


def staged(page: Path) -> Path:
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
    _, cited = checking.check(root, tree, found.listed())
    findings += cited
    for page in found.listed():
        findings += pages.check_links(root, page)
    if findings:
        return findings
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    (target / "SUMMARY.md").write_text(summary(root, found), encoding="utf-8")
    order = found.order()
    listed = frozenset(order)
    for page in order:
        out = target / staged(page.relative_to(root))
        out.parent.mkdir(parents=True, exist_ok=True)
        made = places.is_landing(root, page)
        source = places.landing(root, page.parent, order) if made else None
        text, files, wrong = book_pages.render(root, tree, page, listed, source)
        framed = book_extras.frame(root, page, text, order)
        shown = framed if made else desk.furnish(root, page, framed)
        out.write_text(shown, encoding="utf-8")
        findings += (
            [] if made else wrong
        )  # what a landing page repeats is named where it is written
        for path in files:
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for name in ("widgets", "places"):
        if (root / "book" / name).is_dir():
            shutil.copytree(root / "book" / name, target / "book" / name)
    (target / "book" / "widgets").mkdir(parents=True, exist_ok=True)
    for script in widgets.FOLDER.glob("*.js"):
        shutil.copyfile(script, target / "book" / "widgets" / script.name)
    return findings


# ------------------------------------------------------------------ the site


def source_folder(root: Path) -> Path:
    """What mdBook reads; `book.toml` names it too."""
    return root / "build" / "book" / "src"


def site_folder(root: Path) -> Path:
    """The finished site; `book.toml` names it too."""
    return root / "build" / "book" / "html"


def new_site_folder(root: Path) -> Path:
    """A site that is built and not yet put in the place of the last one."""
    return root / "build" / "book" / "new"


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
        raise CourseError(book_pages.needs("mdbook"))
    return Path(found)


def build(root: Path, tree: Path, *, aside: bool = False) -> list[Finding]:
    """Stage the pages, run mdBook, check what it wrote, put it in place; what is wrong.

    The site that stands there stays until the new one is whole, and for good when something is
    wrong. With `aside` the new one is left in `new_site_folder`, for the server of the old one.

    Raises:
        CourseError: mdBook is missing, or failed.
    """
    mdbook = find_mdbook()
    findings = stage(root, tree, source_folder(root))
    if findings:
        return findings
    new = new_site_folder(root)
    if new.exists():
        shutil.rmtree(new)
    command = [str(mdbook), "build", "--dest-dir", str(new.resolve()), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CourseError(f"mdbook failed:\n{(done.stderr or done.stdout).strip()}")
    book_finish.finish(root, new)
    search.write(new)
    desk.write(root, new, contents(root).listed())
    play_payload.install(root, new)
    book_finish.last(root, new)
    findings = book_site.check(root, new)
    if not findings and not aside:
        book_site.publish(new, site_folder(root))
    return findings


def rebuild(root: Path, lock: threading.Lock) -> None:
    """Build in a fresh process, where nothing read before is remembered; swap under `lock`."""
    command = [sys.executable, "-m", "course.cli", "book", "build", "--aside"]
    if subprocess.run(command, cwd=root, check=False).returncode == 0:
        with lock:
            book_site.publish(new_site_folder(root), site_folder(root))
