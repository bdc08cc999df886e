"""A grammar that a recording has scripted: when it is compiled, and which token it refuses.

`conformance.replay` gives it to requests whose arrival has `grammar`, in place of a compiled one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mini_vllm.request import Request
from mini_vllm.structured_output.request import constrained, constraint_of


class ScriptedGrammar:
    """Ready from a step on; refuses the output token at one position, if any."""

    error = ""

    def __init__(self, ready_at: int, reject_at: int | None) -> None:
        self.ready_at, self.reject_at = ready_at, reject_at
        self.now = 0
        """The step that is under way."""

    def is_ready(self) -> bool:
        """Whether its step has come."""
        return self.now >= self.ready_at

    def follow(self, request: Request) -> bool:
        """Whether it takes the request's last token."""
        return request.num_output_tokens - 1 != self.reject_at


def scripted(
    add: Mapping[str, Any],
    request: Callable[..., Request],
    constrain: Callable[..., Callable[..., Request]] = constrained,
) -> Callable[..., Request]:
    """What makes the request of an arrival: `request` itself, or with the arrival's grammar."""
    if not add.get("grammar"):
        return request
    kind = constrain(request)

    def make(*arguments: Any, **named: Any) -> Request:
        made: Any = kind(*arguments, **named)
        made.constraint = ScriptedGrammar(**add["grammar"])
        made.waits_for = "grammar"
        return made

    return make


def tell_time(requests: Mapping[str, Request], step: int) -> None:
    """Let every scripted grammar know which step begins."""
    for request in requests.values():
        if (grammar := constraint_of(request)) is not None:
            grammar.now = step


def observed(scheduler: Any, plan: Any) -> dict[str, Any]:
    """The second queue with what each waits for, and whose rows get a mask."""
    gate = next((g for g in getattr(scheduler, "gates", ()) if hasattr(g, "rows")), None)
    rows: list[str] = []
    if gate is not None:
        plan.bind(scheduler.kv)
        rows = gate.rows(plan)
    skipped = getattr(scheduler, "skipped", ())
    waits = {r.request_id: getattr(r, "waits_for", None) or r.status.name.lower() for r in skipped}
    return {"skipped": waits, "grammar_rows": rows}


def config_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """A workload's configuration, and `grammars` where any request has one."""
    adds = (add for event in entry["events"] for add in event.get("add", ()))
    found = any(add.get("grammar") for add in adds)
    return {**entry["config"], "grammars": True} if found else entry["config"]
