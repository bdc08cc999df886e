"""What clients may send of a sampler's knobs reaches the sampler, whichever way it comes."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("pydantic", reason="needs the extra 'serve'")
pytest.importorskip("msgspec", reason="needs the extra 'core'")

from mini_vllm.entrypoints import wire
from mini_vllm.entrypoints.openai.protocol import CompletionRequest, Generation
from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from mini_vllm.sampling_params import (
    CHECKPOINT_KNOBS,
    KNOBS,
    RepetitionDetectionParams,
    SamplingParams,
)

VALUES = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "seed": 11, "max_tokens": 9,
    "min_tokens": 2, "ignore_eos": True, "stop_token_ids": (3, 5), "n": 2, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {3: 1.5},
    "allowed_token_ids": (3, 4), "stop": ("x",), "include_stop_str_in_output": True,
    "logprobs": 4, "prompt_logprobs": 2, "skip_reading_prefix_cache": True, "bad_words": ("y",),
    "logprob_token_ids": (3, 4, 5, 6),
    "repetition_detection": RepetitionDetectionParams(4, 1, 3), "thinking_token_budget": 6,
}  # fmt: skip
"""One that is not the default for each knob."""

CHECKED_ELSEWHERE = {"structured_outputs"}
"""Records of their own."""


def in_json(value):
    """As a client writes it."""
    if isinstance(value, dict):
        return {str(key): each for key, each in value.items()}
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def test_every_knob_has_a_value_that_is_not_its_default():
    assert {*VALUES} == {*KNOBS} - CHECKED_ELSEWHERE
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert not [name for name, value in VALUES.items() if value == defaults[name]]


@pytest.mark.parametrize("name", [n for n in VALUES if n in Generation.model_fields])
def test_a_knob_that_a_client_sends_reaches_the_sampler(name):
    sent = {"prompt": "a", "temperature": 0.5, name: in_json(VALUES[name])}
    params = CompletionRequest.model_validate(sent).sampling_params(9, {})
    assert getattr(params, name) == VALUES[name]


def test_a_chat_may_ban_words_and_a_completion_may_not():
    chat = {"messages": [{"role": "user", "content": "a"}], "bad_words": ["y"]}
    assert ChatCompletionRequest.model_validate(chat).sampling_params(9, {}).bad_words == ("y",)
    completion = CompletionRequest.model_validate({"prompt": "a", "bad_words": ["y"]})
    assert completion.sampling_params(9, {}).bad_words == ()


def test_what_a_client_leaves_out_is_the_checkpoints_and_then_upstreams():
    asked = CompletionRequest.model_validate({"prompt": "a", "min_p": 0.2})
    params = asked.sampling_params(9, {"min_p": 0.5, "top_k": 3})
    assert (params.min_p, params.top_k, params.top_p) == (0.2, 3, CHECKPOINT_KNOBS["top_p"])


@pytest.mark.parametrize("name", sorted(wire._KNOWN))
def test_a_knob_that_vllms_front_end_sends_reaches_the_sampler(name):
    params = wire.sampling_params({"temperature": 0.5, name: in_json(VALUES[name])})
    assert getattr(params, name) == VALUES[name]
