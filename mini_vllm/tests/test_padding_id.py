"""The id just behind a byte vocabulary: upstream serves it by a row of zeros, and so do we."""

from __future__ import annotations

import pytest

from mini_vllm import LLM, SamplingParams

PROMPTS = [[104, 101, 257, 108, 111], [257], [100, 101, 102, 32, 257, 257, 40]]
SAID = {
    (): [
        b"st of the same shape as ",
        bytes([0, 142]) + " | ✅".encode(),
        b") and the same shape as ",
    ],
    ("repetition_penalty", 1.3): [b"st index are computed.\n\n", bytes([0, 142]) + b" |\n| `LoRA",
                                  b")\n\n_get_compilation_str"],
    ("presence_penalty", 1.0): [b"st of the compiled modul", bytes([0, 142]) + b" |\n| `LoRA",
                                b") and the\n" + b" " * 14],
}  # fmt: skip
"""The first bytes of vLLM 0.22.1 itself: CPU build, float32, eager, greedy, `ignore_eos`."""


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("byte-llama")


@pytest.mark.slow
@pytest.mark.parametrize("wish", SAID)
def test_it_is_served_as_upstream_serves_it(llm, wish):
    options = dict([wish]) if wish else {}
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, **options)
    for output, said in zip(llm.generate(PROMPTS, params), SAID[wish], strict=True):
        assert bytes(output.outputs[0].token_ids[: len(said)]) == said


@pytest.mark.parametrize(
    ("prompt", "options", "last"),
    [([258], {}, 257), ([-1], {}, 257), ([257], {"prompt_logprobs": 1}, 256)],
)
def test_what_has_no_row_and_no_probability_is_refused(llm, prompt, options, last):
    with pytest.raises(ValueError, match=f"token id {prompt[0]}: need integers from 0 to {last}"):
        llm.generate([prompt], SamplingParams(max_tokens=1, **options))


def test_a_drafter_is_not_given_it():
    drafting = LLM(
        "byte-llama", speculative_config={"method": "ngram", "num_speculative_tokens": 2}
    )
    with pytest.raises(ValueError, match="from 0 to 256"):
        drafting.generate([[257]], SamplingParams(max_tokens=1))


def test_a_model_without_padding_has_no_such_id():
    with pytest.raises(ValueError, match="from 0 to 256"):
        LLM("toy").generate([[257]], SamplingParams(max_tokens=1))
