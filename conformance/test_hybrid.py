"""Block tables of several groups of layers: what the real coordinator decides, ours decides."""

from __future__ import annotations

import collections

import pytest

from conformance import replay
from conformance.real_core import core_of, why_not
from conformance.recorders import hybrid
from mini_vllm import Scheduler
from mini_vllm.kv import groups
from mini_vllm.kv.coordinator import HybridKVCacheManager
from mini_vllm.kv_cache_interface import KVCacheSpec

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class _EveryTable(HybridKVCacheManager):
    """Shows a request's tables as a recording does, one per group."""

    def get_block_ids(self, request_id, group=None):
        tables = [super(_EveryTable, self).get_block_ids(request_id, g.index) for g in self.groups]
        return tables if any(tables) else []


def build(config) -> Scheduler:
    specs = [
        KVCacheSpec((index,), 1, 1, group.get("sliding_window"), group["block_size"])
        for index, group in enumerate(config["kv_groups"])
    ]

    def manager(num_blocks, block_size, enable_caching, block_pool):
        return _EveryTable(num_blocks, block_size, enable_caching, block_pool, kv_specs=specs)

    return replay.mini_scheduler(config, kv_cache_manager=manager)


def differences(seeds) -> list[replay.Difference]:
    replayed = (replay.replay(entry, build) for entry in hybrid.record(seeds, core_of()))
    return [difference for _, difference in replayed if difference is not None]


def test_fresh_workloads_are_decided_as_the_real_coordinator_decides_them():
    assert differences(range(20)) == []


@pytest.mark.slow
def test_many_fresh_workloads_are_decided_as_the_real_coordinator_decides_them():
    assert differences(range(1000, 1400)) == []


def _keeps_what_has_passed(monkeypatch):
    monkeypatch.setattr(groups.SlidingWindowGroup, "num_skipped_tokens", lambda self, n: 0)


def _forgets_a_token_too_early(monkeypatch):
    monkeypatch.setattr(
        groups.SlidingWindowGroup,
        "num_skipped_tokens",
        lambda self, n: max(0, n - self.window + 2),
    )


def _wants_a_block_more_for_a_hit(monkeypatch):
    right = groups.SlidingWindowGroup.num_contiguous
    monkeypatch.setattr(
        groups.SlidingWindowGroup, "num_contiguous", property(lambda self: right.fget(self) + 1)
    )


def _asks_the_window_once(monkeypatch):
    monkeypatch.setattr(HybridKVCacheManager, "_is_simple", property(lambda self: True))
    full = groups.full_hit
    monkeypatch.setattr(
        "mini_vllm.kv.coordinator.full_hit",
        lambda g, h, e, a, m: full(g, h, e, a, max(0, m - a)),
    )


def _reserves_a_whole_window_sequence(monkeypatch):
    monkeypatch.setattr(groups.SlidingWindowGroup, "most_blocks", lambda self, most, longest: None)


def _frees_from_the_left(monkeypatch):
    def free(self, request_id):
        self.num_cached.pop(request_id, None)
        if table := self.tables.pop(request_id, None):
            self.pool.free_blocks(table)

    monkeypatch.setattr(groups.CacheGroup, "free", free)


@pytest.mark.parametrize(
    "mutant",
    [
        _keeps_what_has_passed,
        _forgets_a_token_too_early,
        _wants_a_block_more_for_a_hit,
        _asks_the_window_once,
        _reserves_a_whole_window_sequence,
        _frees_from_the_left,
    ],
)
def test_a_wrong_rule_is_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for first in range(0, 200, 10):
        if differences(range(first, first + 10)):
            return
    pytest.fail("no workload shows it")


def test_the_workloads_hold_what_makes_groups_hard():
    """Hits, preemptions, unequal blocks, passed windows; a counter at zero would prove nothing."""
    seen = collections.Counter()
    for entry in hybrid.record(range(40), core_of()):
        kinds = entry["config"]["kv_groups"]
        seen["unequal blocks"] += len({group["block_size"] for group in kinds}) > 1
        seen["one window alone"] += len(kinds) == 1
        seen["two windows"] += sum(g["kind"] == "sliding_window" for g in kinds) > 1
        for step in entry["steps"]:
            seen["preempted"] += len(step["preempted"])
            seen["passed"] += sum(t.count(0) for ts in step["block_ids"].values() for t in ts)
    assert min(seen.values()) > 0 and len(seen) == 5, seen
