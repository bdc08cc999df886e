"""The quiz: what counts as an answer, what counts as a quiz, and when a question comes back."""

from __future__ import annotations

import io
import json
import sys
from datetime import date, timedelta

import pytest
import yaml

from course.learning import quiz
from course.learning.labs import find_labs
from course.learning.quiz import Boxes, Question

EXERCISES = (
    "# Exercises\n\n### 1. Four `blocks`\n\nText.\n\n### 2. Room, and how it ends\n\nText.\n"
)
NUMBER = {"id": "90-ex-01", "source": "EXERCISES.md, 1", "ask": "How much?", "number": 0.25,
          "tolerance": 0.02, "unit": "GiB", "explain": "4 x 64 MiB."}  # fmt: skip
CHOICE = {"id": "90-ex-02", "source": "EXERCISES.md, 2", "ask": "Which?",
          "choices": ["the first", "the last", "none"], "choice": "the last",
          "explain": "So."}  # fmt: skip
SHORT = {"id": "90-ex-03", "source": "EXERCISES.md, 1. Four blocks", "ask": "Block 0?",
         "accept": ["null block", "BLOCK_0"], "explain": "It pads."}  # fmt: skip

PLACE = {"id": "90-re-01", "source": "EXERCISES.md, 1", "ask": "Where?", "explain": "There.",
         "where": "vllm/v1/core/sched/scheduler.py:950-952 Scheduler.schedule",
         "wrong": {"vllm/v1/core/sched/scheduler.py:930-940 Scheduler._preempt_request":
                   "There it is sent back."}}  # fmt: skip


@pytest.fixture
def write(little_course):
    phase = little_course / "phase-90-little"
    (phase / "EXERCISES.md").write_text(EXERCISES)

    def put(*items):
        path = phase / "quiz.yaml"
        path.write_text(yaml.safe_dump(list(items), sort_keys=False))
        return path

    return put


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("0.25", True),
        ("0.25 GiB", True),
        ("1/4", True),
        ("256 MiB", True),
        ("268.4 MB", True),
        (".25gib", True),
        ("~0.25 GiB.", True),
        ("0.254", True),
        ("0.256", False),
        ("0.25 MiB", False),
        ("25 %", True),
        ("0,25", True),
        ("0,250", True),
        ("1,250", False),
        ("a quarter", False),
        ("", False),
        ("0.25 s", False),
    ],
)
def test_a_number_is_right_within_its_tolerance_in_any_unit_of_its_kind(given, right):
    question = Question("i", "s", "a", "e", number=0.25, tolerance=0.02, unit="GiB")
    assert question.check(given) is right


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("2048", True),
        ("2,048", True),
        ("2_048 tokens", True),
        ("2.048e3", True),
        ("2048 of them", True),
        ("2047", False),
        ("2048 MiB", False),
        ("-2048", False),
    ],
)
def test_a_number_of_things_may_be_written_in_many_ways(given, right):
    question = Question("i", "s", "a", "e", number=2048, tolerance=0, unit="tokens")
    assert question.check(given) is right


@pytest.mark.parametrize("given", ["b", "B", "b)", "The last", "the LAST.", "last"])
def test_a_choice_goes_by_its_letter_or_its_text(given):
    question = Question("i", "s", "a", "e", choices=("the first", "the last"), choice="the last")
    assert question.check(given) and not question.check("a") and not question.check("the")


@pytest.mark.parametrize("given", ["null block", "The null-block!", "NULL_BLOCK", "`block 0`"])
def test_a_short_answer_needs_neither_case_nor_punctuation(given):
    question = Question("i", "s", "a", "e", accept=("null block", "BLOCK_0"))
    assert question.check(given) and not question.check("null") and not question.check("")


def test_a_sound_quiz_loads_and_is_the_same_for_the_book(write):
    questions, findings = quiz.load(write(NUMBER, CHOICE, SHORT))
    assert findings == [] and [q.answer for q in questions] == [
        "0.25 GiB",
        "the last",
        "null block",
    ]
    told = json.loads(quiz.document(questions))
    assert told[1]["choices"] == ["the first", "the last", "none"] and told[0]["number"] == 0.25


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ask": ""}, "ask must be a text, not ''"),
        ({"explain": None}, "explain must be a text, not None"),
        ({"colour": "red"}, "unknown key 'colour'"),
        (
            {"accept": ["x"]},
            "needs exactly one of number, choices, accept, where, has number, accept",
        ),
        ({"number": "four"}, "number must be a number, not 'four'"),
        ({"number": float("nan")}, "number must be a number"),
        ({"tolerance": 2}, "tolerance is 2: relative, from 0 to below 1"),
        ({"choice": "a"}, "choice has no meaning without choices"),
        ({"id": "ex-1"}, "the id must be phase, ex, in, gu or re, number"),
        ({"id": "91-ex-01"}, "the id does not agree with the folder phase-90-little"),
        ({"id": "90-ex-02"}, "the id is used twice"),
        ({"source": "GUIDE.md, 1"}, "source: there is no page GUIDE.md"),
        ({"source": "EXERCISES.md, 7"}, "source: EXERCISES.md has no number 7"),
        ({"source": "EXERCISES.md, Q2. Rooms"}, "source: EXERCISES.md has no 'rooms'"),
        ({"source": "EXERCISES.md"}, "source: say where on EXERCISES.md"),
    ],
)
def test_an_unsound_question_is_refused_by_file_line_and_id(write, changes, complaint):
    path = write(CHOICE, NUMBER | changes)
    questions, (finding, *_) = quiz.load(path)
    assert len(questions) == 1 and (finding.page, finding.line > 1) == (path, True)
    assert complaint in finding.text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"choice": "the second"}, "choice 'the second' is none of its choices"),
        ({"choices": ["the last"]}, "choices has too few entries"),
        ({"choices": ["the last", "The last."]}, "two of its choices are the same text"),
        ({"choices": ["the last", True]}, "choices must be a list of texts (in quotes)"),
    ],
)
def test_unsound_choices_are_refused(write, changes, complaint):
    assert complaint in " ".join(f.text for f in quiz.load(write(CHOICE | changes))[1])


@pytest.mark.parametrize("text", ["a: 1\n", "[" * 500, "- x\n", "\xff"])
def test_a_file_that_is_no_list_of_questions_is_refused(tmp_path, text):
    path = tmp_path / "quiz.yaml"
    path.write_bytes(text.encode("latin-1"))
    assert quiz.load(path)[0] == [] and len(quiz.load(path)[1]) == 1


@pytest.mark.slow
def test_docs_check_names_what_is_unsound(course, write):
    write(NUMBER, CHOICE | {"choice": "no"})
    ran = course("docs", "check", "--no-run")
    assert ran.code == 1 and "quiz.yaml:8: question 90-ex-02: choice 'no' is none" in ran.out
    write(NUMBER, CHOICE)
    ran = course("docs", "check", "--no-run")
    assert ran.code == 0 and "1 quizzes, 0 to mend" in ran.out


def answer(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_the_quiz_asks_checks_and_explains(course, write, monkeypatch):
    write(NUMBER, CHOICE, SHORT)
    answer(monkeypatch, "256 MiB", "a", "the null block")
    ran = course("quiz", "90")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert "1 of 3, 90-ex-01" in lines and "  b) the last" in lines
    assert (
        "  No: the last." in lines and "  4 x 64 MiB." in lines and "  (EXERCISES.md, 2)" in lines
    )
    assert "2 of 3 right. 1 left for today: course quiz" in lines


@pytest.mark.slow
def test_a_reading_lab_asks_for_a_line_of_the_pinned_tree(
    course, write, monkeypatch, little_course
):
    write(NUMBER, PLACE)
    (little_course / "phase-90-little" / "READING.md").write_text("# Reading\n\n### 1. Where\n")
    answer(monkeypatch, "here", "sched/scheduler.py:951")
    ran = course("read", "90")
    assert ran.code == 0 and "1 of 1, 90-re-01" in ran.out and "1 of 1 right." in ran.out
    assert "'here' is no path:line" in ran.out and "course upstream fetch" in ran.out
    answer(monkeypatch, "scheduler.py:935", "0.25")
    ran = course("read", "90")
    assert ran.code == 1 and "There it is sent back." in ran.out
    assert "1 of 1, 90-ex-01" in course("quiz", "90", "--all").out, "a quiz needs no tree"
    ran = course("read", "91")
    assert ran.code == 2 and "There is no quiz for 91." in ran.err


@pytest.mark.parametrize(
    ("given", "right", "thought"),
    [
        ("vllm/v1/core/sched/scheduler.py:950", True, ""),
        ("`upstream/vllm/v1/core/sched/scheduler.py:952`", True, ""),
        ("scheduler.py:951-2000", True, ""),
        ("https://github.com/vllm-project/vllm/blob/0decac0/vllm/v1/core/sched/scheduler.py#L951",
         True, ""),
        ("scheduler.py line 951", True, ""),
        ("scheduler.py:953", False, "The file is right; it is decided in other lines of it."),
        ("scheduler.py:1-951", False, "The file is right; it is decided in other lines of it."),
        ("scheduler.py:935", False, "There it is sent back."),
        ("async_scheduler.py:951", False, ""),
        ("r.py:951", False, ""),
        ("951", False, ""),
    ],
)  # fmt: skip
def test_a_place_is_a_path_or_its_end_and_a_line_of_those_that_decide(given, right, thought):
    wrong = tuple(PLACE["wrong"].items())
    question = Question("i", "s", "a", "e", where=PLACE["where"], wrong=wrong)
    assert question.check(given) is right
    assert question.misconception(given) == ("" if right else thought)


def test_a_place_that_cites_nothing_is_refused(write):
    for key, value in (("where", "scheduler.py"), ("wrong", {"scheduler.py:3": "So."})):
        questions, findings = quiz.load(write(PLACE | {key: value}))
        assert not questions and any("FIRST-LAST SYMBOL" in finding.text for finding in findings)


@pytest.mark.slow
def test_what_was_wrong_comes_back_first_and_what_was_right_later(course, write, monkeypatch):
    write(NUMBER, CHOICE, SHORT)
    answer(monkeypatch, "7", "b")
    course("quiz", "90", "--count", "2")
    answer(monkeypatch, "0.25", "null block")
    ran = course("quiz", "phase-90-little")
    assert [line for line in ran.out.splitlines() if " of 2, " in line] == [
        "1 of 2, 90-ex-01", "2 of 2, 90-ex-03"
    ]  # fmt: skip
    ran = course("quiz")
    assert ran.code == 0 and ran.out.startswith("Nothing is due today.")
    answer(monkeypatch, "0.25", "b", "null block")
    assert "3 of 3 right." in course("quiz", "--all").out


def test_a_line_that_cannot_be_an_answer_is_asked_again(course, write, monkeypatch, little_course):
    write(NUMBER, CHOICE, SHORT)
    answer(monkeypatch, "", "a quarter", "0.25", "z", "b", " ", "null block")
    ran = course("quiz", "90")
    assert ran.code == 0 and "3 of 3 right." in ran.out
    assert ran.out.count("Nothing was typed.") == 2
    assert "'a quarter' is not a number." in ran.out
    assert "'z' is none of the choices: a letter, a, b, c." in ran.out
    assert {box for box, _ in Boxes(little_course / ".course").cards.values()} == {1}


@pytest.mark.slow
def test_without_a_phase_only_those_with_a_lab_begun_are_asked(
    course, write, monkeypatch, little_course
):
    write(NUMBER)
    ran = course("quiz")
    assert ran.code == 0 and "A phase by its number: course quiz 00" in ran.out
    find_labs(little_course)[0].starter.write_text("begun = True\n")
    answer(monkeypatch, "0.25")
    assert "1 of 1 right." in course("quiz").out


def test_the_end_of_the_input_is_no_answer(course, write, monkeypatch, little_course):
    write(NUMBER, CHOICE)
    answer(monkeypatch, "0.25")
    ran = course("quiz", "90")
    assert ran.code == 0 and "1 of 1 right. 1 left for today" in ran.out
    assert list(Boxes(little_course / ".course").cards) == ["90-ex-01"]


def test_an_answer_that_cannot_be_kept_is_explained_all_the_same(
    course, write, monkeypatch, little_course
):
    write(NUMBER)
    (little_course / ".course").write_text("in the way")
    answer(monkeypatch, "0.25")
    ran = course("quiz", "90")
    assert ran.code == 0 and "The answer cannot be kept (" in ran.out and "1 of 1 right." in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("17",), "There is no quiz for 17. Phases with one: 90."),
        (("--count", "0"), "--count is 0: give 1 or more"),
    ],
)
def test_a_wrong_question_about_the_quiz_is_answered_in_words(course, write, arguments, words):
    write(NUMBER)
    ran = course("quiz", *arguments)
    assert (ran.code, ran.err) == (2, words + "\n")


def test_an_unsound_quiz_is_not_asked(course, write):
    write(NUMBER | {"number": "x"})
    ran = course("quiz")
    assert ran.code == 2 and "quiz.yaml:1: question 90-ex-01: number must be" in ran.err


def test_a_right_answer_comes_back_after_longer_and_longer(tmp_path):
    today, waits = date(2024, 1, 1), []
    for _ in range(7):
        boxes = Boxes(tmp_path, today)
        boxes.put("a", right=True)
        waits.append((boxes.cards["a"][1] - today).days)
        today = boxes.cards["a"][1]
    assert waits == [1, 3, 7, 21, 60, 60, 60]
    boxes.put("a", right=False)
    assert boxes.cards["a"] == (0, boxes.today)


def test_due_are_the_wrong_ones_then_the_known_ones_then_the_new(tmp_path):
    questions = [Question(name, "s", "a", "e", number=1) for name in "abcd"]
    yesterday = Boxes(tmp_path, date(2024, 1, 1))
    yesterday.put("c", right=True)
    yesterday.put("d", right=False)
    today = Boxes(tmp_path, date(2024, 1, 1) + timedelta(1))
    assert [q.id for q in today.due(questions)] == ["d", "c", "a", "b"]
    today.put("c", right=True)
    assert [q.id for q in today.due(questions)] == ["d", "a", "b"]


@pytest.mark.parametrize("text", ["", "[" * 5_000, '{"cards": [1]}', '{"cards": {"a": ["x", 1]}}'])
def test_boxes_that_cannot_be_read_begin_anew(tmp_path, text):
    (tmp_path / "quiz.json").write_text(text)
    assert Boxes(tmp_path).cards == {}


@pytest.mark.parametrize("given", ["600 us", "600 µs", "600 μs"])
def test_a_time_may_be_written_with_either_sign_for_micro(given):
    assert Question("i", "s", "a", "e", number=0.6, tolerance=0, unit="ms").check(given)


def test_a_fraction_of_nothing_is_no_answer():
    assert not Question("i", "s", "a", "e", number=0, tolerance=0).check("3/0")


@pytest.mark.parametrize(
    ("given", "read"),
    [("7,5 slots", "7.5 slots"), ("1,500", "1500"), ("1,500,000", "1500000"), ("-0,5", "-0.5"),
     ("1_000", "1000"), ("12,34e3", "12340"), ("1/4", "1 / 4"), ("many", "")],
)  # fmt: skip
def test_a_number_is_told_as_it_was_read(given, read):
    assert Question("i", "s", "a", "e", number=7.5).read_as(given) == read


def test_a_wrong_answer_is_named_by_what_was_thought():
    number = Question("i", "s", "a", "e", number=8, unit="GiB", wrong=(("4", "K alone."),))
    assert number.misconception("4,0 GiB") == "K alone." and not number.misconception("5")
    chosen = Question(
        "i", "s", "a", "e", choices=("Yes", "No"), choice="No", wrong=(("Yes", "Why."),)
    )
    assert chosen.misconception("a") == "Why." and not chosen.misconception("b")
    named = Question("i", "s", "a", "e", accept=("memory",), wrong=(("slots", "At admission."),))
    assert named.misconception("The Slots!") == "At admission."


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{7.5: x}", "wrong: '7.5' is right"),
        ("{eight: x}", "wrong: 'eight' is no number"),
        ("{8: ''}", "wrong must map answers to texts"),
        ("[8]", "wrong must map answers to texts"),
    ],
)
def test_what_cannot_be_a_wrong_answer_is_refused(tmp_path, wrong, said):
    phase = tmp_path / "phase-02-x"
    phase.mkdir()
    (phase / "P.md").write_text("# 1. One\n", encoding="utf-8")
    path = phase / quiz.FILE
    path.write_text(
        f'- id: "02-ex-01"\n  source: "P.md, 1"\n  ask: a\n  number: 7.5\n  wrong: {wrong}\n'
        "  explain: e\n",
        encoding="utf-8",
    )
    _, findings = quiz.load(path)
    assert len(findings) == 1 and said in findings[0].text
