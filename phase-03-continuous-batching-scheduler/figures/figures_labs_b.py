"""Figures of labs 03-02, 03-03, 03-05 and of the policy laboratory.

What shows engine behaviour is drawn from runs of mini_vllm; the policy figures are drawn from the
results in `experiments/measured/`. No upstream counterpart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course.site import gantt
from course.site.gantt import Arrival
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine

PHASE = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------ lab 03-02


def chunks() -> str:
    """Three prompts under a threshold of 16: one is cut, two are not."""
    engine = LLMEngine(model="toy", long_prefill_token_threshold=16, enable_prefix_caching=False)
    arrivals = [Arrival("a", "a" * 40, 4), Arrival("b", "b" * 5, 6), Arrival("c", "c" * 17, 4)]
    title = "Prompts of 40, 5 and 17 tokens, threshold 16"
    return gantt.draw(gantt.record(engine, arrivals, title), totals=("scheduled",))


def _stall(threshold: int, prompt_len: int, budget: int) -> tuple[int, int]:
    """Steps to the first token of a long prompt, and the largest step beside a running stream."""
    engine = LLMEngine(
        num_blocks=1024,
        model="toy",
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=False,
    )
    engine.add_request("A", SamplingParams(max_tokens=600, ignore_eos=True))
    engine.step()
    name = engine.add_request([5] * prompt_len, SamplingParams(max_tokens=1, ignore_eos=True))
    request = engine.requests[name]
    sizes: list[int] = []
    engine.observers.append(lambda plan: sizes.append(plan.total_num_scheduled_tokens))
    while not request.is_finished:
        engine.step()
    return len(sizes), max(sizes)


def chunk_tradeoff() -> str:
    """First token of a prompt of 4096 and worst step of a neighbour, over the threshold."""
    thresholds = [8, 16, 32, 64, 128, 256, 512]
    points = {size: _stall(size, 4096, 512) for size in thresholds}
    svg = Svg(
        780,
        300,
        "A prompt of 4096 tokens beside one stream, budget 512",
        "Steps until the prompt's first token, and tokens in the neighbour's largest step, by "
        "threshold: " + "; ".join(f"{t}: {s} and {w}" for t, (s, w) in points.items()) + ".",
    )
    ticks = thresholds
    for left, column, label, top, marks, color in (
        (56, 0, "steps to the prompt's first token", 560, (0, 128, 256, 512), ORANGE),
        (446, 1, "tokens in the neighbour's largest step", 560, (0, 128, 256, 512), BLUE),
    ):
        axes = Axes(svg, (left, 48, 310, 180), (7, 600), (0, top), log_x=True)
        axes.frame("long_prefill_token_threshold", label, ticks, marks)
        line = [(t, points[t][column]) for t in thresholds]
        axes.curve(line, color)
        axes.dots(line, color)
        for t, value in (line[0], line[-1]):
            axes.label(t, value, str(value), dx=0, dy=-9, anchor="middle")
    return svg.render()


# ------------------------------------------------------------------ lab 03-03


def shared_blocks() -> str:
    """Where the 430 shared and 15 own tokens of three of sixteen prompts lie in blocks of 16."""
    svg = Svg(
        780,
        240,
        "430 shared tokens and 15 of its own: 26 blocks hit, two are computed",
        "Three prompts as rows of 28 blocks of 16 tokens. The first computes all 445 tokens. The "
        "others take blocks 0 to 25, 416 tokens, from the cache and compute 29: the 14 shared "
        "tokens that fill no block, and 15 of their own.",
    )
    left, width, size = 130, 22, 16
    for row, name in enumerate(("prompt 0", "prompt 1", "prompt 15")):
        y = 60 + row * 46 + (14 if row == 2 else 0)
        svg.text(left - 12, y + 19, name, size=12, anchor="end")
        for block in range(28):
            x = left + block * width
            tokens = min(size, 445 - block * size)
            hit = row > 0 and block < 26
            color = PURPLE if hit else BLUE
            opacity = 0.45 if hit else 0.75
            shared = max(0, min(tokens, 430 - block * size))
            svg.rect(
                x + 1, y, (width - 2) * shared / size, 28, fill=color, opacity=opacity, radius=2,
                tip=f"block {block}: {tokens} tokens, {shared} shared",
            )  # fmt: skip
            own = tokens - shared
            if own:
                svg.rect(
                    x + 1 + (width - 2) * shared / size, y, (width - 2) * own / size, 28,
                    fill=ORANGE, opacity=0.8, radius=2,
                )  # fmt: skip
    svg.text(left + 13 * width, 46, "416 tokens in 26 whole blocks", anchor="middle", size=12)
    svg.text(left + 27 * width, 46, "14 + 15", anchor="middle", size=12)
    svg.line(left + 26 * width, 34, left + 26 * width, 210, dash="4 3")
    svg.text(left - 12, 168, "...", size=13, anchor="end")
    x = float(left)
    for color, opacity, words in (
        (PURPLE, 0.45, "from the cache"),
        (BLUE, 0.75, "shared, computed"),
        (ORANGE, 0.8, "its own, computed"),
    ):
        svg.rect(x, 220, 16, 12, fill=color, opacity=opacity, radius=3)
        svg.text(x + 22, 230, words, size=11, css="soft")
        x += 160
    return svg.render()


def rates() -> str:
    """Hit rate per token and share of requests that hit, over the number of prompts."""
    numbers = list(range(1, 65))
    tokens = [(n, 100 * (n - 1) * 416 / (n * 445)) for n in numbers]
    requests = [(n, 100 * (n - 1) / n) for n in numbers]
    svg = Svg(
        780,
        300,
        "One workload, two rates: per token and per request",
        f"With 16 prompts {tokens[15][1]:.1f} per cent of the tokens hit and "
        f"{requests[15][1]:.2f} per cent of the requests. The rate by tokens stays below "
        f"{100 * 416 / 445:.1f} per cent for any number of prompts.",
    )
    axes = Axes(svg, (60, 40, 560, 200), (1, 64), (0, 104))
    axes.frame(
        "number of prompts (430 tokens shared, 15 of their own, blocks of 16)",
        "per cent",
        (1, 8, 16, 32, 48, 64),
        (0, 25, 50, 75, 100),
    )
    axes.rule(y=100 * 416 / 445)
    axes.curve(requests, ORANGE, dash="5 3")
    axes.curve(tokens, BLUE)
    axes.dots([tokens[15]], BLUE)
    axes.dots([requests[15]], ORANGE)
    axes.label(16, tokens[15][1], "87.6 % of tokens at 16", BLUE, dx=8, dy=22)
    axes.label(64, requests[-1][1], "requests", ORANGE, dx=8, dy=-2)
    axes.label(64, tokens[-1][1], "tokens", BLUE, dx=8, dy=16)
    axes.label(64, 100 * 416 / 445, "limit 93.5 %", dx=8, dy=4)
    return svg.render()


# ------------------------------------------------------------------ lab 03-05


def _spiked(threshold: int) -> LLMEngine:
    return LLMEngine(
        model="toy", long_prefill_token_threshold=threshold, enable_prefix_caching=False
    )


def seat() -> str:
    """The worked example with a threshold of 64, from both seats."""
    arrivals = [Arrival("victim", "Why?", 16), Arrival("long", "x" * 256, 2, step=1)]
    title = "A stream, and a prompt of 256 that arrives after its first token; threshold 64"
    return gantt.draw(gantt.record(_spiked(64), arrivals, title), totals=("scheduled",))


def _step_sizes(threshold: int) -> list[int]:
    """Tokens in each of the victim's decode steps."""
    arrivals = [Arrival("victim", "Why?", 16), Arrival("long", "x" * 256, 2, step=1)]
    data = gantt.record(_spiked(threshold), arrivals)
    return [total["scheduled"] for total in data["totals"][1:16]]


def spike() -> str:
    """Sizes of the victim's 15 decode steps, for two thresholds."""
    whole, cut = _step_sizes(0), _step_sizes(32)
    svg = Svg(
        780,
        290,
        "The same 272 tokens in 15 steps of one stream",
        f"Tokens per step without a threshold: {whole}. With threshold 32: {cut}.",
    )
    for left, sizes, words, color in (
        (56, whole, "threshold 0: worst 257, median 1", ORANGE),
        (446, cut, "threshold 32: worst 33, median 33", BLUE),
    ):
        axes = Axes(svg, (left, 48, 310, 180), (0, 15), (0, 280))
        axes.frame(
            "decode step of the victim",
            words,
            {n + 0.5: str(n + 1) for n in (0, 4, 9, 14)},
            (0, 64, 128, 192, 256),
        )
        axes.bars(
            [(number + 0.5, size) for number, size in enumerate(sizes)], color,
            tips=[f"step {number}: {size} tokens" for number, size in enumerate(sizes, 1)],
        )  # fmt: skip
        for number, size in enumerate(sizes):
            if size > 1 and (number == 0 or size != sizes[number - 1]):
                axes.label(number + 0.5, size, str(size), dx=0, dy=-5, anchor="middle")
    return svg.render()


def storm() -> str:
    """Five prompts on consecutive steps, two victims: step sizes for three settings."""
    lines: dict[str, list[int]] = {}
    for words, threshold, budget in (
        ("no threshold, budget 2048", 0, 2048),
        ("threshold 32, budget 2048", 32, 2048),
        ("threshold 32, budget 64", 32, 64),
    ):
        engine = LLMEngine(
            model="toy",
            long_prefill_token_threshold=threshold,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        arrivals = [Arrival(f"victim {n}", "Why?", 30) for n in range(2)]
        arrivals += [Arrival(f"long {n}", f"{n}" * 256, 2, step=1 + n) for n in range(5)]
        data = gantt.record(engine, arrivals)
        lines[words] = [total["scheduled"] for total in data["totals"][1:30]]
    svg = Svg(
        780,
        310,
        "Five prompts of 256 on consecutive steps, seen by two streams",
        " ".join(f"{words}: {sizes}." for words, sizes in lines.items()),
    )
    axes = Axes(svg, (56, 40, 520, 210), (1, 29), (0, 280))
    axes.frame(
        "decode step of the victims",
        "tokens in the step",
        (1, 5, 10, 15, 20, 25, 29),
        (0, 64, 128, 192, 256),
    )
    styles = ((ORANGE, None, 5, 246), (PURPLE, "5 3", 7, 162), (BLUE, "2 3", 19, 64))
    for (words, sizes), (color, dash, at, value) in zip(lines.items(), styles, strict=True):
        axes.curve([(n + 1, size) for n, size in enumerate(sizes)], color, dash=dash, width=2.5)
        axes.label(at, value, f"{words}: {max(sizes)}", color, dx=26, dy=-4)
    return svg.render()


# ------------------------------------------------------------------ the policy laboratory


def measured(name: str) -> dict[str, Any]:
    """A committed result of the policy laboratory."""
    return json.loads((PHASE / "experiments" / "measured" / name).read_text(encoding="utf-8"))


def step_cost() -> str:
    """Measured seconds of a step against the fitted line."""
    data = measured("step-cost.json")
    cost, error = data["cost"], data["residual"]
    points = []
    for row in data["steps"]:
        fitted = cost["base"] + cost["token"] * row["tokens"]
        fitted += cost["context"] * row["context"] + cost["pair"] * row["pairs"]
        points.append((row["seconds"] * 1e3, fitted * 1e3, row["tokens"]))
    svg = Svg(
        780,
        360,
        f"{len(points)} steps of the shipped model: fitted over measured milliseconds",
        f"{data['machine']}, one thread. The median of the relative error is "
        f"{error['median_error']:.1%}, its 95th percentile {error['p95_error']:.1%}. Steps of a "
        "few tokens lie below the line, steps of many on it.",
    )
    axes = Axes(svg, (60, 46, 420, 250), (1, 60), (1, 60), log_x=True, log_y=True)
    ticks = (1, 2, 5, 10, 20, 50)
    axes.frame("measured, ms", "fitted, ms", ticks, ticks)
    axes.curve([(1, 1), (60, 60)], GREY, width=1, dash="4 3")
    for low, high, color in ((0, 9, ORANGE), (10, 99, GREEN), (100, 9999, BLUE)):
        axes.dots([(m, f) for m, f, tokens in points if low <= tokens <= high], color, radius=3.5)
    lines = (
        (f"{data['machine']}, one thread", None),
        (f"{cost['base'] * 1e3:.2f} ms a step", None),
        (f"+ {cost['token'] * 1e6:.1f} us a token computed", None),
        (f"+ {cost['context'] * 1e6:.2f} us a token of context", None),
        (f"+ {cost['pair'] * 1e6:.3f} us a query-key pair", None),
        (f"error: median {error['median_error']:.1%}", None),
        (f"95th percentile {error['p95_error']:.1%}", None),
        ("2 to 9 tokens", ORANGE),
        ("10 to 99 tokens", GREEN),
        ("100 tokens or more", BLUE),
    )
    for row, (words, color) in enumerate(lines):
        y = 66 + 22 * row + (10 if color else 0)
        if color:
            svg.circle(520, y - 4, 4, color)
        svg.text(532 if color else 514, y, words, size=12, css="ink" if row == 0 else "soft")
    return svg.render()


def compare() -> str:
    """Eight policies at 40 requests a second: four metrics, mean and interval over the seeds."""
    data = measured("policies.json")
    rows = data["compare"]["40"]
    panels = (
        ("chat_ttft_p99", "chat: TTFT p99, ms", (50, 2000), {100: "100", 300: "300", 1000: "1000"}),
        ("document_ttft_p50", "document: TTFT p50", (40, 1000), {50: "50", 200: "200", 800: "800"}),
        ("itl_p99", "ITL p99, ms", (5, 200), {10: "10", 30: "30", 100: "100"}),
        ("stall_p90", "worst gap, p90, ms", (5, 400), {10: "10", 50: "50", 200: "200"}),
    )
    svg = Svg(
        780,
        330,
        "Eight policies, the same requests: 40 a second on the fitted machine",
        " ".join(
            f"{name}: " + ", ".join(f"{words} {row[key][0]:.0f}" for key, words, *_ in panels) + "."
            for name, row in rows.items()
        ),
    )
    for index, (key, words, limits, ticks) in enumerate(panels):
        axes = Axes(svg, (190 + 148 * index, 44, 132, 226), limits, (7.5, -0.5), log_x=True)
        axes.frame("", words, ticks, {n: "" if index else name for n, name in enumerate(rows)})
        for number, (name, row) in enumerate(rows.items()):
            mean, low, high = row[key]
            color = BLUE if name.startswith(("FCFS, budget", "budget", "priority")) else ORANGE
            color = GREY if name == "static batching" else color
            span = (number, max(low, limits[0]), min(high, limits[1]))
            axes.spans([span], color, width=3, lying=True)
            axes.dots([(mean, number)], color, radius=4.5, tips=[f"{name}: {mean:.1f}"])
    svg.text(
        12, 316, f"{data['seeds']} seeds of {data['requests']} requests; bars: 95 % interval of "
        "the mean (bootstrap); milliseconds, logarithmic", size=11, css="soft",
    )  # fmt: skip
    return svg.render()


def memory() -> str:
    """Three ways to live with a small pool."""
    data = measured("policies.json")
    ways = data["memory"]["40"]
    styles = {"newest first": (BLUE, None), "oldest first": (ORANGE, "5 3"),
              "reserve up front": (PURPLE, "2 3")}  # fmt: skip
    svg = Svg(
        780,
        320,
        "A pool too small for everybody: newest first, oldest first, reserve up front",
        " ".join(
            f"{name}: " + "; ".join(
                f"{size} blocks {point['throughput'][0]:.0f} tokens a second, "
                f"{point['wasted'][0]:.1f} per cent wasted"
                for size, point in sizes.items()
            ) + "."
            for name, sizes in ways.items()
        ),
    )  # fmt: skip
    sizes = [int(size) for size in next(iter(ways.values()))]
    panels = (
        ("throughput", "output tokens a second", (1600, 2600), (1600, 2000, 2400)),
        ("wasted", "per cent of tokens computed again", (0, 12), (0, 4, 8, 12)),
        ("ttft_p50", "median TTFT, ms", (0, 2000), (0, 500, 1000, 1500, 2000)),
    )
    for index, (key, words, limits, marks) in enumerate(panels):
        axes = Axes(svg, (52 + 252 * index, 48, 190, 190), (64, 320), limits, log_x=True)
        axes.frame("blocks", words, sizes, marks)
        for name, (color, dash) in styles.items():
            points = [(int(size), point[key]) for size, point in ways[name].items()]
            axes.curve([(size, value[0]) for size, value in points], color, dash=dash, name=name)
            spans = [
                (size, max(low, limits[0]), min(high, limits[1])) for size, (_, low, high) in points
            ]
            axes.spans(spans, color, width=1)
        if index == 0:
            axes.legend(52, 294, columns=3)
    svg.text(764, 304, "bars: 95 % interval of the mean", size=11, css="soft", anchor="end")
    return svg.render()


_TRADEOFF_COLORS = (RED, PURPLE, BLUE, GREEN, ORANGE, GREY, BLUE)


def _tradeoff(machine: str, title: str, itl: tuple[float, float], top: float, first: tuple) -> str:
    """Throughput over the ITL percentile, and the median time to first token over throughput."""
    data = measured("policies.json")
    curves = data["tradeoff"][machine]
    svg = Svg(
        780,
        360,
        title,
        " ".join(
            f"{name}: ITL p99 from {min(p['itl_p99'][0] for p in rates.values()):.0f} to "
            f"{max(p['itl_p99'][0] for p in rates.values()):.0f} ms, throughput up to "
            f"{max(p['throughput'][0] for p in rates.values()):.0f}."
            for name, rates in curves.items()
        ),
    )
    left = Axes(svg, (56, 44, 320, 220), itl, (0, top), log_x=True)
    right = Axes(svg, (446, 44, 316, 220), (0, top), first, log_y=True)
    marks = [n for n in (2, 5, 10, 20, 50, 100, 200, 500) if itl[0] <= n <= itl[1]]
    steps = range(0, int(top) + 1, 1000)
    left.frame("ITL p99, ms", "output tokens a second", marks, steps)
    tens = [n for n in (5, 10, 20, 50, 100, 200, 500, 1000) if first[0] <= n <= first[1]]
    right.frame("output tokens a second", "median time to first token, ms", steps, tens)
    names = list(curves)
    for number, name in enumerate(names):
        color = _TRADEOFF_COLORS[number]
        dash = "5 3" if number == 0 else ("2 3" if number == 6 else None)
        points = list(curves[name].values())
        rates = [(p["itl_p99"][0], p["throughput"][0]) for p in points]
        left.curve(rates, color, dash=dash, name=name)
        left.dots([(min(x, itl[1]), y) for x, y in rates], color, radius=2.5)
        spans = [
            (p["throughput"][0], *(min(max(value, itl[0]), itl[1]) for value in p["itl_p99"][1:]))
            for p in points
        ]
        left.spans(spans, color, width=1, lying=True)
        right.curve(
            [(p["throughput"][0], min(p["ttft_p50"][0], first[1])) for p in points],
            color, dash=dash,
        )  # fmt: skip
    left.legend(56, 312, columns=4)
    return svg.render()


def tradeoff_laptop() -> str:
    """Chunk budgets on the fitted machine."""
    title = "Budgets on the fitted machine: throughput against ITL and time to first token"
    return _tradeoff("laptop", title, (3, 300), 3000, (5, 1000))


def tradeoff_server() -> str:
    """Chunk budgets on the arithmetic of a server GPU."""
    title = "The same by arithmetic for 8e9 parameters on an H100: no measurement"
    return _tradeoff("server", title, (5, 400), 3000, (10, 500))


def _best(curves: dict[str, Any], limit: float, metric: str, first: float, chunks: bool) -> float:
    """Highest throughput of a policy that chunks, or of the one that does not, within limits."""
    return max(
        (
            point["throughput"][0]
            for name, rates in curves.items()
            if name.startswith("budget") == chunks
            for point in rates.values()
            if point[metric][0] <= limit and point["ttft_p50"][0] <= first
        ),
        default=0.0,
    )


def capacity() -> str:
    """The highest throughput that keeps a limit on the worst gap: with chunks, and whole."""
    data = measured("policies.json")["tradeoff"]
    panels = (
        ("laptop", "the fitted machine", (4, 300), (5, 10, 20, 50, 100, 200), 100),
        ("server", "an H100 by arithmetic", (10, 2000), (10, 30, 100, 300, 1000), 200),
    )
    lines = {}
    for machine, _, (low, high), _, first in panels:
        limits = [low * (high / low) ** (n / 60) for n in range(61)]
        lines[machine] = [
            [(x, _best(data[machine], x, "stall_p90", first, chunks)) for x in limits]
            for chunks in (True, False)
        ]
    svg = Svg(
        780,
        330,
        "Throughput within a limit on the stall: best budget, and whole prompts",
        "On both machines the best chunk budget serves a strict limit at nearly the full rate, "
        "while prompts computed whole serve it only at low rates or not at all. With a loose limit "
        "the two meet.",
    )
    for index, (machine, words, limits, ticks, first) in enumerate(panels):
        top = 3000
        axes = Axes(svg, (56 + 390 * index, 60, 310, 190), limits, (0, top), log_x=True)
        axes.frame(
            "limit on the worst gap of 90 % of the requests, ms",
            "output tokens a second",
            ticks,
            range(0, top + 1, 1000),
        )
        svg.text(56 + 390 * index, 34, f"{words}; median TTFT within {first} ms", size=12)
        chunked, whole = lines[machine]
        axes.curve(chunked, BLUE, width=2.5, name="best of the budgets")
        axes.curve(whole, RED, dash="5 3", width=2.5, name="prompts first, whole")
        if index == 0:
            axes.legend(56, 304, columns=2)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-02-chunks.svg": chunks,
    "lab-02-tradeoff.svg": chunk_tradeoff,
    "lab-03-shared-blocks.svg": shared_blocks,
    "lab-03-rates.svg": rates,
    "lab-05-seat.svg": seat,
    "lab-05-spike.svg": spike,
    "lab-05-storm.svg": storm,
    "policy-step-cost.svg": step_cost,
    "policy-compare.svg": compare,
    "policy-memory.svg": memory,
    "policy-tradeoff.svg": tradeoff_laptop,
    "policy-tradeoff-server.svg": tradeoff_server,
    "policy-capacity.svg": capacity,
}
