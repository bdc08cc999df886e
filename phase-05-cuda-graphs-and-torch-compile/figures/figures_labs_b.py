"""The figures of labs 05-04, 05-06 and 05-07.

What they show comes from the labs' reference solutions. No upstream counterpart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import ModuleType

from conformance import parts
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Svg
from course.truth.plots import Axes

PHASE = Path(__file__).resolve().parents[1]


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(PHASE / "labs" / folder / "solution.py")


# ------------------------------------------------------------------ lab 05-04


def setting(arm: dict) -> tuple[bool, str]:
    """Whether an arm compiles, and its graph mode."""
    if arm.get("enforce_eager"):
        return False, "NONE"
    asked = arm.get("compilation_config", {})
    return asked.get("mode", 3) == 3, asked.get("cudagraph_mode", "FULL_AND_PIECEWISE")


def arms() -> str:
    """Five arms in a plane of compiler and graphs, and the effects as arrows between them."""
    lab = solution("lab-04-graph-vs-eager-real")
    usual = {"kind": "ladder", "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    usual |= {"query_len": 1, "performance_mode": "balanced"}
    (sizes,) = [
        case["sizes"] for case in parts.load("cudagraph_modes") if usual.items() <= case.items()
    ]
    column = {"NONE": 0, "PIECEWISE": 1, "FULL_DECODE_ONLY": 2, "FULL_AND_PIECEWISE": 2}
    place, lines = {}, {}
    for name, arm in lab.ARMS.items():
        compiled, mode = setting(arm)
        place[name] = (190 + 200 * column[mode], 70 if compiled else 220)
        bars = [f"{m} {rungs}" for _, m, rungs in lab.expected_passes(mode, sizes, 256)]
        lines[name] = [name, mode, "bars: " + (", ".join(bars) or "none")]
    described = "; ".join(f"{words[0]}: {words[1]}, {words[2]}" for words in lines.values())
    svg = Svg(
        780,
        330,
        "Five arms, four effects",
        "Arms of the experiment in a plane: compiler off below and on above, graphs from none on "
        f"the left to full on the right. {described}. Arrows: "
        + ", ".join(lab.EFFECTS)
        + ". A to B crosses both.",
    )
    for x, words in ((190, "no graphs"), (390, "piecewise"), (590, "decode in full graphs")):
        svg.text(x + 80, 36, words, anchor="middle", bold=True)
    svg.text(14, 104, "compiler on", bold=True)
    svg.text(14, 120, "hand-written ops off", size=11, css="soft")
    svg.text(14, 254, "compiler off", bold=True)
    svg.text(14, 270, "hand-written ops on", size=11, css="soft")
    a, b, c, d, e = (place[name] for name in "ABCDE")
    svg.line(
        a[0] + 160, a[1] + 8, b[0] - 4, b[1] + 66, stroke=GREY, width=2, dash="6 4", arrow=True
    )
    svg.text(486, 204, "everything", size=12, anchor="middle", fill=GREY)
    svg.polyline([(c[0] + 110, c[1]), (c[0] + 110, 52), (b[0] + 26, 52)], GREEN)
    svg.line(b[0] + 26, 52, b[0] + 26, b[1] - 2, stroke=GREEN, width=2, arrow=True)
    svg.text(430, 66, "graphs", size=12, anchor="middle", fill=GREEN)
    svg.line(d[0] + 110, d[1], d[0] + 110, b[1] + 68, stroke=BLUE, width=2, arrow=True)
    svg.text(d[0] + 118, 184, "compiler", size=12, fill=BLUE)
    svg.line(e[0] + 160, e[1] + 33, b[0] - 3, b[1] + 33, stroke=PURPLE, width=2, arrow=True)
    svg.text(570, 122, "full", size=11, anchor="middle", fill=PURPLE)
    for name, (x, y) in place.items():
        svg.box(x, y, 160, 66, lines[name], fill=ORANGE if name == "B" else GREY, size=12.5)
    svg.text(190, 314, "bars: rungs captured at startup with max_num_seqs 256", size=11, css="soft")
    return svg.render()


# ------------------------------------------------------------------ lab 05-06


def pieces() -> str:
    """Two layers cut at KV write and attention, with the fused pair."""
    lab = solution("lab-06-split-and-fuse")
    graph = lab.decoder(2)
    before, after = lab.split(graph), lab.compile_pieces(graph)
    counts = [sum(lab.kernels(piece.nodes) for piece in found) for found in (before, after)]
    svg = Svg(
        780,
        416,
        "A graph of two layers in pieces",
        f"{len(before)} pieces in a row. "
        + "; ".join(
            f"{'not captured' if piece.splits else 'captured'}: "
            + ", ".join(node.op for node in piece.nodes)
            for piece in after
        )
        + f". silu and mul have become silu_mul: {counts[0]} kernels before, {counts[1]} after. "
        "Residuals pass by the attention pieces.",
    )
    width = {False: 186, True: 84}
    x = 12.0
    for number, piece in enumerate(after):
        wide = width[piece.splits]
        color = ORANGE if piece.splits else BLUE
        old = lab.kernels(before[number].nodes)
        new = lab.kernels(piece.nodes)
        words = "launched" if piece.splits else "one graph"
        svg.rect(x, 40, wide, 322, fill=color, opacity=0.1, stroke=color, radius=6)
        svg.text(x + wide / 2, 30, words, size=12.5, anchor="middle", bold=True)
        rows: list[tuple[str, bool, bool]] = []  # words, a view, the fused node
        for view, nodes in groupby(piece.nodes, key=lambda node: node.op in lab.NO_KERNEL):
            if view:
                ops = Counter(node.op for node in nodes)
                shown = ", ".join(f"{n} x {op}" if n > 1 else op for op, n in ops.items())
                rows.append((shown, True, False))
                continue
            for node in nodes:
                words = node.op if piece.splits else f"{node.op}  → {node.name}"
                rows.append((words, False, node.op == "silu_mul"))
        for row, (words, view, fused) in enumerate(rows):
            y = 62 + row * 24
            if fused:
                svg.rect(x + 8, y - 15, wide - 16, 21, fill=GREEN, opacity=0.3, radius=3)
            size, css = (11, "soft") if view else (12, "ink")
            svg.text(x + wide / 2, y, words, size=size, anchor="middle", css=css, bold=fused)
        total = f"{new} kernels" if new == old else f"{old} → {new} kernels"
        svg.text(x + wide / 2, 382, total, size=12, anchor="middle")
        x += wide + 8
    last = (
        f"{lab.submissions(before, 'eager')} launches eager, {lab.submissions(after, 'eager')} "
        f"fused; {lab.submissions(after, 'piecewise')} with piecewise graphs, fused or not"
    )
    svg.text(390, 406, last, size=12, anchor="middle", css="soft")
    return svg.render()


# ------------------------------------------------------------------ lab 05-07


def gains() -> str:
    """What a graph gains over the length of a kernel, for two numbers of kernels."""
    lab = solution("lab-07-graphs-in-pytorch")
    launch, replay, ratio = 5.0, 12.0, 1.1
    lengths = [0.25 + 0.05 * i for i in range(236)]
    curves = {300: BLUE, 10: ORANGE}
    at = {n: lab.kernel_us_at_gain(n, launch, replay, ratio) for n in curves}
    short = {n: lab.gain(n, launch, replay, 1) for n in curves}
    lowest = min(lab.gain(10, launch, replay, us) for us in lengths)
    svg = Svg(
        780,
        340,
        "Gain of a graph over the length of a kernel",
        "Eager over graph, a launch 5 and a replay 12 microseconds. With 300 kernels the gain "
        f"falls from {short[300]:.2f} at 1 microsecond to 1.1 at {at[300]:.2f} and stays just "
        f"below 1. With 10 kernels it is {short[10]:.2f} at 1, 1.1 at {at[10]:.2f}, and "
        f"{lowest:.2f} at the lowest.",
    )
    axes = Axes(svg, (56, 40, 700, 240), (0, 12), (0, 6))
    axes.frame(
        "length of one kernel in microseconds; a launch takes 5, a replay 12",
        "eager / graph",
        range(0, 13),
        range(0, 7),
    )
    axes.rule(y=1, stroke=INK, dash=None)
    for n, color in curves.items():
        points = [(us, lab.gain(n, launch, replay, us)) for us in lengths]
        axes.curve([(us, gain) for us, gain in points if gain <= 6], color)
        axes.dots([(at[n], ratio)], color, radius=5)
    axes.rule(x=5, stroke=PURPLE, dash="3 3")
    axes.label(5, 5.6, "kernel = launch", PURPLE)
    axes.label(1, short[300], "300 kernels", BLUE, dx=10)
    axes.label(0.2, 1.6, "10 kernels", ORANGE, dx=0)
    axes.label(at[300], ratio, f"gain 1.1 at {at[300]:.2f} us", BLUE, dx=40, dy=-12)
    axes.label(at[10], ratio, f"gain 1.1 at {at[10]:.2f} us", ORANGE, dx=-4, dy=26, anchor="end")
    axes.label(
        6.2, lab.gain(10, launch, replay, 6.2), "below 1: the replay costs more than one launch",
        ORANGE, dy=24,
    )  # fmt: skip
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-04-arms.svg": arms,
    "lab-06-pieces.svg": pieces,
    "lab-07-gain.svg": gains,
}
