"""What lab 00-02 pins: the KV formula, the engine's version of it, and reading a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.parts import load

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


# --- Part A ---------------------------------------------------------------------------------------


def test_llama3_8b_per_token(lab):
    got = lab.kv_bytes_per_token(32, 8, 128, 2)
    assert got == 131_072, (
        "Llama-3-8B: 2 vectors (K and V) x 32 layers x 8 KV heads x 128 numbers x 2 bytes is "
        f"131,072 bytes per token (128 KiB); you have {got:,}. Half of it means V was forgotten"
    )


def test_70b(lab):
    per_token = lab.kv_bytes_per_token(80, 8, 128, 2)
    assert per_token == 327_680, (
        "Llama-3-70B (80 layers, 8 KV heads, head dim 128, 2 bytes): 327,680 bytes per token; "
        f"you have {per_token:,}"
    )
    per_seq = lab.kv_bytes_per_seq(per_token, 8192)
    assert per_seq == 2_684_354_560, (
        f"8,192 tokens of 327,680 bytes are 2,684,354,560 bytes (2.5 GiB); you have {per_seq:,}"
    )


def test_linear_in_each_factor(lab):
    base = {"num_layers": 7, "num_kv_heads": 3, "head_dim": 5, "dtype_bytes": 2}
    base["stored_vectors"] = 1
    reference = lab.kv_bytes_per_token(**base)
    for name in base:
        doubled = lab.kv_bytes_per_token(**{**base, name: 2 * base[name]})
        assert doubled == 2 * reference, (
            f"the cache is a plain product, so doubling {name} doubles it: "
            f"{reference:,} must become {2 * reference:,}, not {doubled:,}"
        )
    assert lab.kv_bytes_per_seq(10, 200) == 2 * lab.kv_bytes_per_seq(10, 100), (
        "every token costs the same, so twice the tokens cost twice the bytes"
    )


def test_gqa_saves_vs_mha(lab):
    gqa = lab.kv_bytes_per_token(32, 8, 128, 2)
    mha = lab.kv_bytes_per_token(32, 32, 128, 2)
    assert mha == 524_288 and mha == 4 * gqa, (
        "with 32 KV heads instead of 8 (every query head its own) a token costs 524,288 bytes, "
        f"4 times as much; you have {mha:,} against {gqa:,}"
    )


def test_llama3_8b_concurrency(lab):
    per_seq = lab.kv_bytes_per_seq(lab.kv_bytes_per_token(32, 8, 128, 2), 2048)
    assert per_seq == 268_435_456, (
        f"131,072 bytes x 2,048 tokens = 268,435,456 bytes (256 MiB) a sequence; you have {per_seq}"
    )
    got = lab.max_concurrent_seqs(24 * GIB, 16 * GIB, per_seq)
    assert got == 32, f"8 GiB free / 256 MiB a sequence is 32 sequences; you have {got}"


def test_fp8_kv_doubles_concurrency(lab):
    per_seq = lab.kv_bytes_per_seq(lab.kv_bytes_per_token(32, 8, 128, 1), 2048)
    got = lab.max_concurrent_seqs(24 * GIB, 16 * GIB, per_seq)
    assert got == 64, f"one byte per number instead of two: 64 sequences, not {got}"


def test_sequences_are_counted_in_whole_numbers(lab):
    for seqs, each in ((2**53 + 1, 3), (10**17 + 1, 7)):
        got = lab.max_concurrent_seqs(seqs * each, 0, each)
        assert got == seqs, (
            f"{seqs * each} bytes hold exactly {seqs} times {each}: divide integers (//), since a "
            f"float keeps 53 bits and then rounds; came {got}"
        )


def test_no_room_returns_zero(lab):
    for weights, why in ((26 * GIB, "weights larger than the GPU"), (24 * GIB, "no byte left")):
        got = lab.max_concurrent_seqs(24 * GIB, weights, 256 * 2**20)
        assert got == 0, f"{why}: 0 sequences fit, and never a negative number; you have {got}"


def test_floor_not_round(lab):
    per_seq = 256 * 2**20
    got = lab.max_concurrent_seqs(24 * GIB - 1, 16 * GIB, per_seq)
    assert got == 31, (
        "one byte short of 32 sequences is 31: a sequence that does not fit whole does not run; "
        f"you have {got}"
    )


def test_decimal_vs_binary_units(lab):
    got = lab.max_concurrent_seqs(24 * 10**9, 16 * 10**9, 256 * 2**20)
    assert got == 29, (
        "8 GB (8e9 bytes) hold 29 sequences of 256 MiB, while 8 GiB hold 32: data sheets and "
        f"nvidia-smi use different units. You have {got}"
    )


def test_returns_int(lab):
    per_token = lab.kv_bytes_per_token(32, 8, 128, 2)
    per_seq = lab.kv_bytes_per_seq(per_token, 2048)
    for name, value in (
        ("kv_bytes_per_token", per_token),
        ("kv_bytes_per_seq", per_seq),
        ("max_concurrent_seqs", lab.max_concurrent_seqs(24 * GIB, 16 * GIB, per_seq)),
    ):
        assert type(value) is int, (
            f"{name} counts bytes or sequences, so it returns an int; a float loses exact "
            f"bytes above 2**53 and prints 32.0 people. It returned {value!r}"
        )


def test_invalid_dims_raise(lab):
    good = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    for name in good:
        for bad in (0, -1):
            assert_refused(
                lambda name=name, bad=bad: lab.kv_bytes_per_token(**{**good, name: bad}),
                f"kv_bytes_per_token with {name}={bad}",
            )
    assert_refused(lambda: lab.kv_bytes_per_seq(131_072, 0), "a sequence of 0 tokens")
    assert_refused(lambda: lab.max_concurrent_seqs(GIB, 0, 0), "bytes_per_seq=0")


# --- Part B ---------------------------------------------------------------------------------------


def test_num_blocks_counts_whole_blocks(lab):
    got = lab.num_blocks(8 * GIB, 32, 8, 128)
    assert got == 4096, (
        f"a block of 16 tokens is 2 MiB for Llama-3-8B, so 8 GiB hold 4,096 blocks; you have {got}"
    )
    assert type(got) is int, f"blocks are counted: an int, not {got!r}"
    assert lab.num_blocks(8 * GIB - 1, 32, 8, 128) == 4095, "a block that does not fit is no block"
    assert lab.num_blocks(0, 32, 8, 128) == 0, "no memory, no blocks"
    assert lab.num_blocks(-5, 32, 8, 128) == 0, "less than no memory is still 0 blocks"


def test_engine_like_capacity(lab):
    free = 24 * GIB * 92 // 100 - 16_060_522_496
    blocks = lab.num_blocks(free, 32, 8, 128)
    assert blocks == 3646, (
        "24 GiB x 0.92 (the default share the engine may use) minus the exact 16,060,522,496 "
        f"weight bytes leave room for 3,646 blocks, before activations; you have {blocks}"
    )
    got = lab.max_concurrency(blocks, 2048)
    assert f"{got:.2f}" == "28.48", f"3,646 blocks / 128 blocks a request = 28.48x; you have {got}"


def test_concurrency_is_a_float(lab):
    got = lab.max_concurrency(8788, 2048)
    assert got == 68.65625, (
        "8,788 blocks / 128 blocks per 2,048-token request = 68.65625, logged as 68.66x. The "
        f"engine does not round the quotient; you have {got!r}"
    )
    got = lab.max_concurrency(100, 2049)
    assert got == 100 / 129, (
        "2,049 tokens need 129 blocks of 16: the ceiling is taken per request, so the answer is "
        f"100/129; you have {got!r}"
    )


def test_upstream_concurrency_cases(lab):
    cases = [
        ("full attention, 1,536 blocks", 1536, (None,), 1.5),
        ("sliding window 1,024, 387 blocks", 129 * 3, (1024,), 3.0),
        ("one group of each, 3,459 blocks", (1024 + 129) * 3, (None, 1024), 3.0),
    ]
    for what, blocks, windows, expected in cases:
        got = lab.max_concurrency(
            blocks, 16384, 16, sliding_windows=windows, max_num_batched_tokens=1024
        )
        assert got == expected, (
            f"{what}, 16,384 tokens per request, budget 1,024: vLLM's own test expects {expected}; "
            f"you have {got}. A window of 1,024 holds min(1024 - 1 + 1024, 16384) = 2,047 tokens: "
            "128 blocks, plus one because the window may start inside a block"
        )


def test_sliding_window_is_capped_by_the_model_length(lab):
    got = lab.blocks_per_request(512, 16, sliding_window=1024, max_num_batched_tokens=2048)
    assert got == 33, (
        "a request of at most 512 tokens never holds more than 512, however wide the window: "
        f"32 blocks plus the alignment block = 33; you have {got}"
    )


def test_capacity_of_the_real_engine(lab):
    for case in load("kv_capacity"):
        shape = [case[name] for name in ("num_layers", "num_kv_heads", "head_size", "dtype_bytes")]
        blocks = lab.num_blocks(case["available_memory"], *shape, block_size=case["block_size"])
        assert blocks == case["num_blocks"], (
            f"vLLM was asked for the blocks in {case['available_memory']:,} bytes with layers, KV "
            f"heads, head dim, bytes = {shape} and block size {case['block_size']}: it said "
            f"{case['num_blocks']:,}, you say {blocks:,}"
        )
        got = lab.max_concurrency(blocks, case["max_model_len"], case["block_size"])
        assert got == case["max_concurrency"], (
            f"{blocks:,} blocks of {case['block_size']}, {case['max_model_len']:,} tokens per "
            f"request: vLLM said {case['max_concurrency']}, you say {got}"
        )


# --- Part C ---------------------------------------------------------------------------------------


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


def test_config_missing_key_is_named(lab):
    config = load_config("llama-3-8b.json")
    del config["num_hidden_layers"]
    with pytest.raises(ValueError, match="num_hidden_layers"):
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
