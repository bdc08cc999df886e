"""Resizing as Pillow does it: what processors of real checkpoints call.

Promises: `resize` gives the bytes of `PIL.Image.resize` along rows and then along columns, also for
a part of the result, at a cost bounded by the picture and that part. Pillow sums in whole numbers:
coefficients have 22 bits behind the point, and each pass rounds to bytes. Up to version 12 rows
come first; 13 sometimes begins with columns, and then some bytes differ by a few levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

BITS = 22
"""Behind the point of a coefficient."""
_ROWS = 256
"""Of the picture that are held as floats at a time."""


def bilinear(x: float) -> float:
    """A triangle of one pixel to each side."""
    return max(0.0, 1.0 - abs(x))


def bicubic(x: float) -> float:
    """Keys' cubic with a = -0.5, two pixels to each side."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 if x < 2.0 else 0.0


FILTERS: dict[int, tuple[str, Callable[[float], float], float]] = {
    2: ("bilinear", bilinear, 1.0), 3: ("bicubic", bicubic, 2.0),
}  # fmt: skip
"""By Pillow's number: name, function and reach in pixels."""


def coefficients(size: int, new_size: int, first: int, count: int, resample: int) -> np.ndarray:
    """What each of `count` new pixels from `first` on takes of each old one, [count, size], whole
    numbers in float64, where sums of products with bytes stay exact."""
    _, function, reach = FILTERS[resample]
    scale = size / new_size
    wide = max(scale, 1.0)  # when shrinking, the filter covers all pixels that fall into one
    rows = np.zeros((count, size))
    for row, index in enumerate(range(first, first + count)):
        center = (index + 0.5) * scale
        low = max(0, int(center - reach * wide + 0.5))
        high = min(size, int(center + reach * wide + 0.5))
        weights = [function((x - center + 0.5) / wide) for x in range(low, high)]
        total = sum(weights)
        for x, weight in zip(range(low, high), weights, strict=True):
            scaled = weight / total * (1 << BITS)
            rows[row, x] = math.trunc(scaled + (0.5 if weight >= 0 else -0.5))
    return rows


def resize(
    pixels: np.ndarray,
    height: int,
    width: int,
    resample: int = 3,
    box: tuple[int, int, int, int] | None = None,
) -> np.ndarray:
    """A picture in another size.

    Args:
        pixels: uint8 [h, w, 3].
        height, width: of the result.
        resample: a key of `FILTERS`.
        box: the part of the result wanted: top, left, rows, columns; None: all of it.

    Returns:
        uint8 [rows, columns, 3].
    """
    top, left, rows, columns = box or (0, 0, height, width)
    old_height, old_width = pixels.shape[:2]
    if old_width == width:
        pixels = pixels[:, left : left + columns]
    else:
        across = coefficients(old_width, width, left, columns, resample)
        slabs = (pixels[start : start + _ROWS] for start in range(0, old_height, _ROWS))
        pixels = np.concatenate([_rounded(across @ slab.astype(np.float64)) for slab in slabs])
    if old_height == height:
        return pixels[top : top + rows]
    down = coefficients(old_height, height, top, rows, resample)
    flat = pixels.reshape(old_height, -1).astype(np.float64)  # [h, columns * 3]
    return _rounded(down @ flat).reshape(rows, columns, 3)


def _rounded(sums: np.ndarray) -> np.ndarray:
    """Sums of coefficients times bytes, as bytes."""
    return np.clip(np.floor((sums + (1 << (BITS - 1))) / (1 << BITS)), 0, 255).astype(np.uint8)
