"""Lab 15-04: who owns a request's blocks, at every moment, and where the pin does not know it.

A block table has one owner at a time: the pool, the request that computes in it, a load that still
writes it ("wire"), a peer that still reads it ("peer"), or both of these. You write the automaton
twice: as v0.22.1 is, and as it should be. What should hold:

- O1: no block is in the pool while a transfer that the scheduler was told of is under way.
- O2: when the last of them has been reported, and the request has ended, the pool has it.
- O3: a report about nothing changes nothing.
- O4: until the pin's first mistake both automata say the same.

| event | what the scheduler hears |
|---|---|
| `load` | its walk gave the request blocks and asked for a load |
| `runs`, `preempted` | it was scheduled; it was withdrawn, and computes again later |
| `received`, `sent` | the worker's report: its load is over; its blocks have been read |
| `failed`, `failed in part` | nothing of its load can be used; some of it. A `received` follows |
| `walked` | its walk reaches a request whose load was reported |
| `ended`, `aborted` | it is over; its client has left. The connector does not ask for its blocks |
| `ended and kept`, `aborted and kept` | the same, and the connector keeps the blocks until `sent` |

Source: `vllm/v1/core/sched/scheduler.py:2136` `Scheduler._update_from_kv_xfer_finished`.
"""

from __future__ import annotations

from collections.abc import Sequence

OWNERS = ("pool", "request", "wire", "peer", "wire and peer")
CAUSES = {
    "first-report-frees": "two transfers were under way, and the first report gave the blocks back",
    "never-kept": "a report came of a request that the connector had not asked to keep",
    "never-known": "a report came of an id that the scheduler had never seen",
    "ended-in-a-plan": "the request was aborted while it was running",
}


class Died(Exception):
    """An assertion of the scheduler failed; the engine and all of its requests are gone (given).

    `line` is that of the assertion in the pinned `vllm/v1/core/sched/scheduler.py`.
    """

    def __init__(self, line: int) -> None:
        super().__init__(f"scheduler.py:{line}")
        self.line = line


class Automaton:
    """One request, from its arrival on (given)."""

    def hear(self, event: str) -> str:
        """Take one event of the table above; who owns its blocks now, one of `OWNERS`."""
        raise NotImplementedError


class AtThePin(Automaton):
    """The owner as v0.22.1 has it. Where its assertion fails, `hear` raises `Died`.

    It is faithful where the release is wrong: "pool" is an answer while a transfer is under way.
    """

    def __init__(self) -> None:
        self.owner = "pool"
        self.is_void = self.has_ended = self.is_known = self.is_loaded = False

    def hear(self, event: str) -> str:
        word = event.removesuffix(" and kept")
        if word not in ("sent", "received", "failed", "failed in part"):
            self.is_loaded = False
        if word in ("load", "runs"):
            self.owner, self.is_known = "wire" if word == "load" else "request", True
        elif word == "failed":
            self.is_void = True
        elif word == "walked":
            self.owner, self.is_void = "pool" if self.is_void else "request", False
        elif word == "preempted":
            self.owner = "pool"
        elif word in ("ended", "aborted"):
            self.ends(event != word)
        elif word in ("received", "sent"):
            self.reported(word)
        return self.owner

    def ends(self, is_kept: bool) -> None:
        """No more is computed; blocks stay where a load writes or a peer reads them."""
        self.has_ended = True
        if is_kept:
            self.owner = "wire and peer" if self.owner == "wire" else "peer"
        elif self.owner != "wire":
            self.owner, self.is_known = "pool", False

    def reported(self, word: str) -> None:
        """A transfer is over."""
        if not self.is_known:
            raise Died(2153 if word == "received" else 2162)
        if self.has_ended:
            self.owner, self.is_known = "pool", False
        elif word == "sent":
            raise Died(1861)
        elif self.owner != "wire" and not self.is_loaded:
            raise Died(2158)
        else:
            self.owner, self.is_loaded = "request", True


class Mended(AtThePin):
    """The owner as O1 to O4 want it; it never dies."""

    def reported(self, word: str) -> None:
        """One reason less to keep the blocks, if it was one."""
        reason = "wire" if word == "received" else "peer"
        left = [each for each in self.owner.split(" and ") if each != reason]
        self.owner = " and ".join(left) or ("pool" if self.has_ended else "request")


def why(events: Sequence[Sequence[str]]) -> str:
    """Why the pin dies at the last of these moments: one of `CAUSES`.

    Args:
        events: moment by moment, what the scheduler heard of the request whose report killed it.
    """
    told = [word for moment in events for word in moment]
    return "first-report-frees" if any("kept" in word for word in told) else "never-kept"
