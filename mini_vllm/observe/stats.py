"""The engine in numbers: who runs, who waits, how full the cache is, what the steps came to.

Promises: counted once, for whatever serves the engine; counting changes no decision. Mirrors
`vllm/v1/metrics/stats.py:171` `SchedulerStats`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mini_vllm.engine import LLMEngine
from mini_vllm.feature import Feature
from mini_vllm.plan import SchedulerOutput


@dataclass(slots=True)
class Stats:
    """The engine after a step; the last three only grow."""

    running: int = 0
    """Requests in the running batch."""
    waiting: int = 0
    """All other live requests."""
    usage: float = 0.0
    """Share of the KV blocks in use; 1 is all."""
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Tokens found there."""


class StepStats(Feature):
    """Counts every step of an engine from the moment it joins."""

    name = "stats"

    def __init__(self, engine: LLMEngine) -> None:
        """Join `engine`."""
        self.engine = engine
        self._stats = Stats()
        engine.join(self)

    def after_schedule(self, plan: SchedulerOutput) -> None:
        """What the plan decided."""
        self._stats.preemptions += len(plan.preempted_req_ids)
        self._stats.prefix_hits += sum(plan.num_cached_tokens.values())
        for request_id in plan.scheduled_new_req_ids:
            self._stats.prefix_queries += self.engine.requests[request_id].num_prompt_tokens

    def read(self) -> Stats:
        """The numbers as they stand now."""
        stats, scheduler = self._stats, self.engine.scheduler
        stats.running = len(scheduler.running)
        stats.waiting = len(self.engine.requests) - stats.running
        stats.usage = scheduler.kv.block_pool.get_usage()
        return stats
