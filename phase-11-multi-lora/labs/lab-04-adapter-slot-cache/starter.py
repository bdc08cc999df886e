"""Lab 11-04: a fixed number of adapter slots, who gets one, and who waits.

`max_loras` slots on the device hold the weights of as many adapters. A step reads only what stands
in a slot. Two parts keep that true: the scheduler lets no more adapters into a step than there are
slots, and the worker makes each of them resident. What holds throughout:

- A1: a step has at most `max_loras` distinct adapters; base requests have none and need no slot.
- A2: who has no slot is passed over and waits; whoever stands behind may still be admitted.
- A3: an adapter keeps its slot while it is resident, and two resident ones never share one.
- A4: slots are numbered from 0 to `max_loras` - 1 for ever; the numbers are addresses.

Sources: `vllm/lora/model_manager.py:1163` `LRUCacheLoRAModelManager`,
`vllm/v1/core/sched/scheduler.py:573` `Scheduler.schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mini_vllm.lora.request import adapter_of
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request


class AdapterSlotCache:
    """Which adapter stands in which slot; the least recently used one makes room (A3, A4).

    A trace with 2 slots: 1, 2, 1, 3, 2 are "load", "load", "hit", "evict+load" (2 leaves),
    "evict+load" (1 leaves). Then `resident()` is [3, 2], 3 stands in slot 1 and 2 in slot 0.

    A step asks once for each of its adapters, so no call may cost more with more slots.
    """

    def __init__(self, max_loras: int) -> None:
        """All slots empty. Raises ValueError when `max_loras` is below 1."""
        raise NotImplementedError

    def ensure(self, adapter_id: int) -> str:
        """Make an adapter resident, and the most recently used one.

        Returns:
            "hit" when it was resident; "load" when it took an empty slot, the lowest one;
            "evict+load" when it took the slot of the one used longest ago.

        Raises:
            ValueError: the id is below 1. Nothing has changed then.
        """
        raise NotImplementedError

    def resident(self) -> list[int]:
        """Ids of the resident adapters, the one used longest ago first. A new list."""
        raise NotImplementedError

    def slot_of(self, adapter_id: int) -> int:
        """The slot of a resident adapter. Raises KeyError for another."""
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """`hits`, `misses` (both kinds of load), `evictions`, and `hit_rate`, hits over calls.

        The rate is 0.0 before the first call.
        """
        raise NotImplementedError


def max_schedulable(
    waiting: Sequence[int | None], max_loras: int, running: Sequence[int | None] = ()
) -> tuple[list[int], list[int]]:
    """Who of a queue may join a step, as far as adapters go (A1, A2).

    A trace: `max_schedulable([1, 2, 1, 3, None, 2, 4], 2)` is `([0, 1, 2, 4, 5], [3, 6])`; with
    `running=[7]` it is `([0, 2, 4], [1, 3, 5, 6])`.

    Args:
        waiting: the adapter of each request, None for the base; in the order it is served.
        max_loras: slots.
        running: adapters of the requests that are in the step already.

    Returns:
        Places in `waiting`, ascending: those admitted and those passed over.

    Raises:
        ValueError: `max_loras` is below 1, or `running` has more adapters than slots.
    """
    raise NotImplementedError


class AdapterGate(Gate):
    """The same question, as the engine's scheduler asks it: request by request.

    The scheduler keeps one gate for its whole life. In each step it makes a new plan, tells the
    gate `scheduled` for every request that enters it, those that run first, and asks `admission`
    about each waiting request. An admitted request may still not enter, for want of memory. What
    the gate says depends on the plan it is asked about, not on earlier ones, and no call looks at
    the other requests.
    """

    def __init__(self, max_loras: int) -> None:
        """A gate for so many slots."""
        raise NotImplementedError

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """Whether `request` may enter `plan`.

        "admit", or "skip": it keeps its place and the scan goes on. "stop" would end the scan (A2).
        """
        raise NotImplementedError

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """`request` has entered `plan` with `num_new` tokens."""
        raise NotImplementedError
