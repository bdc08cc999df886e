"""What 0.33.0 changed for adapters: those of all who run count.

Places are those of the release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from mini_vllm.lora.gate import AdapterGate
from mini_vllm.lora.request import adapter_of
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request


class RunningAdapters(AdapterGate):
    """A running request holds its adapter's slot in a step that does not plan it, too.

    It may join the next step; at the pin that step could then need more adapters than slots.
    `vllm/v1/core/sched/scheduler.py`, lines 1038-1047 of 0.33.0 `Scheduler.schedule`.
    """

    def __init__(self, max_loras: int) -> None:
        super().__init__(max_loras)
        self._held: dict[str, int] = {}

    def begins(self, plan: SchedulerOutput) -> None:
        """Who runs keeps its slot."""
        self.active = set(self._held.values())

    def scheduled(self, request: Request, num_new: int, plan: SchedulerOutput) -> None:
        """It runs from now on."""
        super().scheduled(request, num_new, plan)
        if num_new and (adapter := adapter_of(request)):
            self._held[request.request_id] = adapter.lora_int_id

    def leaves(self, request: Request) -> bool:
        """It runs no longer."""
        self._held.pop(request.request_id, None)
        self.active = set(self._held.values())
        return False
