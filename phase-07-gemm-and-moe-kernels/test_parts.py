"""Lab 07-01 as a part of the engine: the same tokens; `course run --mine` with a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.features.moe.texts import random_checkpoint
from course.files import load_module
from course.learning import mine
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams

PHASE = Path(__file__).parent
SOLUTION = PHASE / "labs" / "lab-01-moe-routing" / "solution.py"
PROMPTS = ["A router picks", "two experts", "for every token of a step"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_the_engine_says_the_same_on_the_labs_experts(tmp_path, name):
    folder, calls = random_checkpoint(name, tmp_path), []
    forward = load_module(SOLUTION).moe_forward_grouped

    def watched(x, experts, topk_ids, topk_weights):
        calls.append(len(x))
        return forward(x, experts, topk_ids, topk_weights)

    texts = []
    for parts in (EngineParts(), EngineParts(rooms={"models": {"experts": watched}})):
        engine = LLMEngine(
            folder, parts=parts, dtype="float64", num_blocks=12, block_size=8, max_num_seqs=3,
            max_num_batched_tokens=16,
        )  # fmt: skip
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        texts.append([r.outputs[0].token_ids for r in engine.generate(PROMPTS, params)])
    assert texts[0] == texts[1]
    assert len(calls) > 30 and max(calls) > 3 > min(calls), "chunks and decode steps ran on it"


def test_the_manifest_supplies_the_part():
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id == "07-01"]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {"experts": "07-01"}
    assert [part.__name__ for part in parts.values()] == ["moe_forward_grouped"]


@pytest.mark.slow
def test_course_run_mine_serves_a_model_with_experts(tmp_path, monkeypatch, capsys):
    model = random_checkpoint("qwen3-moe", tmp_path / "model")
    (tmp_path / "course").mkdir()
    course = PassedCourse(tmp_path / "course", ["07-01"], monkeypatch, capsys)
    plain = course.run("The experts", "--model", str(model))
    mine_said = course.run("The experts", "--mine", "--model", str(model))
    assert "experts            yours, from lab 07-01" in mine_said
    text = plain.partition("\n\n")[0]
    assert text.startswith("The experts") and text in mine_said
