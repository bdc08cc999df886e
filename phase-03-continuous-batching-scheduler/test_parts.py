"""What the labs of this phase supply, put into the engine: the plans and the tokens stay the same.

Parts are found as `course run --mine` finds them, from the solutions.
"""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams, Scheduler

PHASE = Path(__file__).resolve().parent
ROOT = PHASE.parent
TEXTS = ["The KV cache is divided into", "The KV cache is read by", "A request", "Blocks of"]


@cache
def own_parts() -> dict[str, Any]:
    labs = [lab for lab in find_labs(ROOT) if lab.folder.is_relative_to(PHASE)]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert owners["scheduler"].id == "03-01"
    return parts


def run(parts: EngineParts, policy: str, **settings: Any) -> tuple[list[str], list[Any], int]:
    """Texts, plans with their tables, and the number of preemptions."""
    engine = LLMEngine(model=shipped_model(), parts=parts, policy=policy, **settings)
    plans: list[Any] = []
    preempted = 0

    def note(plan):
        nonlocal preempted
        preempted += len(plan.preempted_req_ids)
        tables = [engine.scheduler.kv.get_block_ids(r.request_id) for r in plan.scheduled_requests]
        plans.append((dict(plan.num_scheduled_tokens), dict(plan.num_cached_tokens), tables))

    engine.observers.append(note)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    requests = []
    for number, text in enumerate(TEXTS):
        name = f"r{number}"
        engine.add_request(text, params, request_id=name, priority=-number)
        requests.append(engine.requests[name])
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    return [engine.tokenizer.decode(r.output_token_ids) for r in requests], plans, preempted


CRAMPED = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 3}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    ("settings", "preempts"),
    [
        ({}, False),
        (CRAMPED, True),
        (CRAMPED | {"long_prefill_token_threshold": 5, "forget_withdrawn_blocks": True}, True),
        pytest.param(CRAMPED | {"enable_prefix_caching": False}, True, marks=pytest.mark.slow),
        pytest.param(
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 40},
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["roomy", "cramped", "chunked", "uncached", "whole-prompts"],
)
def test_the_scheduler_of_lab_03_01_plans_and_speaks_as_the_engines_own(policy, settings, preempts):
    texts, plans, preemptions = run(EngineParts(), policy, **settings)
    assert (preemptions > 0) == preempts
    own_texts, own_plans, _ = run(EngineParts(**own_parts()), policy, **settings)
    assert own_plans == plans
    assert own_texts == texts


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_solution_with_flat_arguments_and_one_token_each_still_serves_the_model(policy):
    earlier = runpy.run_path(str(PHASE / "testdata" / "flat_scheduler.py"))["Scheduler"]
    settings = CRAMPED | {"long_prefill_token_threshold": 5, "forget_withdrawn_blocks": True}
    texts, plans, preemptions = run(EngineParts(), policy, **settings)
    assert preemptions > 0
    assert run(EngineParts(scheduler=earlier), policy, **settings) == (texts, plans, preemptions)


def test_it_refuses_what_the_engines_own_refuses():
    for wrong in (
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": 9, "max_num_batched_tokens": 8},
        {"max_num_seqs": 0},
        {"long_prefill_token_threshold": -1},
        {"policy": "random"},
    ):
        for scheduler in (Scheduler, own_parts()["scheduler"]):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                LLMEngine(model="toy", parts=EngineParts(scheduler=scheduler), **wrong)


@pytest.mark.slow
def test_course_run_mine_uses_it(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["03-01"], monkeypatch, capsys)
    plain, mine_said = course.run(TEXTS[0]), course.run(TEXTS[0], "--mine")
    assert "scheduler          yours, from lab 03-01" in mine_said
    assert plain.splitlines()[0] == mine_said.splitlines()[0]
