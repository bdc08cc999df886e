"""The rules that are new since the pin, each alone, and which of them a release decides by.

Numbers are those of SINCE_THE_PIN.md. Rule 5 is not among them: no workload sets `min_tokens`.
Rule 6 is about drafts: plain workloads do not show it.
"""

from __future__ import annotations

import functools

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.block_pool import BlockPool
from mini_vllm.parts import EngineParts
from mini_vllm.releases import v0_27_1, v0_33_0
from mini_vllm.releases.lookahead import LookaheadAtAdmission
from mini_vllm.scheduler import Scheduler

POOLS: dict[str, type[BlockPool]] = {
    "1 with caching": v0_27_1.UnhashedFirst,
    "1": v0_33_0.UnhashedFirstAlways,
}
SCHEDULERS: dict[str, type[Scheduler]] = {
    "2": v0_33_0.LoneRequestUncapped,
    "3": v0_33_0.ScanGoesOn,
    "4": v0_33_0.ResumedAreNew,
    "6": LookaheadAtAdmission,
}

_PLAIN: tuple[tuple[str, ...], ...] = (
    (),
    ("1 with caching",),
    ("1",),
    ("1", "2"),
    ("1", "2", "3"),
    ("1", "2", "3", "4"),
)
SETS = tuple(rules for plain in _PLAIN for rules in (plain, (*plain, "6")))
"""What is tried on a release nobody has seen, the fewest rules first."""

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
    if unknown := [rule for rule in rules if rule not in POOLS and rule not in SCHEDULERS]:
        raise ValueError(f"rules={unknown}: need some of {', '.join([*POOLS, *SCHEDULERS])}")
    pools = [POOLS[rule] for rule in rules if rule in POOLS]
    if len(pools) > 1:
        raise ValueError(f"rules={rules}: need at most one of {', '.join(POOLS)}")
    kinds = tuple(SCHEDULERS[rule] for rule in rules if rule in SCHEDULERS)
    return EngineParts(
        block_pool=pools[0] if pools else BlockPool,
        scheduler=type("SchedulerWithRules", (*kinds, Scheduler), {}) if kinds else Scheduler,
        async_scheduler=type("AsyncSchedulerWithRules", (*kinds, AsyncScheduler), {})
        if kinds
        else AsyncScheduler,
    )


def named(rules: tuple[str, ...]) -> str:
    """Rules as a table says them."""
    return ", ".join(rules) or "none"
