"""A rule of the scheduler broken, and the first recorded step that notices.

Promises: every number and every state is what `python -m conformance.broken_rules --write` kept of
a replay. Upstream counterpart: the recorded scheduler, `vllm/v1/core/sched/scheduler.py:332`
`Scheduler.schedule`.
"""

from __future__ import annotations

from typing import Any

from conformance import broken_rules


def document() -> dict[str, Any]:
    """The rules in their order."""
    return {"rules": broken_rules.document()}
