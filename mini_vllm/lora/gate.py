"""What the scheduler asks about adapters: may one more join this step?

Promises: a step has at most `max_loras` distinct adapters; who would be one too many is skipped,
keeps its place, and is looked at first in the next step. Decides as
`vllm/v1/core/sched/scheduler.py:573` `Scheduler.schedule`.
"""

from __future__ import annotations

from typing import Literal

from mini_vllm.lora.request import adapter_of
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request


class AdapterGate(Gate):
    """Counts the adapters of the plan that is being made. Base requests pass it freely."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.active: set[int] = set()
        """Adapters of the requests in the plan, as `vllm/v1/core/sched/scheduler.py:535`
        `Scheduler.schedule` collects them."""

    def begins(self, plan: SchedulerOutput) -> None:
        """A slot is held by those who run in this step, not by the past."""
        self.active = set()

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """ "skip" when every slot is taken by other adapters, else "admit"."""
        adapter = adapter_of(request)
        if adapter is None or adapter.lora_int_id in self.active:
            return "admit"
        return "admit" if len(self.active) < self.max_loras else "skip"

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """Its adapter takes a slot of this step; one that only loads takes none."""
        if num_new and (adapter := adapter_of(request)):
            self.active.add(adapter.lora_int_id)
