"""Lab 05-04: read an engine's log and timings, and say what graphs and the compiler each gained.

Part A reads the start-up: progress bars, compile and capture times, the padding table. Part B turns
wall-clock times into decode steps, steps into effects, and refuses what the memory bus forbids.
`run.py` feeds both with a real vLLM v0.22.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ARMS = {
    "A": {"enforce_eager": True},
    "B": {},
    "C": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "D": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "E": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
}
"""Arguments of `LLM` beyond those that all arms share. B is the default."""

EFFECTS = {
    "everything, A to B": ("A", "B"),
    "graphs, C to B": ("C", "B"),
    "compiler, D to B": ("D", "B"),
    "full graphs, E to B": ("E", "B"),
}
"""Name to (without it, with it)."""


class Bar(NamedTuple):
    """A progress bar of captures: how far it got."""

    label: str | None
    """"decode" or "mixed prefill-decode"; None in the bars of model runner V2."""
    mode: str
    done: int
    total: int


class Startup(NamedTuple):
    """What the log says about compiling and capturing; None for a line that is not there."""

    compile_s: float | None = None
    capture_s: float | None = None
    capture_gib: float | None = None
    estimated_gib: float | None = None
    from_cache: bool = False
    """The compiled model was loaded, not compiled."""
    eager: bool = False
    """`enforce_eager` has switched both off."""
    skipped: bool = False
    """No capture, because the mode is NONE."""


class Padding(NamedTuple):
    """A row of the table of `cudagraph_metrics=True`."""

    tokens: int
    padded: int
    mode: str
    steps: int


class Spread(NamedTuple):
    """Repeated measurements."""

    median: float
    low: float
    high: float


# --- Part A: the log ------------------------------------------------------------------------------


def parse_progress(text: str) -> list[Bar]:
    """The bars about CUDA graphs, in order of appearance, as they stood last.

    tqdm rewrites its line: updates of a bar are separated by carriage returns, and other lines may
    stand between them. The number of done rungs never falls; if it does, another engine has
    begun, with a bar of its own.

        Capturing CUDA graphs (decode, FULL):  46%|#### | 16/35 [00:01<00:01, 15.9it/s]
        Capturing CUDA graphs (PIECEWISE): 100%|#####| 51/51 [00:02<00:00, 20.1it/s]

    Source: `vllm/v1/worker/gpu_model_runner.py:6498` `GPUModelRunner._capture_cudagraphs`, and
    `vllm/v1/worker/gpu/cudagraph_utils.py:188` `CudaGraphManager.capture` for the second form.
    """
    raise NotImplementedError


def expected_passes(
    mode: str, sizes: Sequence[int], max_num_seqs: int
) -> list[tuple[str, str, int]]:
    """Given: the bars of a mode, as (label, runtime mode, rungs). One token per decode.

    Source: `vllm/v1/cudagraph_dispatcher.py:330` `CudagraphDispatcher.get_capture_descs`.
    """
    decode, mixed = {
        "FULL_DECODE_ONLY": ("FULL", "NONE"),
        "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
    }.get(mode, ("NONE", mode))
    rungs = sum(size <= max_num_seqs for size in sizes)
    passes = [("mixed prefill-decode", mixed, len(sizes)), ("decode", decode, rungs)]
    return [(label, runtime, count) for label, runtime, count in passes if runtime != "NONE"]


def num_graphs(bars: Sequence[Bar], num_layers: int) -> int:
    """CUDA graphs behind finished bars: one per rung for FULL, one per piece and rung otherwise.

    A model of N attention layers falls into N + 1 pieces.

    Raises:
        ValueError: a bar that did not finish, or a mode that is neither FULL nor PIECEWISE.
    """
    raise NotImplementedError


def read_startup(text: str) -> Startup:
    """Numbers and facts of the start-up, whatever stands in front of them on their lines.

        torch.compile took %.2f s in total
        Graph capturing finished in %.0f secs, took %.2f GiB
        Estimated CUDA graph memory: %.2f GiB total
        Directly load AOT compilation from path %s
        Enforce eager set, disabling torch.compile and CUDAGraphs. ...
        Skipping CUDA graph capture. ...

    Where a line occurs more than once the last counts. The graphs' memory can be negative: it is a
    difference of two readings of free memory.

    Source: `vllm/compilation/monitor.py:18` `monitor_torch_compile`,
    `vllm/v1/worker/gpu_model_runner.py:6373` `GPUModelRunner.capture_model`,
    `vllm/v1/worker/gpu_model_runner.py:6265` `GPUModelRunner.profile_cudagraph_memory`,
    `vllm/compilation/decorators.py:284` `_try_load_aot_compiled_fn`,
    `vllm/config/vllm.py:1032-1038` `VllmConfig.__post_init__`.
    """
    raise NotImplementedError


def parse_padding(text: str) -> list[Padding]:
    """The rows of the padding tables, in order; equal rows of several tables are added up.

    Each line of a table has the log's prefix. Headers and rulers are no rows.

        | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
        | 33              | 40            | 7            | FULL         | 383   |

    Source: `vllm/compilation/cuda_graph.py:71` `CUDAGraphLogging.generate_metric_table`.
    """
    raise NotImplementedError


def padding_share(rows: Sequence[Padding]) -> float:
    """Padded rows per real row over all steps; 0 without any."""
    raise NotImplementedError


# --- Part B: the times ----------------------------------------------------------------------------


def step_ms(short_s: float, long_s: float, short_tokens: int, long_tokens: int) -> float:
    """Milliseconds of one decode step, from two runs that differ in their number of tokens.

    Whatever both runs have in common, prefill, start and end, cancels.

    Raises:
        ValueError: long_tokens is not above short_tokens.
    """
    raise NotImplementedError


def summarize(samples: Sequence[float]) -> Spread:
    """Median, smallest and largest.

    Raises:
        ValueError: fewer than 5 samples.
    """
    raise NotImplementedError


def ratios(steps: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Every effect of `EFFECTS` whose two arms were measured: batch to step without / step with.

    Above 1 the thing helps. Only batches that both arms have; effects and batches in the order of
    `EFFECTS` and of the arm without.

    Args:
        steps: arm to batch to milliseconds of a decode step.
    """
    raise NotImplementedError


def bandwidth_floor_ms(num_bytes: int, bandwidth: float) -> float:
    """The least time in which `num_bytes` can be read at `bandwidth` bytes per second."""
    raise NotImplementedError


def flag_impossible(
    steps: Mapping[str, Mapping[int, float]], floor_ms: float
) -> list[tuple[str, int]]:
    """(arm, batch) of every step that is faster than reading the weights once.

    A step reads them all, for one request or for many. Such a number was not measured on that
    device, or not on that model; no cleverness of a graph gets below the floor.
    """
    raise NotImplementedError


def plateau(steps: Mapping[int, float], tolerance: float = 0.1) -> list[int]:
    """Batches whose step is no longer than that of the smallest, or longer by `tolerance` at most.

    In ascending order, from the smallest on without a gap: the first that takes longer ends it.
    On the plateau of an eager arm the work of the step does not show: something that does not grow
    with the batch sets the pace.
    """
    raise NotImplementedError
