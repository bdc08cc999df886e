"""The live engine with requests of chosen lengths: an editable timeline of the scheduler.

The same run as `course.site.live`, with the toy model, prompts of a length instead of a text, and
what a preemption took. Promises: every frame is the engine's; nothing is loaded but the engine.
Mirrors `vllm/v1/core/sched/scheduler.py:329` `Scheduler.schedule`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from course.site import live
from course.site.addresses import SOURCE
from course.site.play_pins import RUNTIME_BYTES
from mini_vllm.checks import whole
from mini_vllm.engine import LLMEngine

NEEDS = ("live-views", "live-form")

MOST_TOKENS = 64
"""Of a prompt: a row of the timeline stays on a screen."""

MODEL_BYTES = 6_000_000
"""Of what the live engine loads, the shipped model, which this needs not."""

SETTINGS = live.Settings(
    budget=64, blocks=12, slots=4, block_size=4, threshold=0, chunked=1, caching=0, policy="fcfs"
)
REQUESTS = [{"tokens": 16, "outputs": 8, "arrival": 0, "priority": 0}] * 3
"""Three that fill the pool to the last block: the guide's own run."""


@functools.cache
def _toy() -> Any:
    return LLMEngine(model="toy", num_blocks=2).model


def wanted(request: Any, place: int) -> live.Wanted:
    """A request of `tokens` prompt tokens, in letters of its own: no two share a prefix.

    Raises:
        ValueError: an unknown or missing field, or a value out of its bounds, by name.
    """
    fields = ("tokens", "outputs", "arrival", "priority")
    if not isinstance(request, dict) or set(request) != set(fields):
        raise ValueError(f"request={request!r}: need {', '.join(fields)}")
    tokens = whole("tokens", request["tokens"], 1, MOST_TOKENS)
    return live.Wanted(
        chr(ord("a") + place) * tokens, request["outputs"], request["arrival"], request["priority"]
    )


def play(settings: dict[str, Any], requests: Sequence[Any]) -> dict[str, Any]:
    """A whole run: `settings`, `requests`, `frames`, and `rules` by the names that `why` uses.

    Each frame has `taken`: per preemption which request gave way, to which, and which of
    the victim's blocks the other holds after it (none if it gave up its own).

    Raises:
        ValueError: bad settings or requests, by name.
    """
    asked = [wanted(request, place) for place, request in enumerate(requests)]
    session = live.Session(live.Settings.of(settings), asked, model=_toy())
    session.go(live.MOST_STEPS)
    rules: dict[str, Any] = {}
    frames, before = [], session.frames[0]
    for frame in session.frames:
        frames.append({**frame, "taken": _taken(before, frame)})
        before = frame
    for frame in frames:
        del frame["texts"]
        for decision in (said := [dict(each) for each in frame["why"]]):
            kept = {name: decision.pop(name) for name in ("rule", "vllm", "mini")}
            rules[decision["name"]] = kept
        frame["why"] = said
    named = [
        {"id": name, **request, "prompt_tokens": request["tokens"]}
        for name, request in zip(session.ids, requests, strict=True)
    ]
    return {
        "settings": asdict(session.settings), "requests": named, "frames": frames,
        "rules": rules, "aborts": [], "done": True,
        "bounds": {name: list(bounds) for name, bounds in live.BOUNDS.items()},
    }  # fmt: skip


def _taken(before: dict[str, Any], frame: dict[str, Any]) -> list[dict[str, Any]]:
    """Which request lost blocks to which in a step."""
    found = []
    for decision in frame["why"]:
        if decision["name"].startswith("gives_way"):
            victim, to = decision["about"], decision["numbers"]["to"]
            lost = before["pool"]["tables"].get(victim, [])
            holds = frame["pool"]["tables"].get(to, []) if to != victim else []
            had = before["pool"]["tables"].get(to, [])
            blocks = [block for block in holds if block in lost and block not in had]
            found.append({"victim": victim, "to": to, "blocks": blocks})
    return found


@functools.cache
def document() -> dict[str, Any]:
    """The widget's document: the first run, recorded, and what the page may change."""
    return {
        **play(asdict(SETTINGS), REQUESTS),
        "most": {"requests": 6, "tokens": MOST_TOKENS, "outputs": live.MOST_OUTPUTS},
        "source": SOURCE, "bytes": RUNTIME_BYTES - MODEL_BYTES,
    }  # fmt: skip
