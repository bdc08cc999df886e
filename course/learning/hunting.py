"""What `course hunt` says and does; the rules are in `hunts.py`."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from course.learning import hunts, show
from course.learning.hunts import Hunt
from course.learning.labs import CourseError, Lab
from course.learning.progress import Progress
from course.terminal import counted, raw, relative, say


def choose(root: Path, labs: list[Lab], progress: Progress) -> Lab:
    """The lab to hunt in where none is named: an open hunt, then what is due, then any passed one.

    Raises:
        CourseError: no lab has been passed yet.
    """
    for lab in labs:
        if (hunt := hunts.read(root, lab)) is not None and hunt.is_open:
            return lab
    if due := hunts.due(root, labs, progress):
        return due[0]
    passed = [lab for lab in labs if progress.state(lab) == "passed" and hunts.pool(lab)]
    if not passed:
        raise CourseError(
            "No lab is passed yet. Name one to hunt in all the same: course hunt 02-01"
        )
    return random.choice(passed)


def start(console: Console, root: Path, lab: Lab, level: int | None, seed: int | None) -> None:
    """Begin a hunt, or show the open one again."""
    hunt = hunts.read(root, lab)
    begun = hunt is None or not hunt.is_open or level is not None or seed is not None
    if hunt is None or begun:
        seed = random.randrange(10**6) if seed is None else seed
        hunt, kept = hunts.begin(root, lab, 1 if level is None else level, seed)
        if kept is not None:
            say(console, f"Your file of the hunt before is kept as {relative(kept, root)}")
    _introduce(console, root, lab, hunt)


def _introduce(console: Console, root: Path, lab: Lab, hunt: Hunt) -> None:
    say(
        console,
        f"Hunt {lab.id}, level {hunt.level}, seed {hunt.seed}: {lab.manifest.title}",
        "bold",
    )
    folder = hunts.folder_of(root, lab)
    if hunt.level == 3:
        number = len(lab.manifest.misconceptions)
        say(
            console,
            f"{number} wrong solutions of this lab are known. Write tests that pass on the "
            f"reference and fail on as many as you can, in\n  "
            f"{relative(folder / hunts.TESTS, root)}",
        )
    else:
        say(
            console,
            "One line of the reference is wrong. Find and mend it in\n"
            f"  {relative(folder / hunts.FILE, root)}",
        )
        failed, calls = hunts.evidence(root, lab, hunt)
        if failed is None:
            raise CourseError(
                f"The drawn line fails no test here. Another: course hunt {lab.id} --seed N"
            )
        console.print()
        if hunt.level == 1:
            show.explain(console, root, lab, failed, printed=False)
        elif calls:
            say(
                console,
                f"The last {counted(len(calls), 'call')} before something was found to be wrong:",
            )
            raw(console, "\n".join(f"  {line}" for line in calls))
        else:
            say(
                console,
                f"{failed.error}, before any of the lab's own calls returned.",
            )
        console.print()
    say(console, f"Then: course hunt {lab.id} --check", "cyan")


def check(console: Console, root: Path, lab: Lab) -> bool:
    """Grade the hunt of a lab; whether it is found, or at level 3 whether something was caught.

    Raises:
        CourseError: there is none, or its file is gone or cannot be read.
    """
    hunt = hunts.read(root, lab)
    if hunt is None:
        raise CourseError(f"No hunt is open in {lab.id}. Begin one: course hunt {lab.id}")
    hunt.checks += 1
    found = (
        _score(console, root, lab, hunt) if hunt.level == 3 else _mended(console, root, lab, hunt)
    )
    if found and not hunt.found:
        hunt.found = datetime.now(UTC).isoformat(timespec="seconds")
    hunts.keep(root, lab, hunt)
    return found


def _mended(console: Console, root: Path, lab: Lab, hunt: Hunt) -> bool:
    file = hunts.folder_of(root, lab) / hunts.FILE
    if not file.is_file():
        raise CourseError(
            f"{relative(file, root)} is gone. Begin again: course hunt {lab.id} --level 1"
        )
    report = hunts.run_tests(root, lab, file)
    if not report.ok:
        failing = report.failed[0] if report.failed else None
        if failing is not None and hunt.level == 1:
            show.explain(console, root, lab, failing, printed=False)
        elif failing is not None:
            say(
                console,
                f"{counted(len(report.failed), 'test')} of {len(report.results)} still fail.",
            )
        else:
            say(console, report.trouble or "Nothing could be graded here.", "red")
        say(console, f"Not yet. {counted(hunt.checks, 'check')} so far.", "yellow")
        return False
    item = hunts.drawn(lab, hunt.seed)
    number, right, wrong = hunts.changed_line(lab, item)
    say(console, f"Found, with {counted(hunt.checks, 'check')}.", "green")
    say(console, f"  line {number} said:  {wrong}\n  and says:{' ' * len(str(number))}    {right}")
    say(console, f"  Whoever wrote it thought: {item.why}")
    if hunt.level < 3:
        say(console, f"\nHarder: course hunt {lab.id} --level {hunt.level + 1}", "cyan")
    return True


def _score(console: Console, root: Path, lab: Lab, hunt: Hunt) -> bool:
    report, caught, missed = hunts.score(root, lab)
    bad = [each for each in report.of("reference") if each.outcome != "passed"]
    if bad or not report.of("reference"):
        say(console, "A test of yours fails on the reference, so it tells nothing:", "red")
        for each in bad[:3]:
            say(
                console,
                f"  {each.name}: {each.message.splitlines()[0] if each.message else each.error}",
            )
        if not bad:
            say(console, f"  {report.trouble or 'no test takes the fixture lab'}")
        return False
    hunt.of = len(caught) + len(missed)
    hunt.score = max(hunt.score, len(caught))
    say(
        console,
        f"{len(caught)} of {hunt.of} wrong solutions caught.",
        "green" if caught else "yellow",
    )
    for item in caught:
        say(console, f"  caught: {item.why}")
    if missed:
        say(console, f"  {counted(len(missed), 'wrong solution')} pass your tests.")
    return bool(caught)
