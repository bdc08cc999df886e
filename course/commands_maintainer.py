"""What each maintainer's subcommand of `course` takes, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from course import terminal
from course.commands import TimeLimit, app, course_root, opened
from course.learning.labs import CourseError, Lab, pick

cite_app = typer.Typer(help="Check that every citation is true at the pin.", rich_markup_mode=None)
docs_app = typer.Typer(help="Check that every page runs and links.", rich_markup_mode=None)
book_app = typer.Typer(help="The pages as a site.", rich_markup_mode=None)
upstream_app = typer.Typer(help="The pinned vLLM tree in upstream/.", rich_markup_mode=None)
app.add_typer(cite_app, name="cite")
app.add_typer(docs_app, name="docs")
app.add_typer(book_app, name="book")
app.add_typer(upstream_app, name="upstream")
release_app = typer.Typer(help="Releases after the pin.", rich_markup_mode=None)
app.add_typer(release_app, name="release")
new_app = typer.Typer(help="Begin something new.", rich_markup_mode=None)
app.add_typer(new_app, name="new")


@app.command()
def selfcheck(
    names: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...")] = None,
    workers: Annotated[int, typer.Option(help="labs at a time")] = 2,
    time_limit: TimeLimit = 60.0,
) -> None:
    """Grade the labs themselves: solutions, starters, misconceptions, hints."""
    from course import maintainer

    root, labs, _ = opened()
    chosen = [lab for lab in labs if _selected(labs, lab, names)]
    raise typer.Exit(
        maintainer.selfcheck(terminal.make_console(), root, chosen, workers, time_limit)
    )


@new_app.command("lab")
def new_lab(
    phase: Annotated[str, typer.Argument(help="07, or the name of a new phase's folder")],
    slug: Annotated[str, typer.Argument(help="lower-case words joined by hyphens")],
    number: Annotated[int, typer.Option(help="the lab's number; 0: the next one")] = 0,
) -> None:
    """Begin a lab: three files to fill in, which are a sound lab already."""
    from course import maintainer

    raise typer.Exit(
        maintainer.begin_lab(terminal.make_console(), course_root(), phase, slug, number)
    )


@app.command("starters")
def starters_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...")] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing")] = False,
) -> None:
    """Make starters from their solutions; a file that is replaced is kept in .course/backup."""
    from course import maintainer

    root, labs, _ = opened()
    chosen = [lab for lab in labs if _selected(labs, lab, names)]
    raise typer.Exit(maintainer.make_starters(terminal.make_console(), root, chosen, check))


def _selected(labs: list[Lab], lab: Lab, names: list[str] | None) -> bool:
    """Whether a lab is named, by itself or by its phase: `06`, or the phase's folder."""
    if not names:
        return True
    for name in names:
        phase = f"phase-{name}" if re.fullmatch(r"\d\d", name) else Path(name).name
        if phase.startswith("phase-"):
            of_phase = [each for each in labs if (each.phase + "-").startswith(phase + "-")]
            if not of_phase:
                raise CourseError(f"There is no lab in {name!r}.")
            if lab in of_phase:
                return True
        elif pick(labs, name) is lab:
            return True
    return False


@cite_app.command("check")
def cite_check(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="default: the whole repository")
    ] = None,
) -> None:
    """Every citation: the path, the line and the symbol, at the pin."""
    from course import maintainer

    raise typer.Exit(maintainer.cite_check(terminal.make_console(), course_root(), paths or []))


@cite_app.command("fix")
def cite_fix(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="default: the whole repository")
    ] = None,
    tree: Annotated[Path | None, typer.Option(help="another vLLM tree; default upstream/")] = None,
    write: Annotated[bool, typer.Option("--write", help="change the files")] = False,
) -> None:
    """Propose the lines at which the cited symbols stand in another tree."""
    from course import maintainer

    raise typer.Exit(
        maintainer.cite_fix(terminal.make_console(), course_root(), paths or [], tree, write)
    )


@cite_app.command("link")
def cite_link(
    paths: Annotated[list[Path] | None, typer.Argument(help="default: every page")] = None,
    write: Annotated[bool, typer.Option("--write", help="change the files")] = False,
) -> None:
    """Make each citation a link to the pinned commit, and each include a comment with one."""
    from course import maintainer

    raise typer.Exit(
        maintainer.cite_link(terminal.make_console(), course_root(), paths or [], write)
    )


@docs_app.command("check")
def docs_check(
    paths: Annotated[list[Path] | None, typer.Argument(help="default: every page")] = None,
    run_code: Annotated[bool, typer.Option("--run/--no-run", help="execute the blocks")] = True,
    workers: Annotated[int, typer.Option(help="pages at a time")] = 2,
) -> None:
    """Run the python blocks of every page; check links, anchors, images and captures."""
    from course import maintainer

    raise typer.Exit(
        maintainer.docs_check(
            terminal.make_console(), course_root(), paths or [], run_code, workers
        )
    )


@app.command("figures")
def figures_command(
    phase: Annotated[str, typer.Argument(help="03, or book; default: all")] = "",
    check: Annotated[bool, typer.Option("--check", help="write nothing")] = False,
) -> None:
    """Draw the figures again, from traces and measurements, and write what has changed."""
    from course import maintainer

    raise typer.Exit(maintainer.draw_figures(terminal.make_console(), course_root(), phase, check))


@app.command()
def words() -> None:
    """How long the pages of the phases are, and which are over their budget."""
    from course import maintainer

    raise typer.Exit(maintainer.words_check(terminal.make_console(), course_root()))


@book_app.command("build")
def book_build(
    aside: Annotated[bool, typer.Option("--aside", help="leave it in build/book/new")] = False,
) -> None:
    """Make the site in build/book/html."""
    from course import maintainer

    raise typer.Exit(maintainer.book_build(terminal.make_console(), course_root(), aside))


@book_app.command("serve")
def book_serve(
    port: Annotated[int, typer.Option(help="on 127.0.0.1; 0 takes a free one")] = 0,
) -> None:
    """Make the site, serve it to this machine, make it again on every save."""
    from course import maintainer

    raise typer.Exit(maintainer.book_serve(terminal.make_console(), course_root(), port))


@book_app.command("runtime")
def book_runtime(
    names: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...")] = None,
    check: Annotated[bool, typer.Option("--check", help="grade the labs as a page does")] = False,
    pages: Annotated[bool, typer.Option("--pages", help="run the pages' blocks so")] = False,
) -> None:
    """Fetch what runs Python in the pages into build/play, for the next build of the site."""
    from course import maintainer

    root, labs, _ = opened()
    if check:
        chosen = [lab for lab in labs if _selected(labs, lab, names)]
        raise typer.Exit(maintainer.play_check(terminal.make_console(), root, chosen, bool(names)))
    if pages:
        raise typer.Exit(maintainer.play_pages(terminal.make_console(), root))
    if names:
        raise CourseError("Labs are named for --check only.")
    raise typer.Exit(maintainer.book_runtime(terminal.make_console(), root))


@upstream_app.command("fetch")
def upstream_fetch(
    version: Annotated[str, typer.Option(help="a later release, into build/releases")] = "",
) -> None:
    """Put the pinned tree into upstream/, or a later release beside it."""
    from course import maintainer, releases

    if version:
        releases.fetch(terminal.make_console(), course_root(), version)
        raise typer.Exit(0)
    raise typer.Exit(maintainer.upstream_fetch(terminal.make_console(), course_root()))


@upstream_app.command("verify")
def upstream_verify() -> None:
    """Say whether upstream/ is the pinned tree."""
    from course import maintainer

    raise typer.Exit(maintainer.upstream_verify(terminal.make_console(), course_root()))


@upstream_app.command("show")
def upstream_show(
    symbol: Annotated[str, typer.Argument(help="Class.method, a function, a constant")],
    at: Annotated[str, typer.Option(help="as this later release has it")] = "",
) -> None:
    """Print the source of a symbol of the pinned tree, with its path and line."""
    from course import maintainer, releases

    if at:
        raise typer.Exit(releases.show(terminal.make_console(), course_root(), symbol, at))
    raise typer.Exit(maintainer.upstream_show(terminal.make_console(), course_root(), symbol))


@app.command("drift")
def drift_command(
    to: Annotated[str, typer.Option(help="the release; default: the newest compared")] = "",
    write: Annotated[bool, typer.Option("--write", help="compute the table again")] = False,
    decisions: Annotated[
        tuple[str, str], typer.Option(help="two releases whose schedulers are compared")
    ] = ("", ""),
    workloads: Annotated[int, typer.Option(min=1, help="with --decisions: how many")] = 240,
) -> None:
    """What became of every citation, or of the scheduler's decisions, by another release."""
    from course import releases
    from course.decisions import drift

    if any(decisions):
        raise typer.Exit(drift(terminal.make_console(), *decisions, workloads))
    version = to or releases.NEWEST
    raise typer.Exit(releases.show_drift(terminal.make_console(), course_root(), version, write))


@app.command("bisect")
def bisect_command(
    workload: Annotated[str, typer.Argument(help="a seed, FILE or FILE:SEED")],
    field: Annotated[
        list[str] | None, typer.Option(help="what counts as the decision; may be repeated")
    ] = None,
    bad: Annotated[str, typer.Option(help="a release that decides so; default: the pin")] = "",
    every: Annotated[bool, typer.Option("--all", help="ask every release that is here")] = False,
) -> None:
    """Since when, and until when, releases of vLLM decide a workload as one of them does."""
    from course.decisions import PIN, bisect

    console = terminal.make_console()
    raise typer.Exit(bisect(console, workload, field or [], bad or PIN, every))


@release_app.command("add")
def release_add(
    version: Annotated[str, typer.Argument(help="such as 0.34.0")],
    workloads: Annotated[int, typer.Option(min=1, help="how many plain ones, from seed 0")] = 300,
) -> None:
    """Fetch a release, ask its scheduler, replay: which rules explain it, and what is left."""
    from course import releases

    root = course_root()
    raise typer.Exit(releases.add(terminal.make_console(), root, version, workloads))
