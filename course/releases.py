"""Releases after the pin: what became of the citations, and how one more release is compared.

Promises: `add` changes nothing that is kept; it fetches, asks the release's own core, replays and
says what differs first. Nothing needs torch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance import releases
from conformance.real_core import ArchiveError, LoadError, StubError, core_of
from conformance.real_core.archive import identity, open_archive
from conformance.releases import survey
from course import terminal
from course.learning.labs import CourseError
from course.truth import drift, symbols, upstream

NEWEST = list(releases.RELEASES)[-1]


def fetch(console: Console, root: Path, version: str) -> Path:
    """The tree of a release, fetched when it is not there."""
    known = releases.RELEASES.get(version)
    try:
        tree, sha256 = upstream.fetch_release(
            root,
            version,
            known.sha256 if known else None,
            lambda line: terminal.say(console, line, "dim"),
        )
    except upstream.UpstreamError as error:
        raise CourseError(str(error)) from None
    where = terminal.relative(tree, root)
    terminal.say(console, f"{where} is vLLM {' '.join(identity(open_archive(tree)))}", "green")
    if sha256 and not known:
        terminal.say(console, f"sha256 {sha256}")
    return tree


def show(console: Console, root: Path, symbol: str, version: str) -> int:
    """Print a symbol's source as a later release has it."""
    tree = upstream.release_tree(root, version)
    if not tree.is_dir():
        raise CourseError(f"vLLM {version} is not here: course upstream fetch --version {version}")
    places = symbols.source_of(tree, symbol)
    if not places:
        raise CourseError(f"vLLM {version} defines no {symbol!r} under vllm/.")
    for path, first, last in places:
        terminal.say(console, f"{path}:{first} {symbol} ({version})", "bold")
        if len(places) == 1:
            for number, line in enumerate(symbols.lines_of(tree / path)[first - 1 : last], first):
                terminal.raw(console, f"{number:>6}  {line}")
    return 0


def show_drift(console: Console, root: Path, version: str, write: bool) -> int:
    """A table per page: how much of what it cites a release has kept."""
    kept = root / drift.FOLDER / f"{version}.json"
    if write:
        tree, pin = upstream.release_tree(root, version), upstream.path(root)
        for needed, how in ((pin, "fetch"), (tree, f"fetch --version {version}")):
            if not needed.is_dir():
                raise CourseError(f"{needed.name} is not here: course upstream {how}")
        drift.write(kept, drift.table(root, pin, tree))
    fates = drift.read(kept)
    if not fates:
        raise CourseError(
            f"No table of {version} is kept: course drift --to {version} --write makes one."
        )
    table = Table("page", *drift.FATES, title=f"0.22.1 to {version}", box=None)
    total: Counter[str] = Counter()
    for page, counts in drift.per_page(root, fates):
        total += counts
        if page.suffix == ".md":
            row = [str(counts[kind]) for kind in drift.FATES]
            table.add_row(terminal.relative(page, root), *row)
    table.add_row("all, code included", *(str(total[kind]) for kind in drift.FATES), style="bold")
    console.print(table)
    different = Counter(fate.kind for fate in fates.values())
    counted = ", ".join(f"{different[kind]} {kind}" for kind in drift.FATES)
    terminal.say(console, f"{len(fates)} different citations: {counted}")
    return 0


def add(console: Console, root: Path, version: str, workloads: int) -> int:
    """Fetch a release and say which rules explain it, kind by kind, and what is left; 1 if any is.

    Raises:
        CourseError: it cannot be fetched, or its core does not load.
    """
    fetch(console, root, version)
    try:
        core = core_of(version, root)
        differs = False
        for line in survey.report(core, workloads):
            differs = differs or "no set of rules" in line
            terminal.raw(console, line)
    except (ArchiveError, LoadError, StubError, ValueError) as error:
        raise CourseError(f"vLLM {version} could not be compared: {error}") from None
    return 1 if differs else 0
