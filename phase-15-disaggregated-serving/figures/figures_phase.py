"""The figures of phase 15; `course figures 15` draws them.

`gaps`, `goodput` and `crossing` are runs of the scheduler on a computed clock, with the prices that
lab 18-04 fits to steps measured on an H100. `ownership` and `deaths` are recordings of vLLM's own
schedulers. No upstream counterpart.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

from conformance import parts, recording
from conformance.features import RECORDINGS
from course.site.widgets.two_pools import COST, KV_BYTES, film
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm.config import EngineConfig
from mini_vllm.simulate.pools import Served, Wire, apart, together
from mini_vllm.simulate.report import Slo
from mini_vllm.simulate.simulator import Simulator
from mini_vllm.simulate.traces import TraceRequest

RATES = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22)
TTFT, TPOTS = 0.4, (0.008, 0.015)


def _config(budget: int) -> EngineConfig:
    return EngineConfig.of({
        "num_blocks": 16_000, "max_num_batched_tokens": budget, "max_num_seqs": 256,
        "async_scheduling": True, "enable_prefix_caching": False,
    })  # fmt: skip


# ------------------------------------------------------------------ on a computed clock


def _steps(budget: int, is_apart: bool) -> list[tuple[float, float]]:
    """When each step that a running decode is in ends, and how long it took, in ms."""
    simulator = Simulator(_config(budget), COST)
    found: list[tuple[float, float]] = []
    simulator.observers.append(
        lambda begin, end, plan, work: found.append((1e3 * end, 1e3 * (end - begin)))
    )
    trace = [TraceRequest(0.0, 16, 40)]
    if not is_apart:
        trace.append(TraceRequest(0.05, 2048, 1))
    simulator.run(trace)
    return found


def gaps() -> str:
    """Steps of one decode while a prompt of 2,048 tokens arrives."""
    arms = (
        ("whole", _steps(2100, False), ORANGE), ("chunks of 256", _steps(257, False), PURPLE),
        ("apart", _steps(2100, True), BLUE),
    )  # fmt: skip
    worst = {name: max(length for _, length in steps[1:]) for name, steps, _ in arms}
    svg = Svg(
        780, 320, "Steps of one decode while a prompt arrives",
        "; ".join(f"{name}: longest step {length:.1f} ms" for name, length in worst.items()),
    )  # fmt: skip
    for row, (name, steps, color) in enumerate(arms):
        y = 36 + row * 92
        svg.text(16, y + 6, name, size=14, bold=True)
        svg.text(16, y + 26, f"longest {worst[name]:.1f} ms", css="soft", size=12)
        for end, length in steps:
            if end > 300:
                break
            left = 150 + 2 * (end - length)
            height = min(60.0, length)
            svg.rect(left, y + 40 - height * 0.66, max(1.0, 2 * length - 1), height * 0.66 + 6,
                     fill=color, opacity=0.55, tip=f"{length:.1f} ms")  # fmt: skip
    svg.line(250, 20, 250, 286, css="grid-line", dash="4 3")
    svg.text(254, 30, "a prompt of 2,048 arrives, 50 ms", css="soft", size=12)
    for ms in range(0, 301, 50):
        svg.text(150 + 2 * ms, 306, f"{ms} ms", anchor="middle", css="soft", size=12)
    return svg.render()


@functools.cache
def _served(name: str, rate: float) -> Served:
    draw, now, trace = random.Random(0), 0.0, []
    for _ in range(200):
        now += draw.expovariate(rate)
        trace.append(TraceRequest(now, 2048, 128))
    if name.startswith("two"):
        return together(_config(512), COST, trace)
    return apart(_config(2048), COST, trace, Wire(float(name.split()[1]), KV_BYTES))


@functools.cache
def share(name: str, rate: float, tpot: float) -> float:
    """Of the requests, those that keep both limits, in percent."""
    outcomes = _served(name, rate).result.outcomes
    return 100 * sum(map(Slo(ttft=TTFT, tpot=tpot).holds, outcomes)) / len(outcomes)


ARMS = {"two replicas": ORANGE, "1P1D, 200 Gb/s": BLUE, "1P1D, 25 Gb/s": PURPLE}


def goodput() -> str:
    """Share of requests that keep both limits, over the rate, for two limits of TPOT."""
    said = [
        f"TPOT {1e3 * tpot:.0f} ms, {name}: "
        + ", ".join(f"{rate}/s {share(name, rate, tpot):.0f} %" for rate in RATES)
        for tpot in TPOTS for name in ARMS
    ]  # fmt: skip
    svg = Svg(780, 330, "Goodput under two limits", "; ".join(said))
    for column, tpot in enumerate(TPOTS):
        left = 60 + column * 370
        svg.text(left, 22, f"TTFT 400 ms and TPOT {1e3 * tpot:.0f} ms", bold=True)
        axes = Axes(svg, (left, 50, 300, 210), (0, 23), (0, 105))
        axes.frame("requests per second", "% that keep both", range(0, 23, 4), range(0, 101, 25))
        for name, color in ARMS.items():
            points = [(rate, share(name, rate, tpot)) for rate in RATES]
            axes.curve(points, color, width=2.5)
            axes.dots(points, color, radius=3)
    for place, (name, color) in enumerate(ARMS.items()):
        svg.rect(60 + place * 240, 308, 14, 10, fill=color, opacity=0.8)
        svg.text(80 + place * 240, 318, name, size=12)
    return svg.render()


def crossing() -> str:
    """Six prompts through a producer, a wire and a consumer."""
    made = film(2048, 60, "200")
    rows = made["rows"]
    svg = Svg(
        780, 250, "Six prompts cross a wire of 200 Gb/s",
        f"Longest time to first token {made['ttft'] / 10} ms, longest gap {made['gap'] / 10} ms.",
    )  # fmt: skip
    last = max(row["decode"][1] for row in rows)
    kinds = {"prefill": BLUE, "wire": ORANGE, "decode": GREEN}
    for place, row in enumerate(rows):
        y = 16 + 32 * place
        svg.text(16, y + 17, str(place + 1), size=13)
        for kind, color in kinds.items():
            left, right = (40 + 720 * end / last for end in row[kind])
            svg.rect(left, y, max(1.0, right - left), 24, fill=color, opacity=0.6,
                     tip=f"{kind}: {row[kind][0] / 10} to {row[kind][1] / 10} ms")  # fmt: skip
    for place, (kind, color) in enumerate(kinds.items()):
        svg.rect(40 + place * 120, 226, 14, 10, fill=color, opacity=0.8)
        svg.text(60 + place * 120, 236, kind, size=12)
    svg.text(760, 236, f"{last / 10:.0f} ms", anchor="end", css="soft", size=12)
    return svg.render()


# ------------------------------------------------------------------ recorded


@functools.cache
def _nixl(name: str) -> list[Mapping[str, Any]]:
    [case] = [case for case in parts.load("nixl_pair") if case["case"]["name"] == name]
    steps: list[Mapping[str, Any]] = case["steps"]
    return steps


OWNERS = {
    "computes": BLUE, "ended, kept": PURPLE, "being written": ORANGE, "runs": GREEN, "free": GREY,
}  # fmt: skip


def owner(step: Mapping[str, Any]) -> str:
    """Whose the blocks of "r" are in a step."""
    status = step["status"].get("r", "")
    if not step["block_ids"].get("r"):
        return "free"
    if status == "WAITING_FOR_REMOTE_KVS":
        return "being written"
    if status.startswith("FINISHED"):
        return "ended, kept"
    return "computes" if step["engine"] == "P" else "runs"


def ownership() -> str:
    """Blocks of P and D of one request, step by step, as the real schedulers had them."""
    steps = _nixl("a load of 40 tokens")
    p = [step for step in steps if step["engine"] == "P"]
    d = [step for step in steps if step["engine"] == "D"]
    lanes = (("P", [owner(step) for step in p], p), ("D", ["free"] + [owner(s) for s in d], d))
    svg = Svg(
        780, 250, "Who owns the blocks of one request",
        "; ".join(f"{name}: {', '.join(owners)}" for name, owners, _ in lanes),
    )  # fmt: skip
    for row, (name, owners, _) in enumerate(lanes):
        y = 50 + row * 74
        svg.text(16, y + 30, name, size=18, bold=True)
        for place, who in enumerate(owners):
            x = 60 + place * 100
            faint = 0.12 if who == "free" else 0.5
            svg.rect(x, y, 94, 44, fill=OWNERS[who], opacity=faint, radius=4)
            svg.text(x + 47, y + 20, who, anchor="middle", size=12)
            if who != "free":
                svg.text(x + 47, y + 36, "blocks 1, 2, 3", anchor="middle", css="soft", size=11)
    for place in range(len(p)):
        svg.text(107 + place * 100, 34, f"step {place}", anchor="middle", css="soft", size=12)
    planned = [""] + [str(step["planned"].get("r", 0)) for step in d]
    for place, count in enumerate(planned):
        if count:
            svg.text(107 + place * 100, 190, f"D plans {count}", anchor="middle", size=12)
    said = "In step 3 both workers report: P frees its blocks, and D may plan from step 4 on."
    svg.text(16, 226, said, css="soft", size=12)
    return svg.render()


def kind_of(entry: Mapping[str, Any]) -> str:
    """What the last report of a death was about."""
    kv = {add["request_id"]: add.get("kv") or {} for e in entry["events"] for add in e["add"]}
    both = {name for name, script in kv.items() if script.get("unasked") == "send"}
    aborted = {name for event in entry["events"] for name in event["abort"]}
    told = {r for s in entry["steps"] for r in (*s["finished_recving"], *s["finished_sending"])}
    return "received and sent" if both & aborted & told else "sent, and let go before"


def deaths() -> str:
    """In which step each of the recorded workloads ends the real engine."""
    entries = list(recording.read(RECORDINGS / "deaths" / "connector.jsonl.gz"))
    kinds: dict[str, list[int]] = {}
    for entry in entries:
        kinds.setdefault(kind_of(entry), []).append(entry["dies"]["step"])
    svg = Svg(
        780, 220, "Where the pin dies",
        "; ".join(f"{kind}: {len(steps)} workloads, steps {min(steps)} to {max(steps)}"
                  for kind, steps in sorted(kinds.items())),
    )  # fmt: skip
    last = max(entry["dies"]["step"] for entry in entries)
    for row, (kind, steps) in enumerate(sorted(kinds.items())):
        y = 96 + row * 84
        svg.text(16, y - 44, f"{kind}: {len(steps)}", bold=True)
        svg.line(30, y, 760, y, css="grid-line")
        for step in sorted(set(steps)):
            for place in range(steps.count(step)):
                svg.circle(30 + 730 * step / last, y - 6 - 8 * place, 3.5, RED, f"step {step}")
    svg.text(30, 206, "step 0", css="soft", size=12)
    svg.text(760, 206, f"step {last}", anchor="end", css="soft", size=12)
    return svg.render()


# ------------------------------------------------------------------ drawn


def topology() -> str:
    """Who talks to whom."""
    svg = Svg(
        780, 260, "The way of a prompt",
        "The proxy sends the prompt to P and the same request with P's parameters to D; D reads K "
        "and V from P.",
    )  # fmt: skip
    svg.box(16, 100, 110, 56, ["client"], fill=GREY)
    svg.box(220, 100, 120, 56, ["proxy", "parameters only"], fill=GREY)
    svg.box(560, 16, 190, 62, ["P: prefill", "kv_producer"], fill=BLUE)
    svg.box(560, 180, 190, 62, ["D: decode", "kv_consumer"], fill=GREEN)
    svg.line(126, 122, 220, 122, arrow=True)
    svg.line(220, 140, 126, 140, arrow=True)
    svg.text(173, 114, "request", anchor="middle", css="soft", size=12)
    svg.text(173, 158, "tokens", anchor="middle", css="soft", size=12)
    svg.line(340, 108, 560, 46, arrow=True)
    svg.text(432, 56, "1  max_tokens=1", anchor="middle", size=12)
    svg.line(560, 66, 340, 124, arrow=True)
    svg.text(470, 116, "2  kv_transfer_params", anchor="middle", size=12)
    svg.line(340, 140, 560, 208, arrow=True)
    svg.text(420, 204, "3  the original request, with 2", anchor="middle", size=12)
    svg.line(655, 78, 655, 180, stroke=ORANGE, width=5, arrow=True)
    svg.text(668, 126, "4  K and V", size=12, bold=True)
    svg.text(668, 143, "D reads", css="soft", size=12)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "gaps.svg": gaps, "goodput.svg": goodput, "ownership.svg": ownership, "deaths.svg": deaths,
    "topology.svg": topology, "crossing.svg": crossing,
}  # fmt: skip
