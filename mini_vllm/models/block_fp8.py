"""Block-scaled FP8: e4m3 codes, a float32 scale per block of a weight and per group of a token.

Promises: codes, scales and the order of the sums are those of the pinned tree's own reference,
`tests/kernels/quant_utils.py:91` `native_w8a8_block_matmul` and
`tests/kernels/quant_utils.py:157` `native_per_token_group_quant_fp8`. In a checkpoint of this
layout the scale is `weight_scale_inv`: a code is multiplied by it.
"""

from __future__ import annotations

import re

import numpy as np

from mini_vllm.models.transformer import Linear, LinearFactory, LinearLike

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
        block: rows and columns of one; they divide the matrix.

    Returns:
        uint8 like `weight`, and float32 [out_features / rows, in_features / columns].

    Raises:
        ValueError: `block` does not divide the matrix.
    """
    tiles = _tiles(np.asarray(weight, np.float32), block)
    most = np.maximum(np.abs(tiles).max(axis=(1, 3), keepdims=True), np.float32(1e-4))
    scale = most / np.float32(E4M3_MAX)
    codes = to_e4m3(tiles * (np.float32(1) / scale)).reshape(weight.shape)
    return codes, scale[:, 0, :, 0]


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


def dequantize_weight(
    codes: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int]
) -> np.ndarray:
    """The float32 matrix that codes and scales stand for."""
    tiles = _tiles(from_e4m3(codes), block)
    return (tiles * scale_inv[:, None, :, None]).reshape(codes.shape)


def _tiles(matrix: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """[rows of blocks, block rows, columns of blocks, block columns]."""
    (rows, columns), (high, wide) = matrix.shape, block
    if high < 1 or wide < 1 or rows % high or columns % wide:
        raise ValueError(f"block={block}: need one that divides a matrix of {matrix.shape}")
    return matrix.reshape(rows // high, high, columns // wide, wide)


class BlockFp8Linear:
    """y = x @ weight.T from codes on both sides, block column by block column."""

    def __init__(self, codes: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int]) -> None:
        """Args: codes uint8 [out_features, in_features]; its `weight_scale_inv`; its block.

        Raises:
            ValueError: `block` does not divide the matrix, or there is not a scale for each block.
        """
        wanted = _tiles(codes, block).shape[::2]
        if scale_inv.shape != wanted:
            raise ValueError(f"weight_scale_inv of shape {scale_inv.shape}: need {wanted}")
        self.block = block
        self.weight = np.ascontiguousarray(from_e4m3(codes).T)  # [in_features, out_features]
        self.scale = np.repeat(scale_inv, block[0], axis=0).T  # [in_features / wide, out_features]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        wide = self.block[1]
        codes, scale = quantize_activations(x, wide)
        values = from_e4m3(codes)
        y = np.zeros((len(x), self.weight.shape[1]), np.float32)
        for number, column in enumerate(self.scale):
            part = slice(number * wide, (number + 1) * wide)
            y += (values[:, part] @ self.weight[part]) * (scale[:, number, None] * column)
        return y.astype(x.dtype, copy=False)


def block_fp8_experts(block: tuple[int, int]) -> LinearFactory:
    """For `Transformer(linear=...)`: experts quantized by block, all else as it is."""

    def build(weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> LinearLike:
        if not _EXPERT.search(name):
            return Linear(weight, bias, name)
        if bias is not None:
            raise ValueError(f"{name}: an expert with a bias is not supported in block FP8")
        if len(weight) // 2 % block[0] and "gate_up" in name:
            raise ValueError(f"{name}: block={block}: need one that divides gate and up each")
        return BlockFp8Linear(*quantize_weight(weight, block), block)

    return build
