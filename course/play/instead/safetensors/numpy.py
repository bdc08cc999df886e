"""Whole files at once: what the course uses of `safetensors.numpy`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from . import BYTES, DTYPES, safe_open

# The order in which the library lays tensors out: wide types first, then by name.
_RANK = {name: place for place, name in enumerate(
    ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32",
     "F64", "I64", "U64")
)}  # fmt: skip


def load_file(filename: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of a file, by name."""
    with safe_open(filename, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def save(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file that holds `tensors`."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    kinds = {name: names[array.dtype.newbyteorder("=")] for name, array in tensors.items()}
    order = sorted(tensors, key=lambda name: (-_RANK[kinds[name]], name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    parts, at = [], 0
    for name in order:
        array = tensors[name]
        size = array.size * BYTES[kinds[name]]
        header[name] = {
            "dtype": kinds[name],
            "shape": list(array.shape),
            "data_offsets": [at, at + size],
        }
        parts.append(np.ascontiguousarray(array, DTYPES[kinds[name]]).tobytes())
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def save_file(
    tensors: dict[str, np.ndarray], filename: str | Path, metadata: dict[str, str] | None = None
) -> None:
    """Write `tensors` as a file."""
    Path(filename).write_bytes(save(tensors, metadata))
