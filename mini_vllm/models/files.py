"""Reading the files of a checkpoint folder, none of which is trusted.

Promises: a file is opened only if it is a regular one, so nothing blocks; only if it lies in its
folder, whatever links say; and only up to a bound of bytes. Each refusal is a ValueError that names
the file.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

MOST_CONFIG_BYTES = 1 << 22
"""Of a `config.json` or a chat template; those of real models take some kilobytes."""
MOST_TABLE_BYTES = 1 << 26
"""Of files with an entry per token or tensor: tokenizers and the index of the weights."""


def check_file(path: Path) -> None:
    """Refuse what is not a regular file of the folder it is named in.

    A link may lead to elsewhere in that folder or, in a hub cache, from `snapshots/<commit>/` to
    the `blobs/` beside it, where the cache keeps all contents.

    Raises:
        ValueError: nothing there, a folder, a pipe, a device, a loop, or outside of the folder.
    """
    try:
        folder, real = path.parent.resolve(), path.resolve()
        is_regular = stat.S_ISREG(real.stat().st_mode)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, RuntimeError) as error:  # before Python 3.13 a loop is a RuntimeError
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if not is_regular:
        raise ValueError(f"{path}: not a regular file")
    homes = [folder]
    if folder.parent.name == "snapshots":
        homes.append(folder.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise ValueError(f"{path}: leads to {real}, outside the checkpoint's folder")


def read_bytes(path: Path, most: int) -> bytes:
    """The whole file; ValueError when it cannot be read or is longer than `most` bytes."""
    check_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
    if len(data) > most:
        raise ValueError(f"{path}: longer than {most:,} bytes, the most that is read of it")
    return data


def read_text(path: Path, most: int = MOST_CONFIG_BYTES) -> str:
    """A UTF-8 text file; ValueError names it when it is missing, too long or something else."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error


def read_json(path: Path, most: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object from a file of at most `most` bytes.

    Raises:
        ValueError: missing, too long, not JSON, nested too deeply, a number with thousands of
            digits, or not an object; the file is named.
    """
    text = read_text(path, most)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw
