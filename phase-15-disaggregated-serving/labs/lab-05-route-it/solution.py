"""Lab 15-05: which engine gets the next prompt.

The engine that has its prefix saves the work, and the idlest one saves the wait; often they are two
engines. What the router knows comes in reports, every two seconds, and between them it is blind
but for what it has sent itself. `fleet.py` counts what its choices cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK = 512
TOKENS_PER_S = 8_000.0
"""What one engine computes."""


class Routes:
    """What routes (given)."""

    def choose(self, arrival: Any, reports: Sequence[Any]) -> int:
        """The engine that gets this prompt, an index of `reports`."""
        raise NotImplementedError


class Balanced(Routes):
    """A router that is asked `choose(arrival, reports)` once per prompt, in order of arrival.

    `arrival` has `time_s`, `hash_ids` (its blocks of 512 tokens, in order) and `num_tokens`. The
    newest report of each engine has `time_s`, `held` (hashes of the blocks that it kept then) and
    `queued_tokens` (tokens that it had to compute then). `choose` returns the engine's index. What
    must hold on both samples of `recordings/`:

    - R1: it computes at most a tenth more prompt tokens than the best of four others: `by_prefix`,
      `by_load`, round-robin, and the mini engine's own router under "both".
    - R2: its worst queue is at most a quarter longer than that of the best of them.
    - R3: of an engine's report it looks up the blocks of the prompt, each at most once, and walks
      through no report: `held` has thousands of blocks.
    """

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.sent: list[set[int]] = []
        self.busy_until: list[float] = []

    def choose(self, arrival: Any, reports: Sequence[Any]) -> int:
        if not self.seen:
            self.seen, self.sent = [-1.0] * len(reports), [set() for _ in reports]
            self.busy_until = [0.0] * len(reports)
        costs = []
        for engine, report in enumerate(reports):
            if report.time_s > self.seen[engine]:  # news: what was sent since is in it
                self.seen[engine] = report.time_s
                self.sent[engine] = set()
                self.busy_until[engine] = report.time_s + report.queued_tokens / TOKENS_PER_S
            hits = 0
            for block in arrival.hash_ids:
                if block not in report.held and block not in self.sent[engine]:
                    break
                hits += 1
            computed = max(1, arrival.num_tokens - hits * BLOCK)
            waits = max(0.0, self.busy_until[engine] - arrival.time_s) * TOKENS_PER_S
            costs.append((waits + computed, computed, engine))
        _, computed, chosen = min(costs)
        self.sent[chosen].update(arrival.hash_ids)
        begin = max(self.busy_until[chosen], arrival.time_s)
        self.busy_until[chosen] = begin + computed / TOKENS_PER_S
        return chosen


def by_prefix(arrival: Any, reports: Sequence[Any]) -> int:
    """The engine that reports the longest prefix of the prompt; the first of equals.

    A pure function of its arguments. It is measured beside yours, and loses somewhere.
    """

    def hits(report: Any) -> int:
        return next(
            (i for i, block in enumerate(arrival.hash_ids) if block not in report.held),
            len(arrival.hash_ids),
        )

    return max(range(len(reports)), key=lambda engine: (hits(reports[engine]), -engine))


def by_load(arrival: Any, reports: Sequence[Any]) -> int:
    """The engine that reports the fewest tokens to compute; the first of equals."""
    return min(range(len(reports)), key=lambda engine: (reports[engine].queued_tokens, engine))


def where_it_loses() -> dict[str, set[tuple[str, str]]]:
    """Where each of three simple routers comes to twice as much as the best one, or more.

    For "by_prefix", "by_load" and "round-robin" a set of (sample, count): samples are "chat" and
    "hot", counts "computed" and "worst_queue". The best one is that of these three and of the
    mini engine's own router under "both", count by count.
    """
    both = {("chat", "computed"), ("chat", "worst_queue")}
    herd = {*both, ("hot", "worst_queue")}
    return {"by_prefix": herd, "by_load": herd, "round-robin": both}
