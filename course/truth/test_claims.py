"""What is said of vLLM without a source or a scope is listed, and the rest is not."""

from __future__ import annotations

import pytest

from course.truth import claims


@pytest.mark.parametrize(
    "sentence",
    ["vLLM launches the kernel twice a layer.", "- vLLM never merges equal blocks",
     "| order | vLLM takes the last of `running` |", "First a rule. Then vLLM also\nprints it."],
)  # fmt: skip
def test_a_bare_sentence_is_listed(sentence: str) -> None:
    assert len(claims.unbounded(sentence)) == 1


@pytest.mark.parametrize(
    "sentence",
    [
        "At the pin vLLM launches the kernel twice a layer.",
        "On an H100 vLLM launches it twice.",
        "Without the flag vLLM slices each expert.",
        "vLLM pads to the next rung (`vllm/v1/worker/gpu_model_runner.py:3917-3919` `X`).",
        "vLLM reads it ([guide](00-guide.md)).",
        "GPTQ in vLLM means the format.",
        "```text\nvLLM starts\n```",
    ],
)
def test_one_with_a_source_or_a_scope_or_in_code_is_not(sentence: str) -> None:
    assert claims.unbounded(sentence) == []
