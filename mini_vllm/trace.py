"""What happened in each step, as plain data for tables, figures and files.

Promises: recording changes no decision. State is taken after `schedule()` and before the update,
as in the conformance recordings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from mini_vllm.engine import LLMEngine
from mini_vllm.scheduler import SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step. Token counts per request id, in scheduling order."""

    step: int
    num_scheduled_tokens: dict[str, int]
    num_cached_tokens: dict[str, int]
    num_computed_tokens: dict[str, int]
    """Before this step's tokens are added."""
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    running: list[str]
    waiting: list[str]
    block_ids: dict[str, list[int]]
    free_blocks: int
    sampled: dict[str, int]
    finished: dict[str, str]
    """Finish reason per request that ended in this step."""

    def to_json(self) -> dict:
        """The record as JSON types."""
        return asdict(self)


def traced_steps(engine: LLMEngine) -> Iterator[StepRecord]:
    """Step the engine until it is idle, yielding a record after each step.

    New requests may be added between two records. Restores `engine.on_schedule` at the end.
    """
    before = engine.on_schedule
    seen: list[tuple[SchedulerOutput, dict]] = []

    def snapshot(output: SchedulerOutput) -> None:
        scheduler = engine.scheduler
        state = {
            "running": [r.request_id for r in scheduler.running],
            "waiting": [r.request_id for r in scheduler.waiting],
            "block_ids": {
                r.request_id: scheduler.kv.get_block_ids(r.request_id) for r in scheduler.running
            },
            "num_computed_tokens": {
                r.request_id: r.num_computed_tokens for r in output.scheduled_requests
            },
            "free_blocks": scheduler.kv.block_pool.get_num_free_blocks(),
            "num_tokens": {r.request_id: r.num_tokens for r in output.scheduled_requests},
        }
        seen.append((output, state))
        if before is not None:
            before(output)

    engine.on_schedule = snapshot
    try:
        step = 0
        while engine.has_unfinished_requests():
            seen.clear()
            finished = engine.step()
            output, state = seen[0]
            lengths = state.pop("num_tokens")
            yield StepRecord(
                step=step,
                num_scheduled_tokens=dict(output.num_scheduled_tokens),
                num_cached_tokens=dict(output.num_cached_tokens),
                new=list(output.scheduled_new_req_ids),
                resumed=list(output.scheduled_resumed_req_ids),
                preempted=list(output.preempted_req_ids),
                sampled={
                    r.request_id: r.all_token_ids[-1]
                    for r in output.scheduled_requests
                    if r.num_tokens > lengths[r.request_id]
                },
                finished={r.request_id: r.finish_reason or "" for r in finished},
                **state,
            )
            step += 1
    finally:
        engine.on_schedule = before
