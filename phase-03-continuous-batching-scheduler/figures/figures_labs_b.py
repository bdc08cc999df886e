"""Figures of labs 03-02, 03-03, 03-05 and of the policy laboratory; `make.py` writes them.

What shows engine behaviour is drawn from runs of mini_vllm; the policy figures are drawn from the
results in `experiments/measured/`. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from course import gantt
from course.figures import BLUE, ORANGE, PURPLE, Axes, Svg
from course.gantt import Arrival
from mini_vllm.engine import LLMEngine
from mini_vllm.sampler import SamplingParams

PHASE = Path(__file__).resolve().parents[1]

# ------------------------------------------------------------------ lab 03-02


def chunks() -> str:
    """Three prompts under a threshold of 16: one is cut, two are not."""
    engine = LLMEngine(model="toy", long_prefill_token_threshold=16, enable_caching=False)
    arrivals = [Arrival("a", "a" * 40, 4), Arrival("b", "b" * 5, 6), Arrival("c", "c" * 17, 4)]
    title = "Prompts of 40, 5 and 17 tokens, threshold 16"
    return gantt.draw(gantt.record(engine, arrivals, title), totals=("scheduled",))


def _stall(threshold: int, prompt_len: int, budget: int) -> tuple[int, int]:
    """Steps to the first token of a long prompt, and the largest step beside a running stream."""
    engine = LLMEngine(
        1024,
        model="toy",
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        enable_caching=False,
    )
    engine.add_request("A", SamplingParams(max_tokens=600, ignore_eos=True))
    engine.step()
    name = engine.add_request([5] * prompt_len, SamplingParams(max_tokens=1, ignore_eos=True))
    request = engine.scheduler.requests[name]
    sizes: list[int] = []
    engine.on_schedule = lambda plan: sizes.append(plan.total_num_scheduled_tokens)
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
    ticks = {t: str(t) for t in thresholds}
    for left, column, label, top, marks, color in (
        (56, 0, "steps to the prompt's first token", 560, (0, 128, 256, 512), ORANGE),
        (446, 1, "tokens in the neighbour's largest step", 560, (0, 128, 256, 512), BLUE),
    ):
        axes = Axes(svg, (left, 48, 310, 180), (7, 600), (0, top), log_x=True)
        axes.frame(
            "long_prefill_token_threshold", label, ticks, {value: str(value) for value in marks}
        )
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
        {n: str(n) for n in (1, 8, 16, 32, 48, 64)},
        {n: str(n) for n in (0, 25, 50, 75, 100)},
    )
    svg.line(axes.x(1), axes.y(100 * 416 / 445), axes.x(64), axes.y(100 * 416 / 445), dash="5 4")
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
    return LLMEngine(model="toy", long_prefill_token_threshold=threshold, enable_caching=False)


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
            {n: str(n) for n in (0, 64, 128, 192, 256)},
        )
        for number, size in enumerate(sizes):
            top = axes.y(size)
            svg.rect(
                axes.x(number) + 2, top, axes.x(1) - axes.x(0) - 4, axes.y(0) - top,
                fill=color, opacity=0.75, tip=f"step {number + 1}: {size} tokens",
            )  # fmt: skip
            if size > 1 and (number == 0 or size != sizes[number - 1]):
                svg.text(axes.x(number + 0.5), top - 5, str(size), size=11, anchor="middle")
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
            enable_caching=False,
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
        {n: str(n) for n in (1, 5, 10, 15, 20, 25, 29)},
        {n: str(n) for n in (0, 64, 128, 192, 256)},
    )
    styles = ((ORANGE, None, 5, 246), (PURPLE, "5 3", 7, 162), (BLUE, "2 3", 19, 64))
    for (words, sizes), (color, dash, at, value) in zip(lines.items(), styles, strict=True):
        axes.curve([(n + 1, size) for n, size in enumerate(sizes)], color, dash=dash, width=2.5)
        axes.label(at, value, f"{words}: {max(sizes)}", color, dx=26, dy=-4)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-02-chunks.svg": chunks,
    "lab-02-tradeoff.svg": chunk_tradeoff,
    "lab-03-shared-blocks.svg": shared_blocks,
    "lab-03-rates.svg": rates,
    "lab-05-seat.svg": seat,
    "lab-05-spike.svg": spike,
    "lab-05-storm.svg": storm,
}
