"""Adapters of the embedding and of the head: against peft, and what must not change them.

`conformance/features/lora/test_embeddings.py` has the pinned layers beside ours.
"""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest
from safetensors.numpy import load_file

from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.lora.layers import LoRAEmbedding, Step
from mini_vllm.lora.request import LoRARequest
from mini_vllm.models.tests.test_parity import (
    float64_inside,
    load_theirs,
    random_prompts,
    save_model,
)
from mini_vllm.models.transformer import embedded
from mini_vllm.tests.lora_support import (
    Watching,
    adapters,
    answers,
    merged,
    tiny,
    write_adapter,
)

TOLERANCE = 1e-9
"""On logits of about 10, float64 on both sides: sums differ in their order alone."""
LONG = [(7 * i) % 256 for i in range(60)]


# ------------------------------------------------------------------ peft

SAVED = {
    "both": {"target_modules": ["embed_tokens", "lm_head", "q_proj", "o_proj"]},
    "embedding": {"target_modules": ["embed_tokens"], "use_rslora": True},
    "head": {"target_modules": ["lm_head"]},
}
TIED = {"tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}}
"""peft shares both matrices then, and writes them under both names."""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "llama tied", "qwen3", "qwen3 tied", "qwen3 moe", "mixtral"]
)
def test_folders_that_peft_saves_give_the_logits_and_tokens_of_peft(family, tmp_path):
    """Each in one batch with the base and the others; no slot to spare."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed: pip install -e '.[torch]'")
    import peft
    import torch

    base = save_model(tmp_path / "base", family)
    settings = SAVED | (TIED if "tied" in family else {})
    wanted: list[LoRARequest | None] = [None]
    for number, (name, options) in enumerate(settings.items(), start=1):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=3 + number, lora_alpha=7, init_lora_weights=False, **options)
        made = peft.get_peft_model(load_theirs(base), config)
        with torch.no_grad():
            for key, parameter in made.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
        made.float().save_pretrained(tmp_path / name)
        wanted.append(LoRARequest(name, number, str(tmp_path / name)))
    held = load_file(tmp_path / "both" / "adapter_model.safetensors")
    assert "base_model.model.lm_head.base_layer.weight" in held, "as real folders have it"
    watching = Watching()
    engine = LLMEngine(
        base, dtype="float64", enable_lora=True, max_loras=len(settings), max_num_batched_tokens=90,
        parts=EngineParts(sampler=lambda: watching),
    )  # fmt: skip
    prompt = random_prompts()[1]
    said = answers(engine, [prompt] * len(wanted), wanted, max_tokens=10)
    assert len({tuple(tokens) for tokens in said}) == len(wanted)
    for request, tokens in zip(wanted, said, strict=True):
        theirs = load_theirs(base)
        if request is not None:
            theirs = peft.PeftModel.from_pretrained(theirs, request.lora_path).double().eval()
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        with torch.no_grad(), float64_inside():
            expected = theirs(ids).logits[0, len(prompt) - 1 :].numpy()
        assert expected.argmax(axis=1).tolist() == tokens
        for row in expected:
            nearest = min(float(np.abs(row - mine).max()) for mine in watching.rows)
            assert nearest < TOLERANCE


# ------------------------------------------------------------------ what goes together


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> list[LoRARequest]:
    """Of both, of the embedding alone, of the head alone, and of linears alone."""
    every = adapters(tmp_path_factory.mktemp("adapters"))
    return [*every[4:7], every[0]]


def test_logprobs_of_a_prompt_are_those_under_its_adapter_beside_others(made):
    """At the pin the head's wrapper has one slot for each request, not for each of these rows."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    prompts = [LONG[i : i + 9 + 4 * i] for i in range(5)]
    mixed = LLMEngine(tiny(), enable_lora=True, max_loras=4)
    results = mixed.generate(prompts, params, lora_request=[*made, None])
    for prompt, adapter, result in zip(prompts, [*made, None], results, strict=True):
        [alone] = LLMEngine(merged(adapter)).generate([prompt], params)
        for ours, theirs in zip(result.prompt_logprobs, alone.prompt_logprobs, strict=True):
            assert (ours is None) == (theirs is None)
            for token in ours or ():
                assert abs(ours[token].logprob - theirs[token].logprob) < TOLERANCE


def test_rows_of_drafts_have_their_requests_adapter(made):
    """Several rows a request; what is verified is what the adapter says, so nothing changes."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    prompts = [LONG[:7] * 3, LONG[:5] * 4, LONG[3:9] * 3, LONG[:8] * 2, LONG[1:6] * 3]
    plain = LLMEngine(tiny(), enable_lora=True, max_loras=4)
    drafted = LLMEngine(tiny(), enable_lora=True, max_loras=4, speculative_config=drafts)
    expected = answers(plain, prompts, [*made, None], max_tokens=24)
    assert answers(drafted, prompts, [*made, None], max_tokens=24) == expected
    assert drafted.feature("spec_decode").stats.num_accepted_tokens > 0


def test_a_token_behind_the_vocabulary_is_padding_under_an_adapter_too(made):
    """At the pin it reads the first row of the next slot, or behind the last one."""
    step = Step(segments=[(0, 2, 0)])
    embedding = LoRAEmbedding(functools.partial(embedded, np.ones((5, 2))), step, 1)
    embedding.slots[0] = np.arange(5.0)[None], np.array([[1.0], [10.0]])
    assert embedding(np.array([4, 5, 4])).tolist() == [[5.0, 41.0], [0.0, 0.0], [1.0, 1.0]]


def test_a_slot_that_a_linear_adapter_takes_over_forgets_embedding_and_head(made):
    lora = LLMEngine(tiny(), enable_lora=True)
    for adapter in (made[0], made[3], made[1], made[2]):
        expected = answers(LLMEngine(merged(adapter)), [LONG[:9]], [None])
        assert answers(lora, [LONG[:9]], [adapter]) == expected
    assert lora.feature("lora").stats()["evictions"] == 3


def test_whole_weights_of_the_base_beside_an_adapters_are_not_loaded(tmp_path):
    """peft writes them where it adapts an embedding; the real loader leaves them out as well."""
    prefix = "base_model.model"
    beside = {
        f"{prefix}.model.embed_tokens.base_layer.weight": np.ones((257, 16)),
        f"{prefix}.lm_head.base_layer.weight": np.ones((257, 16)),
    }
    kind = {"target_modules": ("embed_tokens", "lm_head")}
    paths = [
        write_adapter(tmp_path / "with", seed=4, tensors=beside, **kind),
        write_adapter(tmp_path / "without", seed=4, **kind),
    ]
    said = [
        answers(LLMEngine(tiny(), enable_lora=True), [LONG[:9]], [LoRARequest("a", 1, str(path))])
        for path in paths
    ]
    assert said[0] == said[1]
