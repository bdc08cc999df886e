"""Write a checkpoint in block-scaled FP8, as DeepSeek-V3 and Qwen3-FP8 lay it out.

    python -m mini_vllm.models.fp8_writer byte-moe FOLDER

Promises: every matrix that `modules_to_not_convert` does not list has its codes as `weight` and its
scales as `weight_scale_inv`; every other tensor keeps its bytes. The names are those that
`vllm/model_executor/layers/quantization/fp8.py:261` `Fp8LinearMethod` and
`vllm/model_executor/layers/quantization/fp8.py:566` `Fp8MoEMethod` create.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mini_vllm.models.block_fp8 import quantize_weight
from mini_vllm.models.config import SUPPORTED, expected_shapes
from mini_vllm.models.files import read_json
from mini_vllm.models.fp8 import SCALE, Fp8Config
from mini_vllm.models.loader import Shard, open_shards, read_config, resolve

Tensor = tuple[str, Sequence[int], bytes]
"""Dtype as safetensors names it, shape, and bytes."""
KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_block_fp8(
    model: str | Path, folder: Path, block: int = 64, modules: str = r"\.experts\."
) -> Path:
    """Quantize matrices of a checkpoint and write all of it into `folder`.

    Args:
        model: as for `load_checkpoint`.
        folder: is made if it is not there.
        block: rows and columns that share a scale.
        modules: a regular expression that is found in the names of those to quantize, such as
            `model.layers.0.mlp.experts.3.up_proj`.

    Returns:
        `folder`.

    Raises:
        ValueError: `block` below 1; no regular expression, or one that finds some experts of a
            layer only; what cannot be loaded, or is none of `SUPPORTED`, or is quantized already.
    """
    if type(block) is not int or block < 1:
        raise ValueError(f"block={block!r}: need a positive integer")
    try:
        is_chosen = re.compile(modules).search
    except re.error as error:
        raise ValueError(f"modules={modules!r}: need a regular expression ({error})") from None
    source = resolve(model)
    path = source / "config.json"
    config, raw = read_config(path), read_json(path)
    if raw.get("quantization_config") or raw["architectures"][0] not in SUPPORTED:
        raise ValueError(f"{path}: need one of {', '.join(SUPPORTED)} that is not quantized")
    matrices = [
        name.removesuffix(".weight")
        for name, shape in expected_shapes(config).items()
        if name.startswith("model.layers.") and len(shape) == 2
    ]
    chosen = {name for name in matrices if is_chosen(name)}
    ignored = [name for name in matrices if name not in chosen]
    fp8 = Fp8Config((block, block), frozenset(ignored))
    for name in chosen:
        if fp8.is_layer_skipped(name):
            raise ValueError(f"modules={modules!r}: need all experts beside {name} or none of them")
    tensors: dict[str, Tensor] = {}
    for shard, names in open_shards(source, config):
        for name in names:
            module = name.removesuffix(".weight")
            if module in chosen:
                codes, scale = quantize_weight(shard.read(name), (block, block))
                tensors[name] = ("F8_E4M3", codes.shape, codes.tobytes())
                tensors[f"{module}.{SCALE}"] = ("F32", scale.shape, scale.tobytes())
            else:
                tensors[name] = _as_it_is(shard, name)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / "model.safetensors")
    raw["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block],
        "modules_to_not_convert": [*ignored, "lm_head"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for name in KEPT:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    return folder


def _as_it_is(shard: Shard, name: str) -> Tensor:
    entry = shard.tensors[name]
    start, end = entry["data_offsets"]
    with shard.path.open("rb") as file:
        file.seek(shard.header_bytes + start)
        return (entry["dtype"], entry["shape"], file.read(end - start))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file; the library writes numpy's dtypes, of which none is FP8."""
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": [*shape],
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data for _, _, data in tensors.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--modules", default=r"\.experts\.", help="a regular expression")
    asked = parser.parse_args(argv)
    try:
        folder = write_block_fp8(asked.model, asked.folder, asked.block, asked.modules)
    except ValueError as error:
        parser.error(str(error))
    print(f"{folder}: {(folder / 'model.safetensors').stat().st_size:,} bytes of weights")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
