"""Write `generated.txt`: lines that the pinned tree's own code formats, without a GPU.

This is NOT a capture. No model ran. Real: the formatter, the process prefix, the scheduler's
plans, `EngineCore.log_iteration_details`, `LoggingStatLogger.log` and the report of the cache's
size. Made up here, because nothing was measured: date, process id, elapsed times (1.00 ms each),
seconds of start-up and the number of blocks. Two messages whose surroundings need
a GPU are formatted from the call's own template, read from the tree.

Needs the pinned tree importable (conformance/README.md). From the repository root:

    PYTHONPATH=.:upstream python phase-01-architecture-and-request-lifecycle/labs/\
lab-02-read-the-real-loop/make_log.py
"""

from __future__ import annotations

import ast
import io
import itertools
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
os.environ["VLLM_LOGGING_COLOR"] = "0"

HERE = Path(__file__).parent
PID = 4242
WHEN = 1_767_225_600.0  # 2026-01-01 00:00:00 UTC, printed as such: the formatter is set to UTC
PROMPT_TOKENS, MAX_TOKENS, NUM_BLOCKS, MAX_MODEL_LEN = 6, 16, 8788, 256


class Console(io.StringIO):
    """A text stream whose `write` may be replaced, as the real prefix does."""


class Handler(logging.Handler):
    """Formats with the real formatter at a fixed moment."""

    def __init__(self, out: Console) -> None:
        super().__init__()
        import time

        from vllm.logger import _DATE_FORMAT, _FORMAT
        from vllm.logging_utils import NewLineFormatter

        formatter = NewLineFormatter(_FORMAT, _DATE_FORMAT)
        formatter.converter = time.gmtime
        self.setFormatter(formatter)
        self.out = out

    def emit(self, record: logging.LogRecord) -> None:
        record.created = WHEN
        self.out.write(self.format(record) + "\n")


def template_at(root: Path, path: str, line: int) -> str:
    """The constant message of the logging call on a line of the pinned tree."""
    for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and node.lineno == line and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                return first.value
    raise ValueError(f"{path}:{line}: no logging call with a constant message")


def generate() -> str:
    """The whole log as text."""
    import vllm
    from vllm.utils.system_utils import _add_prefix
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core
    from vllm.v1.metrics.loggers import LoggingStatLogger

    from conformance import real

    logging.disable(logging.NOTSET)
    config = {
        "num_blocks": 64, "block_size": 16, "enable_prefix_caching": False, "max_num_seqs": 4,
        "max_num_batched_tokens": 64, "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": True, "max_model_len": MAX_MODEL_LEN, "policy": "fcfs",
    }  # fmt: skip
    scheduler = real.make_scheduler(config)
    root = Path(vllm.__file__).parent.parent
    out = Console()
    handler = Handler(out)
    logger = logging.getLogger("vllm")
    kept, level = logger.handlers, logger.level
    logger.handlers = [handler]
    logger.setLevel(logging.DEBUG)

    def say(severity: int, path: str, line: int, *args: Any) -> None:
        message = template_at(root, path, line)
        handler.handle(
            logging.LogRecord("vllm", severity, str(root / path), line, message, args, None)
        )

    try:
        say(logging.INFO, "vllm/config/vllm.py", 977, "disabled")
        _add_prefix(out, "EngineCore", PID)
        _report_cache(real, kv_cache_utils)
        say(logging.INFO, "vllm/v1/engine/core.py", 309, 1.0)
        _run(real, core, scheduler)
        out.write = out._original_write  # the next line comes from the front end's process
        _say_stats(LoggingStatLogger)
    finally:
        logger.handlers = kept
        logger.setLevel(level)
    return out.getvalue()


def _report_cache(real: Any, kv_cache_utils: Any) -> None:
    """The two lines on the cache's size, for OPT-125m's shapes and NUM_BLOCKS blocks."""
    import torch

    spec = real.FullAttentionSpec(block_size=16, num_kv_heads=12, head_size=64, dtype=torch.float16)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    layers = [f"layer{index}" for index in range(12)]
    group = real.KVCacheGroupSpec(layers, spec)
    kv_cache_utils._report_kv_cache_config(vllm_config, real.KVCacheConfig(NUM_BLOCKS, [], [group]))


def _run(real: Any, core: Any, scheduler: Any) -> None:
    """One request to its end, with the real iteration lines; every elapsed time reads 1.00 ms."""
    clock = itertools.count()
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(
            observability_config=SimpleNamespace(enable_logging_iteration_details=True)
        )
    )
    params = real.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    params.update_from_generation_config({}, 2)
    scheduler.add_request(real.Request("0-00000000", [7] * PROMPT_TOKENS, params, None))
    real_time = core.time
    core.time = SimpleNamespace(monotonic=lambda: next(clock) / 1000)
    try:
        while scheduler.has_requests():
            plan = scheduler.schedule()
            with core.EngineCore.log_iteration_details(engine, plan):
                sampled = dict.fromkeys(plan.num_scheduled_tokens, 7)
            scheduler.update_from_output(plan, real.runner_output(plan, sampled))
    finally:
        core.time = real_time


def _say_stats(stat_logger_class: Any) -> None:
    """One periodic line of an engine that has nothing left to do."""
    config = SimpleNamespace(
        kv_transfer_config=None,
        observability_config=SimpleNamespace(cudagraph_metrics=False, enable_mfu_metrics=False),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        compilation_config=None,
    )
    stat_logger_class(config).log()


if __name__ == "__main__":
    (HERE / "generated.txt").write_text(generate(), encoding="utf-8")
    print(f"wrote {HERE.name}/generated.txt")
