"""Predictions: committed first, compared with what is measured, never a reason to fail."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest

from course.conftest import TESTDATA
from course.learning import predictions
from course.learning.labs import find_labs
from course.learning.predictions import Prediction
from course.learning.progress import Progress

ASKS = TESTDATA / "phase-90-selfcheck" / "labs" / "lab-08-predicts"
RIGHT = "def num_blocks(num_tokens, block_size):\n    return -(-num_tokens // block_size)\n"
WRONG = RIGHT.replace("-(-num_tokens // block_size)", "num_tokens // block_size")


@pytest.fixture
def lab(little_course):
    """The lab of the little course that asks three things; its id is 90-08."""
    folder = little_course / "phase-90-little" / "labs" / "lab-08-predicts"
    shutil.copytree(ASKS, folder)
    (folder / "starter.py").write_text(RIGHT)
    return next(lab for lab in find_labs(little_course) if lab.id == "90-08")


def write(lab, text: str) -> None:
    (lab.folder / "predictions.yaml").write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_without_a_prediction_the_measured_value_is_not_shown(course, lab):
    write(lab, "blocks:\nshare: \nwaste: ''\n")
    ran = course("check", "90-08")
    assert ran.code == 0
    assert ran.out.count("none committed, so the measured value is not shown.") == 3
    assert "Commit one: course predict 90-08" in ran.out
    assert "measured 7" not in ran.out and "0.89" not in ran.out and "last block" not in ran.out


@pytest.mark.slow
def test_each_prediction_stands_beside_the_measured_value_with_what_it_means(course, lab):
    write(lab, "blocks: 6\nshare: 0.9\nwaste: C\n")
    ran = course("check", "90-08")
    assert ran.code == 0, "a wrong prediction fails nothing"
    lines = ran.out.splitlines()
    low = lines.index("  blocks: you said 6, measured 7: low.")
    assert lines[low + 1] == "    The rest needs a block too."
    assert "  share: you said 0.9, measured 0.8928571428571429: right." in lines
    assert "  waste: you said nowhere, measured in the last block: other." in lines
    assert "Commit one" not in ran.out
    assert "predictions: 1 of 3 right" in course().out


@pytest.mark.slow
def test_the_first_prediction_counts_and_is_kept(course, lab, little_course):
    write(lab, "blocks: 6\n")
    course("check", "90-08")
    write(lab, "blocks: 7\n")
    assert "you said 7, measured 7: right." in course("check", "90-08").out
    assert Progress(little_course).entry(lab).predictions == {"blocks": [6, 7]}
    assert "predictions: 0 of 1 right" in course().out
    course("reset", "90-08", "--yes")
    assert "predictions: 0 of 1 right" in course().out


@pytest.mark.slow
def test_what_a_failing_test_measured_is_not_compared(course, lab, little_course):
    lab.starter.write_text(WRONG)
    write(lab, "blocks: 6\n")
    ran = course("check", "90-08")
    assert ran.code == 1 and "blocks: you said 6; its test has not passed yet." in ran.out
    assert Progress(little_course).entry(lab).predictions == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blocks: many\n", "blocks: answer is 'many': give a number"),
        ("blocks: .nan\n", "blocks: answer is 'nan': give a number"),
        ("blocks: true\n", "give a number"),
        ("waste: here\n", "give one of in every block, in the last block, nowhere"),
        ("bloks: 3\n", "'bloks' is not asked; asked are blocks, share, waste"),
        ("- 3\n", "predictions.yaml must hold lines like `name: answer`"),
        ("blocks: [", "predictions.yaml cannot be read: "),
        ("[" * 500, "predictions.yaml cannot be read: "),
    ],
)
def test_an_answer_that_is_none_is_named_and_commits_nothing(lab, text, words):
    write(lab, text)
    answers, (problem,) = predictions.committed(lab.folder, lab.manifest.predictions)
    assert answers == {} and words in problem


@pytest.mark.slow
def test_an_answer_that_is_none_is_told_and_the_grade_stands(course, lab):
    write(lab, "blocks: many\n")
    ran = course("check", "90-08")
    assert ran.code == 0 and "blocks: answer is 'many': give a number" in ran.out
    assert ran.out.count("none committed") == 3


def test_predict_asks_and_keeps_comments_and_what_was_there(course, lab, monkeypatch):
    write(lab, "# mine\nblocks: 5   # a guess\nshare:\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\nlots\n0.9\nB\n"))
    ran = course("predict", "90-08")
    assert ran.code == 0
    assert "your answer [5]: " in ran.out and "answer is 'lots': give a number" in ran.out
    assert "  b) in the last block" in ran.out
    assert "3 of 3 committed in predictions.yaml." in ran.out
    text = (lab.folder / "predictions.yaml").read_text()
    assert text == '# mine\nblocks: 5   # a guess\nshare: 0.9\nwaste: "in the last block"\n'


def test_predict_makes_the_file_and_ends_with_the_input(course, lab, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("8"))
    assert "1 of 3 committed" in course("predict", "90-08").out
    assert (lab.folder / "predictions.yaml").read_text() == "blocks: 8\n"


def test_predict_refuses_a_lab_that_asks_nothing(course, lab):
    ran = course("predict", "90-00")
    assert (ran.code, ran.err) == (2, "Lab 90-00 asks for no prediction.\n")


def test_a_file_that_cannot_be_kept_line_by_line_is_left(tmp_path):
    path = tmp_path / "predictions.yaml"
    path.write_text("{blocks: 3}\n")
    with pytest.raises(ValueError, match="write `blocks: 4` in it"):
        predictions.commit(tmp_path, "blocks", 4)
    assert path.read_text() == "{blocks: 3}\n"


def test_an_empty_line_keeps_its_comment(tmp_path):
    (tmp_path / "predictions.yaml").write_text("x:   # how many\ny: 1 # sure\n", encoding="utf-8")
    predictions.commit(tmp_path, "x", 4)
    predictions.commit(tmp_path, "y", 5)
    text = (tmp_path / "predictions.yaml").read_text(encoding="utf-8")
    assert text == "x: 4  # how many\ny: 5 # sure\n"


@pytest.mark.parametrize("answer", [1e-05, 1e20, 1.5e-07, 2.0**60, -0.25, 3])
def test_a_number_of_any_size_is_read_back_as_it_was_committed(tmp_path, answer):
    predictions.commit(tmp_path, "x", answer)
    assert predictions.committed(tmp_path, {"x": Prediction("?")}) == ({"x": answer}, [])


@pytest.mark.parametrize(
    ("typed", "value"),
    [("7,5", 7.5), ("1,500", 1500), ("1 500", 1500), ("1/2", 0.5), ("2 x 10^3", 2000), ("5.", 5)],
)
def test_a_number_is_read_in_the_forms_of_the_quiz(typed, value):
    assert Prediction("?").read(typed) == value


@pytest.mark.parametrize(
    ("predicted", "outcome"),
    [(95, "right"), (105, "right"), (94.9, "low"), (105.1, "high"), (100, "right")],
)
def test_the_tolerance_is_relative_to_what_was_measured(predicted, outcome):
    assert Prediction("?", tolerance=0.05).judge(predicted, 100) == outcome


def test_without_a_tolerance_a_number_must_be_exact():
    asked = Prediction("?")
    assert [asked.judge(n, 39) for n in (38, 39, 39.0, 40)] == ["low", "right", "right", "high"]


def test_other_stands_in_for_the_side_that_has_no_meaning_of_its_own():
    asked = Prediction("?", means={"low": "too few", "other": "count again"})
    assert [asked.meaning(o) for o in ("low", "high", "right")] == ["too few", "count again", ""]


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ({}, "predictions.x.ask must be a text"),
        ({"ask": "?", "choices": ["a"]}, "at least two different texts"),
        ({"ask": "?", "choices": ["a", "A"]}, "at least two different texts"),
        ({"ask": "?", "tolerance": "x"}, "tolerance must be a number, not 'x'"),
        ({"ask": "?", "tolerance": 5}, "tolerance is 5: relative, from 0 to below 1"),
        ({"ask": "?", "tolerance": 0.1, "choices": ["a", "b"]}, "no meaning beside choices"),
        ({"ask": "?", "means": {"wrong": "x"}}, "means must map some of right, low, high, other"),
        ({"ask": "?", "unit": "s"}, "unknown key 'unit'"),
        ("?", "predictions.x must be a mapping of keys"),
    ],
)
def test_an_unsound_prediction_of_a_manifest_is_refused(item, complaint):
    assert complaint in " ".join(predictions.problems_of({"x": item}))


@pytest.mark.slow
def test_numpy_numbers_measure_too(course, lab, little_course):
    text = lab.test_file.read_text().replace(
        "blocks)\n    rec", "__import__('numpy').int64(blocks))\n    rec", 1
    )
    lab.test_file.write_text(text)
    assert "numpy" in text
    write(lab, "blocks: 7\n")
    assert "you said 7, measured 7: right." in course("check", "90-08").out
    kept = json.loads((little_course / ".course" / "progress.json").read_text())
    assert kept["labs"]["90-08"]["predictions"] == {"blocks": [7, 7]}
