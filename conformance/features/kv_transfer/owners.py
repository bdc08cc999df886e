"""Who has a request's blocks, moment by moment, on the real scheduler.

    python -m conformance.features.kv_transfer.owners FILE

A moment is what happens before a plan, in it, or in its update: the `events` of one request in the
order in which the scheduler hears them, and `owner`, read from the real scheduler when the moment
is over: "pool", "request", "wire" (a load writes), "peer" (another engine reads on) or both, "wire
and peer". `busy` is what the worker still has under way, whatever the scheduler believes. Where an
assertion of the scheduler itself fails, `owner` is "dies" and `line` says where.

`NAMED` are twelve workloads of one request, `STRAYS` those in which a report comes that is about
nothing. Besides, `SEEDS` are random workloads; of each different sequence of moments one is kept.
"""

from __future__ import annotations

import copy
import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from conformance.features.kv_transfer.recorder import generate_deaths, generate_failures
from conformance.real_core import core_of
from conformance.recorders import connector
from conformance.recorders.run import RefusedError, Run, Stalled
from conformance.recorders.source import Real

Moment = dict[str, Any]
LATE = {"external_tokens": 6, "load_async": True, "known_at": 0, "load_steps": 3}
"""Six of eight tokens come three steps after they were asked for."""
NONE = {**LATE, "external_tokens": 0, "load_steps": None}
NAMED: dict[str, dict[str, Any]] = {
    "computed here and let go, and a send is reported": {
        "kv": {**NONE, "send_steps": 2, "unasked": "report"},
    },
    "loaded, and its blocks are read on": {"kv": {**LATE, "send_steps": 2}},
    "computed here, and its blocks are read on": {"kv": {**NONE, "send_steps": 3}},
    "its client leaves while it loads": {"kv": LATE, "abort": 2},
    "its client leaves when it is loaded": {"kv": LATE, "abort": 4, "max_num_seqs": 1},
    "its client leaves, and the remote never answers": {
        "kv": {**LATE, "load_steps": None}, "abort": 2, "most": 12,
    },
    "nothing of its load can be used": {"kv": {**LATE, "fails": {"blocks": [0], "times": 1}}},
    "half of its load can be used": {"kv": {**LATE, "fails": {"blocks": [1], "times": 1}}},
    "its load fails, and that ends it": {
        "kv": {**LATE, "fails": {"blocks": [0], "times": 1}}, "policy": "fail",
    },
    "left while it loads and kept: received, then sent": {
        "kv": {**LATE, "load_steps": 3, "send_steps": 3, "unasked": "send"}, "abort": 2,
    },
    "left while it loads and kept: sent, then received": {
        "kv": {**LATE, "load_steps": 5, "send_steps": 1, "unasked": "send"}, "abort": 2,
    },
    "left while it loads and kept: both in one report": {
        "kv": {**LATE, "load_steps": 4, "send_steps": 2, "unasked": "send"}, "abort": 2,
    },
}  # fmt: skip
STRAYS: dict[str, dict[str, Any]] = {
    "computed here, and a send is reported": {"kv": NONE, "stray": (0, "sent")},
    "computed here, and a load is reported": {"kv": NONE, "stray": (0, "received")},
    "while it loads a send is reported": {"kv": LATE, "stray": (1, "sent")},
    "when it is read on a load is reported": {
        "kv": {**NONE, "send_steps": 3}, "stray": (2, "received"),
    },
    "its client leaves while it loads, and a send is reported": {
        "kv": {**LATE, "load_steps": 4}, "abort": 2, "stray": (3, "sent"),
    },
}  # fmt: skip
"""The step whose update has a report besides, and which."""
REFUSED = (160_028, 160_032, 161_379, 162_300)
"""Found among some hundred: a request whose load was void, in all or in part, is looked at and not
admitted."""
SEEDS = (*range(153_000, 153_200), *REFUSED)


def workload_of(story: dict[str, Any]) -> dict[str, Any]:
    """One request of eight tokens in a pool of nine blocks of four, and what happens to it."""
    add = {
        "request_id": "r", "prompt_token_ids": list(range(3, 11)), "max_tokens": 2, "priority": 0,
        "arrival_time": 0.0, "ignore_eos": True, "kv": {"send_steps": None, **story["kv"]},
    }  # fmt: skip
    events = [{"step": 0, "add": [add], "abort": []}]
    if "abort" in story:
        events.append({"step": story["abort"], "add": [], "abort": ["r"]})
    return {
        "seed": 0, "eos_token_id": 2,
        "config": {
            "num_blocks": 10, "block_size": 4, "max_num_seqs": story.get("max_num_seqs", 3),
            "max_num_batched_tokens": 12, "long_prefill_token_threshold": 0,
            "enable_prefix_caching": True, "enable_chunked_prefill": True, "max_model_len": 64,
            "policy": "fcfs", "kv_load_failure_policy": story.get("policy", "recompute"),
        },
        "events": events, "outputs": {"r": [7, 7]},
    }  # fmt: skip


class Watched(Run):
    """A run that notes each moment of each request."""

    def __init__(self, workload: dict[str, Any], real: Real) -> None:
        super().__init__(workload, real)
        self.moments: dict[str, list[Moment]] = {name: [] for name in self.script}
        self._known: dict[str, Any] = {}
        self._status: dict[str, str] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._kept: list[str] = []
        self._for_ever: set[str] = set()
        finished = self.connector.request_finished

        def request_finished(request: Any, block_ids: list[int]) -> tuple[bool, None]:
            answer: tuple[bool, None] = finished(request, block_ids)
            if answer[0]:
                self._kept.append(request.request_id)
            return answer

        self.connector.request_finished = request_finished

    def _apply(self) -> dict[str, str]:
        reasons = super()._apply()
        self._known |= self.live
        self._note({name: ["aborted"] for name in reasons})
        return reasons

    def _observe(self, plan: Any, held: dict[str, list[int]]) -> dict[str, Any]:
        came: dict[str, list[str]] = {}
        for name, request in self._known.items():
            before, after = self._status.get(name, "WAITING"), request.status.name
            events = came.setdefault(name, [])
            walked = name in self._loaded - self.scheduler.finished_recving_kv_req_ids
            if walked and after[:8] != "FINISHED":
                events.append("walked")
            if after == "PREEMPTED" and before == "RUNNING":
                events.append("preempted")
            if after == "WAITING_FOR_REMOTE_KVS" and (before != after or walked):
                events.append("load")
                if self.connector.script[name]["load_steps"] is None:
                    self._for_ever.add(name)
            if after == "RUNNING" and before != after:
                events.append("runs")
        self._note(came)
        return super()._observe(plan, held)

    def _update(
        self, plan: Any, sampled: dict[str, list[int]], reasons: dict[str, str]
    ) -> list[str]:
        step = self.steps[-1]
        reports = (("received", "finished_recving"), ("sent", "finished_sending"))
        live = dict(self.live)
        try:
            ended = super()._update(plan, sampled, reasons)
        except RefusedError as error:
            trace, name = error.__cause__.__traceback__ if error.__cause__ else None, None
            while trace is not None:
                name = trace.tb_frame.f_locals.get("req_id", name)
                line, trace = trace.tb_lineno, trace.tb_next
            assert name is not None
            events = [word for word, ids in reports if name in step[ids]]
            self._note({name: events}, {"owner": "dies", "line": line})
            raise
        came: dict[str, list[str]] = {}
        failed = self.scheduler.failed_recving_kv_req_ids - self._failed
        for name, request in live.items():
            events = came.setdefault(name, [])
            if name in failed:
                events.append("failed in part" if request.num_computed_tokens else "failed")
            if request.is_finished():
                is_error = request.status.name == "FINISHED_ERROR"
                events += ["failed", "ended"] if is_error else ["ended"]
        for word, ids in reports:
            for name in step[ids]:
                came.setdefault(name, []).append(word)
        self._note(came)
        return ended

    def _note(self, came: dict[str, list[str]], told: Moment | None = None) -> None:
        """A moment of each request to which something has happened; the state behind it."""
        for name, events in came.items():
            if not events:
                continue
            if name in self._kept:
                last = next(i for i, word in enumerate(events) if word in ("aborted", "ended"))
                events[last] += " and kept"
            busy = self._busy(name)
            moment = {"step": self.connector.now, "events": events, "owner": self._owner(name),
                      "busy": busy}  # fmt: skip
            self.moments[name].append(moment | (told or {}))
        self._kept.clear()
        self._status = {name: request.status.name for name, request in self._known.items()}
        self._loaded = set(self.scheduler.finished_recving_kv_req_ids)
        self._failed = set(self.scheduler.failed_recving_kv_req_ids)

    def _busy(self, name: str) -> list[str]:
        """What the worker has under way for a request."""
        loads = self._for_ever | self.connector.loads.keys()
        under_way = (("wire", loads), ("peer", self.connector.sends))
        return [word for word, names in under_way if name in names]

    def _owner(self, name: str) -> str:
        scheduler = self.scheduler
        request = scheduler.requests.get(name)
        if request is None or not scheduler.kv_cache_manager.get_block_ids(name)[0]:
            return "pool"
        if request.is_finished():
            return " and ".join(self._busy(name))
        loading = request.status.name == "WAITING_FOR_REMOTE_KVS"
        arrived = name in scheduler.finished_recving_kv_req_ids
        return "wire" if loading and not arrived else "request"


def story_of(
    workload: dict[str, Any], real: Real, most: int | None = None,
    stray: tuple[int, str] | None = None,
) -> Watched:  # fmt: skip
    """One workload, up to its end, its death, `most` steps, or where the scheduler stands."""
    run = Watched(copy.deepcopy(workload), real)
    reports = run.connector.reports

    def with_stray() -> tuple[list[str], list[str]]:
        found: tuple[list[str], list[str]] = reports()
        if stray is not None and run.connector.now == stray[0]:
            found[stray[1] == "sent"].append("r")
        return found

    run.connector.reports = with_stray
    with suppress(RefusedError, Stalled):
        run.recorded(most)
    return run


def record(real: Real | None = None) -> Iterator[dict[str, Any]]:
    """The twelve, the strays, then one of each other sequence of moments."""
    real = real or core_of()
    seen = set()
    for name, story in NAMED.items():
        moments = story_of(workload_of(story), real, story.get("most", 60)).moments["r"]
        seen.add(_events(moments))
        yield {"name": name, "workload": workload_of(story), "moments": moments}
    for name, story in STRAYS.items():
        run = story_of(workload_of(story), real, 60, story["stray"])
        yield {"name": name, "stray": story["stray"][1], "moments": run.moments["r"]}
    for seed in SEEDS:
        for make in (generate_deaths, generate_failures, connector.generate):
            workload = make(seed)
            if not any(add.get("kv") for event in workload["events"] for add in event["add"]):
                continue
            run = story_of(workload, real, 300)
            for name, moments in run.moments.items():
                if not moments or _events(moments) in seen or not _is_told(moments):
                    continue
                seen.add(_events(moments))
                yield {"name": f"{make.__name__} {seed}, {name}", "moments": moments}


def _events(moments: list[Moment]) -> tuple[Any, ...]:
    return tuple(tuple(moment["events"]) for moment in moments)


def _is_told(moments: list[Moment]) -> bool:
    """Whether its events say all: a connector that keeps a request without blocks is left out."""
    before = "pool"
    for moment in moments:
        if before == "pool" and any("kept" in word for word in moment["events"]):
            return False
        before = moment["owner"]
    return True


def write(path: Path) -> int:
    """All stories into a file; how many."""
    stories = list(record())
    lines = "".join(json.dumps(story, separators=(",", ":")) + "\n" for story in stories)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, 0) as file:
        file.write(lines.encode())
    return len(stories)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "stories")
