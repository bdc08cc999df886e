"""Loading: nothing half loaded, every refusal names the file and what was wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm.config import SamplingParams
from mini_vllm.llm import LLM
from mini_vllm.models.loader import (
    expected_shapes,
    load_checkpoint,
    parse_config,
)
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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
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
    patterns = np.array([0x3FC0, 0xC2F7, 0x0001, 0x0000, 0x4974], dtype="<u2")
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
    assert norm[:5].tolist() == [1.5, -123.5, 2.0**-133, 0.0, 999424.0]


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
