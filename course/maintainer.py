"""The maintainer's commands: selfcheck, cite, docs, book, upstream. Each returns an exit status."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from course import terminal
from course.files import write_atomically
from course.learning import exercises, learner, quiz, starters
from course.learning.labs import CourseError, Lab
from course.site import book, book_site, local, play
from course.site import play_check as play_check_module
from course.site import play_pages as play_pages_module
from course.truth import (
    checking,
    claims,
    figures,
    habits,
    links,
    new_lab,
    pages,
    proofs,
    symbols,
    upstream,
    words,
)
from course.truth.citations import Finding
from course.truth.selfcheck import Verdict, check_labs


def selfcheck(
    console: Console, root: Path, labs: list[Lab], workers: int, time_limit: float
) -> int:
    """Check the labs; 1 when one is to mend."""
    began = time.perf_counter()

    def done(verdict: Verdict) -> None:
        lab = verdict.lab
        counts = (
            f"{verdict.tests} tests, {verdict.misconceptions} misconceptions caught, "
            f"{verdict.seconds:.2f} s"
        )
        if verdict.skipped:
            counts += f", {verdict.skipped} skipped here"
        mark = "FAIL" if verdict.problems else "ok  "
        terminal.say(
            console,
            f"{mark}  {lab.id} {lab.folder.name}: {counts}",
            "red" if verdict.problems else "",
        )
        for problem in verdict.problems:
            terminal.say(console, "      " + problem.replace("\n", "\n      "))

    verdicts = check_labs(
        root,
        labs,
        workers=workers,
        time_limit=time_limit,
        done=done,
    )
    bad = sum(bool(verdict.problems) for verdict in verdicts)
    terminal.say(
        console,
        f"{len(verdicts)} labs, {sum(v.tests for v in verdicts)} tests, "
        f"{sum(v.misconceptions for v in verdicts)} misconceptions caught, {bad} labs to mend; "
        f"{time.perf_counter() - began:.1f} s",
        "red" if bad else "green",
    )
    return 1 if bad or not verdicts else 0


def begin_lab(console: Console, root: Path, phase: str, slug: str, number: int) -> int:
    """Write the three files of a new lab, and say what comes next."""
    lab = new_lab.create(root, phase, slug, number)
    for name in new_lab.WRITTEN:
        terminal.say(console, terminal.relative(lab.folder / name, root), "green")
    terminal.say(
        console,
        f"Fill in whatever says {new_lab.MARK}, then:\n"
        f"  course starters {lab.id}\n"
        f"  course selfcheck {lab.id}\n"
        "course/WRITING_LABS.md says the rest.",
    )
    return 0


def make_starters(console: Console, root: Path, labs: list[Lab], check: bool) -> int:
    """Write each starter its solution gives, or with `check` only say which is another.

    A lab without a page gets a first one, and the file its predictions are written to.
    """
    stale = [lab for lab in labs if not starters.is_current(lab)]
    for lab in stale:
        name = terminal.relative(lab.starter, root)
        if check:
            terminal.say(console, f"{name} is not what its solution gives", "red")
        else:
            learner.replace_starter(console, root, lab)
            terminal.say(console, f"{name} is written")
    for path in [] if check else [path for lab in labs for path in new_lab.complete(lab)]:
        terminal.say(console, f"{terminal.relative(path, root)} is written")
    told = f"{len(stale)} {'to write' if check else 'written'}"
    bad = bool(stale) and check
    terminal.say(console, f"{len(labs)} starters, {told}", "red" if bad else "green")
    return 1 if bad else 0


def _tree(root: Path) -> Path:
    status = upstream.verify(root)
    if not status.ok:
        raise CourseError(f"The citations are checked against the pinned tree: {status.detail}.")
    return upstream.path(root)


def _report(console: Console, root: Path, findings: list[Finding]) -> None:
    for finding in sorted(findings, key=lambda f: (f.page, f.line)):
        terminal.say(
            console, f"{terminal.relative(finding.page, root)}:{finding.line}: {finding.text}"
        )


def _there(paths: list[Path]) -> list[Path]:
    """The paths of a command line, which must exist: nothing to check is no success.

    Raises:
        CourseError: with every path that does not.
    """
    gone = [str(path) for path in paths if not path.exists()]
    if gone:
        raise CourseError(f"There is no such file or folder: {', '.join(gone)}")
    return paths


def cite_check(console: Console, root: Path, paths: list[Path]) -> int:
    """Check every citation; 1 when one is not exact."""
    began = time.perf_counter()
    count, findings = checking.check(root, _tree(root), _there(paths))
    if not paths and (problem := proofs.stale(root, count)):
        findings.append(Finding(root / "README.md", 1, problem))
    _report(console, root, findings)
    terminal.say(
        console,
        f"{count} citations, {len(findings)} to mend; {time.perf_counter() - began:.1f} s",
        "red" if findings else "green",
    )
    return 1 if findings else 0


def cite_fix(
    console: Console, root: Path, paths: list[Path], tree: Path | None, write: bool
) -> int:
    """Propose (or write) the lines citations should have in `tree`."""
    if tree is not None and not (tree / "vllm").is_dir():
        raise CourseError(f"{tree} is not a vLLM tree: it has no folder vllm/")
    target = tree or _tree(root)
    moved = checking.moves(root, upstream.path(root), target, _there(paths))
    for move in moved:
        old = move.citation
        where = f"{terminal.relative(old.page, root)}:{old.line}"
        if not move.first:
            terminal.say(console, f"{where}: {old.text}: gone, mend by hand", "red")
        else:
            lines = f"{move.first}" if move.first == move.last else f"{move.first}-{move.last}"
            terminal.say(console, f"{where}: {old.text} -> line {lines}")
    gone = sum(not move.first for move in moved)
    if write:
        count = checking.rewrite(moved, write_atomically)
        terminal.say(console, f"{count} citations rewritten, {gone} to mend by hand")
    else:
        terminal.say(console, f"{len(moved) - gone} would move (--write), {gone} to mend by hand")
    return 1 if gone else 0


def cite_link(console: Console, root: Path, paths: list[Path], write: bool) -> int:
    """Link the citations of pages, and put includes into comments, for readers on GitHub."""
    tree = _tree(root)
    changed = 0
    for page in pages.find(root, _there(paths)):
        text = page.read_text(encoding="utf-8")
        new = links.linked(text, page, root, tree)
        if new == text:
            continue
        changed += 1
        added = new.count(f"]({links.BLOB}/") - text.count(f"]({links.BLOB}/")
        terminal.say(console, f"{terminal.relative(page, root)}: {added} more links")
        if write:
            write_atomically(page, new)
    terminal.say(console, f"{changed} pages {'written' if write else 'would change (--write)'}")
    return 0


def docs_check(
    console: Console, root: Path, paths: list[Path], run_code: bool, workers: int
) -> int:
    """Check every page and every quiz; 1 when something is to mend."""
    began = time.perf_counter()
    found = pages.find(root, _there(paths))
    findings = [finding for page in found for finding in pages.check_links(root, page)]
    asked = quiz.files(root, paths)
    findings += [finding for path in asked for finding in quiz.load(path)[1]]
    for path in exercises.files(root, paths):
        coded, wrong = exercises.load(path)
        findings += wrong
        findings += [
            Finding(path, 1, f"exercise {exercise.id}: {problem}")
            for exercise in coded
            for problem in exercises.problems(exercise)
        ]
    count = 0
    if run_code:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            for several in pool.map(lambda page: pages.run(root, page), found):
                findings += several
        count = sum(len(pages.runnable(page)) for page in found)
    _report(console, root, findings)
    ran = f"{count} blocks run, " if run_code else ""
    ran += f"{len(asked)} quizzes, " if asked else ""
    terminal.say(
        console,
        f"{len(found)} pages, {ran}{len(findings)} to mend; {time.perf_counter() - began:.1f} s",
        "red" if findings else "green",
    )
    return 1 if findings else 0


def words_check(console: Console, root: Path) -> int:
    """A table of pages, words and budgets; 1 when a page or the first phases have too many."""
    counted = words.count(root)
    sums = words.totals(counted)
    terminal.say(console, f"{'words':>7} {'budget':>7} {'over':>6}  page", "dim")
    for page in counted:
        figures = f"{page.words:>7,} {page.budget:>7,} {page.over or '':>6}"
        terminal.say(console, f"{figures}  {page.path}", "red" if page.over else "")
    for phase, total in sorted(sums.items()):
        terminal.say(console, f"{total:>7,} {'':>7} {'':>6}  phase {phase}", "bold")
    if aloud := habits.worst(root, [page.path for page in counted]):
        terminal.say(
            console, "Pages to read aloud: habits to a thousand words (CONTRIBUTING)", "dim"
        )
    for read in aloud:
        told = ", ".join(f"{number} {name}" for name, number in read.found.items() if number)
        terminal.say(console, f"{read.share:>7.1f}  {read.path}: {told}")
    if bare := claims.listed(root, [page.path for page in counted]):
        terminal.say(console, "Said of vLLM without a source or a scope, for a person", "dim")
    for path, sentence in bare:
        terminal.say(console, f"  {path}: {sentence}")
    over = [page for page in counted if page.over]
    first = sum(sums.get(phase, 0) for phase in words.FIRST_PHASES)
    limit = words.FIRST_PHASES_LIMIT
    bad = bool(over) or first > limit
    terminal.say(
        console,
        f"{len(counted)} pages, {sum(sums.values()):,} words; phases 00-06: {first:,} of {limit:,}",
        "red" if first > limit else "",
    )
    for page in over:
        terminal.say(console, f"{page.path}: {page.over} words over {page.budget:,}", "red")
    return 1 if bad else 0


def draw_figures(console: Console, root: Path, phase: str, check: bool) -> int:
    """Write the figures that are out of date, or with `check` only name them; 1 when one is."""
    found = figures.folders(root)
    if phase:
        wanted = (f"phase-{phase}-", phase)
        found = [path for path in found if path.parent.name.startswith(wanted)]
        if not found:
            raise CourseError(f"There are no figures in {phase!r}.")
    count = bad = 0
    for folder in found:
        drawn = figures.collect(folder)
        count += len(drawn)
        for name, text in figures.stale(folder, drawn).items():
            where = terminal.relative(folder / name, root)
            if check or not text:
                bad += 1
                told = "is not what its script draws" if text else "is drawn by no script"
                terminal.say(console, f"{where} {told}", "red")
            else:
                write_atomically(folder / name, text)
                terminal.say(console, f"{where} is written")
    told = f"{bad} to mend" if bad else "all up to date"
    terminal.say(console, f"{count} figures, {told}", "red" if bad else "green")
    return 1 if bad else 0


def book_build(console: Console, root: Path, aside: bool = False) -> int:
    """Build the site; 1 when something is to mend, and the last one then stays."""
    began = time.perf_counter()
    status = upstream.verify(root)
    if not status.ok:
        raise CourseError(f"The book shows lines of the pinned tree: {status.detail}.")
    findings = book.build(root, upstream.path(root), aside=aside)
    _report(console, root, findings)
    seconds = f"{time.perf_counter() - began:.1f} s"
    if findings:
        terminal.say(console, f"{len(findings)} to mend; {seconds}", "red")
        return 1
    count = len(book.contents(root).order())
    index = terminal.relative(book.site_folder(root) / "index.html", root)
    terminal.say(console, f"{count} pages in {index}; {seconds}", "green")
    if why := play.problem(root):
        told = f"The pages run no Python by themselves ({why}); what does is fetched by: "
        terminal.say(console, told + "course book runtime", "dim")
    return 0


def book_runtime(console: Console, root: Path) -> int:
    """Put what runs Python in the pages into build/play."""
    began = time.perf_counter()
    made = play.make(root, lambda line: terminal.say(console, line, "dim"))
    total = sum(path.stat().st_size for path in play.folder(root).rglob("*") if path.is_file())
    where = terminal.relative(play.folder(root), root)
    seconds = f"made in {time.perf_counter() - began:.0f} s" if made else "it was there"
    terminal.say(
        console, f"Python for the pages in {where}, {total / 1e6:.1f} MB: {seconds}", "green"
    )
    return 0


def play_check(console: Console, root: Path, labs: list[Lab], named: bool) -> int:
    """Grade labs in the pages' worker, in Node; 1 when one differs from its grading here.

    Args:
        named: the labs were named: each is also graded with what must fail.
    """
    began = time.perf_counter()

    def told(verdict: play_check_module.Verdict) -> None:
        counts = f"{verdict.passed} passed, {verdict.skipped} skipped"
        if verdict.excepted:
            counts += f" ({verdict.excepted} cannot run in a page)"
        line = f"{verdict.lab.id}  {counts}; {verdict.seconds:.1f} s, here {verdict.native:.1f} s"
        terminal.say(console, line, "red" if verdict.problems else "green")
        for problem in verdict.problems:
            terminal.say(console, f"       {problem}", "red")

    wrong = {lab.id for lab in labs} if named else play_check_module.firsts(labs)
    verdicts = play_check_module.check(root, labs, told, wrong)
    bad = sum(bool(verdict.problems) for verdict in verdicts)
    caught = sum(bool(verdict.caught) for verdict in verdicts)
    total = f"{len(verdicts)} labs in the page's worker, {sum(v.passed for v in verdicts)} tests, "
    total += f"{caught} misconceptions caught; {bad} labs differ"
    terminal.say(
        console, f"{total}; {time.perf_counter() - began:.0f} s", "red" if bad else "green"
    )
    return 1 if bad else 0


def play_pages(console: Console, root: Path) -> int:
    """Run the blocks of the phases' pages in the pages' worker; 1 when one shows another output."""
    began = time.perf_counter()
    count = blocks = 0

    def told(page: str, several: int, problems: list[str]) -> None:
        nonlocal count, blocks
        count, blocks = count + 1, blocks + several
        for problem in problems:
            terminal.say(console, problem, "red")

    bad = play_pages_module.check(root, told)
    line = f"{blocks} blocks of {count} pages in the page's worker; {bad} pages differ"
    seconds = f"{time.perf_counter() - began:.0f} s"
    terminal.say(console, f"{line}; {seconds}", "red" if bad else "green")
    return 1 if bad else 0


def book_serve(console: Console, root: Path, port: int) -> int:
    """Build, then serve on this machine only and build again on every save, until Ctrl-C."""
    if book_build(console, root):
        return 1
    swapping = threading.Lock()
    own = local.Local(root)
    with book_site.serving(book.site_folder(root), port, swapping, own) as address:
        terminal.say(console, f"{address} (Ctrl-C ends; after a save, reload the page)", "green")
        terminal.say(
            console, "Opened by it, a lab's page grades your own starter.py on this machine."
        )
        with contextlib.suppress(KeyboardInterrupt):
            for _ in book_site.changes(root):
                book.rebuild(root, swapping)
    return 0


def upstream_fetch(console: Console, root: Path) -> int:
    """Put the pinned tree in place."""
    try:
        source = upstream.fetch(root, lambda line: terminal.say(console, line, "dim"))
    except upstream.UpstreamError as error:
        raise CourseError(str(error)) from None
    terminal.say(console, f"{upstream.verify(root).detail} ({source})", "green")
    return 0


def upstream_verify(console: Console, root: Path) -> int:
    """Say whether the tree is the pinned one."""
    status = upstream.verify(root)
    terminal.say(console, status.detail, "green" if status.ok else "red")
    return 0 if status.ok else 1


def upstream_show(console: Console, root: Path, symbol: str) -> int:
    """Print a symbol's source, with the citation to copy."""
    tree = _tree(root)
    places = symbols.source_of(tree, symbol)
    if not places:
        raise CourseError(f"The pinned tree defines no {symbol!r} under vllm/.")
    for path, first, _ in places:
        terminal.say(console, f"`{path}:{first}` `{symbol}`", "bold")
    if len(places) == 1:
        path, first, last = places[0]
        lines = (tree / path).read_text(encoding="utf-8").splitlines()[first - 1 : last]
        for number, line in enumerate(lines, first):
            terminal.raw(console, f"{number:>6}  {line}")
    return 0
