"""A run of the engine as a chart: one row per request, one column per step.

`record` steps an engine and notes what every request got in every step, as JSON types; `draw`
turns that into an SVG; `engine_timeline` is one run that shows everything. Promises: recording
changes no decision, the same run gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.observe.trace import StepRecord, traced_steps
from mini_vllm.request import Request

KINDS = ("waiting", "prefill", "hit", "recompute", "decode", "starved", "preempted")
"""What a request can be to a step, in the order of a legend:

- `waiting`: in the queue, before its first admission or after a preemption;
- `prefill`: prompt tokens computed, none of them from the cache;
- `hit`: admitted with prefix-cache hits, and the rest of its chunk computed;
- `recompute`: tokens computed a second time after a preemption, with or without hits;
- `decode`: the newest output token computed, alone;
- `starved`: running, but the step ended before its turn;
- `preempted`: evicted in this step; it computes nothing.
"""

WORDS = {
    "waiting": "waiting",
    "prefill": "prefill",
    "hit": "from the prefix cache",
    "recompute": "computed again",
    "decode": "decode",
    "starved": "running, given nothing",
    "preempted": "preempted",
}
_COLORS = {
    "waiting": GREY,
    "prefill": BLUE,
    "hit": PURPLE,
    "recompute": ORANGE,
    "decode": GREEN,
    "starved": GREY,
    "preempted": RED,
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a run: added before step `step`, greedy, exactly `max_tokens` outputs."""

    name: str
    prompt: str | tuple[int, ...]
    max_tokens: int
    step: int = 0
    priority: int = 0


# ---------------------------------------------------------------------- recording


def record(
    engine: LLMEngine, arrivals: Sequence[Arrival], title: str = "", max_steps: int = 1000
) -> dict[str, Any]:
    """Run `arrivals` on an idle engine to the end and note every step.

    Requests whose step has not come when the engine runs empty are added at once, so no step is
    empty.

    Args:
        engine: idle; any model, any parts.
        arrivals: the requests, with different names.
        title: kept in the result.
        max_steps: refuse to go on after this many.

    Returns:
        JSON types only::

            {"title": str, "config": {...}, "steps": number of steps,
             "requests": [{"id", "arrival", "prompt_tokens", "output_tokens", "preemptions",
                           "cells": [{"step", "kind", "tokens", "hit", "recomputed",
                                      "computed", "known", "blocks", "sampled", "finish"}]}],
             "totals": [{"step", "scheduled", "budget", "running", "waiting", "free_blocks",
                         "admitted", "preempted", "hits", "finished"}]}

        A request has one cell per step from its arrival to its end. `kind` is one of `KINDS`;
        `tokens` computed in the step; `hit` tokens adopted from the cache at admission;
        `recomputed` those of `tokens` that had been computed before a preemption; `computed` the
        counter before the step, hits included; `known` is `num_tokens` before it; `blocks` the
        ids in its table; `sampled` whether it emitted a token; `finish` the reason, else null.
        In `totals`, `running` and `waiting` are counts after `schedule()`, `admitted` and
        `preempted` lists of ids, `hits` a number of tokens, `finished` a list of ids.

    Raises:
        ValueError: two arrivals with one name, or a request the engine refuses.
        RuntimeError: not finished after `max_steps` steps.
    """
    if len({arrival.name for arrival in arrivals}) != len(arrivals):
        raise ValueError("arrivals: two have the same name; need a name of its own for each")
    pending = sorted(arrivals, key=lambda arrival: arrival.step)
    requests: dict[str, Request] = {}
    arrived_at: dict[str, int] = {}
    cells: dict[str, list[dict[str, Any]]] = {arrival.name: [] for arrival in arrivals}
    most_computed = dict.fromkeys(cells, 0)
    totals: list[dict[str, Any]] = []

    def admit_arrivals() -> None:
        step = len(totals)
        if pending and not engine.has_unfinished_requests():
            step = max(step, pending[0].step)
        while pending and pending[0].step <= step:
            arrival = pending.pop(0)
            engine.add_request(
                arrival.prompt,
                SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
                request_id=arrival.name,
                priority=arrival.priority,
            )
            requests[arrival.name] = engine.requests[arrival.name]
            arrived_at[arrival.name] = len(totals)

    admit_arrivals()
    while engine.has_unfinished_requests():
        for step in traced_steps(engine):
            if len(totals) == max_steps:
                raise RuntimeError(f"not finished after max_steps={max_steps}")
            for name, request in requests.items():
                row = cells[name]
                if not (row and row[-1]["finish"]):
                    row.append(cell_of(step, len(totals), request, most_computed[name]))
                    end = row[-1]["computed"] + row[-1]["tokens"]
                    most_computed[name] = max(most_computed[name], end)
            totals.append(totals_of(step, len(totals), engine))
            admit_arrivals()
    return {
        "title": title,
        "config": config_of(engine),
        "steps": len(totals),
        "requests": [
            {
                "id": arrival.name,
                "arrival": arrived_at[arrival.name],
                "prompt_tokens": requests[arrival.name].num_prompt_tokens,
                "output_tokens": requests[arrival.name].num_output_tokens,
                "preemptions": requests[arrival.name].num_preemptions,
                "cells": cells[arrival.name],
            }
            for arrival in arrivals
        ],
        "totals": totals,
    }


def config_of(engine: LLMEngine) -> dict[str, Any]:
    """What of an engine's configuration decides a run's schedule."""
    cache, scheduler = engine.config.cache, engine.config.scheduler
    return {
        "num_blocks": cache.num_blocks,
        "block_size": cache.block_size,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "policy": scheduler.policy,
    }


def cell_of(step: StepRecord, number: int, request: Request, most_computed: int) -> dict[str, Any]:
    """What one request was to one step; called after the step."""
    name = request.request_id
    tokens = step.num_scheduled_tokens.get(name, 0)
    hit = step.num_cached_tokens.get(name, 0)
    sampled = name in step.sampled
    computed = step.num_computed_tokens.get(name)
    if computed is None:
        computed = request.num_computed_tokens
    known = request.num_tokens - sampled
    if name in step.preempted:
        kind = "preempted"
    elif not tokens:
        kind = "starved" if name in step.running else "waiting"
    elif computed < most_computed:
        kind = "recompute"
    elif hit:
        kind = "hit"
    elif computed >= request.num_prompt_tokens:
        kind = "decode"
    else:
        kind = "prefill"
    return {
        "step": number,
        "kind": kind,
        "tokens": tokens,
        "hit": hit,
        "recomputed": max(0, min(computed + tokens, most_computed) - computed),
        "computed": computed,
        "known": known,
        "blocks": list(step.block_ids.get(name, ())),
        "sampled": sampled,
        "finish": step.finished.get(name),
    }


def totals_of(step: StepRecord, number: int, engine: LLMEngine) -> dict[str, Any]:
    """One step's sums."""
    return {
        "step": number,
        "scheduled": sum(step.num_scheduled_tokens.values()),
        "budget": engine.config.scheduler.max_num_batched_tokens,
        "running": len(step.running),
        "waiting": len(step.waiting),
        "free_blocks": step.free_blocks,
        "admitted": [*step.new, *step.resumed],
        "preempted": list(step.preempted),
        "hits": sum(step.num_cached_tokens.values()),
        "finished": list(step.finished),
    }


def timeline_engine() -> LLMEngine:
    """The engine of `engine_timeline`, idle. Scheduling only: a step takes microseconds."""
    return LLMEngine(
        model="toy",
        num_blocks=24,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        long_prefill_token_threshold=24,
    )


def timeline_arrivals() -> list[Arrival]:
    """The requests of `engine_timeline`."""
    system = "The scheduler decides which of the requests run next. "
    return [
        Arrival("A", "Each step ", 24),
        Arrival("B", system + "Each block is a", 10),
        Arrival("C", "The queue is ", 20, step=2),
        Arrival("D", system + "Each step takes", 12, step=6),
        Arrival("E", "When the cache is full, the engine frees the blocks of", 14, step=7),
        Arrival("F", system + "Each request i", 8, step=9),
        Arrival("G", "A prefix is a", 6, step=11),
    ]


def engine_timeline() -> dict[str, Any]:
    """One run with everything in it, for the book: chunks, hits, a preemption, a queue.

    `conformance/test_live.py` runs the same requests through the real scheduler and compares.
    """
    title = "Seven requests share one engine: 32 tokens a step, 23 blocks of 8 tokens, 4 slots"
    return record(timeline_engine(), timeline_arrivals(), title)


# ---------------------------------------------------------------------- drawing


def draw(
    data: Mapping[str, Any],
    *,
    description: str = "",
    first_step: int = 0,
    rows: Mapping[str, str] | None = None,
    totals: Sequence[str] = ("scheduled", "free_blocks"),
) -> str:
    """The chart of a recorded run as an SVG document.

    Args:
        data: what `record` returned.
        description: for screen readers; the default is made from the data.
        first_step: number shown over the first column; 0 as in `data`.
        rows: words shown for a request id; the default is the id with its lengths.
        totals: which per-step numbers stand below the rows: "scheduled", "running", "waiting",
            "free_blocks", "hits".
    """
    num_steps, requests = data["steps"], data["requests"]
    left, top, row_height = 150, 58, 30
    width = min(90.0, (780 - left - 12) / max(num_steps, 1))
    height = top + row_height * len(requests) + 20 * len(totals) + 52
    svg = Svg(780, height, data["title"], description or describe(data))
    svg.text(12, 22, data["title"], bold=True)
    every = 1 if width >= 17 else 5
    for step in range(num_steps):
        x = left + step * width
        if step % every == 0:
            number = str(step + first_step)
            svg.text(x + width / 2, top - 8, number, size=10, anchor="middle", css="soft")
    svg.text(left - 10, top - 8, "step", size=10, anchor="end", css="soft")
    for row, request in enumerate(requests):
        y = top + row * row_height
        default = f"{request['id']}: {request['prompt_tokens']} + {request['output_tokens']}"
        words = (rows or {}).get(request["id"], default)
        svg.text(left - 10, y + row_height / 2 + 4, words, size=12, anchor="end")
        svg.line(left, y + row_height, left + num_steps * width, y + row_height, css="grid-line")
        for cell in request["cells"]:
            x = left + cell["step"] * width
            _draw_cell(svg, x, y + 2, width, row_height - 4, request["id"], cell)
    names = {
        "scheduled": "tokens",
        "running": "running",
        "waiting": "waiting",
        "free_blocks": "free blocks",
        "hits": "cached tokens",
    }
    y = top + row_height * len(requests) + 18
    for field in totals:
        svg.text(left - 10, y, names[field], size=11, anchor="end", css="soft")
        for step in data["totals"]:
            x = left + (step["step"] + 0.5) * width
            size = min(11.0, width * 0.55) if width >= 12 else 6
            svg.text(x, y, str(step[field]), size=size, anchor="middle", css="soft")
        y += 20
    _draw_legend(svg, height - 16, data)
    return svg.render()


def describe(data: Mapping[str, Any]) -> str:
    """A run in a sentence per request, for readers who cannot see the chart."""
    parts = [f"{len(data['requests'])} requests over {data['steps']} steps."]
    for request in data["requests"]:
        scheduled = [str(cell["tokens"]) for cell in request["cells"] if cell["tokens"]]
        evicted = [str(c["step"]) for c in request["cells"] if c["kind"] == "preempted"]
        hits = sum(cell["hit"] for cell in request["cells"])
        words = f"{request['id']} computes {_runs(scheduled)} tokens"
        words += f", takes {hits} from the prefix cache" if hits else ""
        words += f", is preempted in step {' and '.join(evicted)}" if evicted else ""
        parts.append(words + ".")
    return " ".join(parts)


def _runs(items: Sequence[str]) -> str:
    """`8, 1, 1, 1` as `8, then 3 times 1`."""
    words: list[str] = []
    start = 0
    for end in range(1, len(items) + 1):
        if end == len(items) or items[end] != items[start]:
            count = end - start
            words.append(items[start] if count == 1 else f"{count} times {items[start]}")
            start = end
    return ", then ".join(words)


def _draw_cell(
    svg: Svg, x: float, y: float, width: float, height: float, name: str, cell: Mapping[str, Any]
) -> None:
    """One request in one step."""
    kind, tokens, hit = cell["kind"], cell["tokens"], cell["hit"]
    color, inner = _COLORS[kind], max(width - 2, 2)
    tip = f"{name}, step {cell['step']}: {WORDS[kind]}"
    if tokens:
        tip += f", {tokens} computed" + (f", {hit} from the cache" if hit else "")
    if kind == "waiting":
        svg.line(x + 1, y + height / 2, x + width - 1, y + height / 2, dash="3 3")
        return
    if kind == "starved":
        svg.rect(x + 1, y, inner, height, stroke=GREY, radius=3, tip=tip)
        return
    if kind == "preempted":
        svg.rect(x + 1, y, inner, height, fill=color, opacity=0.25, stroke=color, radius=3, tip=tip)
        middle, arm = (x + width / 2, y + height / 2), min(5.0, width / 3)
        for turn in (-1, 1):
            svg.line(
                middle[0] - arm, middle[1] - turn * arm, middle[0] + arm, middle[1] + turn * arm,
                stroke=color, width=2,
            )  # fmt: skip
        return
    if hit:
        rest = BLUE if kind == "hit" else ORANGE
        half = height * hit / (hit + tokens)
        half = min(max(half, height * 0.3), height * 0.7)
        svg.rect(x + 1, y, inner, half, fill=PURPLE, opacity=0.45, radius=3, tip=tip)
        svg.rect(x + 1, y + half, inner, height - half, fill=rest, opacity=0.75, radius=3, tip=tip)
    else:
        opacity = 0.4 if kind == "decode" else 0.75
        svg.rect(x + 1, y, inner, height, fill=color, opacity=opacity, radius=3, tip=tip)
    if cell["finish"]:
        svg.rect(x + width - 3, y, 2.5, height, css="ink", tip=f"{name} ends: {cell['finish']}")
    if width >= 12:
        size = min(11.0, width * (0.6 if tokens < 100 else 0.42))
        svg.text(x + width / 2, y + height / 2 + 4, str(tokens), size=size, anchor="middle")


def _draw_legend(svg: Svg, y: float, data: Mapping[str, Any]) -> None:
    """The kinds that occur, once each, in one line."""
    seen = {cell["kind"] for request in data["requests"] for cell in request["cells"]}
    if any(cell["hit"] for request in data["requests"] for cell in request["cells"]):
        seen |= {"hit", "prefill"}
    x = 12.0
    for kind in KINDS:
        if kind not in seen:
            continue
        if kind == "waiting":
            svg.line(x, y - 4, x + 16, y - 4, dash="3 3")
        else:
            opacity = {"decode": 0.4, "preempted": 0.25, "starved": 0.0, "hit": 0.45}.get(
                kind, 0.75
            )
            stroke = _COLORS[kind] if kind in ("preempted", "starved") else None
            svg.rect(
                x, y - 10, 16, 12, fill=_COLORS[kind], opacity=opacity, stroke=stroke, radius=3
            )
        svg.text(x + 21, y, WORDS[kind], size=11, css="soft")
        x += 21 + 6.2 * len(WORDS[kind]) + 16
    svg.rect(x, y - 10, 2.5, 12, css="ink")
    svg.text(x + 8, y, "end", size=11, css="soft")
