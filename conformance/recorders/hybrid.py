"""Workloads whose model keeps several kinds of cache: full attention beside sliding windows.

A recording's `config.kv_groups` has the groups in order; `config.block_size` is the least common
multiple of their sizes, and blocks are hashed every greatest common divisor of them. Per request
`steps[].block_ids` has one table per group, where 0 stands for a block that the window has passed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

from conformance import recording, workloads
from conformance.recorders.run import run
from conformance.recorders.source import Real


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with one to three groups."""
    workload = workloads.generate(seed)
    rng = random.Random(seed * 19 + 11)
    config = workload["config"]
    size = config["block_size"]
    kinds = rng.choice((("window",), ("full", "window"), ("full", "window"), ("window", "full"),
                        ("full", "window", "window")))  # fmt: skip
    groups: list[dict[str, Any]] = []
    for kind in kinds:
        group_size = size * rng.choice((1, 1, 1, 2)) if len(kinds) == 2 else size
        group: dict[str, Any] = {"kind": "full", "block_size": group_size}
        if kind == "window":
            window = rng.choice((1, 2, size, size + 1, 2 * size, 3 * size + 1, 40))
            group |= {"kind": "sliding_window", "sliding_window": window}
        groups.append(group)
    config["kv_groups"] = groups
    config["block_size"] = math.lcm(*(group["block_size"] for group in groups))
    config["num_blocks"] = 1 + (config["num_blocks"] - 1) * len(groups)
    return workload


def record(seeds: Iterable[int], real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)
