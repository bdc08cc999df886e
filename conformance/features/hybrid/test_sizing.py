"""The sizes of caches: what the real functions made of the same shapes, to the digit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conformance import parts
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.kv.sizing import (
    CHUNK,
    FULL,
    STATE,
    WINDOW,
    LayerCache,
    cache_size,
    group_layers,
)

KINDS = {
    "FullAttentionSpec": FULL, "MLAAttentionSpec": FULL, "SlidingWindowSpec": WINDOW,
    "ChunkedLocalAttentionSpec": CHUNK, "MambaSpec": STATE,
}  # fmt: skip
ARGUMENTS = (
    "memory_bytes", "max_model_len", "block_size", "max_num_batched_tokens", "dtype_bytes",
    "enable_prefix_caching",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases():
    return parts.load("kv_sizing")


def sized(case):
    return cache_size(case["config"], **{name: case[name] for name in ARGUMENTS})


@pytest.mark.slow
def test_every_cache_is_sized_as_the_real_functions_size_it(cases):
    for case in cases:
        got = sized(case)
        expected = [[KINDS[kind], size, layers] for kind, size, layers in case["groups"]]
        what = case["model"], [case[name] for name in ARGUMENTS]
        assert [[s.kind, s.block_size, list(layers)] for s, layers in got.groups] == expected, what
        for name in ("page_size_bytes", "num_padding_layers", "num_blocks", "max_concurrency"):
            assert getattr(got, name) == case[name], (name, what)
        assert list(got.log_lines) == case["log_lines"], what


def test_the_cases_hold_what_makes_sizes_hard(cases):
    assert len({case["model"] for case in cases}) == 8
    kinds = {kind for case in cases for kind, *_ in case["groups"]}
    assert kinds == KINDS.keys()
    assert any(case["num_padding_layers"] for case in cases)
    assert {1, 4} <= {len(case["groups"]) for case in cases}
    assert any(case["attention_block_size"] != case["block_size"] for case in cases)


def test_the_shipped_models_are_those_of_the_cases(cases):
    models = Path(__file__).parents[3] / "models"
    for name in ("byte-window", "byte-state"):
        recorded = next(case["config"] for case in cases if case["model"] == name)
        assert json.loads((models / name / "config.json").read_text()) == recorded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, r"memory_bytes=0: need at least 1"),
        ({"memory_bytes": 2**20}, r"memory_bytes=1048576: a request of max_model_len=8192"),
        ({"block_size": "16"}, r"block_size='16'"),
        ({"max_model_len": -1}, r"max_model_len=-1"),
        ({"dtype_bytes": 2.0}, r"dtype_bytes=2\.0"),
        ({"config": {}}, r"config\.json: num_hidden_layers=None"),
        ({"config": []}, r"config\.json: need an object"),
        ({"layer_types": ["full_attention"]}, r"layer_types=.*need 62 of"),
        ({"layer_types": ["gone"] * 62}, r"layer_types=.*need 62 of"),
        (
            {"layer_types": ["sliding_attention"] * 62, "sliding_window": None},
            r"sliding_window=None",
        ),
        ({"layer_types": ["mamba"] * 62}, r"mamba_n_heads=None"),
        ({"model_type": "gemma2", "sliding_window_pattern": None}, r"layer_types=None: need the"),
        ({"enable_prefix_caching": "no"}, r"enable_prefix_caching='no': need True or False"),
        ({"num_hidden_layers": 2**31 - 1}, r"num_hidden_layers=2147483647: need at most 10,000"),
        ({"num_kv_shared_layers": 20}, r"num_kv_shared_layers=20: need a model without"),
        ({"hybrid_override_pattern": "M-M*"}, r"hybrid_override_pattern='M-M\*': need a model"),
        ({"is_encoder_decoder": True}, r"is_encoder_decoder=True: need a model without"),
        ({"kv_lora_rank": 512}, r"sliding_window=1024: need null beside kv_lora_rank"),
        ({"v_head_dim": 64}, r"v_head_dim=64: need the same as head_dim"),
        ({"sliding_window": None, "mamba_d_state": 16}, r"layer_types=None: need the kind of each"),
    ],
)
def test_what_cannot_be_sized_is_refused_by_name(cases, change, message):
    case = next(case for case in cases if case["model"] == "gemma-3-27b")
    arguments = {name: case[name] for name in ("config", *ARGUMENTS)}
    fields = {n: v for n, v in change.items() if n not in arguments}
    arguments |= {n: v for n, v in change.items() if n in arguments}
    if fields:
        arguments["config"] = arguments["config"] | fields
    with pytest.raises(ValueError, match=message):
        cache_size(**arguments)


def test_layers_of_ones_own_are_refused_by_name():
    for arguments, message in (
        (("x", 16, 4), "kind='x': need one of full"), ((FULL, 0, 4), "block_size=0: need at least"),
        ((WINDOW, 16, 4, -1), "reach=-1: need at least 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            LayerCache(*arguments)
    with pytest.raises(ValueError, match=r"layers=\[\]: need at least one"):
        group_layers([])
    with pytest.raises(ValueError, match="layer 0: a page of 0 bytes"):
        group_layers([LayerCache(FULL, 16)])


@pytest.mark.parametrize(
    ("model", "budget", "caching"),
    [("byte-window", 513, True), ("byte-state", 4096, True), ("byte-state", 512, False)],
)
def test_4096_tokens_of_a_shipped_model_hold_what_was_sized_to_the_block(model, budget, caching):
    """The budgets are those at which a request holds the most that it ever can."""
    engine = LLMEngine(
        model, num_blocks=900, max_num_batched_tokens=budget, enable_prefix_caching=caching
    )
    specs = engine.model.kv_specs

    class Blank:
        kv_specs = specs

        def forward(self, batch):
            return np.zeros((len(batch.logits_indices), 257), np.float32)

    engine.model, most = Blank(), [0] * len(specs)
    engine.add_request([1] * 4080, SamplingParams(max_tokens=16, ignore_eos=True), request_id="a")

    def observe(plan):
        for group in range(len(specs)):
            table = engine.scheduler.kv.get_block_ids("a", group)
            most[group] = max(most[group], sum(block != 0 for block in table))

    engine.observers.append(observe)
    while engine.has_unfinished_requests():
        engine.step()
    path = Path(__file__).parents[3] / "models" / model / "config.json"
    size = cache_size(
        json.loads(path.read_text()), 2**28, max_model_len=4096, dtype_bytes=4,
        max_num_batched_tokens=budget, enable_prefix_caching=caching,
    )  # fmt: skip
    assert most == [layer.most_blocks(4096, budget) for layer, _ in size.groups]
    assert sum(most) == size.blocks_per_request
    page = size.page_size_bytes
    held = [cache.nbytes // len(layers) for cache, (_, layers) in zip(
        engine.runner.kv_caches, size.groups, strict=True)]  # fmt: skip
    assert held == [900 * page] * len(specs)
