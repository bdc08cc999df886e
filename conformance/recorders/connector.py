"""Workloads with a KV connector: prefixes that lie elsewhere, loads and sends that take steps.

`add.kv` scripts what the connector says of a request: `external_tokens` that it could load, from
the step `known_at` on, at once or in `load_steps` steps (`load_async`), and `send_steps` for which
the blocks of a request that ended are kept. A step adds `finished_recving` and `finished_sending`,
which its update reports, and `skipped`, the second queue by status. `block_ids` has every request
that holds blocks.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from conformance import recording, workloads
from conformance.real_core.stand_ins import Given, Strict
from conformance.recorders.run import Run, Stalled, skipped
from conformance.recorders.source import Real, installed


class Connector(Strict):
    """What the real scheduler asks of its connector; a pure function of the script."""

    def __init__(self, script: Mapping[str, Mapping[str, Any]]) -> None:
        self.script = script
        self.now = 0
        """The step that is under way."""
        self.loads: dict[str, int] = {}
        """Loads under way: the step whose update reports each."""
        self.sends: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, found: int) -> tuple[int | None, bool]:
        """Tokens beyond those that the cache has, and whether they come later; None: not known."""
        kv = self.script.get(request.request_id)
        if kv is None:
            return 0, False
        if self.now < kv["known_at"]:
            return None, False
        more = max(0, kv["external_tokens"] - found)
        return more, bool(kv["load_async"] and more)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """Begin to load what was promised."""
        kv = self.script.get(request.request_id)
        if kv is not None and external and kv["load_async"]:
            self.loads[request.request_id] = self.now + kv["load_steps"]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Whether the blocks are kept until they are sent."""
        kv = self.script.get(request.request_id)
        ended = str(request.get_finished_reason()) in ("stop", "length")
        if kv is None or kv["send_steps"] is None or not ended:
            return False, None
        self.sends[request.request_id] = self.now + kv["send_steps"]
        return True, None

    def reports(self) -> tuple[list[str], list[str]]:
        """Ids whose load, and whose send, the update of this step reports."""
        done = []
        for under_way in (self.loads, self.sends):
            ids = sorted(r for r, step in under_way.items() if step <= self.now)
            for request_id in ids:
                del under_way[request_id]
            done.append(ids)
        return done[0], done[1]

    def output(self, recving: list[str], sending: list[str]) -> Any:
        """`KVConnectorOutput`; lists, since upstream walks sets in no order."""
        return Given(
            "kv_connector_output",
            {
                "finished_recving": recving, "finished_sending": sending, "failed_recving": (),
                "invalid_block_ids": set(), "kv_connector_stats": None, "kv_cache_events": None,
                "kv_connector_worker_meta": None,
            },
        )  # fmt: skip

    def build_connector_meta(self, plan: Any) -> None:
        """What the worker would be told."""

    def get_kv_connector_stats(self) -> None:
        """Nothing is counted."""

    def on_new_request(self, request: Any) -> None:
        """Nothing is looked up before it is asked."""

    def update_connector_output(self, output: Any) -> None:
        """The scheduler reads the output itself."""

    def take_events(self) -> tuple[()]:
        """No KV events."""
        return ()


def generate(seed: int) -> dict[str, Any]:
    """The workload of a seed: that of `workloads.generate`, with `add.kv` for most."""
    workload = workloads.generate(seed)
    rng = random.Random(seed * 29 + 17)
    slowest, later = rng.choice((1, 3, 8)), rng.choice((0, 0, 2, 6))
    for event in workload["events"]:
        for add in event["add"]:
            if rng.random() < 0.3:
                continue
            length = len(add["prompt_token_ids"])
            load_async = rng.random() < 0.6
            most = length if load_async and length > 1 else length - 1
            add["kv"] = {
                "external_tokens": rng.choice((0, most, rng.randint(0, most))),
                "load_async": load_async,
                "known_at": event["step"] + rng.choice((0, 0, rng.randint(0, later))),
                "load_steps": rng.randint(0, slowest) if load_async else None,
                "send_steps": rng.randint(1, slowest) if rng.random() < 0.4 else None,
            }
    return workload


def record(seeds: Iterable[int], real: Real | None = None) -> Iterator[recording.Recording]:
    """Each seed on the real scheduler, every field of every step."""
    for seed in seeds:
        yield run(generate(seed), real)


def run(workload: dict[str, Any], real: Real | None = None) -> recording.Recording:
    """One workload. Where the scheduler stands still for ever, the head of the queue is aborted.

    Raises:
        RefusedError: the real scheduler itself fails.
        Stalled: it stands still with every request aborted.
    """
    real = real or installed()
    tried = copy.deepcopy(workload)
    left = len(workload["outputs"])
    while True:
        once = Run(copy.deepcopy(tried), real)
        try:
            return once.recorded()
        except Stalled:
            scheduler, left = once.scheduler, left - 1
            if left < 0:  # each abort ends a request
                raise
            head = next(iter([*skipped(scheduler), *scheduler.waiting]))
            tried["events"] = [
                *tried["events"],
                {"step": len(once.steps), "add": [], "abort": [head.request_id]},
            ]
