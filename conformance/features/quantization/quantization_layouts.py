"""Record the bit layouts and codes that the pinned tree's reference quantizers produce.

Needs the pinned tree on `PYTHONPATH`, no GPU. Cases carry a `kind`; what one
holds is said by the function that records it. Matrices are nested lists; words are unsigned 32-bit;
floats are written so that float32 reads them back exactly.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

Case = dict[str, Any]

ABOUT = (
    "Kinds: pack (4-bit codes to the three checkpoint layouts), unpack (arbitrary words back), "
    "int8_rows (weights to codes and scales per row), uint4b8 and uint4_zero_points (weights to "
    "4-bit codes per group)."
)


def pack() -> Iterator[Case]:
    """`{"codes", "gptq", "awq", "compressed-tensors"}`: codes [in_features][out_features], 0..15.

    `vllm/model_executor/layers/quantization/utils/quant_utils.py:785` `gptq_pack`,
    `vllm/model_executor/layers/quantization/utils/quant_utils.py:794` `awq_pack` and
    `vllm/model_executor/layers/quantization/utils/quant_utils.py:421`
    `pack_quantized_values_into_int32`. For compressed-tensors the format's own library, which the
    pinned tree depends on, must agree.
    """
    import torch
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    format_library = importlib.import_module(
        "compressed_tensors.compressors.pack_quantized.helpers"
    )
    rng = np.random.default_rng(0)
    for inputs, outputs in ((8, 8), (8, 16), (16, 8), (24, 40), (64, 32)):
        codes = rng.integers(0, 16, (inputs, outputs), dtype=np.int32)
        if (inputs, outputs) == (8, 8):
            codes[:] = np.arange(1, 17, 2)  # the words of the lab's worked example
        q = torch.from_numpy(codes)
        by_output = q.T.contiguous()
        packed = quant_utils.pack_quantized_values_into_int32(by_output, scalar_types.uint4b8, 1)
        library = format_library.pack_to_int32((by_output - 8).to(torch.int8), 4, packed_dim=1)
        assert torch.equal(packed, library), "the format's library packs differently"
        yield {
            "kind": "pack",
            "codes": codes.tolist(),
            "gptq": words(quant_utils.gptq_pack(q, 4, inputs, outputs)),
            "awq": words(quant_utils.awq_pack(q, 4, inputs, outputs)),
            "compressed-tensors": words(packed),
        }


def unpack() -> Iterator[Case]:
    """`{"layout", "words", "codes"}`: arbitrary words, codes [in_features][out_features], 0..15.

    GPTQ and compressed-tensors by `quant_utils.unpack_quantized_values_into_int32`, AWQ by way of
    `vllm/model_executor/layers/quantization/awq_marlin.py:90` `_convert_awq_to_standard_format`,
    which is what happens to such a checkpoint when vLLM loads it. Its parameter class asks for a
    distributed group, so a plain parameter stands in for it.
    """
    import torch
    from vllm.model_executor.layers.quantization import awq_marlin
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    def plain(data: torch.Tensor, **_: Any) -> torch.nn.Parameter:
        return torch.nn.Parameter(data, requires_grad=False)

    rng = np.random.default_rng(1)
    read = quant_utils.unpack_quantized_values_into_int32
    for inputs, outputs in ((8, 8), (16, 24), (40, 16)):
        for layout in ("gptq", "awq", "compressed-tensors"):
            shape = {
                "gptq": (inputs // 8, outputs),
                "awq": (inputs, outputs // 8),
                "compressed-tensors": (outputs, inputs // 8),
            }[layout]
            bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
            stored = torch.from_numpy(bits.view(np.int32))
            if layout == "awq":
                layer = torch.nn.Module()
                layer.qweight = torch.nn.Parameter(stored, requires_grad=False)
                zeros = torch.zeros((1, outputs // 8), dtype=torch.int32)
                layer.qzeros = torch.nn.Parameter(zeros, requires_grad=False)
                with mock.patch.object(awq_marlin, "PackedvLLMParameter", plain):
                    awq_marlin._convert_awq_to_standard_format(layer, "qweight", "qzeros", 4)
                codes = read(layer.qweight.data, scalar_types.uint4b8, 0)
            elif layout == "gptq":
                codes = read(stored, scalar_types.uint4b8, 0)
            else:
                codes = read(stored, scalar_types.uint4b8, 1).T
            yield {
                "kind": "unpack",
                "layout": layout,
                "words": bits.tolist(),
                "codes": codes.tolist(),
            }


def int8_rows() -> Iterator[Case]:
    """`{"weight", "codes", "scales"}`: rows of a weight through the online int8 recipe.

    `vllm/model_executor/layers/quantization/online/int8.py:56`
    `Int8OnlineMoEMethod._quantize_weights`, on one expert. No row of zeros: it has no guard.
    """
    import torch
    from vllm.model_executor.layers.quantization.online import int8

    rng = np.random.default_rng(2)
    ties = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127]], dtype=np.float32)
    matrices = [ties, rng.standard_normal((8, 40), dtype=np.float32)]
    loud = rng.standard_normal((16, 12), dtype=np.float32)
    matrices.append(loud * np.float32(10.0) ** rng.integers(-6, 6, (16, 1)).astype(np.float32))
    for weight in matrices:
        expert = torch.from_numpy(weight)[None]
        layer = SimpleNamespace(w13_weight=expert, w2_weight=expert)
        layer.num_experts = layer.local_num_experts = 1
        taken: dict[str, Any] = {}

        def take(_: Any, name: str, value: Any, taken: dict[str, Any] = taken) -> None:
            taken[name] = value

        with mock.patch.object(int8, "replace_parameter", take):
            int8.Int8OnlineMoEMethod._quantize_weights(SimpleNamespace(), layer)
        yield {
            "kind": "int8_rows",
            "weight": floats(weight),
            "codes": taken["w13_weight"][0].tolist(),
            "scales": floats(taken["w13_scale"][0].numpy()),
        }


def groups() -> Iterator[Case]:
    """`{"weight", "group_size", "codes", "scales", "zero_points"}`, all [in_features][...].

    `vllm/model_executor/layers/quantization/utils/quant_utils.py:556` `quantize_weights`, which
    upstream's kernel tests use: 16 codes with a fixed bias of 8 (kind uint4b8, zero_points None),
    or with a zero-point per group (kind uint4_zero_points).
    """
    import torch
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    rng = np.random.default_rng(3)
    for kind, shift in (("uint4b8", 0.0), ("uint4_zero_points", 0.3), ("uint4b8", -0.5)):
        for group_size in (16, 32, -1):
            weight = rng.standard_normal((64, 4), dtype=np.float32) + np.float32(shift)
            zero_points = kind == "uint4_zero_points"
            _, codes, scales, zeros = quant_utils.quantize_weights(
                torch.from_numpy(weight.copy()),
                scalar_types.uint4 if zero_points else scalar_types.uint4b8,
                group_size,
                zero_points=zero_points,
            )
            yield {
                "kind": kind,
                "weight": floats(weight),
                "group_size": group_size,
                "codes": codes.tolist(),
                "scales": floats(scales.reshape(-1, 4).numpy()),
                "zero_points": zeros.tolist() if zeros is not None else None,
            }


def words(tensor: Any) -> list[list[int]]:
    """An int32 tensor as unsigned words."""
    bits: list[list[int]] = tensor.contiguous().numpy().view(np.uint32).tolist()
    return bits


def floats(array: np.ndarray) -> list[Any]:
    """float32 values as the shortest decimals that read back as the same float32."""
    if array.ndim > 1:
        return [floats(row) for row in array]
    return [float(np.format_float_positional(value, unique=True, trim="0")) for value in array]


def cases() -> Iterator[Case]:
    """All cases."""
    for record in (pack, unpack, int8_rows, groups):
        yield from record()
