"""Workloads with a KV connector: prefixes that lie elsewhere, loads and sends that take steps.

`add.kv` scripts what the connector says of a request: `external_tokens` that it could load, from
the step `known_at` on, at once or in `load_steps` steps (`load_async`), and `send_steps` for which
the blocks of a request that ended are kept. A step adds `finished_recving` and `finished_sending`,
which its update reports, and `skipped`, the second queue by status. `block_ids` has every request
that holds blocks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import Run, Stalled, skipped
from conformance.recorders.source import Real, installed


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with `add.kv` for most."""
    workload = workloads.generate(seed)
    rng = random.Random(seed * 29 + 17)
    slowest, later = rng.choice((1, 3, 8)), rng.choice((0, 0, 2, 6))
    for event in workload["events"]:
        for add in event["add"]:
            if rng.random() < 0.3:
                continue
            length = len(add["prompt_token_ids"])
            load_async = rng.random() < 0.6
            most = length if load_async and length > 1 else length - 1
            add["kv"] = {
                "external_tokens": rng.choice((0, most, rng.randint(0, most))),
                "load_async": load_async,
                "known_at": event["step"] + rng.choice((0, 0, rng.randint(0, later))),
                "load_steps": rng.randint(0, slowest) if load_async else None,
                "send_steps": rng.randint(1, slowest) if rng.random() < 0.4 else None,
            }
    return workload


def record(seeds: Iterable[int], real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)


def run(workload: dict[str, Any], real: Real | None = None) -> recording.Recording:
    """One workload. Where the scheduler stands still for ever, the head of the queue is aborted.

    Raises:
        RefusedError: the real scheduler itself fails.
        Stalled: it stands still with every request aborted.
    """
    real = real or installed()
    tried = copy.deepcopy(workload)
    left = len(workload["outputs"])
    while True:
        once = Run(copy.deepcopy(tried), real)
        try:
            return once.recorded()
        except Stalled:
            scheduler, left = once.scheduler, left - 1
            if left < 0:  # each abort ends a request
                raise
            head = next(iter([*skipped(scheduler), *scheduler.waiting]), None)
            if head is None:
                raise
            tried["events"] = [
                *tried["events"],
                {"step": len(once.steps), "add": [], "abort": [head.request_id]},
            ]
