"""Lab 01-05 as a part of the engine: its stop check ends every request, for the same reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, RequestStatus, SamplingParams

PHASE = Path(__file__).parent
WISHES = (
    SamplingParams(max_tokens=5), SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=30, stop_token_ids=(32, 46)),
    SamplingParams(max_tokens=30, stop_token_ids=(32,), min_tokens=12),
    SamplingParams(max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=9, stop=("e",)),
)  # fmt: skip


def ends(**parts):
    """Tokens, finish reason and stop reason of each wish, and the model's length for one more."""
    engine = LLMEngine(shipped_model(), parts=mine.engine_parts(parts), max_model_len=40)
    wishes = [*WISHES, SamplingParams(max_tokens=99, ignore_eos=True)]
    for number, params in enumerate(wishes):
        engine.add_request("A block is", params, request_id=f"r{number}")
    requests = dict(engine.requests)
    while engine.has_unfinished_requests():
        engine.step()
    return [
        (request.output_token_ids, request.finish_reason, request.stop_reason)
        for request in requests.values()
    ]


def test_requests_end_where_and_why_the_engines_own_check_ends_them():
    (lab,) = [lab for lab in find_labs(PHASE.parent) if lab.id == "01-05"]
    supplied, owners = mine.parts_of([lab], lambda lab: True, lambda lab: lab.solution)
    assert owners["stop_check"].id == "01-05"
    calls = mine.counted(supplied)
    own = ends(**supplied)
    assert own == ends()
    assert calls["stop_check"] >= sum(len(tokens) for tokens, *_ in own), "at every token"
    assert {reason for _, reason, _ in own} == {"stop", "length"}
    assert {32, "e"} <= {why for *_, why in own}


def test_a_status_that_ends_nothing_is_refused_as_the_parts():
    with pytest.raises(RuntimeError, match=r"stop_check part: returned <RequestStatus.RUNNING"):
        ends(stop_check=lambda request, max_model_len=None: RequestStatus.RUNNING)


def test_no_part_leaves_the_engines_own_request():
    assert mine.engine_parts({}) == EngineParts()


@pytest.mark.slow
def test_course_run_mine_takes_it(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["01-05"], monkeypatch, capsys)
    assert "stop_check         yours, from lab 01-05: 12 calls" in course.run("A", "--mine")
