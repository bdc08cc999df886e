"""Hits of several kinds of groups under a drafter that reads hidden states, by release.

What each release's own coordinator says of one cache: which prefix hits, and every look-up on the
way to it. `python -m conformance.features.hybrid.spiral FILE` writes the file of lab
14-04; it needs the archives of `RELEASES` (`course upstream fetch --version`).
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance import workloads
from conformance.features import ROOT
from conformance.real_core import RealCore, core_of

LAB = ROOT / "phase-14-model-architectures" / "labs" / "lab-04-the-spiral"
KEPT = LAB / "recordings" / "hits.jsonl.gz"

RELEASES = ("0.13.0", "0.14.0", "0.16.0", "0.22.1")
SIZE = 4
"""Tokens per block, of every group."""


def case(seed: int) -> dict[str, Any]:
    """Kinds of groups (window in tokens, None for full attention), the cached blocks of each, and
    the blocks of a prompt."""
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 12)
    windows = rng.sample((SIZE + 1, 2 * SIZE, 3 * SIZE, 4 * SIZE + 2), rng.choice((1, 1, 2)))
    kinds = [None, *windows]
    cached = []
    for window in kinds:
        kept = rng.choice((num_blocks, num_blocks, rng.randint(0, num_blocks)))
        holes = rng.sample(range(num_blocks), rng.choice((0, 0, 1, 2))) if num_blocks > 2 else []
        gone = set(holes) if window is not None else set()
        cached.append([block for block in range(kept) if block not in gone])
    return {"seed": seed, "windows": kinds, "cached": cached, "num_blocks": num_blocks}


def asked(
    version: str, given: dict[str, Any], eagle: bool = True, core: RealCore | None = None
) -> dict[str, Any]:
    """The hit in blocks, and the blocks that each look-up found: [[kind, found], ...].

    `core` is the release's where it is loaded already.
    """
    core = copy.copy(core or core_of(version))
    core._need_features = lambda *arguments: None  # type: ignore[method-assign]
    config = workloads.generate(3)["config"] | {
        "block_size": SIZE, "num_blocks": 200, "max_model_len": 4096, "policy": "fcfs",
        "max_num_batched_tokens": 4096, "long_prefill_token_threshold": 0,
        "enable_prefix_caching": True,
        "kv_groups": [
            {"kind": "full", "block_size": SIZE} if window is None
            else {"kind": "sliding_window", "block_size": SIZE, "sliding_window": window}
            for window in given["windows"]
        ],
    }  # fmt: skip
    if eagle:
        config["speculative"] = {"method": "eagle", "num_speculative_tokens": 1}
    coordinator = core.make_scheduler(config).kv_cache_manager.coordinator
    add = {
        "request_id": "a", "prompt_token_ids": list(range(1, given["num_blocks"] * SIZE + 1)),
        "max_tokens": 4, "priority": 0, "arrival_time": 0.0, "ignore_eos": True,
    }  # fmt: skip
    request = core.make_request(add, SIZE, 2)
    pool = coordinator.block_pool
    free = iter(pool.blocks[1:])
    for group, blocks in enumerate(given["cached"]):
        for index in blocks:
            block = next(free)
            key = core._utils.make_block_hash_with_group_id(request.block_hashes[index], group)
            block.block_hash = key
            pool.cached_block_hash_to_block.insert(key, block)
    calls: list[list[int]] = []
    managers: set[Any] = {type(each) for each in coordinator.single_type_managers}
    own = {each: vars(each).get("find_longest_cache_hit") for each in managers}
    try:
        for manager in managers:
            _watch(manager, calls, given["windows"])
        _, length = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    finally:  # the release's classes are those of whoever asks next
        for manager, method in own.items():
            if method is None:
                del manager.find_longest_cache_hit
            else:
                manager.find_longest_cache_hit = method
    return {"hit": length // SIZE, "calls": calls}


def _watch(manager: Any, calls: list[list[int]], windows: list[int | None]) -> None:
    """Note what each look-up of a manager's class gives."""
    look_up = manager.find_longest_cache_hit.__func__

    def noted(cls: Any, *arguments: Any, **named: Any) -> Any:
        found = look_up(cls, *arguments, **named)
        spec = named["kv_cache_spec"]
        kind = windows.index(getattr(spec, "sliding_window", None))
        calls.append([kind, len(found[0])])
        return found

    manager.find_longest_cache_hit = classmethod(noted)


SEEDS = (*range(240), 421, 653, 1337, 1776, 1926)
"""The last five tell a drop that was seen at another length from one that was not."""


def cases(seeds: Sequence[int] = SEEDS) -> Iterator[dict[str, Any]]:
    """Each seed's cache, and what each release makes of it; None where it refuses the groups."""
    for seed in seeds:
        given = case(seed)
        told: dict[str, Any] = {}
        for version in RELEASES:
            try:
                told[version] = asked(version, given)
            except AssertionError:
                told[version] = None
        told["no drafter"] = asked("0.22.1", given, eagle=False)["hit"]
        yield given | {"releases": told}


if __name__ == "__main__":
    with gzip.GzipFile(Path(sys.argv[1]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
