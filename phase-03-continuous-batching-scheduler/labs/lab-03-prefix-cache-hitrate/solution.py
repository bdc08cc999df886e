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
    cached = []
    for number, prompt in enumerate(prompts):
        shared = max((common_prefix(prompt, other) for other in prompts[:number]), default=0)
        cached.append(min(shared // block_size, (len(prompt) - 1) // block_size) * block_size)
    return cached


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
    queries = sum(len(prompt) for prompt in prompts)
    hits = sum(predict_each(prompts, block_size))
    return queries, hits, queries - hits


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
    _, hits, _ = predict_hits(prompts, block_size)
    return hits * 2 * layers * kv_heads * head_dim * dtype_bytes


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
    values = {"queries": 0, "hits": 0, "local_compute": 0, "local_cache_hit": 0}
    for line in text.splitlines():
        match = re.match(r"(vllm:\w+)_total\{(.*)\} (\S+)$", line)
        if not match:
            continue
        name, labels, number = match[1], match[2], int(float(match[3]))
        if name in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"):
            values[name.removeprefix("vllm:prefix_cache_")] += number
        elif name == "vllm:prompt_tokens_by_source":
            source = re.search(r'source="(\w+)"', labels)
            if source and source[1] in values:
                values[source[1]] += number
    return Counters(
        values["queries"], values["hits"], values["local_compute"], values["local_cache_hit"]
    )


def spent(before: Counters, after: Counters) -> Counters:
    """What happened between two readings."""
    return Counters(
        after.queries - before.queries,
        after.hits - before.hits,
        after.computed - before.computed,
        after.cached - before.cached,
    )


def hit_rate(counters: Counters) -> float:
    """Tokens found over tokens looked up, 0.0 when nothing was."""
    return counters.hits / counters.queries if counters.queries else 0.0


def lookup_surplus(counters: Counters) -> int:
    """Tokens looked up beyond the prompts' own: 0 where every prompt was looked up once.

    Below 0 where prompts were computed that nobody looked up.

    A request that is refused memory stays in front of the queue and is looked up again in every
    step. That counts as queries, and as hits, each time; a prompt has its tokens only once.
    """
    return counters.queries - counters.computed - counters.cached


def window_rate(updates: Sequence[tuple[int, int, int]], max_requests: int = 1000) -> float:
    """The rate that the periodic log line prints, as a share of 1.

    Every step that admits requests reports `(requests, queries, hits)`. The line covers the newest
    reports: while they hold more than `max_requests` requests together, the oldest is dropped. The
    newest one is kept whatever it holds. A report of 0 requests is passed over.

    Args:
        updates: the oldest first.
        max_requests: upstream's is 1000.
    """
    kept: deque[tuple[int, int, int]] = deque()
    for update in updates:
        if update[0] == 0:
            continue
        kept.append(update)
        while len(kept) > 1 and sum(requests for requests, _, _ in kept) > max_requests:
            kept.popleft()
    queries = sum(update[1] for update in kept)
    return sum(update[2] for update in kept) / queries if queries else 0.0
