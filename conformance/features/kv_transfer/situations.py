"""How often each situation of loads and sends occurs in the recordings with a connector.

Everything is read off the recordings alone; `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.steps import Situations, Step, counted

REMOTE = "remote_kvs"


@dataclass(frozen=True, slots=True)
class _Step(Step):
    """One step of a recording, and who loads and sends in it."""

    def field(self, name: str, step: Mapping[str, Any] | None = None) -> Any:
        """A field of a step; empty where the workload has no connector."""
        return (self.now if step is None else step).get(name, {})

    def kv(self, request_id: str) -> Mapping[str, Any]:
        return self.adds.get(request_id, {}).get("kv") or {}

    def status(self, request_id: str, step: Mapping[str, Any] | None = None) -> str:
        return str(self.field("skipped", step).get(request_id, ""))

    @property
    def loading(self) -> set[str]:
        """Requests whose load began in this step or before."""
        return {r for r, status in self.field("skipped").items() if status == REMOTE}

    @property
    def began(self) -> set[str]:
        """Requests whose load began in this step: it is the first with this status, or the first
        since they had no blocks."""
        held = self.before.get("block_ids", {})
        return {r for r in self.loading if r not in held}

    @property
    def received(self) -> set[str]:
        """Requests whose load was reported by the step before, or earlier, and that still wait."""
        found: set[str] = set()
        for step in self.entry["steps"][: self.index]:
            found |= set(step.get("finished_recving", ()))
            found -= set(step["num_scheduled_tokens"])
        return found

    @property
    def gone(self) -> set[str]:
        """Requests that ended in an earlier step, or were aborted by now."""
        steps = self.entry["steps"]
        ended = {r for step in steps[: self.index] for r in step["finished"]}
        reasons = [item for s in steps[: self.index + 1] for item in s["finish_reasons"].items()]
        return ended | {request_id for request_id, reason in reasons if reason == "abort"}

    @property
    def held(self) -> set[str]:
        """Requests that are gone and hold blocks."""
        return self.gone & self.now["block_ids"].keys()

    def invalid(self) -> set[str]:
        """Requests that hold a block whose load failed."""
        bad = set(self.field("invalid_block_ids"))
        return {r for r, ids in self.now["block_ids"].items() if bad & set(ids)} if bad else set()

    @property
    def policy(self) -> str:
        return str(self.config.get("kv_load_failure_policy", ""))

    def external(self, request_id: str) -> int:
        """Tokens brought from outside behind the hits of an admission without a wait."""
        count = self.now["num_scheduled_tokens"].get(request_id, 0)
        start = self.now["num_computed_tokens"][request_id] - count
        size = self.config["block_size"]
        return int(start) if start % size or start == self.kv(request_id)["external_tokens"] else 0


def _synchronous(step: _Step) -> bool:
    return any(
        step.kv(r) and not step.kv(r)["load_async"] and step.external(r) for r in step.admitted
    )


def _tail_kept(step: _Step) -> bool:
    """A load that fails in part leaves what came before it."""
    left = step.next.get("num_computed_tokens", {})
    return any(0 < left.get(r, 0) < step.now["num_computed_tokens"].get(r, 0)
               for r in step.invalid() & step.loading)  # fmt: skip


_SITUATIONS: Situations[_Step] = {
    "a load begins": ("the request has its blocks and is not planned", lambda s: s.began),
    "several loads at once": ("each has its blocks", lambda s: len(s.loading) > 1),
    "more than max_num_seqs": (
        "running and loading together: a load takes no slot",
        lambda s: len(s.loading) + len(s.now["running"]) > s.config["max_num_seqs"],
    ),
    "a load without a wait": ("its tokens are there in the same step", _synchronous),
    "the connector cannot say yet": (
        "the request is passed over, and one behind it is not",
        lambda s: any(
            s.index < s.kv(r).get("known_at", 0) and status != REMOTE
            for r, status in s.field("skipped").items()
        ),
    ),
    "loaded and admitted": (
        "in a step after its report", lambda s: set(s.admitted) & s.received,
    ),
    "loaded and not admitted": (
        "there are no slots, no budget, or a preemption ends the step",
        lambda s: any(r in s.received for r in s.loading),
    ),
    "loaded, looked at and refused": (
        "it waits among the skipped with a counter",
        lambda s: any(status in ("waiting", "preempted") and r in s.now["num_computed_tokens"]
                      for r, status in s.field("skipped").items()),
    ),
    "a prompt that is loaded whole": (
        "its last token is computed again",
        lambda s: any(s.kv(r).get("external_tokens", 0) >= len(s.adds[r]["prompt_token_ids"])
                      for r in s.began),
    ),
    "hits and a load": (
        "the load begins behind blocks of the prefix cache",
        lambda s: any(r != o and set(s.now["block_ids"].get(r, ())) & set(ids)
                      for r in s.began for o, ids in s.now["block_ids"].items()),
    ),
    "a preempted request is loaded again": (
        "it asks as if it were new", lambda s: any(s.preempted_before(r) for r in s.began),
    ),
    "a preemption": ("its connector is not asked", lambda s: s.now["preempted"]),
    "loads and a preemption": ("in one step", lambda s: s.loading and s.now["preempted"]),
    "aborted while it loads": (
        "its blocks stay until the load ends",
        lambda s: any(s.status(r, s.before) == REMOTE and r in s.now["block_ids"]
                      for r in s.aborted),
    ),
    "aborted when it is loaded": (
        "its blocks are free at once",
        lambda s: any(s.status(r, s.before) == REMOTE and r not in s.now["block_ids"]
                      for r in s.aborted),
    ),
    "received and freed": (
        "the load of a request that is gone ends",
        lambda s: set(s.field("finished_recving")) & s.gone,
    ),
    "blocks of one that has ended": ("they are being sent", lambda s: s.held - s.loading),
    "sent and freed": ("in the order of the reports", lambda s: s.field("finished_sending")),
    "several reports": (
        "in one update",
        lambda s: len(s.field("finished_sending")) + len(s.field("finished_recving")) > 1,
    ),
    "received and sent in one update": (
        "of two requests", lambda s: s.field("finished_sending") and s.field("finished_recving"),
    ),
    "nothing runs, transfers go on": (
        "steps are planned for them", lambda s: not s.now["running"] and (s.loading or s.held),
    ),
    "the head does not fit, loads hold blocks": (
        "the queue stands (45388)",
        lambda s: s.loading and not s.now["num_scheduled_tokens"] and s.now["waiting"],
    ),
    "a load fails": ("blocks of it are reported as not loaded", lambda s: s.invalid()),
    "a load fails and is computed": (
        "recompute, of a request that waited",
        lambda s: s.policy == "recompute" and s.invalid() & s.loading,
    ),
    "a load fails in part": ("what came before the block stays", _tail_kept),
    "a load fails at its first block": (
        "the blocks are given back, and the connector is asked again",
        lambda s: any(s.next.get("num_computed_tokens", {}).get(r, 0) == 0
                      for r in s.invalid() & s.loading) and s.policy == "recompute",
    ),
    "a running request loses tokens": (
        "recompute, without a wait: its token of this step is dropped",
        lambda s: s.policy == "recompute" and s.invalid() & set(s.now["num_scheduled_tokens"]),
    ),
    "a failed block is shared": (
        "the second who holds it counts it as computed",
        lambda s: len(s.invalid() & set(s.now["num_scheduled_tokens"])) > 1,
    ),
    "a load fails and ends its request": (
        "fail", lambda s: "error" in s.now["finish_reasons"].values(),
    ),
    "failed while it loads": (
        "fail, of a request that waited",
        lambda s: s.policy == "fail" and s.invalid() & s.loading,
    ),
    "the next step is planned already": (
        "a report reaches an asynchronous scheduler",
        lambda s: bool(s.config.get("async_scheduling")) and s.field("finished_recving"),
    ),
}  # fmt: skip

COUNTED = counted(
    "kv_transfer-situations",
    ("connector", "connector_failures", "connector_async"),
    _Step,
    _SITUATIONS,
)
