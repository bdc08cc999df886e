"""What a lab's desk holds, and its words: those of `course check` and `course hint`."""

from __future__ import annotations

import io
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from course.conftest import REPOSITORY
from course.learning import manifest, show
from course.learning.grading import Frame, Report, TestResult
from course.learning.labs import find_labs
from course.site import desk
from course.truth import pages

PARTS = REPOSITORY / "book" / "play"
FRAMED = '# A lab\n\nIts text.\n\n<nav class="neighbours"></nav>\n'


@pytest.fixture
def lab(little_course):
    return find_labs(little_course)[0]


@pytest.fixture
def page(lab) -> Path:
    path = lab.folder / "README.md"
    path.write_text("# A lab\n\nIts text.\n", encoding="utf-8")
    return path


def test_a_lab_has_its_desk_between_its_text_and_its_neighbours(little_course, page):
    made = desk.furnish(little_course, page, FRAMED)
    assert made.startswith("# A lab\n\nIts text.\n\n")
    assert made.index("Its text.") < made.index('class="desk"') < made.index("<nav")
    assert 'data-lab="90-00" data-desk="../../../desk/90-00-lab.' in made
    assert '<script defer src="../../../desk/desk.js?v=' in made


def test_a_page_with_python_has_the_script_and_others_stay_as_they_are(little_course):
    page = little_course / "phase-90-little" / "00-guide.md"
    page.write_text("# x\n\n```python\nprint(1)\n```\n", encoding="utf-8")
    made = desk.furnish(little_course, page, "# x\n")
    assert made.count("<script") == 1 and 'class="desk"' not in made
    other = page.with_name("01-deep-dive.md")
    other.write_text("# x\n\n```text\n1\n```\n", encoding="utf-8")
    assert desk.furnish(little_course, other, "# x\n") == "# x\n"


def test_the_desk_knows_the_tests_the_hints_and_the_next_lab(little_course, lab):
    (find_labs(little_course)[1].folder / "README.md").write_text("# Next\n", encoding="utf-8")
    told = desk.document(little_course, lab)
    assert told["tests"] == lab.test_names()
    assert told["hints"].keys() == lab.manifest.hints.keys()
    assert told["next"]["path"] == "phase-90-little/labs/lab-01-blocks-1/index.html"
    assert desk.document(little_course, find_labs(little_course)[1])["next"] is None


def test_what_asks_vllm_is_in_no_page_and_in_the_document_of_a_lab_that_can_alone(tmp_path):
    labs = {lab.id: lab for lab in find_labs(REPOSITORY)}
    for name, asks in (("02-01", True), ("02-02", False)):
        page = labs[name].folder / "README.md"
        assert "desk-real" not in desk.furnish(REPOSITORY, page, FRAMED)
        assert ("vllm" in desk.document(REPOSITORY, labs[name])) is asks
    told = desk.document(REPOSITORY, labs["02-01"])["vllm"]
    desk.write(REPOSITORY, tmp_path, [])
    assert (tmp_path / "desk" / told["script"].partition("?")[0]).is_file()
    assert told["workload"].startswith("config:")


def test_a_script_is_sent_without_its_comment_lines_and_with_all_others(tmp_path):
    desk.write(REPOSITORY, tmp_path, [])
    for name in (*desk.SCRIPTS, *desk.ASKING, desk.REAL):
        sent = (tmp_path / "desk" / name).read_text(encoding="utf-8").splitlines()
        kept = iter(sent)
        left = []
        expected = next(kept)
        for line in (PARTS / name).read_text(encoding="utf-8").splitlines():
            if line == expected:
                expected = next(kept, None)
            else:
                left.append(line.strip())
        assert expected is None
        assert left
        assert all(line.startswith(("// ", "/* ", "/** ")) for line in left), name


def test_the_solution_is_in_a_file_of_its_own_alone(little_course, lab, page, tmp_path):
    desk.write(little_course, tmp_path, [page])
    (held,) = tmp_path.glob("desk/90-00-lab.*.json")
    (apart,) = tmp_path.glob("desk/90-00-solution.*.json")
    text = lab.solution.read_text(encoding="utf-8")
    assert json.loads(apart.read_text(encoding="utf-8")) == {"text": text}
    body = next(line for line in text.splitlines() if line.strip().startswith("return"))
    assert body.strip() not in held.read_text(encoding="utf-8")


def test_a_document_that_changes_has_another_name(little_course, lab):
    before = [name for name, _ in desk.documents(little_course, lab)]
    with lab.solution.open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    after = [name for name, _ in desk.documents(little_course, lab)]
    assert before[1] != after[1]


def test_a_folder_that_is_not_a_whole_lab_has_no_desk(little_course, lab, page):
    lab.test_file.unlink()
    assert desk.furnish(little_course, page, FRAMED) == FRAMED


def test_blocks_that_are_no_pages_own_are_named_with_a_reason_and_exist():
    for name, reason in desk.APART.items():
        page = REPOSITORY / name
        assert f'data-apart="{reason}"' in desk.furnish(REPOSITORY, page, "# x\n")
        assert pages.runnable(page)


# ------------------------------------------------------------------ the words


def in_node(program: str, given: object) -> object:
    """Run JavaScript with `given` and the desk's parts; what it puts into `told`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    source = (
        f"const CourseReport = require({json.dumps(str(PARTS / 'desk-report.js'))});"
        f"const CourseDiff = require({json.dumps(str(PARTS / 'desk-diff.js'))});"
        'const given = JSON.parse(require("fs").readFileSync(0, "utf8")); let told;'
        f"{program}; process.stdout.write(JSON.stringify(told));"
    )
    done = subprocess.run(
        [node, "-e", source], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def in_python(lab, result: TestResult) -> list[str]:
    """The lines of `course check` on a failing test, below its name."""
    stream = io.StringIO()
    console = Console(file=stream, highlight=False, markup=False, width=10_000)
    show.explain(console, lab.folder, lab, result)
    return [line.removeprefix("    ") for line in stream.getvalue().split("\n")[1:-1]]


ERRORS = ("AssertionError", "Failed", "NotImplementedError", "ValueError", "AttributeError")
MESSAGES = (
    "",
    "expected 2, came 1\nassert 1 == 2\n +  where 1 = f()",
    "assert 1 == 2",
    "why\n\ntwo paragraphs\nassert (1 == 2)",
    "words\nassert " + "x" * 200,
    "module '_lab_01_starter' has no attribute 'num_blocks'",
    "many   spaces and\nlines " * 30,
    "letters beyond the first plane \U0001f9ee " * 20,
    "a last newline\n",
)


def failures() -> list[TestResult]:
    """Many failures, of every kind that is told in words of its own."""
    draw = random.Random(0)
    frames = [
        Frame("/a/test_lab.py", 7, "test_x", "assert f() == 2"),
        Frame("/a/starter.py", 12, "f", "return g()"),
        Frame("/a/starter.py", 20, "g", "raise ValueError"),
    ]
    made = []
    for error in ERRORS:
        for message in MESSAGES:
            for count in range(len(frames) + 1):
                chosen = tuple(draw.sample(frames, count))
                made.append(TestResult("test_x", "t.py::test_x[a]", "failed", 0, "", error,
                                       message, chosen))  # fmt: skip
    return made


@pytest.mark.slow
def test_a_failure_is_told_in_the_words_of_course_check(lab):
    results = failures()
    given = [
        {
            "error": result.error,
            "message": result.message,
            "frames": [{"file": f.file, "line": f.line, "name": f.name, "code": f.code}
                       for f in result.frames],
        }
        for result in results
    ]  # fmt: skip
    told = in_node(
        "told = given.map((g) => CourseReport.explain(g).map((line) => line.text))", given
    )
    assert len(results) == 180
    for mine, result in zip(told, results, strict=True):
        assert mine == in_python(lab, result), result


@pytest.mark.slow
def test_hints_are_chosen_as_course_hint_chooses_them():
    draw = random.Random(1)
    cases, expected = [], []
    for lab in find_labs(REPOSITORY):
        for hints in lab.manifest.hints.values():
            fields = [hint.field for hint in hints if hint.field] or ["waiting"]
            for _ in range(3):
                words = draw.sample([*fields, "running", "seed 3, step 4,", "free_blocks"], 2)
                failure = " ".join(words) + " differs"
                cases.append([[{"text": h.text, "field": h.field} for h in hints], failure])
                expected.append([hint.text for hint in manifest.fitting(hints, failure)])
    program = (
        "told = given.map(([hints, failure]) => "
        "CourseReport.fitting(hints, failure).map((hint) => hint.text))"
    )
    assert in_node(program, cases) == expected
    assert len({len(texts) for texts in expected}) > 2, "no hint depends on the failure"


def test_a_report_of_events_is_that_of_course_check(little_course):
    """One pass over what a run writes, against what the command reads of the same."""
    result = {"event": "result", "test": "t.py::test_a", "name": "test_a", "outcome": "failed"}
    runs = [
        [{"event": "collected", "tests": ["t.py::test_a"]}, {**result, "outcome": "passed"}],
        [{"event": "collected", "tests": ["t.py::test_a"]}, {**result, "when": "setup"}],
        [{"event": "collected", "tests": ["t.py::test_a", "t.py::test_b[1]"]}, result],
        [{"event": "collect-error", "message": "E  bad"}],
        [{"event": "collected", "tests": []}],
    ]
    program = """
        told = given.map((events) => {
            const report = CourseReport.begun();
            for (const event of events) CourseReport.heard(report, event);
            CourseReport.ended(report, {status: 1});
            const outcomes = report.results.map((each) => each.outcome);
            return [CourseReport.ok(report), report.trouble, outcomes];
        })"""
    assert in_node(program, runs) == [
        [True, "", ["passed"]],
        [False, "", ["error"]],
        [False, "Without a result, since the tests ended early: test_b.", ["failed"]],
        [False, "The test file could not be read:\nE  bad", []],
        [False, "There are no tests here.", []],
    ]
    assert Report(results=[], trouble="x").ok is False


def test_a_diff_gives_both_texts_back():
    draw = random.Random(2)
    texts = ["\n".join(draw.choices("abc", k=draw.randrange(1, 9))) + "\n" for _ in range(400)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    told = in_node("told = given.map(([a, b]) => CourseDiff.lines(a, b))", pairs)
    for (before, after), lines in zip(pairs, told, strict=True):  # type: ignore[call-overload]
        for text, kinds in ((before, " -"), (after, " +")):
            assert "".join(f"{line}\n" for kind, line in lines if kind in kinds) == text
        common = sum(kind == " " for kind, _ in lines)
        assert common == _longest_common(before.splitlines(), after.splitlines())


def _longest_common(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for left in a:
        above, row = row, [0]
        for place, right in enumerate(b):
            row.append(above[place] + 1 if left == right else max(row[-1], above[place + 1]))
    return row[-1]
