"""A model of CUDA graphs: pay for every launch once per shape, then replay with one launch.

Promises G1-G3: eager costs n launches per call, a first call n, replay 1; the captured input and
output buffers keep their identity; replayed values equal eager ones. A `Tape` is honest: recording
stores kernels with their buffers and computes nothing, so its output holds zeros until a replay. A
first call is valid all the same, because it warms up before it records and returns the warm-up's
result. Mirrors `vllm/compilation/cuda_graph.py:145` `CUDAGraphWrapper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Op = Callable[[np.ndarray], np.ndarray]


class LaunchCounter:
    """Kernel launches since the last reset, counted on the class."""

    n = 0

    @classmethod
    def reset(cls) -> None:
        """Set the count to zero."""
        cls.n = 0

    @classmethod
    def bump(cls, k: int = 1) -> None:
        """Count `k` launches."""
        cls.n += k


def run_eager(ops: Sequence[Op], x: np.ndarray) -> np.ndarray:
    """Apply `ops` in order; one launch each."""
    for op in ops:
        x = op(x)
        LaunchCounter.bump()
    return x


class Tape:
    """Kernels with the buffers they read and write, in order: what a graph is.

    `record` runs nothing; `replay` runs all and counts as one launch. A tape knows its buffers, not
    the names that pointed to them: who binds a name to another array changes nothing here.
    """

    def __init__(self) -> None:
        self.kernels: list[tuple[Op, np.ndarray, np.ndarray]] = []

    def record(self, op: Op, src: np.ndarray, dst: np.ndarray) -> None:
        """Store "`op` of `src` into `dst`". `dst` stays as it is."""
        self.kernels.append((op, src, dst))

    def replay(self) -> None:
        """Run the kernels over their buffers; one launch, however many there are."""
        for op, src, dst in self.kernels:
            np.copyto(dst, op(src))
        LaunchCounter.bump()


@dataclass(slots=True)
class GraphEntry:
    """What one capture keeps: fixed buffers, how many launches it recorded, and the tape.

    Mirrors `vllm/compilation/cuda_graph.py:128` `CUDAGraphEntry`.
    """

    shape: tuple[int, ...]
    static_input: np.ndarray
    output: np.ndarray
    num_ops: int
    tape: Tape = field(default_factory=Tape)


class GraphRunner:
    """Captures `ops` once per input shape and replays the capture afterwards.

    Args of a call: `x`, any array; its shape chooses the graph. Returns the graph's own output
    buffer: the next replay of the same shape overwrites it, so copy what must outlive a step.

    With `capture_sizes`, the first dimension is rounded up to the next size and the result is cut
    back; a batch above the largest size runs eagerly.
    """

    def __init__(self, ops: Sequence[Op], capture_sizes: Sequence[int] | None = None) -> None:
        """Raises ValueError when a capture size is below 1."""
        if capture_sizes is not None and any(size < 1 for size in capture_sizes):
            raise ValueError(f"capture_sizes={list(capture_sizes)}: need sizes of at least 1")
        self.ops = list(ops)
        self.capture_sizes = None if capture_sizes is None else sorted(capture_sizes)
        self.graphs: dict[tuple[int, ...], GraphEntry] = {}

    @property
    def num_captured(self) -> int:
        """Graphs held, one per shape."""
        return len(self.graphs)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Run on `x`, capturing first if its (padded) shape is new."""
        shape = x.shape
        if self.capture_sizes is not None:
            rows = next((size for size in self.capture_sizes if size >= len(x)), None)
            if rows is None:
                return run_eager(self.ops, x)
            shape = (rows, *x.shape[1:])
        entry = self.graphs.get(shape)
        if entry is None:
            entry = self.graphs[shape] = self._capture(x, shape)
        else:
            self._replay(entry, x)
        return entry.output if shape == x.shape else entry.output[: len(x)]

    def _capture(self, x: np.ndarray, shape: tuple[int, ...]) -> GraphEntry:
        """Warm up on `x`, record, and leave the warm-up's result in the output buffer."""
        static_input = np.zeros(shape, dtype=x.dtype)
        static_input[: len(x)] = x
        tape, src, result = Tape(), static_input, static_input
        for op in self.ops or [np.copy]:  # no ops: the graph is a copy
            result = np.asarray(op(result))
            dst = np.zeros(result.shape, dtype=result.dtype)
            tape.record(op, src, dst)
            src = dst
        LaunchCounter.bump(len(self.ops))  # the warm-up's; recording launches nothing
        np.copyto(src, result)
        return GraphEntry(shape, static_input, src, len(self.ops), tape)

    def _replay(self, entry: GraphEntry, x: np.ndarray) -> None:
        np.copyto(entry.static_input[: len(x)], x)
        entry.tape.replay()


class PiecewiseGraphRunner:
    """Captures the runs of capturable ops and leaves the others, such as attention, eager.

    Mirrors the split of `vllm/compilation/backends.py:548` `split_graph`.
    """

    def __init__(self, ops: Sequence[Op], is_capturable: Callable[[int], bool]) -> None:
        """Args: ops in order; `is_capturable(i)` says whether op i may be in a graph."""
        self.segments: list[GraphRunner | list[Op]] = []
        previous: bool | None = None
        for i, op in enumerate(ops):
            capturable = bool(is_capturable(i))
            if capturable != previous:
                self.segments.append(GraphRunner([]) if capturable else [])
            segment = self.segments[-1]
            (segment.ops if isinstance(segment, GraphRunner) else segment).append(op)
            previous = capturable

    @property
    def num_graphs(self) -> int:
        """Capturable segments: one graph per shape will be held for each."""
        return sum(isinstance(segment, GraphRunner) for segment in self.segments)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Run every segment in order."""
        for segment in self.segments:
            x = segment(x) if isinstance(segment, GraphRunner) else run_eager(segment, x)
        return x
