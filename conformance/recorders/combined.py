"""Every feature at once: drafts, adapters, grammars, asynchronous plans and priorities together.

    python -m conformance.together 20000 --seed 900000

Nothing here is kept: the workloads are decided by the real core and by the mini engine in one
process. A recording has the keys of all the features it combines.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.features.lora.recorder import with_adapters
from conformance.features.spec_decode.recorder import with_drafts
from conformance.features.structured_output.recorder import with_grammars
from conformance.recorders.run import RefusedError, Run, run
from conformance.recorders.source import Real

__all__ = ["FEATURES", "RefusedError", "Run", "features_of", "generate", "record", "run"]

FEATURES = ("drafts", "adapters", "grammars", "async")


def features_of(seed: int) -> frozenset[str]:
    """Which features a seed combines: at least two."""
    rng = random.Random(seed * 17 + 7)
    count = rng.choice((2, 2, 3, 3, 4))
    return frozenset(rng.sample(FEATURES, count))


def generate(seed: int, features: Iterable[str] | None = None) -> dict[str, Any]:
    """The workload of a seed with those features, or with those that `features_of` draws.

    Raises:
        ValueError: a feature has another name than those of `FEATURES`.
    """
    chosen = features_of(seed) if features is None else frozenset(features)
    if unknown := sorted(chosen - set(FEATURES)):
        raise ValueError(f"features={unknown}: need some of {', '.join(FEATURES)}")
    workload = workloads.generate(seed)
    is_async = "async" in chosen
    if is_async:
        workload["config"]["async_scheduling"] = True
    if "drafts" in chosen:
        workload = with_drafts(workload, is_async)
    if "adapters" in chosen:
        workload = with_adapters(workload)
    if "grammars" in chosen:
        workload = with_grammars(workload)
    return workload


def record(
    seeds: Iterable[int], real: Real | None = None, features: Iterable[str] | None = None
) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed, features), real)
