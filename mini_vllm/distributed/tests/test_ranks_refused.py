"""Sizes that do not divide, and combinations that do not work, are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mini_vllm import LLM, EngineParts, LLMEngine, Scheduler
from mini_vllm.attention import paged_attention_reference
from mini_vllm.distributed.config import ParallelConfig
from mini_vllm.distributed.groups import get_pp_indices, rank_groups
from mini_vllm.distributed.pool import RankPool
from mini_vllm.models.transformer import Linear
from mini_vllm.tests.ranks_support import ALL_BIASES, DENSE, MOE, RandomSource, pool


class Mine(Scheduler):
    """A learner's."""


class MyLinear(Linear):
    """A learner's."""


NGRAM = {"method": "ngram", "num_speculative_tokens": 2}

# fmt: off
REFUSED = [
    (
        {"tensor_parallel_size": 3},
        "tensor_parallel_size=3: does not divide num_attention_heads=4; need one of 1, 2, 4",
    ),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: need"),
    ({"tensor_parallel_size": "2"}, "tensor_parallel_size='2': need an int"),
    ({"tensor_parallel_size": True}, "tensor_parallel_size=True: need an int"),
    ({"tensor_parallel_size": 17}, "tensor_parallel_size=17: need 1 to 16"),
    ({"tensor_parallel_size": 8, "pipeline_parallel_size": 4}, "need at most 16 ranks"),
    ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5: need 1 to 4, the number of layers"),
    ({"pipeline_parallel_size": -1}, "pipeline_parallel_size=-1: need"),
    (
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        "enable_expert_parallel=True: the model has no experts",
    ),
    ({"enable_expert_parallel": 1}, "enable_expert_parallel=1: need a bool"),
    (
        {"enable_expert_parallel": True},
        "enable_expert_parallel=True: need tensor_parallel_size of 2 or more",
    ),
    (
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
        "decode_context_parallel_size=3: need a divisor of tensor_parallel_size=4: 1, 2, 4",
    ),
    (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "each is held 1 time(s); need one of 1",
    ),
    (
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 4},
        "each is held 2 time(s); need one of 1, 2",
    ),
    (
        {"tensor_parallel_size": 2, "rank_transport": "pigeons"},
        "rank_transport='pigeons': need one of shared_memory, sockets",
    ),
    ({"tensor_parallel_size": 2, "rank_timeout_s": 0}, "rank_timeout_s=0: need more than 0"),
    (
        {"tensor_parallel_size": 2, "rank_timeout_s": "soon"},
        "rank_timeout_s='soon': need a finite number",
    ),
    ({"tensor_parallel_size": 2, "rank_pool": "mine"}, "rank_pool='mine': need a RankPool"),
    (
        {"tensor_parallel_size": 2, "speculative_config": {"method": "mtp",
        "model": "byte-mtp", "num_speculative_tokens": 2}},
        "speculative_config of method='mtp' with tensor_parallel_size=2: need 'ngram' or",
    ),
    (
        {"pipeline_parallel_size": 2, "speculative_config": NGRAM},
        "pipeline_parallel_size with speculative_config: need tensor_parallel_size alone",
    ),
    (
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "speculative_config": NGRAM},
        "decode_context_parallel_size with speculative_config: need tensor_parallel_size alone",
    ),
    (
        {"tensor_parallel_size": 2, "async_scheduling": True, "speculative_config": NGRAM},
        "async_scheduling with speculative_config: need tensor_parallel_size alone",
    ),
    (
        {"pipeline_parallel_size": 2, "enable_lora": True},
        "pipeline_parallel_size with enable_lora: need tensor_parallel_size alone",
    ),
    (
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "enable_lora": True},
        "decode_context_parallel_size with enable_lora: need tensor_parallel_size alone",
    ),
    (
        {"tensor_parallel_size": 2, "async_scheduling": True, "enable_lora": True},
        "async_scheduling with enable_lora: need tensor_parallel_size alone",
    ),
    (
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_lora": True},
        "enable_expert_parallel with enable_lora: need tensor_parallel_size alone",
    ),
    (
        {"tensor_parallel_size": 2, "speculative_config": NGRAM, "enable_lora": True},
        "speculative_config with enable_lora: need tensor_parallel_size alone",
    ),
    (
        {
            "tensor_parallel_size": 4, "enable_lora": True, "fully_sharded_loras": True,
            "max_lora_rank": 1,
        },
        "fully_sharded_loras=True with tensor_parallel_size=4: need a divisor of max_lora_rank=1",
    ),
    (
        {"tensor_parallel_size": 2, "enable_lora": True, "max_loras": 0},
        "max_loras=0: need at least 1",
    ),
    (
        {
            "tensor_parallel_size": 2, "enable_lora": True,
            "parts": EngineParts(rooms={"lora": {"adapter_delta": lambda *a: a[0]}}),
        },
        "parts.adapter_delta: need the standard one with tensor_parallel_size=2",
    ),
    (
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        "async_scheduling=True: need False with pipeline_parallel_size=2",
    ),
    (
        {"tensor_parallel_size": 2, "parts": EngineParts(linear=MyLinear)},
        "parts.linear: need the standard one with tensor_parallel_size=2",
    ),
    (
        {"tensor_parallel_size": 2, "parts": EngineParts(attention=paged_attention_reference)},
        "parts.attention: need the standard one",
    ),
    (
        {
            "tensor_parallel_size": 2,
            "parts": EngineParts(rooms={"models": {"experts": lambda *a: a[0]}}),
        },
        "parts.experts: need the standard one",
    ),
    (
        {"pipeline_parallel_size": 2, "parts": EngineParts(scheduler=Mine)},
        "parts.scheduler: need the standard scheduler with pipeline_parallel_size=2",
    ),
    (
        {"tensor_parallel_size": 2, "max_model_len": 4096},
        "max_model_len=4096: the model supports 512",
    ),
    ({"tensor_parallel_size": 2, "no_such_knob": 1}, "no_such_knob=1: no such argument"),
]
# fmt: on


@pytest.mark.parametrize(("knobs", "why"), REFUSED, ids=[why[:50] for _, why in REFUSED])
def test_it_is_refused_by_name_before_any_process_starts(knobs, why, monkeypatch):
    monkeypatch.setattr(RankPool, "__init__", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(ValueError) as raised:
        LLM(RandomSource(DENSE), **knobs)
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("toy", "model='toy': ranks need"),
        (RandomSource(DENSE).transformer(), "ranks need byte-llama"),
    ],
    ids=["toy", "object"],
)
def test_a_model_that_ranks_cannot_read_is_refused(model, why):
    with pytest.raises(ValueError, match=why):
        LLMEngine(model, tensor_parallel_size=2)


@pytest.mark.slow
def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="rank_pool: has 4 ranks, need at least 8"):
        LLMEngine(RandomSource(ALL_BIASES), tensor_parallel_size=8, rank_pool=pool())


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (replace(ALL_BIASES, num_key_value_heads=4), 8, ""),
        (
            replace(ALL_BIASES, num_attention_heads=12, num_key_value_heads=3, vocab_size=192), 2,
            "neither divides num_key_value_heads=3 nor is a multiple of it; need one of 1, 3, 6, "
            "12",
        ),
        (
            replace(DENSE, intermediate_size=50), 4,
            "does not divide intermediate_size=50; need one of 1, 2",
        ),
        (
            replace(MOE, moe=replace(MOE.moe, intermediate_size=18)), 4,
            "does not divide moe_intermediate_size=18; need one of 1, 2",
        ),
        (
            replace(DENSE, num_attention_heads=3, num_key_value_heads=3), 3,
            "does not divide the padded vocabulary, 64; need one of 1",
        ),
    ],
    ids=["copies", "kv", "mlp", "experts", "vocabulary"],
)  # fmt: skip
def test_the_sizes_that_would_do_are_named(config, size, why):
    parallel = ParallelConfig(tensor_parallel_size=size)
    if not why:
        return parallel.check_model(config)
    with pytest.raises(ValueError) as raised:
        parallel.check_model(config)
    assert why in str(raised.value)


def test_more_ranks_than_experts_are_refused():
    config = replace(MOE, moe=replace(MOE.moe, num_experts=3))
    with pytest.raises(ValueError, match="is more than num_experts=3; need one of 1, 2"):
        ParallelConfig(tensor_parallel_size=4, enable_expert_parallel=True).check_model(config)


@pytest.mark.slow
def test_a_checkpoint_that_a_rank_refuses_is_refused_as_in_one_process(tmp_path):
    import json
    import shutil

    from mini_vllm.models.loader import SHIPPED_MODEL

    folder = shutil.copytree(SHIPPED_MODEL, tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 5}))
    with pytest.raises(ValueError) as alone:
        LLMEngine(folder)
    with pytest.raises(ValueError) as ranked:
        LLMEngine(folder, tensor_parallel_size=2, rank_pool=pool())
    assert str(ranked.value) == str(alone.value)
    assert pool().is_alive, "ranks that refuse a model take another"


def test_what_does_not_reach_the_ranks_may_be_replaced():
    class MySampler(EngineParts().sampler):
        pass

    parts = EngineParts(sampler=MySampler, scheduler=Mine)
    engine = LLMEngine(RandomSource(DENSE), tensor_parallel_size=2, parts=parts, rank_pool=pool())
    assert len(engine.generate([[1, 2, 3]])[0].outputs[0].token_ids) == 16


def test_one_rank_of_everything_is_the_engine_without_ranks():
    engine = LLMEngine("toy", tensor_parallel_size=1, pipeline_parallel_size=1)
    assert engine.feature("distributed") is None


@pytest.mark.parametrize(
    "arguments", [(0,), (17,), (2, "pigeons"), ("2",)], ids=["none", "many", "transport", "text"]
)
def test_a_pool_of_no_such_size_or_transport_is_refused(arguments):
    with pytest.raises(ValueError, match="need"):
        RankPool(*arguments)


def test_groups_and_ranges_refuse_sizes_that_make_no_grid():
    with pytest.raises(ValueError, match="world_size=6: need a multiple of 4"):
        rank_groups(6, tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match="decode_context_parallel_size=3: need a divisor of 4"):
        rank_groups(4, tensor_parallel_size=4, decode_context_parallel_size=3)
    with pytest.raises(ValueError, match="num_hidden_layers=2: need at least 3"):
        get_pp_indices(2, 0, 3)
    with pytest.raises(ValueError, match="pp_rank=3: need 0 to 2"):
        get_pp_indices(6, 3, 3)
