"""Labs 08-01 and 08-03 as parts of the engine: their drafts, their verdicts, the same text."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from course import cli
from course.files import load_module
from course.learning import engine_commands, mine
from course.learning.labs import find_labs
from mini_vllm import LLMEngine, SamplingParams

PHASE = Path(__file__).parent
CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 5,
}
PROMPTS = ["one two three, one two", "def f(x):\n    return x\n\ndef g(x):\n    return", "A block"]


@pytest.fixture(scope="module")
def supplied():
    labs = find_labs(PHASE.parent)
    chosen = [lab for lab in labs if lab.id in ("08-01", "08-03")]
    parts, owners = mine.parts_of(chosen, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {
        "drafter": "08-01",
        "verifier": "08-03",
    }
    return parts


def texts(engine, temperature=0.0):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=3)
    return [result.outputs[0].token_ids for result in engine.generate(PROMPTS, params)]


@pytest.mark.slow
def test_the_engine_says_the_same_with_the_labs_drafter(supplied):
    plain = texts(LLMEngine(dtype="float64"))
    engine = LLMEngine(
        dtype="float64",
        speculative_config=CONFIG,
        parts=mine.engine_parts({"drafter": supplied["drafter"]}),
    )
    assert texts(engine) == plain
    stats = engine.feature("spec_decode").stats
    assert stats.num_accepted_tokens >= 5, "the run accepts drafts of the lab"


@pytest.mark.slow
def test_the_labs_verifier_judges_every_draft_of_a_sampled_text(supplied, monkeypatch):
    """Its function is asked about every draft up to the first that is replaced."""
    module, asked = supplied["verifier"], []
    real = module.speculative_token

    def watched(p, q, rng):
        token, kept = real(p, q, rng)
        asked.append((int(q.argmax()), token, kept))
        return token, kept

    monkeypatch.setattr(module, "speculative_token", watched)
    engine = LLMEngine(
        dtype="float64", speculative_config=CONFIG, parts=mine.engine_parts({"verifier": module})
    )
    texts(engine, temperature=0.9)
    stats = engine.feature("spec_decode").stats
    assert sum(kept for _, _, kept in asked) == stats.num_accepted_tokens > 0
    assert all((draft == token) == kept for draft, token, kept in asked)
    assert len(asked) <= stats.num_draft_tokens


@pytest.mark.slow
def test_course_run_mine_drafts_and_verifies_with_the_learners_labs(tmp_path, monkeypatch, capsys):
    """A course of these two labs, both solved: `course run --mine` grades and uses them."""
    root = tmp_path / "course"
    root.mkdir()
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(PHASE.parent / name, root)
    for lab in find_labs(PHASE.parent):
        if lab.id in ("08-01", "08-03"):
            folder = root / PHASE.name / "labs" / lab.folder.name
            shutil.copytree(lab.folder, folder)
            shutil.copy(lab.solution, folder / "starter.py")
    monkeypatch.chdir(root)
    monkeypatch.delenv("COURSE_ROOT", raising=False)

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["course", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().out

    prompt, count = "one two three, one two", ["--max-tokens", "24"]
    plain, own = said("run", *count, prompt), said("run", "--mine", *count, prompt)
    assert "drafter            yours, from lab 08-01" in own
    assert "verifier           yours, not called here" in own and "--temperature 1" in own
    drawn = said("run", "--mine", "--temperature", "1", *count, prompt)
    assert "verifier           yours, from lab 08-03" in drawn
    assert "draft tokens accepted in" in own
    text = plain.partition("\n\n")[0]
    assert text.startswith(prompt) and len(text) > len(prompt)
    assert text in own, "drafts change no text"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [(), ("--drafts", "0")], ids=["drafts", "none"])
def test_a_scheduler_that_plans_no_drafts_rests_while_there_are_any(
    supplied, monkeypatch, capsys, drafts
):
    labs = {lab.id: lab for lab in find_labs(PHASE.parent)}
    owners = {"drafter": labs["08-01"], "scheduler": labs["03-01"]}
    scheduler = load_module(labs["03-01"].solution).Scheduler
    parts = {"drafter": supplied["drafter"], "scheduler": scheduler}
    monkeypatch.setattr(engine_commands, "own_parts", lambda *_: (dict(parts), dict(owners)))
    monkeypatch.setattr(sys, "argv", ["course", "run", "--mine", *drafts, "one two one two one"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().out
    assert not end.value.code, said
    assert ("cannot plan drafts" in said) == (not drafts)
    assert ("draft tokens accepted in" in said) == (not drafts)
