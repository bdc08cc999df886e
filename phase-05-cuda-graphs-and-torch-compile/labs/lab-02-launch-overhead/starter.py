"""When does a CUDA graph pay? Counting launches, then putting them beside the GPU's work.

Every function is pure. The engine's two-lane model of a step is `mini_vllm/cudagraph/launches.py`.
The choice upstream is `vllm/config/compilation.py:53` `CUDAGraphMode`.
"""

from __future__ import annotations


def eager_launches(num_ops: int, calls: int) -> int:
    """Launches of `calls` calls of `num_ops` kernels, each launched by itself.

    Raises:
        ValueError: num_ops is below 1 or calls below 0.
    """
    raise NotImplementedError


def graph_launches(num_ops: int, calls: int, capture_cost_ops: int | None = None) -> int:
    """Launches of `calls` calls with a graph: the first captures, each later one replays.

    Args:
        num_ops: kernels in the graph.
        calls: calls in all, the capturing one included.
        capture_cost_ops: what the first call costs, in launches; None means `num_ops`.

    Raises:
        ValueError: num_ops or capture_cost_ops is below 1, or calls below 0.
    """
    raise NotImplementedError


def crossover(num_ops: int, capture_cost_ops: int | None = None) -> int | None:
    """The smallest number of calls from which the graph has cost strictly fewer launches.

    None if there is none. Computed, not searched. Raises as `graph_launches`.
    """
    raise NotImplementedError


def asymptotic_speedup(num_ops: int) -> float:
    """What eager launches over graph launches tends to for many calls. Raises as above."""
    raise NotImplementedError


def step_time(
    num_ops: int, launch_us: float, gpu_us: float, graphed: bool, overlap: bool = True
) -> float:
    """A bound of the time of one step in microseconds.

    The host needs `launch_us` for each launch, the GPU `gpu_us` for all kernels together. With
    `overlap` the host runs ahead of the GPU and the slower of the two decides: no step is faster.
    Without, the host waits for each kernel before it launches the next, and both times add up: no
    step is slower.

    Raises:
        ValueError: num_ops is below 1, or a time is negative.
    """
    raise NotImplementedError
