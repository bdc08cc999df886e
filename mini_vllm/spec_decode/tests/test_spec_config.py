"""Who drafts: the lookup's rule, the keys of `speculative_config`, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mini_vllm import LLM, EngineParts, LLMEngine, SamplingParams
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.spec_decode.config import SpeculativeConfig
from mini_vllm.spec_decode.ngram import ngram_propose
from mini_vllm.spec_decode.tests.test_spec_decode import DRAFT, NGRAM


@pytest.mark.parametrize(
    ("context", "bounds", "drafts"),
    [
        ([1, 2, 3, 4, 1, 2, 3], (2, 2, 3), [4, 1, 2]),
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], (3, 3, 2), [100, 1]),
        ([7, 7, 7, 7], (2, 2, 3), [7, 7]),
        ([1, 2, 3], (1, 4, 3), []),
        ([5, 1, 5, 2, 5], (1, 3, 2), [1, 5]),
    ],
)
def test_the_lookup_takes_the_longest_match_and_of_those_the_earliest(context, bounds, drafts):
    assert ngram_propose(np.array(context), *bounds) == drafts


def test_lookup_lengths_default_to_each_other_and_to_five():
    def lookup(**given):
        return SpeculativeConfig.of({"method": "ngram", "num_speculative_tokens": 2} | given).lookup

    assert lookup() == (5, 5)
    assert lookup(prompt_lookup_min=3) == (3, 3)
    assert lookup(prompt_lookup_max=2) == (2, 2)


REFUSED = [
    ([], "speculative_config="),
    ({"method": "ngram"}, "num_speculative_tokens is missing"),
    ({"num_speculative_tokens": 2}, "method=None: need one of ngram, ngram_gpu, draft_model, mtp"),
    ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens=0: need 1 to 128"),
    ({**NGRAM, "num_speculative_tokens": 129}, "num_speculative_tokens=129"),
    ({**NGRAM, "num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5"),
    ({**NGRAM, "method": "eagle"}, "method='eagle': need one of"),
    ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min=0"),
    ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "at most prompt_lookup_max=2"),
    ({**NGRAM, "disable_padded_drafter_batch": True}, "'disable_padded_drafter_batch' is not supp"),
    ({**NGRAM, "rejection_sample_method": "synthetic"}, "'rejection_sample_method' is not supp"),
    ({**NGRAM, "model": "byte-llama"}, "model='byte-llama': method ngram has no model"),
    ({**NGRAM, "draft_sample_method": "probabilistic"}, "only for method draft_model"),
    ({"method": "draft_model", "num_speculative_tokens": 2}, "model=None: method draft_model"),
    ({**DRAFT, "prompt_lookup_min": 2}, "prompt_lookup_min=2: only for method ngram"),
    ({**DRAFT, "draft_sample_method": "best"}, "draft_sample_method='best'"),
    ({**DRAFT, "model": 7}, "model=7"),
    ({**DRAFT, "max_model_len": 1}, "max_model_len=1: need"),
    ({**NGRAM, "max_model_len": 64}, "max_model_len=64: only for method draft_model or mtp"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_wrong_speculative_config_is_refused_by_name(config, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LLM("toy", speculative_config=config)


def test_what_does_not_go_together_is_refused_by_name():
    def words(match, **knobs):
        with pytest.raises(ValueError, match=match):
            LLM(knobs.pop("model", "toy"), **knobs)

    words("num_speculative_tokens=2: need speculative_config", num_speculative_tokens=2)
    words("num_lookahead_tokens=7: need speculative_config", num_lookahead_tokens=7)
    words("use_eagle=True: need speculative_config", use_eagle=True)
    words("async_scheduling=True needs", speculative_config=NGRAM, async_scheduling=True)
    words("257 tokens, need the target's 300", speculative_config=DRAFT, model=_larger_vocabulary())
    words("max_model_len=99: need at most 64", speculative_config={**DRAFT, "max_model_len": 99},
          max_model_len=64)  # fmt: skip
    few = {"max_num_batched_tokens": 10, "max_num_seqs": 8}
    words("twice max_num_seqs=8", speculative_config=DRAFT, **few)
    parts = EngineParts(rooms={"spec_decode": {"drafter": lambda context, n, k: []}})
    words("method='draft_model': need method='ngram'", speculative_config=DRAFT, parts=parts)


def _larger_vocabulary() -> Transformer:
    config = ModelConfig(300, 16, 24, 1, 2, 1, 8, 128)
    weights = {n: np.ones(s) for n, s in expected_shapes(config).items()}
    return Transformer(config, weights, "float64")


def test_min_p_is_refused_with_drafts_and_changes_nothing():
    engine = LLMEngine("toy", speculative_config=NGRAM)
    with pytest.raises(ValueError, match=r"min_p=0.1: need 0.0 with speculative_config"):
        engine.add_request([1, 2], SamplingParams(temperature=1.0, min_p=0.1))
    assert not engine.requests and not engine.row_sampler.generators


def test_running_requests_are_not_reset_under_drafts_in_flight():
    engine = LLMEngine("toy", speculative_config={**NGRAM, "method": "ngram_gpu"},
                       async_scheduling=True)  # fmt: skip
    with pytest.raises(ValueError, match="reset_running_requests=True"):
        engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.reset_prefix_cache()


@pytest.mark.parametrize("drafts", [[1] * 4, [300], ["a"]])
def test_a_drafter_part_that_says_too_much_is_named(drafts):
    parts = EngineParts(rooms={"spec_decode": {"drafter": lambda context, n, k: drafts}})
    engine = LLMEngine("toy", speculative_config=NGRAM, parts=parts)
    with pytest.raises(RuntimeError, match="drafter part"):
        engine.generate([[1, 2, 1]], SamplingParams(max_tokens=4))
    assert not engine.requests
