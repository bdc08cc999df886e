"""Recordings that `vllm-flight-recorder` made of a server's scheduler: read, line by line.

Promises: a file is read as it comes, in memory that does not grow with it; one that was cut at any
byte reads up to its last whole line and says so (`Flight.is_cut`); what is not such a file is
refused by name, line and what was expected. What each line holds is in the recorder's README.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
MOST_LINE = 1 << 26
KINDS = ("add", "step", "out", "drafts", "end", "reset", "close")
"""The key that says what a line is about; the first line has "flight"."""
HASH_CHARS = 16
Line = dict[str, Any]


class FlightError(ValueError):
    """A file is not a recording, or damaged before its end; the message names file and line."""


class Flight:
    """One recording, of one or more segments. Iterate over it for the lines after the first."""

    def __init__(self, path: Path | str) -> None:
        """Read the first line.

        Args:
            path: of any segment, or of a folder that holds those of one recording.

        Raises:
            FlightError: nothing is there, or it is not a recording, or its beginning is gone.
        """
        self.paths = segments(Path(path))
        self.is_cut = False
        """Whether the last line was incomplete, known once all lines have been read."""
        self.missing: list[int] = []
        """Numbers of segments that were rotated away."""
        self._lines = self._read()
        self.head: Line = next(self._lines, {})
        if self.head.get("flight") != FORMAT:
            first = self.paths[0]
            raise FlightError(f"{first}, line 1: need a head with flight={FORMAT}")

    def __iter__(self) -> Iterator[Line]:
        return self._lines

    def _read(self) -> Iterator[Line]:
        for index, path in enumerate(self.paths):
            last = index == len(self.paths) - 1
            yield from self._lines_of(path, last)

    def _lines_of(self, path: Path, last: bool) -> Iterator[Line]:
        opener = gzip.open if path.suffix == ".gz" else open
        number = 0
        try:
            with opener(path, "rb") as file:
                while text := file.readline(MOST_LINE):
                    number += 1
                    if not text.endswith(b"\n"):
                        if len(text) == MOST_LINE:
                            raise FlightError(f"{path}, line {number}: over {MOST_LINE} bytes")
                        self._cut(path, number, last)
                        return
                    yield _line(path, number, text)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if not number:
                raise FlightError(f"{path}: {error}") from None
            self._cut(path, number + 1, last)
        except OSError as error:
            raise FlightError(f"{path}: {error.strerror or error}") from None

    def _cut(self, path: Path, number: int, last: bool) -> None:
        if not last:
            raise FlightError(
                f"{path}, line {number}: incomplete JSON; only the last segment may end so"
            )
        self.is_cut = True


def segments(path: Path) -> list[Path]:
    """All files of the recording that `path` belongs to, in order.

    Raises:
        FlightError: there is none, several recordings lie in the folder, or one is missing
            between the first and the last.
    """
    if path.is_dir():
        stems = sorted({match[1] for each in path.iterdir() if (match := _named(each))})
        if len(stems) != 1:
            seen = ", ".join(stems) or "none"
            raise FlightError(f"{path}: need the folder of one recording, found {seen}")
        path = path / f"{stems[0]}.0000.jsonl"
    match = _named(path)
    if match is None:
        if not path.is_file():
            raise FlightError(f"{path}: no such file")
        return [path]
    found = {int(m[2]): each for each in path.parent.iterdir() if (m := _named(each, match[1]))}
    if not found:
        raise FlightError(f"{path}: no such file")
    gone = sorted(set(range(max(found) + 1)) - set(found))
    if gone:
        raise FlightError(
            f"{path.parent / match[1]}: segments {gone[0]} to {gone[-1]} were rotated away; "
            "name a larger VLLM_FLIGHT_RECORDER_MAX_MB to keep the whole"
        )
    return [found[number] for number in sorted(found)]


def hashes_of(text: str) -> list[int]:
    """The block hashes of a line, as integers."""
    return [int(text[i : i + HASH_CHARS], 16) for i in range(0, len(text), HASH_CHARS)]


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """(a, b) and (c, d) of [a, b, c, d]."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def _named(path: Path, stem: str | None = None) -> re.Match[str] | None:
    match = re.fullmatch(r"(.+)\.(\d{4})\.jsonl(?:\.gz)?", path.name)
    return match if match and stem in (None, match[1]) else None


def _line(path: Path, number: int, text: bytes) -> Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FlightError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(line, dict) or not any(kind in line for kind in ("flight", *KINDS)):
        raise FlightError(f"{path}, line {number}: need an object with one of {', '.join(KINDS)}")
    return line
