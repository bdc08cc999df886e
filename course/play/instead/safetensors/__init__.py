"""What the course uses of the library `safetensors`, in numpy, for where it cannot be installed.

In a browser there is no build of the library. Promises: the same bytes are read and written, and
what the library refuses is refused with its error class; `course/play/test_instead.py` compares
the two byte for byte. Found by `import safetensors` only where `course.play.worker` puts this
folder on the path.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

MOST_HEADER = 100_000_000
"""Bytes of a header the library reads at most."""
BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4",
    "U32": "<u4", "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8",
}  # fmt: skip


class SafetensorError(Exception):
    """A file that is not what the format says."""


def header_of(data: bytes | memoryview, length: int) -> tuple[dict[str, Any], int]:
    """The header of a file that begins with `data`, and the bytes before the tensors.

    Args:
        data: at least the first 8 bytes and the header.
        length: of the whole file.

    Raises:
        SafetensorError: it does not describe exactly the file's bytes.
    """
    if length < 8:
        raise SafetensorError("Error while deserializing header: header too small")
    size = int.from_bytes(data[:8], "little")
    if size > MOST_HEADER:
        raise SafetensorError("Error while deserializing header: header too large")
    if 8 + size > length:
        raise SafetensorError("Error while deserializing header: invalid header length")
    try:
        header = json.loads(bytes(data[8 : 8 + size]).decode("utf-8"))
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ holds something else than texts")
        spans = sorted((_span(name, entry), name) for name, entry in header.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SafetensorError(f"Error while deserializing header: {error}") from None
    end = 0
    for (start, stop), name in spans:
        if start != end:
            raise SafetensorError(f"Error while deserializing header: invalid offset for {name}")
        end = stop
    if 8 + size + end != length:
        raise SafetensorError("Error while deserializing header: incomplete metadata")
    return header, 8 + size


def _span(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    shape = entry["shape"]
    numbers = (start, stop, *shape)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name}: need natural numbers, got {numbers}")
    if stop - start != math.prod(shape) * BYTES[entry["dtype"]]:
        raise ValueError(f"{name}: {stop - start} bytes are not shape {shape}")
    return start, stop


class safe_open:
    """A file, opened: `with safe_open(path, framework="numpy") as file: file.get_tensor(name)`."""

    def __init__(self, filename: str | Path, framework: str, device: str = "cpu") -> None:
        if framework not in ("np", "numpy"):
            raise SafetensorError(f"framework={framework!r}: only numpy is here")
        self._data = Path(filename).read_bytes()
        self._header, self._start = header_of(self._data, len(self._data))

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._data = b""

    def keys(self) -> list[str]:
        """The tensors' names, as their bytes follow each other."""
        return sorted(self._header, key=lambda name: self._header[name]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        """What the file says of itself."""
        size = self._start - 8
        return json.loads(self._data[8 : 8 + size]).get("__metadata__")

    def get_tensor(self, name: str) -> np.ndarray:
        """One tensor, a copy.

        Raises:
            SafetensorError: there is none of that name, or numpy has no such type.
        """
        if name not in self._header:
            raise SafetensorError(f"File does not contain tensor {name}")
        entry = self._header[name]
        if entry["dtype"] not in DTYPES:
            raise SafetensorError(f"{name}: numpy has no {entry['dtype']}")
        start, stop = (self._start + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(self._data[start:stop], DTYPES[entry["dtype"]])
        return flat.reshape(entry["shape"]).copy()
