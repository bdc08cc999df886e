"""Adapters of experts and routers: each row is the merged model's, whatever shares the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine
from mini_vllm.lora.request import LoRARequest
from mini_vllm.lora.tests.test_lora import workload
from mini_vllm.models.moe import MoeConfig, moe_forward_grouped, observing_routing
from mini_vllm.models.transformer import Transformer
from mini_vllm.tests.lora_support import (
    ALL,
    CONFIG,
    EXPERT_KINDS,
    Watching,
    answers,
    merged,
    weights,
    write_adapter,
)

QWEN = replace(CONFIG, moe=MoeConfig(6, 2, 8, True, frozenset({1})), qk_norm=True)
"""The second layer is dense."""
MIXTRAL = replace(
    CONFIG, architecture="MixtralForCausalLM",
    moe=MoeConfig(4, 2, 8, True, names=("block_sparse_moe", "w1", "w3", "w2")),
)  # fmt: skip
CONFIGS = {"qwen3 moe": QWEN, "mixtral": MIXTRAL}
LONG = [(7 * i) % 256 for i in range(150)]
"""Longer than a tile of the transformer's products; its pairs are more than are computed as few."""
TOLERANCE = 1e-9


def made(folder: Path, config) -> list[LoRARequest]:
    """One of each of `EXPERT_KINDS`."""
    return [
        LoRARequest(f"a{n}", n, str(write_adapter(folder / str(n), n, config, 0.7, **kind)))
        for n, kind in enumerate(EXPERT_KINDS, start=1)
    ]


def watched(model, **knobs) -> tuple[LLMEngine, Watching]:
    watching = Watching()
    return LLMEngine(model, parts=EngineParts(sampler=lambda: watching), **knobs), watching


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_adapted_experts_and_of_none_are_those_of_the_merged_models(name, tmp_path):
    """Mixed batches, chunks, few and many pairs, a router that chooses other experts."""
    config = CONFIGS[name]
    every = made(tmp_path, config)
    wanted = [None, *every, every[0], None]
    prompts = [LONG[i : i + 5 + 17 * i] for i in range(len(wanted))]
    base = Transformer(config, weights(config), "float64")
    lora, rows = watched(base, enable_lora=True, max_loras=5, max_num_batched_tokens=200)
    got = answers(lora, prompts, wanted)
    for prompt, adapter, tokens in zip(prompts, wanted, got, strict=True):
        single, expected = watched(merged(adapter, config), enable_prefix_caching=False)
        assert answers(single, [prompt], [None]) == [tokens]
        for row in expected.rows:
            assert min(np.abs(row - other).max() for other in rows.rows) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_slots_pools_chunks_caches_and_drafts_change_no_answer(seed, tmp_path):
    """The workloads of `test_lora.py`, asynchronous ones too, on a model with experts."""
    knobs, prompts, wanted = workload(seed, made(tmp_path, QWEN))
    engine = LLMEngine(
        Transformer(QWEN, weights(QWEN), "float64"), enable_lora=True, **knobs
    )  # fmt: skip
    got = answers(engine, prompts, wanted)
    single = {
        adapter: LLMEngine(merged(adapter, QWEN), enable_prefix_caching=False)
        for adapter in set(wanted)
    }
    expected = [
        answers(single[adapter], [prompt], [None])[0]
        for prompt, adapter in zip(prompts, wanted, strict=True)
    ]
    assert got == expected, knobs


def test_every_kind_of_adapter_changes_the_logits(tmp_path):
    base = Transformer(QWEN, weights(QWEN), "float64")
    lora, rows = watched(base, enable_lora=True, max_loras=5)
    wanted = [None, *made(tmp_path, QWEN)]
    answers(lora, [LONG[:30]] * len(wanted), wanted, max_tokens=1)
    for number, row in enumerate(rows.rows):
        assert all(np.abs(row - other).max() > 0.1 for other in rows.rows[:number])


def test_a_slot_that_another_adapter_takes_over_forgets_the_experts(tmp_path):
    base = Transformer(QWEN, weights(QWEN), "float64")
    lora = LLMEngine(base, enable_lora=True)
    for adapter in made(tmp_path, QWEN):
        expected = answers(LLMEngine(merged(adapter, QWEN)), [LONG[:9]], [None])
        assert answers(lora, [LONG[:9]], [adapter]) == expected
    assert lora.feature("lora").stats()["evictions"] == len(EXPERT_KINDS) - 1


def test_a_batch_of_base_requests_alone_calls_the_layers_own_experts(tmp_path):
    sizes = []

    def experts(x, every, topk_ids, topk_weights):
        sizes.append(len(every))
        return moe_forward_grouped(x, every, topk_ids, topk_weights)

    model = Transformer(QWEN, weights(QWEN), "float64", experts=experts)
    lora = LLMEngine(model, enable_lora=True, max_loras=3)
    adapters = made(tmp_path, QWEN)
    answers(lora, [LONG[:5]], [None], max_tokens=1)
    answers(lora, [LONG[:5], LONG[:6], LONG[:7]], [adapters[0], None, adapters[2]], max_tokens=1)
    assert sizes == [6, 12], "an adapter of the router alone brings no experts"


def test_the_model_that_is_served_stays_as_it_was(tmp_path):
    """And whoever watches its routing sees the experts of the base, by their ids."""
    model = Transformer(QWEN, weights(QWEN), "float64")
    forward = model.layers[0].experts.forward
    lora = LLMEngine(model, enable_lora=True)
    seen: list[int] = []
    with observing_routing(lora.model, lambda layer, ids: seen.extend(ids.reshape(-1))):
        answers(lora, [LONG[:40]], [made(tmp_path, QWEN)[1]])
    assert set(seen) <= set(range(6)) and len(seen) == 2 * (40 + 5)
    assert model.layers[0].experts.forward is forward


EXPERT = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {f"{EXPERT}.5.up_proj.lora_{half}.weight": None for half in "AB"},
            "layers.0.mlp.experts.5.up_proj is missing: an adapter of a layer's experts needs all",
        ),
        ({f"{EXPERT}.5.up_proj.lora_A.weight": None}, "experts.5.up_proj: lora_A is missing"),
        (
            {f"{EXPERT}.6.up_proj.lora_A.weight": np.zeros((2, 16))},
            "the model has no model.layers.0.mlp.experts.6.up_proj to adapt",
        ),
        (
            {f"{EXPERT}.lora_A.weight": np.zeros((12, 8))},
            "the model has no model.layers.0.mlp.experts to adapt",
        ),
        (
            {f"{EXPERT}.base_layer.lora_A.weight": np.zeros((12, 8))},
            "the model has no model.layers.0.mlp.experts.base_layer to adapt",
        ),
        (
            {f"{EXPERT}.5.up_proj.lora_B.weight": np.zeros((9, 2))},
            "up_proj.lora_B.weight has shape (9, 2), r=2 of adapter_config.json on model.layers.0",
        ),
    ],
    ids=["an expert's matrix", "a half", "no such expert", "stacked", "stacked up", "shape"],
)
def test_a_folder_that_leaves_experts_out_or_stacks_them_is_refused(tensors, words, tmp_path):
    path = write_adapter(
        tmp_path / "a", config=QWEN, tensors=tensors, target_modules=("experts",), r=2
    )
    lora = LLMEngine(Transformer(QWEN, weights(QWEN), "float64"), enable_lora=True)
    with pytest.raises(ValueError) as raised:
        lora.add_request([1, 2], lora_request=LoRARequest("a", 1, str(path)))
    assert words in str(raised.value)


def test_attention_alone_may_be_adapted_in_a_model_with_experts(tmp_path):
    adapter = LoRARequest(
        "a", 1, str(write_adapter(tmp_path / "a", config=QWEN, target_modules=ALL))
    )
    lora = LLMEngine(Transformer(QWEN, weights(QWEN), "float64"), enable_lora=True)
    got = answers(lora, [LONG[:30], LONG[:20]], [adapter, None])
    single = [LLMEngine(merged(each, QWEN)) for each in (adapter, None)]
    assert got == [
        answers(e, [p], [None])[0] for e, p in zip(single, (LONG[:30], LONG[:20]), strict=True)
    ]
