"""vLLM's own scheduler beside the live engine: the same requests and tokens, every step compared.

Promises: what is decided here is decided by a release's own files (`conformance/real_core`), which
get the arrivals, the aborts and the sampled tokens of the run and nothing of its plans; the first
difference is found in every field that the page shows. A release that is not there is an error
that names those that are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from conformance.features.core.recorder import observe
from conformance.real_core import RealCore, core_of, present
from course.site import live
from mini_vllm.checks import whole

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "real"
"""Where the site's runtime puts the zips of `real_payload.py`; a checkout has none."""
PIN = "0.22.1"
EOS = 2
"""Of no meaning: every request of the live engine ignores it."""
MOST_TOKENS = live.MOST_PROMPT_BYTES + live.MOST_OUTPUTS + 1
"""Of a request, for a model that has no bound; the real scheduler needs one."""

MEANINGS = {
    "tokens": "who runs, and how many tokens each gets",
    "preempted": "who loses its blocks",
    "running": "who is in the running queue",
    "waiting": "who waits, and in which order",
    "tables": "which blocks each request holds",
    "free": "which blocks are free, and in which order they are given out",
}
"""What is compared in each step, in this order."""


def releases() -> list[str]:
    """The releases that can be asked, the oldest first."""
    found = [path.stem.removeprefix("vllm-") for path in FOLDER.glob("vllm-*.zip")]
    return sorted(found, key=lambda v: [int(n) for n in v.split(".")]) or present()


@functools.cache
def core(release: str) -> RealCore:
    """The core of a release. Raises ValueError with those that are here if it is not."""
    known = releases()
    if release not in known:
        there = f"there are {', '.join(known)}" if known else "this site was built without any"
        raise ValueError(f"release={release!r}: not here; {there}")
    path = FOLDER / f"vllm-{release}.zip"
    if not path.is_file():
        return core_of(release)
    if (libraries := str(FOLDER / "libraries.zip")) not in sys.path:
        sys.path.append(libraries)
    return RealCore(path)


def ask(release: str = PIN) -> dict[str, Any]:
    """Decide the page's run on the real scheduler, as far as it has come; see `compared`."""
    return compared(live._session(), release)


def ask_whole(
    settings: dict[str, Any],
    requests: Sequence[Any],
    aborts: Sequence[tuple[int, str]] = (),
    release: str = PIN,
    steps: int = live.MOST_STEPS,
) -> dict[str, Any]:
    """A run of its own with the toy model, to its end or so many steps; see `compared`.

    Raises:
        ValueError: bad settings or requests, or the release is not here.
    """
    asked = [live.Wanted.of(one) for one in requests]
    pairs = [(step, name) for step, name in aborts]
    session = live.Session(live.Settings.of(settings), asked, pairs, model="toy")
    session.go(whole("steps", steps, 1, live.MOST_STEPS))
    return compared(session, release)


def compared(
    session: live.Session, release: str = PIN, watcher: Watcher | None = None
) -> dict[str, Any]:
    """The real scheduler's steps of a run, and the first that differs.

    Returns:
        `release`, `releases`, `steps` (what `MEANINGS` names, for each step), `ours` (the same of
        the run) and `difference`: None, or `step`, `field`, `words`, `real`, `ours`.

    Raises:
        ValueError: the release is not here.
    """
    asked = core(release)
    ours = [_shown(frame) for frame in session.frames[1:]]
    real, fault = decide(asked, session, watcher)
    difference = None
    for step, (one, other) in enumerate(zip(real, ours, strict=False)):
        field = next((name for name in MEANINGS if one[name] != other[name]), None)
        if field is not None:
            difference = {
                "step": step, "field": field, "words": MEANINGS[field],
                "real": one[field], "ours": other[field],
            }  # fmt: skip
            break
    if difference is None and fault:
        difference = {
            "step": len(real), "field": "error", "words": "the real scheduler stops", "real": fault,
            "ours": "goes on",
        }  # fmt: skip
    return {
        "release": asked.version,
        "releases": releases(),
        "steps": real,
        "ours": ours,
        "difference": difference,
    }


class Watcher(Protocol):
    """Sees each step of the real scheduler from inside."""

    def planned(self, scheduler: Any, plan: Any, requests: Mapping[str, Any]) -> None:
        """`schedule` has returned; `requests` are the live ones."""
        ...

    def updated(self, sampled: Mapping[str, int]) -> None:
        """The scheduler knows these tokens."""
        ...


def decide(
    core: RealCore, session: live.Session, watcher: Watcher | None = None
) -> tuple[list[dict[str, Any]], str]:
    """Drive a release's scheduler through the run: its steps, and what stopped it, if anything.

    Once its plans have parted from the run's, it samples the run's tokens all the same, a 0 where
    the run has not come so far. With a `watcher` it goes on to its own end.
    """
    settings = session.settings
    longest = session.engine.scheduler.max_model_len or MOST_TOKENS
    scheduler = core.make_scheduler({**settings.knobs(), "max_model_len": longest})
    prompts = {name: list(request.prompt_token_ids) for name, request in session.requests.items()}
    says = {name: list(request.output_token_ids) for name, request in session.requests.items()}
    wanted = dict(zip(session.ids, session.wanted, strict=True))
    arrivals: dict[int, list[str]] = {}
    for name in session.requests:  # in the order of their arrival
        arrivals.setdefault(session.arrived_at[name], []).append(name)
    live_: dict[str, Any] = {}
    steps: list[dict[str, Any]] = []
    order = list(session.requests)
    for number in range(live.MOST_STEPS):
        over = number >= session.num_steps
        if over and (watcher is None or not scheduler.has_unfinished_requests()):
            break
        for name in arrivals.get(number, ()):
            add = {
                "request_id": name,
                "prompt_token_ids": prompts[name],
                "max_tokens": wanted[name].max_tokens,
                "ignore_eos": True,
                "arrival_time": float(order.index(name)),
                "priority": wanted[name].priority,
            }
            live_[name] = core.make_request(add, settings.block_size, EOS)
            scheduler.add_request(live_[name])
        for at, name in session.aborts:
            if at == number and name in live_:
                core.abort(scheduler, name)
                del live_[name]
        try:
            plan = scheduler.schedule()
            steps.append(_seen(scheduler, plan))
            if watcher is not None:
                watcher.planned(scheduler, plan, live_)
            sampled = {}
            for name in plan.num_scheduled_tokens:
                request = live_[name]
                if request.num_computed_tokens == request.num_tokens:
                    said, place = says[name], request.num_output_tokens
                    sampled[name] = said[place] if place < len(said) else 0
            scheduler.update_from_output(plan, core.runner_output(plan, sampled))
        except (AssertionError, RuntimeError, ValueError, KeyError) as error:
            return steps, f"{type(error).__name__} {error}".strip()
        if watcher is not None:
            watcher.updated(sampled)
        for name in plan.num_scheduled_tokens:
            if live_[name].is_finished():
                del live_[name]
    return steps, ""


def _seen(scheduler: Any, plan: Any) -> dict[str, Any]:
    """A step of the real scheduler, between `schedule` and the update."""
    told = observe(scheduler, plan)
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "tokens": told["num_scheduled_tokens"],
        "preempted": told["preempted"],
        "running": told["running"],
        "waiting": told["waiting"],
        "tables": told["block_ids"],
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "refs": [block.ref_cnt for block in pool.blocks],
        "cached": [int(block.block_hash is not None) for block in pool.blocks],
    }


def _shown(frame: dict[str, Any]) -> dict[str, Any]:
    """The same of a frame of the live engine."""
    tables = frame["pool"]["tables"]
    return {
        "tokens": {entry["id"]: entry["tokens"] for entry in frame["batch"]},
        "preempted": sorted(frame["total"]["preempted"]),
        "running": frame["running"],
        "waiting": frame["waiting"],
        "tables": {name: tables.get(name, []) for name in frame["running"]},
        "free": frame["pool"]["free"],
        "refs": frame["pool"]["refs"],
        "cached": [int(bool(name)) for name in frame["pool"]["hashes"]],
    }
