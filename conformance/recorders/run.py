"""The real scheduler on the way through one workload, with or without any feature.

Every recorder of workloads is a `Run`: it feeds arrivals, aborts and scripted tokens to the real
scheduler and notes every field of every step. Plans wait for their tokens in a queue as deep as
there are batches in flight, `vllm/v1/engine/core.py:469` `EngineCore.step_with_batch_queue` where
no batch is ever done early.
"""

from __future__ import annotations

import collections
import copy
import logging
import math
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from conformance import recording, workloads
from conformance.real_core import LoadError, StubError
from conformance.recorders.ec_connector import scripted
from conformance.recorders.source import Real, installed
from conformance.recorders.stand_ins import Connector, Masks, Scripted

MAX_STEPS = 2000
STALL_STEPS = 3


Planned = tuple[Any, dict[str, list[int]]]
"""A plan, and the tokens that its rows sample."""


class Stalled(Exception):
    """The real scheduler stopped scheduling with work left: the workload asks the impossible."""


class RefusedError(Exception):
    """The real scheduler itself fails on this workload: an assertion, or an error it raises."""

    def __init__(self, message: str, entry: recording.Recording) -> None:
        super().__init__(message)
        self.entry = entry
        """The workload with the steps before it failed."""


def run(
    workload: workloads.Workload,
    real: Real | None = None,
    grows: bool = True,
    most: int | None = None,
) -> recording.Recording:
    """Run one workload, with or without any feature, on the real scheduler.

    Args:
        workload: as `generate` or `workload_file.read` gives it; it is left as it is.
        real: where the real classes come from; None: the installed package.
        grows: where the scheduler stands still for ever, add a block to the pool and try again.
        most: stop after so many steps; None: at the end.

    Raises:
        RefusedError: the real scheduler itself fails.
        Stalled: it stands still for ever, and `grows` is off.
    """
    real = real or installed()
    tried = copy.deepcopy(workload)
    while True:
        try:
            return Run(copy.deepcopy(tried), real).recorded(most)
        except Stalled:
            if not grows:
                raise
            tried["config"]["num_blocks"] += 1


class Run:
    """One way through one workload."""

    def __init__(
        self, workload: dict[str, Any], real: Real | None = None, tells_tokens: bool = True
    ) -> None:
        """At the beginning.

        Args:
            workload: becomes part of the recording.
            tells_tokens: whether steps hold `sampled_token_ids`. A plain synchronous workload's
                are its script.
        """
        real = real or installed()
        self.tells_tokens = tells_tokens
        self.real, self.workload = real, workload
        self.acceptance: float = workload.pop("acceptance", 0.0)
        self.config = workload["config"]
        self.script = {name: list(tokens) for name, tokens in workload["outputs"].items()}
        self.is_async = bool(self.config.get("async_scheduling"))
        self.depth = 2 if self.is_async else 1
        """Batches in flight."""
        self.k = self.config.get("speculative", {}).get("num_speculative_tokens", 0)
        for event in workload["events"]:  # a script by hand may be shorter than what is asked for
            for add in event["add"]:
                said = self.script.setdefault(add["request_id"], [])
                said += [recording.BEYOND] * (add["max_tokens"] + self.k + 2 - len(said))
        self.rng = random.Random(workload["seed"] * 7 + 2)
        self.scheduler = real.make_scheduler(self.config, self.is_async)
        self.scheduler.structured_output_manager.backend = Masks()
        if self.k:
            self.config["speculative"] |= {
                "num_lookahead_tokens": self.scheduler.num_lookahead_tokens,
                "use_eagle": self.scheduler.use_eagle,
            }
        sizes = [group["block_size"] for group in self.config.get("kv_groups", ())]
        self.hash_block_size = math.gcd(*sizes) if sizes else self.config["block_size"]
        self.events = {event["step"]: event for event in workload["events"]}
        adds = [add for event in workload["events"] for add in event["add"]]
        self.has_grammars = any(add.get("grammar") for add in adds)
        kv = {add["request_id"]: add["kv"] for add in adds if add.get("kv")}
        self.connector: Any = None
        if kv:
            self.connector = self.scheduler.connector = Connector(kv)
            self.connector.fails.block_size = self.config["block_size"]
            policy = self.config.get("kv_load_failure_policy")
            self.scheduler.recompute_kv_load_failures = policy != "fail"
        self.ec_connector: Any = None
        if "ec_has" in self.config:
            self.ec_connector = self.scheduler.ec_connector = scripted(self.config, real)
        self.pending: dict[str, tuple[int, Future[Scripted], Scripted]] = {}
        self.live: dict[str, Any] = {}
        self.num_sampled: dict[str, int] = dict.fromkeys(self.script, 0)
        self.used: dict[str, int] = dict.fromkeys(self.script, 0)
        self.steps: list[dict[str, Any]] = []
        self.in_flight: collections.deque[Planned] = collections.deque()

    def recorded(self, most: int | None = None) -> recording.Recording:
        """All steps, or the first ones. Raises Stalled, RefusedError."""
        before = logging.root.manager.disable
        if self.has_grammars:
            logging.disable(logging.ERROR)  # the scheduler reports every refused token
        try:
            return self._recorded(most)
        finally:
            logging.disable(before)

    def _recorded(self, most: int | None) -> recording.Recording:
        in_flight = self.in_flight
        idle = 0
        while (
            (
                self.scheduler.requests
                if self.connector
                else self.scheduler.has_unfinished_requests()
            )
            or self._flies()
            or self._waits()
        ) and (most is None or len(self.steps) < most):
            if self.connector:
                self.connector.now = len(self.steps)
            if self.ec_connector:
                self.ec_connector.now = len(self.steps)
            reasons = self._apply()
            held = {r: list(q.spec_token_ids) for r, q in self.live.items() if q.spec_token_ids}
            plan = self._ask(self.scheduler.schedule)
            step = self._observe(plan, held)
            sampled = self._sample(plan)
            if self.tells_tokens:
                step["sampled_token_ids"] = sampled
            self.steps.append(step)
            in_flight.append((plan, sampled))
            before = dict(self.live)
            finished: list[str] = []
            if self._is_due(plan):
                finished = self._update(*in_flight.popleft(), reasons)
            step |= {"finished": finished, "finish_reasons": reasons}
            if self.k and not self.is_async:
                step["draft_token_ids"] = self._offer(plan, sampled, before)
            idle = 0 if plan.num_scheduled_tokens or self._waits() else idle + 1
            if idle >= STALL_STEPS + self.depth - 1 or len(self.steps) >= MAX_STEPS:
                raise Stalled(f"seed {self.workload['seed']}: after {len(self.steps)} steps")
        return self._entry()

    def _entry(self) -> recording.Recording:
        """The whole steps so far."""
        outputs = {r: self.script[r][:count] for r, count in self.used.items()}
        steps = [step for step in self.steps if "finished" in step]
        return {
            "upstream": self.real.upstream, **self.workload, "outputs": outputs, "steps": steps,
        }  # fmt: skip

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """A call into the real scheduler. Raises RefusedError where it fails by itself."""
        try:
            return question(*arguments)
        except (StubError, LoadError):
            raise
        except Exception as error:
            said = f"seed {self.workload['seed']}, step {len(self.steps)}: {type(error).__name__}"
            raise RefusedError(f"{said} {error}".rstrip(), self._entry()) from error

    def _flies(self) -> bool:
        """Whether tokens are on their way."""
        return any(plan.num_scheduled_tokens for plan, _ in self.in_flight)

    def _is_due(self, plan: Any) -> bool:
        """Whether the oldest batch is updated, now that `plan` is in flight."""
        return len(self.in_flight) == self.depth

    def _waits(self) -> bool:
        """Whether an event or a grammar is still to come."""
        coming = any(request_id in self.live for request_id in self.pending)
        if self.connector:
            known = (kv["known_at"] for r, kv in self.connector.script.items() if r in self.live)
            coming = coming or bool(self.connector.loads or self.connector.sends)
            coming = coming or any(step >= len(self.steps) for step in known)
        return coming or any(step >= len(self.steps) for step in self.events)

    def _apply(self) -> dict[str, str]:
        """This step's arrivals, aborts and grammars; the reasons of the aborted."""
        event = self.events.get(len(self.steps), {"add": [], "abort": []})
        ahead = getattr(self.scheduler, "num_hash_lookahead_tokens", 0)  # from 0.33.0 on
        for add in event["add"]:
            request = self.real.make_request(
                add, self.hash_block_size, self.workload["eos_token_id"],
                **({"num_hash_lookahead_tokens": ahead} if ahead else {}),
            )  # fmt: skip
            self.live[add["request_id"]] = request
            if wanted := add.get("grammar"):
                future: Future[Scripted] = Future()
                request.structured_output_request.grammar = future
                scripted = Scripted(wanted["reject_at"])
                self.pending[add["request_id"]] = wanted["ready_at"], future, scripted
            self._ask(self.scheduler.add_request, request)
        reasons: dict[str, str] = {}
        for request_id in event["abort"]:
            self.real.abort(self.scheduler, request_id)
            if self.live.pop(request_id, None):
                reasons[request_id] = "abort"
        for request_id, (ready_at, future, grammar) in list(self.pending.items()):
            if ready_at <= len(self.steps):
                future.set_result(grammar)
                del self.pending[request_id]
        return reasons

    def _observe(self, plan: Any, held: dict[str, list[int]]) -> dict[str, Any]:
        step = observe(self.scheduler, plan)
        if "kv_groups" in self.config:
            manager = self.scheduler.kv_cache_manager
            step["block_ids"] = {
                request.request_id: [
                    list(table) for table in manager.get_block_ids(request.request_id)
                ]
                for request in self.scheduler.running
            }
        if "encoder_cache_size" in self.config:
            cache = self.scheduler.encoder_cache_manager
            inputs = plan.scheduled_encoder_inputs.items()
            step["encoder_inputs"] = {request_id: list(which) for request_id, which in inputs}
            step["freed_encoder_hashes"] = list(plan.free_encoder_mm_hashes)
            step["encoder_free"] = [cache.num_free_slots, cache.num_freeable_slots]
        if self.ec_connector:
            loads = plan.ec_connector_metadata.mm_datas
            step["ec_loads"] = [[load.mm_hash, load.num_token] for load in loads]
        if self.k:
            drafts = plan.scheduled_spec_decode_tokens
            if not self.is_async:
                step["spec_token_ids"] = held
            step["scheduled_spec_decode_tokens"] = {r: list(t) for r, t in drafts.items() if t}
        if self.is_async:
            step["num_output_placeholders"] = {
                request_id: request.num_output_placeholders
                for request_id, request in self.scheduler.requests.items()
                if request.num_output_placeholders
            }
        if self.connector:
            self._observe_connector(step)
        if self.has_grammars:
            step["skipped"] = {r.request_id: status(r) for r in skipped(self.scheduler)}
            masked = self.scheduler.get_grammar_bitmask(plan)
            step["grammar_rows"] = list(masked.structured_output_request_ids) if masked else []
        return step

    def _observe_connector(self, step: dict[str, Any]) -> None:
        """The second queue, and everybody who holds blocks: loading, loaded, or being sent."""
        waits = skipped(self.scheduler)
        if self.config["policy"] == "priority":
            waits = sorted(waits)
        tables = {
            request_id: list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
            for request_id in self.scheduler.requests
        }
        step["skipped"] = {request.request_id: status(request) for request in waits}
        step["block_ids"] = {request_id: ids for request_id, ids in tables.items() if ids}
        step["num_computed_tokens"] |= {
            r.request_id: r.num_computed_tokens for r in waits if r.num_computed_tokens
        }
        is_due = len(self.in_flight) + 1 == self.depth  # else no update takes the reports
        step["finished_recving"], step["finished_sending"] = (
            self.connector.reports() if is_due else ([], [])
        )
        if "kv_load_failure_policy" in self.config:
            now = self.connector.now
            step["invalid_block_ids"] = self.connector.fails.at(now) if is_due else []

    def _sample(self, plan: Any) -> dict[str, list[int]]:
        """What the runner returns for this plan, before stops trim it."""
        sampled: dict[str, list[int]] = {}
        for request_id in plan.num_scheduled_tokens:
            request = self.live[request_id]
            # Before 0.16 a request does not say it, and only plain workloads are recorded.
            if getattr(
                request, "is_prefill_chunk", request.num_computed_tokens < request.num_tokens
            ):
                continue
            drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
            if self.is_async:  # the scheduler does not know the drafts
                start, accepted = self.num_sampled[request_id], 0
                while accepted < len(drafts) and self.rng.random() < self.acceptance:
                    accepted += 1
                said = self.script[request_id][start : start + accepted + 1]
                sampled[request_id] = said + [recording.BEYOND] * (accepted + 1 - len(said))
                self.num_sampled[request_id] += accepted + 1
                continue
            said = self.script[request_id][request.num_output_tokens :]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == said[accepted]:
                accepted += 1
            sampled[request_id] = said[: accepted + 1]
        return sampled

    def _update(
        self, plan: Any, sampled: dict[str, list[int]], reasons: dict[str, str]
    ) -> list[str]:
        """Hand the tokens over and note how many each request kept; the ids of those that ended."""
        planned = [self.live[r] for r in plan.num_scheduled_tokens if r in self.live]
        before = {request.request_id: request.num_output_tokens for request in planned}
        if plan.num_scheduled_tokens or self.depth == 1 or self.connector:
            output = self.real.runner_output(plan, sampled)
            if self.connector:
                names = "finished_recving", "finished_sending", "invalid_block_ids"
                told = [self.steps[-1].get(name, []) for name in names]
                output.kv_connector_output = self.connector.output(*told)
            self._ask(self.scheduler.update_from_output, plan, output)
        for request in planned:
            self.used[request.request_id] += request.num_output_tokens - before[request.request_id]
        known = self.live.values() if self.connector else planned  # a load may have failed
        ended = [request for request in known if request.is_finished()]
        for request in ended:
            reasons[request.request_id] = str(request.get_finished_reason())
            del self.live[request.request_id]
        return sorted(request.request_id for request in ended)

    def _offer(
        self, plan: Any, sampled: dict[str, list[int]], before: dict[str, Any]
    ) -> dict[str, list[int]]:
        """The drafts a runner hands over after a step, already cut where a grammar refuses them."""
        if not plan.num_scheduled_tokens or self.rng.random() < 0.03:
            return {}
        offered = {}
        for request_id in plan.num_scheduled_tokens:
            request = before[request_id]
            drafts = self._drafts(request_id, request, request_id in sampled)
            grammar = (
                request.structured_output_request and request.structured_output_request.grammar
            )
            offered[request_id] = grammar.validate_tokens(drafts) if grammar else drafts
        self.scheduler.update_draft_token_ids(self.real.draft_token_ids(offered))
        return offered

    def _drafts(self, request_id: str, request: Any, samples: bool) -> list[int]:
        """What the drafter says will come; n-gram skips rows that did not sample."""
        is_ngram, length = self.config["speculative"]["method"] == "ngram", self.k
        if is_ngram and not samples:
            return []
        if is_ngram:  # it may find little, or nothing
            found = self.rng.choice((0, 1, self.k, self.k, self.rng.randint(0, self.k)))
            length = min(found, self.config["max_model_len"] - request.num_tokens)
        coming = self.script[request_id][request.num_output_tokens :]
        return [
            coming[i]
            if i < len(coming) and self.rng.random() < self.acceptance
            else self.rng.randint(43, 60)
            for i in range(max(0, length))
        ]


def skipped(scheduler: Any) -> list[Any]:
    """The second waiting queue; from 0.31 on there is one queue, and this is empty."""
    return list(getattr(scheduler, "skipped_waiting", ()))


def _resumed(cached: Any) -> list[str]:
    """Who comes back after a preemption; before 0.11.1 a flag per request says so."""
    if hasattr(cached, "resumed_req_ids"):
        return sorted(cached.resumed_req_ids)
    flags = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
    return sorted(request_id for request_id, resumed in flags if resumed)


def observe(scheduler: Any, plan: Any) -> dict[str, Any]:
    """The state between `schedule` and the update: the counters have already advanced."""
    running, manager = scheduler.running, scheduler.kv_cache_manager
    return {
        "num_scheduled_tokens": dict(plan.num_scheduled_tokens),
        "new": [data.req_id for data in plan.scheduled_new_reqs],
        "resumed": _resumed(plan.scheduled_cached_reqs),
        "preempted": sorted(plan.preempted_req_ids or ()),
        "finished_before": sorted(plan.finished_req_ids),
        "running": [request.request_id for request in running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "block_ids": {
            request.request_id: list(manager.get_block_ids(request.request_id)[0])
            for request in running
        },
        "num_computed_tokens": {
            request.request_id: request.num_computed_tokens for request in running
        },
        "free_blocks": manager.block_pool.get_num_free_blocks(),
        **(
            {"skipped_waiting": [request.request_id for request in skipped(scheduler)]}
            if scheduler.lora_config
            else {}
        ),
    }


def status(request: Any) -> str:
    """The format's word for a status of the second queue."""
    words = {
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
        "WAITING_FOR_REMOTE_KVS": "remote_kvs",
    }
    return words.get(request.status.name, request.status.name.lower())
