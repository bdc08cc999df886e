"""What happened in each step, as plain data for tables, figures and files.

Promises: recording changes no decision. State is taken after `schedule()` and before the update,
as in the conformance recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from mini_vllm.engine import LLMEngine
from mini_vllm.models.moe import ExpertLoads, observing_routing
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request


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
    expert_loads: dict[int, list[int]] | None = None
    """Per layer of experts, how many of the step's tokens chose each one; None without experts."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Draft tokens verified in this step, per request that has any."""
    num_accepted: dict[str, int] = field(default_factory=dict)
    """Where a request gained tokens: those beside the target's own. Drafts behind a stop are not
    among them, in `SpecDecodingStats` they are."""

    def to_json(self) -> dict:
        """The record as JSON types; of experts and drafts nothing where there are none."""
        record = asdict(self)
        for name in ("expert_loads", "drafts", "num_accepted"):
            if not record[name]:
                del record[name]
        return record

    def scheduled_text(self) -> str:
        """`A:11+16c B:1`: tokens scheduled per request, and those taken from the prefix cache."""
        parts = []
        for request_id, count in self.num_scheduled_tokens.items():
            cached = self.num_cached_tokens.get(request_id, 0)
            parts.append(f"{request_id}:{count}" + (f"+{cached}c" if cached else ""))
        return " ".join(parts) or "-"

    def events_text(self) -> str:
        """`B preempted, C resumed, A done: length`: who lost its blocks, came back, ended."""
        events = [f"{request_id} preempted" for request_id in self.preempted]
        events += [f"{request_id} resumed" for request_id in self.resumed]
        events += [f"{request_id} done: {reason}" for request_id, reason in self.finished.items()]
        return ", ".join(events)


@contextmanager
def observing(engine: LLMEngine, observer: Callable[[SchedulerOutput], None]) -> Iterator[None]:
    """Call `observer` with every plan inside the block, beside other observers."""
    engine.observers.append(observer)
    try:
        yield
    finally:
        engine.observers.remove(observer)


def traced_steps(engine: LLMEngine) -> Iterator[StepRecord]:
    """Step the engine until it is idle, yielding a record after each step.

    New requests may be added between two records. With `async_scheduling` the tokens and the ends
    of a record belong to the step before.
    """
    seen: list[tuple[SchedulerOutput, dict[str, Any], dict[str, Request]]] = []

    def snapshot(plan: SchedulerOutput) -> None:
        scheduler = engine.scheduler
        live = dict(engine.requests)
        state = {
            "running": [r.request_id for r in scheduler.running],
            "waiting": [r.request_id for r in scheduler.waiting],
            "block_ids": {
                r.request_id: list(scheduler.kv.get_block_ids(r.request_id))
                for r in scheduler.running
            },
            "free_blocks": scheduler.kv.block_pool.get_num_free_blocks(),
            "num_tokens": {request_id: r.num_tokens for request_id, r in live.items()},
        }
        seen.append((plan, state, live))

    counter = ExpertLoads(engine.model)
    with observing(engine, snapshot), observing_routing(engine.model, counter):
        step = 0
        while engine.has_unfinished_requests():
            seen.clear()
            counter.clear()
            finished = engine.step()
            plan, state, live = seen[0]
            before = state.pop("num_tokens")
            gained = {name: r.num_tokens - before[name] for name, r in live.items()}
            yield StepRecord(
                step=step,
                num_scheduled_tokens=dict(plan.num_scheduled_tokens),
                num_cached_tokens=dict(plan.num_cached_tokens),
                num_computed_tokens=dict(plan.num_computed_tokens),
                new=list(plan.scheduled_new_req_ids),
                resumed=list(plan.scheduled_resumed_req_ids),
                preempted=list(plan.preempted_req_ids),
                sampled={
                    request_id: request.all_token_ids[-1]
                    for request_id, request in live.items()
                    if gained[request_id]
                },
                finished={r.request_id: r.finish_reason or "" for r in finished},
                expert_loads={n: row.tolist() for n, row in counter.loads.items()} or None,
                drafts={name: [*tokens] for name, tokens in plan.spec_token_ids.items()},
                num_accepted={name: n - 1 for name, n in gained.items() if n}
                if engine.feature("spec_decode") is not None
                else {},
                **state,
            )
            step += 1
