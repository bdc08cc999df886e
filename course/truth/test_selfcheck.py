"""Selfcheck refuses the deliberately bad labs of testdata, each in words."""

from __future__ import annotations

import pytest

from course.conftest import REPOSITORY, TESTDATA
from course.learning.labs import Lab, find_labs
from course.truth import selfcheck

LABS = {lab.folder.name: lab for lab in find_labs(TESTDATA)}


@pytest.mark.slow
def test_a_sound_lab_that_asks_for_predictions_gets_through():
    (good,) = selfcheck.check_labs(REPOSITORY, [LABS["lab-08-predicts"]])
    assert (good.problems, good.tests, good.misconceptions) == ([], 2, 1)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, selfcheck.Verdict]:
    checked = selfcheck.check_labs(REPOSITORY, list(LABS.values()))
    return {verdict.lab.folder.name: verdict for verdict in checked}


@pytest.mark.slow
def test_a_sound_lab_gets_through_with_its_counts(verdicts):
    good = verdicts["lab-00-good"]
    assert (good.problems, good.tests, good.misconceptions) == ([], 1, 1)


REFUSED = {
    "lab-01-asserts-nothing": [
        "test_rounds_up asserts nothing: it passes when every function of the starter just "
        "returns None"
    ],
    "lab-02-starter-passes": ["starter.py already passes test_rounds_up: the test grades nothing"],
    "lab-03-uncaught": [
        "misconception 'floor' is not caught: test_rounds_up passes on the wrong solution"
    ],
    "lab-04-lacks-a-helper": [
        "starter.py breaks before test_rounds_up begins, so the test is not what fails: "
        "starter.py, line 4 cannot be loaded: SMALLEST = _rounded_up(1, 16) "
        "NameError: name '_rounded_up' is not defined"
    ],
    "lab-05-wrong-solution": [
        "solution.py fails test_rounds_up: 17 tokens need a second block of 16: expected 2, came 1"
    ],
    "lab-06-static": [
        "lab.yaml has hints for test_that_is_gone, which is no test of test_lab.py",
        "lab.yaml has no hints for test_without_hints",
        "test_lab.py:5: this assert has no message; say what was expected and why it matters",
        "starter.py is not what its solution gives: run `course starters 90-06`",
        "misconception 'floor': there is no test test_nowhere",
    ],
    "lab-07-text-not-there": [
        "misconception 'floor': `replace` must occur exactly once in solution.py; it occurs "
        "0 times: 'return 0'"
    ],
    "lab-09-unmeasured": [
        "prediction 'share' is not measured: no test that passes says "
        'record_property("measured.share", value)',
        "prediction 'waste': the measured answer is 'at the end': give one of in every block, in "
        "the last block, nowhere",
        "test_lab.py measures 'shares', which lab.yaml does not ask for",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_lab_is_refused_in_words(verdicts, name):
    assert verdicts[name].problems == REFUSED[name]


def test_every_lab_of_testdata_is_judged_here():
    assert set(LABS) == {"lab-00-good", "lab-08-predicts", *REFUSED}


@pytest.mark.slow
def test_slow_tests_are_refused_with_the_slowest_named(monkeypatch):
    monkeypatch.setattr(selfcheck, "SLOWEST", 0.0)
    verdict = selfcheck.check_lab(REPOSITORY, LABS["lab-00-good"])
    assert "the limit is 0 s (the slowest is test_rounds_up: " in verdict.problems[0]


@pytest.mark.slow
def test_a_starter_that_is_not_what_its_solution_gives_is_refused(little_course):
    lab = find_labs(little_course)[0]
    lab.starter.write_text(lab.starter.read_text() + "# edited\n", encoding="utf-8")
    verdict = selfcheck.check_lab(little_course, lab)
    assert verdict.problems == [
        "starter.py is not what its solution gives: run `course starters 90-00`"
    ]


def test_a_lab_without_its_files_is_refused_by_their_names(tmp_path):
    (tmp_path / "lab.yaml").write_text(
        (LABS["lab-00-good"].folder / "lab.yaml").read_text(), encoding="utf-8"
    )
    verdict = selfcheck.check_lab(REPOSITORY, Lab(tmp_path, "90-00"))
    assert verdict.problems == ["missing: starter.py, solution.py, test_lab.py, README.md"]


@pytest.mark.slow
def test_a_part_the_solution_does_not_define_is_refused(little_course):
    lab = find_labs(little_course)[0]
    path = lab.folder / "lab.yaml"
    path.write_text(path.read_text() + "part: block_pool\n", encoding="utf-8")
    verdict = selfcheck.check_lab(little_course, lab)
    assert verdict.problems == [
        "lab.yaml says part: block_pool, so solution.py must define BlockPool"
    ]


@pytest.mark.slow
def test_a_part_the_engine_does_not_have_is_refused(little_course):
    lab = find_labs(little_course)[0]
    path = lab.folder / "lab.yaml"
    path.write_text(path.read_text() + "part: warp_drive\n", encoding="utf-8")
    verdict = selfcheck.check_lab(little_course, lab)
    told = "part 'warp_drive' is not a part of the engine: use one of"
    assert verdict.problems[0].startswith(told)


@pytest.mark.slow
def test_a_wrong_solution_that_never_ends_is_named(little_course):
    lab = find_labs(little_course)[0]
    manifest = lab.folder / "lab.yaml"
    text = manifest.read_text(encoding="utf-8")
    endless = "with: \"while True: __import__('time').sleep(1)\""
    changed = text.replace("with: return num_tokens // block_size", endless)
    manifest.write_text(changed, encoding="utf-8")
    verdict = selfcheck.check_lab(little_course, lab, time_limit=1.5)
    assert verdict.problems[0].startswith("wrong: floor\nOut of time: after 1.5 s")
