"""Figures of labs 06-01 and 06-03 and of the experiments.

Those of the labs are computed by the labs' own solutions, those of the experiments are drawn from
`experiments/measured`. No upstream counterpart.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SOFT, Svg
from course.truth.plots import Axes

PHASE = Path(__file__).resolve().parents[1]
INT8, INT4 = "lab-01-fake-quant-linear", "lab-03-int4-groups-and-packing"


@functools.cache
def solution(lab: str) -> ModuleType:
    """The reference solution of one of this phase's labs."""
    return load_module(PHASE / "labs" / lab / "solution.py")


def rel(a: np.ndarray, b: np.ndarray) -> float:
    """Norm of the error over norm of the exact one."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ------------------------------------------------------------------ lab 06-01


def grid() -> str:
    """Row 0 of the worked example on its own grid, and on the grid that the loud row sets."""
    lab = solution(INT8)
    W = np.array([[0.5, -0.9, 0.25, 2.0], [100, -40, 25, -12.5], [0, 0, 0, 0]], np.float32)
    own, scales = lab.quantize_per_channel(W)
    shared, scale = lab.quantize_per_tensor(W)
    svg = Svg(
        780,
        300,
        "One row of weights on two grids",
        "The weights 0.5, -0.9, 0.25 and 2.0. On the row's own grid, with a step of 0.0157, each "
        "lies practically on a grid point. On the grid of the whole tensor, with a step of 0.787, "
        "they move to 0.787, -0.787, 0 and 2.362.",
    )
    axes = Axes(svg, (30, 40, 720, 200), (-1.3, 2.6), (0, 1))
    rows = (
        (96, own[0], float(scales[0]), "own scale: 2.0 / 127 = 0.0157"),
        (226, shared[0], scale, "scale of the loud row: 100 / 127 = 0.787"),
    )
    for top, codes, step, words in rows:
        svg.text(30, top - 62, words, bold=True)
        svg.line(axes.x(-1.3), top, axes.x(2.6), top)
        for k in range(-127, 128):
            if -1.3 <= k * step <= 2.6:
                tall = 7 if step > 0.1 else 3.5
                svg.line(axes.x(k * step), top - tall, axes.x(k * step), top + tall)
        for weight, code in zip(W[0], codes, strict=True):
            x, to = axes.x(float(weight)), axes.x(float(code) * step)
            svg.circle(x, top - 30, 5, BLUE, tip=f"{weight:g}")
            svg.text(x, top - 40, f"{weight:g}", size=12, anchor="middle")
            svg.line(x, top - 25, to, top - 9, stroke=ORANGE, width=1.5, arrow=True)
            label = f"{code}"
            svg.text(to, top + 24, label, size=12, anchor="middle", css="ink mono")
            svg.text(
                to, top + 40, f"{float(code) * step:.3f}", size=11, anchor="middle", css="soft"
            )
    svg.text(30, 290, "dots: the weights; below each grid: the code and the value that comes back",
             size=12, css="soft")  # fmt: skip
    return svg.render()


def metric_trap() -> str:
    """Per-tensor error of all rows and of the quiet rows, as one row gets louder."""
    lab = solution(INT8)
    base = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    others = np.arange(64) != 3
    curves: dict[str, list[tuple[float, float]]] = {"whole": [], "others": [], "channel": []}
    for factor in 10.0 ** np.linspace(0, 3, 25):
        W = base.copy()
        W[3] *= np.float32(factor)
        tensor = lab.dequantize(*lab.quantize_per_tensor(W))
        channel = lab.dequantize(*lab.quantize_per_channel(W))
        curves["whole"].append((factor, rel(tensor, W)))
        curves["others"].append((factor, rel(tensor[others], W[others])))
        curves["channel"].append((factor, max(rel(channel[o], W[o]) for o in range(64))))
    whole, quiet, channel = (curves[name] for name in ("whole", "others", "channel"))
    svg = Svg(
        780,
        330,
        "The whole matrix's error hides what happens to its rows",
        "Relative error over the loudness of one row of 64, with one scale for the tensor. Of the "
        f"whole matrix: {whole[0][1]:.3f} at 1, at most {max(y for _, y in whole):.3f}, "
        f"{whole[-1][1]:.3f} at 1000. Of the other rows: {quiet[0][1]:.3f} at 1, "
        f"{quiet[16][1]:.2f} at 100, {quiet[-1][1]:.2f} at 1000. With own scales no row exceeds "
        f"{max(y for _, y in channel):.3f}.",
    )
    axes = Axes(svg, (60, 40, 520, 230), (1, 1000), (0.003, 1.5), log_x=True, log_y=True)
    ticks = {0.003: "0.3 %", 0.01: "1 %", 0.03: "3 %", 0.1: "10 %", 0.3: "30 %", 1.0: "100 %"}
    axes.frame(
        "how many times louder one row is", "relative error",
        {1: "1", 10: "10", 100: "100", 1000: "1000"}, ticks,
    )  # fmt: skip
    axes.curve(quiet, RED)
    axes.curve(whole, ORANGE, dash="5 3")
    axes.curve(channel, GREEN)
    axes.label(*quiet[-1], "the 63 other rows", RED, dy=8)
    axes.label(*whole[-1], "the whole matrix", ORANGE, dy=-4)
    axes.label(*channel[-1], "worst row, own scales", GREEN, dy=13)
    return svg.render()


# ------------------------------------------------------------------ lab 06-03


def layouts() -> str:
    """Where eight codes of one matrix go: two bytes' worth of nibbles, and two kinds of words."""
    lab = solution(INT4)
    codes = np.arange(8)
    svg = Svg(
        780,
        352,
        "Where eight codes go",
        "Eight neighbouring codes, numbered 0 to 7, and the nibbles they are stored in, the lowest "
        "at the right. Two per byte: byte 0 holds 1 and 0, and so on. GPTQ and compressed-tensors: "
        "one word with 7 6 5 4 3 2 1 0. AWQ: 7 5 3 1 6 4 2 0.",
    )
    left, cell = 250, 62

    def row(top: float, words: list[str], order: list[int], gaps: int) -> None:
        for number, line in enumerate(words):
            svg.text(16, top + 16 + 17 * number, line, size=13 if number == 0 else 11.5,
                     bold=number == 0, css="ink" if number == 0 else "soft")  # fmt: skip
        for place, index in enumerate(order):
            x = left + place * cell + (place // gaps) * 6
            fill = BLUE if index % 2 == 0 else ORANGE
            svg.rect(x, top, cell - 3, 40, fill=fill, opacity=0.14 + 0.09 * index, radius=4)
            svg.text(x + cell / 2, top + 25, str(index), anchor="middle", css="ink mono", bold=True)

    row(20, ["codes of the matrix", "in their order along the packed axis"], codes.tolist(), 8)
    packed = lab.pack_int4(codes[None] - 8)[0]
    nibbles = [n for byte in packed for n in (int(byte) >> 4, int(byte) & 15)]
    row(96, ["two per byte (this lab)", "bytes from left to right, high nibble", "first"],
        nibbles, 2)  # fmt: skip
    for top, order, words in (
        (184, lab.STANDARD, ["GPTQ, compressed-tensors", "bits 31 to 0 of one int32;",
                             "packed along the inputs"]),
        (272, lab.AWQ, ["AWQ", "bits 31 to 0 of one int32;", "packed along the outputs"]),
    ):  # fmt: skip
        word = int(lab.pack_words(codes[None] - 8, order).view(np.uint32)[0, 0])
        row(top, words, [word >> shift & 15 for shift in range(28, -4, -4)], 8)
    return svg.render()


def group_size() -> str:
    """Error over group size, for weights of one loudness and of a changing one."""
    lab = solution(INT4)
    rng = np.random.default_rng(0)
    band = np.repeat(10.0 ** rng.uniform(-1, 1, 16), 64)
    banded = rng.standard_normal((32, 1024)) * band
    even = np.random.default_rng(0).standard_normal((32, 1024))
    sizes = (8, 16, 32, 64, 128, 256, 512, 1024)
    curves: dict[str, list[tuple[float, float]]] = {"even": [], "banded": [], "quiet": []}
    for size in sizes:
        back = [lab.dequantize_grouped(*lab.quantize_grouped(W, size), size)
                for W in (even, banded)]  # fmt: skip
        quiet = band < 1
        curves["even"].append((size, rel(back[0], even)))
        curves["banded"].append((size, rel(back[1], banded)))
        curves["quiet"].append((size, rel(back[1][:, quiet], banded[:, quiet])))
    svg = Svg(
        780,
        310,
        "Error and cost over the size of a group",
        "Relative error over the group size. "
        + " ".join(
            f"{name}: {line[1][1]:.3f} at 16, {line[4][1]:.3f} at 128, {line[-1][1]:.3f} at 1024."
            for name, line in curves.items()
        ),
    )
    axes = Axes(svg, (60, 40, 500, 220), (8, 1024), (0, 1.05), log_x=True)
    ticks = {size: f"{size}\n{4 + 16 / size:.4g}" for size in sizes}
    axes.frame("", "relative error", ticks, {y / 10: f"{10 * y} %" for y in range(0, 11, 2)})
    svg.text(596, 277, "weights per group", size=12)
    svg.text(596, 292, "bits per weight", size=12)
    for name, colour, words, dy in (
        ("quiet", RED, "changing loudness, quiet part", 4),
        ("banded", ORANGE, "changing loudness, all", -2),
        ("even", GREEN, "Gaussian", 14),
    ):
        axes.curve(curves[name], colour)
        axes.dots(curves[name], colour, radius=3)
        axes.label(*curves[name][-1], words, colour, dy=dy)
    return svg.render()


# ------------------------------------------------------------------ experiments


def measured(name: str) -> dict[str, Any]:
    """One of the committed results."""
    path = PHASE / "experiments" / "measured" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def evaluation() -> ModuleType:
    """The script of the table, for its statistics."""
    return load_module(PHASE / "experiments" / "evaluate.py")


def changes(part: str) -> dict[str, tuple[float, float, float]]:
    """Per row, the change in thousandths of a bit per byte and its interval."""
    saved, script = measured("evaluation"), evaluation()
    rows, sizes = saved[part], saved["text"]["sizes"]
    base = rows[script.BASE]["bits"]
    return {
        name: tuple(1000 * value for value in script.interval(row["bits"], base, sizes))
        for name, row in rows.items()
        if name != script.BASE
    }


def bits() -> str:
    """What each scheme costs in bits per byte, with its interval, best first."""
    rows = measured("evaluation")["rows"]
    found = sorted(changes("rows").items(), key=lambda item: item[1][0])
    svg = Svg(
        780,
        60 + 24 * len(found) + 40,
        "What each scheme costs",
        "Change in thousandths of a bit per byte, with its interval, and bytes of the linear "
        "layers. "
        + " ".join(
            f"{name}: {mean:+.1f} ({low:+.1f} to {high:+.1f})." for name, (mean, low, high) in found
        ),
    )
    height = 24 * len(found)
    axes = Axes(svg, (210, 40, 450, height), (-1, 33), (len(found) - 0.5, -0.5))
    axes.frame(
        "lost: thousandths of a bit per byte (dot), 95 % interval (line)", "",
        None, dict(enumerate(name for name, _ in found)),
    )  # fmt: skip
    svg.text(672, 30, "bytes of linears", size=12)
    for number, (name, (mean, low, high)) in enumerate(found):
        colour = BLUE if "8" in name.split()[0] and "W8A8" not in name else ORANGE
        colour = PURPLE if "W8A8" in name else colour
        axes.spans([(number, low, high)], colour, width=3, lying=True)
        axes.dots([(mean, number)], colour, radius=5, tips=[f"{mean:+.1f}"])
        axes.label(33, number, f"{rows[name]['weight_bytes']:,}", SOFT, dx=12)
    return svg.render()


def planted() -> str:
    """The same schemes on the model as shipped and with planted outlier channels."""
    shipped, loud = changes("rows"), changes("planted")
    names = list(loud)
    svg = Svg(
        780,
        70 + 30 * len(names) + 40,
        "Outlier channels, planted",
        "Change in thousandths of a bit per byte as shipped and with two channels made 80 times "
        "louder. "
        + " ".join(f"{name}: {shipped[name][0]:+.1f}, {loud[name][0]:+.1f}." for name in names),
    )
    box, rows = (210, 40, 460, 30 * len(names)), (len(names) - 0.5, -0.5)
    axes = Axes(svg, box, (0.03, 2000), rows, log_x=True)
    axes.frame(
        "lost: thousandths of a bit per byte, logarithmic", "",
        (0.1, 1, 10, 100, 1000), dict(enumerate(names)),
    )  # fmt: skip
    pairs = [(shipped[name][0], loud[name][0]) for name in names]
    axes.spans([(row, *pair) for row, pair in enumerate(pairs)], GREY, width=1.5, lying=True)
    for place, color, radius, words in (
        (1, RED, 6, "two of 256 channels 80 times louder"),
        (0, GREEN, 4, "as shipped"),
    ):
        points = [(pair[place], row) for row, pair in enumerate(pairs)]
        tips = [f"{pair[place]:+.1f}" for pair in pairs]
        axes.dots(points, color, radius=radius, tips=tips, name=words)
    for row, (before, after) in enumerate(pairs):
        axes.label(max(before, after), row, f"{before:+.1f}, {after:+.1f}", SOFT, dx=10)
    axes.legend(210, 14, columns=2)
    return svg.render()


def gptq_layers() -> str:
    """Weight error and output error per layer: GPTQ makes the first worse and the second better."""
    layers = measured("gptq")["layers"]
    svg = Svg(
        780,
        330,
        "GPTQ moves the weights further and the outputs less",
        "Relative error per linear layer of the shipped model, rounding to nearest and GPTQ. "
        + " ".join(
            f"{name}: weight {row['weight']:.3f} and {row['gptq_weight']:.3f}, output "
            f"{row['output']:.3f} and {row['gptq_output']:.3f}."
            for name, row in layers.items()
        ),
    )
    for left, key, title in ((60, "weight", "error of the weight"),
                             (430, "output", "error of the output, fresh text")):  # fmt: skip
        axes = Axes(svg, (left, 40, 320, 220), (-0.5, 15.5), (0, 0.22))
        ticks = {1.5 + 4 * block: f"layer {block}" for block in range(4)}
        axes.frame("qkv, o, gate and up, down of each layer", title, ticks,
                   {y / 100: f"{y} %" for y in (0, 5, 10, 15, 20)})  # fmt: skip
        pairs = [(row[key], row[f"gptq_{key}"]) for row in layers.values()]
        axes.spans([(number, *pair) for number, pair in enumerate(pairs)], GREY)
        for place, color, words in ((0, ORANGE, "rounding to nearest"), (1, BLUE, "GPTQ")):
            points = [(number, pair[place]) for number, pair in enumerate(pairs)]
            tips = [f"{pair[place]:.3f}" for pair in pairs]
            axes.dots(points, color, tips=tips, name=words)
        if key == "weight":
            axes.legend(60, 310, columns=2)
    return svg.render()


def awq_search() -> str:
    """Output error over the exponent, for one layer as shipped and with planted outliers."""
    saved = measured("awq")
    alphas = saved["alphas"]
    name = "layers.3.gate_up_proj"
    svg = Svg(
        780,
        310,
        "The search of AWQ on one layer",
        f"Relative output error of {name} over the exponent. "
        + " ".join(
            f"{words}: {saved[part][name]['seen'][0]:.4f} at 0, least "
            f"{min(saved[part][name]['seen']):.4f}, {saved[part][name]['seen'][-1]:.4f} at 1."
            for part, words in (("layers", "as shipped"), ("planted", "with outliers"))
        ),
    )
    axes = Axes(svg, (60, 40, 500, 200), (0, 1), (0.1, 0.15))
    axes.frame("exponent of the mean input magnitude; 0 is rounding to nearest",
               "relative error of the output",
               {k / 5: f"{k / 5:g}" for k in range(6)},
               {y / 100: f"{y} %" for y in range(10, 16)})  # fmt: skip
    for part, colour, words, dy in (
        ("layers", GREEN, "as shipped", 14), ("planted", RED, "two channels 80 times louder", -4)
    ):  # fmt: skip
        curve = saved[part][name]["seen"]
        points = list(zip(alphas, curve, strict=True))
        axes.curve(points, colour)
        axes.curve(list(zip(alphas, saved[part][name]["fresh"], strict=True)), colour, dash="3 3")
        best = min(range(len(curve)), key=curve.__getitem__)
        axes.dots([points[best]], colour, radius=6)
        axes.label(*points[-1], words, colour, dy=dy)
    svg.text(570, 246, "solid: calibration text", size=11, css="soft")
    svg.text(570, 261, "dotted: fresh text", size=11, css="soft")
    return svg.render()


SERVED = (
    "float16, as shipped", "gptq, mini-GPTQ", "gptq, nearest", "gptq with zeros as they are",
    "reordered, and not said", "awq with zeros less one", "gptq without the bias",
    "gptq reshaped, not transposed", "square matrices transposed", "awq in standard order",
)  # fmt: skip


def served() -> str:
    """What vLLM needs per byte and writes: sound checkpoints, and packed with one mistake."""
    saved = measured("served")
    rows, total = saved["rows"], sum(saved["text"]["sizes"].values())
    cost = {
        name: None if None in (known := rows[name]["bits"].values()) else sum(known) / total
        for name in SERVED
    }
    height = 30 * len(SERVED)
    svg = Svg(
        860,
        height + 90,
        "One mistake in the packing, served",
        "Bits per byte of held-out text in vLLM, and how it continues 'The scheduler '. "
        + " ".join(
            f"{name}: {'NaN' if bits is None else f'{bits:.2f}'}, {rows[name]['text'][:24]!r}."
            for name, bits in cost.items()
        ),
    )
    axes = Axes(svg, (222, 40, 300, height), (0, 10), (len(SERVED) - 0.5, -0.5))
    axes.frame("bits per byte", "", (0, 2, 4, 6, 8), dict(enumerate(cost)))
    knowing_nothing = float(np.log2(257))
    axes.rule(x=knowing_nothing, width=1.5)
    axes.label(knowing_nothing, -0.5, "257 equal chances", SOFT, dx=0, dy=-8, anchor="middle")
    svg.text(546, 32, "'The scheduler ' goes on", size=12)
    for number, (name, bits) in enumerate(cost.items()):
        y = 40 + 30 * number
        sound = name not in SERVED[3:]
        if bits is None:
            axes.label(0, number, "not a number", RED)
        else:
            colour = BLUE if sound else GREEN if bits < 1.9 else ORANGE if bits < 3 else RED
            tips = [f"{bits:.4f}"]
            axes.bars([(number, bits)], colour, width=0.6, opacity=1, lying=True, tips=tips)
            axes.label(bits, number, f"{bits:.2f}", SOFT)
        shown = rows[name]["text"].replace("\0", r"\0")[:34]
        shown = "".join(c if c.isprintable() else "·" for c in shown)
        svg.text(546, y + 19, shown, size=12, css="ink mono")
    return svg.render()


FIGURES = {
    "lab-01-grid.svg": grid,
    "lab-01-metric-trap.svg": metric_trap,
    "lab-03-layouts.svg": layouts,
    "lab-03-group-size.svg": group_size,
    "eval-bits.svg": bits,
    "eval-planted.svg": planted,
    "gptq-layers.svg": gptq_layers,
    "awq-search.svg": awq_search,
    "served.svg": served,
}
