"""A pretended `vllm` for `run.py --pretend`: no GPU, no model, an exact clock.

It prints the log lines of the pinned version that the lab reads, in their formats, and takes the
time that a made-up device would. Every number is invented: launches of 5 us and kernels whose
time grows with the batch. Nothing it says is a measurement.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

KERNELS = {True: 60, False: 110}
"""Per step; compiled and not."""
LAUNCH_US = 5.0

_now = 100.0
_engines = 0
time.perf_counter = lambda: _now  # this process measures with the pretended clock


class _Counter:
    num_cudagraph_captured = 0


counter = ModuleType("vllm.compilation.counter")
counter.compilation_counter = _Counter  # type: ignore[attr-defined]
platforms = ModuleType("vllm.platforms")
platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
    get_device_name=lambda: "a pretended device: nothing here is measured",
)
sys.modules["vllm.compilation"] = ModuleType("vllm.compilation")
sys.modules["vllm.compilation.counter"] = counter
sys.modules["vllm.platforms"] = platforms


class SamplingParams:
    """As far as `run.py` uses it."""

    def __init__(
        self, temperature: float, max_tokens: int, ignore_eos: bool = False, detokenize: bool = True
    ) -> None:
        if temperature != 0 or not ignore_eos:
            raise ValueError("a run that may stop early is not comparable")
        self.max_tokens = max_tokens


def _sizes(max_num_seqs: int) -> list[int]:
    top = min(2 * max_num_seqs, 512)
    return [n for n in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if n <= top]


class LLM:
    """Starts at once, says what the real one says, and generates nothing."""

    def __init__(
        self,
        model: str,
        gpu_memory_utilization: float,
        max_model_len: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        enforce_eager: bool = False,
        compilation_config: dict[str, Any] | None = None,
        cudagraph_metrics: bool = False,
        disable_log_stats: bool = True,
    ) -> None:
        global _engines
        _engines += 1
        if _engines > 1:
            raise RuntimeError("a second engine in one process: memory of the first may be left")
        if enable_prefix_caching:
            raise ValueError("the second run of a prompt would not be the first one's equal")
        asked = compilation_config or {}
        self.compiled = asked.get("mode", 3) == 3 and not enforce_eager
        mode = "NONE" if enforce_eager else asked.get("cudagraph_mode", "FULL_AND_PIECEWISE")
        self.mode, self.sizes, self.max_num_seqs = mode, _sizes(max_num_seqs), max_num_seqs
        self.metrics = cudagraph_metrics and not disable_log_stats
        self.rows: dict[tuple[int, int, str], int] = {}
        self.llm_engine = SimpleNamespace(
            do_log_stats=self._table,
            vllm_config=SimpleNamespace(
                compilation_config=SimpleNamespace(
                    cudagraph_mode=SimpleNamespace(name=mode),
                    cudagraph_capture_sizes=[] if enforce_eager else self.sizes,
                ),
                scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
                model_config=SimpleNamespace(get_num_layers=lambda parallel: 4),
                parallel_config=None,
            ),
        )
        self._start(enforce_eager)

    def _start(self, enforce_eager: bool) -> None:
        if enforce_eager:
            _say("Enforce eager set, disabling torch.compile and CUDAGraphs. This is equivalent")
            _say("Cudagraph is disabled under eager mode")
            return
        if self.compiled:
            _say("Dynamo bytecode transform time: 1.25 s")
            _say("torch.compile took 6.50 s in total")
        if self.mode == "NONE":
            _say("Skipping CUDA graph capture. To turn on CUDA graph capture, ensure")
            return
        _say("Estimated CUDA graph memory: 0.31 GiB total")
        rungs = len([size for size in self.sizes if size <= self.max_num_seqs])
        if self.mode in ("PIECEWISE", "FULL_AND_PIECEWISE"):
            _bar("mixed prefill-decode, PIECEWISE", len(self.sizes))
            _Counter.num_cudagraph_captured += len(self.sizes) * 5
        if self.mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
            _bar("decode, FULL", rungs)
            _Counter.num_cudagraph_captured += rungs
        _say("Graph capturing finished in 4 secs, took 0.29 GiB")

    def generate(self, prompts: list[Any], params: SamplingParams, use_tqdm: bool = True) -> None:
        """Advance the clock by one prefill and the decode steps."""
        global _now
        batch = len(prompts)
        rung = next((size for size in self.sizes if size >= batch), None)
        graphed = self.mode != "NONE" and rung is not None
        rows = rung if graphed and rung else batch
        launches = 1 if graphed else KERNELS[self.compiled]
        if self.mode == "PIECEWISE" and graphed:
            launches = 13
        gpu_us = KERNELS[self.compiled] * (1.5 + 0.05 * rows)
        step = max(launches * LAUNCH_US, gpu_us) * 1e-6
        _now += 0.02 + step * params.max_tokens
        key = (batch, rows, "FULL" if graphed else "NONE")
        self.rows[key] = self.rows.get(key, 0) + params.max_tokens - 1

    def _table(self) -> None:
        if self.metrics:
            _say("| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |")
            _say("|-----------------|---------------|--------------|--------------|-------|")
            for (tokens, padded, mode), count in self.rows.items():
                _say(f"| {tokens:<15} | {padded:<13} | {padded - tokens:<12} | {mode} | {count} |")


def _say(words: str) -> None:
    print(f"INFO 01-01 00:00:00 [pretended.py:1] {words}", file=sys.stderr, flush=True)


def _bar(name: str, total: int) -> None:
    for done in (0, total // 2, total):
        share = 100 * done // total
        tail = f"{done}/{total} [00:01<00:00, 30.0it/s]"
        text = f"\rCapturing CUDA graphs ({name}): {share:3d}%|{'#' * (share // 10):<10}| {tail}"
        print(text, end="", file=sys.stderr)
    print(file=sys.stderr, flush=True)


if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
    _say("pretended engine in this process")
