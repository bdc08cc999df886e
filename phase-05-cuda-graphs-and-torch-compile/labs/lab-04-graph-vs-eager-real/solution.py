"""Lab 05-04: read an engine's log and timings, and say what graphs and the compiler each gained.

Part A reads the start-up: progress bars, compile and capture times, the padding table. Part B turns
wall-clock times into decode steps, steps into effects, and refuses what the memory bus forbids.
`run.py` feeds both with a real vLLM v0.22.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median
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
    pattern = r"Capturing CUDA graphs \((?:([^,()]+), )?(\w+)\): +\d+%\|[^|]*\| (\d+)/(\d+) \["
    bars: list[Bar] = []
    current: dict[tuple[str, str], int] = {}
    for label, mode, done, total in re.findall(pattern, text):
        bar = Bar(label or None, mode, int(done), int(total))
        index = current.get((label, mode))
        if index is None or bar.done < bars[index].done:
            current[label, mode] = len(bars)
            bars.append(bar)
        else:
            bars[index] = bar
    return bars


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
    total = 0
    for bar in bars:
        if bar.done != bar.total:
            raise ValueError(f"{bar}: stopped before its end")
        if bar.mode not in ("FULL", "PIECEWISE"):
            raise ValueError(f"{bar}: unknown mode")
        total += bar.total * (1 if bar.mode == "FULL" else num_layers + 1)
    return total


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

    def last(pattern: str, group: int = 1) -> float | None:
        found = list(re.finditer(pattern, text))
        return float(found[-1][group]) if found else None

    capturing = r"Graph capturing finished in (\d+) secs, took (-?\d+\.\d+) GiB"
    return Startup(
        compile_s=last(r"torch\.compile took (\d+\.\d+) s in total"),
        capture_s=last(capturing),
        capture_gib=last(capturing, 2),
        estimated_gib=last(r"Estimated CUDA graph memory: (-?\d+\.\d+) GiB total"),
        from_cache="Directly load AOT compilation from path" in text,
        eager="Enforce eager set, disabling torch.compile and CUDAGraphs." in text,
        skipped="Skipping CUDA graph capture." in text,
    )


def parse_padding(text: str) -> list[Padding]:
    """The rows of the padding tables, in order; equal rows of several tables are added up.

    Each line of a table has the log's prefix. Headers and rulers are no rows.

        | Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |
        | 33              | 40            | 7            | FULL         | 383   |

    Source: `vllm/compilation/cuda_graph.py:71` `CUDAGraphLogging.generate_metric_table`.
    """
    counts: dict[tuple[int, int, str], int] = {}
    pattern = r"\| *(\d+) *\| *(\d+) *\| *\d+ *\| *(\w+) *\| *(\d+) *\|"
    for tokens, padded, mode, count in re.findall(pattern, text):
        key = int(tokens), int(padded), mode
        counts[key] = counts.get(key, 0) + int(count)
    return [Padding(*key, count) for key, count in counts.items()]


def padding_share(rows: Sequence[Padding]) -> float:
    """Padded rows per real row over all steps; 0 without any."""
    real = sum(row.tokens * row.steps for row in rows)
    extra = sum((row.padded - row.tokens) * row.steps for row in rows)
    return extra / real if real else 0.0


# --- Part B: the times ----------------------------------------------------------------------------


def step_ms(short_s: float, long_s: float, short_tokens: int, long_tokens: int) -> float:
    """Milliseconds of one decode step, from two runs that differ in their number of tokens.

    Whatever both runs have in common, prefill, start and end, cancels.

    Raises:
        ValueError: long_tokens is not above short_tokens.
    """
    if long_tokens <= short_tokens:
        raise ValueError(f"tokens {short_tokens} and {long_tokens}: the second must be larger")
    return (long_s - short_s) / (long_tokens - short_tokens) * 1e3


def summarize(samples: Sequence[float]) -> Spread:
    """Median, smallest and largest.

    Raises:
        ValueError: fewer than 5 samples.
    """
    if len(samples) < 5:
        raise ValueError(f"{len(samples)} samples: need at least 5")
    return Spread(median(samples), min(samples), max(samples))


def ratios(steps: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Every effect of `EFFECTS` whose two arms were measured: batch to step without / step with.

    Above 1 the thing helps. Only batches that both arms have; effects and batches in the order of
    `EFFECTS` and of the arm without.

    Args:
        steps: arm to batch to milliseconds of a decode step.
    """
    return {
        name: {
            batch: ms / steps[on][batch] for batch, ms in steps[off].items() if batch in steps[on]
        }
        for name, (off, on) in EFFECTS.items()
        if off in steps and on in steps
    }


def bandwidth_floor_ms(num_bytes: int, bandwidth: float) -> float:
    """The least time in which `num_bytes` can be read at `bandwidth` bytes per second."""
    return num_bytes / bandwidth * 1e3


def flag_impossible(
    steps: Mapping[str, Mapping[int, float]], floor_ms: float
) -> list[tuple[str, int]]:
    """(arm, batch) of every step that is faster than reading the weights once.

    A step reads them all, for one request or for many. Such a number was not measured on that
    device, or not on that model; no cleverness of a graph gets below the floor.
    """
    return [
        (arm, batch)
        for arm, of_arm in steps.items()
        for batch, ms in of_arm.items()
        if ms < floor_ms
    ]


def plateau(steps: Mapping[int, float], tolerance: float = 0.1) -> list[int]:
    """Batches whose step is no longer than that of the smallest, or longer by `tolerance` at most.

    In ascending order, from the smallest on without a gap: the first that takes longer ends it.
    On the plateau of an eager arm the work of the step does not show: something that does not grow
    with the batch sets the pace.
    """
    found = []
    batches = sorted(steps)
    for batch in batches:
        if steps[batch] > steps[batches[0]] * (1 + tolerance):
            break
        found.append(batch)
    return found
