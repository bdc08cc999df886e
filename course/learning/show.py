"""What a learner reads: the dashboard, a graded lab, a hint.

Promises: one failing test at a time, in the author's words, with the one command that helps; no
traceback; no colour codes when the output is not a terminal.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from course.learning import hunts, mine, spines
from course.learning.grading import Report, TestResult
from course.learning.labs import Lab, phase_title
from course.learning.manifest import KINDS
from course.learning.predictions import Answer
from course.learning.progress import CHANGED, PASSED, STARTED, Progress
from course.terminal import hours, printable, raw, relative, say

LONGEST_COMPARISON = 160
LONGEST_LIST = 12
"""Tests of a lab up to which each is listed; of more, only the first that fail."""


# ------------------------------------------------------------------ the dashboard


def dashboard(console: Console, root: Path, labs: list[Lab], progress: Progress) -> None:
    """Progress per phase, what is left, and the next thing to do."""
    if progress.notice:
        say(console, progress.notice, "yellow")
    states = {lab.id: progress.state(lab) for lab in labs}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
    for name, justify in (("phase", "left"), ("", "left"), ("labs", "right"), ("left", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for phase in sorted({lab.phase for lab in labs}):
        own = [lab for lab in labs if lab.phase == phase]
        done = [lab for lab in own if states[lab.id] == PASSED]
        left = sum(lab.manifest.minutes for lab in own if states[lab.id] != PASSED)
        table.add_row(
            phase_title(root / phase),
            ProgressBar(total=len(own), completed=len(done), width=12),
            f"{len(done)}/{len(own)}",
            hours(left) if left else "done",
        )
    console.print(table)
    for lab in labs:
        if states[lab.id] in (STARTED, CHANGED):
            entry = progress.entry(lab)
            what = (
                f"{entry.passed} of {entry.total} tests pass"
                if states[lab.id] == STARTED
                else "edited since it was last graded"
            )
            say(console, f"  {lab.id} {lab.manifest.title}: {what}", "yellow")
    pairs = [
        lab.manifest.predictions[name].judge(*pair) == "right"
        for lab in labs
        for name, pair in progress.entry(lab).predictions.items()
        if name in lab.manifest.predictions
    ]
    if pairs:
        say(console, f"  predictions: {sum(pairs)} of {len(pairs)} right")
    if again := hunts.due(root, labs, progress):
        lab = again[0]
        say(console, f"  passed a while ago, and back with one line wrong: course hunt {lab.id}")
    total_left = sum(lab.manifest.minutes for lab in labs if states[lab.id] != PASSED)
    console.print()
    following = progress.next_lab(labs)
    if following is None:
        say(console, "Every lab is passed.", "green")
        return
    say(console, f"{hours(total_left)} left. Next:", "bold")
    introduce(console, root, following)
    others = "course hunt, course challenge, course incident, course quiz"
    say(console, f"Beside the labs: {others}", "dim")


def spine(console: Console, root: Path, labs: list[Lab], progress: Progress) -> None:
    """The short way: its labs, which are passed, what is left, the next thing to do."""
    chosen = spines.of(labs)
    states = {lab.id: progress.state(lab) for lab in chosen}
    for lab in chosen:
        told = f"  {lab.id} {lab.manifest.title} ({lab.manifest.kind}), "
        told += "passed" if states[lab.id] == PASSED else hours(lab.manifest.minutes)
        say(console, told, "green" if states[lab.id] == PASSED else "")
    left = sum(lab.manifest.minutes for lab in chosen if states[lab.id] != PASSED)
    console.print()
    following = next((lab for lab in chosen if states[lab.id] != PASSED), None)
    if following is None:
        say(console, "The spine is passed. All else: course", "green")
        return
    say(console, f"{hours(left)} of labs left on the spine. Next:", "bold")
    introduce(console, root, following)


def introduce(console: Console, root: Path, lab: Lab) -> None:
    """Where a lab's text and file are, and how to have it graded."""
    tag = "" if lab.manifest.tag == "CPU-OK" else f" [{lab.manifest.tag}]"
    say(console, f"  {lab.id} {lab.manifest.title}{tag}, about {hours(lab.manifest.minutes)}")
    say(console, f"    {lab.manifest.kind:<7} {KINDS[lab.manifest.kind]}")
    say(console, f"    read    {relative(lab.folder / 'README.md', root)}")
    say(console, f"    edit    {relative(lab.starter, root)}")
    say(console, f"    grade   course check {lab.id}    (or on every save: course watch)")


# ------------------------------------------------------------------ a graded lab


def graded(console: Console, root: Path, lab: Lab, report: Report) -> None:
    """The outcome of one lab, with the first thing to mend."""
    say(console, f"{lab.id} {lab.manifest.title}", "bold")
    total = len(report.passed) + len(report.failed)
    broken = bool(report.failed) and _cannot_load(report)
    long = len(report.results) > LONGEST_LIST
    for result in [] if broken else report.results:
        mark, style = {
            "passed": ("pass", "green"),
            "skipped": ("skip", "dim"),
        }.get(result.outcome, ("FAIL", "red"))
        if long and result not in report.failed[:5]:
            continue
        reason = f"  ({result.message})" if result.outcome == "skipped" else ""
        say(console, f"  {mark}  {label(result)}{reason}", style)
    if long and len(report.failed) > 5 and not broken:
        say(console, f"  ... and {len(report.failed) - 5} more", "red")
    console.print()
    if report.failed and not broken:
        failing = report.failed[0]
        say(console, f"{len(report.passed)} of {total} tests pass. The first to mend:", "bold")
        console.print()
        explain(console, root, lab, failing)
        console.print()
        say(console, f"A hint: course hint {lab.id}", "cyan")
    elif report.failed:
        say(console, report.failed[0].message, "red")
        say(console, f"\nMend that, then: course check {lab.id}", "cyan")
    elif report.trouble:
        say(console, report.trouble, "red")
        say(console, f"\nThen: course check {lab.id}", "cyan")
    elif not report.passed:
        say(console, "Nothing could be graded here: every test was skipped.", "yellow")
        for reason in sorted({result.message for result in report.results}):
            say(console, f"  {reason}")
    if report.failed and report.trouble and not broken:
        say(console, report.trouble, "red")


def predicted(
    console: Console,
    lab: Lab,
    answers: Mapping[str, Answer],
    problems: Sequence[str],
    measured: Mapping[str, Answer],
) -> None:
    """Each prediction beside what was measured; what was not predicted is not shown."""
    for problem in problems:
        say(console, problem, "yellow")
    asked = lab.manifest.predictions
    if not asked:
        return
    say(console, "Predictions:", "bold")
    for name, question in asked.items():
        if name not in answers:
            say(
                console,
                f"  {name}: none committed, so the measured value is not shown. {question.ask}",
            )
        elif name not in measured:
            say(console, f"  {name}: you said {answers[name]}; its test has not passed yet.")
        else:
            outcome = question.judge(answers[name], measured[name])
            told = f"  {name}: you said {answers[name]}, measured {measured[name]}: {outcome}."
            say(console, told, "green" if outcome == "right" else "yellow")
            if meaning := question.meaning(outcome):
                say(console, f"    {meaning}")
    if asked.keys() - answers.keys():
        say(console, f"Commit one: course predict {lab.id}", "cyan")
    console.print()


def question(console: Console, ask: str, choices: Sequence[str] = ()) -> None:
    """A question, with its choices lettered."""
    say(console, ask, "bold")
    for place, choice in enumerate(choices):
        say(console, f"  {chr(97 + place)}) {choice}")


def label(result: TestResult) -> str:
    """The test's name with its own parameters, without the variant's."""
    name = result.test_id.rpartition("::")[2]
    name = re.sub(rf"-?variant={re.escape(result.variant)}-?", "", name) if result.variant else name
    return name.removesuffix("[]")


def _cannot_load(report: Report) -> bool:
    """Whether the learner's file itself is broken, so that every test says the same."""
    return not report.passed and all(
        result.outcome == "error" and result.message == report.failed[0].message
        for result in report.failed
    )


def explain(
    console: Console, root: Path, lab: Lab, result: TestResult, printed: bool = True
) -> None:
    """One failing test: what was expected, what came, where, and what the code printed."""
    say(console, f"  {label(result)}", "red")
    own = [f for f in result.frames if Path(f.file).name == lab.starter.name]
    test = [f for f in result.frames if Path(f.file).name == lab.test_file.name]
    lines: list[Text] = []
    if result.error == "NotImplementedError" and own:
        lines.append(Text(f"{own[-1].name} is not written yet ({own[-1].where})."))
        lines += [Text(part) for part in result.message.splitlines()]
    elif result.error in ("AssertionError", "Failed"):
        message, compared = _split_comparison(result.message)
        lines += [Text(part) for part in message.splitlines()]
        if compared:
            lines.append(Text(f"compared: {compared}", style="dim"))
        if result.error == "AssertionError" and own:
            lines.append(Text(f"The assertion is in {own[-1].where}: {own[-1].code}"))
    elif own:
        lines.append(Text(f"{own[-1].name} raised {result.error}: {_short(result.message)}"))
        lines.append(Text(f"    {own[-1].where}:  {own[-1].code}"))
        if test:
            lines.append(Text(f"    called by {test[0].where}:  {test[0].code}", style="dim"))
    elif gone := re.match(r"module '_lab_\w+' has no attribute '(\w+)'", result.message):
        lines.append(
            Text(f"starter.py defines no {gone[1]}: its names and arguments belong to the lab.")
        )
    else:
        lines.append(
            Text(f"The test could not use what your code gave it: {_short(result.message)}")
        )
        if test:
            lines.append(Text(f"    {test[-1].where}:  {test[-1].code}"))
            lines.append(
                Text(
                    f"That is {result.error}, raised by the test. Compare what your function "
                    "returns with the Returns section of its docstring."
                )
            )
    for line in lines:
        say(console, f"    {line.plain}", str(line.style))
    if printed and result.printed.strip():
        shown = printable(result.printed).rstrip().splitlines()[-LONGEST_LIST:]
        say(console, "    Your code printed:", "dim")
        raw(console, "\n".join(f"      {line}" for line in shown), "dim")


def _split_comparison(message: str) -> tuple[str, str]:
    """The author's words, and the comparison pytest appended to them."""
    words, found, comparison = message.rpartition("\nassert ")
    if not found:
        if message.startswith("assert "):
            return "The test gives no words of its own.", message.removeprefix("assert ")
        return message, ""
    first = comparison.splitlines()[0]
    if first.startswith("("):  # pytest shows only one half of `a and b`, and not which
        return words, ""
    if len(first) > LONGEST_COMPARISON:
        first = first[:LONGEST_COMPARISON] + " ..."
    return words, first


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line[:limit] + (" ..." if len(line) > limit else "")


def congratulate(
    console: Console,
    root: Path,
    lab: Lab,
    report: Report,
    built: list[str],
    following: Lab | None,
    part: str,
) -> None:
    """A passed lab: what was built, the reference to compare with, the way on.

    Args:
        part: which of the engine's parts the lab supplies; "" for none.
    """
    say(
        console,
        f"Passed: all {len(report.passed)} tests. You built: {', '.join(built)}.",
        "green",
    )
    if part:
        name = mine.attribute_of(part)
        say(console, f"{name} now runs in the engine: {mine.command(part)}")
    say(console, f"Compare with the reference: course solution {lab.id} --diff")
    if following is None:
        say(console, "That was the last lab.", "green")
        return
    say(console, "Next:", "bold")
    introduce(console, root, following)


def hint(console: Console, lab: Lab, of: str, texts: Sequence[str], unfolded: int) -> None:
    """The hints of one test, up to and with the newest."""
    say(console, f"{lab.id} {of}", "bold")
    for number, text in enumerate(texts[:unfolded], 1):
        say(console, f"  {number}. {text}", "" if number == unfolded else "dim")
    left = len(texts) - unfolded
    if left:
        say(console, f"{left} more: course hint {lab.id}", "cyan")
    else:
        say(console, f"That was the last. The reference: course solution {lab.id}", "cyan")


def diff(console: Console, lab: Lab) -> None:
    """What the reference has that the learner's file has not, and the reverse."""
    mine = lab.starter.read_text(encoding="utf-8", errors="replace").splitlines()
    reference = lab.solution.read_text(encoding="utf-8").splitlines()
    lines = list(
        difflib.unified_diff(
            mine, reference, "yours: starter.py", "reference: solution.py", "", "", 3, ""
        )
    )
    if not lines:
        say(console, "Your file and the reference are the same.")
    elif console.is_terminal:
        console.print(Syntax("\n".join(lines), "diff", background_color="default"))
    else:
        raw(console, "\n".join(lines))


def code(console: Console, path: Path) -> None:
    """A Python file, coloured in a terminal, as it is in a pipe."""
    text = path.read_text(encoding="utf-8")
    if console.is_terminal:
        console.print(Syntax(text, "python", line_numbers=True, background_color="default"))
    else:
        raw(console, text.rstrip("\n"))
