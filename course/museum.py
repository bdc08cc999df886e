"""The bug museum at the terminal: rooms, reports, and each bug on a release's own code.

Promises: what is printed a release did just now, or it is said to be recorded; cause and step stay
covered until the visitor asks for them, having decided which invariant breaks, and where.
"""

from __future__ import annotations

from rich.console import Console

from conformance.museum import EXHIBITS, INVARIANTS, Exhibit, recorded
from course import terminal
from course.decisions import core
from course.learning.labs import CourseError


def tour(console: Console) -> None:
    """Every exhibit in a line, by room."""
    for name, what in INVARIANTS.items():
        found = [each for each in EXHIBITS.values() if each.invariant == name]
        if not found:
            continue
        terminal.say(console, f"{name}: {what}", "bold")
        for each in found:
            until = f"good since {each.good}" if each.good else "not mended at the newest asked"
            terminal.say(console, f"  {each.number}  {each.title} ({each.bad}; {until})")
    terminal.say(console, "course museum run NUMBER shows one on a release's own code.", "dim")


def run(console: Console, number: int, release: str, reveal: bool) -> int:
    """Show one; 1 where a release that was named has it.

    Without a name, what was recorded stands in for a release that is not here.

    Raises:
        CourseError: no such exhibit, or a release that was named is not here.
    """
    if number not in EXHIBITS:
        known = ", ".join(map(str, EXHIBITS))
        raise CourseError(f"The museum has no exhibit {number}. There are: {known}.")
    exhibit = EXHIBITS[number]
    say = terminal.say
    say(console, f"{number}: {exhibit.title}", "bold")
    say(console, exhibit.report)
    others = "".join(f", also {each}" for each in exhibit.also)
    say(console, f"{exhibit.url}{others}", "dim")
    versions = [release] if release else [exhibit.bad, *([exhibit.good] if exhibit.good else [])]
    broken = [_show(console, exhibit, each, not release, reveal) for each in versions]
    if reveal:
        say(console, f"breaks  {exhibit.invariant}: {INVARIANTS[exhibit.invariant]}")
        say(console, f"cause   {exhibit.cause}")
        say(console, f"mend    {exhibit.mend}")
    else:
        where = ", and at which step" if exhibit.workload else ""
        say(console, f"Which of these breaks{where}? Then --reveal.", "dim")
        say(console, ", ".join(INVARIANTS), "dim")
    return 1 if release and broken[0] else 0


def _show(console: Console, exhibit: Exhibit, version: str, or_kept: bool, reveal: bool) -> bool:
    said = ""
    try:
        shown = exhibit.show(core(version))
    except CourseError as error:
        kept = recorded(exhibit.number)
        if not or_kept or version not in kept:
            raise
        shown, said = kept[version], "recorded; "
        terminal.say(console, str(error), "dim")
    verdict = f"{said}has it" if shown.broken else f"{said}does not have it"
    at = f", first at step {shown.step}" if reveal and shown.step is not None else ""
    terminal.say(console, f"vLLM {version} {verdict}{at}:", "red" if shown.broken else "green")
    for line in shown.lines:
        terminal.raw(console, f"  {line}")
    return shown.broken
