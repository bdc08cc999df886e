"""The rules that are new since the pin, each alone, and which of them a release decides by.

Numbers are those of SINCE_THE_PIN.md. Rule 5 is not among them: no workload sets `min_tokens`.
"""

from __future__ import annotations

import functools

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.block_pool import BlockPool
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.lora.gate import AdapterGate
from mini_vllm.parts import EngineParts
from mini_vllm.releases import drafts, v0_27_1, v0_33_0
from mini_vllm.releases.adapters import RunningAdapters
from mini_vllm.releases.hashes_ahead import HashesLookAhead
from mini_vllm.releases.lookahead import LookaheadAtAdmission
from mini_vllm.releases.one_queue import OneQueue
from mini_vllm.releases.stale_output import StaleOutputKept
from mini_vllm.scheduler import Scheduler

POOLS: dict[str, type[BlockPool]] = {
    "1 with caching": v0_27_1.UnhashedFirst,
    "1": v0_33_0.UnhashedFirstAlways,
}
SCHEDULERS: dict[str, type[Scheduler]] = {
    "10": OneQueue,
    "2": v0_33_0.LoneRequestUncapped,
    "9": drafts.SlotsByRequest,
    "7": drafts.NewDecodesPadded,
    "7 with room": drafts.PaddedWhereRoom,
    "7 with hits": drafts.HitsPadded,
    "6": LookaheadAtAdmission,
    "4": v0_33_0.ResumedAreNew,
    "3": v0_33_0.ScanGoesOn,
}
"""In the order in which a scheduler takes them up."""
ONLY_SYNCHRONOUS: dict[str, type[Scheduler]] = {"12": drafts.AcceptedCachedAtOnce}
ONLY_ASYNCHRONOUS: dict[str, type[AsyncScheduler]] = {"8": StaleOutputKept}
ADAPTER_GATES: dict[str, type[AdapterGate]] = {"11": RunningAdapters}
MANAGERS: dict[str, type[KVCacheManager]] = {"13": HashesLookAhead}
RULES = (
    *POOLS, *SCHEDULERS, *ONLY_SYNCHRONOUS, *ONLY_ASYNCHRONOUS, *ADAPTER_GATES, *MANAGERS,
)  # fmt: skip

_PLAIN: tuple[tuple[str, ...], ...] = (
    (),
    ("1 with caching",),
    ("1",),
    ("1", "2"),
    ("1", "2", "3"),
    ("1", "2", "3", "4"),
)
_SINCE_0_31 = ("1", "2", "6", "7 with hits", "8", "9", "10")

ALL: dict[str, tuple[str, ...]] = {
    "0.23.0": ("6",),
    "0.24.0": ("1", "6"),
    **dict.fromkeys(("0.25.0", "0.25.1", "0.26.0"), ("1", "6", "7")),
    **dict.fromkeys(("0.27.0", "0.27.1"), ("1 with caching", "6", "7", "8")),
    "0.28.0": ("1", "6", "7", "8", "9"),
    "0.29.0": ("1", "6", "7 with room", "8", "9"),
    "0.30.0": ("1", "6", "7 with hits", "8", "9"),
    **dict.fromkeys(("0.31.0", "0.32.0"), _SINCE_0_31),
    "0.33.0": (*_SINCE_0_31, "3", "4", "11", "12", "13"),
}
"""Every release there are parts for: the rules with which no workload with a feature differs."""

SETS = (*_PLAIN, *dict.fromkeys(ALL.values()))
"""What is tried on a release nobody has seen: plain workloads' rules first, then all of a release.
"""

DECIDED_BY: dict[str, tuple[str, ...]] = {
    "0.23.0": (),
    **dict.fromkeys(("0.24.0", "0.25.0", "0.25.1", "0.26.0"), ("1",)),
    **dict.fromkeys(("0.27.0", "0.27.1"), ("1 with caching",)),
    **dict.fromkeys(("0.28.0", "0.29.0", "0.30.0"), ("1",)),
    **dict.fromkeys(("0.31.0", "0.32.0"), ("1", "2")),
    "0.33.0": ("1", "2", "3", "4"),
}
"""Every release since the pin, oldest first: the rules with which no plain workload differs."""


@functools.cache
def parts_with(rules: tuple[str, ...]) -> EngineParts:
    """The pin's parts with some rules.

    Raises:
        ValueError: there is no such rule, or two of them are of the block pool.
    """
    if unknown := [rule for rule in rules if rule not in RULES]:
        raise ValueError(f"rules={unknown}: need some of {', '.join(RULES)}")
    pools = [POOLS[rule] for rule in rules if rule in POOLS]
    if len(pools) > 1:
        raise ValueError(f"rules={rules}: need at most one of {', '.join(POOLS)}")
    kinds = tuple(kind for rule, kind in SCHEDULERS.items() if rule in rules)
    only = tuple(kind for rule, kind in ONLY_SYNCHRONOUS.items() if rule in rules)
    ahead = tuple(kind for rule, kind in ONLY_ASYNCHRONOUS.items() if rule in rules)
    managers = [kind for rule, kind in MANAGERS.items() if rule in rules]
    gates = [gate for rule, gate in ADAPTER_GATES.items() if rule in rules]
    return EngineParts(
        block_pool=pools[0] if pools else BlockPool,
        kv_cache_manager=managers[0] if managers else KVCacheManager,
        scheduler=type("SchedulerWithRules", (*only, *kinds, Scheduler), {})
        if only or kinds
        else Scheduler,
        async_scheduler=type("AsyncSchedulerWithRules", (*kinds, *ahead, AsyncScheduler), {})
        if kinds or ahead
        else AsyncScheduler,
        rooms={"lora": {"adapter_gate": gates[0]}} if gates else {},
    )


def named(rules: tuple[str, ...]) -> str:
    """Rules as a table says them."""
    return ", ".join(rules) or "none"
