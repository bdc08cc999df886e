"""Exercises: every one on a page can be answered there, and what is wrong is named."""

from __future__ import annotations

import re

import pytest
import yaml

from course.conftest import REPOSITORY
from course.learning import exercises, quiz
from course.learning.exercises import Exercise, Slip
from course.learning.quiz import Question
from course.site import answers

PHASES = sorted(path.parent for path in REPOSITORY.glob("phase-*/EXERCISES.md"))
CODED = {exercise.id: exercise for phase in PHASES for exercise in answers.coded(phase)}
LITTLE = {
    "id": "90-bu-01", "source": "EXERCISES.md, 1", "ask": "Double it.",
    "start": "def twice(x):\n    raise NotImplementedError('twice')\n",
    "code": "def twice(x):\n    return 2 * x\n",
    "test": "assert twice(3) != 9, 'That is the square.'\nassert twice(3) == 6, 'Not it.'\n",
    "slips": [
        {"replace": "2 * x", "with": "x * x", "says": "the square"},
        {"replace": "2 * x", "with": "x", "says": "Not it"},
    ],
}  # fmt: skip


@pytest.fixture
def written(little_course):
    phase = little_course / "phase-90-little"
    (phase / "EXERCISES.md").write_text("# Exercises\n\n### 1. Twice\n\nText.\n")

    def put(**changes):
        path = phase / exercises.FILE
        path.write_text(yaml.safe_dump([LITTLE | changes]))
        return path

    return put


def headings(phase):
    """(row, title) of each exercise of a phase's page."""
    rows = (phase / "EXERCISES.md").read_text(encoding="utf-8").split("\n")
    found = [
        (row, match[2])
        for row, match, _ in answers._outside_fences(rows)
        if match and re.match(r"\d+\. ", match[2])
    ]
    return rows, found


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name[:8])
def test_every_exercise_of_a_page_has_an_answer_that_can_be_given_on_it(phase):
    rows, found = headings(phase)
    spots = answers.spots(phase / "EXERCISES.md", rows)
    ends = [row for row, _ in found[1:]] + [len(rows)]
    without = [
        title
        for (row, title), end in zip(found, ends, strict=True)
        if not any(row < spot < end for spot in spots)
    ]
    assert not without, "put a question into quiz.yaml, or code into exercises.yaml"


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name[:8])
def test_wrong_answers_to_exercises_are_named_and_the_shown_answer_is_right(phase):
    for question in answers.questions(phase):
        if "-ex-" not in question.id:
            continue
        known = {given for given, _ in question.wrong}
        if question.number is not None:
            assert len(known) >= 2, f"{question.id}: name at least two wrong numbers"
        if question.choices:
            assert known == {*question.choices} - {question.choice}, question.id
        for given, thought in question.wrong:
            assert question.misconception(given) == thought, f"{question.id}: {given}"
        assert question.check(question.answer), f"{question.id}: {question.answer} is not right"


@pytest.mark.slow
@pytest.mark.parametrize("name", CODED)
def test_an_exercise_with_code_is_passed_by_its_answer_and_names_what_is_wrong(name):
    assert not list(exercises.problems(CODED[name]))


def test_every_phase_with_a_build_tier_asks_for_code():
    with_tier = {
        phase
        for phase in PHASES
        if re.search(r"^## Build", (phase / "EXERCISES.md").read_text("utf-8"), re.MULTILINE)
    }
    assert len(with_tier) >= 13
    assert not [phase.name for phase in with_tier if len(answers.coded(phase)) < 2]


def test_the_problems_of_an_exercise_are_found():
    slips = (Slip("2 * x", "x + x", "anything"), Slip("2 * x", "x", "the square"))
    texts = (LITTLE[key] for key in exercises.TEXTS)
    told = list(exercises.problems(Exercise(*texts, slips)))
    assert told == [
        "with 'x + x' the test passes",
        "with 'x' it says 'Not it.', not 'the square'",
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"start": ""}, "start must be a text, not ''"),
        ({"slips": []}, "slips must be a list of at least two"),
        ({"slips": [{"replace": "no", "with": "x", "says": "y"}] * 2}, "'no' must stand in code"),
        ({"id": "91-bu-01"}, "does not agree with the folder"),
        ({"id": "90-ex-01"}, "the id must be phase, bu, number"),
        ({"source": "EXERCISES.md, 2"}, "EXERCISES.md has no number 2"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_an_unsound_exercise_is_refused(written, changes, complaint):
    found, (finding, *_) = exercises.load(written(**changes))
    assert not found and complaint in finding.text


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        ("def twice(x):\n    return x * x\n", "That is the square.", None),
        ("def twice(x):\n    return x / 0\n", "line 2: ZeroDivisionError: division by zero", 2),
        ("def twice(x:\n", "line 1: '(' was never closed", 1),
        ("pass\n", "NameError: name 'twice' is not defined", None),
        ("raise SystemExit(3)\n", "line 1: SystemExit: 3", 1),
        (LITTLE["start"], "twice is not written yet.", 2),
    ],
)
def test_a_wrong_answer_is_told_why_and_on_which_line(code, words, line):
    told = exercises.judge(code, LITTLE["test"])
    assert (told["right"], told["said"], told["line"]) == (False, words, line)


@pytest.mark.slow
def test_the_command_begins_a_file_then_grades_it_in_a_process_of_its_own(written, course):
    root = written().parents[1]
    begun = course("exercise", "90-bu-01")
    path = root / ".course" / "exercises" / "90-bu-01.py"
    assert begun.code == 0 and path.read_text().endswith(LITTLE["start"])
    wrong = course("exercise", "90-bu-01")
    assert wrong.code == 1 and "twice is not written yet." in wrong.out
    path.write_text("print('mine')\n" + LITTLE["code"])
    right = course("exercise", "90-bu-01")
    assert right.code == 0 and "Right" in right.out and "mine" in right.out
    assert "right, again on" in course("exercise").out
    assert course("exercise", "90-bu-01", "--again").code == 0
    assert path.read_text().endswith(LITTLE["start"])
    unknown = course("exercise", "90-bu-09")
    assert unknown.code == 2 and "There is no exercise '90-bu-09'" in unknown.err


FORMS = [  # what is typed, the unit asked for, the value that is read in it
    ("7,5", "", 7.5),
    ("7.5", "", 7.5),
    ("7.5 GB", "GB", 7.5),
    ("7500 MB", "GB", 7.5),
    ("7,5 GB", "MB", 7500),
    ("1/2", "", 0.5),
    ("50 %", "", 0.5),
    ("1/2", "%", 50),
    ("50 per cent", "%", 50),
    ("1,500", "tokens", 1500),
    ("1 500", "tokens", 1500),
    ("1'500 tokens", "tokens", 1500),
    ("1.5 x 10^3", "tokens", 1500),
    ("1.5*10**3", "tokens", 1500),
    ("15e2", "tokens", 1500),
    ("0.25 s", "ms", 250),
    ("1 h", "s", 3600),
    ("-3", "", -3),
    ("7.5 GB", "tokens", None),
    ("7.5 ms", "GB", None),
    ("12,345,678", "", 12345678),
    ("1,5,2", "", None),
    ("many", "", None),
    ("1/0", "", None),
]


@pytest.mark.parametrize(("typed", "unit", "value"), FORMS)
def test_a_number_is_read_in_every_form(typed, unit, value):
    assert Question("i", "s", "a", "e", number=1.0, unit=unit).value_of(typed) == value


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("7.5 MB", "The digits are right. A prefix or a power of ten is not."),
        ("60 GB", "Those are bits. A byte has 8."),
        ("6.984919 GB", "A unit of 1000 was taken for one of 1024: GB is 1e9 bytes, GiB 2^30."),
        ("-7.5", "The size is right, the sign is not."),
        ("7.5 s", "Wanted are GB: s measures something else."),
        ("9", ""),
        ("7500 MB", ""),
    ],
)
def test_a_wrong_unit_is_named(typed, words):
    question = Question("i", "s", "a", "e", number=7.5, unit="GB")
    assert question.misconception(typed) == words


def test_numbers_are_written_as_arithmetic_and_choices_stand_among_wrong_ones(little_course):
    phase = little_course / "phase-90-little"
    (phase / "EXERCISES.md").write_text("# Exercises\n\n### 1. Twice\n\nText.\n")
    base = {"source": "EXERCISES.md, 1", "ask": "?", "explain": "!"}
    items = [
        base | {"id": "90-ex-01", "number": "ceil(7 / 2) * 2**10", "wrong": {"7 / 2": "Whole."}},
        base | {"id": "90-ex-02", "choice": "b", "wrong": {"a": "No.", "c": "No."}},
        base | {"id": "90-ex-03", "number": "__import__('os')"},
    ]
    path = phase / quiz.FILE
    path.write_text(yaml.safe_dump(items))
    (number, choice), (finding,) = quiz.load(path)
    assert number.number == 4096 and number.wrong == (("3.5", "Whole."),)
    assert sorted(choice.choices) == ["a", "b", "c"] and choice.check("b")
    assert "number must be a number" in finding.text
