"""The mini engine drafts and keeps what the real one did in the captured run, batch 1."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from course.files import load_module
from mini_vllm import LLM, SamplingParams

LAB = Path(__file__).parent / "labs" / "lab-02-eagle-on-real-vllm"
REPEAT, MAX_TOKENS = 3, 96
COUNTED = re.compile(
    r"^(\w+), batch 1: .*\n.*\n   drafts (\d+), draft tokens (\d+), accepted (\d+);", re.MULTILINE
)


def captured() -> dict[int, dict[str, tuple[int, ...]]]:
    """(drafts, draft tokens, accepted) of one generation, by k and kind of text."""
    output = json.loads((LAB / "captured" / "cpu.json").read_text(encoding="utf-8"))["output"]
    found = {}
    for part in output.split("=== ")[2:]:
        config = json.loads(part.splitlines()[0])
        found[config["num_speculative_tokens"]] = {
            kind: tuple(int(number) // REPEAT for number in numbers)
            for kind, *numbers in COUNTED.findall(part)
        }
    return found


@pytest.fixture(scope="module")
def texts():
    return load_module(LAB / "run.py").TEXTS


@pytest.mark.parametrize("k", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_the_counters_are_the_real_engines(texts, k):
    config = {"method": "ngram", "num_speculative_tokens": k}
    config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
    expected = captured()[k]
    assert sorted(expected) == ["code", "copy", "prose"]
    for kind, numbers in expected.items():
        llm = LLM(speculative_config=config)
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        llm.generate([texts[kind].format(n=0)], params)
        stats = llm.llm_engine.feature("spec_decode").stats
        got = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
        assert got == numbers, f"{kind}, k {k}: drafts, draft tokens, accepted"
