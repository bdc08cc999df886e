"""Classes of characters as classes of bytes: UTF-8 is a regular language over bytes.

Promises: a class becomes the byte sequences of exactly its code points, no overlong form and no
surrogate, as RFC 3629 section 4 has them; sequences that end alike share their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

ByteRange = tuple[int, int]
"""Lowest and highest byte, inclusive."""

_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)


def byte_sequences(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[ByteRange, ...]]:
    """Sequences of 1 to 4 byte ranges whose products are the code points of `ranges`.

    Args:
        ranges: inclusive ranges of code points without surrogates.
    """
    for low, high in ranges:
        for last in _LAST_OF_LENGTH:
            if low <= min(high, last):
                yield from _of_one_length(low, min(high, last))
                low = min(high, last) + 1


def byte_set(low: int, high: int) -> int:
    """The bytes from `low` to `high` as a 256-bit number: bit b stands for byte b."""
    return (1 << (high + 1)) - (1 << low)


def _of_one_length(low: int, high: int) -> Iterator[tuple[ByteRange, ...]]:
    """Split until every position of the encodings is a range that does not depend on the others."""
    first, last = chr(low).encode(), chr(high).encode()
    for index in range(1, len(first)):
        block = 1 << (6 * (len(first) - index))  # code points that share the bytes before index
        if first[:index] != last[:index]:
            if low % block:
                yield from _of_one_length(low, low - low % block + block - 1)
                yield from _of_one_length(low - low % block + block, high)
                return
            if (high + 1) % block:
                yield from _of_one_length(low, high - high % block - 1)
                yield from _of_one_length(high - high % block, high)
                return
    yield tuple(zip(first, last, strict=True))
