"""What the scheduler asks about grammars: is this one compiled?

Promises: a request whose grammar is not there is skipped and keeps its place; one whose grammar is
there is admitted like any other. Decides as `vllm/v1/core/sched/scheduler.py:2103`
`Scheduler._try_promote_blocked_waiting_request`.
"""

from __future__ import annotations

from typing import Any, Literal

from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.structured_output.request import constraint_of


class GrammarGate(Gate):
    """Holds requests back until their grammar is compiled."""

    def admission(
        self, request: Request, plan: SchedulerOutput
    ) -> Literal["admit", "skip", "stop"]:
        """ "skip" while the request waits for its grammar; from then on it waits for room alone."""
        if request.waits_for is None:
            return "admit"
        constraint = constraint_of(request)
        if constraint is None or not constraint.is_ready():
            return "skip"
        request.waits_for = None
        return "admit"

    def structured_output_request_ids(self, plan: SchedulerOutput) -> list[str]:
        """Whose rows of logits get a mask, in scheduling order: chunks of a prompt sample nothing.

        As `vllm/v1/core/sched/scheduler.py:1259` `Scheduler.get_grammar_bitmask`.

        Args:
            plan: bound, so that it knows who samples.
        """
        return [
            request.request_id
            for request in plan.scheduled_requests
            if constraint_of(request) is not None and request.request_id in plan.sampling_req_ids
        ]


def structured_output_request_ids(gate: Any, plan: SchedulerOutput) -> list[str]:
    """As the gate's method of this name, which a learner's gate calls `rows`."""
    ask = getattr(gate, "structured_output_request_ids", None) or gate.rows
    found: list[str] = ask(plan)
    return found
