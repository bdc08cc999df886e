"""Labs 12-01 and 12-04 as parts of the engine: masks and gate of the labs, the same texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.structured_output import StructuredOutputsParams

PHASE = Path(__file__).parent
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "who": {"enum": ["red", "green"]}},
    "required": ["ok", "who"],
}
ASKED = (
    {"regex": "0x[0-9a-f]{2,6}"}, None, {"choice": ("yes", "no", "naïve")}, {"json": SCHEMA},
    {"grammar": 'root ::= "[" (root ("," root)*)? "]"'}, None,
)  # fmt: skip


@pytest.fixture(scope="module")
def supplied():
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id.startswith("12-")]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {
        "token_masks": "12-01",
        "wait_gate": "12-04",
    }
    return parts


def texts(parts):
    engine = LLMEngine(
        shipped_model(), parts=parts, max_num_seqs=4,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )  # fmt: skip
    for place, asked in enumerate(ASKED):
        wanted = StructuredOutputsParams(**asked) if asked else None
        params = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=wanted)
        engine.add_request("A block is ", params, request_id=f"r{place}")
    requests = dict(engine.requests)
    while engine.has_unfinished_requests():
        engine.step()
    return [list(request.output_token_ids) for request in requests.values()]


@pytest.mark.slow
def test_the_engine_says_the_same_with_the_labs_masks_and_gate(supplied):
    asked = []

    def watched(table, state, vocab):
        asked.append(state)
        return supplied["token_masks"](table, state, vocab)

    own = texts(mine.engine_parts(supplied | {"token_masks": watched}))
    assert own == texts(EngineParts())
    assert len(asked) > 20, "every mask was the lab's"
    assert len(asked) == len(set(map(id, asked))), "one for each state"
    assert re.fullmatch(rb"0x[0-9a-f]{2,6}", bytes(token for token in own[0] if token < 256))


@pytest.mark.slow
def test_course_run_mine_takes_both(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["12-01", "12-04"], monkeypatch, capsys)
    said = course.run("The address is ", "--mine", "--regex", "0x[0-9a-f]{4}")
    assert "yours, from lab 12-01" in said and "yours, from lab 12-04" in said
    assert re.search(r"The address is 0x[0-9a-f]{4}\n", said), said


def test_a_scheduler_without_gates_rests_where_there_is_a_pattern(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["03-01"], monkeypatch, capsys)
    said = course.run("The address is ", "--mine", "--regex", "0x[0-9a-f]{4}")
    assert "has no parameter gates, so the engine's own runs; without --regex yours runs" in said
    assert re.search(r"The address is 0x[0-9a-f]{4}\n", said), said
