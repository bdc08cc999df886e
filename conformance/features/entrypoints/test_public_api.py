"""One script on both engines: what vLLM answered and refused, mini_vllm answers and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import recording
from conformance.features.entrypoints import public_api
from mini_vllm import LLM, SamplingParams

REAL = recording.lines(public_api.RECORDED)[0]
INSIDE = "ends inside a character"


@pytest.fixture(scope="module")
def mini() -> dict[str, Any]:
    return public_api.run_script(LLM, SamplingParams)


@pytest.mark.parametrize("name", [name for name in public_api.ACCEPTED if name != INSIDE])
def test_the_answer_is_vllms(mini, name):
    assert mini["answers"][name] == REAL["answers"][name]


def test_every_way_to_end_occurs():
    ends = [(a["finish_reason"], 256 in a["token_ids"]) for a in REAL["answers"].values()]
    assert {("stop", True), ("stop", False), ("length", False), ("length", True)} <= set(ends)


def test_a_prompt_that_ends_inside_a_character_is_the_one_difference(mini):
    """vLLM's stream of decoded text begins in the prompt and here gives the prompt back as well."""
    real, ours = REAL["answers"][INSIDE], mini["answers"][INSIDE]
    prompt, tokens = bytes(real["prompt_token_ids"]), bytes(real["token_ids"])
    assert ours == {**real, "text": tokens.decode(errors="replace")}
    assert real["text"] == (prompt + tokens).decode()


@pytest.mark.parametrize("name", public_api.REFUSED)
def test_what_vllm_refuses_is_refused_with_a_value_error(mini, name):
    assert REAL["refusals"][name]["error"] in ("ValueError", "VLLMValidationError")
    assert mini["refusals"][name]["error"] == "ValueError"
