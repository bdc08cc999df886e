"""A run of the real engine that a reader steers: the live engine of the home page.

`Session` is the run; the functions below it are what the page calls, in the browser's worker as
natively. Promises: settings and events decide every state, so a link can hold one; watching
changes no decision; bad input is a ValueError that names it, and nothing of it happens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from course.site import gantt, live_link, live_why
from course.site.live_watch import Pool, Step, WatchedKV
from mini_vllm.checks import whole
from mini_vllm.config import POLICIES, SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.observe.trace import StepRecord, traced_steps
from mini_vllm.outputs import text_of
from mini_vllm.parts import EngineParts
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request

MOST_REQUESTS = 8
MOST_PROMPT_BYTES = 200
MOST_OUTPUTS = 64
MOST_STEPS = 500
"""Bounds of a run: it answers while a reader looks at it, and its link fits an address."""

BOUNDS = {
    "budget": (1, 256), "blocks": (1, 128), "slots": (1, MOST_REQUESTS), "block_size": (1, 64),
    "threshold": (0, 256), "chunked": (0, 1), "caching": (0, 1),
}  # fmt: skip
"""Least and most of every setting that is a number."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the reader may turn, by the names on the page; `blocks` leaves the null block out."""

    budget: int = 32
    """Tokens of one step: `max_num_batched_tokens`."""
    blocks: int = 23
    slots: int = 4
    """Requests running at once: `max_num_seqs`."""
    block_size: int = 8
    threshold: int = 24
    """Most tokens of one request in one step, 0 for any number: `long_prefill_token_threshold`."""
    chunked: int = 1
    caching: int = 1
    policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            whole(name, getattr(self, name), least, most)
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: need one of {', '.join(POLICIES)}")
        if self.slots > self.budget:
            raise ValueError(
                f"slots={self.slots}: need at most budget={self.budget}, so that every running "
                "request can get a token"
            )

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """From names and values; an unknown name is refused."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{name}={value!r}: no such setting; there are {', '.join(known)}")
        return cls(**given)

    def knobs(self) -> dict[str, Any]:
        """The same by the engine's names."""
        return {
            "num_blocks": self.blocks + 1,
            "block_size": self.block_size,
            "enable_prefix_caching": bool(self.caching),
            "max_num_seqs": self.slots,
            "max_num_batched_tokens": self.budget,
            "long_prefill_token_threshold": self.threshold,
            "enable_chunked_prefill": bool(self.chunked),
            "policy": self.policy,
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request as it was asked for: greedy, exactly `max_tokens` outputs, from step `arrival`."""

    prompt: str
    max_tokens: int = 16
    arrival: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) or not self.prompt:
            raise ValueError(f"prompt={self.prompt!r}: need a text of at least one character")
        try:
            size = len(self.prompt.encode("utf-8"))
        except UnicodeEncodeError:
            raise ValueError(f"prompt={self.prompt!r}: need whole characters") from None
        if size > MOST_PROMPT_BYTES:
            raise ValueError(
                f"prompt={self.prompt[:20]!r}...: has {size} bytes, need at most "
                f"{MOST_PROMPT_BYTES}"
            )
        whole("max_tokens", self.max_tokens, 1, MOST_OUTPUTS)
        whole("arrival", self.arrival, 0, MOST_STEPS)
        whole("priority", self.priority, -9, 9)

    @classmethod
    def of(cls, given: Any) -> Wanted:
        """From names and values; an unknown name is refused."""
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or "prompt" not in given:
            raise ValueError(f"request={given!r}: need an object with a prompt")
        for name in given:
            if name not in known:
                raise ValueError(f"request has {name!r}: there are {', '.join(known)}")
        return cls(**given)


@functools.cache
def shipped_engine() -> LLMEngine:
    """An engine with the shipped model, for its model alone.

    Weights and cache in float64: the text then does not depend on who else is in the batch, so it
    stays the same under every setting.
    """
    return LLMEngine(model="byte-llama", dtype="float64", num_blocks=2)


class Session:
    """One run: `frames` holds a frame per step done, after that of the beginning."""

    def __init__(
        self,
        settings: Settings,
        wanted: Sequence[Wanted],
        aborts: Sequence[tuple[int, str]] = (),
        model: Any = None,
        parts: EngineParts | None = None,
    ) -> None:
        """At the beginning: what arrives at step 0 waits.

        Args:
            aborts: (step, id) each, before that step; one for a request that has ended does
                nothing.
            model: default is the shipped one.
            parts: those of a release; default is the pin's. Its block tables are the engine's own.

        Raises:
            ValueError: bad settings or requests, by name.
        """
        if not 1 <= len(wanted) <= MOST_REQUESTS:
            raise ValueError(f"requests={len(wanted)}: need 1 to {MOST_REQUESTS}")
        self.settings, self.wanted, self.aborts = settings, list(wanted), list(aborts)
        self.ids = [chr(ord("A") + number) for number in range(len(wanted))]
        for step, name in self.aborts:
            whole("abort", step, 0, MOST_STEPS)
            if name not in self.ids:
                raise ValueError(f"abort={name!r}: need one of {', '.join(self.ids)}")
        self.engine = LLMEngine(
            model=shipped_engine().model if model is None else model,
            parts=replace(parts or EngineParts(), kv_cache_manager=WatchedKV),
            **settings.knobs(),
        )
        for name, one in zip(self.ids, self.wanted, strict=True):
            self._check(name, one)
        self.requests: dict[str, Request] = {}
        self.arrived_at: dict[str, int] = {}
        self._pending = sorted(zip(self.ids, self.wanted, strict=True), key=lambda p: p[1].arrival)
        self._gone: set[str] = set()
        self._most_computed: dict[str, int] = {}
        self._hash_names: dict[int, str] = {}
        self._counters = dict.fromkeys(("steps", "computed", "hits", "again", "preemptions"), 0)
        self._steps: Iterator[StepRecord] = iter(())
        self._watched: Step | None = None
        self.engine.observers.append(self._planned)
        self._arrive()
        self.frames: list[dict[str, Any]] = [self._first_frame()]

    def _check(self, name: str, one: Wanted) -> None:
        """Refuse a request that could never run, before anything runs."""
        prompt = self.engine.tokenizer.encode(one.prompt)
        params = SamplingParams(max_tokens=one.max_tokens, ignore_eos=True)
        try:
            self.engine.inputs.check_fits(prompt, params)
        except ValueError as error:
            raise ValueError(f"request {name}: {error}") from None
        whole_chunk = len(prompt) + one.max_tokens - 1  # after a preemption, outputs included
        if self.settings.threshold:
            whole_chunk = min(whole_chunk, self.settings.threshold)
        if not self.settings.chunked and whole_chunk > self.settings.budget:
            raise ValueError(
                f"budget={self.settings.budget}: with chunked=0 request {name} may need "
                f"{whole_chunk} in one step"
            )

    # ------------------------------------------------------------------ steps

    @property
    def num_steps(self) -> int:
        """Steps done."""
        return len(self.frames) - 1

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do, or the bound of a run is reached."""
        idle = not self.engine.has_unfinished_requests() and not self._pending
        return idle or self.num_steps >= MOST_STEPS

    def step(self) -> dict[str, Any] | None:
        """One step of the engine; its frame, or None when nothing is left to do."""
        if self.is_done:
            return None
        record = next(self._steps, None)
        if record is None:  # the engine was idle: its trace begins anew
            self._steps = traced_steps(self.engine)
            record = next(self._steps)
        self.frames.append(self._frame(record))
        self._arrive()
        return self.frames[-1]

    def go(self, at: int) -> None:
        """Step until `at` steps are done, or nothing is left to do."""
        while self.num_steps < at and self.step() is not None:
            pass

    def _arrive(self) -> None:
        """Before a step: who arrives now, then who is aborted now.

        An engine that would be idle does not wait for the next arrival's step.
        """
        now = len(getattr(self, "frames", [0])) - 1
        while True:
            step = now
            if self._pending and not self.engine.has_unfinished_requests():
                step = max(step, self._pending[0][1].arrival)
            while self._pending and self._pending[0][1].arrival <= step:
                self._queue(*self._pending.pop(0), now)
            for at, name in self.aborts:
                if at == now:
                    self._abort(name)
            if self.engine.has_unfinished_requests() or not self._pending:
                break
        self._kv.calls.clear()

    def _queue(self, name: str, one: Wanted, now: int) -> None:
        self.engine.add_request(
            one.prompt,
            SamplingParams(max_tokens=one.max_tokens, ignore_eos=True),
            request_id=name,
            priority=one.priority,
            arrival_time=float(len(self.requests)),
        )
        self.requests[name] = self.engine.requests[name]
        self.arrived_at[name] = now
        self._most_computed[name] = 0

    @property
    def _kv(self) -> WatchedKV:
        kv = self.engine.scheduler.kv
        assert isinstance(kv, WatchedKV)
        return kv

    def _abort(self, name: str) -> None:
        ended = name in self.requests and self.requests[name].is_finished
        if not ended and name not in self._gone:
            self._gone.add(name)
            self._pending = [entry for entry in self._pending if entry[0] != name]
            self.engine.abort_request(name)

    # ------------------------------------------------------------------ frames

    def _planned(self, plan: SchedulerOutput) -> None:
        """The engine's observer: what `schedule` did and left, before the step runs."""
        self._watched = Step.of(self._kv, self.engine, plan)

    def _first_frame(self) -> dict[str, Any]:
        return {
            "step": -1,
            "total": None,
            "cells": {},
            "batch": [],
            "running": [],
            "waiting": list(self.requests),
            "pool": Pool.of(self._kv).shown(self._hash_names),
            "texts": dict.fromkeys(self.requests, ""),
            "counters": dict(self._counters),
            "why": [],
        }

    def _frame(self, record: StepRecord) -> dict[str, Any]:
        """What a step did, as JSON types; `total` and `cells` are those of `gantt.record`.

        Queues and pool are those of after `schedule()` and before the update, as there.
        """
        assert self._watched is not None
        number, watched = self.num_steps, self._watched
        cells = {
            name: gantt.cell_of(record, number, request, self._most_computed[name])
            for name, request in self.requests.items()
            if name in watched.known or name in record.finished
        }
        again = sum(cell["recomputed"] for cell in cells.values())
        for name, cell in cells.items():
            end = cell["computed"] + cell["tokens"]
            self._most_computed[name] = max(self._most_computed[name], end)
        total = gantt.totals_of(record, number, self.engine)
        self._counters["steps"] += 1
        self._counters["computed"] += total["scheduled"]
        self._counters["hits"] += total["hits"]
        self._counters["again"] += again
        self._counters["preemptions"] += len(record.preempted)
        why = live_why.explain(watched, record, self.engine, self.requests)
        return {
            "step": number,
            "total": total,
            "cells": cells,
            "batch": [{"id": name, **_entry(cells[name])} for name in record.num_scheduled_tokens],
            "running": list(record.running),
            "waiting": list(record.waiting),
            "pool": watched.pool.shown(self._hash_names, watched),
            "texts": {name: self._text(request) for name, request in self.requests.items()},
            "counters": dict(self._counters),
            "why": [asdict(decision) for decision in why],
        }

    def _text(self, request: Request) -> str:
        """The text so far; bytes of an unfinished character are held back."""
        text = text_of(request, self.engine.tokenizer)
        return text if request.is_finished else text.rstrip("\ufffd")

    def document(self) -> dict[str, Any]:
        """The whole run so far, as JSON types."""
        return {
            "settings": asdict(self.settings),
            "bounds": {name: list(bounds) for name, bounds in BOUNDS.items()},
            "requests": [
                {
                    "id": name,
                    **asdict(one),
                    "arrived": self.arrived_at.get(name),
                    "prompt_tokens": len(self.engine.tokenizer.encode(one.prompt)),
                }
                for name, one in zip(self.ids, self.wanted, strict=True)
            ],
            "aborts": [[step, name] for step, name in self.aborts],
            "frames": self.frames,
            **self.place(),
        }

    def place(self) -> dict[str, Any]:
        """Where the run stands, and the link to it."""
        link = live_link.written(
            asdict(self.settings), [asdict(one) for one in self.wanted], self.aborts, self.num_steps
        )
        return {"at": self.num_steps, "done": self.is_done, "link": link}


def _entry(cell: dict[str, Any]) -> dict[str, Any]:
    """Of a cell, what the batch shows."""
    return {name: cell[name] for name in ("tokens", "kind", "hit", "computed", "known", "sampled")}


# ---------------------------------------------------------------------- what the page calls

_current: list[Session] = []
"""The run of the page: none or one."""


def default_requests() -> list[Wanted]:
    """The requests of the recorded run on the home page."""
    return [
        Wanted(str(one.prompt), one.max_tokens, one.step, one.priority)
        for one in gantt.timeline_arrivals()
    ]


def defaults() -> dict[str, Any]:
    """The settings, bounds and requests that the page begins with: those of its recorded run."""
    return {
        "settings": asdict(Settings()),
        "bounds": {name: list(bounds) for name, bounds in BOUNDS.items()},
        "requests": [asdict(one) for one in default_requests()],
        "most": {"requests": MOST_REQUESTS, "bytes": MOST_PROMPT_BYTES, "outputs": MOST_OUTPUTS},
    }


def start(
    settings: dict[str, Any] | None = None,
    requests: Sequence[Any] | None = None,
    aborts: Sequence[Sequence[Any]] = (),
    at: int = 0,
    model: Any = None,
) -> dict[str, Any]:
    """Begin a run anew, and replay it to step `at`; the document of the run.

    Raises:
        ValueError: anything bad, by name; the run before it stays.
    """
    whole("at", at, 0, MOST_STEPS)
    wanted = default_requests() if requests is None else [Wanted.of(one) for one in requests]
    pairs = []
    for entry in aborts:
        if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
            raise ValueError(f"abort={entry!r}: need [step, id]")
        pairs.append((entry[0], entry[1]))
    made = Session(Settings.of(settings or {}), wanted, pairs, model)
    made.go(at)
    _current[:] = [made]
    return made.document()


def step(count: int = 1) -> dict[str, Any]:
    """`count` steps more: `{"frames": [...], "at", "done", "link"}`."""
    session, before = _session(), _session().num_steps
    session.go(before + whole("count", count, 1, MOST_STEPS))
    return {"frames": session.frames[before + 1 :], **session.place()}


def add(
    prompt: str, max_tokens: int = 16, priority: int = 0, at: int | None = None
) -> dict[str, Any]:
    """A further request that arrives at step `at` (default: now), where the run then stands."""
    session = _session()
    arrival = session.num_steps if at is None else whole("at", at, 0, session.num_steps)
    wanted = [*session.wanted, Wanted(prompt, max_tokens, arrival, priority)]
    return _again(session, wanted, session.aborts, arrival)


def abort(request_id: str, at: int | None = None) -> dict[str, Any]:
    """End a request before step `at` (default: now), where the run then stands."""
    session = _session()
    step = session.num_steps if at is None else whole("at", at, 0, session.num_steps)
    return _again(session, session.wanted, [*session.aborts, (step, request_id)], step)


def state() -> dict[str, Any]:
    """The document of the run as it stands."""
    return _session().document()


def open_link(link: str) -> dict[str, Any]:
    """Begin the run of a link and replay it to the link's step.

    Raises:
        ValueError: no link of ours, or one with bad values, by name; the run before it stays.
    """
    return start(**live_link.read(link))


def _session() -> Session:
    if not _current:
        raise ValueError("no run is open: call start first")
    return _current[0]


def _again(
    session: Session, wanted: list[Wanted], aborts: list[tuple[int, str]], at: int
) -> dict[str, Any]:
    made = Session(replace(session.settings), wanted, aborts, session.engine.model)
    made.go(at)
    _current[:] = [made]
    return made.document()
