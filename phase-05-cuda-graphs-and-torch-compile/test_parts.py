"""Lab 05-03 as a part of the engine: the lab's dispatcher, the same tokens on the same graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams

PHASE = Path(__file__).parent


def served(parts, mode):
    """Tokens of three requests, and the steps by runtime mode and size."""
    engine = LLMEngine(
        dtype="float64", parts=parts, max_num_seqs=3, max_num_batched_tokens=24,
        compilation_config={"cudagraph_mode": mode},
    )  # fmt: skip
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for name, text in {"a": "A block", "b": "The scheduler plans", "c": "To"}.items():
        engine.add_request(text, params, request_id=name)
    requests = dict(engine.requests)
    while engine.has_unfinished_requests():
        engine.step()
    tokens = [request.output_token_ids for request in requests.values()]
    return tokens, engine.feature("compilation").model.steps


@pytest.mark.slow
def test_the_engine_runs_on_the_graphs_that_the_labs_dispatcher_names():
    (lab,) = [lab for lab in find_labs(PHASE.parent) if lab.id == "05-03"]
    supplied, owners = mine.parts_of([lab], lambda lab: True, lambda lab: lab.solution)
    assert owners["dispatcher"].id == "05-03"
    calls = mine.counted(supplied)
    tokens, steps = served(mine.engine_parts(supplied), "FULL_AND_PIECEWISE")
    assert (tokens, steps) == served(EngineParts(), "FULL_AND_PIECEWISE")
    assert calls["dispatcher"] >= 2 * sum(steps.values()), "two questions each step"
    assert {mode for mode, _ in steps} == {"FULL", "PIECEWISE", "NONE"}


@pytest.mark.slow
def test_course_run_mine_takes_it(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["05-03"], monkeypatch, capsys)
    said = course.run("A block", "--mine", "--cudagraph-mode", "FULL_DECODE_ONLY")
    assert "dispatcher         yours, from lab 05-03: 26 calls" in said
    assert "FULL_DECODE_ONLY: steps by mode: FULL 11, NONE 1;" in said
    assert "dispatcher         yours, not called here: course run" in course.run("A", "--mine")
