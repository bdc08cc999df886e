"""What `course challenge` says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from rich.console import Console

from course.challenges import judge, ledger
from course.challenges.judge import Challenge, Verdict
from course.learning.labs import CourseError
from course.terminal import raw, relative, say

BARS = 40
"""Characters of the longest bar of a plot."""
SHOWN = 12
"""Tries plotted, the newest."""


def pick(name: str) -> Challenge:
    """The challenge called so.

    Raises:
        CourseError: there is none, with the names that are.
    """
    try:
        return judge.load(name)
    except KeyError:
        listed = ", ".join((*judge.NAMES, "paged", "tile"))
        raise CourseError(
            f"There is no challenge {name!r}. The challenges are: {listed}."
        ) from None


def listing(console: Console, root: Path) -> None:
    """All challenges, with one's own best."""
    for challenge in judge.every():
        tries = ledger.read(root, challenge)
        best = ledger.best(challenge, tries)
        told = f"vLLM's {judge.standard(challenge):,} {challenge.meter.UNIT}"
        if best is not None:
            marks = ", ".join(ledger.marks(tries)) or "no mark yet"
            told += f", yours {best.score:,}: {marks}"
        elif tries:
            told += f", {len(tries)} tried, no score yet"
        say(console, f"  {challenge.name:<10} {challenge.meter.TITLE}", "bold" if tries else "")
        say(console, f"  {'':<10} {told}", "dim" if not tries else "green")
    say(console, "One of them: course challenge queue", "cyan")


def contract(console: Console, root: Path, challenge: Challenge) -> None:
    """A challenge's contract, its marks, where one's file is, and one's tries."""
    told(console, root, challenge, judge.standard(challenge))


def told(console: Console, root: Path, challenge: Challenge, vllm: int) -> None:
    """As `contract`, given vLLM's own score."""
    text = challenge.starter.read_text(encoding="utf-8")
    raw(console, text.split('"""')[1].strip())
    console.print()
    order = "at most" if challenge.meter.FEWER else "at least"
    for name, score in challenge.needed(vllm):
        say(console, f"  {name:<8} {order} {score:,} {challenge.meter.UNIT}")
    console.print()
    tried(console, challenge, ledger.read(root, challenge))
    path = relative(ledger.answer_of(root, challenge), root)
    say(console, f"  edit    {path}")
    say(console, f'  score   course challenge {challenge.name} --check --note "the idea"')


def tried(console: Console, challenge: Challenge, tries: list[ledger.Try]) -> None:
    """The newest tries as bars, kept and rejected, with their notes."""
    scored = [each.score for each in tries if not each.why]
    most = max(scored, default=1) or 1
    for number, each in list(enumerate(tries, 1))[-SHOWN:]:
        note = f"  {each.note}" if each.note else ""
        if each.why:
            why = each.why.partition("\n")[0][:60]
            say(console, f"  {number:>3} {'nothing':>12}  {why}{note}", "red")
            continue
        bar = "#" * max(1, each.score * BARS // most)
        style = "green" if each.outcome == ledger.KEPT else "dim"
        say(console, f"  {number:>3} {each.score:>12,}  {bar} {each.outcome}{note}", style)
    if tries:
        console.print()


def check(console: Console, root: Path, challenge: Challenge, note: str, seed: str) -> bool:
    """Score the answer, write the try down, and say what it reached; whether it scored.

    Raises:
        CourseError: this Python draws other workloads than the recorded ones, or the answer cannot
            be read.
    """
    path = ledger.answer_of(root, challenge)
    try:
        text = path.read_bytes()
    except OSError as error:
        where = relative(path, root)
        raise CourseError(f"{where}: {error.strerror}. Need a file with your Answer.") from None
    before = ledger.best(challenge, ledger.read(root, challenge))
    verdict = _evaluated(challenge, path, seed)
    made = ledger.keep(root, challenge, text, verdict, note)
    said(console, challenge, verdict)
    if not verdict.why:
        if before is not None:
            say(console, f"{made.outcome}: the best before was {before.score:,}.")
        if verdict.marks:
            say(
                console,
                f"To share: course challenge {challenge.name} --share {challenge.name}.json",
            )
    return not verdict.why


def _evaluated(challenge: Challenge, path: Path, seed: str) -> Verdict:
    try:
        return judge.evaluate(challenge, path, seed)
    except ValueError as error:
        raise CourseError(str(error)) from None


def said(console: Console, challenge: Challenge, verdict: Verdict) -> None:
    """The numbers of a verdict."""
    if verdict.why:
        say(console, f"This scores nothing: {verdict.why}", "red")
        return
    unit = challenge.meter.UNIT
    say(console, f"{verdict.score:,} {unit}; vLLM's {verdict.vllm:,}.", "bold")
    say(
        console,
        f"On workloads drawn for this try (--seed {verdict.seed}): {verdict.fresh:,}; vLLM's "
        f"{verdict.fresh_vllm:,}.",
    )
    if verdict.fitted:
        say(
            console,
            "The standard workloads reach a mark that fresh ones do not: only marks of both count.",
            "yellow",
        )
    say(console, f"Marks: {', '.join(verdict.marks) or 'none yet'}.", "green")


def verify(console: Console, file: Path) -> bool:
    """Score a shared file again; whether its numbers are true.

    Raises:
        CourseError: it is not a file that `--share` wrote.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        challenge, text = pick(data["challenge"]), data["answer"]
        told = int(data["score"]), int(data["fresh"]), str(data["seed"])
        assert isinstance(text, str)
    except OSError as error:
        raise CourseError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AssertionError, OverflowError):
        raise CourseError(f"{file}: not a file that course challenge --share wrote") from None
    with tempfile.TemporaryDirectory(prefix="shared-") as folder:
        answer = Path(folder) / "answer.py"
        answer.write_text(text, encoding="utf-8")
        verdict = _evaluated(challenge, answer, told[2])
    said(console, challenge, verdict)
    same = not verdict.why and (verdict.score, verdict.fresh) == told[:2]
    say(
        console,
        "The file says the same." if same else f"The file says {told[0]:,} and {told[1]:,}.",
        "green" if same else "red",
    )
    return same
