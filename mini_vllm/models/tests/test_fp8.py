"""Block-scaled FP8 on disk: what is written, what loads, and what is refused by name.

The logits of such checkpoints are in `conformance/features/moe/test_fp8_checkpoint.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from mini_vllm import LLM, EngineParts, SamplingParams
from mini_vllm.models import fp8_writer
from mini_vllm.models.block_fp8 import BlockFp8Linear, from_e4m3, quantize_weight
from mini_vllm.models.config import num_parameters
from mini_vllm.models.fp8_writer import Tensor, save_tensors, write_block_fp8
from mini_vllm.models.loader import Shard, load_checkpoint
from mini_vllm.models.registry import load_model
from mini_vllm.models.tests.test_checkpoint import SHARDS, refuses, write_checkpoint
from mini_vllm.models.tests.test_moe import QWEN
from mini_vllm.models.transformer import Linear, Transformer

MOE = QWEN | {"moe_intermediate_size": 8}
UP = "model.layers.0.mlp.experts.3.up_proj"


@pytest.fixture
def folder(tmp_path):
    """Experts of 8 by 8 in blocks of 4 by 4."""
    return write_block_fp8(write_checkpoint(tmp_path / "plain", MOE), tmp_path / "fp8", 4)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    shard = Shard.open(folder / "model.safetensors")
    data = shard.path.read_bytes()[shard.header_bytes :]
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in shard.tensors.items()
    }


def rewrite(folder: Path, changes: dict[str, Tensor], **config: Any) -> None:
    """Put tensors in the place of others, and fields into `quantization_config`."""
    save_tensors(tensors_of(folder) | changes, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(raw))


# ------------------------------------------------------------------ what is written and loads


def test_a_matrix_is_codes_and_scales_and_every_other_tensor_keeps_its_bytes(folder):
    plain, quantized = tensors_of(folder.parent / "plain"), tensors_of(folder)
    for name, tensor in plain.items():
        if ".experts." not in name:
            assert quantized[name] == tensor
            continue
        weight = np.frombuffer(tensor[2], np.float32).reshape(tensor[1])
        codes, scale = quantize_weight(weight, (4, 4))
        assert quantized[name] == ("F8_E4M3", [*weight.shape], codes.tobytes())
        assert quantized[f"{name}_scale_inv"] == ("F32", [*scale.shape], scale.tobytes())
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert {*file.keys()} == quantized.keys()
    listed = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.gate" in listed["modules_to_not_convert"]
    assert not any(".experts." in name for name in listed["modules_to_not_convert"])


def test_codes_and_scales_load_exactly_and_no_flag_is_needed(folder):
    checkpoint = load_checkpoint(folder)
    plain = load_checkpoint(folder.parent / "plain")
    codes, scale = quantize_weight(plain.weights[f"{UP}.weight"], (4, 4))
    assert np.array_equal(checkpoint.weights[f"{UP}.weight"], from_e4m3(codes))
    assert np.array_equal(checkpoint.weights[f"{UP}.weight_scale_inv"], scale)
    assert num_parameters(checkpoint.config) == num_parameters(plain.config)
    llm = LLM(folder, num_blocks=8)
    [answer] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 3
    model = llm.llm_engine.model
    assert {type(expert.down_proj) for expert in model.layers[1].experts.experts} == {
        BlockFp8Linear
    }
    assert type(model.layers[1].qkv_proj) is type(model.layers[1].experts.gate) is Linear


def test_scales_of_16_bits_load_exactly(folder):
    ones = np.array([0x3F80, 0x4000, 0x3F00, 0x4040], np.uint16)  # 1, 2, 0.5 and 3 in bfloat16
    rewrite(folder, {f"{UP}.weight_scale_inv": ("BF16", [2, 2], ones.tobytes())})
    loaded = load_checkpoint(folder).weights[f"{UP}.weight_scale_inv"]
    assert loaded.tolist() == [[1.0, 2.0], [0.5, 3.0]]


def test_codes_and_their_scales_may_lie_in_two_files(folder):
    whole, tensors = load_checkpoint(folder).weights, tensors_of(folder)
    weight_map = {name: SHARDS[name.endswith("_scale_inv")] for name in tensors}
    for file in SHARDS:
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_tensors(held, folder / file)
    (folder / "model.safetensors").unlink()
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    loaded = load_checkpoint(folder).weights
    assert loaded.keys() == whole.keys()
    assert all(np.array_equal(loaded[name], whole[name]) for name in whole)


def test_of_two_lists_the_first_that_is_not_empty_counts(folder):
    raw = json.loads((folder / "config.json").read_text())
    rewrite(folder, {}, ignored_layers=raw["quantization_config"]["modules_to_not_convert"],
            modules_to_not_convert=[UP])  # fmt: skip
    assert UP not in load_checkpoint(folder).config.quant_config.ignored_layers
    rewrite(folder, {}, ignored_layers=["lm_head"])
    refuses(folder, r"lacks \d+ tensor\(s\): model.layers.0.mlp.gate.weight_scale_inv")


def test_the_command_writes_what_the_function_writes(folder, tmp_path, capsys):
    source, target = folder.parent / "plain", tmp_path / "asked"
    with pytest.raises(SystemExit):
        fp8_writer.main([str(source), str(target), "--block", "0"])
    assert "block=0: need a positive integer" in capsys.readouterr().err
    assert fp8_writer.main([str(source), str(target), "--block", "4"]) == 0
    written = (target / "model.safetensors").read_bytes()
    assert written == (folder / "model.safetensors").read_bytes()
    assert f"{len(written):,} bytes" in capsys.readouterr().out


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq': need 'fp8'"),
        ({"quant_method": None}, "quant_method=None: need 'fp8'"),
        ({"activation_scheme": "static"}, "activation_scheme='static': need 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt='e5m2': need None or 'e4m3'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0': need None or 'float'"),
        ({"weight_block_size": None}, "weight_block_size=None: need two equal sizes"),
        ({"weight_block_size": [4, 8]}, "weight_block_size=.4, 8.: need two equal sizes"),
        ({"weight_block_size": [0, 0]}, "weight_block_size=.0, 0.: need positive integers"),
        ({"weight_block_size": [4.0, 4.0]}, "weight_block_size=.*: need positive integers"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head': need a list"),
        ({"ignored_layers": [3]}, "ignored_layers=.3.: need a list of modules' names"),
        ({"weight_block_size": [2, 2]}, r"scale_inv has shape \(2, 2\), .* implies \(4, 4\)"),
    ],
)
def test_another_kind_of_quantization_is_refused_by_name(folder, change, message):
    rewrite(folder, {}, **change)
    refuses(folder, message)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{UP}.weight", ("F16", [8, 8], bytes(128)), "dtype F16 is not supported; .*: F8_E4M3$"),
        (f"{UP}.weight", ("F8_E4M3", [8, 4], bytes(32)), r"has shape \(8, 4\), config.json"),
        (f"{UP}.weight", ("F8_E4M3", [8, 8], b"\x7f" * 64), f"{UP}.weight cannot be read .*NaN"),
        (f"{UP}.weight_scale_inv", ("F32", [4], bytes(16)), r"has shape \(4,\), .*\(2, 2\)"),
        (f"{UP}.weight_scale_inv", ("F8_E4M3", [2, 2], bytes(4)), "dtype F8_E4M3 is not supp"),
        (
            f"{UP}.weight_scale_inv", ("F32", [2, 2], np.full(4, np.nan, np.float32).tobytes()),
            "holds values from nan",
        ),
        ("model.norm.weight", ("F8_E4M3", [8], bytes(8)), "dtype F8_E4M3 is not supported"),
    ],
)  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_by_name(folder, name, tensor, message):
    rewrite(folder, {name: tensor})
    refuses(folder, message)


def test_codes_without_a_quantization_config_are_refused(folder):
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    refuses(folder, "dtype F8_E4M3 is not supported; supported: F32, F16, BF16")


@pytest.mark.parametrize(
    ("config", "block", "modules", "message"),
    [
        (MOE, 4, "mlp", r"layers.0.mlp.gate: need a router listed in modules_to_not_convert"),
        (MOE, 8, r"\.experts\.", ""),
        (QWEN, 4, r"\.experts\.", r"gate_up_proj: weight_block_size=4: need one that divides .10."),
        (QWEN | {"moe_intermediate_size": 16}, 16, r"\.experts\.", "divides a row of 8"),
        ({}, 4, "(q|v)_proj$", "qkv_proj: need q_proj, k_proj, v_proj all quantized or none"),
        ({}, 4, "_proj$", ""),
        ({}, 8, "down_proj$", r"down_proj: block=\(8, 8\): need one that divides a row of 12"),
        ({"num_key_value_heads": 1}, 8, "(qkv|q|k|v)_proj$", r"divides .8, 4., the rows of q_proj"),
    ],
)  # fmt: skip
def test_what_the_pin_would_not_build_is_refused_by_name(tmp_path, config, block, modules, message):
    plain = write_checkpoint(tmp_path / "plain", config)
    made = write_block_fp8(plain, tmp_path / "fp8", block, modules)
    if not message:
        LLM(made, num_blocks=8)
        return
    with pytest.raises(ValueError, match=message):
        LLM(made, num_blocks=8)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"enable_lora": True}, "enable_lora=True: need a checkpoint without quantization_config"),
        ({"tensor_parallel_size": 2}, "quantization_config with ranks: need a checkpoint without"),
        ({"parts": EngineParts(linear=lambda w, b, n: Linear(w, b))}, "need the engine's own"),
        (
            {"speculative_config": {
                "method": "mtp", "model": "models/byte-mtp", "num_speculative_tokens": 1,
            }},
            "method='mtp' with a target in FP8",
        ),
    ],
)  # fmt: skip
def test_what_was_not_compared_with_it_is_refused_by_name(tmp_path, knobs, message):
    made = write_block_fp8(write_checkpoint(tmp_path / "plain"), tmp_path / "fp8", 4, "o_proj$")
    with pytest.raises(ValueError, match=message):
        LLM(made, num_blocks=8, **knobs)


def test_layers_that_read_no_scales_are_refused(folder):
    class Other(Transformer):
        """Not the engine's own."""

    checkpoint = load_checkpoint(folder)
    with pytest.raises(ValueError, match="linear=Linear with quant_config"):
        Transformer(checkpoint.config, checkpoint.weights)
    with pytest.raises(ValueError, match="need the engine's own layers"):
        load_model(folder, None, "float32", 0, lambda *a: a[0], Linear, transformer=Other)


def test_a_multimodal_model_is_refused(folder):
    path = folder / "config.json"
    raw = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": json.loads(path.read_text()),
    }
    path.write_text(json.dumps(raw))
    refuses(folder, "quantization_config with a multimodal model")


def test_the_writer_refuses_what_it_cannot_quantize(folder, tmp_path):
    for model, block, message in (
        (folder, 4, "config.json: need one of LlamaForCausalLM, .* that is not quantized"),
        ("byte-window", 64, "need one of Llama"),
        ("byte-sees", 64, "need one of Llama"),
        (folder.parent / "plain", 0, "block=0: need a positive integer"),
    ):
        with pytest.raises(ValueError, match=message):
            write_block_fp8(model, tmp_path / "no", block)
    for modules, message in (
        ("(", "need a regular expression"),
        (
            r"experts\.3\.",
            r"need all experts beside model.layers.[01].mlp.experts.3.\w+ or none",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write_block_fp8(folder.parent / "plain", tmp_path / "no", 4, modules)
    assert not (tmp_path / "no").exists()
