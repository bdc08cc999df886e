"""Recordings with drafts: what the real scheduler does with tokens that may be rejected.

    python -m conformance.record spec async_spec

`spec.jsonl.gz` is the synchronous scheduler with real draft
ids, `async_spec.jsonl.gz` the asynchronous one with a queue of two batches and placeholders. The
workloads are those of `workloads.py` with a drafter on top: how many tokens it says, and how often
it says what the target will. `README.md` beside it has the keys these files add.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conformance import recording, workloads
from conformance.features.core.recorder import MAX_STEPS, STALL_STEPS, Stalled, observe
from conformance.recorders.source import Real, installed

SEEDS = range(40_000, 41_000)
"""Of `spec.jsonl.gz`."""
ASYNC_SEEDS = range(50_000, 50_600)
"""Of `async_spec.jsonl.gz`."""
METHODS = ("ngram", "ngram_gpu", "eagle", "draft_model")
ASYNC_METHODS = METHODS[1:]
"""`vllm/config/vllm.py:825` `VllmConfig.__post_init__` refuses asynchronous `ngram`."""


def generate(seed: int, is_async: bool = False) -> dict[str, Any]:
    """The workload of a seed and its drafter.

    Returns:
        `workloads.generate(seed)` with `config.speculative`; scripts are k + 1 tokens longer than
        `max_tokens`, because an accepted draft may lie behind the stop. `acceptance` is how often
        a draft token is the target's; it is not part of the recording.
    """
    return with_drafts(workloads.generate(seed), is_async)


def with_drafts(workload: workloads.Workload, is_async: bool) -> dict[str, Any]:
    """`workload` itself, with a drafter; see `generate`."""
    seed = workload["seed"]
    rng = random.Random(seed * 7 + 1)
    methods = ASYNC_METHODS if is_async else METHODS
    method, k = methods[seed % len(methods)], rng.choice((1, 2, 3, 4, 4, 5, 8))
    for script in workload["outputs"].values():
        script += rng.choices(range(3, 43), k=k + 1)
    config = workload["config"]
    config["speculative"] = {"method": method, "num_speculative_tokens": k}
    if is_async:
        config["async_scheduling"] = True
    if rng.random() < 0.5:  # room for 1 + k tokens of several requests, else budgets trim drafts
        config["max_num_batched_tokens"] += rng.randint(0, config["max_num_seqs"] * k)
    if rng.random() < 0.7 and 0 < config["long_prefill_token_threshold"] <= k:
        config["long_prefill_token_threshold"] += k
    workload["acceptance"] = rng.choice((0.0, 0.3, 0.6, 0.8, 0.95, 1.0))
    return workload


def record(seeds: Iterable[int] = SEEDS, real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real synchronous scheduler, every field of every step."""
    for seed in seeds:
        yield _until_it_ends(generate(seed), _record, real)


def record_async(
    seeds: Iterable[int] = ASYNC_SEEDS, real: Real | None = None
) -> Iterator[recording.Recording]:
    """Each seed on the real `AsyncScheduler` with a queue of two batches."""
    for seed in seeds:
        yield _until_it_ends(generate(seed, is_async=True), _record_async, real)


def _until_it_ends(workload: dict[str, Any], run: Any, real: Real | None) -> recording.Recording:
    """Record; a pool in which a lone request preempts itself for ever grows by a block."""
    while True:
        try:
            return run(copy.deepcopy(workload), real)
        except Stalled:
            workload["config"]["num_blocks"] += 1


class _Run:
    """The real scheduler on the way through one workload: what both recorders share."""

    def __init__(self, workload: dict[str, Any], real: Real | None) -> None:
        real = real or installed()
        self.real, self.workload = real, workload
        self.acceptance = workload.pop("acceptance")
        self.config, self.script = workload["config"], workload["outputs"]
        self.k = self.config["speculative"]["num_speculative_tokens"]
        self.rng = random.Random(workload["seed"] * 7 + 2)
        self.scheduler = real.make_scheduler(self.config, bool(self.config.get("async_scheduling")))
        self.config["speculative"] |= {
            "num_lookahead_tokens": self.scheduler.num_lookahead_tokens,
            "use_eagle": self.scheduler.use_eagle,
        }
        self.events = {event["step"]: event for event in workload["events"]}
        self.live: dict[str, Any] = {}
        self.used: dict[str, int] = dict.fromkeys(self.script, 0)
        self.steps: list[dict[str, Any]] = []
        self.idle = 0

    def waits(self) -> bool:
        """Whether an event is still to come."""
        return any(step >= len(self.steps) for step in self.events)

    def apply(self) -> dict[str, str]:
        """This step's arrivals, then its aborts one by one; the reasons of the aborted."""
        event = self.events.get(len(self.steps), {"add": [], "abort": []})
        for add in event["add"]:
            ahead = getattr(self.scheduler, "num_hash_lookahead_tokens", 0)  # from 0.33.0 on
            request = self.real.make_request(
                add, self.config["block_size"], self.workload["eos_token_id"],
                **({"num_hash_lookahead_tokens": ahead} if ahead else {}),
            )  # fmt: skip
            self.live[add["request_id"]] = request
            self.scheduler.add_request(request)
        reasons: dict[str, str] = {}
        for request_id in event["abort"]:
            self.real.abort(self.scheduler, request_id)
            if self.live.pop(request_id, None):
                reasons[request_id] = "abort"
        return reasons

    def update(self, plan: Any, sampled: Mapping[str, list[int]], reasons: dict[str, str]) -> None:
        """Hand the tokens over, note who ended and how many tokens each request kept."""
        planned = [self.live[r] for r in plan.num_scheduled_tokens if r in self.live]
        before = {request.request_id: request.num_output_tokens for request in planned}
        if plan.num_scheduled_tokens:  # the scheduler trims the lists it is given
            self.scheduler.update_from_output(plan, self.real.runner_output(plan, sampled))
        ended = [request for request in planned if request.is_finished()]
        for request in planned:
            self.used[request.request_id] += request.num_output_tokens - before[request.request_id]
        for request in ended:
            reasons[request.request_id] = str(request.get_finished_reason())
            del self.live[request.request_id]
        self.steps[-1] |= {
            "finished": sorted(request.request_id for request in ended),
            "finish_reasons": reasons,
        }

    def check_progress(self, plan: Any, patience: int) -> None:
        """Raises Stalled when work is left and none of it moves."""
        self.idle = 0 if plan.num_scheduled_tokens or self.waits() else self.idle + 1
        if self.idle >= patience or len(self.steps) >= MAX_STEPS:
            raise Stalled(f"seed {self.workload['seed']}: after {len(self.steps)} steps")

    def recording(self) -> recording.Recording:
        outputs = {r: self.script[r][:count] for r, count in self.used.items()}
        return {
            "upstream": self.real.upstream, **self.workload, "outputs": outputs,
            "steps": self.steps,
        }  # fmt: skip

    def num_accepted(self, num_drafts: int) -> int:
        """How many of them the target says too, where the drafts themselves are not known."""
        accepted = 0
        while accepted < num_drafts and self.rng.random() < self.acceptance:
            accepted += 1
        return accepted

    def drafts(self, request_id: str, position: int, known: int) -> list[int]:
        """What the drafter says will come from output `position` on; `known` tokens so far."""
        length = self.k
        if self.config["speculative"]["method"] == "ngram":  # it may find little, or nothing
            length = min(
                self.rng.choice((0, 1, self.k, self.k, self.rng.randint(0, self.k))),
                self.config["max_model_len"] - known,
            )
        coming = self.script[request_id][position:]
        return [
            coming[i]
            if i < len(coming) and self.rng.random() < self.acceptance
            else self.rng.randint(43, 60)
            for i in range(max(0, length))
        ]


def _record(workload: dict[str, Any], real: Real | None) -> recording.Recording:
    """One synchronous workload. Raises Stalled."""
    run = _Run(workload, real)
    scheduler = run.scheduler
    while scheduler.has_unfinished_requests() or run.waits():
        reasons = run.apply()
        held = {r: list(q.spec_token_ids) for r, q in run.live.items() if q.spec_token_ids}
        plan = scheduler.schedule()
        planned = {r: list(t) for r, t in plan.scheduled_spec_decode_tokens.items() if t}
        sampled: dict[str, list[int]] = {}
        for request_id in plan.num_scheduled_tokens:
            request = run.live[request_id]
            if request.is_prefill_chunk:
                continue
            said = run.script[request_id][request.num_output_tokens :]
            drafts, accepted = planned.get(request_id, []), 0
            while accepted < len(drafts) and drafts[accepted] == said[accepted]:
                accepted += 1
            sampled[request_id] = said[: accepted + 1]
        run.steps.append(
            {
                **observe(scheduler, plan),
                "spec_token_ids": held,
                "scheduled_spec_decode_tokens": planned,
                "sampled_token_ids": sampled,
            }
        )
        before = dict(run.live)
        run.update(plan, sampled, reasons)
        offered: dict[str, list[int]] = {}
        if plan.num_scheduled_tokens and run.rng.random() >= 0.03:
            offered = {r: _offer(run, r, before[r], sampled) for r in plan.num_scheduled_tokens}
        run.steps[-1]["draft_token_ids"] = offered
        if offered:
            scheduler.update_draft_token_ids(run.real.draft_token_ids(offered))
        run.check_progress(plan, STALL_STEPS)
    return run.recording()


def _offer(run: _Run, request_id: str, request: Any, sampled: Mapping[str, list[int]]) -> list[int]:
    """The drafts a runner hands over for one row. n-gram skips rows without a sampled token;
    a drafter that runs a model says something about every row, also about those that ended."""
    if request_id not in sampled and run.config["speculative"]["method"] == "ngram":
        return []
    return run.drafts(request_id, request.num_output_tokens, request.num_tokens)


def _record_async(workload: dict[str, Any], real: Real | None) -> recording.Recording:
    """One asynchronous workload. Raises Stalled.

    Step k is planned and observed, then step k - 1 is updated, as in
    `EngineCore.step_with_batch_queue` where no batch is ever done early.
    """
    run = _Run(workload, real)
    scheduler = run.scheduler
    num_sampled: dict[str, int] = dict.fromkeys(run.script, 0)
    in_flight: tuple[Any, dict[str, list[int]]] | None = None

    def busy() -> bool:
        waits = in_flight is not None and bool(in_flight[0].num_scheduled_tokens)
        return waits or scheduler.has_unfinished_requests() or run.waits()

    while busy():
        reasons = run.apply()
        plan = scheduler.schedule()
        planned = {r: list(t) for r, t in plan.scheduled_spec_decode_tokens.items() if t}
        sampled: dict[str, list[int]] = {}
        for request_id in plan.num_scheduled_tokens:
            if run.live[request_id].is_prefill_chunk:
                continue
            start = num_sampled[request_id]
            count = 1 + run.num_accepted(len(planned.get(request_id, ())))
            said = run.script[request_id][start : start + count]
            sampled[request_id] = said + [recording.BEYOND] * (count - len(said))
            num_sampled[request_id] += count
        run.steps.append(
            {
                **observe(scheduler, plan),
                "scheduled_spec_decode_tokens": planned,
                "num_output_placeholders": {
                    request_id: request.num_output_placeholders
                    for request_id, request in scheduler.requests.items()
                    if request.num_output_placeholders
                },
                "sampled_token_ids": sampled,
            }
        )
        previous, in_flight = in_flight, (plan, sampled)
        if previous is None:
            run.steps[-1] |= {"finished": [], "finish_reasons": reasons}
        else:
            run.update(*previous, reasons)
        run.check_progress(plan, STALL_STEPS + 1)
    return run.recording()
