"""What a changed line of vLLM decides: the reading labs say what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import removals
from conformance.real_core import why_not
from course.learning import quiz

ROOT = Path(__file__).parents[1]
CASES = removals.cases()
QUESTIONS = {q.id: q for path in quiz.files(ROOT) for q in quiz.load(path)[0]}
needs_pin = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is here")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.question)
def test_a_question_and_its_page_say_the_counts_that_are_kept(case):
    assert set(case.differ) == set(case.workloads) and any(case.workloads.values())
    question = QUESTIONS[case.question]
    page = next(ROOT.glob(f"phase-{case.question[:2]}-*/READING.md")).read_text(encoding="utf-8")
    for profile, most in case.workloads.items():
        told = f"{case.differ[profile]:,} of {most:,} {profile}"
        assert told in question.explain, told
        assert told in " ".join(page.split()), told


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.part], ids=lambda c: c.question)
def test_a_part_holds_as_many_recorded_choices_as_a_case_says(case):
    groups = removals.groups_of(case.part)
    assert case.workloads == {group: groups[group] for group in case.workloads}


def test_each_phase_from_01_to_16_asks_what_breaks():
    assert {case.question[:2] for case in CASES} == {f"{phase:02d}" for phase in range(1, 17)}


@needs_pin
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.question)
def test_the_counts_are_those_of_the_changed_code(case):
    if case.part and (lacking := removals.why_no_part()):
        pytest.skip(lacking)
    assert removals.count(case) == case.differ


@needs_pin
@pytest.mark.slow
def test_a_core_with_nothing_changed_decides_as_it_did_and_another_text_is_refused():
    case = removals.Case("x", "vllm/v1/core/sched/scheduler.py", "a = 1", "", {"basic": 3}, {})
    with pytest.raises(ValueError, match="occurs 0 times"):
        removals.count(case)
    same = "if not preempted_reqs and"
    case = removals.Case("x", case.path, same, same, {"basic": 3, "prefix": 3}, {})
    assert removals.count(case) == {"basic": 0, "prefix": 0}
