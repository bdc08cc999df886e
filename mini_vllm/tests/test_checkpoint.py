"""Loading: nothing half loaded, every refusal names the file and what was wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.llm import LLM
from mini_vllm.models.loader import (
    expected_shapes,
    load_checkpoint,
    parse_config,
    resolve,
)
from mini_vllm.models.transformer import Transformer
from mini_vllm.tokenizer import ByteTokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 256,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def byte_tokenizer_json() -> dict:
    """A `tokenizer.json` of 257 tokens without merges."""
    vocab = {f"t{i}": i for i in range(257)}
    return {"model": {"type": "BPE", "vocab": vocab, "merges": []}}


def random_weights(raw: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = expected_shapes(parse_config(raw, Path("config.json")))
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, config: dict | None = None, weights=None) -> Path:
    raw = CONFIG | (config or {})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    tensors = random_weights(raw) if weights is None else weights
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> dict[str, np.ndarray]:
    """The same checkpoint in two files and an index."""
    write_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    weights = random_weights(CONFIG)
    names = sorted(weights)
    weight_map = {}
    for shard, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save_file({name: weights[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weights


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder)


# ------------------------------------------------------------------ what loads


def test_a_folder_loads_with_config_weights_and_tokenizer(tmp_path):
    checkpoint = load_checkpoint(write_checkpoint(tmp_path))
    assert checkpoint.config.num_hidden_layers == 2
    assert checkpoint.config.head_dim == 4
    assert checkpoint.eos_token_ids == (256,)
    assert isinstance(checkpoint.tokenizer, ByteTokenizer)
    assert checkpoint.weights.keys() == random_weights(CONFIG).keys()


def test_a_folder_serves_an_engine(tmp_path):
    llm = LLM(write_checkpoint(tmp_path), num_blocks=16)
    (output,) = llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    assert llm.llm_engine.max_model_len == 64


def test_shards_give_the_weights_of_the_single_file(tmp_path):
    weights = write_shards(tmp_path)
    loaded = load_checkpoint(tmp_path).weights
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(loaded[name], weights[name]) for name in weights)


def test_tensors_the_model_does_not_use_are_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, dtype=np.float32)}
    loaded = load_checkpoint(write_checkpoint(tmp_path, None, random_weights(CONFIG) | extra))
    assert loaded.weights.keys() == random_weights(CONFIG).keys()


def test_fp16_loads_exactly(tmp_path):
    weights = random_weights(CONFIG, np.float16)
    loaded = load_checkpoint(write_checkpoint(tmp_path, None, weights)).weights
    assert all(np.array_equal(loaded[n], weights[n].astype(np.float32)) for n in weights)
    assert all(array.dtype == np.float32 for array in loaded.values())


def test_bf16_loads_exactly(tmp_path):
    """A bf16 is the upper half of a float32: 0x3FC0 is 1.5, 0xC2F7 is -123.5, 0x0001 subnormal."""
    write_checkpoint(tmp_path)
    patterns = np.array([0x3FC0, 0xC2F7, 0x0001, 0x0000, 0x7F7F], dtype="<u2")
    header: dict[str, dict] = {}
    data = b""
    for name, shape in expected_shapes(parse_config(CONFIG, Path("c"))).items():
        start, data = len(data), data + np.resize(patterns, shape).tobytes()
        offsets = [start, len(data)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + data
    (tmp_path / "model.safetensors").write_bytes(file)
    norm = load_checkpoint(tmp_path).weights["model.norm.weight"]
    largest = (2 - 2.0**-7) * 2.0**127
    assert norm[:5].tolist() == [1.5, -123.5, 2.0**-133, 0.0, largest]


def test_an_untied_model_has_a_head_of_its_own(tmp_path):
    checkpoint = load_checkpoint(write_checkpoint(tmp_path, {"tie_word_embeddings": False}))
    assert checkpoint.weights["lm_head.weight"].shape == (257, 8)


def test_generation_config_overrides_the_eos_ids(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 256]}))
    assert load_checkpoint(tmp_path).eos_token_ids == (9, 256)


def test_the_chat_template_comes_from_its_file_or_the_tokenizers_config(tmp_path):
    write_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    assert load_checkpoint(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_checkpoint(tmp_path).chat_template == "new"


def test_the_shipped_model_fits_its_promises():
    checkpoint = load_checkpoint("byte-llama")
    assert checkpoint.config.vocab_size == 257
    assert checkpoint.config.max_position_embeddings >= 1024
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.eos_token_ids == (256,)
    assert isinstance(checkpoint.tokenizer, ByteTokenizer)
    assert (checkpoint.folder / "model.safetensors").stat().st_size <= 8_000_000


# ------------------------------------------------------------------ what is refused


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
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
        ({"hidden_size": 0}, "hidden_size=0: need a positive integer"),
        ({"hidden_size": "8"}, "hidden_size='8': need a positive integer"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None: need a positive integer"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_key_value_heads=3 does not divide num_attention_heads=4",
        ),
        ({"head_dim": 3}, "head_dim=3: rotary embedding needs an even size"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type='yarn' is not supported; supported: default, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "llama3 rope scaling lacks low_freq_factor, high_freq_factor, "
            "original_max_position_embeddings",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_config_outside_the_supported_families_is_refused(tmp_path, change, message):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ValueError) as refusal:
        load_checkpoint(tmp_path)
    assert message in str(refusal.value)
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_a_name_that_is_no_folder_and_no_hub_id_is_refused_without_a_download(model):
    with pytest.raises(ValueError, match="no such folder"):
        resolve(model)


def test_a_failed_load_raises_from_the_engine_too(tmp_path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: no such file"):
        LLMEngine(model=tmp_path)


def test_old_and_new_spelling_of_rope_parameters_mean_the_same():
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = parse_config(CONFIG | {"rope_theta": 5e5, "rope_scaling": llama3}, Path("c"))
    new_raw = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    new = parse_config(new_raw | {"rope_parameters": llama3 | {"rope_theta": 5e5}}, Path("c"))
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
