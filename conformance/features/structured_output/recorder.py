"""Recordings with grammars: how the real scheduler waits for them, and what a refused token does.

    python -m conformance.record grammar

The workloads are those of `workloads.py`; most requests have a grammar that is compiled some steps
after they arrive, or before. No grammar is compiled here: a future is fulfilled at its step, and
what it holds refuses one scripted position. Everything else is the real manager's and scheduler's.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from conformance import recording, workloads
from conformance.features.core.recorder import MAX_STEPS, STALL_STEPS, Stalled, observe, skipped
from conformance.recorders.source import Real, installed

SEEDS = range(70_000, 71_000)


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with `add.grammar` for most."""
    return with_grammars(workloads.generate(seed))


def with_grammars(workload: workloads.Workload) -> dict[str, Any]:
    """`workload` itself, with grammars for most of its requests."""
    rng = random.Random(workload["seed"] * 13 + 5)
    share, slowest = rng.choice((0.4, 0.7, 0.9, 1.0)), rng.choice((1, 3, 6, 12))
    refusing = rng.choice((0.0, 0.2, 0.4))
    for event in workload["events"]:
        for add in event["add"]:
            if rng.random() >= share:
                continue
            said = workload["outputs"][add["request_id"]][: add["max_tokens"]]
            if not add["ignore_eos"] and workload["eos_token_id"] in said:
                said = said[: said.index(workload["eos_token_id"]) + 1]
            reject = None
            if rng.random() < refusing:  # anywhere, or just where the request ends anyway
                reject = rng.choice((rng.randrange(len(said)), len(said) - 1))
            ready = event["step"] + rng.choice((0, rng.randint(0, slowest), slowest))
            add["grammar"] = {"ready_at": ready, "reject_at": reject}
    return workload


class Scripted:
    """What the real engine asks of a grammar."""

    def __init__(self, reject_at: int | None) -> None:
        self.reject_at, self.position = reject_at, 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        first, self.position = self.position, self.position + len(tokens)
        return self.reject_at is None or not first <= self.reject_at < self.position

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The drafts before the position that it refuses."""
        if self.reject_at is None:
            return tokens
        return tokens[: max(0, self.reject_at - self.position)]

    def rollback(self, num_tokens: int) -> None:
        self.position -= num_tokens

    def is_terminated(self) -> bool:
        return False

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        bitmask[index] = 0


class Masks:
    """The backend, as far as the manager needs it to fill rows."""

    def allocate_token_bitmask(self, rows: int) -> Any:
        import torch

        return torch.zeros((rows, 1), dtype=torch.int32)


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)


def run(workload: Mapping[str, Any], real: Real | None = None) -> recording.Recording:
    """Run one workload on the real scheduler and note every field of every step.

    Raises:
        Stalled: unfinished work, no event or grammar to come, and nothing scheduled.
    """
    real = real or installed()
    logging.disable(logging.ERROR)  # the scheduler reports every refused token
    config, script = workload["config"], workload["outputs"]
    scheduler: Any = real.make_scheduler(config)
    scheduler.structured_output_manager.backend = Masks()
    events = {event["step"]: event for event in workload["events"]}
    live: dict[str, Any] = {}
    pending: dict[str, tuple[int, Future[Scripted], Scripted]] = {}
    used: dict[str, int] = dict.fromkeys(script, 0)
    steps: list[dict[str, Any]] = []
    idle = 0
    while scheduler.has_unfinished_requests() or any(step >= len(steps) for step in events):
        reasons: dict[str, str] = {}
        event = events.get(len(steps), {"add": [], "abort": []})
        for add in event["add"]:
            request_id = add["request_id"]
            request = real.make_request(add, config["block_size"], workload["eos_token_id"])
            live[request_id] = request
            if wanted := add.get("grammar"):
                future: Future[Scripted] = Future()
                request.structured_output_request.grammar = future
                pending[request_id] = wanted["ready_at"], future, Scripted(wanted["reject_at"])
            scheduler.add_request(request)
        for request_id in event["abort"]:
            real.abort(scheduler, request_id)
            if live.pop(request_id, None):
                reasons[request_id] = "abort"
        for request_id, (ready_at, future, grammar) in list(pending.items()):
            if ready_at <= len(steps):
                future.set_result(grammar)
                del pending[request_id]
        plan = scheduler.schedule()
        step = observe(scheduler, plan)
        step["skipped"] = {r.request_id: status(r) for r in skipped(scheduler)}
        masked = scheduler.get_grammar_bitmask(plan)
        step["grammar_rows"] = list(masked.structured_output_request_ids) if masked else []
        sampled: dict[str, int] = {}
        for request_id in plan.num_scheduled_tokens:
            request = live[request_id]
            if request.num_computed_tokens == request.num_tokens:
                sampled[request_id] = script[request_id][request.num_output_tokens]
                used[request_id] += 1
        scheduler.update_from_output(plan, real.runner_output(plan, sampled))
        finished = [r for r in plan.num_scheduled_tokens if live[r].is_finished()]
        for request_id in finished:
            reasons[request_id] = str(live.pop(request_id).get_finished_reason())
        steps.append({**step, "finished": sorted(finished), "finish_reasons": reasons})
        waits = any(request_id in live for request_id in pending)
        more = waits or any(s >= len(steps) for s in events)
        idle = 0 if plan.num_scheduled_tokens or more else idle + 1
        if idle >= STALL_STEPS or len(steps) >= MAX_STEPS:
            raise Stalled(f"seed {workload['seed']}: no progress after {len(steps)} steps")
    outputs = {request_id: script[request_id][:count] for request_id, count in used.items()}
    return {"upstream": real.upstream, **workload, "outputs": outputs, "steps": steps}


def status(request: Any) -> str:
    """The format's word for a status of the second queue."""
    words = {
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
        "WAITING_FOR_REMOTE_KVS": "remote_kvs",
    }
    return words.get(request.status.name, request.status.name.lower())
