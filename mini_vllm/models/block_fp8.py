"""Block-scaled FP8: e4m3 codes, a float32 scale per block of a weight and per group of a token.

Promises: codes, scales and the order of the sums are those of the pinned tree's own reference,
`tests/kernels/quant_utils.py:91` `native_w8a8_block_matmul` and
`tests/kernels/quant_utils.py:157` `native_per_token_group_quant_fp8`. In a checkpoint of this
layout the scale is `weight_scale_inv`: a code is multiplied by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from mini_vllm.models.fp8 import SCALE
from mini_vllm.models.transformer import Linear, LinearFactory, LinearLike, ModelConfig

E4M3_MAX = 448.0
_EXPERT = re.compile(r"\.experts\.\d+\.(gate_up|down)_proj$")
_MAGNITUDES = np.array(
    [
        (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
        for code in range(127)
    ],
    dtype=np.float32,
)
"""By code without its sign; code 127 is NaN and there is no infinity."""
_MIDDLES = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest e4m3 code, uint8; of two equally near the even one; 448 at most.

    Raises:
        ValueError: a value is NaN.
    """
    if np.isnan(x).any():
        raise ValueError("x holds NaN: need numbers")
    magnitude = np.abs(x)
    below = np.searchsorted(_MIDDLES, magnitude, side="left")
    upto = np.searchsorted(_MIDDLES, magnitude, side="right")  # another one only at a middle
    code = np.where(below % 2 == 0, below, upto)
    return (code | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 codes to float32, exactly.

    Raises:
        ValueError: a code is NaN's, 0x7f or 0xff.
    """
    magnitude = codes & 0x7F
    if (magnitude == 0x7F).any():
        raise ValueError("codes hold NaN, 0x7f or 0xff: need numbers")
    return np.where(codes & 0x80, -_MAGNITUDES[magnitude], _MAGNITUDES[magnitude])


def quantize_weight(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as codes and `weight_scale_inv`.

    `vllm/utils/deep_gemm.py:504` `per_block_cast_to_fp8`

    Args:
        weight: float32 [out_features, in_features].
        block: rows and columns of one; at the ends of the matrix one may be cut.

    Returns:
        uint8 like `weight`, and float32 with an entry per block, [rows of blocks, columns].

    Raises:
        ValueError: a block without rows or columns.
    """
    (rows, columns), (high, wide) = weight.shape, block
    if high < 1 or wide < 1:
        raise ValueError(f"block={block}: need positive sizes")
    padded = np.pad(np.asarray(weight, np.float32), ((0, -rows % high), (0, -columns % wide)))
    tiles = padded.reshape(len(padded) // high, high, -1, wide)
    most = np.maximum(np.abs(tiles).max(axis=(1, 3), keepdims=True), np.float32(1e-4))
    scale = most / np.float32(E4M3_MAX)
    codes = to_e4m3(tiles * (np.float32(1) / scale)).reshape(padded.shape)
    return codes[:rows, :columns], scale[:, 0, :, 0]


def quantize_activations(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, size] to codes, uint8 [n, size], and scales, float32 [n, size / group].

    Raises:
        ValueError: `group` does not divide the size.
    """
    if group < 1 or x.shape[1] % group:
        raise ValueError(f"group={group}: need one that divides {x.shape[1]}, the size of a row")
    groups = np.asarray(x, np.float32).reshape(len(x), -1, group)
    most = np.maximum(np.abs(groups).max(axis=2, keepdims=True), np.float32(1e-10))
    scale = most / np.float32(E4M3_MAX)
    return to_e4m3(groups / scale).reshape(x.shape), scale[:, :, 0]


class BlockFp8Linear:
    """y = x @ weight.T + bias from codes on both sides, block column by block column."""

    def __init__(
        self,
        weight: np.ndarray,
        scale_inv: np.ndarray,
        block: tuple[int, int],
        bias: np.ndarray | None = None,
        name: str = "weight",
    ) -> None:
        """Args: the values of codes [out_features, in_features], without their scales; its
        `weight_scale_inv`; its block; bias [out_features] or None; its name in messages.

        Raises:
            ValueError: `block` does not divide a row, or there is not a scale for each block.
        """
        (rows, columns), (high, wide) = weight.shape, block
        if high < 1 or wide < 1 or columns % wide:
            raise ValueError(f"{name}: block={block}: need one that divides a row of {columns}")
        wanted = -(-rows // high), columns // wide
        if scale_inv.shape != wanted:
            raise ValueError(f"{name}: {SCALE} of shape {scale_inv.shape}: need {wanted}")
        self.block, self.bias = block, bias
        self.weight = np.ascontiguousarray(weight.T, np.float32)  # [in_features, out_features]
        self.scale = np.repeat(scale_inv, high, axis=0)[:rows].T  # [columns / wide, out_features]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        wide = self.block[1]
        codes, scale = quantize_activations(x, wide)
        values = from_e4m3(codes)
        y = np.zeros((len(x), self.weight.shape[1]), np.float32)
        for number, column in enumerate(self.scale):
            part = slice(number * wide, (number + 1) * wide)
            y += (values[:, part] @ self.weight[part]) * (scale[:, number, None] * column)
        y = y.astype(x.dtype, copy=False)
        return y if self.bias is None else y + self.bias


def checkpoint_linear(config: ModelConfig, weights: Mapping[str, np.ndarray]) -> LinearFactory:
    """For `Transformer(linear=...)`: what a checkpoint with `quant_config` computes with.

    Matrices in one product are quantized together or not at all, as
    `vllm/model_executor/layers/quantization/utils/quant_utils.py:464` `is_layer_skipped` asks, and
    only the last of them may end within a block, as
    `vllm/model_executor/layers/quantization/utils/fp8_utils.py:1128` `validate_fp8_block_shape`.

    Args:
        config: with its `quant_config`.
        weights: of quantized matrices the values of their codes, and beside them their scales.

    Returns:
        A factory that raises ValueError where a matrix cannot be computed so; it is named.
    """
    fp8, moe = config.quant_config, config.moe
    assert fp8 is not None
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    of_experts = {} if moe is None else {"gate_up_proj": moe.names[1:3], "down_proj": moe.names[3:]}

    def build(weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> LinearLike:
        module, _, own = name.rpartition(".")
        shards = (of_experts if ".experts." in module else packed).get(own, (own,))
        scales = [weights.get(f"{module}.{shard}.{SCALE}") for shard in shards]
        found = [scale for scale in scales if scale is not None]
        if not found:
            return Linear(weight, bias, name)
        if own == "gate":
            raise ValueError(f"{name}: need a router listed in modules_to_not_convert")
        if len(found) < len(shards):
            raise ValueError(f"{name}: need {', '.join(shards)} all quantized or none of them")
        high = fp8.weight_block_size[0]
        rows = [len(weights[f"{module}.{shard}.weight"]) for shard in shards]
        if any(n % high for n in rows[:-1]):
            raise ValueError(
                f"{name}: weight_block_size={high}: need one that divides {rows[:-1]}, the rows "
                f"of {', '.join(shards[:-1])}"
            )
        return BlockFp8Linear(weight, np.concatenate(found), fp8.weight_block_size, bias, name)

    return build


def block_fp8_experts(block: tuple[int, int]) -> LinearFactory:
    """For `Transformer(linear=...)`: experts quantized by block, all else as it is."""

    def build(weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> LinearLike:
        if not _EXPERT.search(name):
            return Linear(weight, bias, name)
        if bias is not None:
            raise ValueError(f"{name}: an expert with a bias is not supported in block FP8")
        if len(weight) // 2 % block[0] and "gate_up" in name:
            raise ValueError(f"{name}: block={block}: need one that divides gate and up each")
        codes, scale_inv = quantize_weight(weight, block)
        return BlockFp8Linear(from_e4m3(codes), scale_inv, block, name=name)

    return build
