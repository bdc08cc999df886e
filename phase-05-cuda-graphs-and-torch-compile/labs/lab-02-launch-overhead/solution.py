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
    if num_ops < 1:
        raise ValueError(f"num_ops={num_ops}: need at least 1")
    if calls < 0:
        raise ValueError(f"calls={calls}: need at least 0")
    return num_ops * calls


def graph_launches(num_ops: int, calls: int, capture_cost_ops: int | None = None) -> int:
    """Launches of `calls` calls with a graph: the first captures, each later one replays.

    Args:
        num_ops: kernels in the graph.
        calls: calls in all, the capturing one included.
        capture_cost_ops: what the first call costs, in launches; None means `num_ops`.

    Raises:
        ValueError: num_ops or capture_cost_ops is below 1, or calls below 0.
    """
    eager_launches(num_ops, calls)  # refuses bad arguments
    if capture_cost_ops is None:
        capture_cost_ops = num_ops
    if capture_cost_ops < 1:
        raise ValueError(f"capture_cost_ops={capture_cost_ops}: need at least 1")
    return 0 if calls == 0 else capture_cost_ops + calls - 1


def crossover(num_ops: int, capture_cost_ops: int | None = None) -> int | None:
    """The smallest number of calls from which the graph has cost strictly fewer launches.

    None if there is none. Computed, not searched. Raises as `graph_launches`.
    """
    capture = graph_launches(num_ops, 1, capture_cost_ops)
    if num_ops == 1:
        return None
    return (capture - 1) // (num_ops - 1) + 1


def asymptotic_speedup(num_ops: int) -> float:
    """What eager launches over graph launches tends to for many calls. Raises as above."""
    return float(eager_launches(num_ops, 1))


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
    eager_launches(num_ops, 1)  # refuses bad arguments
    if launch_us < 0 or gpu_us < 0:
        raise ValueError(f"launch_us={launch_us}, gpu_us={gpu_us}: need at least 0")
    host_us = launch_us * (1 if graphed else num_ops)
    return max(host_us, gpu_us) if overlap else host_us + gpu_us
