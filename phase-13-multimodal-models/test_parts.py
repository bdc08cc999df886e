"""Lab 13-03 as a part of the engine: its gate, the same answers; and what recorders say again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from conformance.features.multimodal import first_token, frees, spins
from conformance.real_core import why_not
from course.learning import mine
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from labkit.pictures import single_question
from mini_vllm import LLM, EngineParts, SamplingParams

PHASE = Path(__file__).parent
LABS = PHASE / "labs"


@pytest.fixture(scope="module")
def supplied():
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id.startswith("13-")]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {"encoder_gate": "13-03"}
    return parts


def answers(parts):
    rng = np.random.default_rng(5)
    turns = [single_question(rng, "what") for _ in range(4)]
    llm = LLM(
        "byte-sees", parts=parts, num_blocks=200, block_size=4, max_num_batched_tokens=40,
        max_num_encoder_input_tokens=64, encoder_cache_size=64,
    )  # fmt: skip
    asked = [
        {"prompt": f"<image>{t.question.text}\n", "multi_modal_data": {"image": t.pictures[0]}}
        for t in (*turns, turns[0])
    ]
    outputs = llm.generate(asked, SamplingParams(max_tokens=20))
    return [o.outputs[0].token_ids for o in outputs], llm.llm_engine.feature("multimodal")


@pytest.mark.slow
def test_the_engine_says_the_same_with_the_labs_gate(supplied):
    own, _ = answers(EngineParts())
    theirs, room = answers(mine.engine_parts(supplied))
    assert own == theirs
    assert type(room.gate) is supplied["encoder_gate"]


def test_course_run_mine_takes_it(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["13-03"], monkeypatch, capsys)
    said = course.run("what is this?", "--mine", "--model", "byte-sees")
    assert "yours, from lab 13-03" in said, said


@pytest.mark.slow
def test_a_scheduler_without_gates_rests_where_the_model_sees(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["03-01"], monkeypatch, capsys)
    said = course.run("what is this?", "--mine", "--model", "byte-sees")
    assert (
        "has no parameter gates, so the engine's own runs; without --model byte-sees yours" in said
    )


# --- the labs' recordings are what the recorders say today ----------------------------------------


def lines(lab, name):
    with gzip.open(next(LABS.glob(f"lab-{lab}-*")) / "recordings" / f"{name}.jsonl.gz", "rt") as f:
        return [json.loads(line) for line in f]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_the_pin_says_again_what_the_labs_keep():
    for case in lines("05", "spins")[:60]:
        given = {key: value for key, value in case.items() if key != "releases"}
        assert spins.chunks("0.22.1", given) == case["releases"]["0.22.1"]
    for case in lines("04", "first_token")[:20]:
        assert first_token.steps(case) == case["steps"]
    kept = [line for line in lines("06", "frees") if line["release"] == "0.22.1"]
    for line in kept[:40]:
        for kind, make in (("story", frees.story), ("released", frees.released)):
            if kind in line:
                assert json.loads(json.dumps(make("0.22.1", line[kind]["seed"]))) == line[kind]


def test_both_labs_keep_the_same_answers_of_the_processors():
    assert lines("02", "processors") == lines("04", "processors")
