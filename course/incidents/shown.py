"""What `course incident` says."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from course.incidents import judge, ledger
from course.incidents.judge import Recorded
from course.learning.labs import CourseError
from course.terminal import counted, raw, relative, say

LONGEST = 160
"""Characters of a quoted line."""


def pick(name: str) -> Recorded:
    """The day called so.

    Raises:
        CourseError: there is none, with those that are.
    """
    try:
        return judge.load(name)
    except KeyError:
        raise CourseError(
            f"There is no day {name!r}. The days are: {', '.join(judge.NAMES)}."
        ) from None


def listing(console: Console, root: Path) -> None:
    """All days, with what one did."""
    done = ledger.read(root)
    for name in judge.NAMES:
        entry = done.get(name)
        said, style = "not looked at", "dim"
        if entry and entry.fix:
            said, style = f"the limit holds with {entry.fix}", "green"
        elif entry and entry.cause:
            said, style = f"{entry.cause}, and no knob turned that helps", "yellow"
        elif entry:
            said, style = f"{counted(len(entry.wrong), 'cause')} contradicted", "yellow"
        say(console, f"  {name:<10} {judge.DAY[name].complaint}")
        say(console, f"  {'':<10} {said}", style)
    say(console, "One of them: course incident monday", "cyan")


def told(console: Console, root: Path, day: Recorded) -> None:
    """A day's complaint, what was recorded of it, and what to do."""
    say(console, f"{day.name}: {day.told.complaint}", "bold")
    console.print()
    say(console, "The log, five times a second:")
    raw(console, "\n".join(f"  {line}" for line in judge.stat_lines(day)))
    console.print()
    say(console, "/metrics:")
    for line in table(day):
        raw(console, f"  {line}")
    console.print()
    folder = relative(judge.folder_of(day.name), root)
    say(console, f"All of it: {folder}/server.log, metrics.txt, trace.jsonl.gz, requests.jsonl")
    subject = next(line for line in day.lines if f'"id":"cmpl-{day.told.subject}-' in line)
    number = json.loads(subject)["add"]
    say(console, f"The trace in words: course why {folder}/trace.jsonl.gz {number}")
    console.print()
    say(console, "Causes:")
    for name, words in judge.CAUSES.items():
        say(console, f"  {name:<22} {words}")
    say(console, f"The limit: {judge.limit(day)}")
    entry = ledger.read(root).get(day.name, ledger.Entry())
    if not entry.cause:
        say(console, f"Then: course incident {day.name} --cause NAME", "cyan")
        return
    say(console, f"You named it: {entry.cause}.", "green")
    knobs = [f"{name}={day.case['config'].get(name)}" for name in judge.KNOBS
             if name in day.case["config"]]  # fmt: skip
    say(console, f"Knobs: {', '.join(knobs)}")
    say(console, f"Then: course incident {day.name} --set KNOB=VALUE", "cyan")


def table(day: Recorded) -> list[str]:
    """Values of /metrics, a column per moment."""
    rows = [f"{'':<28}" + "".join(f"{number:>10}" for number in range(1, len(day.moments) + 1))]
    for name in judge.SHOWN:
        values = [judge.value_of(values, name) for _, values in day.moments]
        rows.append(f"{name:<28}" + "".join(f"{value:>10g}" for value in values))
    rows += [f"{number}: {moment}" for number, (moment, _) in enumerate(day.moments, 1)]
    return rows


def diagnose(console: Console, root: Path, day: Recorded, cause: str) -> bool:
    """Hold a cause against the recording; whether nothing contradicts it.

    Raises:
        CourseError: a cause that is not in the list.
    """
    try:
        found = judge.contradiction(day, cause)
    except ValueError as error:
        raise CourseError(str(error)) from None
    if found is not None:
        ledger.note(root, day.name, {"wrong": cause})
        say(console, f"{found.file}, line {found.line}, contradicts it: {found.says}.", "red")
        quoted = found.quoted if len(found.quoted) <= LONGEST else f"{found.quoted[:LONGEST]} ..."
        raw(console, f"  {quoted}")
        return False
    entry = ledger.note(root, day.name, {"cause": cause})
    others = f" after {counted(len(entry.wrong), 'other')}" if entry.wrong else ""
    say(
        console,
        f"Nothing that was recorded contradicts it{others}: {judge.CAUSES[cause]}.",
        "green",
    )
    say(
        console,
        f"Keep the limit, {judge.limit(day)}: course incident {day.name} --set KNOB=VALUE",
        "cyan",
    )
    return True


def turn(console: Console, root: Path, day: Recorded, setting: str) -> bool:
    """Replay the day with one knob turned; whether the limit holds.

    Raises:
        CourseError: the cause is not named yet, or the setting is none.
    """
    if not ledger.read(root).get(day.name, ledger.Entry()).cause:
        raise CourseError(f"Name the cause first: course incident {day.name} --cause NAME")
    knob, equals, value = setting.partition("=")
    if not equals:
        raise CourseError(f"--set {setting}: need KNOB=VALUE, as max_num_seqs=16")
    before = judge.replay(day)
    try:
        after = judge.replay(day, knob.strip(), value.strip())
    except ValueError as error:
        raise CourseError(str(error)) from None
    holds = not after.missed
    ledger.note(root, day.name, {"replays": 1} | ({"fix": f"{knob}={value}"} if holds else {}))
    for name, count in after.counts.items():
        say(console, f"  {name:<24} {before.counts[name]:>8,}  ->  {count:,}")
    if holds:
        say(console, f"The limit holds: {judge.limit(day)}.", "green")
    else:
        say(console, f"Not yet: {after.missed}.", "yellow")
    return holds
