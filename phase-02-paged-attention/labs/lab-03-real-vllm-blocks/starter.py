"""Lab 02-03: from a config and a memory budget to blocks, and from a log back to them.

Part A plans a KV cache as vLLM v0.22.1 does, part B predicts prefix-cache hits, part C reads the
lines the engine prints about both. `run.py` compares all three with the real engine on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

GIB = 2**30


class Plan(NamedTuple):
    """What the engine will say about its KV cache."""

    num_blocks: int
    max_concurrency: float
    """Requests of the longest allowed length that fit at once."""
    printed_tokens: int
    """The number in `GPU KV cache size: ... tokens`."""


class Startup(NamedTuple):
    """What the log says about the KV cache, as printed: rounded."""

    available_gib: float | None
    tokens: int | None
    max_model_len: int | None
    concurrency: float | None


class Usage(NamedTuple):
    """Shares of the periodic line, 0 to 1."""

    kv_cache: float
    hit_rate: float


# --- Part A: bytes to blocks ----------------------------------------------------------------------


def bytes_per_block(
    layers: int, kv_heads: int, head_dim: int, dtype_bytes: int, block_size: int
) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer.

    Source: `vllm/v1/kv_cache_interface.py:167` `AttentionSpec.real_page_size_bytes`, one layer.
    """
    raise NotImplementedError


def plan(
    total_bytes: int,
    util: float,
    fixed_bytes: int,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
) -> Plan:
    """Blocks, concurrency and printed tokens of one full-attention model.

    The engine may use ceil(total_bytes * util). Everything else it needs comes off that:
    weights, activations, CUDA graphs, the context. What is left is cut into blocks, never fewer
    than 0. A request of `max_model_len` tokens takes whole blocks. The printed tokens are
    int(max_concurrency * max_model_len).

    A trace: 24 GiB, util 0.5, 1 GiB fixed, blocks of 589,824 bytes and 16 tokens, requests of
    2,048: 20,024 blocks, 156.4375 requests, 320,384 tokens.

    Args:
        total_bytes: of the whole device, not what is free.
        util: `gpu_memory_utilization`.
        fixed_bytes: everything but the KV cache.
        bytes_per_block, block_size, max_model_len: as they say; the last two in tokens.

    Source: `vllm/v1/worker/utils.py:403` `request_memory`,
    `vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks`,
    `vllm/v1/core/kv_cache_utils.py:1709` `_report_kv_cache_config`.
    """
    raise NotImplementedError


# --- Part B: prefix-cache hits --------------------------------------------------------------------


def cached_tokens(num_tokens: int, block_size: int) -> int:
    """Tokens a prompt finds in the cache when an equal prompt came before: whole blocks only.

    The last token is never taken from the cache: its logits are needed, and they are not stored.

    Source: `vllm/v1/core/kv_cache_manager.py:194` `KVCacheManager.get_computed_blocks`.
    """
    raise NotImplementedError


def hit_rate(num_prompts: int, num_tokens: int, block_size: int) -> float:
    """Prefix-cache hit rate of equal prompts on an empty cache: cached tokens over all tokens.

    The first prompt finds nothing. Prompts have `num_tokens` tokens each.

    Source: `vllm/v1/metrics/stats.py:115` `PrefixCacheStats`.
    """
    raise NotImplementedError


# --- Part C: the log ------------------------------------------------------------------------------


def read_startup(lines: Iterable[str]) -> Startup:
    """The numbers of the three lines about the KV cache; None for a line that is not there.

    The lines, whatever stands in front of them:

        Available KV cache memory: %s GiB
        GPU KV cache size: %s tokens
        Maximum concurrency for %s tokens per request: %.2fx

    On a CPU the first one reads otherwise; the memory for the cache stands before the total:

        Auto set (%s/%s) GiB for KV cache on node %s, with ...

    `lines` may be read once only, as a file is. Where a line occurs more than once, all of its
    numbers are those of the last. Numbers of tokens have commas. Available memory may be negative.

    Source: `vllm/v1/worker/gpu_worker.py:466-469` `Worker.determine_available_memory`,
    `vllm/v1/worker/cpu_worker.py:202-211` `CPUWorker.determine_available_memory`,
    `vllm/v1/core/kv_cache_utils.py:1733-1738` `_report_kv_cache_config`.
    """
    raise NotImplementedError


def read_usage(lines: Iterable[str]) -> list[Usage]:
    """KV cache usage and hit rate of every periodic line that has both, as shares of 1, in order.

    Two equal lines are two periods. `lines` may be read once only.

    They stand as `GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%`, with other counters
    before and sometimes behind.

    Source: `vllm/v1/metrics/loggers.py:217` `LoggingStatLogger.log`.
    """
    raise NotImplementedError


def blocks_of_log(tokens: int, max_model_len: int, block_size: int) -> int:
    """The number of blocks behind `GPU KV cache size: {tokens} tokens`.

    The line rounds down, so this is the smallest number of blocks that prints it:
    int(num_blocks / ceil(max_model_len / block_size) * max_model_len) == tokens. There is only
    one, because every block adds at least one token.
    """
    raise NotImplementedError


def predict_second_run(
    total_bytes: int,
    first: Startup,
    first_util: float,
    second_util: float,
    shape: Sequence[int],
    block_size: int,
) -> Plan:
    """Predict a run with another `gpu_memory_utilization` from the log of a first one.

    `first.available_gib` is what was left for the cache; the rest of what the first run requested
    is fixed, and stays the same in the second. `first` has all four numbers; 0.0 is one.

    Args:
        total_bytes: of the device.
        first: the first run's lines.
        first_util, second_util: the two settings.
        shape: layers, KV heads, head dim, bytes per number.
        block_size: tokens per block.
    """
    raise NotImplementedError
