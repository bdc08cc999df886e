"""Recordings with drafts: what the real scheduler does with tokens that may be rejected.

    python -m conformance.record spec async_spec

`spec.jsonl.gz` is the synchronous scheduler with real draft
ids, `async_spec.jsonl.gz` the asynchronous one with a queue of two batches and placeholders. The
workloads are those of `workloads.py` with a drafter on top: how many tokens it says, and how often
it says what the target will. `README.md` beside it has the keys these files add.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import run
from conformance.recorders.source import Real

SEEDS = range(40_000, 41_000)
"""Of `spec.jsonl.gz`."""
ASYNC_SEEDS = range(50_000, 50_600)
"""Of `async_spec.jsonl.gz`."""
METHODS = ("ngram", "ngram_gpu", "eagle", "draft_model")
ASYNC_METHODS = METHODS[1:]
"""`vllm/config/vllm.py:825` `VllmConfig.__post_init__` refuses asynchronous `ngram`."""


def generate(seed: int, is_async: bool = False) -> dict[str, Any]:
    """The workload of a seed and its drafter.

    Returns:
        `workloads.generate(seed)` with `config.speculative`; scripts are k + 1 tokens longer than
        `max_tokens`, because an accepted draft may lie behind the stop. `acceptance` is how often
        a draft token is the target's; it is not part of the recording.
    """
    return with_drafts(workloads.generate(seed), is_async)


def with_drafts(workload: workloads.Workload, is_async: bool) -> dict[str, Any]:
    """`workload` itself, with a drafter; see `generate`."""
    seed = workload["seed"]
    rng = random.Random(seed * 7 + 1)
    methods = ASYNC_METHODS if is_async else METHODS
    method, k = methods[seed % len(methods)], rng.choice((1, 2, 3, 4, 4, 5, 8))
    for script in workload["outputs"].values():
        script += rng.choices(range(3, 43), k=k + 1)
    config = workload["config"]
    config["speculative"] = {"method": method, "num_speculative_tokens": k}
    if is_async:
        config["async_scheduling"] = True
    if rng.random() < 0.5:  # room for 1 + k tokens of several requests, else budgets trim drafts
        config["max_num_batched_tokens"] += rng.randint(0, config["max_num_seqs"] * k)
    if rng.random() < 0.7 and 0 < config["long_prefill_token_threshold"] <= k:
        config["long_prefill_token_threshold"] += k
    workload["acceptance"] = rng.choice((0.0, 0.3, 0.6, 0.8, 0.95, 1.0))
    return workload


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real synchronous scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)


def record_async(
    seeds: Iterable[int] = ASYNC_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed on the real `AsyncScheduler` with a queue of two batches."""
    for seed in seeds:
        yield run(generate(seed, is_async=True), real)
