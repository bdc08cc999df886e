"""How often each situation of adapters occurs in the recordings with adapters.

Everything is read off the recordings alone; `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conformance.steps import Situations, Step, counted


@dataclass(frozen=True, slots=True)
class _Step(Step):
    """One step of a recording, and what is known of its requests."""

    def lora(self, request_id: str) -> int:
        return self.adds[request_id]["lora"]

    def loras(self, request_ids: Sequence[str]) -> set[int]:
        """Adapters of some requests, without the base's 0."""
        return {self.lora(r) for r in request_ids} - {0}

    @property
    def continued(self) -> list[str]:
        """Scheduled requests that ran before this step."""
        got = set(self.admitted)
        return [r for r in self.now["num_scheduled_tokens"] if r not in got]

    @property
    def skipped(self) -> list[str]:
        return self.now["skipped_waiting"]

    @property
    def newly_skipped(self) -> list[str]:
        held = set(self.before.get("skipped_waiting", ()))
        return [r for r in self.skipped if r not in held]

    @property
    def is_full(self) -> bool:
        return len(self.loras(list(self.now["num_scheduled_tokens"]))) == self.config["max_loras"]

    def arrival(self, request_id: str) -> int:
        """Place in the order of arrival."""
        return list(self.adds).index(request_id)

    def behind(self, request_id: str, skipped: str) -> bool:
        """Whether the first stands behind the second in the order that is served."""
        if self.is_fcfs:
            return self.arrival(request_id) > self.arrival(skipped)
        keys = [(self.adds[r]["priority"], self.adds[r]["arrival_time"], r)
                for r in (request_id, skipped)]  # fmt: skip
        return keys[0] > keys[1]

    def overtakers(self) -> Iterator[str]:
        """Admitted requests that stand behind one that is skipped."""
        return (r for r in self.admitted if any(self.behind(r, s) for s in self.skipped))


def _ended(step: _Step) -> set[str]:
    return {*step.before.get("finished", ()), *step.aborted}


def _freed_by_end(step: _Step) -> bool:
    """The last request of an adapter has ended, and one that was skipped is admitted for it."""
    gone = step.loras([r for r in _ended(step) if r in step.before.get("running", ())])
    gone -= step.loras(step.continued)
    held = set(step.before.get("skipped_waiting", ()))
    return bool(gone) and any(r in held for r in step.admitted)


def _freed_by_preemption(step: _Step) -> bool:
    held = set(step.before.get("skipped_waiting", ()))
    return bool(step.before.get("preempted")) and any(r in held for r in step.admitted)


def _overtakes_preempted(step: _Step) -> bool:
    """FCFS: a preempted request waits in `waiting`, one that was skipped is admitted."""
    held = set(step.before.get("skipped_waiting", ()))
    waits = set(step.now["waiting"]) & set(step.before.get("preempted", ()))
    return step.is_fcfs and bool(waits) and any(r in held for r in step.admitted)


def _scan_ends(step: _Step) -> bool:
    """The scan skips somebody and ends before the queues do."""
    return bool(step.newly_skipped and step.now["waiting"])


def _ends_in_second_queue(step: _Step) -> bool:
    """FCFS: one is skipped again, and behind it stands one that has a slot but was not reached."""
    held = set(step.before.get("skipped_waiting", ()))
    active = step.loras(list(step.now["num_scheduled_tokens"]))
    has_slot = [step.lora(r) in active or not step.is_full for r in step.skipped if r in held]
    return step.is_fcfs and False in has_slot and True in has_slot[has_slot.index(False) :]


def _head_waits_in_both(step: _Step) -> bool:
    """Priority: a head of `waiting` is admitted though an older skipped one is there."""
    held = set(step.before.get("skipped_waiting", ()))
    return not step.is_fcfs and bool(held) and any(r not in held for r in step.admitted)


def _heads(step: _Step, same_adapter: bool) -> bool:
    """Two requests begin with the same block of tokens, prompt and answer taken together."""
    size, said = step.config["block_size"], step.entry["outputs"]
    if step.index or not step.config["enable_prefix_caching"]:
        return False
    seen: dict[tuple[int, ...], set[int]] = {}
    for request_id, add in step.adds.items():
        tokens = (add["prompt_token_ids"] + said[request_id])[:size]
        others = seen.setdefault(tuple(tokens), set())
        if len(tokens) == size and others and (add["lora"] in others) == same_adapter:
            return True
        others.add(add["lora"])
    return False


def _prefixes(step: _Step) -> Iterator[tuple[str, str]]:
    """Pairs of an admitted request and a running one whose first blocks have the same tokens."""
    size = step.config["block_size"]
    for mine in step.admitted if step.config["enable_prefix_caching"] else ():
        head = step.adds[mine]["prompt_token_ids"]
        for other in step.continued:
            same = step.adds[other]["prompt_token_ids"][:size] == head[:size]
            whole = min(step.now["num_computed_tokens"][other], len(head) - 1) >= size
            if same and whole:
                yield mine, other


def _apart(step: _Step) -> bool:
    """The tokens are cached under another adapter alone, and nothing is found."""
    pairs = list(_prefixes(step))
    for mine, other in pairs:
        alone = all(step.lora(mine) != step.lora(o) for m, o in pairs if m == mine)
        tables = step.now["block_ids"]
        if alone and step.lora(mine) != step.lora(other) and tables[mine][0] != tables[other][0]:
            return True
    return False


def _together(step: _Step) -> bool:
    tables = step.now["block_ids"]
    return any(
        step.lora(mine) == step.lora(other) != 0 and tables[mine][0] == tables[other][0]
        for mine, other in _prefixes(step)
    )


_SITUATIONS: Situations[_Step] = {
    "an adapter in the plan": (
        "somebody scheduled has one",
        lambda s: s.loras(list(s.now["num_scheduled_tokens"])),
    ),
    "more adapters than slots": (
        "over the whole workload",
        lambda s: len(s.loras(list(s.adds))) > s.config["max_loras"],
    ),
    "every slot taken": ("the step has `max_loras` adapters", lambda s: s.is_full),
    "a request skipped": (
        "the step has no slot for its adapter: it is passed over",
        lambda s: s.newly_skipped,
    ),
    "several skipped": (
        "their order in `skipped_waiting` matters",
        lambda s: len(s.skipped) > 1,
    ),
    "skipped again": (
        "it was skipped in the step before, too",
        lambda s: set(s.skipped) & set(s.before.get("skipped_waiting", ())),
    ),
    "one behind a skipped one admitted": (
        "the skip is no barrier",
        lambda s: any(True for _ in s.overtakers()),
    ),
    "base request behind a skipped one admitted": (
        "it needs no slot",
        lambda s: any(s.lora(r) == 0 for r in s.overtakers()),
    ),
    "same adapter as a running one, all slots taken": (
        "admitted: the slot is there already",
        lambda s: (
            len(s.loras(s.continued)) == s.config["max_loras"] and s.loras(s.admitted)
        ),
    ),
    "two of an adapter admitted together": (
        "the second finds the slot that the first took in this step",
        lambda s: any(
            s.lora(r) and s.lora(r) in s.loras(s.admitted[:i]) - s.loras(s.continued)
            for i, r in enumerate(s.admitted)
        ),
    ),
    "admissions take the last slot": (
        "one that waits behind them in the same step is skipped",
        lambda s: (
            s.newly_skipped and len(s.loras(s.continued)) < s.config["max_loras"] and s.is_full
        ),
    ),
    "scan ends with somebody skipped": (
        "budget, slots or memory end it: who was passed over is kept",
        _scan_ends,
    ),
    "scan ends among the skipped": (
        "FCFS: who was passed over goes back in front of who was not reached",
        _ends_in_second_queue,
    ),
    "slot freed by an end": (
        "the adapter's last request has ended, one that was skipped runs",
        _freed_by_end,
    ),
    "slot freed by a preemption": (
        "the adapter's requests are preempted, one that was skipped runs",
        _freed_by_preemption,
    ),
    "skipped overtakes preempted": (
        "FCFS: the second queue is served first",
        _overtakes_preempted,
    ),
    "preempted request skipped": (
        "its slot has gone to others meanwhile",
        lambda s: any(r not in s.now["preempted"] and s.preempted_before(r)
                      for r in s.newly_skipped),
    ),
    "a preemption": ("a victim, whatever its adapter", lambda s: s.now["preempted"]),
    "skipped under priority": (
        "two queues, both sorted",
        lambda s: not s.is_fcfs and s.skipped,
    ),
    "waiting before skipped": (
        "priority: the more urgent head of the two queues is looked at",
        _head_waits_in_both,
    ),
    "a skipped request aborted": (
        "it leaves the second queue",
        lambda s: s.aborted & set(s.before.get("skipped_waiting", ())),
    ),
    "same tokens, two adapters": (
        "two requests begin with the same block",
        lambda s: _heads(s, False),
    ),
    "same tokens, one adapter": ("the same, and one name", lambda s: _heads(s, True)),
    "same prompt under another adapter": (
        "its blocks are not adopted",
        _apart,
    ),
    "same prompt under the same adapter": ("its blocks are adopted", _together),
}  # fmt: skip

COUNTED = counted("lora-situations", ("lora",), _Step, _SITUATIONS)
