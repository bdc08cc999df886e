"""The learner's commands: grade, watch, hint, reset, solution.

Promises: nothing of the learner's is lost (a reset keeps a copy); a result is kept only for the
text it is a result of, and shown where it cannot be kept; Ctrl-C leaves the last state.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from course import terminal
from course.files import write_atomically
from course.learning import exchange, grading, manifest, predictions, show, starters
from course.learning.labs import CourseError, Lab
from course.learning.progress import FOLDER, PASSED, Progress, digest_of


def grade(
    console: Console,
    root: Path,
    labs: list[Lab],
    progress: Progress,
    lab: Lab,
    time_limit: float,
) -> bool:
    """Grade the learner's file of one lab, keep the result, show it; whether it passed."""
    if not lab.starter.is_file():
        raise CourseError(
            f"{terminal.relative(lab.starter, root)} is gone. Put it back: course reset {lab.id}"
        )
    working = (
        console.status(f"Grading {lab.id} ...") if console.is_terminal else contextlib.nullcontext()
    )
    answers, problems = predictions.committed(lab.folder, lab.manifest.predictions)
    with working:
        report = run_starter(root, lab, time_limit)
    show.graded(console, root, lab, report)
    measured = {n: v for result in report.passed for n, v in result.measured.items()}
    show.predicted(console, lab, answers, problems, measured)
    if not report.digest:
        terminal.say(
            console,
            f"{lab.starter.name} or its tests were saved while they ran: nothing was kept.\n"
            f"Once more: course check {lab.id}",
            "yellow",
        )
        return False
    try:
        keep(progress, lab, report)
    except OSError as error:
        terminal.say(
            console, f"The result cannot be kept ({error}): your progress is as it was.", "red"
        )
    if report.ok:
        built = list(dict.fromkeys(name.partition(".")[0] for name in lab.manifest.yours))
        following = progress.next_lab(labs, after=lab)
        show.congratulate(console, root, lab, report, built, following, lab.manifest.part or "")
    return report.ok


def keep(progress: Progress, lab: Lab, report: grading.Report) -> None:
    """Keep a result, and what was predicted beside what was measured.

    Raises:
        OSError: it cannot be kept.
    """
    answers, _ = predictions.committed(lab.folder, lab.manifest.predictions)
    measured = {n: v for result in report.passed for n, v in result.measured.items()}
    both = answers.keys() & measured.keys()
    progress.record(lab, report, {name: (answers[name], measured[name]) for name in both})


def run_starter(
    root: Path,
    lab: Lab,
    time_limit: float = grading.TIME_LIMIT,
    follow: Callable[[list[dict[str, Any]]], bool] | None = None,
) -> grading.Report:
    """The learner's file against the lab's tests, in a child process.

    The report's digest is that of the files, "" when one of them was saved meanwhile: it is
    not known then which text was graded. `follow` is that of `grading.run`.
    """
    before = digest_of(lab)
    try:
        expected = lab.test_names()
    except (SyntaxError, ValueError, OSError):  # the run says what is wrong with them
        expected = []
    report = grading.run(
        root,
        lab.test_file,
        impl="starter",
        expected=expected,
        time_limit=time_limit,
        memory=grading.MEMORY_LIMIT if lab.manifest.tag == "CPU-OK" else 0,
        follow=follow,
    )
    report.digest = before if digest_of(lab) == before else ""
    return report


def watch(
    console: Console,
    root: Path,
    labs: list[Lab],
    progress: Progress,
    fixed: Lab | None,
    time_limit: float,
) -> None:
    """Grade now and after every save, until Ctrl-C.

    Without a `fixed` lab it follows the learner: a saved file of any lab is graded next.
    """
    from course.learning.progress import current_lab

    lab = fixed or current_lab(root, progress)
    watched = [fixed] if fixed else labs
    try:
        while lab is not None:
            if console.is_terminal:
                console.clear()
            graded = {each.id: _text(each) for each in watched}
            try:
                grade(console, root, labs, progress, lab, time_limit)
            except CourseError as error:  # an editor may put the file aside before it is back
                terminal.say(console, str(error), "red")
            terminal.say(console, "\nWaiting for a save (Ctrl-C to stop).", "dim")
            lab = _next_saved(watched, graded)
    except KeyboardInterrupt:
        terminal.say(console, "\nStopped. Your progress is kept.")


def _text(lab: Lab) -> bytes | None:
    """The learner's file; None while there is none."""
    try:
        return lab.starter.read_bytes()
    except OSError:
        return None


def _next_saved(labs: list[Lab], graded: dict[str, bytes | None]) -> Lab | None:
    """Wait until a lab's starter is saved, or is not what was graded; None when watching ended.

    What was saved before the watching began, as during a grading, has no event: the texts tell.
    """
    import watchfiles

    def changed() -> Lab | None:
        texts = ((lab, _text(lab)) for lab in labs)
        return next((lab for lab, text in texts if text not in (None, graded[lab.id])), None)

    if lab := changed():
        return lab
    files = {str(lab.starter.resolve()): lab for lab in labs}
    folders = [lab.folder for lab in labs]
    for changes in watchfiles.watch(
        *folders, recursive=False, raise_interrupt=True, yield_on_timeout=True, rust_timeout=1000
    ):
        saved = [files.get(str(Path(path).resolve())) for _, path in sorted(changes)]
        if found := next((lab for lab in saved if lab and lab.starter.is_file()), None):
            return found
        if lab := changed():
            return lab
    return None


def hint(console: Console, progress: Progress, lab: Lab, test: str | None) -> None:
    """Unfold one more hint of `test`, or of the test that failed last, for how it failed."""
    names = lab.test_names()
    hints = lab.manifest.hints
    entry = progress.entry(lab)
    if test is None:
        if progress.state(lab) == PASSED:
            terminal.say(
                console, f"Lab {lab.id} is passed; no hint is needed. --test names a test."
            )
            return
        test = entry.first_failing if entry.first_failing in names else names[0]
    if test not in hints:
        raise CourseError(
            f"Lab {lab.id} has no hints for {test!r}. Its tests are:\n  " + "\n  ".join(names)
        )
    fit = manifest.fitting(hints[test], entry.failure if test == entry.first_failing else "")
    fields = sorted({each.field for each in fit if each.field})
    key = f"{test} ({', '.join(fields)})" if fields else test
    try:
        unfolded = progress.unfold(lab, key, len(fit))
    except OSError as error:  # the next command would begin with the first again
        unfolded = len(fit)
        terminal.say(
            console, f"What was unfolded cannot be kept ({error}): here are all.", "yellow"
        )
    show.hint(console, lab, key, [each.text for each in fit], unfolded)


def reset(console: Console, root: Path, progress: Progress, lab: Lab, yes: bool) -> None:
    """Put the pristine starter back, after keeping a copy of what is there."""
    name = terminal.relative(lab.starter, root)
    if starters.is_current(lab):
        terminal.say(console, f"{name} is the pristine starter already.")
        return
    if not yes and sys.stdin.isatty() and not typer.confirm(f"Replace {name}?"):
        terminal.say(console, "Nothing was changed.")
        return
    replace_starter(console, root, lab)
    terminal.say(console, f"{name} is the pristine starter again.")
    try:
        progress.fold(lab)
    except OSError as error:
        terminal.say(console, f"Its last result is still in your progress ({error}).", "yellow")


def replace_starter(console: Console, root: Path, lab: Lab) -> None:
    """Write the generated starter, after keeping a copy of what is there."""
    text = starters.required(lab)
    if lab.starter.is_file():
        stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        copy = root / FOLDER / "backup" / f"{lab.id}-{stamp}.py"
        try:
            write_atomically(copy, lab.starter.read_bytes())
        except OSError as error:
            name = terminal.relative(lab.starter, root)
            raise CourseError(
                f"Nothing was changed: your {name} could not be kept ({error})."
            ) from None
        terminal.say(console, f"Your file is kept as {terminal.relative(copy, root)}")
    write_atomically(lab.starter, text)


def import_file(console: Console, root: Path, labs: list[Lab], file: Path) -> None:
    """Take over what was done in the book, and say what is where now.

    Raises:
        CourseError: the file does not fit, or cannot be taken over; nothing is changed then.
    """
    taken = exchange.take(root, labs, exchange.read(file))
    for name in taken.written:
        kept = taken.kept.get(name)
        where = f"; your file is kept as {terminal.relative(kept, root)}" if kept else ""
        terminal.say(console, f"{name}: starter.py is the one of the book{where}")
    if taken.same:
        terminal.say(console, f"The same already: {', '.join(taken.same)}", "dim")
    if taken.unknown:
        terminal.say(console, f"Not in this course, left out: {', '.join(taken.unknown)}", "yellow")
    if taken.answers:
        terminal.say(console, f"{taken.answers} answers are in the quiz: course quiz")
    if taken.predictions:
        told = terminal.counted(taken.predictions, "prediction")
        terminal.say(console, f"{told} committed, each in its lab's {predictions.FILE}")
    for name in taken.hunts:
        kept = taken.kept.get(f"hunt {name}")
        where = f"; what you wrote is kept as {terminal.relative(kept, root)}" if kept else ""
        terminal.say(console, f"Hunt {name} goes on here: course hunt {name} --check{where}")
    if taken.tries:
        told = terminal.counted(taken.tries, "try", "tries")
        terminal.say(console, f"{told} at challenges taken: course challenge")
    if taken.incidents:
        terminal.say(
            console, f"{terminal.counted(taken.incidents, 'incident')} taken: course incident"
        )
    if taken.written:
        terminal.say(console, "Graded here they count: course check --all", "cyan")
    elif not any((taken.answers, taken.predictions, taken.hunts, taken.tries, taken.incidents)):
        terminal.say(console, "Nothing in it is new here.")


def export_file(
    console: Console, root: Path, labs: list[Lab], progress: Progress, file: Path, force: bool
) -> None:
    """Write what is done here to a file for the book.

    Raises:
        CourseError: there is such a file already.
    """
    if file.exists() and not force:
        raise CourseError(f"{file} is there already. Replace it: course export {file} --force")
    text = exchange.document(root, labs, progress)
    write_atomically(file, text)
    data = json.loads(text)
    told = terminal.counted(len(data["edits"]), "lab")
    more = [
        terminal.counted(len(data["predictions"]), "prediction"),
        terminal.counted(len(data["hunts"]), "hunt"),
        terminal.counted(
            sum(len(each["tries"]) for each in data["tries"].values()), "try", "tries"
        ),
    ]
    more = [words for words in more if not words.startswith("0 ")]
    told = " and ".join([", ".join([told, *more[:-1]]), *more[-1:]])
    terminal.say(console, f"{told} in {file}. To take it into the book: Import, below any lab.")


def solution(console: Console, progress: Progress, lab: Lab, diff: bool, yes: bool) -> None:
    """Show the reference, or how it differs from the learner's file."""
    if progress.state(lab) != PASSED and not yes:
        question = f"You have not passed {lab.id} yet. Show its reference all the same?"
        if not sys.stdin.isatty():
            raise CourseError(f"{question} Then add --yes. A hint instead: course hint {lab.id}")
        if not typer.confirm(question):
            terminal.say(console, f"A hint instead: course hint {lab.id}")
            return
    if diff:
        show.diff(console, lab)
    else:
        show.code(console, lab.solution)
