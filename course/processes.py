"""Other programs, run so that they end in time, print within bounds and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from labkit.processes import KEEPER

OUTPUT_LIMIT = 16 * 2**20
"""Bytes a program may print, all held in memory; one that prints more is ended."""

ENDING = 10.0
"""Seconds a program may take to die."""

LOOKING = 0.1
"""Seconds between two looks at a program that is watched."""

LONGEST = 86_400.0
"""Seconds, the most a time limit may be: a day."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program printed and how it ended.

    `code` is its exit code, negative for a signal; None when it was ended from here, and `ended`
    then says why: "time", "output" or "asked".
    """

    output: str
    code: int | None
    ended: str = ""


def seconds(name: str, value: float) -> float:
    """`value` if it can be a time limit.

    Raises:
        ValueError: it is not a number above 0 and at most a day, with `name` in its text.
    """
    if not 0 < value <= LONGEST:  # false for nan too
        raise ValueError(f"{name} is {value:g}: give seconds, more than 0, at most {LONGEST:.0f}")
    return value


@dataclass(slots=True)
class _Reader:
    """Reads what the program prints, and ends it at the limit."""

    process: subprocess.Popen[bytes]
    limit: int
    echo: Callable[[bytes], object] | None
    chunks: list[bytes] = field(default_factory=list)
    size: int = 0
    over: bool = False

    def read(self) -> None:
        assert self.process.stdout
        with contextlib.suppress(OSError, ValueError):  # closed under us
            while chunk := os.read(self.process.stdout.fileno(), 65536):
                if not self.over:
                    if self.echo:
                        self.echo(chunk)
                    self.chunks.append(chunk[: self.limit - self.size])
                    self.size += len(chunk)
                if self.size > self.limit and not self.over:
                    self.over = True
                    _let_go(self.process)


def run(
    command: list[str],
    cwd: Path,
    env: dict[str, str],
    time_limit: float,
    output_limit: int = OUTPUT_LIMIT,
    echo: Callable[[bytes], object] | None = None,
    unwanted: Callable[[], bool] | None = None,
) -> Ran:
    """Run `command` and collect its output, standard error included.

    Whatever it started is ended with it: when it is done, out of time, over the output limit, and
    when this process is interrupted or dies.

    Args:
        time_limit: seconds.
        output_limit: bytes.
        echo: gets what is printed while it is printed, in a thread of its own.
        unwanted: asked every tenth of a second while it runs; True ends it.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(KEEPER), *command],
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=os.name == "posix",
    )
    reader = _Reader(process, output_limit, echo)
    thread = threading.Thread(target=reader.read, daemon=True)
    thread.start()
    ended = ""
    try:
        ended = _wait(process, time_limit, unwanted)
    finally:
        _let_go(process)
        try:
            process.wait(timeout=ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        thread.join(timeout=ENDING)
    assert process.stdout and process.stderr
    told = process.stderr.read().split()
    process.stdout.close()
    process.stderr.close()
    output = b"".join(reader.chunks).decode("utf-8", errors="replace")
    if ended or reader.over:
        return Ran(output, None, "output" if reader.over else ended)
    exact = told and told[-1].lstrip(b"-").isdigit()
    return Ran(output, int(told[-1]) if exact else process.returncode)


def _wait(
    process: subprocess.Popen[bytes], time_limit: float, unwanted: Callable[[], bool] | None
) -> str:
    """Wait for the program's end; why it is to be ended, "" when it ended by itself."""
    late = time.monotonic() + time_limit
    while True:
        left = late - time.monotonic()
        try:
            process.wait(timeout=left if unwanted is None else min(left, LOOKING))
            return ""
        except subprocess.TimeoutExpired:
            if time.monotonic() >= late:
                return "time"
            if unwanted is not None and unwanted():
                return "asked"


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe whose end tells the keeper to end everything."""
    with contextlib.suppress(OSError):
        assert process.stdin
        process.stdin.close()
