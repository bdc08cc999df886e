"""`course run --mine --real`: a learner's scheduler in the real engine, on the shipped model.

Promises: the real engine plans by the learner's classes and by nothing else; each is named with the
number of calls that it got; an error in one is shown as theirs, with its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from course import processes, terminal
from course.learning import mine
from course.learning.labs import CourseError, Lab
from labkit import environment
from labkit import processes as engines

ROOT = Path(__file__).parents[2]
"""Of the course's own code, which the real engine's process imports."""
TIME_LIMIT = 1800.0
"""Seconds the engine may take to start and to answer, on a busy machine."""


def generate(
    console: Console, root: Path, owners: Mapping[str, Lab], prompt: str, max_tokens: int
) -> None:
    """Continue `prompt` greedily by the real engine, with the scheduling parts of `owners`.

    Raises:
        CourseError: the engine is not installed or does not answer, or a part of theirs fails.
    """
    from conformance.own_scheduler import PARTS

    found = environment.look(environment.folder(root))
    if found is None:
        raise CourseError("run --real: the real engine is not installed: course engine install")
    used = {part: owners[part] for part in PARTS if part in owners}
    given = [
        f"{part}={lab.starter.resolve()}:{mine.attribute_of(part)}" for part, lab in used.items()
    ]
    command = [
        str(found.python), "-m", "conformance.own_scheduler", "say", prompt, str(max_tokens),
        *given,
    ]  # fmt: skip
    terminal.say(console, "Starting the real engine; that takes about half a minute.", "dim")
    ran = processes.run(command, ROOT, environment.variables(found, ROOT), TIME_LIMIT)
    status = -1 if ran.code is None else ran.code
    result = engines.Ran(tuple(command), status, ran.output).result
    if result is None:
        terminal.raw(console, "\n".join(ran.output.splitlines()[-engines.LAST :]))
        raise CourseError("The real engine did not answer; its last lines stand above.")
    if "failed" in result:
        raise CourseError(_failure(result["failed"], used))
    console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
    console.print(Text(terminal.printable(result["text"])), soft_wrap=True)
    console.print()
    terminal.say(console, f"By vLLM {result['vllm']}, whose plans these parts made:")
    for part in PARTS:
        calls = _calls_of(part, result["calls"])
        if part not in used:
            terminal.say(console, f"  {part:<18} the course's", "dim")
        else:
            terminal.say(console, f"  {part:<18} yours, from lab {used[part].id}: {calls}", "green")
    for part in sorted(set(owners) - set(used)):
        terminal.say(console, f"  {part:<18} yours, not called: the real engine has its own", "dim")
    if not used:
        terminal.say(console, "No lab that supplies one of them is passed yet: course check 03-01")


def _calls_of(part: str, calls: Mapping[str, int]) -> str:
    """How often each method was called, such as "schedule 13, add_request 1"."""
    own = {name.partition(".")[2]: n for name, n in calls.items() if name.startswith(f"{part}.")}
    return ", ".join(f"{name} {n}" for name, n in own.items()) or "not called"


def _failure(failed: Mapping[str, Any], used: Mapping[str, Lab]) -> str:
    """An error in a learner's file, in the words of `mine.own_failure`."""
    file = Path(failed["file"]).resolve()
    (lab,) = {lab.id for lab in used.values() if lab.starter.resolve() == file}
    return (
        f"Your part from lab {lab} stopped the real engine: {failed['error']}\n"
        f"    {file.name}, line {failed['line']}, in {failed['in']}: {failed['text']}"
    )
