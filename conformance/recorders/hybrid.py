"""Workloads whose model keeps several kinds of cache: full attention beside windows or states.

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
from conformance.features.spec_decode.recorder import with_drafts
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


def generate_drafts(seed: int) -> dict[str, Any]:
    """The same with a drafter that reads hidden states, so that hits lose their last block."""
    workload = with_drafts(generate(seed), is_async=False)
    workload["config"]["speculative"]["method"] = "eagle"
    return workload


def generate_states(seed: int) -> dict[str, Any]:
    """The workload of a seed with one or two groups of states beside full attention, or a window.

    A request may then wait for a state that is written in the same step.
    """
    workload = workloads.generate(seed)
    rng = random.Random(seed * 23 + 5)
    config = workload["config"]
    size = config["block_size"]
    kinds = rng.choice((("mamba", "full"), ("full", "mamba"), ("mamba", "mamba", "full"),
                        ("mamba", "sliding_window", "full")))  # fmt: skip
    config["kv_groups"] = [
        {"kind": kind, "block_size": size}
        | ({"sliding_window": rng.choice((2, size, 2 * size + 1))} if "window" in kind else {})
        for kind in kinds
    ]
    config["num_blocks"] = 1 + (config["num_blocks"] - 1) * len(kinds)
    return workload


def generate_aligned(seed: int) -> dict[str, Any]:
    """The same with states in mode "align", which are kept where a step ends at a block."""
    workload = generate_states(seed)
    config = workload["config"]
    for group in config["kv_groups"]:
        if group["kind"] == "mamba":
            group["mode"] = "align"
    size = config["block_size"]
    config |= {"enable_prefix_caching": True, "enable_chunked_prefill": True}
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], size)
    if config["long_prefill_token_threshold"]:
        config["long_prefill_token_threshold"] += size
    return workload


SEEDS = range(80_000, 81_000)
"""Of `hybrid.jsonl.gz`."""
DRAFT_SEEDS = range(82_000, 82_300)
"""Of `hybrid_spec.jsonl.gz`."""
STATE_SEEDS = range(84_000, 84_400)
"""Of `states.jsonl.gz`."""
ALIGNED_SEEDS = range(86_000, 86_300)
"""Of `states_align.jsonl.gz`."""


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield _without_samples(run(generate(seed), real))


def record_drafts(
    seeds: Iterable[int] = DRAFT_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """The same with drafts."""
    for seed in seeds:
        yield run(generate_drafts(seed), real)


def record_states(
    seeds: Iterable[int] = STATE_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """The same for groups of states."""
    for seed in seeds:
        yield _without_samples(run(generate_states(seed), real))


def record_aligned(
    seeds: Iterable[int] = ALIGNED_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """The same for states in mode "align"."""
    for seed in seeds:
        yield _without_samples(run(generate_aligned(seed), real))


def _without_samples(entry: recording.Recording) -> recording.Recording:
    """A step without drafts samples what the script says, so a file need not repeat it."""
    for step in entry["steps"]:
        step.pop("sampled_token_ids", None)
    return entry
