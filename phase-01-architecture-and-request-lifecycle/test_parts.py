"""Labs 01-03 and 01-05 as parts: the engine runs by the lab's step and ends by its stop check."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import LLM, EngineParts, LLMEngine, RequestStatus, SamplingParams
from mini_vllm.lora.request import LoRARequest
from mini_vllm.models.loader import MODELS
from mini_vllm.observe.trace import traced_steps
from mini_vllm.structured_output import StructuredOutputsParams

PHASE = Path(__file__).parent
WISHES = (
    SamplingParams(max_tokens=5), SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=14, stop_token_ids=(32, 46)),
    SamplingParams(max_tokens=14, stop_token_ids=(32,), min_tokens=10),
    SamplingParams(max_tokens=8, ignore_eos=True), SamplingParams(max_tokens=9, stop=("e",)),
)  # fmt: skip


@pytest.fixture
def supplied():
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id.startswith("01-")]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {
        "step": "01-03",
        "stop_check": "01-05",
    }
    return parts


def served(parts, knobs, params, **options):
    """What each of three requests said and why it ended, and every step."""
    knobs = {"dtype": "float64", "max_num_seqs": 2, "max_num_batched_tokens": 16, **knobs}
    with LLM(parts=parts, **knobs) as llm:
        engine = llm.llm_engine
        for name, text in {"a": "A block is", "b": "The scheduler plans a", "c": "To"}.items():
            engine.add_request(text, params, request_id=name, **options)
        requests = dict(engine.requests)
        steps = [record.to_json() for record in traced_steps(engine)]
    ended = [
        (r.output_token_ids, r.finish_reason, r.stop_reason, r.logprobs) for r in requests.values()
    ]
    return ended, steps


SHOUT = LoRARequest("shout", 1, str(MODELS / "adapters" / "shout"))
PATTERN = SamplingParams(max_tokens=6, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
DRAWN = SamplingParams(
    max_tokens=6, temperature=0.9, seed=4, min_tokens=3, repetition_penalty=1.2, logprobs=1,
    prompt_logprobs=1,
)  # fmt: skip
MORE = [
    ({}, PATTERN, {}),
    ({"enable_lora": True}, SamplingParams(max_tokens=6), {"lora_request": SHOUT}),
    *(
        (knobs, SamplingParams(max_tokens=6), {})
        for knobs in (
            {"tensor_parallel_size": 2}, {"compilation_config": {"cudagraph_mode": "FULL"}},
            {"model": "byte-moe"}, {"model": "byte-window"}, {"model": "byte-sees"},
            {"model": "byte-state", "max_num_batched_tokens": 64},
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "params", "options"),
    [
        ({"num_blocks": 5, "block_size": 8}, SamplingParams(max_tokens=8, stop=("e",)), {}),
        ({}, DRAWN, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
)  # fmt: skip
def test_the_labs_step_takes_every_step_that_the_engine_takes(supplied, knobs, params, options):
    calls = mine.counted(supplied)
    parts = mine.engine_parts({"step": supplied["step"]})
    own, theirs = (served(each, knobs, params, **options) for each in (parts, EngineParts()))
    assert own == theirs
    assert calls["step"] == len(own[1])


class _Broken:
    """A model whose second row is NaN where there are two."""

    def __init__(self, model):
        self.model = model

    def forward(self, batch):
        logits = self.model.forward(batch).astype(float)
        logits[1:] = float("nan")
        return logits


def test_a_request_whose_row_is_nan_ends_and_the_others_go_on(supplied):
    def ended(parts):
        engine = LLMEngine("toy", parts=parts)
        engine.model = _Broken(engine.model)
        for name in "ab":
            engine.add_request("hi", SamplingParams(max_tokens=3), request_id=name)
        requests = dict(engine.requests)
        while engine.has_unfinished_requests():
            engine.step()
        return {n: (r.output_token_ids, r.finish_reason) for n, r in requests.items()}

    own = ended(mine.engine_parts({"step": supplied["step"]}))
    assert own == ended(EngineParts())
    assert own["b"] == ([], "error") and own["a"][1] == "length"


def _twice(scheduler, runner, sampler):
    scheduler.schedule()
    scheduler.schedule()


def _unbound(scheduler, runner, sampler):
    runner.execute(scheduler.schedule())


def _sampled(change):
    def step(scheduler, runner, sampler):
        plan = scheduler.schedule()
        plan.bind(scheduler.kv)
        rows = runner.execute(plan)
        sampled = {}
        for request, row in zip(plan.scheduled_requests, rows, strict=True):
            sampled[request.request_id] = [sampler.sample(*change(row, request.sampling_params))]
        return scheduler.update_from_output(plan, sampled)

    return step


def _forgets(scheduler, runner, sampler):
    plan = scheduler.schedule()
    plan.bind(scheduler.kv)
    runner.execute(plan)
    return scheduler.update_from_output(plan, {})


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (_twice, r"called scheduler.schedule\(\) twice"),
        (_unbound, "need this step's plan, bound"),
        (_sampled(lambda row, params: (row.copy(), params)), "returned, not a copy"),
        (_sampled(lambda row, params: (row, SamplingParams())), "with other parameters"),
        (_sampled(lambda row, params: (row, params)), "which has not caught up"),
        (_forgets, "need the token of every request"),
        (lambda *given: [], "made no plan"),
        (lambda scheduler, *given: scheduler.schedule() and [], "without running the plan"),
    ],
)  # fmt: skip
def test_a_step_that_the_engine_cannot_use_is_refused_as_the_parts(step, word):
    with pytest.raises(RuntimeError, match=f"step part: .*{word}"):
        served(mine.engine_parts({"step": step}), {"model": "toy"}, SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    "knobs",
    [
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ],
)
def test_a_step_that_waits_for_its_tokens_does_not_plan_ahead_of_them(supplied, knobs):
    with pytest.raises(
        ValueError, match=r"parts\.step=.*need no async_scheduling, stages or drafts"
    ):
        LLMEngine(shipped_model(), parts=mine.engine_parts(supplied), **knobs)


def ends(**parts):
    """Tokens, finish reason and stop reason of each wish, and the model's length for one more."""
    engine = LLMEngine(shipped_model(), parts=mine.engine_parts(parts), max_model_len=24)
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


@pytest.mark.slow
def test_requests_end_where_and_why_the_engines_own_check_ends_them(supplied):
    del supplied["step"]
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
def test_course_run_mine_takes_both(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["01-03", "01-05"], monkeypatch, capsys)
    said = course.run("A", "--mine")
    assert "step               yours, from lab 01-03: 12 calls" in said
    assert "stop_check         yours, from lab 01-05: 12 calls" in said
    said = course.run("A", "--mine", "--drafts", "2")
    assert "Your step from lab 01-03 takes one token a row, so the engine's own runs" in said
    assert "step               yours, rests here" in said
