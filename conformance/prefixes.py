"""Recordings read as far as they are needed, once per process: for tests that stop early."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from conformance import recording
from conformance.features import RECORDINGS


@functools.cache
def _reading(name: str) -> tuple[list[recording.Recording], Iterator[recording.Recording]]:
    return [], recording.read(RECORDINGS / f"{name}.jsonl.gz")


def entries(name: str) -> Iterator[recording.Recording]:
    """The workloads of one file below `recordings/`; those read before are not read again."""
    known, rest = _reading(name)
    index = 0
    while True:
        if index == len(known):
            following = next(rest, None)
            if following is None:
                return
            known.append(following)
        yield known[index]
        index += 1
