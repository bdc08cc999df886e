"""Lab 01-02: from a log line of vLLM v0.22.1 to the source line that printed it, and its numbers.

`SOURCES` is given: the logging calls of the pinned tree that matter here, checked against the tree
by a test. `parse_line`, `template_regex`, `attribute`, `parse_iteration`, `count_work` and
`kv_capacity` are the lab.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Source(NamedTuple):
    """One logging call: where it begins, and its message with printf fields.

    A call that is given an f-string has `%s` for each of its fields. Two entries may name one line.
    """

    path: str
    line: int
    template: str


SOURCES = (
    Source("vllm/config/vllm.py", 977, "Asynchronous scheduling is %s."),
    Source("vllm/v1/engine/core.py", 112, "Initializing a V1 LLM engine (v%s) with config: %s"),
    Source("vllm/v1/worker/gpu_worker.py", 466, "Available KV cache memory: %s GiB"),
    Source(
        "vllm/v1/worker/cpu_worker.py",
        211,
        "Auto set (%s/%s) GiB for KV cache on node %s, with %s GiB requested memory for the "
        "worker. %s GiB memory was consumed by non-kv usages.",
    ),
    Source(
        "vllm/v1/worker/cpu_worker.py",
        211,
        "Explicitly set (%s/%s) GiB for KV cache on node %s.",
    ),
    Source("vllm/v1/core/kv_cache_utils.py", 1733, "GPU KV cache size: %s tokens"),
    Source(
        "vllm/v1/core/kv_cache_utils.py",
        1734,
        "Maximum concurrency for %s tokens per request: %.2fx",
    ),
    Source(
        "vllm/v1/engine/core.py",
        302,
        "init engine (profile, create kv cache, warmup model) took %.2f s (compilation: %.2f s)",
    ),
    Source(
        "vllm/v1/engine/core.py",
        309,
        "init engine (profile, create kv cache, warmup model) took %.2f s",
    ),
    Source("vllm/v1/engine/core.py", 1215, "EngineCore waiting for work."),
    Source("vllm/v1/engine/core.py", 1227, "EngineCore loop active."),
    Source(
        "vllm/v1/worker/gpu_model_runner.py",
        4069,
        "Running batch with cudagraph_mode: %s, batch_descriptor: %s, should_ubatch: %s, "
        "num_tokens_across_dp: %s",
    ),
    Source(
        "vllm/v1/engine/core.py",
        407,
        "Iteration(%s): %s context requests, %s context tokens, %s generation requests, "
        "%s generation tokens, iteration elapsed time: %s ms",
    ),
    Source(
        "vllm/v1/metrics/loggers.py",
        271,
        "Engine %s: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f "
        "tokens/s, Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%, "
        "Prefix cache hit rate: %.1f%%",
    ),
    Source("vllm/v1/engine/core.py", 1266, "Shutdown initiated (timeout=%d)"),
    Source("vllm/v1/engine/core.py", 1289, "Shutdown complete"),
)


class LogLine(NamedTuple):
    """A line taken apart."""

    process: str | None
    """Name in the prefix of a child process, such as "EngineCore"; None without a prefix."""
    level: str
    file: str
    """As printed: shortened by `vllm/logging_utils/formatter.py:10` `NewLineFormatter`."""
    line: int
    message: str


class Iteration(NamedTuple):
    """The numbers of one `Iteration(...)` line."""

    index: int
    context_requests: int
    context_tokens: int
    generation_requests: int
    generation_tokens: int
    elapsed_ms: float


class Work(NamedTuple):
    """What a run's iterations add up to."""

    steps: int
    """Iterations that computed at least one token."""
    scheduled_tokens: int


def parse_line(text: str) -> LogLine | None:
    """Take a log line apart; None for text that is not the first line of a log message.

    The form is `LEVEL MM-DD HH:MM:SS [file:line] message`, with `(Name pid=N) ` in front when a
    child process printed it. The name may have words and digits in it ("Worker_TP0"). A trailing
    newline is no part of the message.

    Source: `vllm/logger.py:22` `_FORMAT`, `vllm/utils/system_utils.py:201` `_add_prefix`.
    """
    match = re.fullmatch(
        r"(?:\((?P<process>.+?) pid=\d+\) )?"
        r"(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[(?P<file>[^\]]+):(?P<line>\d+)\] "
        r"(?P<message>.*)",
        text.rstrip("\r\n"),
    )
    if match is None:
        return None
    return LogLine(
        match["process"], match["level"], match["file"], int(match["line"]), match["message"]
    )


def template_regex(template: str) -> re.Pattern[str]:
    """A pattern that a whole message matches when `template % args` may have printed it.

    `%s` is any text, even none, `%d` an integer, `%.Nf` a number with exactly N decimals (N of
    1 or more), `%%` a percent sign whatever follows. Each of the first three is a group. All
    other characters stand for themselves. Use it with `fullmatch`.
    """
    pattern = []
    for piece in re.split(r"(%s|%d|%\.\d+f|%%)", template):
        if piece == "%s":
            pattern.append("(.*)")
        elif piece == "%d":
            pattern.append(r"(-?\d+)")
        elif piece == "%%":
            pattern.append("%")
        elif re.fullmatch(r"%\.\d+f", piece):
            pattern.append(rf"(-?\d+\.\d{{{piece[2:-1]}}})")
        else:
            pattern.append(re.escape(piece))
    return re.compile("".join(pattern))


def attribute(message: str, sources: Iterable[Source] = SOURCES) -> Source | None:
    """The logging call that printed a message, or None.

    Where several templates match, the one with the most characters of its own wins: that is the
    longest template after its fields (`%s`, `%d`, `%.Nf`) are taken out.
    """
    matching = [source for source in sources if template_regex(source.template).fullmatch(message)]
    return max(
        matching,
        key=lambda source: len(re.sub(r"%s|%d|%\.\d+f", "", source.template)),
        default=None,
    )


def parse_iteration(message: str) -> Iteration | None:
    """The numbers of an `Iteration(...)` message; None for any other message.

    Source: `vllm/v1/engine/core.py:399` `EngineCore.log_iteration_details`.
    """
    match = re.fullmatch(
        r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, "
        r"(\d+) generation requests, (\d+) generation tokens, "
        r"iteration elapsed time: (\d+\.\d+) ms",
        message,
    )
    if match is None:
        return None
    *counts, elapsed = match.groups()
    return Iteration(*map(int, counts), float(elapsed))


def count_work(lines: Iterable[str]) -> Work:
    """Add up the iterations among log lines.

    An iteration without tokens is no step: a child process may log one at the end, when it only
    passes the ids of finished requests on. Lines that are no iterations are passed over.
    """
    steps = scheduled = 0
    for text in lines:
        line = parse_line(text)
        iteration = parse_iteration(line.message) if line else None
        if iteration is None:
            continue
        tokens = iteration.context_tokens + iteration.generation_tokens
        steps += tokens > 0
        scheduled += tokens
    return Work(steps, scheduled)


def kv_capacity(num_blocks: int, block_size: int, max_model_len: int) -> tuple[float, int]:
    """The two numbers of the lines on the cache's size: (maximum concurrency, tokens).

    A request of `max_model_len` tokens takes whole blocks. The concurrency is how many of those
    the pool holds; the tokens are `int(concurrency * max_model_len)`, which is not
    `num_blocks * block_size` unless `max_model_len` is a multiple of the block size.

    Source: `vllm/v1/core/kv_cache_utils.py:1709` `_report_kv_cache_config`.

    Raises:
        ValueError: an argument below 1.
    """
    arguments = {
        "num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len,
    }  # fmt: skip
    for name, value in arguments.items():
        if value < 1:
            raise ValueError(f"{name}={value}: need at least 1")
    blocks_per_request = -(-max_model_len // block_size)
    concurrency = num_blocks / blocks_per_request
    return concurrency, int(concurrency * max_model_len)
