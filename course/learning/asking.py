"""Questions at the terminal: predictions before a lab, the quiz of a phase.

Promises: an empty line is not an answer; the end of the input ends the questions; every answer is
kept the moment it is given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from course import terminal
from course.learning import exercises, predictions, quiz, show
from course.learning.labs import CourseError, Lab, find_labs
from course.learning.progress import FOLDER, NEW, Progress

PAGE = "READING.md"
"""The reading lab of a phase."""


def predict(console: Console, progress: Progress, lab: Lab) -> None:
    """Ask for each prediction of a lab and write the answers beside the starter.

    Raises:
        CourseError: the lab asks none, or the file cannot be written.
    """
    asked = lab.manifest.predictions
    if not asked:
        raise CourseError(f"Lab {lab.id} asks for no prediction.")
    answers, problems = predictions.committed(lab.folder, asked)
    for problem in problems:
        terminal.say(console, problem, "yellow")
    for name, question in asked.items():
        show.question(console, question.ask, question.choices)
        if name in progress.entry(lab).predictions:
            terminal.say(console, "  It was compared already: the first answer counts.", "dim")
        answer = _answered(console, question, answers.get(name))
        if answer is None or answer == answers.get(name):
            continue
        try:
            predictions.commit(lab.folder, name, answer)
        except (ValueError, OSError) as error:
            raise CourseError(f"{name} was not written: {error}") from None
    missing = asked.keys() - predictions.committed(lab.folder, asked)[0].keys()
    terminal.say(
        console, f"{len(asked) - len(missing)} of {len(asked)} committed in {predictions.FILE}."
    )
    terminal.say(console, f"Compare with what is measured: course check {lab.id}", "cyan")


def _answered(
    console: Console, question: predictions.Prediction, before: predictions.Answer | None
) -> predictions.Answer | None:
    """An answer from the keyboard; the one from before, or None, for an empty line or no input."""
    while True:
        kept = "" if before is None else f" [{before}]"
        console.print(f"  your answer{kept}: ", end="")
        line = sys.stdin.readline()
        if not line.strip():
            console.print()
            return before
        try:
            return question.read(line)
        except ValueError as error:
            terminal.say(console, f"  {error}", "yellow")


def run_reading(console: Console, root: Path, phase: str) -> int:
    """Ask the questions that the pinned tree answers; 1 when an answer was wrong.

    Raises:
        CourseError: the phase has none, or its quiz is unsound.
    """
    found = _questions(root, phase) if phase.strip() else []
    questions = [q for q in found if quiz.READING in q.id]
    if not questions:
        have = [p.parent.name[6:8] for p in quiz.files(root) if (p.parent / PAGE).is_file()]
        told = f"Phases with one: {', '.join(have)}."
        raise CourseError(f"Phase {phase or repr(phase)} has no reading lab. {told}")
    where = "vLLM at the pin is in upstream/."
    if not (root / "upstream").is_dir():
        where = "vLLM at the pin is not here yet: course upstream fetch"
    terminal.say(console, where)
    terminal.say(console, "Answer with path:line; any line that decides it counts.")
    right, asked_for = _ask(console, questions, quiz.Boxes(root / FOLDER))
    terminal.say(console, f"\n{right} of {asked_for} right.", "bold")
    return 0 if right == asked_for else 1


def run_quiz(console: Console, root: Path, phase: str | None, count: int, every: bool) -> int:
    """Ask questions of a phase, or of what was read; 1 when an answer was wrong.

    What was read is told by labs: without a phase, new questions come from the phases in which one
    is passed or begun. A line that is not an answer, blank or without a number where one is asked
    for, is asked again and costs nothing.

    Args:
        phase: its number or its folder's name; None for those with a lab begun.
        count: the most questions to ask.
        every: also those that are not due.

    Raises:
        CourseError: there is no such quiz, a quiz is unsound, the count is below 1.
    """
    if count < 1:
        raise CourseError(f"--count is {count}: give 1 or more")
    questions = [q for q in _questions(root, phase) if quiz.READING not in q.id]
    boxes = quiz.Boxes(root / FOLDER)
    if phase is None and not every:
        begun = _begun(root)
        questions = [q for q in questions if q.id in boxes.cards or q.id[:2] in begun]
        if not questions:
            terminal.say(
                console,
                "Questions come from the phases in which you have begun a lab, and there is none "
                "yet. A phase by its number: course quiz 00",
            )
            return 0
    chosen = questions if every else boxes.due(questions)
    chosen = chosen if every else chosen[:count]
    if not chosen:
        terminal.say(
            console, "Nothing is due today. Every question all the same: course quiz --all"
        )
        return 0
    right, asked = _ask(console, chosen, boxes)
    _due_code(console, boxes)
    left = len(boxes.due(questions))
    terminal.say(console, f"\n{right} of {asked} right. {left} left for today: course quiz", "bold")
    return 0 if right == asked else 1


def run_exercise(console: Console, root: Path, name: str | None, again: bool) -> int:
    """Begin an exercise that is answered with code, or grade it; 1 when it was not right.

    Raises:
        CourseError: there is no such exercise, or its file cannot be read or written.
    """
    known = exercises.every(root)
    folder = root / FOLDER
    boxes = quiz.Boxes(folder)
    if name is None:
        for each in known.values():
            state = "begun" if exercises.answer_file(folder, each).is_file() else ""
            if each.id in boxes.cards:
                box, due = boxes.cards[each.id]
                state = f"right, again on {due}" if box else "not yet right"
            terminal.say(console, f"{each.id}  {each.source.partition(', ')[2]:4} {state}")
        terminal.say(console, "Begin one, or grade it: course exercise 02-bu-07", "cyan")
        return 0
    if name not in known:
        phases = ", ".join(sorted({each[:2] for each in known}))
        raise CourseError(
            f"There is no exercise {name!r}. They are named as 02-bu-07, phases {phases}."
        )
    chosen = known[name]
    path = exercises.answer_file(folder, chosen)
    try:
        if again and path.is_file():
            path.replace(path.with_suffix(".py.before"))
        if exercises.begin(folder, chosen):
            terminal.say(console, chosen.ask)
            terminal.say(console, f"Write it in {terminal.relative(path, root)}, then:")
            terminal.say(console, f"course exercise {name}", "cyan")
            return 0
        code = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"{path}: {error}") from None
    told = exercises.grade(root, chosen, code)
    if told["printed"]:
        terminal.say(console, told["printed"].rstrip(), "dim")
    if told["right"]:
        terminal.say(console, "Right: the test passes.", "green")
    else:
        terminal.say(console, f"Not yet. {told['said']}", "red")
    try:
        boxes.put(name, told["right"])
    except OSError as error:
        terminal.say(console, f"The result cannot be kept ({error}).", "red")
    return 0 if told["right"] else 1


def _due_code(console: Console, boxes: quiz.Boxes) -> None:
    """Name the exercises with code that come back today."""
    due = [
        name
        for name, (box, day) in boxes.cards.items()
        if "-bu-" in name and box and day <= boxes.today
    ]
    if due:
        terminal.say(console, f"With code, again: course exercise {due[0]} --again", "cyan")


def _ask(
    console: Console, questions: Sequence[quiz.Question], boxes: quiz.Boxes
) -> tuple[int, int]:
    """How many were right, and how many were asked before the input ended."""
    right = asked = 0
    try:
        for place, question in enumerate(questions, 1):
            terminal.say(console, f"\n{place} of {len(questions)}, {question.id}", "dim")
            show.question(console, question.ask, question.choices)
            line = _attempt(console, question)
            if line is None:
                break
            asked += 1
            correct = question.check(line)
            right += correct
            _explain(console, question, line, correct)
            try:
                boxes.put(question.id, correct)
            except OSError as error:
                terminal.say(console, f"  The answer cannot be kept ({error}).", "red")
    except KeyboardInterrupt:
        console.print()
    return right, asked


def _attempt(console: Console, question: quiz.Question) -> str | None:
    """A line that can be an answer, asked for until it comes; None at the end of the input."""
    unit = f" ({question.unit})" if question.unit else ""
    while True:
        console.print(f"  your answer{unit}: ", end="")
        line = sys.stdin.readline()
        if not line or not console.is_terminal or not sys.stdin.isatty():
            console.print()
        if not line:
            return None
        if not (problem := question.misread(line)):
            return line
        terminal.say(console, f"  {problem}", "yellow")


def _begun(root: Path) -> set[str]:
    """The numbers of the phases in which a lab is passed, or was graded or edited."""
    progress = Progress(root)
    return {lab.id[:2] for lab in find_labs(root) if progress.state(lab) != NEW}


def _explain(console: Console, question: quiz.Question, given: str, correct: bool) -> None:
    if correct:
        terminal.say(console, "  Right.", "green")
    else:
        read = question.read_as(given)
        was = f" Yours was read as {read}." if read and read != given.strip() else ""
        terminal.say(console, f"  No: {question.answer}.{was}", "red")
        if thought := question.misconception(given):
            terminal.say(console, f"  {thought}")
    terminal.say(console, f"  {question.explain}")
    terminal.say(console, f"  ({question.source})", "dim")


def _questions(root: Path, phase: str | None) -> Sequence[quiz.Question]:
    files = quiz.files(root)
    if phase is not None:
        number = re.search(r"(?:phase-|^)(\d{1,2})(?:\D|$)", Path(phase).name)
        wanted = f"phase-{int(number[1]):02d}-" if number else phase
        files = [path for path in files if path.parent.name.startswith(wanted)]
    if not files:
        known = ", ".join(path.parent.name[6:8] for path in quiz.files(root)) or "none"
        raise CourseError(f"There is no quiz for {phase or 'any phase'}. Phases with one: {known}.")
    questions: list[quiz.Question] = []
    for path in files:
        found, findings = quiz.load(path)
        if findings:
            told = "\n".join(
                f"{terminal.relative(f.page, root)}:{f.line}: {f.text}" for f in findings
            )
            raise CourseError(told)
        questions += found
    return questions
