"""Figures of the chapters of phase 05.

`served_steps` is a run of the mini engine, `lanes` and `regimes` are runs of
`mini_vllm.cudagraph.launches`; `dispatch` and `fallback` come from the recording of the real
dispatcher. `freeze`, `strip`, `wrappers` and `pipeline` are diagrams. No upstream counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conformance import parts
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm.cudagraph.launches import LAYER, MODES, simulate

served = load_module(Path(__file__).with_name("served.py"))

COLORS = {"FULL": GREEN, "PIECEWISE": BLUE, "NONE": GREY}


# ------------------------------------------------------------------ the simulator


def lanes() -> str:
    """One decoder layer, twice: host and GPU lanes of the three modes."""
    kernels = LAYER * 2
    runs = {mode: simulate(kernels, mode, 5.0, 2.0) for mode in MODES}
    words = ", ".join(f"{mode} {run.step_us:g} µs" for mode, run in runs.items())
    svg = Svg(
        780,
        350,
        "The same 18 kernels issued three ways",
        f"Two layers of nine kernels, 5 µs per launch, 2 µs per kernel: {words}. Eager: the host "
        "lane is full and the GPU lane has a gap after every kernel. Full: one launch, then the "
        "kernels without a gap.",
    )
    left, width = 90, 660
    longest = runs["eager"].step_us
    for row, (mode, run) in enumerate(runs.items()):
        top = 34 + row * 98
        count = f"{len(run.launches)} launch" + ("es" if len(run.launches) > 1 else "")
        busy = f"{count}, {run.step_us:g} µs, GPU busy {run.gpu_busy:.0%}"
        svg.text(left, top - 8, f"{mode}: {busy}", size=13, bold=True)
        for lane, (name, spans) in enumerate((("host", run.launches), ("GPU", run.kernels))):
            y = top + lane * 32
            svg.text(left - 10, y + 18, name, anchor="end", size=12, css="soft")
            svg.line(left, y + 26, left + width, y + 26, css="grid-line")
            for span in spans:
                color = ORANGE if lane == 0 else PURPLE if span.name == "attention" else BLUE
                svg.rect(
                    left + width * span.start / longest + 0.5,
                    y,
                    width * (span.end - span.start) / longest - 1,
                    25,
                    fill=color,
                    opacity=0.8,
                    tip=f"{span.name}: {span.start:g} to {span.end:g} µs",
                )
    for us in range(0, 91, 10):
        x = left + width * us / longest
        svg.text(x, 328, f"{us}", size=11, anchor="middle", css="soft")
    svg.text(left + width / 2, 345, "µs; purple kernels are attention", size=12, anchor="middle")
    return svg.render()


def regimes() -> str:
    """Step time over kernel time, 288 kernels, 5 µs per launch."""
    kernels = LAYER * 32
    svg = Svg(
        780,
        340,
        "Where launches matter and where they do not",
        "Step time over mean kernel time for 288 kernels at 5 µs per launch. Eager stays at about "
        "1.44 ms until a kernel takes 5 µs; the full graph grows in proportion; from 5 µs on the "
        "three lines run together.",
    )
    axes = Axes(svg, (66, 40, 690, 236), (0.25, 16), (0.05, 5), log_x=True, log_y=True)
    axes.frame(
        "mean time of a kernel, µs",
        "step, ms",
        {n: f"{n:g}" for n in (0.25, 0.5, 1, 2, 4, 5, 8, 16)},
        {n: f"{n:g}" for n in (0.05, 0.1, 0.2, 0.5, 1, 2, 5)},
    )
    times = [0.25 * 2 ** (k / 8) for k in range(49)]
    for mode, color in zip(MODES, (ORANGE, BLUE, GREEN), strict=True):
        points = [(t, simulate(kernels, mode, 5.0, t).step_us / 1e3) for t in times]
        axes.curve(points, color)
        axes.label(points[0][0], points[0][1], mode, color, dx=8, dy=-7)
    axes.curve([(5, 0.05), (5, 5)], GREY, dash="4 4")
    axes.label(5, 0.06, "kernel time = launch cost", dx=8, dy=0)
    return svg.render()


# ------------------------------------------------------------------ the recorded dispatcher


@functools.cache
def cases() -> list[dict[str, Any]]:
    """The recording, read once."""
    loaded: list[dict[str, Any]] = parts.load("cudagraph_modes")
    return loaded


def found(mode: str, max_num_seqs: int) -> list[Any]:
    """For each token count: mixed, mixed without full, decode, decode without full."""
    for case in cases():
        if case["kind"] == "dispatch" and (case["mode"], case["max_num_seqs"]) == (
            mode,
            max_num_seqs,
        ):
            answers: list[Any] = case["found"]
            return answers
    raise ValueError(f"no recording of {mode} with max_num_seqs={max_num_seqs}")


def dispatch() -> str:
    """What the real dispatcher answers for 1 to 600 tokens, in all modes."""
    modes = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    svg = Svg(
        780,
        374,
        "Five modes, two kinds of batch, 600 token counts",
        "Recorded answers of the real dispatcher with max_num_seqs 256. NONE: no graph. PIECEWISE "
        "and FULL: that graph up to 512 tokens, any batch. FULL_DECODE_ONLY: FULL for decodes "
        "up to 256, no graph for mixed. FULL_AND_PIECEWISE: FULL for decodes, PIECEWISE "
        "for mixed up to 512, no graph above.",
    )
    left, width = 200, 560
    y = 34.0
    for mode in modes:
        answers = found(mode, 256)
        svg.text(8, y + 25, mode, size=12, bold=True, css="ink mono")
        for kind, column in (("decode", 2), ("mixed", 0)):
            svg.text(left - 8, y + 15, kind, size=11, anchor="end", css="soft")
            start = 0
            runtime = [None if row[column] is None else row[column][0] for row in answers]
            for end in range(1, len(runtime) + 1):
                if end == len(runtime) or runtime[end] != runtime[start]:
                    name = runtime[start]
                    x, long = left + width * start / 600, width * (end - start) / 600
                    if name is not None:
                        svg.rect(
                            x,
                            y,
                            long - 1,
                            21,
                            fill=COLORS[name],
                            opacity=0.25 if name == "NONE" else 0.75,
                            tip=f"{start + 1} to {end} tokens: {name}",
                        )
                        words = "no graph" if name == "NONE" else name
                        svg.text(x + long / 2, y + 15, words, size=11, anchor="middle")
                    start = end
            y += 24
        y += 14
    for tokens in (1, 128, 256, 384, 512, 600):
        svg.text(left + width * tokens / 600, y + 4, str(tokens), size=11, anchor="middle")
    svg.text(
        left + width / 2, y + 22, "tokens in the step; max_num_seqs 256", size=12, anchor="middle"
    )
    return svg.render()


def fallback() -> str:
    """Decode batches of 1 to 60 requests with max_num_seqs 60: rows computed, and which graph."""
    answers = [row[2] for row in found("FULL_AND_PIECEWISE", 60)[:60]]
    svg = Svg(
        780,
        330,
        "The ladder, climbed by decode batches of 1 to 60",
        "Rows computed over requests in the batch, recorded with max_num_seqs 60: stairs at 1, 2, "
        "4, 8, 16 and on, full graphs up to 56; 57 to 60 padded to 64 with piecewise graphs.",
    )
    axes = Axes(svg, (60, 36, 696, 232), (0, 62), (0, 68))
    axes.frame(
        "decoding requests in the step",
        "rows the graph computes",
        (1, 4, 8, 16, 24, 32, 40, 48, 56, 60),
        range(0, 65, 16),
    )
    axes.curve([(0, 0), (62, 62)], GREY, dash="4 4")
    axes.label(34, 30, "without padding", dx=0, dy=14)
    for tokens, (mode, rows) in enumerate(answers, start=1):
        axes.dots([(tokens, rows)], COLORS[mode], radius=3.6, tips=[f"{tokens}: {mode}, {rows}"])
    axes.label(28, 40, "FULL", GREEN, dx=0, dy=-8)
    axes.label(56.5, 64, "PIECEWISE", BLUE, dx=-74, dy=4)
    return svg.render()


# ------------------------------------------------------------------ diagrams


def freeze() -> str:
    """What a capture keeps and what stays outside."""
    svg = Svg(
        780,
        236,
        "What a graph holds, and what it reads through",
        "A new batch is copied into a persistent input buffer. The graph holds kernels, grid sizes "
        "and addresses, reads the buffer, weights and KV cache by address, and writes an output "
        "buffer that the next replay overwrites.",
    )
    svg.box(16, 40, 136, 56, ["this step's batch", "a new array each time"], fill=GREY)
    svg.box(212, 40, 150, 56, ["input buffer", "one address, for ever"], fill=ORANGE)
    svg.box(
        420,
        24,
        180,
        88,
        ["graph", "kernels, in order", "grid sizes, scalars", "addresses"],
        fill=BLUE,
    )
    svg.box(660, 40, 110, 56, ["output buffer", "reused"], fill=ORANGE)
    svg.box(420, 158, 180, 52, ["weights, KV cache", "contents may change"], fill=GREEN)
    svg.line(152, 68, 210, 68, arrow=True, width=1.5)
    svg.text(181, 58, "copy", size=11, anchor="middle", css="soft")
    svg.line(362, 68, 418, 68, arrow=True, width=1.5)
    svg.line(600, 68, 658, 68, arrow=True, width=1.5)
    svg.line(510, 157, 510, 114, arrow=True, width=1.5)
    svg.text(16, 176, "Frozen at capture: everything in the blue box.", size=12)
    svg.text(16, 196, "Free to change: what lies at the addresses.", size=12)
    return svg.render()


def strip() -> str:
    """FULL and PIECEWISE for three layers."""
    svg = Svg(
        780,
        210,
        "Three layers as one graph, and as four graphs around three attentions",
        "FULL: one bar from embedding to the last norm. PIECEWISE: graph, attention, graph, "
        "attention, graph, attention, graph; seven submissions and more, four of them graphs.",
    )
    left, width = 110, 650
    svg.text(left - 12, 60, "FULL", anchor="end", bold=True)
    svg.rect(left, 36, width, 38, fill=GREEN, opacity=0.4, stroke=GREEN, radius=4)
    svg.text(left + width / 2, 60, "1 graph: attention inside", anchor="middle", size=12)
    svg.text(left - 12, 130, "PIECEWISE", anchor="end", bold=True)
    x = float(left)
    names = ("embed, QKV", "out, MLP, QKV", "out, MLP, QKV", "out, MLP, norm")
    for index, name in enumerate(names):
        svg.rect(x, 106, 110, 38, fill=BLUE, opacity=0.4, stroke=BLUE, radius=4)
        svg.text(x + 55, 122, f"graph {index + 1}", anchor="middle", size=12, bold=True)
        svg.text(x + 55, 138, name, anchor="middle", size=11, css="soft")
        x += 114
        if index < 3:
            svg.rect(x, 106, 62, 38, fill=PURPLE, opacity=0.4, stroke=PURPLE, radius=4)
            svg.text(x + 31, 122, "KV write,", anchor="middle", size=11)
            svg.text(x + 31, 138, "attention", anchor="middle", size=11)
            x += 66
    svg.text(
        left,
        180,
        "N layers: 1 graph against N + 1 graphs and N regions issued as they come. Per rung.",
        size=12,
        css="soft",
    )
    return svg.render()


def wrappers() -> str:
    """Who decides and who obeys in one step."""
    svg = Svg(
        780,
        300,
        "Who decides, who carries the decision, who obeys",
        "The runner asks the dispatcher, which returns a mode and a padded descriptor. They travel "
        "in the forward context. The FULL wrapper is around the model, the PIECEWISE wrappers are "
        "around the pieces of the compiled forward pass.",
    )
    svg.box(14, 30, 150, 60, ["model runner", "fills buffers"], fill=GREY)
    svg.box(14, 128, 150, 74, ["dispatcher", "mode, descriptor", "decides"], fill=ORANGE)
    svg.box(14, 238, 150, 48, ["forward context", "carries"], fill=GREY)
    svg.line(89, 90, 89, 126, arrow=True)
    svg.line(89, 202, 89, 236, arrow=True)
    svg.rect(220, 24, 546, 262, fill=GREEN, opacity=0.12, stroke=GREEN, radius=8)
    svg.text(236, 48, "CUDAGraphWrapper, runtime mode FULL", bold=True)
    svg.rect(242, 62, 504, 208, css="paper", stroke=GREY, radius=8)
    svg.text(258, 86, "the model; its forward is compiled and split", size=12)
    for index in range(3):
        x = 262 + index * 168
        svg.rect(x, 104, 130, 116, fill=BLUE, opacity=0.18, stroke=BLUE, radius=6)
        svg.text(x + 65, 124, "wrapper,", size=12, anchor="middle", bold=True)
        svg.text(x + 65, 140, "PIECEWISE", size=12, anchor="middle", bold=True)
        svg.box(x + 14, 154, 102, 52, ["piece", "Inductor code"], fill=GREY, size=12)
        if index < 2:
            svg.rect(x + 135, 130, 28, 64, fill=PURPLE, opacity=0.5, radius=4)
    svg.text(258, 250, "purple: KV write and attention, never in a piece", size=12, css="soft")
    svg.line(89, 237, 89, 237)
    svg.line(164, 262, 218, 262, arrow=True)
    return svg.render()


def pipeline() -> str:
    """From a model class to wrapped pieces."""
    svg = Svg(
        780,
        196,
        "From a Python forward to wrapped pieces",
        "Dynamo traces the decorated forward into one graph; split_graph cuts it at attention; "
        "Inductor with vLLM's passes compiles each distinct piece; each piece is wrapped; results "
        "of tracing and compiling are cached on disk, captured graphs never.",
    )
    steps = (
        (["forward()", "decorated", "class"], GREY),
        (["Dynamo", "traces once", "one FX graph"], ORANGE),
        (["split_graph", "at attention", "2N + 1 parts"], ORANGE),
        (["Inductor", "vLLM passes", "3 artifacts"], ORANGE),
        (["wrap", "PIECEWISE", "N + 1 wrappers"], BLUE),
        (["capture", "at startup", "every start"], RED),
    )
    for index, (lines, color) in enumerate(steps):
        x = 12 + index * 128
        svg.box(x, 40, 108, 78, lines, fill=color)
        if index:
            svg.line(x - 20, 79, x - 2, 79, arrow=True, width=1.5)
    svg.line(140, 140, 504, 140, stroke=ORANGE, width=2)
    svg.text(322, 160, "kept on disk between starts", anchor="middle", size=12)
    svg.line(652, 140, 760, 140, stroke=RED, width=2)
    svg.text(706, 160, "never kept", anchor="middle", size=12)
    return svg.render()


def served_steps() -> str:
    """Every step of a run of the mini engine: its tokens, its padding, its runtime mode."""
    steps = served.routed(served.serve(), found("FULL_AND_PIECEWISE", served.MAX_NUM_SEQS))
    names = ("FULL", "PIECEWISE", "NONE")
    tally = {name: sum(mode == name for mode, _, _ in steps) for name in names}
    real, rows = (sum(step[place] for step in steps) for place in (1, 2))
    svg = Svg(
        780,
        300,
        "A run of the mini engine and the mode of each step",
        f"{len(steps)} steps with max_num_seqs 60, so rungs up to 120: "
        + ", ".join(f"{count} {name}" for name, count in tally.items())
        + f". {real:,} tokens, {rows - real} rows of padding.",
    )
    axes = Axes(svg, (50, 24, 716, 226), (0, len(steps)), (0, 260))
    axes.frame(
        "step",
        "tokens in the step; light on top: padding",
        range(0, len(steps), 20),
        (0, 60, 120, 180, 240),
    )
    for name in names:
        own = [(n, tokens, rows) for n, (mode, tokens, rows) in enumerate(steps) if mode == name]
        words = "no graph" if name == "NONE" else name
        axes.bars(
            [(n + 0.5, tokens) for n, tokens, _ in own], COLORS[name], width=0.85, opacity=0.8,
            tips=[f"step {n}: {tokens} tokens, {name} {rows}" for n, tokens, rows in own],
            name=f"{words}: {tally[name]} steps",
        )  # fmt: skip
        light = [(n + 0.5, rows - tokens, tokens) for n, tokens, rows in own if rows > tokens]
        if light:
            axes.bars(
                [each[:2] for each in light], COLORS[name], base=[each[2] for each in light],
                width=0.85, opacity=0.35,
            )  # fmt: skip
    axes.legend(550, 30)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "served-steps.svg": served_steps,
    "lanes.svg": lanes,
    "regimes.svg": regimes,
    "dispatch.svg": dispatch,
    "fallback.svg": fallback,
    "freeze.svg": freeze,
    "strip.svg": strip,
    "wrappers.svg": wrappers,
    "pipeline.svg": pipeline,
}
