"""CUDA graphs without CUDA: capture and replay, launch timelines."""

from mini_vllm.cudagraph.graphs import (
    GraphEntry,
    GraphRunner,
    LaunchCounter,
    PiecewiseGraphRunner,
    Tape,
    run_eager,
)

__all__ = [
    "GraphEntry", "GraphRunner", "LaunchCounter", "PiecewiseGraphRunner", "Tape", "run_eager",
]  # fmt: skip
