"""Boxes for answers: where they stand, and that the page checks exactly as the command does."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import unicodedata
from dataclasses import asdict

import pytest

from course.conftest import REPOSITORY
from course.learning import quiz
from course.learning.quiz import Question
from course.learning.test_exercises import FORMS
from course.site import answers

SCRIPT = REPOSITORY / "book" / "places" / "quiz.js"
NODE = shutil.which("node")
PAGE = """# Exercises

### 1. First

```text
### 2. Not this one
<details>
```

<details><summary>Answer</summary>

Forty.

</details>

### 2. Second

Text.

<details><summary>Answer</summary>x</details>

## Rapid fire

| question | answer |
|---|---|
| How many? | 7 |
"""


def in_node(call: str, rows: list) -> list:
    """`rows.map(call)` of JavaScript, with quiz.js loaded."""
    if NODE is None:
        pytest.skip("needs node")
    script = (
        f"require({json.dumps(str(SCRIPT))});"
        "const rows = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        f"console.log(JSON.stringify(rows.map({call})));"
    )
    done = subprocess.run(
        [NODE, "-e", script], input=json.dumps(rows), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def every_question() -> list[Question]:
    return [q for path in quiz.files(REPOSITORY) for q in quiz.load(path)[0]]


def attempts(question: Question, draw: random.Random) -> str:
    """An answer: of many kinds, many of them right or nearly so."""
    if question.wrong and draw.random() < 0.3:
        return draw.choice(question.wrong)[0]
    if question.number is not None:
        factor = draw.choice([1, 1, 1, -1, 1 + question.tolerance, 1.5, 1e3, 1e-3, 2**20])
        n = question.number * factor
        whole = round(n)
        written = [
            *(f"{n:g}", f"{n:,}", f"{n!r}", f"{n:.2e}", f"{n:_}", f"{whole}", f"{100 * n:g}"),
            *(f"{whole}/{draw.randint(0, 4)}", f"{whole} / 2", f".{abs(whole)}", f"\u0663{whole}"),
            f"{n:.1f}".replace(".", ","),
        ]
        units = [
            *(
                "",
                "",
                "GiB",
                "MiB",
                "kib",
                "B",
                "bytes",
                "MB",
                "b",
                "Gb.",
                "%",
                "tokens",
                "tokens/s",
            ),
            *("ms", "us", "\u00b5s", "\u03bcs", "ns", "s", "min", "of them", " ."),
            *(question.unit, question.unit.upper()),
        ]
        before = ["", "", "~", "≈ ", "= ", "+", " ", "\x1c", "\ufeff", "about "]
        between = ["", " ", "\n", "\x85"]
        return "".join(map(draw.choice, (before, written, between, units)))
    if question.where and draw.random() < 0.7:
        path, lines = question.where.split()[0].rsplit(":", 1)
        path = draw.choice(
            [path, path.rpartition("/")[2], f"upstream/{path}", f"/a/{path}", path[1:]]
        )
        line = int(lines.split("-")[draw.randint(0, 1) if "-" in lines else 0])
        line += draw.choice([0, 0, 0, 1, -1, 10])
        between = draw.choice([":", ":", "#L", " line ", " "])
        return f"{path}{between}{line}{draw.choice(['', '-900', ' x'])}"
    text = draw.choice([*question.choices, *question.accept, *"abcdef", "", "the", "...", "?!"])
    return draw.choice(
        [
            *(text, text.upper(), text.title(), text.swapcase(), f"  {text}\t", text[:-1]),
            *(f"the {text}", f"An {text}!", f"a a {text}", f"`{text}`", f"{text})"),
            *(text.replace(" ", "_"), text.replace(" ", "-"), f"{text} ß ΣΑΣ"),
            *(text.replace("s", "\u017f"), text.replace("e", "é")),
        ]
    )


@pytest.mark.slow
def test_the_page_reads_numbers_in_every_form_as_the_command_does():
    rows = [[typed, unit] for typed, unit, _ in FORMS]
    said = in_node("([given, unit]) => CourseQuiz.valueOf({ number: 1, unit }, given)", rows)
    assert said == [value for *_, value in FORMS]


def test_a_box_stands_before_the_first_fold_of_its_own_question():
    rows = PAGE.split("\n")
    assert rows[answers.spot(rows, "1") - 4] == "### 2. Not this one"
    assert rows[answers.spot(rows, "2. Second")] == "<details><summary>Answer</summary>x</details>"


def test_where_the_answers_stand_open_there_is_no_box():
    rows = PAGE.split("\n")
    assert answers.spot(rows, "Rapid fire") is None
    assert answers.spot(rows, "7") is None


@pytest.mark.slow
def test_every_question_of_exercises_and_interviews_has_a_box_but_those_of_open_tables():
    without = {
        question.source.split(",")[1].strip().casefold()
        for phase in sorted(REPOSITORY.glob("phase-*"))
        for question in answers.questions(phase)
        for name in answers.PAGES
        for place in answers.places(question, name)
        if answers.spot((phase / name).read_text("utf-8").split("\n"), place) is None
    }
    assert without == {"rapid fire"}


def test_the_data_of_a_box_cannot_end_its_script():
    page = REPOSITORY / "phase-00-foundations" / "EXERCISES.md"
    made = answers.embed(page, page.read_text(encoding="utf-8"), 1, lambda piece: piece)
    assert made.count('class="answer-box"') >= 10
    told = made.split('<script type="application/json">')[1].partition("</script>")[0]
    assert json.loads(told)["id"].startswith("00-ex-")
    question = Question("x", "s", "</script>", "e", accept=("y",))
    assert "</script>" not in answers._box(question).removesuffix("</script></div>")


@pytest.mark.slow
def test_the_page_checks_thousands_of_answers_exactly_as_the_command_does():
    draw = random.Random(23)
    pairs = [
        (q, given) for q in every_question() for _ in range(60) for given in [attempts(q, draw)]
    ]
    told = [question.check(given) for question, given in pairs]
    rows = [[asdict(question), given] for question, given in pairs]
    said = in_node("([question, given]) => CourseQuiz.check(question, given)", rows)
    wrong = [(q.id, given, t) for (q, given), t, s in zip(pairs, told, said, strict=True) if t != s]
    assert not wrong
    said = in_node(
        "([q, given]) => [CourseQuiz.readAs(q, given), CourseQuiz.misconception(q, given)]", rows
    )
    told_more = [[q.read_as(given), q.misconception(given)] for q, given in pairs]
    assert said == told_more
    assert sum(bool(thought) for _, thought in told_more) > 20, "too few misconceptions were met"
    assert min(sum(told), len(told) - sum(told)) > 1_500, "too few right ones, or wrong ones"


@pytest.mark.slow
def test_the_page_folds_case_and_drops_punctuation_as_python_does():
    def known(sign: str) -> bool:  # to every Unicode that a Python or a node of today has
        return unicodedata.ucd_3_2_0.category(sign) not in ("Cn", "Cs")

    signs = [sign for sign in map(chr, range(0x2FA1E)) if known(sign)]
    assert in_node("CourseQuiz.fold", signs) == [sign.casefold() for sign in signs]
    texts = [f"The {sign}x_{sign} a" for sign in signs]
    assert in_node("CourseQuiz.plain", texts) == [quiz._plain(text) for text in texts]
