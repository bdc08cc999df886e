"""A replay with grammars: `grammar` in an arrival scripts one, in place of a compiled one.

It says when the grammar is compiled, and which token it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conformance.features import Find, Replayed
from mini_vllm.request import Request
from mini_vllm.structured_output.gate import structured_output_request_ids
from mini_vllm.structured_output.request import constraint_of


class ScriptedGrammar:
    """Ready from a step on; refuses the output token at one position, if any."""

    error = ""

    def __init__(self, ready_at: int, reject_at: int | None) -> None:
        self.ready_at, self.reject_at = ready_at, reject_at
        self.now = self.position = 0
        """The step that is under way, and the output token that is taken next."""

    def is_ready(self) -> bool:
        """Whether its step has come."""
        return self.now >= self.ready_at

    def follow(self, request: Request) -> bool:
        """Whether it takes the request's tokens from the last time on."""
        first, self.position = self.position, request.num_output_tokens
        return self.reject_at is None or not first <= self.reject_at < self.position


class Grammars(Replayed):
    """A gate for those that wait, and the rows that get a mask."""

    name = "structured_output"
    fields = ("skipped", "grammar_rows")
    gate = ("structured_output.gate", "GrammarGate")

    def is_on(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("grammars"))

    def asked(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        adds = (add for event in entry["events"] for add in event.get("add", ()))
        return {"grammars": True} if any(add.get("grammar") for add in adds) else {}

    def request(
        self, add: Mapping[str, Any], make: Callable[..., Any], find: Find
    ) -> Callable[..., Any]:
        if not add.get("grammar"):
            return make
        kind = find("structured_output.request", "constrained")(_class_of(make))
        options = getattr(make, "keywords", {})

        def constrained(*arguments: Any, **named: Any) -> Request:
            made: Any = kind(*arguments, **options, **named)
            made.constraint = ScriptedGrammar(**add["grammar"])
            made.waits_for = "grammar"
            return made

        return constrained

    def begin(self, requests: Mapping[str, Any], step: int) -> None:
        for request in requests.values():
            if (grammar := constraint_of(request)) is not None:
                grammar.now = step

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        names = ("structured_output_request_ids", "rows")  # the second is a learner's
        gates = getattr(scheduler, "gates", ())
        gate = next((g for g in gates if any(hasattr(g, name) for name in names)), None)
        rows: list[str] = []
        if gate is not None:
            plan.bind(scheduler.kv)
            rows = structured_output_request_ids(gate, plan)
        second = getattr(scheduler, "skipped", ())
        waits = {
            r.request_id: getattr(r, "waits_for", None) or r.status.name.lower() for r in second
        }
        return {"skipped": waits, "grammar_rows": rows}


def _class_of(make: Callable[..., Any]) -> Callable[..., Any]:
    """What another feature's options have been bound to."""
    return getattr(make, "func", make)


FEATURE = Grammars()
