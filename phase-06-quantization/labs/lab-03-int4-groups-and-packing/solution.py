"""Lab 06-03: int4 codes with one fp16 scale per group of weights, and the bits they are stored in.

`check_matrix`, `group_width` and `check_codes` are given. The code with a bias of 8 is upstream's
`vllm/scalar_type.py:350` `scalar_types.uint4b8`; the three int32 layouts are those of GPTQ, AWQ and
compressed-tensors checkpoints, as the pinned tree's reference packers write them
(`vllm/model_executor/layers/quantization/utils/quant_utils.py:785` `gptq_pack`,
`vllm/model_executor/layers/quantization/utils/quant_utils.py:794` `awq_pack`,
`vllm/model_executor/layers/quantization/utils/quant_utils.py:421`
`pack_quantized_values_into_int32`).
"""

from __future__ import annotations

import numpy as np

QMAX = 7
"""Largest code used when quantizing; -7..7 are 15 codes. Packing carries -8 as well."""
BIAS = 8
"""What is added before packing, so that codes become 0..15."""
STANDARD = (0, 1, 2, 3, 4, 5, 6, 7)
"""Nibble k of a word, from the lowest bits up, holds value `order[k]` of its eight."""
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def check_matrix(W: np.ndarray) -> np.ndarray:
    """`W` as a float32 array; the caller's array is never changed.

    Raises:
        ValueError: `W` is not [out_features, in_features], is empty, or holds NaN or infinity.
    """
    W = np.asarray(W)
    if W.ndim != 2 or W.size == 0:
        raise ValueError(f"W has shape {W.shape}: need [out_features, in_features], not empty")
    with np.errstate(over="ignore"):
        W = W.astype(np.float32)
    if not np.isfinite(W).all():
        raise ValueError("W holds NaN or infinity (as float32): no scale can represent that")
    return W


def group_width(in_features: int, group_size: int) -> int:
    """Weights per group: `group_size`, or the whole row for -1.

    Raises:
        ValueError: `group_size` is 0 or below -1, or does not divide `in_features`.
    """
    if group_size == -1:
        return in_features
    if group_size < 1 or in_features % group_size:
        raise ValueError(
            f"group_size={group_size}: need -1 or a positive divisor of in_features={in_features}"
        )
    return group_size


def check_codes(q: np.ndarray, multiple: int) -> np.ndarray:
    """`q` as int16, ready to be packed.

    Raises:
        ValueError: the last axis is not a multiple of `multiple`, or a code is outside -8..7.
    """
    q = np.asarray(q)
    if q.ndim == 0 or q.shape[-1] % multiple:
        raise ValueError(
            f"codes of shape {q.shape}: the last axis must be a multiple of {multiple}"
        )
    if q.size and (q.min() < -BIAS or q.max() > BIAS - 1):
        raise ValueError(f"codes {q.min()}..{q.max()}: four bits hold -8..7")
    return q.astype(np.int16)


# ------------------------------------------------------------------ groups


def quantize_grouped(W: np.ndarray, group_size: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Codes and one scale per group; a group is `group_size` neighbours along a row.

    Args:
        W: [out_features, in_features], any float dtype; never changed.
        group_size: weights per group, or -1 for one group per row.

    Returns:
        `(q, scales)`: int8 [out_features, in_features] with codes clipped to -7..7, and float16
        [out_features, in_features // group_size], `max|group| / 7`. The codes are computed with the
        scale as stored, after its rounding to float16. Where the stored scale is 0 it is 1.0.

    Raises:
        ValueError: as `check_matrix` and `group_width`; a scale that is infinite in float16, which
            the message names.
    """
    W = check_matrix(W)
    width = group_width(W.shape[1], group_size)
    groups = W.reshape(len(W), -1, width)  # [out_features, num_groups, width]
    with np.errstate(over="ignore"):
        scales = (np.abs(groups).max(axis=2) / np.float32(QMAX)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise ValueError("a group's scale exceeds float16, whose largest number is 65504")
    scales[scales == 0] = 1.0
    steps = scales.astype(np.float32)[:, :, None]  # [out_features, num_groups, 1]
    q = np.clip(np.rint(groups / steps), -QMAX, QMAX).astype(np.int8)
    return q.reshape(W.shape), scales


def dequantize_grouped(q: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """float32 [out_features, in_features]: each code times the scale of its group.

    Args:
        q: int8 [out_features, in_features].
        scales: float16 [out_features, num_groups].
        group_size: as given to `quantize_grouped`.

    Raises:
        ValueError: as `group_width`; `scales` is not [out_features, num_groups], naming `scales`.
    """
    out_features, in_features = q.shape
    width = group_width(in_features, group_size)
    if scales.shape != (out_features, in_features // width):
        raise ValueError(
            f"scales has shape {scales.shape}: need {(out_features, in_features // width)}"
        )
    groups = q.reshape(out_features, -1, width).astype(np.float32)
    return (groups * scales.astype(np.float32)[:, :, None]).reshape(q.shape)


# ------------------------------------------------------------------ two codes in a byte


def pack_int4(q: np.ndarray) -> np.ndarray:
    """Two codes per byte: `q + 8`, the even index in the low nibble, the odd one in the high.

    Args:
        q: integers -8..7, [out_features, in_features] with an even in_features.

    Returns:
        uint8 [out_features, in_features // 2].

    Raises:
        ValueError: an odd in_features, or a code outside -8..7.
    """
    codes = (check_codes(q, 2) + BIAS).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack_int4`: int8 [out_features, 2 * packed.shape[1]], codes -8..7."""
    q = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.int8)
    q[..., 0::2] = packed & 0xF
    q[..., 1::2] = packed >> 4
    return q - np.int8(BIAS)


def memory_bytes_grouped(packed: np.ndarray, scales: np.ndarray) -> int:
    """Bytes of both arrays as they are."""
    return packed.nbytes + scales.nbytes


# ------------------------------------------------------------------ eight codes in a word


def pack_words(q: np.ndarray, order: tuple[int, ...] = STANDARD) -> np.ndarray:
    """Eight codes of the last axis per 32-bit word; nibble k holds `q[..., order[k]] + 8`.

    Args:
        q: integers -8..7, [..., 8 * num_words].
        order: which of the eight goes into nibble 0 (the lowest four bits), nibble 1, and so on.

    Returns:
        int32 [..., num_words]: the bits of the word, seen as a signed number as checkpoints do.

    Raises:
        ValueError: the last axis is not a multiple of 8, or a code is outside -8..7.
    """
    codes = (check_codes(q, 8) + BIAS).astype(np.uint32)
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], dtype=np.uint32)
    for nibble, index in enumerate(order):
        words |= eights[..., index] << np.uint32(4 * nibble)
    return words.view(np.int32)


def unpack_words(words: np.ndarray, order: tuple[int, ...] = STANDARD) -> np.ndarray:
    """The inverse of `pack_words`: int8 [..., 8 * num_words], codes -8..7."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    eights = np.empty((*bits.shape, 8), dtype=np.int8)
    for nibble, index in enumerate(order):
        eights[..., index] = (bits >> np.uint32(4 * nibble)) & 0xF
    return eights.reshape(*bits.shape[:-1], -1) - np.int8(BIAS)


def pack_layout(q: np.ndarray, layout: str) -> np.ndarray:
    """The codes of `q` [out_features, in_features] as a checkpoint stores them.

    Args:
        q: integers -8..7.
        layout: "compressed-tensors": int32 [out_features, in_features / 8], packed along the
            inputs; "gptq": int32 [in_features / 8, out_features], packed along the inputs, the
            matrix transposed; "awq": int32 [in_features, out_features / 8], packed along the
            *outputs*, in the order `AWQ`.

    Raises:
        ValueError: another name, with `layout` in the message; a packed axis that is not a multiple
            of 8; a code outside -8..7.
    """
    if layout == "compressed-tensors":
        return pack_words(q)
    if layout == "gptq":
        return np.ascontiguousarray(pack_words(q).T)
    if layout == "awq":
        return pack_words(np.ascontiguousarray(q.T), AWQ)
    raise ValueError(f"layout={layout!r}: use compressed-tensors, gptq or awq")


def unpack_layout(words: np.ndarray, layout: str) -> np.ndarray:
    """The inverse of `pack_layout`: int8 [out_features, in_features].

    Raises:
        ValueError: another name, with `layout` in the message.
    """
    if layout == "compressed-tensors":
        return unpack_words(words)
    if layout == "gptq":
        return unpack_words(words.T)
    if layout == "awq":
        return np.ascontiguousarray(unpack_words(words, AWQ).T)
    raise ValueError(f"layout={layout!r}: use compressed-tensors, gptq or awq")


# ------------------------------------------------------------------ the engine's part


class Linear:
    """The engine's linear layer over packed int4 weights: `course run --mine` uses it.

    Keeps `packed` and `scales` and drops the weight. Groups of `GROUP_SIZE`, or one per row where
    that does not divide the row.
    """

    GROUP_SIZE = 128

    def __init__(self, weight: np.ndarray, bias: np.ndarray | None = None, name: str = "") -> None:
        """Args: weight [out_features, in_features], in_features even; bias [out_features].

        The engine gives each layer's `name` too, which this one has no use for.
        """
        divides = weight.shape[1] % self.GROUP_SIZE == 0
        self.group_size = self.GROUP_SIZE if divides else -1
        q, self.scales = quantize_grouped(weight, self.group_size)
        self.packed = pack_int4(q)
        self.bias = bias

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features], in the dtype of `x`."""
        weight = dequantize_grouped(unpack_int4(self.packed), self.scales, self.group_size)
        y = x @ weight.T
        return y if self.bias is None else y + self.bias
