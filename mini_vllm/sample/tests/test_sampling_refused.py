"""Parameters of phase 09 that are refused, where they enter, by name and bound."""

from __future__ import annotations

import math

import pytest

from mini_vllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=512)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n=0: need 1 to 16384"),
        ({"n": 2}, "n=2: need 1 with temperature=0.0"),
        ({"n": 1.5}, "n=1.5: need an int"),
        ({"presence_penalty": 2.1}, r"presence_penalty=2.1: need a value in \[-2, 2\]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan: need a finite number"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: need more than 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf: need a finite number"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=-1: need token ids"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\]=inf: need a finite number"),
        ({"logit_bias": [1]}, r"logit_bias=\[1\]: need token ids and numbers"),
        ({"allowed_token_ids": []}, r"allowed_token_ids=\(\): need at least one"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids=1.0: need an int"),
        ({"bad_words": [""]}, r"bad_words=\[''\]: need texts that are not empty"),
        ({"bad_words": [1]}, r"bad_words=\[1\]: need a text or a list of texts"),
        ({"stop": ""}, "stop='': need texts that are not empty"),
        ({"stop": {"a": 1}}, "stop=.*: need a text or a list of texts"),
        ({"logprobs": -2}, "logprobs=-2: need 0 or more, -1"),
        ({"prompt_logprobs": "x"}, "prompt_logprobs='x': need an int"),
    ],
)
def test_sampling_params_refuse(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {257: 1.0}}, "logit_bias holds token id 257: need ids from 0 to 256"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids holds token id 300: need ids from 0"),
        ({"logprobs": 21}, "logprobs=21: need at most max_logprobs=20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1: need at most max_logprobs=20"),
        ({"bad_words": ["  "]}, "bad_words holds '  ': it has no token"),
    ],
)
def test_an_engine_refuses_and_stays_as_it_was(llm, fields, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**fields)])
    assert not llm.llm_engine.requests


def test_drafts_refuse_what_upstream_refuses_with_them():
    llm = LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(ValueError, match="logit_bias: need None with speculative_config"):
        llm.generate(["a"], SamplingParams(logit_bias={1: 1.0}))


def test_prompt_logprobs_without_computing_the_prompt_are_refused():
    with pytest.raises(ValueError, match="skip_reading_prefix_cache=False: need"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


def test_streaming_takes_one_completion(llm):
    with pytest.raises(ValueError, match="n=2: need 1 to stream"):
        list(llm.stream("a", SamplingParams(temperature=1.0, n=2)))


def test_greedy_switches_the_filters_off():
    made = SamplingParams(top_k=5, top_p=0.5, min_p=0.2, seed=-1)
    assert (made.top_k, made.top_p, made.min_p, made.seed) == (0, 1.0, 0.0, None)
