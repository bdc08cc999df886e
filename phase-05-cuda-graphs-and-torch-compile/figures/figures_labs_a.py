"""The figures of labs 05-01, 05-02, 05-03 and 05-05.

What they show comes from the labs' reference solutions, `mini_vllm.cudagraph` and
`mini_vllm.cudagraph.launches`. No upstream counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from conformance import parts
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, Svg
from course.truth.plots import Axes
from mini_vllm.cudagraph.launches import LAYER, simulate

served = load_module(Path(__file__).with_name("served.py"))

PHASE = Path(__file__).resolve().parents[1]


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(PHASE / "labs" / folder / "solution.py")


# ------------------------------------------------------------------ lab 05-05


def padding() -> str:
    """Padding in percent of the real rows, for every batch size on the default ladder."""
    lab = solution("lab-05-capture-sizes")
    sizes = lab.default_capture_sizes(512)
    shares = {n: 100 * lab.padded_tokens(n, sizes) / n for n in range(1, 289)}
    svg = Svg(
        780,
        330,
        "Padding on the default ladder",
        "Padding in percent of the real rows against the batch size, 1 to 288. A saw: 0 on every "
        f"rung, {shares[5]:.0f} % at 5, {shares[9]:.0f} % at 9, {shares[33]:.1f} % at 33, "
        f"{shares[249]:.1f} % at 249, {shares[257]:.1f} % at 257.",
    )
    axes = Axes(svg, (56, 40, 700, 230), (0, 288), (0, 80))
    axes.frame(
        "tokens in the step",
        "padding rows per 100 real rows",
        (1, 16, 32, 64, 96, 128, 160, 192, 224, 256, 288),
        {n: f"{n} %" for n in (0, 20, 40, 60, 80)},
    )
    axes.curve(list(shares.items()), BLUE, width=1.5)
    worst = {n: shares[n] for n in (5, 9, 33, 257)}
    axes.dots(list(worst.items()), ORANGE, radius=4)
    for n, share in worst.items():
        rung = lab.select_capture_size(n, sizes)
        words = f"{n} runs as {rung}: {share:.1f} %"
        if n == 257:
            axes.label(n, share, words + ", stride 16 from here", dx=12, dy=-14, anchor="end")
        else:
            axes.label(n, share, words, dx=26 if n == 5 else 8)
    return svg.render()


def two_humps() -> dict[int, int]:
    """Steps of a made-up day: many of about 23 tokens, fewer of about 97."""
    humps = {
        n: round(1000 * math.exp(-(((n - 23) / 7) ** 2)) + 400 * math.exp(-(((n - 97) / 12) ** 2)))
        for n in range(1, 129)
    }
    return {n: steps for n, steps in humps.items() if steps}


# ------------------------------------------------------------------ lab 05-03

KINDS_OF_GRAPH = {"FULL": GREEN, "PIECEWISE": BLUE, "NONE": GREY}


def routes() -> str:
    """What the recorded real dispatcher answers for 1 to 600 tokens in each mode."""
    cases = {
        case["mode"]: case
        for case in parts.load("cudagraph_modes")
        if case["kind"] == "dispatch" and case["max_num_seqs"] == 256
    }
    svg = Svg(
        780,
        420,
        "What each mode runs, by batch",
        "For each of five modes two bars over 1 to 600 tokens, max_num_seqs 256. NONE: no graph. "
        "PIECEWISE: piecewise graphs for both kinds up to 512. FULL: full graphs for both kinds up "
        "to 512. FULL_DECODE_ONLY: full graphs for uniform decode up to 256, none for mixed. "
        "FULL_AND_PIECEWISE: full graphs for uniform decode, piecewise for mixed up to 512. Above "
        "512 tokens there is no graph in any mode. Uniform decode ends at 256.",
    )
    left, width = 250, 500
    for index, (name, color) in enumerate(KINDS_OF_GRAPH.items()):
        svg.rect(left + index * 150, 14, 14, 14, fill=color, opacity=0.75, radius=2)
        words = {"FULL": "full graph", "PIECEWISE": "piecewise graphs", "NONE": "no graph"}[name]
        svg.text(left + index * 150 + 20, 26, words, size=12)
    for row, (mode, case) in enumerate(cases.items()):
        y = 46 + row * 66
        svg.text(12, y + 28, mode, size=13, css="ink mono", bold=True)
        for kind, column in (("decode", 2), ("mixed", 0)):
            top = y + (0 if kind == "decode" else 24)
            svg.text(left - 8, top + 14, kind, size=11, anchor="end", css="soft")
            start = 0
            for n in range(1, 602):
                found = [row[column] for row in case["found"][n - 1 : n]]
                here = found[0][0] if found and found[0] else None
                if n == 1:
                    current = here
                if here != current or n == 601:
                    if current:
                        svg.rect(
                            left + width * start / 600,
                            top,
                            width * (n - 1 - start) / 600,
                            18,
                            fill=KINDS_OF_GRAPH[current],
                            opacity=0.75,
                            tip=f"{mode}, {kind}, {start + 1} to {n - 1} tokens: {current}",
                        )
                    start, current = n - 1, here
    for n in (0, 128, 256, 384, 512, 600):
        x = left + width * n / 600
        svg.line(x, 40, x, 370, css="grid-line")
        svg.text(x, 386, str(n), size=11, anchor="middle", css="soft")
    svg.text(
        left + width / 2, 406, "tokens in the step; max_num_seqs 256", size=12, anchor="middle"
    )
    return svg.render()


# ------------------------------------------------------------------ lab 05-01


def tape() -> str:
    """Contents of the buffers of the engine's tape: recorded, replayed, after a new input."""
    ops = [lambda x: x + 1.0, lambda x: x * 2.0, lambda x: x - 3.0]
    entry, record = solution("lab-01-graph-replay-simulator").GraphRunner(ops).capture(np.ones(1))
    buffers = [entry.static_input, *(dst for _, _, dst in entry.tape.kernels)]

    def now() -> list[str]:
        return [f"{float(buffer[0]):g}" for buffer in buffers]

    rows = [("recorded with x = 1", now())]
    entry.tape.replay()
    rows.append(("replay()", now()))
    np.copyto(entry.static_input, 5.0)
    rows.append(("copyto(static_input, 5)", now()))
    entry.tape.replay()
    rows.append(("replay()", now()))
    svg = Svg(
        780,
        318,
        "A tape and its buffers",
        "Three kernels, add 1, times 2, minus 3, over four buffers. "
        + "; ".join(f"{words}: {', '.join(held)}" for words, held in rows)
        + f". The warm-up's result was {float(record[0]):g}, outside the buffers.",
    )
    left, step = 236, 140
    svg.text(12, 30, "the tape", bold=True)
    for index, words in enumerate(("+ 1", "x 2", "- 3")):
        x = left + index * step + 45
        svg.line(x + 46, 62, x + 94, 62, width=2, arrow=True)
        svg.text(x + 70, 50, words, size=13, anchor="middle", css="ink mono")
    names = ("static input", "buffer 1", "buffer 2", "output")
    for index, name in enumerate(names):
        color = (ORANGE, GREY, GREY, GREEN)[index]
        svg.box(left + index * step, 40, 90, 44, [name], fill=color, size=12)
    for row, (words, held) in enumerate(rows):
        y = 104 + row * 50
        svg.text(12, y + 24, words, size=13, css="ink mono")
        before = rows[row - 1][1] if row else held
        for index, value in enumerate(held):
            changed = row > 0 and value != before[index]
            svg.rect(
                left + index * step,
                y,
                90,
                36,
                fill=(ORANGE, GREY, GREY, GREEN)[index],
                opacity=0.35 if changed else 0.08,
                radius=4,
            )
            svg.text(
                left + index * step + 45, y + 24, value, size=15, anchor="middle", bold=changed
            )
    svg.text(12, 306, "strong colour: what this line changed", size=12, css="soft")
    return svg.render()


# ------------------------------------------------------------------ lab 05-02


def regimes() -> str:
    """Step time against the kernels' length: the engine's two lanes, eager, piecewise and full."""
    kernels, launch = list(LAYER) * 33, 5.0
    lengths = [0.5 + 0.25 * i for i in range(47)]
    colors = {"eager": ORANGE, "piecewise": BLUE, "full": GREEN}
    times = {
        mode: [(us, simulate(kernels, mode, launch, us).step_us / 1000) for us in lengths]
        for mode in colors
    }
    at = {mode: simulate(kernels, mode, launch, 2.0).step_us / 1000 for mode in colors}
    svg = Svg(
        780,
        330,
        "When a graph pays",
        f"Milliseconds per step of {len(kernels)} kernels against the length of one kernel, 5 "
        "microseconds per launch, from the two-lane simulator. Eager is flat at about 1.5 ms until "
        "kernels last 5 microseconds, then rises with the others. With kernels of 2 microseconds: "
        + ", ".join(f"{mode} {value:.2f} ms" for mode, value in at.items())
        + ". Above 5 microseconds all three coincide.",
    )
    axes = Axes(svg, (56, 40, 700, 230), (0, 12), (0, 4))
    axes.frame(
        "length of one kernel in microseconds; a launch takes 5",
        f"milliseconds per step of {len(kernels)} kernels",
        range(0, 13),
        range(0, 5),
    )
    for mode, color in colors.items():
        axes.curve(times[mode], color, dash="6 4" if mode == "full" else None)
    axes.rule(x=5, stroke=PURPLE, dash="3 3")
    axes.label(5, 3.8, "kernel = launch: from here the GPU is the slower lane", PURPLE)
    axes.label(0.5, 1.5, "eager: the host is the slower lane", ORANGE, dy=-8)
    axes.label(2, 0.6, "piecewise, full (dashed)", GREEN, dx=22, dy=6)
    return svg.render()


def run_ladders() -> str:
    """How often the steps of a run had how many tokens, and three ladders for them."""
    lab = solution("lab-05-capture-sizes")
    steps = {n: c for n, c in served.histogram(served.serve()).items() if n <= 120}
    default = lab.default_capture_sizes(2 * served.MAX_NUM_SEQS)
    ladders = {"default": default} | {"chosen": lab.optimal_sizes(steps, 11)}
    ladders["chosen, as many"] = lab.optimal_sizes(steps, len(default))
    real = sum(n * count for n, count in steps.items())
    words = []
    for name, sizes in ladders.items():
        rows = sum(count * lab.padded_tokens(n, sizes) for n, count in steps.items())
        words.append(f"{name}: {len(sizes)} rungs, {rows / real:.1%} extra rows")
    svg = Svg(
        780,
        312,
        "Capture sizes for the traffic of a run",
        f"Steps of a run of the mini engine by their number of tokens, up to 120. "
        f"{'. '.join(words)}. The eleven are {ladders['chosen']}.",
    )
    axes = Axes(svg, (50, 24, 716, 150), (0, 122), (0, max(steps.values()) + 1))
    axes.frame(
        "tokens in the step", "steps", range(0, 121, 20),
        range(0, max(steps.values()) + 1, 2),
    )  # fmt: skip
    tips = [f"{n} tokens: {count} steps" for n, count in steps.items()]
    axes.bars(list(steps.items()), BLUE, opacity=0.8, tips=tips)
    for row, (name, sizes) in enumerate(ladders.items()):
        y = 218 + 32 * row
        svg.text(axes.x(0), y + 10, words[row], size=12)
        for size in sizes:
            colour = GREY if name == "default" else ORANGE
            svg.line(axes.x(size), y + 14, axes.x(size), y + 26, stroke=colour, width=2.5)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-05-run.svg": run_ladders,
    "lab-02-regimes.svg": regimes,
    "lab-01-tape.svg": tape,
    "lab-03-routes.svg": routes,
    "lab-05-padding.svg": padding,
}
