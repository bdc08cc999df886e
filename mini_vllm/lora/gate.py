"""What the scheduler asks about adapters: may one more join this step?

Promises: a step has at most `max_loras` distinct adapters; who would be one too many is skipped,
keeps its place, and is looked at first in the next step. Decides as
`vllm/v1/core/sched/scheduler.py:573` `Scheduler.schedule`.
"""

from __future__ import annotations

from typing import Literal

from mini_vllm.lora.request import adapter_of
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request


class AdapterGate:
    """Counts the adapters of the plan that is being made. Base requests pass it freely."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.active: set[int] = set()
        """Adapters of the requests in the plan, as `vllm/v1/core/sched/scheduler.py:535`
        `Scheduler.schedule` collects them."""
        self._plan: SchedulerOutput | None = None

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """ "skip" when every slot is taken by other adapters, else "admit"."""
        adapter = adapter_of(request)
        self._begin(plan)
        if adapter is None or adapter.lora_int_id in self.active:
            return "admit"
        return "admit" if len(self.active) < self.max_loras else "skip"

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """All of them: an adapter costs no tokens."""
        return num_new

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """Its adapter takes a slot of this step."""
        self._begin(plan)
        if adapter := adapter_of(request):
            self.active.add(adapter.lora_int_id)

    def leaves(self, request: Request) -> bool:
        """Blocks of an adapter's request are freed like any other's."""
        return False

    def _begin(self, plan: SchedulerOutput) -> None:
        """Start from nothing with each plan: a slot is held by those who run, not by the past."""
        if plan is not self._plan:
            self._plan, self.active = plan, set()
