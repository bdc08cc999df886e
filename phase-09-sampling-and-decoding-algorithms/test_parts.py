"""Lab 09-01 as a part of the engine: the same texts at the same seeds; `course run --mine`."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams

PHASE = Path(__file__).parent
PROMPTS = ["The KV cache is", "A block", "def f(x):", "one two three"]
WISHES = [
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.005, "min_p": 0.5},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_the_engine_says_the_same_with_the_labs_sampler(seed):
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id in ("00-03", "09-01")]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {"sampler": "09-01"}
    asked, sampler = [], parts["sampler"]

    class Watched(sampler):
        def sample(self, logits, params, rng=None):
            asked.append(params.temperature)
            return super().sample(logits, params, rng)

    texts = []
    for engine_parts in (EngineParts(), EngineParts(sampler=Watched)):
        engine = LLMEngine(shipped_model(), parts=engine_parts, max_num_seqs=3)
        wishes = [SamplingParams(**w, seed=seed, max_tokens=20, ignore_eos=True) for w in WISHES]
        texts.append([r.outputs[0].token_ids for r in engine.generate(PROMPTS, wishes)])
    assert texts[0] == texts[1]
    assert len(asked) == 4 * 20, "every token was drawn by the lab's sampler"


@pytest.mark.slow
def test_course_run_mine_draws_with_the_learners_sampler(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["09-01"], monkeypatch, capsys)
    for options in (("--temperature", "0.9", "--seed", "4"), ()):
        plain = course.run("The scheduler", *options)
        own = course.run("The scheduler", "--mine", *options)
        assert "sampler            yours, from lab 09-01" in own
        text = plain.partition("\n\n")[0]
        assert text.startswith("The scheduler") and text in own
