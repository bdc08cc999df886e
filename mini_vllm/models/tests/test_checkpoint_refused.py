"""Loading: every refusal names the file and what was wrong with it."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm.engine import LLMEngine
from mini_vllm.models.loader import (
    load_checkpoint,
    parse_config,
    resolve,
)
from mini_vllm.models.tests.test_checkpoint import (
    CONFIG,
    LLAMA3,
    SHARDS,
    byte_tokenizer_json,
    random_weights,
    refuses,
    write_checkpoint,
    write_shards,
)
from mini_vllm.models.transformer import Transformer
from mini_vllm.tokenizer import ByteTokenizer


def test_a_missing_folder_is_refused_by_name(tmp_path):
    refuses(tmp_path / "nowhere", r"nowhere'?: no such folder")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_refused_by_name(tmp_path, name):
    (write_checkpoint(tmp_path) / name).unlink()
    refuses(tmp_path, f"{name}: no such file")


@pytest.mark.parametrize("keep", [0, 4, 60, 2000])
def test_a_truncated_weights_file_is_refused(tmp_path, keep):
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuses(tmp_path, r"model\.safetensors: truncated or not a safetensors file")


@pytest.mark.parametrize("text", ["{", "", "[1, 2]", '"text"'])
def test_a_broken_config_is_refused(tmp_path, text):
    (write_checkpoint(tmp_path) / "config.json").write_text(text)
    refuses(tmp_path, r"config\.json: (not valid JSON|expected a JSON object)")


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path):
    weights = random_weights(CONFIG)
    weights["model.norm.weight"] = np.ones(9, dtype=np.float32)
    refuses(
        write_checkpoint(tmp_path, None, weights),
        r"model\.norm\.weight has shape \(9,\), config\.json implies \(8,\)",
    )


def test_a_config_that_does_not_fit_the_weights_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 16}))
    refuses(tmp_path, r"mlp\.\w+_proj\.weight has shape")


def test_missing_tensors_are_counted_and_named(tmp_path):
    weights = random_weights(CONFIG)
    del weights["model.layers.1.mlp.up_proj.weight"]
    refuses(
        write_checkpoint(tmp_path, None, weights),
        r"lacks 1 tensor\(s\): model\.layers\.1\.mlp\.up_proj\.weight",
    )


def test_an_integer_tensor_is_refused_with_the_supported_dtypes(tmp_path):
    weights = random_weights(CONFIG)
    weights["model.norm.weight"] = np.ones(8, dtype=np.int8)
    refuses(
        write_checkpoint(tmp_path, None, weights),
        r"model\.norm\.weight: dtype I8 is not supported; supported: F32, F16, BF16",
    )


def test_a_missing_shard_is_refused_by_name(tmp_path):
    write_shards(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    refuses(tmp_path, f"{SHARDS[1]}: no such file")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": "all"}])
def test_an_index_without_a_weight_map_is_refused(tmp_path, index):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, r"index\.json: no weight_map")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' is not supported; "
            "supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": []}, "architecture None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is supported"),
        ({"use_sliding_window": True}, "sliding windows are not supported"),
        ({"quantization_config": {"bits": 4}}, "quant_method=None: need 'fp8'"),
        ({"hidden_size": 0}, "hidden_size=0: need a positive integer"),
        ({"hidden_size": "8"}, "hidden_size='8': need a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None: need a positive integer"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads=3 does not divide num_attention_heads=4",
        ),
        ({"head_dim": 3}, "head_dim=3: rotary embedding needs an even size"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads=3 does not"),
        ({"head_dim": 0}, "head_dim=0: need a positive integer"),
        ({"head_dim": "4"}, "head_dim='4': need a positive integer"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2': need a positive integer"),
        ({"num_key_value_heads": [1]}, "num_key_value_heads=[1]: need a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: need a positive integer"),
        ({"hidden_size": 8.0}, "hidden_size=8.0: need a positive integer"),
        ({"vocab_size": 10**30}, "need a positive integer, at most 2147483647"),
        ({"vocab_size": "x" * 999}, "...xxxxxxxxxxxxxxxxxxxxxxxxxxxx': need a positive integer"),
        (
            {"max_position_embeddings": 1},
            "max_position_embeddings=1: need an integer of at least 2",
        ),
        ({"max_position_embeddings": []}, "max_position_embeddings=[]: need an integer"),
        ({"rms_norm_eps": "abc"}, "rms_norm_eps='abc': need a number from 1e-30 to 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: need a number from 1e-30 to 1"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1: need a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: need a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps=True: need a number"),
        ({"rope_theta": float("nan")}, "rope_theta=nan: need a number from 1 to 1e+30"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: need a number"),
        ({"rope_theta": 10**400}, "need a number from 1 to 1e+30"),
        ({"rope_theta": 0}, "rope_theta=0: need a number"),
        ({"rope_theta": -1}, "rope_theta=-1: need a number"),
        ({"rope_scaling": 4.0}, "rope_scaling=4.0: need an object"),
        ({"rope_parameters": ["llama3"]}, "rope_parameters=['llama3']: need an object"),
        ({"rope_scaling": {"rope_type": 3}}, "rope_type=3 is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM': need a list"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture ['LlamaForCausalLM'] is not"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': need true or false"),
        ({"attention_bias": 0}, "attention_bias=0: need true or false"),
        ({"use_sliding_window": "no"}, "use_sliding_window='no': need true or false"),
        ({"eos_token_id": ["a"]}, "eos_token_id=['a']: need a token id"),
        ({"eos_token_id": [-1]}, "eos_token_id=[-1]: need a token id"),
        ({"eos_token_id": True}, "eos_token_id=True: need a token id"),
        ({"eos_token_id": 1.5}, "eos_token_id=1.5: need a token id"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id={'a': 1}: need a token id"),
        ({"num_hidden_layers": 3_000_000}, "hold 20 tensor(s), fewer than one a layer"),
        (
            {"num_hidden_layers": 1},
            "num_hidden_layers=1: the weights hold 20 tensor(s), of more layers",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type='yarn' is not supported; supported: default, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 rope scaling lacks low_freq_factor, high_freq_factor, "
            "original_max_position_embeddings",
        ),
        *(
            ({"rope_scaling": LLAMA3 | {name: value}}, f"rope_scaling: {name}={value}: need a")
            for name in ("factor", "low_freq_factor", "high_freq_factor")
            for value in (0, -1.0, float("nan"))
        ),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            "rope_scaling: high_freq_factor=1.0: need more than low_freq_factor=1.0",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_outside_the_supported_families_is_refused(tmp_path, change, message):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError) as refusal:
        load_checkpoint(tmp_path)
    assert message in str(refusal.value)
    assert "config.json" in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\xff", "not UTF-8 text"),
        ("null", "expected a JSON object, got NoneType"),
        (" " * ((1 << 26) + 1), "longer than [0-9,]+ bytes, the most that is read of it"),
    ],
    ids=["deep", "digits", "bytes", "null", "long"],
)
def test_a_json_file_that_cannot_be_taken_in_is_refused(tmp_path, name, text, message):
    (write_checkpoint(tmp_path) / name).write_bytes(text.encode("latin-1"))
    refuses(tmp_path, rf"/{name}: {message}")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
     "chat_template.jinja", "model.safetensors", "model.safetensors.index.json"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["folder", "loop", "pipe", "device"])
def test_what_is_no_regular_file_is_refused_and_not_opened(tmp_path, name, kind):
    """Opening the pipe would wait for ever, reading the device would not end."""
    path = write_checkpoint(tmp_path) / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(name if kind == "loop" else "/dev/zero")
    refuses(tmp_path, rf"/{name}: (not a regular file|cannot be read)")


@pytest.mark.parametrize("model", [None, "BPE", 3, []])
def test_a_tokenizer_without_a_model_object_is_refused(tmp_path, model):
    (write_checkpoint(tmp_path) / "tokenizer.json").write_text(json.dumps({"model": model}))
    refuses(tmp_path, r"tokenizer\.json: model=.*: need an object")


def test_257_tokens_whose_ids_are_not_those_of_bytes_are_not_taken_for_bytes(tmp_path):
    raw = byte_tokenizer_json()
    raw["model"]["vocab"]["t0"] = 1
    (write_checkpoint(tmp_path) / "tokenizer.json").write_text(json.dumps(raw))
    try:
        tokenizer = load_checkpoint(tmp_path).tokenizer
    except ValueError as refusal:  # without the tokenizers library, or by it
        assert "tokenizer.json" in str(refusal)
    else:
        assert not isinstance(tokenizer, ByteTokenizer)


def test_a_link_to_nothing_is_no_file(tmp_path):
    (write_checkpoint(tmp_path) / "generation_config.json").symlink_to("gone")
    refuses(tmp_path, r"generation_config\.json: no such file")


def test_a_chat_template_that_is_no_text_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    refuses(tmp_path, r"tokenizer_config\.json: chat_template=3: need a text")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    refuses(tmp_path, r"chat_template\.jinja: not UTF-8 text")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e6])
def test_a_tensor_that_is_not_finite_is_refused_by_name(tmp_path, value):
    weights = random_weights(CONFIG)
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    refuses(
        write_checkpoint(tmp_path, None, weights),
        r"model\.safetensors: model\.layers\.1\.mlp\.up_proj\.weight holds values from .* finite",
    )


def test_a_vocabulary_of_gigabytes_is_refused_from_the_header_alone(tmp_path):
    write_checkpoint(tmp_path)
    huge = CONFIG | {"vocab_size": 2_000_000_000, "hidden_size": 1_000_000}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    tracemalloc.start()
    try:
        refuses(tmp_path, r"model\.safetensors: model\..* has shape .*, config\.json implies")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "file",
    [None, 3, [], "", "../b.safetensors", "/b.safetensors", "sub/b.safetensors", "b.bin", "a\0b"],
)
def test_an_index_that_names_no_file_beside_it_is_refused(tmp_path, file):
    write_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    refuses(tmp_path, r"index\.json: weight_map\['model\.norm\.weight'\]=.*: need the name of a")


def test_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path):
    weights = write_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = sorted(weights)[0]
    index["weight_map"][name] = SHARDS[1]
    path.write_text(json.dumps(index))
    refuses(tmp_path, rf"{SHARDS[1]}: lacks {name}, which the index says is there")


@pytest.mark.parametrize("same", [True, False])
def test_a_tensor_in_two_shards_must_have_one_value(tmp_path, same):
    weights = write_shards(tmp_path)
    names = sorted(weights)
    second = {name: weights[name] for name in [*names[1::2], names[0]]}
    if not same:
        second[names[0]] = second[names[0]] + 1
    save_file(second, tmp_path / SHARDS[1])
    if same:
        assert load_checkpoint(tmp_path).weights.keys() == weights.keys()
    else:
        refuses(tmp_path, rf"{SHARDS[1]}: {names[0]} has another value than in a shard before")


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_name_that_is_no_folder_and_no_hub_id_is_refused_without_a_download(model):
    with pytest.raises(ValueError, match="no such folder"):
        resolve(model)


def test_a_failed_load_raises_from_the_engine_too(tmp_path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: no such file"):
        LLMEngine(model=tmp_path)


def test_old_and_new_spelling_of_rope_parameters_mean_the_same():
    old = parse_config(CONFIG | {"rope_theta": 5e5, "rope_scaling": LLAMA3}, Path("c"))
    new_raw = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    new = parse_config(new_raw | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, Path("c"))
    assert (old.rope_theta, old.rope_scaling) == (new.rope_theta, new.rope_scaling)
    assert new.rope_theta == 5e5


def test_the_families_differ_in_biases_and_norms():
    def switches(name: str, **extra) -> tuple[bool, bool, bool]:
        config = parse_config(CONFIG | {"architectures": [name]} | extra, Path("c"))
        return config.qkv_bias, config.o_bias, config.qk_norm

    assert switches("LlamaForCausalLM") == (False, False, False)
    assert switches("LlamaForCausalLM", attention_bias=True) == (True, True, False)
    assert switches("Qwen2ForCausalLM") == (True, False, False)
    assert switches("Qwen3ForCausalLM") == (False, False, True)


def test_a_checkpoint_builds_a_model_of_its_shapes(tmp_path):
    checkpoint = load_checkpoint(write_checkpoint(tmp_path))
    transformer = Transformer(checkpoint.config, checkpoint.weights, "float64")
    assert transformer.kv_shape == (2, 1, 4)
