"""Recordings with grammars: how the real scheduler waits for them, and what a refused token does.

    python -m conformance.record grammar

The workloads are those of `workloads.py`; most requests have a grammar that is compiled some steps
after they arrive, or before. No grammar is compiled here: a future is fulfilled at its step, and
what it holds refuses one scripted position. Everything else is the real manager's and scheduler's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import Run
from conformance.recorders.source import Real

SEEDS = range(70_000, 71_000)


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with `add.grammar` for most."""
    return with_grammars(workloads.generate(seed))


def with_grammars(workload: workloads.Workload) -> dict[str, Any]:
    """`workload` itself, with grammars for most of its requests."""
    rng = random.Random(workload["seed"] * 13 + 5)
    share, slowest = rng.choice((0.4, 0.7, 0.9, 1.0)), rng.choice((1, 3, 6, 12))
    refusing = rng.choice((0.0, 0.2, 0.4))
    for event in workload["events"]:
        for add in event["add"]:
            if rng.random() >= share:
                continue
            said = workload["outputs"][add["request_id"]][: add["max_tokens"]]
            if not add["ignore_eos"] and workload["eos_token_id"] in said:
                said = said[: said.index(workload["eos_token_id"]) + 1]
            reject = None
            if rng.random() < refusing:  # anywhere, or just where the request ends anyway
                reject = rng.choice((rng.randrange(len(said)), len(said) - 1))
            ready = event["step"] + rng.choice((0, rng.randint(0, slowest), slowest))
            add["grammar"] = {"ready_at": ready, "reject_at": reject}
    return workload


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        run = Run(generate(seed), real, tells_tokens=False)
        run.has_grammars = True  # by chance no request of a workload may have one
        yield run.recorded()
