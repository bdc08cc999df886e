"""Paired timings and the tables of `benchmarks/README.md`.

Promises: two contestants run in turn in one process, so a drift of the machine hits both; every
figure is a ratio per pair, given as minimum, median and maximum.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).with_name("README.md")


@dataclass(frozen=True, slots=True)
class Paired:
    """Seconds of each run of two contestants, in the order they ran."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times faster ours was, pair by pair."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def ratio_text(self) -> str:
        """ "median (min-max)" of the ratios."""
        r = self.ratios
        return f"{statistics.median(r):.2f}x ({min(r):.2f}-{max(r):.2f})"


def paired(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Paired:
    """Run the two in turn, `repeats` times each after one warm-up that is not counted."""
    ours(), theirs()
    result = Paired([], [])
    for _ in range(repeats):
        for contestant, times in ((ours, result.ours), (theirs, result.theirs)):
            began = clock()
            contestant()
            times.append(clock() - began)
    return result


def machine() -> str:
    """Processor, cores and Python, for the line under a table."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text())
        model = found[1] if found else model
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"
