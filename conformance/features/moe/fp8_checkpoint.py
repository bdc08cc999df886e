"""Record what the pinned tree makes of checkpoints in block-scaled FP8: parameters and logits.

Needs the pinned tree on `PYTHONPATH`, with transformers, no GPU. Each checkpoint is written by
`mini_vllm.models.fp8_writer` and loaded by vLLM's own loader into vLLM's own model class. The
quantized parameters, as loaded, then stand in the transformers model of the checkpoint before it
was quantized: their products by the reference code of the kernels' tests, all else float32.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from conformance.features.moe import texts
from mini_vllm.models.fp8_writer import Tensor, save_tensors, write_block_fp8

Case = dict[str, Any]

ABOUT = (
    "Kinds: loaded (a checkpoint of `MODELS` to digests of its quantized parameters), logits (one "
    "and a prompt to the logits of its last token), damage "
    "(a checkpoint with one mistake of `DAMAGES`: what vLLM's loader says) and skipped (modules, "
    "and which of them a list of names leaves unquantized)."
)
QWEN2 = texts.SIZES | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 96,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantized:
    """A checkpoint before quantization, and what `write_block_fp8` is given."""

    source: str
    block: int
    modules: str


MODELS = {
    "byte-moe: experts": Quantized("byte-moe", 64, r"\.experts\."),
    "byte-moe: experts and attention": Quantized("byte-moe", 64, "_proj$"),
    "mixtral: experts": Quantized("mixtral", 32, r"\.experts\."),
    "qwen2: attention with biases, MLP": Quantized("qwen2", 32, "_proj$"),
    "qwen2: blocks cut at the end": Quantized("qwen2", 64, "down_proj$"),
}
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]
PROMPTS = 4
TOKENS = 48


def written(name: str, home: Path) -> tuple[Path, Path]:
    """The folders of a checkpoint before and after; the same numbers on every machine."""
    of, source = MODELS[name], MODELS[name].source
    if source == "qwen2":
        plain = texts.write_random(QWEN2, home / source)
    else:
        plain = texts.folder_of(source, home)
    return plain, write_block_fp8(plain, home / "fp8", of.block, of.modules)


def prompts() -> list[list[int]]:
    """The same for every model."""
    long = (p for p in texts.kept("byte-moe")["prompts"] if len(p) >= TOKENS)
    return [prompt[:TOKENS] for prompt in itertools.islice(long, PROMPTS)]


def raw_tensors(path: Path) -> dict[str, Tensor]:
    """Dtype, shape and bytes of everything in a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[start:][slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def _renamed(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name)


def _without_scales(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        del tensors[name]


def _axes_swapped(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = dtype, shape[::-1], data


def _config(**changes: Any) -> Change:
    def change(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        raw["quantization_config"] |= changes

    return change


def _listed(*names: str) -> Change:
    def change(raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        raw["quantization_config"]["modules_to_not_convert"] += names

    return change


DAMAGES: dict[str, Change] = {
    "none": lambda raw, tensors: None,
    "weight_scale for weight_scale_inv": _renamed,
    "no scales": _without_scales,
    "scales of swapped shape": _axes_swapped,
    "static activations": _config(activation_scheme="static"),
    "a block of one size": _config(weight_block_size=[32]),
    "a block wider than an expert": _config(weight_block_size=[64, 64]),
    "one expert listed": _listed("model.layers.0.mlp.experts.3.up_proj"),
    "one of three listed": _listed("model.layers.0.self_attn.k_proj"),
}
"""Each on a Qwen3-MoE of `texts.RANDOM`, experts and attention quantized in blocks of 32 by 32."""


def damaged(name: str, home: Path) -> Path:
    """A folder with this mistake."""
    plain = texts.random_checkpoint("qwen3-moe", home / "plain")
    folder = write_block_fp8(plain, home / "fp8", 32, "_proj$")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = raw_tensors(folder / "model.safetensors")
    DAMAGES[name](raw, tensors)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_tensors(tensors, folder / "model.safetensors")
    return folder


# ------------------------------------------------------------------ the pinned tree


def as_loaded(folder: Path) -> dict[str, Any]:
    """The parameters of vLLM's model of a folder, by vLLM's loader, before kernels repack them.

    Plain weights become float16, one of the two dtypes this quantization takes
    (`vllm/model_executor/layers/quantization/fp8.py:143` `Fp8Config.get_supported_act_dtypes`). A
    linear layer asks for its kernel while it is built; none runs here.
    """
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader import base_loader, get_model_loader

    settings = EngineArgs(
        model=str(folder), dtype="float16", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=128,
    ).create_engine_config()  # fmt: skip
    with (
        set_current_vllm_config(settings),
        mock.patch.object(fp8, "init_fp8_linear_kernel"),
        mock.patch.object(base_loader, "process_weights_after_loading"),
    ):
        start_ranks()
        model = get_model_loader(settings.load_config).load_model(
            vllm_config=settings, model_config=settings.model_config
        )
    return {name: parameter.data for name, parameter in model.named_parameters()}


def start_ranks() -> None:
    """One rank of one, on loopback, once."""
    import torch
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    if torch.distributed.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
    initialize_model_parallel(1, 1)


def peer(plain: Path, loaded: dict[str, Any], block: int) -> Any:
    """The transformers model of `plain`, float32, with the quantized parameters in their places."""
    import torch
    from transformers import AutoModelForCausalLM

    experts, matmul, quantize = references()
    theirs = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    shape = [block, block]

    def product(x: Any, weight: Any, scale: Any, bias: Any) -> Any:
        codes, scales = quantize(x.reshape(-1, x.shape[-1]).contiguous(), block)
        y = matmul(codes, weight, scales, scale, shape, torch.float32).reshape(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def run_experts(x: Any, ids: Any, weights: Any, stacks: list[Any]) -> Any:
        return experts(x, *stacks, weights, ids, shape)

    for name, weight in loaded.items():
        if weight.dtype is not torch.float8_e4m3fn or name.endswith("w2_weight"):
            continue
        layer = theirs.model.layers[int(name.split(".")[2])]
        if name.endswith("w13_weight"):
            both = [name, name.replace("w13", "w2")]
            stacks = [loaded[n] for n in (*both, *(f"{n}_scale_inv" for n in both))]
            [module] = [m for n, m in layer.named_modules() if n.endswith(".experts")]
            module.forward = functools.partial(run_experts, stacks=stacks)
            continue
        _, parent, own = name.removesuffix(".weight").rsplit(".", 2)
        start, scale = 0, loaded[f"{name}_scale_inv"]
        for shard in PACKED.get(own, (own,)):
            linear = layer.get_submodule(f"{parent}.{shard}")
            end = start + linear.out_features
            rows = scale[start // block : -(-end // block)]
            linear.forward = functools.partial(
                product, weight=weight[start:end], scale=rows, bias=linear.bias
            )
            start = end
    return theirs


def references() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`tests/kernels/moe/test_block_fp8.py:108` `torch_w8a8_block_fp8_moe`, and beside it
    `tests/kernels/quant_utils.py:91` `native_w8a8_block_matmul` and
    `tests/kernels/quant_utils.py:157` `native_per_token_group_quant_fp8`.

    The first's module asks for a device's capability when it is imported; 9.0 is answered.
    """
    from vllm.platforms import current_platform

    with mock.patch.object(type(current_platform), "get_device_capability", return_value=(9, 0)):
        from tests.kernels.moe.test_block_fp8 import torch_w8a8_block_fp8_moe
        from tests.kernels.quant_utils import (
            native_per_token_group_quant_fp8,
            native_w8a8_block_matmul,
        )
    return torch_w8a8_block_fp8_moe, native_w8a8_block_matmul, native_per_token_group_quant_fp8


def digests(loaded: dict[str, Any]) -> dict[str, str]:
    """SHA-256 of the bytes of each quantized parameter and of its scales, by vLLM's names."""
    import torch

    kinds = (torch.float8_e4m3fn, torch.float32)
    return {
        name: hashlib.sha256(parameter.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in loaded.items()
        if parameter.dtype in kinds
    }


def models() -> Iterator[Case]:
    """`{"model", "sha256"}`, and `{"model", "prompt", "logits"}`: float32 [vocab_size]."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    for name, of in MODELS.items():
        with tempfile.TemporaryDirectory() as home:
            plain, folder = written(name, Path(home))
            loaded = as_loaded(folder)
            theirs = peer(plain, loaded, of.block)
        yield {"kind": "loaded", "model": name, "sha256": digests(loaded)}
        for prompt in prompts():
            with (
                torch.inference_mode(),
                set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))),
            ):
                rows = theirs(torch.tensor([prompt])).logits[0]
            yield {"kind": "logits", "model": name, "prompt": prompt, "logits": rows[-1].tolist()}


def damage() -> Iterator[Case]:
    """`{"damage", "said", "scales_are_ones"}`: the first line of the error, empty if it loads."""
    for name in DAMAGES:
        with tempfile.TemporaryDirectory() as home:
            folder, said, are_ones = damaged(name, Path(home)), "", False
            try:
                loaded = as_loaded(folder)
            except Exception as error:  # whatever it is, it is what a user of vLLM reads
                said = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
            else:
                scales = [
                    p for n, p in loaded.items() if n.endswith("experts.w13_weight_scale_inv")
                ]
                are_ones = bool(scales) and all(bool((p == 1).all()) for p in scales)
            yield {"kind": "damage", "damage": name, "said": said, "scales_are_ones": are_ones}


def skipped() -> Iterator[Case]:
    """`{"ignored", "modules", "skipped"}`: the last a flag per module.

    `vllm/model_executor/layers/quantization/utils/quant_utils.py:464` `is_layer_skipped`, which is
    given the name of a layer's experts for each of them.
    """
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    modules = [
        f"model.layers.{layer}.{name}"
        for layer in (1, 11)
        for name in (
            "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.experts.3.up_proj",
            "mlp.experts.13.down_proj", "block_sparse_moe.experts.3.w1",
        )
    ]  # fmt: skip
    lists: tuple[tuple[str, ...], ...] = (
        (), ("lm_head",), ("self_attn",), ("model.layers.1",), tuple(modules[:2]),
        ("model.layers.1.self_attn.o_proj", "model.layers.11.mlp.experts"), (modules[4],),
        ("model.layers.11.block_sparse_moe.experts.0.w3",), ("mlp.experts",), ("experts",),
        ("language_model.model.layers.1.mlp.experts.0.up_proj",),
    )  # fmt: skip
    for ignored in lists:
        prefixes = [m.partition(".experts.")[0] + ".experts" * (".experts." in m) for m in modules]
        flags = [is_layer_skipped(prefix, list(ignored)) for prefix in prefixes]
        yield {"kind": "skipped", "ignored": ignored, "modules": modules, "skipped": flags}


def cases() -> Iterator[Case]:
    """All cases, from a process of their own: it is on a processor for good."""
    command = [sys.executable, "-m", "conformance.features.moe.fp8_checkpoint"]
    for line in subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def main() -> int:
    """Write every case, a line each."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    platforms._current_platform = CpuPlatform()
    for record in (models, damage, skipped):
        for case in record():
            print(json.dumps(case), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
