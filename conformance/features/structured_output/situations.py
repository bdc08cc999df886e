"""How often each situation of grammars occurs in the recordings with grammars.

Everything is read off the recordings alone; `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.steps import Situations, Step, counted


@dataclass(frozen=True, slots=True)
class _Step(Step):
    """One step of a recording, and what is known of its requests."""

    def grammar(self, request_id: str) -> Mapping[str, Any]:
        return self.adds.get(request_id, {}).get("grammar") or {}

    @property
    def constrained(self) -> list[str]:
        """Scheduled requests with a grammar."""
        return [r for r in self.now["num_scheduled_tokens"] if self.grammar(r)]

    @property
    def held(self) -> Mapping[str, str]:
        """Who stood in the second queue after the step before, and for what."""
        return self.before.get("skipped", {})

    @property
    def refused(self) -> list[str]:
        """Requests that end in this step with an error."""
        return [r for r, reason in self.now["finish_reasons"].items() if reason == "error"]

    def last_token(self, request_id: str) -> int:
        return self.entry["outputs"][request_id][-1]

    def is_at_cap(self, request_id: str) -> bool:
        count = len(self.entry["outputs"][request_id])
        total = len(self.adds[request_id]["prompt_token_ids"]) + count
        longest = self.entry["config"]["max_model_len"]
        return count == self.adds[request_id]["max_tokens"] or total >= longest


def _overtakes(step: _Step) -> bool:
    """FCFS: one that waited aside is admitted although an older one stands in `waiting`."""
    ahead = [step.arrived[r] for r in step.now["waiting"]]
    got = [r for r in step.admitted if r in step.held]
    return step.is_fcfs and any(step.arrived[r] > min(ahead, default=1 << 30) for r in got)


def _overtakes_preempted(step: _Step) -> bool:
    waits = set(step.now["waiting"]) & {r for r in step.adds if step.preempted_before(r)}
    return step.is_fcfs and bool(waits) and any(r in step.held for r in step.admitted)


def _passed(step: _Step) -> bool:
    """One waits for its grammar, one behind it is admitted in the same step."""
    late = [step.arrived[r] for r, why in step.now["skipped"].items() if why == "grammar"]
    return any(step.arrived[r] > min(late, default=1 << 30) for r in step.admitted)


def _chunk(step: _Step) -> bool:
    rows = set(step.now["grammar_rows"])
    return any(r not in rows for r in step.constrained)


def _in_between(step: _Step) -> bool:
    """Rows and scheduled requests without one, in a mixed order."""
    rows = set(step.now["grammar_rows"])
    flags = [r in rows for r in step.now["num_scheduled_tokens"]]
    return True in flags and False in flags[flags.index(True) :]


def _error_and_more(step: _Step) -> bool:
    return bool(step.refused) and len(step.now["finished"]) > len(step.refused)


_SITUATIONS: Situations[_Step] = {
    "has a grammar": (
        "it is born into the second queue",
        lambda s: any(s.grammar(r) and s.arrived[r] == s.index for r in s.adds),
    ),
    "waits for its grammar": (
        "in the second queue, not compiled",
        lambda s: "grammar" in s.now["skipped"].values(),
    ),
    "several wait": (
        "their order in the second queue matters",
        lambda s: list(s.now["skipped"].values()).count("grammar") > 1,
    ),
    "ready at birth": (
        "compiled before it arrives, and still born into the second queue",
        lambda s: any(
            s.arrived[r] == s.index and why == "grammar" and s.grammar(r)["ready_at"] <= s.index
            for r, why in s.now["skipped"].items()
        ),
    ),
    "admitted on arrival": (
        "compiled before it arrives, and room for it",
        lambda s: any(s.arrived[r] == s.index and s.grammar(r) for r in s.admitted),
    ),
    "admitted when ready": (
        "in the very step",
        lambda s: any(s.grammar(r).get("ready_at") == s.index for r in s.admitted),
    ),
    "ready, no room": (
        "it stays in the second queue, waiting for room alone",
        lambda s: "waiting" in s.now["skipped"].values(),
    ),
    "ready, not reached": (
        "compiled, but the scan ended before it: still said to wait for the grammar",
        lambda s: any(
            why == "grammar" and s.grammar(r)["ready_at"] <= s.index
            for r, why in s.now["skipped"].items()
        ),
    ),
    "one behind a waiting one admitted": ("the wait is no barrier", _passed),
    "overtakes waiting": (
        "FCFS: who waited aside goes before an older one in the first queue",
        _overtakes,
    ),
    "overtakes preempted": ("FCFS: the second queue is served first", _overtakes_preempted),
    "waits under priority": (
        "two queues, both sorted",
        lambda s: not s.is_fcfs and s.now["skipped"],
    ),
    "free request before a waiting one, priority": (
        "the more urgent head of the two queues is looked at",
        lambda s: not s.is_fcfs and s.held and any(r not in s.held for r in s.admitted),
    ),
    "nothing but waits": (
        "an empty plan, and no end",
        lambda s: not s.now["num_scheduled_tokens"] and s.now["skipped"],
    ),
    "a waiting one aborted": (
        "before it ran: it leaves the second queue",
        lambda s: any(s.grammar(r) and r not in s.before.get("running", ()) for r in s.aborted),
    ),
    "a row": ("somebody's logits get a mask", lambda s: s.now["grammar_rows"]),
    "several rows": ("in scheduling order", lambda s: len(s.now["grammar_rows"]) > 1),
    "chunk without a row": ("part of a prompt samples nothing", _chunk),
    "rows between free ones": ("not all of the batch, not its head", _in_between),
    "a free request beside": (
        "scheduled without a grammar",
        lambda s: len(s.constrained) < len(s.now["num_scheduled_tokens"]),
    ),
    "preempted": (
        "with a grammar: it goes to the first queue, not to the second",
        lambda s: any(s.grammar(r) for r in s.now["preempted"]),
    ),
    "resumed": (
        "a preempted one with a grammar runs again, without another wait",
        lambda s: any(s.grammar(r) for r in s.now["resumed"]),
    ),
    "refused token": ("the request ends with an error", lambda s: s.refused),
    "refused at once": (
        "its first token",
        lambda s: any(s.grammar(r)["reject_at"] == 0 for r in s.refused),
    ),
    "refused EOS": (
        "an error although it stopped",
        lambda s: any(
            s.last_token(r) == s.entry["eos_token_id"] and not s.adds[r]["ignore_eos"]
            for r in s.refused
        ),
    ),
    "refused at the cap": (
        "an error although it had its length",
        lambda s: any(s.is_at_cap(r) for r in s.refused),
    ),
    "refused after a preemption": (
        "what was accepted before counts",
        lambda s: any(s.preempted_before(r) for r in s.refused),
    ),
    "error beside another end": ("blocks are freed in order", _error_and_more),
    "ends well": (
        "with a grammar, by EOS or its length",
        lambda s: any(
            s.grammar(r) and why in ("stop", "length") for r, why in s.now["finish_reasons"].items()
        ),
    ),
}

COUNTED = counted("grammar-situations", ("grammar",), _Step, _SITUATIONS)
