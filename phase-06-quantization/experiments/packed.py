"""Whole checkpoints in 4 and 8 bits, written so that vLLM loads them, and read back by numpy.

`python phase-06-quantization/experiments/packed.py "gptq, nearest" FOLDER` quantizes the shipped
model and writes a Hugging Face folder; `vllm serve FOLDER` takes it. The codes are those of labs
06-01 and 06-03, of `gptq.py` and `awq.py`; the words are lab 06-03's. `load` reads such a folder
into the mini engine by the rules of the real one. `DAMAGE` holds mistakes that can be made on
purpose. What a folder must hold is what these register:
`vllm/model_executor/layers/quantization/auto_gptq.py:322` `AutoGPTQLinearMethod.create_weights`,
`vllm/model_executor/layers/quantization/cpu_wna16.py:168` `CPUAWQLinearMethod.create_weights` and
`vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py:83`
`CompressedTensorsWNA16.create_weights`.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from labkit.modules import sibling
from mini_vllm.models.transformer import Linear, Transformer

awq = sibling(__file__, "awq")
gptq = sibling(__file__, "gptq")
heldout = sibling(__file__, "heldout")
schemes = sibling(__file__, "schemes")

HERE = Path(__file__).resolve().parent


MODEL = schemes.ROOT / "models" / "byte-llama"
GROUP = 128
CALIBRATION_FILES = 20
INT4, INT8 = schemes.INT4, schemes.INT8
PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}
"""A layer of the engine and what the file calls its parts, in the order of their rows."""
NORMS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Coded:
    """A linear layer in codes. With 4 bits `(codes - zeros) * scales`, with 8 `codes * scales`."""

    codes: np.ndarray
    """[out_features, in_features]; 4 bits: 0..15, 8 bits: int8."""
    scales: np.ndarray
    """[out_features, num_groups]; float16, or float32 with 8 bits."""
    zeros: np.ndarray | None = None
    """[out_features, num_groups], 0..15; None where 8 is meant, or with 8 bits."""
    g_idx: np.ndarray | None = None
    """int32 [in_features], the group of each input, where its members are no neighbours."""
    factor: np.ndarray | None = None
    """float32 [in_features]: the norm before the layer is to be divided by it."""

    def rows(self, start: int, stop: int) -> Coded:
        """Some of the outputs: what the file stores of a fused layer under one name."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return Coded(self.codes[start:stop], self.scales[start:stop], zeros, self.g_idx)


Quantizer = Callable[[np.ndarray, schemes.Inputs], Coded]
Layout = Callable[[Coded], Tensors]


# ------------------------------------------------------------------ choosing codes


def nearest(weight: np.ndarray, inputs: schemes.Inputs) -> Coded:
    """Lab 06-03: rounding to nearest, 15 codes."""
    q, scales = INT4.quantize_grouped(weight, GROUP)
    return Coded(q + 8, scales)


def mini_gptq(weight: np.ndarray, inputs: schemes.Inputs) -> Coded:
    """`gptq.py`, columns from left to right."""
    q, scales = gptq.gptq(weight, gptq.hessian(inputs.sample), GROUP)
    return Coded(q + 8, scales)


def mini_gptq_reordered(weight: np.ndarray, inputs: schemes.Inputs) -> Coded:
    """`gptq.py`, the columns with the loudest inputs first: activation order, `desc_act`.

    Every column keeps its place in the file; which group it was quantized with, `g_idx` says.
    """
    h = gptq.hessian(inputs.sample)
    order = np.argsort(-np.diag(h), kind="stable")
    sorted_weight = np.ascontiguousarray(weight[:, order])
    q, scales = gptq.gptq(sorted_weight, h[np.ix_(order, order)], GROUP)
    codes, g_idx = np.empty_like(q), np.empty(len(order), dtype=np.int32)
    codes[:, order] = q
    g_idx[order] = np.arange(len(order)) // GROUP
    return Coded(codes + 8, scales, g_idx=g_idx)


def zero_points(weight: np.ndarray, inputs: schemes.Inputs) -> Coded:
    """16 codes between the minimum and the maximum of a group."""
    codes, scales, zeros = schemes.uint4_zero_points(weight, GROUP)
    return Coded(codes, scales.astype(np.float16), zeros)


def searched(weight: np.ndarray, inputs: schemes.Inputs) -> Coded:
    """`awq.py`: the same after a factor per input channel, where a norm can take it."""
    if not inputs.foldable:
        return zero_points(weight, inputs)
    found = awq.errors(weight, inputs.sample, inputs.sample, GROUP)
    s = awq.factors(inputs.sample, awq.ALPHAS[int(np.argmin(found))])
    coded = zero_points(weight * s, inputs)
    return Coded(coded.codes, coded.scales, coded.zeros, factor=s)


def int8_rows(weight: np.ndarray, inputs: schemes.Inputs) -> Coded:
    """Lab 06-01: one scale per output."""
    q, scales = INT8.quantize_per_channel(weight)
    return Coded(q, scales.reshape(-1, 1).astype(np.float32))


# ------------------------------------------------------------------ laying them out


def gptq_layout(coded: Coded) -> Tensors:
    """`qweight` [in / 8, out], `scales` [groups, out], `qzeros` [groups, out / 8], `g_idx` [in].

    `qzeros` hold 7, as GPTQ's files do: the zero-point less one.
    """
    out_features, in_features = coded.codes.shape
    zeros = np.full((coded.scales.shape[1], out_features), 7 - 8)
    plain = np.arange(in_features, dtype=np.int32) // GROUP
    return {
        "qweight": INT4.pack_layout(coded.codes - 8, "gptq"),
        "qzeros": INT4.pack_words(zeros),
        "scales": np.ascontiguousarray(coded.scales.T),
        "g_idx": plain if coded.g_idx is None else coded.g_idx,
    }


def awq_layout(coded: Coded) -> Tensors:
    """`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""
    assert coded.zeros is not None, "AWQ stores a zero-point per group"
    zeros = np.ascontiguousarray(coded.zeros.T)
    return {
        "qweight": INT4.pack_layout(coded.codes - 8, "awq"),
        "qzeros": INT4.pack_words(zeros - 8, INT4.AWQ),
        "scales": np.ascontiguousarray(coded.scales.T),
    }


def pack_quantized(coded: Coded) -> Tensors:
    """`weight_packed` [out, in / 8], `weight_scale` [out, groups], `weight_shape` [2]."""
    return {
        "weight_packed": INT4.pack_layout(coded.codes - 8, "compressed-tensors"),
        "weight_scale": coded.scales,
        "weight_shape": np.array(coded.codes.shape, dtype=np.int64),
    }


def int_quantized(coded: Coded) -> Tensors:
    """`weight` int8 [out, in], `weight_scale` float32 [out, 1]."""
    return {"weight": np.ascontiguousarray(coded.codes), "weight_scale": coded.scales}


def gptq_config(desc_act: bool) -> dict[str, Any]:
    """`quantization_config` of a GPTQ checkpoint; which layers it covers is seen in the file."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": desc_act,
        "lm_head": False,
    }


AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}


def compressed_config(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """`quantization_config` of a compressed-tensors checkpoint, one group for all linear layers."""
    shared = {"type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**shared, "dynamic": True, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the codes are chosen, how they are laid out, what `config.json` says of them."""

    quantize: Quantizer
    layout: Layout
    config: Mapping[str, Any] = field(default_factory=dict)


W4 = compressed_config(
    "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}, None
)
W8 = compressed_config(
    "int-quantized",
    {"num_bits": 8, "strategy": "channel"},
    {"num_bits": 8, "strategy": "token"},
)
RECIPES: dict[str, Recipe] = {
    "gptq, nearest": Recipe(nearest, gptq_layout, gptq_config(False)),
    "gptq, mini-GPTQ": Recipe(mini_gptq, gptq_layout, gptq_config(False)),
    "gptq, reordered": Recipe(mini_gptq_reordered, gptq_layout, gptq_config(True)),
    "awq, zero-points": Recipe(zero_points, awq_layout, AWQ_CONFIG),
    "awq, searched": Recipe(searched, awq_layout, AWQ_CONFIG),
    "pack-quantized, nearest": Recipe(nearest, pack_quantized, W4),
    "int-quantized, W8A8": Recipe(int8_rows, int_quantized, W8),
}


# ------------------------------------------------------------------ a whole model


@functools.cache
def calibration() -> dict[str, schemes.Inputs]:
    """Inputs of each linear layer for training text, as `evaluate.py` takes them."""
    texts = list(heldout.library(False, 2 * CALIBRATION_FILES).values())[::2]
    return {
        name: schemes.Inputs(x, name.split(".")[-1] in NORMS)
        for name, x in heldout.capture(heldout.model(), texts).items()
    }


def shipped() -> Tensors:
    """The shipped checkpoint's tensors, float16."""
    return load_file(MODEL / "model.safetensors")


def pack(recipe: Recipe) -> Tensors:
    """All tensors of a quantized checkpoint; embedding and norms stay float16.

    A fused layer is quantized whole and stored in parts. The norm before a layer with a factor is
    divided by it.
    """
    source = shipped()
    kept = {name: array for name, array in source.items() if not name.endswith("_proj.weight")}
    for layer in range(heldout.model().config.num_hidden_layers):
        for fused, parts in PARTS.items():
            names = [f"model.layers.{layer}.{part}" for part in parts]
            weights = [source[f"{name}.weight"].astype(np.float32) for name in names]
            inputs = calibration()[f"layers.{layer}.{fused}"]
            coded = recipe.quantize(np.concatenate(weights), inputs)
            if coded.factor is not None:
                norm = f"model.layers.{layer}.{NORMS[fused]}.weight"
                kept[norm] = (source[norm].astype(np.float32) / coded.factor).astype(np.float16)
            start = 0
            for name, weight in zip(names, weights, strict=True):
                stored = recipe.layout(coded.rows(start, start + len(weight)))
                kept |= {f"{name}.{suffix}": array for suffix, array in stored.items()}
                start += len(weight)
    return kept


def write(tensors: Tensors, quantization: Mapping[str, Any], folder: Path) -> None:
    """A Hugging Face folder: the shipped model's files, with these tensors and this config."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    if quantization:
        config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    whole = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------ reading it back


def decode(stored: Mapping[str, np.ndarray], quantization: Mapping[str, Any]) -> np.ndarray:
    """The matrix that one layer's tensors stand for, float32 [out_features, in_features].

    4-bit values are rounded to float16, as the kernel does before it multiplies
    (`csrc/cpu/cpu_wna16.cpp:38` `Dequantizer4b`). GPTQ's zero-points are not read, and its
    `g_idx` only with `desc_act`: as
    `vllm/model_executor/kernels/linear/mixed_precision/cpu.py:104`
    `CPUWNA16LinearKernel.process_weights_after_loading` drops them.
    """
    if "weight" in stored:
        return stored["weight"].astype(np.float32) * stored["weight_scale"]
    if "weight_packed" in stored:
        codes = INT4.unpack_layout(stored["weight_packed"], "compressed-tensors")
        scales, zeros = stored["weight_scale"], 0
    elif quantization["quant_method"] == "gptq":
        codes = INT4.unpack_layout(stored["qweight"], "gptq")
        scales, zeros = stored["scales"].T, 0
    else:
        codes = INT4.unpack_layout(stored["qweight"], "awq")
        scales, zeros = stored["scales"].T, INT4.unpack_words(stored["qzeros"], INT4.AWQ).T
    group = np.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    if quantization.get("desc_act"):
        group = stored["g_idx"]
    steps = codes.astype(np.float32) - (zeros if isinstance(zeros, int) else zeros[:, group])
    values = steps * scales.astype(np.float32)[:, group]
    return values.astype(np.float16).astype(np.float32)


def layers_of(tensors: Tensors) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Name and tensors of each linear layer of a file."""
    names = sorted({name.rpartition(".")[0] for name in tensors if "_proj." in name})
    for name in names:
        yield (
            name,
            {key.rpartition(".")[2]: array for key, array in tensors.items() if f"{name}." in key},
        )


class PerToken(Linear):
    """A layer whose inputs go through int8 with a scale per token."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return super().__call__(schemes.int8_per_token(x))


def load(folder: Path, dtype: str = "float64") -> Transformer:
    """The model in `folder`, quantized or not, in the mini engine."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config", {})
    weights = dict(tensors)
    if quantization:
        for name, stored in layers_of(tensors):
            weights[f"{name}.weight"] = decode(stored, quantization)
    activations = quantization.get("format") == "int-quantized"

    def linear(weight: np.ndarray, bias: np.ndarray | None, name: str) -> Linear:
        return (PerToken if activations and name != "lm_head" else Linear)(weight, bias, name)

    return Transformer(heldout.model().config, weights, dtype, linear=linear)


# ------------------------------------------------------------------ mistakes, made on purpose

Change = Callable[[Tensors, dict[str, Any]], None]


def _each(tensors: Tensors, suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    for name in tensors:
        if name.endswith(f".{suffix}"):
            tensors[name] = np.ascontiguousarray(change(tensors[name]))


def standard_order(tensors: Tensors, config: dict[str, Any]) -> None:
    """AWQ's arrays with their eight codes in standard order."""
    for suffix in ("qweight", "qzeros"):
        _each(tensors, suffix, lambda words: INT4.pack_words(INT4.unpack_words(words, INT4.AWQ)))


def no_bias(tensors: Tensors, config: dict[str, Any]) -> None:
    """GPTQ's codes as two's complement, -8..7 as 8..15 and 0..7, instead of with 8 added."""
    flip = np.uint32(0x88888888)
    _each(tensors, "qweight", lambda words: (words.view(np.uint32) ^ flip).view(np.int32))


def reshaped(tensors: Tensors, config: dict[str, Any]) -> None:
    """GPTQ's [in / 8, out] filled row by row from [out, in / 8]: `reshape` where `.T` belongs."""
    _each(tensors, "qweight", lambda words: words.T.copy().reshape(words.shape))


def square_transposed(tensors: Tensors, config: dict[str, Any]) -> None:
    """The codes of q_proj and o_proj along the other axis: the only square matrices there are."""
    for name in tensors:
        if name.endswith(("q_proj.weight_packed", "o_proj.weight_packed")):
            codes = INT4.unpack_layout(tensors[name], "compressed-tensors")
            tensors[name] = INT4.pack_layout(codes.T, "compressed-tensors")


def zeros_less_one(tensors: Tensors, config: dict[str, Any]) -> None:
    """AWQ's zero-points stored less one, as GPTQ stores its own; 0 stays."""

    def less(words: np.ndarray) -> np.ndarray:
        zeros = INT4.unpack_words(words, INT4.AWQ) + 8
        return INT4.pack_words(np.maximum(zeros - 1, 0) - 8, INT4.AWQ)

    _each(tensors, "qzeros", less)


def zeros_as_they_are(tensors: Tensors, config: dict[str, Any]) -> None:
    """GPTQ's zero-points stored as 8, without the one subtracted."""
    _each(tensors, "qzeros", lambda words: INT4.pack_words(INT4.unpack_words(words) + 1))


def order_not_said(tensors: Tensors, config: dict[str, Any]) -> None:
    """Columns quantized in activation order, and a config that says they were not."""
    config["desc_act"] = False


def scales_transposed(tensors: Tensors, config: dict[str, Any]) -> None:
    """Scales as [out, groups] where [groups, out] is read."""
    _each(tensors, "scales", lambda scales: scales.T)


DAMAGE: dict[str, tuple[str, Change]] = {
    "awq in standard order": ("awq, zero-points", standard_order),
    "gptq without the bias": ("gptq, nearest", no_bias),
    "gptq reshaped, not transposed": ("gptq, nearest", reshaped),
    "square matrices transposed": ("pack-quantized, nearest", square_transposed),
    "awq with zeros less one": ("awq, zero-points", zeros_less_one),
    "gptq with zeros as they are": ("gptq, nearest", zeros_as_they_are),
    "reordered, and not said": ("gptq, reordered", order_not_said),
    "gptq with scales transposed": ("gptq, nearest", scales_transposed),
}
"""Name to the recipe it starts from and what is done to it."""


def make(name: str, folder: Path) -> None:
    """Write the checkpoint of a recipe or of a mistake.

    Raises:
        ValueError: there is neither of that name.
    """
    if name not in RECIPES and name not in DAMAGE:
        raise ValueError(f"there is no recipe {name!r}; there are {', '.join([*RECIPES, *DAMAGE])}")
    base, change = DAMAGE.get(name, (name, None))
    tensors, config = pack(RECIPES[base]), dict(RECIPES[base].config)
    if change is not None:
        change(tensors, config)
    write(tensors, config, folder)


def main(argv: list[str] | None = None) -> int:
    """Write one folder."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=[*RECIPES, *DAMAGE], metavar="NAME", help=_names())
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    make(args.name, args.folder)
    size = (args.folder / "model.safetensors").stat().st_size
    print(f"{args.folder}: {args.name}, {size:,} bytes")
    return 0


def _names() -> str:
    return f"one of {'; '.join(RECIPES)}; or, damaged on purpose, {'; '.join(DAMAGE)}"


if __name__ == "__main__":
    raise SystemExit(main())
