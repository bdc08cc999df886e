"""Lab 03-03: predict a prefix-cache hit rate, then read it off the real engine's meters.

`predict_hits` says what `vllm/v1/core/kv_cache_manager.py:194`
`KVCacheManager.get_computed_blocks` will find for a list of prompts; `read_counters` and
`window_rate` read the two meters of a server, which have different denominators. `run.py` compares
both on a GPU.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


def predict_each(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Tokens that each prompt takes from the cache, in prompt order.

    The prompts arrive together, or one after the other, at an empty cache that is large enough for
    all. There is no threshold, and no prompt continues an earlier answer. A prompt finds the whole
    blocks of the longest beginning that it has in common with **any** earlier prompt. It never
    finds the block with its own last token, which has to be computed.

    Args:
        prompts: token ids, at least one each, in the order of admission.
        block_size: tokens per block.
    """
    raise NotImplementedError


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Given. How many leading tokens two prompts have in common."""
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def predict_hits(prompts: Sequence[Sequence[int]], block_size: int) -> tuple[int, int, int]:
    """`(queries, hits, computed)` in tokens, for all prompts together.

    Queries are all prompt tokens, for each is looked up once; hits are those from the cache; what
    is left is computed.
    """
    raise NotImplementedError


def kv_bytes_saved(
    prompts: Sequence[Sequence[int]],
    block_size: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype_bytes: int,
) -> int:
    """Bytes of K and V that need not exist twice while all these prompts are in the cache.

    A token of the cache is a key and a value vector for each KV head of each layer.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Counters:
    """Four counters of a server, in tokens, since it started. They only ever grow."""

    queries: int
    """`vllm:prefix_cache_queries`: tokens looked up."""
    hits: int
    """`vllm:prefix_cache_hits`: those that were found."""
    computed: int
    """`vllm:prompt_tokens_by_source`, source `local_compute`: prompt tokens computed."""
    cached: int
    """The same, source `local_cache_hit`: prompt tokens taken from the cache."""


def read_counters(text: str) -> Counters:
    """The four counters from the text of a server's `/metrics` page.

    A counter is a line `NAME_total{label="value",...} NUMBER`; Prometheus adds `_total` to the
    name. A server with several engines has one line for each: they are added up. A counter without
    a line is 0. Other names that begin or end alike are other meters (`..._created` is a date).
    """
    raise NotImplementedError


def spent(before: Counters, after: Counters) -> Counters:
    """What happened between two readings."""
    raise NotImplementedError


def hit_rate(counters: Counters) -> float:
    """Tokens found over tokens looked up, 0.0 when nothing was."""
    raise NotImplementedError


def lookup_surplus(counters: Counters) -> int:
    """Tokens looked up beyond the prompts' own: 0 where every prompt was looked up once.

    Below 0 where prompts were computed that nobody looked up.

    A request that is refused memory stays in front of the queue and is looked up again in every
    step. That counts as queries, and as hits, each time; a prompt has its tokens only once.
    """
    raise NotImplementedError


def window_rate(updates: Sequence[tuple[int, int, int]], max_requests: int = 1000) -> float:
    """The rate that the periodic log line prints, as a share of 1.

    Every step that admits requests reports `(requests, queries, hits)`. The line covers the newest
    reports: while they hold more than `max_requests` requests together, the oldest is dropped. The
    newest one is kept whatever it holds. A report of 0 requests is passed over.

    Args:
        updates: the oldest first.
        max_requests: upstream's is 1000.
    """
    raise NotImplementedError
