"""Lab 03-03: what a server's meters say happened to its prefix cache, and what they cannot say.

`predict_each` says what `vllm/v1/core/kv_cache_manager.py:194` `KVCacheManager.get_computed_blocks`
will find. The other functions judge two readings of a `/metrics` page: what was repeated, whether
memory ran out, which incident it was. Graded beside vLLM's own scheduler, whose calls were watched
while its meters were read; `run.py` compares on a real engine.

Of meters holds, for plain prompts that no client leaves:

- M1 `queries` and `hits` grow with each lookup of a prompt, as often as it is looked up. A request
  that was preempted before is looked up without being counted. Without prefix caching nothing is.
- M2 `computed` and `cached` grow by a prompt's tokens together, once, with its first output token.
- M3 `preemptions` grows when a request that was preempted gives its next token, not before.
- M4 A request that memory refuses stays in front and is looked up again in the next step.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields

CAUSES = ("nothing looked up", "memory", "less found", "as predicted", "more found")
"""What `diagnose` chooses from (given), the first that holds."""


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
    """Given. Queries, hits and computed tokens if each prompt is looked up once."""
    queries, hits = sum(map(len, prompts)), sum(predict_each(prompts, block_size))
    return queries, hits, queries - hits


@dataclass(frozen=True, slots=True)
class Reading:
    """Given. One reading of a server's page: five counters since its start, and two gauges."""

    queries: int = 0
    """`vllm:prefix_cache_queries`: tokens looked up."""
    hits: int = 0
    """`vllm:prefix_cache_hits`: those that were found."""
    computed: int = 0
    """`vllm:prompt_tokens_by_source`, source `local_compute`."""
    cached: int = 0
    """The same, source `local_cache_hit`."""
    preemptions: int = 0
    """`vllm:num_preemptions`."""
    running: int = 0
    """`vllm:num_requests_running`."""
    waiting: int = 0
    """`vllm:num_requests_waiting`."""


_NAMES = {
    "prefix_cache_queries_total": "queries",
    "prefix_cache_hits_total": "hits",
    "num_preemptions_total": "preemptions",
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "local_compute": "computed",
    "local_cache_hit": "cached",
}


def read_page(text: str) -> Reading:
    """Given. The seven meters from the text of a `/metrics` page, added up over engines."""
    values = dict.fromkeys(_NAMES.values(), 0)
    for line in text.splitlines():
        match = re.match(r"vllm:(\w+)\{(.*)\} (\S+)$", line)
        if not match:
            continue
        name, source = match[1], re.search(r'source="(\w+)"', match[2])
        if name == "prompt_tokens_by_source_total" and source:
            name = source[1]
        if name in _NAMES:
            values[_NAMES[name]] += int(float(match[3]))
    return Reading(**values)


def spent(before: Reading, after: Reading) -> Reading:
    """Given. What the counters grew by, and the gauges of the later reading.

    Raises:
        ValueError: requests were in flight at the first reading, or a counter fell.
    """
    if before.running or before.waiting:
        raise ValueError(f"before={before}: need a reading of an idle server")
    counters = [f.name for f in fields(Reading)][:5]
    grown = {name: getattr(after, name) - getattr(before, name) for name in counters}
    if min(grown.values()) < 0:
        raise ValueError(f"after={after}: a counter fell, so the server was started again")
    return Reading(**grown, running=after.running, waiting=after.waiting)


def hit_rate(reading: Reading) -> float:
    """Given. Tokens found over tokens looked up, 0.0 when nothing was."""
    return reading.hits / reading.queries if reading.queries else 0.0


def looked_up_again(before: Reading, after: Reading, max_model_len: int) -> tuple[int, int]:
    """Least and most tokens that may have been looked up after a first time, between two readings.

    M1, M2 and M4. Every history that fits the meters lies between the two. Nothing is supposed of
    the order in which prompts are computed: any request in flight at `after`, running or waiting,
    may have been looked up a first time. At rest both are equal.

    Queries 30,260, computed 880, cached 6,240, at rest: 23,140 and 23,140.

    Args:
        before: a reading at rest; `spent` refuses another.
        after: a later one.
        max_model_len: no prompt is longer.
    """
    raise NotImplementedError


def computed_again(before: Reading, after: Reading, max_model_len: int) -> tuple[int, int | None]:
    """Least and most tokens that requests may have computed which they had computed before.

    That is what preemption costs. M2 and M3. None: the meters set no bound. At rest the most is at
    most `max_model_len` for each preemption.

    Args, as for `looked_up_again`.
    """
    raise NotImplementedError


def memory_refused(before: Reading, after: Reading, max_model_len: int) -> bool | None:
    """Whether memory refused any request between two readings; None where meters cannot tell.

    It must never be wrong. It must not be None where a lookup was repeated for certain or a
    preemption was counted, nor at rest where lookups are counted.

    Args, as for `looked_up_again`.
    """
    raise NotImplementedError


def diagnose(
    before: Reading,
    after: Reading,
    prompts: Sequence[Sequence[int]],
    block_size: int,
    max_model_len: int,
) -> str:
    """Which of `CAUSES` two readings show, both at rest, with these prompts served in between.

    "nothing looked up": prompts were served, and none was looked up. "memory": a request was
    refused. The other three compare what was taken from the cache, a prompt once, with what
    `predict_each` says. Why less was found, no meter says: blocks that were taken since, a salt, an
    adapter, a threshold. More is found where a prompt goes on from an answer.

    Raises:
        ValueError: `after` is not at rest, or its prompt tokens are not those of `prompts`.
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
