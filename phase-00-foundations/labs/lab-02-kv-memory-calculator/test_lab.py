"""What lab 00-02 pins: the KV formula, the engine's version of it, and reading a config.json."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from conformance.parts import load
from labkit.modules import sibling

GIB = 2**30
CONFIGS = Path(__file__).parent / "configs"


def load_config(name: str) -> dict:
    return json.loads((CONFIGS / name).read_text(encoding="utf-8"))


def assert_refused(call, what: str) -> None:
    try:
        result = call()
    except ValueError:
        return
    pytest.fail(f"{what} must raise ValueError; it returned {result!r}", pytrace=False)


# --- as vLLM reads it -----------------------------------------------------------------------------


def test_every_family_as_vllm_reads_it(lab):
    recorded = json.loads((CONFIGS.parent / "recorded.json").read_text(encoding="utf-8"))["cases"]
    wrong, first = Counter(), ""
    for case in recorded:
        config, read = case["config"], case["read"]
        heads = 1 if read["mla"] else read["num_kv_heads"]
        expected = (read["num_layers"], 1 if read["mla"] else 2, heads, read["head_dim"])
        try:
            it = lab.read_geometry(config)
            came = (it.num_layers, it.stored_vectors, it.num_kv_heads, it.head_dim)
        except ValueError as error:
            came = f"ValueError: {error}"
        if came != expected:
            wrong[config["model_type"]] += 1
            first = first or f"{config}\nexpected {expected}\ncame     {came}"
    assert not wrong, (
        f"{len(recorded) - sum(wrong.values())} of {len(recorded)} recorded configs agree; of the "
        f"others, by family: {dict(wrong)}. The first, as (layers, stored vectors, KV heads, head "
        f"dim):\n{first}"
    )


@pytest.mark.upstream
def test_the_pinned_tree_reads_it_so(lab):
    record = sibling(__file__, "record")
    recorded = json.loads((CONFIGS.parent / "recorded.json").read_text(encoding="utf-8"))["cases"]
    assert [case["config"] for case in recorded] == record.drawn(), "the configs are those drawn"
    for case in recorded:
        read = record.read(case["config"])
        assert read == case["read"], f"{case['config']}: recorded {case['read']}, came {read}"
        assert lab.read_geometry(case["config"]).num_layers == read["num_layers"], case["config"]


# --- the question ---------------------------------------------------------------------------------


def test_how_many_fit(lab):
    llama = load_config("llama-3-8b.json")
    for free, more, expected, why in (
        (8 * GIB, {}, 32.0, "8 GiB hold 4,096 blocks of 2 MiB, and a request needs 128"),
        (8 * GIB, {"kv_cache_dtype": "fp8"}, 64.0, "one byte a number: twice as many"),
        (24 * GIB * 92 // 100 - 16_060_522_496, {}, 3646 / 128, "0.92 of 24 GiB less the weights"),
        (8 * 10**9, {}, 3814 / 128, "8 GB are 29.8 conversations, not 32: GB and GiB differ"),
        (-5, {}, 0.0, "no memory is left, and no conversation is less than none"),
    ):
        got = lab.fits(llama, free, 2048, **more)
        assert got == expected, (
            f"Llama-3-8B, 2,048 tokens: {why}\nexpected {expected}\ncame     {got}"
        )
    got = lab.fits(load_config("deepseek-v3.json"), 8 * GIB, 2048)
    assert got == 7639 / 128, (
        "DeepSeek-V3 keeps 70,272 bytes a token: 7,639 blocks of 16, 128 to a request\n"
        f"expected {7639 / 128}\ncame     {got}"
    )


def test_a_window_caps_what_a_request_holds(lab):
    config = {**load_config("llama-3-8b.json"), "sliding_window": 1024}
    block = 16 * 131_072
    got = lab.fits(config, 387 * block, 16384, max_num_batched_tokens=1024)
    assert got == 3.0, (
        "387 blocks, 16,384 tokens a request, window 1,024, budget 1,024: vLLM's own test expects "
        f"3.0, since a request holds 2,047 tokens and a block for alignment, 129\ncame     {got}"
    )
    got = lab.fits(config, 1536 * block, 512)
    assert got == 1536 / 33, f"512 tokens are 32 blocks and one: expected {1536 / 33}, came {got}"


def test_capacity_of_the_real_engine(lab):
    for case in load("kv_capacity"):
        heads, size = case["num_kv_heads"], case["head_size"]
        config = {
            "num_hidden_layers": case["num_layers"], "num_attention_heads": heads,
            "num_key_value_heads": heads, "hidden_size": heads * size, "head_dim": size,
            "torch_dtype": {1: "fp8", 2: "bfloat16", 4: "float32"}[case["dtype_bytes"]],
        }  # fmt: skip
        got = lab.fits(
            config, case["available_memory"], case["max_model_len"], block_size=case["block_size"]
        )
        assert got == case["max_concurrency"], (
            f"{case['available_memory']:,} bytes, {case['max_model_len']:,} tokens a request, "
            f"blocks of {case['block_size']}, {config}\n"
            f"expected {case['max_concurrency']}, as vLLM said\ncame     {got}"
        )


# --- what a config may say ------------------------------------------------------------------------


def test_config_gqa_reads_kv_heads_not_query_heads(lab):
    geometry = lab.read_geometry(load_config("llama-3-8b.json"))
    assert (geometry.num_kv_heads, geometry.head_dim, geometry.kind) == (8, 128, "GQA"), (
        "Llama-3-8B has 32 query heads but caches K and V of 8 KV heads, 4,096/32 = 128 numbers "
        f"each; you have {geometry}"
    )
    qwen = lab.read_geometry(load_config("qwen2.5-0.5b.json"))
    assert (qwen.num_layers, qwen.num_kv_heads, qwen.head_dim) == (24, 2, 64), (
        f"Qwen2.5-0.5B: 24 layers, 2 KV heads, 896/14 = 64; you have {qwen}"
    )


def test_config_without_kv_heads_is_mha(lab):
    geometry = lab.read_geometry(load_config("opt-125m.json"))
    assert (geometry.num_kv_heads, geometry.kind) == (12, "MHA"), (
        "OPT's config has no num_key_value_heads: each of the 12 query heads caches its own K "
        f"and V; you have {geometry}"
    )


def test_config_head_dim_given_wins(lab):
    config = {**load_config("llama-3-8b.json"), "head_dim": 256}
    geometry = lab.read_geometry(config)
    assert geometry.head_dim == 256, (
        "some models choose a head_dim that is not hidden_size / heads; when the config states "
        f"one it wins. You have {geometry.head_dim}"
    )
    geometry = lab.read_geometry({**config, "head_dim": None})
    assert geometry.head_dim == 128, (
        f"head_dim: null means not given: fall back to 4,096/32 = 128; you have {geometry.head_dim}"
    )


def test_config_mla_stores_one_latent(lab):
    geometry = lab.read_geometry(load_config("deepseek-v3.json"))
    assert (geometry.stored_vectors, geometry.num_kv_heads, geometry.head_dim) == (1, 1, 576), (
        "MLA caches one vector of kv_lora_rank + qk_rope_head_dim = 512 + 64 numbers per token and "
        "layer, shared by all 128 heads: no factor 2, and num_key_value_heads is not used; "
        f"you have {geometry}"
    )
    product = 1
    for _, value in lab.factor_table(geometry):
        product *= value
    assert product == 70_272, (
        f"DeepSeek-V3: 1 x 61 x 1 x 576 x 2 = 70,272 bytes per token; your factors give {product:,}"
    )


def test_config_sliding_window_only_when_used(lab):
    config = load_config("qwen2.5-0.5b.json")
    assert lab.read_geometry(config).sliding_window is None, (
        "this config states sliding_window 32768 and use_sliding_window false: every token is kept"
    )
    on = lab.read_geometry({**config, "use_sliding_window": True}).sliding_window
    assert on == 32768, f"with use_sliding_window true the window is 32768; you have {on}"
    bare = lab.read_geometry({**load_config("llama-3-8b.json"), "sliding_window": 4096})
    assert bare.sliding_window == 4096, (
        "a config with sliding_window and no switch uses it (Mistral-7B-v0.1 is one); you have "
        f"{bare.sliding_window}"
    )


def test_config_dtype_is_the_caches_not_the_weights(lab):
    config = load_config("llama-3-8b.json")
    assert lab.read_geometry(config).dtype_bytes == 2, "auto: the config's bfloat16 is 2 bytes"
    got = lab.read_geometry(config, "fp8").dtype_bytes
    assert got == 1, (
        "kv_cache_dtype=fp8 makes each cached number 1 byte even though the weights stay bfloat16; "
        f"you have {got}"
    )
    assert_refused(lambda: lab.read_geometry(config, "fp7"), "kv_cache_dtype='fp7'")
    del config["torch_dtype"]
    for said, expected in (({"dtype": "bfloat16"}, 2), ({}, 4)):
        got = lab.read_geometry({**config, **said}).dtype_bytes
        assert got == expected, (
            f"no torch_dtype, {said or 'and no dtype either: float32'}\n"
            f"expected {expected} bytes\ncame     {got}"
        )


def test_config_null_is_as_left_out(lab):
    for name, keys in (
        ("llama-3-8b.json", ("kv_lora_rank", "n_layer", "num_kv_heads", "multi_query", "dtype")),
        ("opt-125m.json", ("num_key_value_heads", "head_dim")),
    ):
        config = load_config(name)
        expected = lab.read_geometry(config)
        for key in keys:
            got = lab.read_geometry({key: None, **config})
            assert got == expected, f"{name} and {key}: null\nexpected {expected}\ncame     {got}"
    config = {**load_config("llama-3-8b.json"), "sliding_window": 4096, "use_sliding_window": None}
    got = lab.read_geometry(config).sliding_window
    assert got == 4096, f"use_sliding_window: null is no switch\nexpected 4096\ncame     {got}"
    config = {"num_hidden_layers": None, "n_layer": 3, "n_head": 4, "n_embd": 64}
    got = lab.read_geometry(config).num_layers
    assert got == 3, f"{config}\nexpected 3 layers\ncame     {got}"


def test_config_kind_names_who_shares(lab):
    for config, expected in (
        ({"n_layer": 1, "n_head": 4, "n_embd": 64, "multi_query": True}, "MQA"),
        ({"n_layer": 1, "n_head": 1, "n_embd": 64, "multi_query": True}, "MHA"),
        (load_config("deepseek-v3.json"), "MLA"),
    ):
        got = lab.read_geometry(config).kind
        assert got == expected, f"{config}\nexpected {expected}\ncame     {got}"


def test_config_missing_key_is_named(lab):
    for name, key in (
        ("llama-3-8b.json", "num_hidden_layers"),
        ("llama-3-8b.json", "num_attention_heads"),
        ("llama-3-8b.json", "hidden_size"),
        ("deepseek-v3.json", "qk_rope_head_dim"),
    ):
        config = load_config(name)
        del config[key]
        with pytest.raises(ValueError, match=key):
            lab.read_geometry(config)


def test_factor_table_names_every_factor(lab):
    table = lab.factor_table(lab.read_geometry(load_config("qwen2.5-0.5b.json")))
    expected = [
        ("stored vectors", 2),
        ("layers", 24),
        ("KV heads", 2),
        ("head dim", 64),
        ("bytes per number", 2),
    ]
    assert [tuple(row) for row in table] == expected, (
        "the table lists the five factors in this order, and their product is 12,288 bytes per "
        f"token; you have {table}"
    )


def test_plan_survives_a_trip_through_json(lab):
    inputs = {
        "config": load_config("llama-3-8b.json"),
        "gpu_bytes": 24 * GIB,
        "weight_bytes": 16 * GIB,
        "seq_len": 2048,
    }
    result = json.loads(json.dumps(lab.plan(json.loads(json.dumps(inputs)))))
    assert (result["bytes_per_token"], result["max_concurrent_seqs"]) == (131_072, 32), (
        "the JSON form gives the same answers as the functions: 131,072 bytes per token and 32 "
        f"sequences; you have {result}"
    )
    assert (result["num_blocks"], result["max_concurrency"]) == (4096, 32.0), (
        f"and in blocks: 4,096 and 32.0x; you have {result}"
    )
