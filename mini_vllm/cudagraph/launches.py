"""Two lanes of one step: the host issues launches one after another, the GPU runs kernels in order.

Promises: a kernel starts when its launch has been issued and the kernel before it has ended, and
at no other time; a graph is one launch for all its kernels. A model with chosen durations, not a
measurement. Mirrors what `vllm/config/compilation.py:53` `CUDAGraphMode` chooses between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MODES = ("eager", "piecewise", "full")
"""One launch per kernel; one graph per run of kernels between attentions; one graph for all."""

LAYER = ("norm", "qkv", "rope", "attention", "out", "norm", "gate, up", "silu", "down")
"""Kernels of one decoder layer; attention is what piecewise graphs are split at."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time on a lane, in microseconds from the start of the step."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Both lanes of a step."""

    launches: list[Span]
    kernels: list[Span]

    @property
    def step_us(self) -> float:
        """Until the last kernel has ended."""
        return self.kernels[-1].end

    @property
    def gpu_busy(self) -> float:
        """Share of the step in which a kernel runs."""
        return sum(kernel.end - kernel.start for kernel in self.kernels) / self.step_us


def simulate(kernels: Sequence[str], mode: str, launch_us: float, kernel_us: float) -> Timeline:
    """One step of `kernels`, each `kernel_us` long; issuing a kernel or a graph takes `launch_us`.

    Raises:
        ValueError: no kernels, an unknown mode, or a time that is not a finite number above 0.
    """
    if not kernels:
        raise ValueError("kernels=[]: need at least one")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: need one of {', '.join(MODES)}")
    for name, value in (("launch_us", launch_us), ("kernel_us", kernel_us)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: need a finite number above 0")
    launches: list[Span] = []
    ran: list[Span] = []
    issued = ended = 0.0
    for group in _groups(kernels, mode):
        name = group[0] if len(group) == 1 else f"graph of {len(group)}"
        launches.append(Span(name, issued, issued + launch_us))
        issued += launch_us
        for kernel in group:
            start = max(issued, ended)
            ended = start + kernel_us
            ran.append(Span(kernel, start, ended))
    return Timeline(launches, ran)


def _groups(kernels: Sequence[str], mode: str) -> list[list[str]]:
    """What is issued together."""
    if mode == "eager":
        return [[kernel] for kernel in kernels]
    if mode == "full":
        return [list(kernels)]
    return [list(run) for _, run in groupby(kernels, key="attention".__eq__)]
