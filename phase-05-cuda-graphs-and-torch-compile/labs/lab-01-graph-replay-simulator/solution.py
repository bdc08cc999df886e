"""CUDA graphs without a GPU: a tape of kernels over fixed buffers, and a runner that replays it.

numpy arrays stand for device memory and a counter for the clock. Mirrors
`vllm/compilation/cuda_graph.py:145` `CUDAGraphWrapper`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Op = Callable[[np.ndarray], np.ndarray]


class LaunchCounter:
    """Given. Kernel launches since the last reset, counted on the class."""

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
    """Apply `ops` in order, one launch each. No ops: `x` itself and no launch."""
    for op in ops:
        x = op(x)
        LaunchCounter.bump()
    return x


class Tape:
    """Kernels with the buffers they read and write, in order: what a graph is.

    Attributes:
        kernels: (op, source buffer, destination buffer) of each recorded kernel.
    """

    def __init__(self) -> None:
        """Given."""
        self.kernels: list[tuple[Op, np.ndarray, np.ndarray]] = []

    def record(self, op: Op, src: np.ndarray, dst: np.ndarray) -> None:
        """Store "`op` of `src` into `dst`". Runs nothing, writes nothing, launches nothing."""
        self.kernels.append((op, src, dst))

    def replay(self) -> None:
        """Run every kernel, from its source buffer into its destination. One launch in all."""
        for op, src, dst in self.kernels:
            np.copyto(dst, op(src))
        LaunchCounter.bump()


@dataclass(slots=True)
class GraphEntry:
    """Given. One captured graph.

    Attributes:
        shape: of the input it was captured for.
        static_input: the buffer that the first kernel reads.
        output: the buffer that the last kernel writes.
        num_ops: kernels recorded.
        tape: the recording.
    """

    shape: tuple[int, ...]
    static_input: np.ndarray
    output: np.ndarray
    num_ops: int
    tape: Tape


class GraphRunner:
    """Captures `ops` once per input shape and replays the capture afterwards.

    Attributes:
        ops: functions of one array to an array: a new one, the input, or a view of it.
        graphs: input shape -> its entry. The dtype is not part of the key.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        """Given."""
        self.ops = list(ops)
        self.graphs: dict[tuple[int, ...], GraphEntry] = {}

    @property
    def num_captured(self) -> int:
        """Graphs held, one per shape."""
        return len(self.graphs)

    def capture(self, x: np.ndarray) -> tuple[GraphEntry, np.ndarray]:
        """A new entry for arrays like `x`, and what the ops make of `x`.

        Each op runs once, as a warm-up, at one launch; recording runs nothing. The first kernel
        reads the static input, a private copy of `x` that the warm-up reads as well; every kernel
        writes a buffer of its own, with its result's shape and dtype, and the next one reads it.
        `entry.output` is the last of them and holds zeros.

        Returns:
            The entry (not yet in `graphs`) and the warm-up's result. At least one op is needed.
        """
        static_input = x.copy()
        tape, src, result = Tape(), static_input, static_input
        for op in self.ops:
            result = run_eager([op], result)
            dst = np.zeros(result.shape, dtype=result.dtype)
            tape.record(op, src, dst)
            src = dst
        return GraphEntry(x.shape, static_input, src, len(self.ops), tape), result

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Run on `x`.

        The result stands in the graph's own output buffer, the same one for every call of a
        shape: the next call overwrites it. An unseen shape costs a warm-up, one launch per op, and
        nothing else; a seen one costs one launch and keeps its entry and buffers. `x` is read
        during the call only.

        Raises:
            TypeError: numpy's rule "same_kind" forbids copying `x` into the static input, as for
                float into int: the graph was captured for another dtype, and stays as it is.
        """
        entry = self.graphs.get(x.shape)
        if entry is None:
            entry, result = self.capture(x)
            self.graphs[x.shape] = entry
            np.copyto(entry.output, result)
        else:
            np.copyto(entry.static_input, x)
            entry.tape.replay()
        return entry.output
