"""Workloads on the real scheduler whose block pool tells of its index: `enable_kv_cache_events`.

A step adds `kv_events`, in order: `["stored", hashes, parent, token_ids]`, `["removed", hashes]`
and `["cleared"]`. Hashes are numbered as they are first seen, since two engines hash differently;
the number of no parent is null. What an update does comes first in the step behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conformance import recording, workloads
from conformance.features.kv_transfer.recorder import generate_failures
from conformance.recorders import connector
from conformance.recorders.run import Run, Stalled
from conformance.recorders.source import Real, installed

SEEDS = range(155_000, 155_150)
CONFIG = "enable_kv_cache_events"


class Numbers:
    """Numbers for hashes, in the order in which they are seen."""

    def __init__(self) -> None:
        self._of: dict[Any, int] = {}

    def of(self, block_hash: Any) -> int:
        """The number of a hash."""
        return self._of.setdefault(block_hash, len(self._of))

    def event(
        self, kind: str, hashes: Iterable[Any], parent: Any = None, token_ids: Iterable[int] = ()
    ) -> list[Any]:
        """One event as it stands in a recording."""
        if kind == "cleared":
            return ["cleared"]
        if kind == "removed":
            return ["removed", [self.of(each) for each in hashes]]
        parents = None if parent is None else self.of(parent)
        return ["stored", [self.of(each) for each in hashes], parents, list(token_ids)]


class _RunWithEvents(Run):
    """A run whose pool tells of its index."""

    def __init__(self, workload: dict[str, Any], real: Real) -> None:
        super().__init__(workload, real)
        self.numbers = Numbers()
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.pool.enable_kv_cache_events = True
        # An update takes the events to publish them: they stay for the step behind it.
        self.scheduler.kv_cache_manager.take_events = lambda: None

    def _observe(self, plan: Any, held: dict[str, list[int]]) -> dict[str, Any]:
        step = super()._observe(plan, held)
        step["kv_events"] = [self._entered(event) for event in self.pool.take_events()]
        return step

    def _entered(self, event: Any) -> list[Any]:
        fields: Mapping[str, Any] = getattr(event, "fields", None) or {
            name: getattr(event, name, None)
            for name in ("block_hashes", "parent_block_hash", "token_ids")
        }
        kind = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
        return self.numbers.event(
            kind[type(event).__name__], fields.get("block_hashes") or (),
            fields.get("parent_block_hash"), fields.get("token_ids") or (),
        )  # fmt: skip


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: plain, with loads, or with loads that fail and evict."""
    kind = seed % 3
    if kind == 2:
        workload = generate_failures(seed)
    else:
        workload = connector.generate(seed) if kind else workloads.generate(seed)
    workload["config"] |= {"enable_prefix_caching": True, CONFIG: True}
    return workload


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, except those where its queue stands for ever."""
    for seed in seeds:
        try:
            entry = _RunWithEvents(generate(seed), real or installed()).recorded()
        except Stalled:
            continue
        ends = [[*step["finish_reasons"].values()].count("error") for step in entry["steps"]]
        if max(ends) > 1:
            continue  # freed in the order of a set
        for step in entry["steps"]:
            step.pop("sampled_token_ids", None)
        yield entry
