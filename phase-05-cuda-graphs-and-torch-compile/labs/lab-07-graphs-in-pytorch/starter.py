"""Lab 05-07: predict what a CUDA graph gains on a device, and what a replay reads and writes.

Part A is the arithmetic of two lanes, in closed form. Part B turns measured rows into the three
numbers that Part A needs. Part C is the semantics of a captured graph. `run.py` holds all three
against a GPU; `mini_vllm/cudagraph/launches.py` and `mini_vllm/cudagraph/graphs.py` hold them
without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BYTES_PER_ELEMENT = 8
"""`buffer.add_(1)` in float32 reads 4 bytes and writes 4."""

Action = tuple[str] | tuple[str, int]
"""("fill", v), ("rebind", v), ("replay",), ("read",), ("keep",) or ("clone",)."""


class Row(NamedTuple):
    """One size of a measured sweep; times in microseconds, for all kernels of a step."""

    elements: int
    host_us: float
    """Until the last launch of the eager step has been issued."""
    eager_us: float
    """Until the last kernel of the eager step has ended."""
    replay_us: float
    """Until the call of `replay()` has returned."""
    graph_us: float
    """Until the last kernel of the replay has ended."""


class Fit(NamedTuple):
    """The three numbers behind a sweep."""

    launch_us: float
    replay_us: float
    kernel_us: tuple[float, ...]
    """Of one kernel, per row."""


# --- Part A: two lanes ----------------------------------------------------------------------------


def eager_us(num_kernels: int, launch_us: float, kernel_us: float) -> float:
    """Time of a step of equal kernels, each launched by itself.

    A kernel starts when its launch has been issued and the kernel before it has ended. Closed
    form; the same as `mini_vllm.cudagraph.launches.simulate(..., "eager", ...)`.
    """
    raise NotImplementedError


def graph_us(num_kernels: int, replay_us: float, kernel_us: float) -> float:
    """The same step as one graph, whose submission takes `replay_us`."""
    raise NotImplementedError


def gain(num_kernels: int, launch_us: float, replay_us: float, kernel_us: float) -> float:
    """How many times faster the graph is."""
    raise NotImplementedError


def kernel_us_at_gain(
    num_kernels: int, launch_us: float, replay_us: float, ratio: float
) -> float | None:
    """How long kernels last when the graph gains exactly `ratio`; longer ones gain less.

    None if even kernels of no length gain no more than that. A closed form, no search: 300
    kernels, launches of 5 us and a replay of 12 us gain 1.1 at 1486.8 / 329 us.

    Raises:
        ValueError: ratio is not above 1.
    """
    raise NotImplementedError


def kernel_us(elements: int, bandwidth: float, floor_us: float) -> float:
    """How long `buffer.add_(1)` takes: its bytes at `bandwidth` (bytes/s), at least `floor_us`."""
    raise NotImplementedError


def elements_at_gain(
    num_kernels: int,
    launch_us: float,
    replay_us: float,
    ratio: float,
    bandwidth: float,
    floor_us: float,
) -> int:
    """The fewest elements per kernel with which the graph gains at most `ratio`.

    0 if the shortest kernel the device has, `floor_us`, is too long already or a graph never gains
    that much.
    """
    raise NotImplementedError


# --- Part B: from measurements --------------------------------------------------------------------


def fit(rows: Sequence[Row], num_kernels: int) -> Fit:
    """Launch, replay and kernel times of a sweep.

    `launch_us` and `replay_us` are the host's times in the row with the fewest elements: with long
    kernels the queue of the device may fill up, and then a launch waits. Kernel times come from the
    graph, whose GPU lane never waits for the host: what is left of a row's `graph_us` after that
    `replay_us`, per kernel, in the order of the rows.
    """
    raise NotImplementedError


def measured_crossover(rows: Sequence[Row], ratio: float) -> float | None:
    """The number of elements at which eager / graph falls to `ratio` for good.

    Between the last row above `ratio` and the next one, on a straight line over the logarithm of
    the elements. Rows may come in any order. None if no row is above, or the largest one still is.
    """
    raise NotImplementedError


# --- Part C: what a replay reads and writes -------------------------------------------------------


def reads(actions: Sequence[Action]) -> tuple[list[int | None], list[int | None]]:
    """What a program sees that uses a graph of `out = 2 * x + 1`, captured before the first action.

    The variable `x` names the tensor that the graph reads, `out` the one that it writes.

        ("fill", v)     x.fill_(v), whatever tensor x names by now
        ("rebind", v)   x = a new tensor that holds v
        ("replay",)     graph.replay()
        ("read",)       note what out holds
        ("keep",)       kept.append(out)
        ("clone",)      kept.append(out.clone())

    Before the first action x holds 0. None stands for memory that nobody has written.

    Returns:
        What the reads noted, and what the kept tensors hold at the end.

    Raises:
        ValueError: another action.
    """
    raise NotImplementedError
