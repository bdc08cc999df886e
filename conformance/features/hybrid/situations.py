"""How often each situation of groups occurs in their recordings, read off the recordings alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.steps import Situations, Step, counted


@dataclass(frozen=True, slots=True)
class _Step(Step):
    """One step of a recording, and its tables by kind of group."""

    @property
    def kinds(self) -> list[str]:
        return [group["kind"] for group in self.config["kv_groups"]]

    def tables(self, kind: str, request_ids: list[str] | None = None) -> Iterator[list[int]]:
        """The tables of groups of one kind, of some requests or of all that run."""
        for request_id, tables in self.now["block_ids"].items():
            if request_ids is None or request_id in request_ids:
                yield from (t for t, k in zip(tables, self.kinds, strict=True) if k == kind)

    @property
    def hits(self) -> list[str]:
        """Admitted requests that found a prefix."""
        counters, scheduled = self.now["num_computed_tokens"], self.now["num_scheduled_tokens"]
        return [r for r in self.admitted if counters[r] > scheduled[r]]

    @property
    def is_aligned(self) -> bool:
        return any("mode" in group for group in self.config["kv_groups"])

    @property
    def has_cut(self) -> bool:
        """A prompt goes on that the budget would have let end, or go on, elsewhere."""
        counters, size = self.now["num_computed_tokens"], self.config["block_size"]
        return self.is_aligned and any(
            counters[r] % size == 0 and counters[r] < len(self.adds[r]["prompt_token_ids"])
            for r in self.now["num_scheduled_tokens"]
        )

    @property
    def has_room(self) -> bool:
        """Nothing that the scheduler counts keeps the next request from being admitted."""
        budget = self.config["max_num_batched_tokens"]
        longest = max(
            len(add["prompt_token_ids"]) + add["max_tokens"] for add in self.adds.values()
        )
        blocks = -(-longest // self.config["kv_groups"][0]["block_size"])
        return (
            sum(self.now["num_scheduled_tokens"].values()) < budget - longest
            and len(self.now["running"]) < self.config["max_num_seqs"]
            and self.now["free_blocks"] > blocks * len(self.kinds)
            and not self.now["preempted"]
        )


def _waits_for_a_state(step: _Step) -> bool:
    """The first in the queue has all it needs but a state that this step only writes."""
    queue = step.now["waiting"]
    if "mamba" not in step.kinds or not queue or not step.has_room or not step.next:
        return False
    after = _Step(step.entry, step.index + 1, step.adds, step.arrived)
    return queue[0] in after.hits


_SITUATIONS: Situations[_Step] = {
    "one window alone": ("the only group has a window", lambda s: s.kinds == ["sliding_window"]),
    "full attention and a window": (
        "of each one group", lambda s: sorted(s.kinds) == ["full", "sliding_window"],
    ),
    "three groups": ("as many tables per request", lambda s: len(s.kinds) == 3),
    "unequal blocks": (
        "hits and the index go by the least common multiple",
        lambda s: len({group["block_size"] for group in s.config["kv_groups"]}) > 1,
    ),
    "a step with a window": (
        "something is planned, and a group has a window",
        lambda s: "sliding_window" in s.kinds and s.now["num_scheduled_tokens"],
    ),
    "a step with states": (
        "something is planned, and a group has states",
        lambda s: "mamba" in s.kinds and s.now["num_scheduled_tokens"],
    ),
    "a step with caching": (
        "something is planned, and prefixes are looked up",
        lambda s: s.config["enable_prefix_caching"] and s.now["num_scheduled_tokens"],
    ),
    "a window has passed a block": (
        "its place holds the null block",
        lambda s: any(0 in table for table in s.tables("sliding_window")),
    ),
    "a state has passed a block": (
        "only the last one is still needed",
        lambda s: any(0 in table for table in s.tables("mamba")),
    ),
    "a step that ends at a block": (
        "mode \"align\": a prompt is cut where its state can be kept",
        lambda s: s.has_cut,
    ),
    "a hit": ("an admission finds a prefix", lambda s: s.hits),
    "a hit behind null blocks": (
        "a window finds what it can see, and nothing before",
        lambda s: any(t and t[0] == 0 for t in s.tables("sliding_window", s.hits)),
    ),
    "a hit of a state": (
        "of all blocks before, one is read",
        lambda s: any(len(t) > 1 and t[0] == 0 for t in s.tables("mamba", s.hits)),
    ),
    "a hit with drafts": (
        "every kind leaves its last block out",
        lambda s: "speculative" in s.config and s.hits,
    ),
    "an admission with drafts": (
        "prefixes are looked up for a drafter that reads hidden states",
        lambda s: "speculative" in s.config and s.admitted,
    ),
    "a request waits": ("the queue is not empty after the plan", lambda s: s.now["waiting"]),
    "a request waits for a state": (
        "there is room for it, but another writes in this step what it would begin from",
        _waits_for_a_state,
    ),
    "a preemption": ("all groups' blocks are given back", lambda s: s.now["preempted"]),
    "a table is given back": (
        "a request has ended or lost its place",
        lambda s: s.now["finished_before"] or s.now["preempted"],
    ),
}  # fmt: skip

COUNTED = counted(
    "hybrid-situations", ("hybrid", "hybrid_spec", "states", "states_align"), _Step, _SITUATIONS
)
