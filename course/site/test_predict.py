"""Predictions in the page: read, judged and told exactly as the command does."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from course.conftest import REPOSITORY, TESTDATA
from course.learning import show
from course.learning.labs import find_labs
from course.learning.predictions import MEANINGS, Prediction
from course.site import desk

NODE = shutil.which("node")
SCRIPTS = [
    REPOSITORY / "book" / "places" / "quiz.js",
    REPOSITORY / "book" / "play" / "desk-judge.js",
]
ASKS = TESTDATA / "phase-90-selfcheck" / "labs" / "lab-08-predicts"


def in_node(call: str, rows: list[Any]) -> list[Any]:
    """`rows.map(call)` of JavaScript, with the page's scripts loaded."""
    if NODE is None:
        pytest.skip("needs node")
    quiz, judge = (f"require({json.dumps(str(path))})" for path in SCRIPTS)
    script = (
        f"{quiz}; const CoursePrediction = {judge};"
        "const rows = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        f"console.log(JSON.stringify(rows.map({call})));"
    )
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(rows), capture_output=True, text=True, check=True
    )
    return list(json.loads(done.stdout))


def every_question() -> list[Prediction]:
    return [q for lab in find_labs(REPOSITORY) for q in lab.manifest.predictions.values()]


def a_number(draw: random.Random) -> float:
    """Of any size and sign, whole or not."""
    size = draw.choice([1, 1, 100, 1e-3, 1e-7, 1e5, 1e12, 1e20, 1e300])
    value = draw.choice([-1, 1, 1, 1]) * draw.random() * size
    return draw.choice([value, round(value, 2), float(round(value))])


def a_text(question: Prediction, draw: random.Random) -> str:
    """What a reader may type: of many kinds, many of them readable."""
    if question.choices:
        text = draw.choice([*question.choices, *question.choices, *"abcdef", "", "none", "a b"])
        texts = [text, text.upper(), text.title(), text.swapcase(), text[:-1], f"`{text}`"]
        texts += [text.replace("s", "\u017f"), text.replace("ss", "ß"), f"the {text}"]
        after = ["", "", "", ")", ".", ":", ").:", ").", "?", " )"]
        return draw.choice(["", " ", "\n", "\x1c"]) + draw.choice(texts) + draw.choice(after)
    value = a_number(draw)
    texts = [f"{value!r}", f"{value:g}", f"{value:.2e}", f"{value:_}", f"{value:,}", f"{value:E}"]
    texts += [f"{value:.0f}", f"{value:.1f}".replace(".", ","), f"{value:.0f}.", f"{value:+g}"]
    texts += [f"0x{draw.randrange(99):x}", f"{value:.0f}/2", f"{value}%", "١٢٫٥", "\u0664\u0662"]
    texts += ["", "_", "1__0", "1_", "e5", ".", "-", "1e", "1e5.0", "- 1", "1 000", "five", ".5"]
    texts += ["7,5", "1,500", "1'500", "15/2", "1/0", "2 x 10^3", "7.5 GB", "50 %", "-0,25"]
    texts += ["nan", "inf", "-Infinity", "1e999", "-0", "0_._5", "True", "None", "½", "\U0001d7d7"]
    edges = ["", "", "", "", " ", "\t\n", "\x1c", "\xa0", "\x85", "\u3000", "\ufeff", "_\x1c", "_ "]
    return draw.choice(edges) + draw.choice(texts) + draw.choice(edges)


def read_or_none(question: Prediction, given: object) -> object:
    try:
        return question.read(given)
    except ValueError:
        return None


def row(question: Prediction, *more: object) -> list[object]:
    return [asdict(question), *more]


@pytest.mark.slow
def test_thousands_of_answers_are_read_as_the_command_reads_them():
    draw = random.Random(5)
    questions = [
        Prediction("?"),
        Prediction("?", ("Straße", "a", "sign", "b c")),
        *every_question(),
    ]
    cases: list[tuple[Prediction, object]] = []
    for question in questions:
        cases += [(question, a_text(question, draw)) for _ in range(60)]
    plain = [q for q in questions if not q.choices]
    cases += [(q, given) for q in plain[:3] for given in (True, False, 5, -0.0, 1.5, 2**53, 1e300)]
    told = [read_or_none(question, given) for question, given in cases]
    said = in_node(
        "([asked, given]) => { try { return CoursePrediction.read(asked, given) }"
        " catch { return null } }",
        [row(question, given) for question, given in cases],
    )
    said = [float(s) if isinstance(s, int) else s for s in said]  # JSON has one kind of number
    wrong = [(given, t, s) for (_, given), t, s in zip(cases, told, said, strict=True) if t != s]
    assert wrong == []
    readable = sum(answer is not None for answer in told)
    assert len(cases) > 5_000 and min(readable, len(cases) - readable) > 1_000


def judged(draw: random.Random) -> tuple[Prediction, float | str, float | str]:
    """A question, an answer and what was measured: many right, many nearly so."""
    texts = ["", "a word", "another"]
    means = {name: draw.choice(texts) for name in MEANINGS if draw.random() < 0.6}
    tolerance = draw.choice([0.0, 0.0, 0.01, 0.05, 0.1, 0.999])
    if draw.random() < 0.2:
        values: list[float | str] = ["a", "b", 3, 3.5]
        return Prediction("?", ("a", "b"), 0, means), draw.choice(values), draw.choice(values)
    measured = draw.choice([a_number(draw), draw.randrange(-5, 200), 0])
    factor = draw.choice([1, 1, 1 + tolerance, 1 - tolerance, 1.02, 0.5, -1])
    given = draw.choice([measured * factor, measured + draw.choice([-1, 0, 1])])
    return Prediction("?", (), tolerance, means), given, measured


@pytest.mark.slow
def test_thousands_of_answers_are_judged_and_explained_as_the_command_does():
    draw = random.Random(7)
    cases = [judged(draw) for _ in range(6_000)]
    told = []
    for question, given, measured in cases:
        outcome = question.judge(given, measured)
        told.append([outcome, question.meaning(outcome)])
    said = in_node(
        "([asked, ...both]) => { const outcome = CoursePrediction.judge(asked, ...both);"
        " return [outcome, CoursePrediction.meaning(asked, outcome)] }",
        [row(*case) for case in cases],
    )
    assert [(c, t, s) for c, t, s in zip(cases, told, said, strict=True) if t != s] == []
    assert all(sum(t[0] == outcome for t in told) > 300 for outcome in MEANINGS)


def in_terminal(question: Prediction, given: object, measured: dict[str, Any]) -> list[str]:
    """The lines of `course check` on one committed answer."""
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, width=10_000)
    lab: Any = SimpleNamespace(id="02-01", manifest=SimpleNamespace(predictions={"x": question}))
    show.predicted(console, lab, {"x": given}, [], measured)  # type: ignore[dict-item]
    _, *lines = stream.getvalue().split("\n")
    return [line.strip() for line in lines if line]


@pytest.mark.slow
def test_an_answer_is_told_in_the_words_of_course_check():
    draw = random.Random(11)
    cases = [case for case in (judged(draw) for _ in range(2_000)) if whole(*case[1:])]
    rows = [row(question, given, measured) for question, given, measured in cases]
    said = in_node(
        "([asked, given, measured]) => [`x: ${CoursePrediction.told(asked, given, measured)}`,"
        " CoursePrediction.meaning(asked, CoursePrediction.judge(asked, given, measured))]"
        ".filter(Boolean)",
        rows,
    )
    told = [in_terminal(q, given, {"x": measured}) for q, given, measured in cases]
    assert len(cases) > 1_000
    assert said == told
    waiting = in_node("([asked, given]) => `x: ${CoursePrediction.told(asked, given)}`", rows)
    assert waiting == [in_terminal(q, given, {})[0] for q, given, _ in cases]


def whole(*values: object) -> bool:
    """Whether JSON hands the numbers on as Python prints them: 7.0 becomes 7, 10**17 keeps."""
    return not any(isinstance(v, float) and v.is_integer() for v in values)


# ------------------------------------------------------------------ what the desk holds


def test_the_desk_of_a_lab_holds_its_predictions(little_course):
    folder = little_course / "phase-90-little" / "labs" / "lab-08-predicts"
    shutil.copytree(ASKS, folder)
    page = folder / "README.md"
    lab = next(lab for lab in find_labs(little_course) if lab.id == "90-08")
    told = desk.document(little_course, lab)["predictions"]
    assert list(told) == ["blocks", "share", "waste"]
    assert told["blocks"]["means"]["low"] == "The rest needs a block too."
    assert (told["share"]["tolerance"], told["waste"]["choices"][2]) == (0.05, "nowhere")
    made = desk.furnish(little_course, page, "# A lab\n")
    assert "../../../book/places/quiz.js?v=" in made and "/desk-judge.js?v=" in made


def test_the_desk_of_a_lab_that_asks_nothing_loads_nothing_for_it(little_course):
    lab = find_labs(little_course)[0]
    page = lab.folder / "README.md"
    assert desk.document(little_course, lab)["predictions"] == {}
    assert "quiz.js" not in desk.furnish(little_course, page, "# A lab\n")
