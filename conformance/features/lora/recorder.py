"""Recordings with adapters: whom the real scheduler skips because every slot is taken.

    python -m conformance.record lora

The workloads are those of `workloads.py`, each request with an adapter or none: fewer slots than
adapters most of the time, so that requests are passed over, and prompts that begin alike under
different adapters, whose blocks must not be shared. `README.md` beside it has the keys they add.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.features.core.recorder import record as run
from conformance.features.core.recorder import record_async as run_async
from conformance.recorders.source import Real

SEEDS = range(60_000, 61_000)


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, `config.max_loras` and `add.lora`."""
    return with_adapters(workloads.generate(seed))


def with_adapters(workload: workloads.Workload) -> dict[str, Any]:
    """`workload` itself, with slots for adapters and requests that ask for some."""
    rng = random.Random(workload["seed"] * 11 + 3)
    config = workload["config"]
    config["max_loras"] = rng.choice((1, 1, 1, 2, 2, 3))
    if rng.random() < 0.6 and config["max_num_seqs"] < 4:  # else few wait for a slot alone
        config["max_num_seqs"] = min(rng.choice((3, 4, 6, 8)), config["max_num_batched_tokens"])
    num_adapters = config["max_loras"] + rng.choice((0, 1, 1, 2, 3))
    base = rng.choice((0.0, 0.1, 0.25, 0.5))
    last = 0
    for event in workload["events"]:
        for add in event["add"]:
            if rng.random() < 0.7:  # else the same as the one before, so that some share
                last = 0 if rng.random() < base else rng.randint(1, num_adapters)
            add["lora"] = last
    return workload


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)


def record_async(seeds: Iterable[int], real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real `AsyncScheduler`; not kept, compared live."""
    for seed in seeds:
        yield run_async(generate(seed), real)
