"""Figures of labs 06-02, 06-04 and 06-05 and of the studies.

Those of the labs are computed by the labs' own solutions, those of the studies are drawn from
`studies/measured` and the shipped weights. No upstream counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes

PHASE = Path(__file__).resolve().parents[1]


@functools.cache
def solution(lab: str) -> ModuleType:
    """The reference solution of one of this phase's labs."""
    return load_module(PHASE / "labs" / lab / "solution.py")


@functools.cache
def study(name: str) -> ModuleType:
    """One of the studies' modules."""
    return load_module(PHASE / "studies" / f"{name}.py")


def measured(name: str) -> dict:
    """A committed result of a study."""
    return study("study_tools").measured(name)


def rel(got: np.ndarray, exact: np.ndarray) -> float:
    """Norm of the error over norm of what is exact."""
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def setup() -> tuple[np.ndarray, np.ndarray]:
    """X [64, 256] with channels 17 and 101 times 80, W [128, 256]."""
    rng = np.random.default_rng(0)
    X, W = rng.standard_normal((64, 256)), rng.standard_normal((128, 256))
    X[:, [17, 101]] *= 80
    return X, W


# ------------------------------------------------------------------ lab 06-02


def qwen(lab: ModuleType) -> Any:
    """Qwen2.5-0.5B as the lab's `ModelShape`."""
    return lab.ModelShape(896, 24, 14, 2, 64, 4864, 151936, True, True)


def format_bytes() -> str:
    """Bytes of two models in three formats, what is quantized and what is not."""
    lab = solution("lab-02-quantize-and-eval")
    models = (
        ("Qwen2.5-0.5B", qwen(lab)),
        ("Qwen2.5-7B", lab.ModelShape(3584, 28, 28, 4, 128, 18944, 152064, False, True)),
    )
    formats = (("16 bit", "bf16"), ("FP8", "fp8"), ("4 bit, g128, zero-points", "w4_asym"))
    title = "What a format leaves of a model's bytes"
    svg = Svg(780, 300, title, "")
    svg.text(12, 24, title, bold=True)
    said = []
    for k, (name, shape) in enumerate(models):
        top = 46 + 122 * k
        whole = lab.weight_bytes(shape, "bf16")
        rest = 2 * lab.split_params(shape)[1]
        svg.text(12, top + 12, name, bold=True)
        for row, (words, fmt) in enumerate(formats):
            total = lab.weight_bytes(shape, fmt)
            y, scale = top + 22 + 28 * row, 440 / whole
            svg.text(184, y + 15, words, size=12, anchor="end")
            svg.rect(192, y, rest * scale, 20, fill=GREY, opacity=0.6)
            svg.rect(192 + rest * scale, y, (total - rest) * scale, 20, fill=BLUE, opacity=0.75)
            svg.text(200 + total * scale, y + 15, f"{total / 1e9:.2f} GB, {total / whole:.0%}",
                     size=12)  # fmt: skip
            said.append(f"{name}, {words}: {total / 1e9:.2f} GB, {total / whole:.0%} of 16 bit.")
    svg.rect(192, 280, 12, 12, fill=GREY, opacity=0.6)
    svg.text(210, 291, "embedding, head, norms, biases: 16 bit", size=12)
    svg.rect(450, 280, 12, 12, fill=BLUE, opacity=0.75)
    svg.text(468, 291, "linear layers", size=12)
    svg.description = " ".join(said)
    return svg.render()


def claims() -> str:
    """A claimed table of rates against the ceilings of an L4 at batch 16."""
    lab = solution("lab-02-quantize-and-eval")
    rows = (("16 bit", "bf16", 9800), ("FP8", "fp8", 14200), ("4 bit", "w4_asym", 12600))
    title = "A table that cannot be true: Qwen2.5-0.5B on an L4, batch 16"
    svg = Svg(780, 250, title, "")
    svg.text(12, 24, title, bold=True)
    said = [title + "."]
    for k, (words, fmt, claim) in enumerate(rows):
        y = 48 + 58 * k
        ceiling = lab.decode_ceiling_tok_s(lab.streamed_bytes(qwen(lab), fmt), 16, 0.30e12)
        svg.text(76, y + 24, words, size=13, anchor="end", bold=True)
        for row, (value, color, what) in enumerate(
            ((ceiling, GREEN, "at most"), (claim, RED, "claimed"))
        ):
            svg.rect(84, y + 19 * row, value * 0.036, 15, fill=color, opacity=0.75)
            svg.text(92 + value * 0.036, y + 12 + 19 * row, f"{what} {value:,.0f} tokens/s",
                     size=12)  # fmt: skip
        said.append(f"{words}: claimed {claim:,}, at most {ceiling:,.0f} tokens/s.")
    svg.text(84, 236, "ceiling: 16 tokens for each reading of the weights, at 300 GB/s", size=12,
             css="soft")  # fmt: skip
    svg.description = " ".join(said)
    return svg.render()


# ------------------------------------------------------------------ lab 06-04


def migration() -> str:
    """Channel maxima of X and of W, before and after smoothing."""
    lab = solution("lab-04-activation-outliers-smoothquant")
    X, W = setup()
    X_s, W_s, _ = lab.smooth(X, W)
    panels = (("X, as it comes", X), ("W, as it comes", W), ("X / s", X_s), ("W * s", W_s))
    tops = [float(np.abs(A).max()) for _, A in panels]
    svg = Svg(
        780,
        420,
        "Channel maxima before and after smoothing",
        "Four panels over 256 channels. " + " ".join(
            f"{name}: the largest maximum is {top:.1f}."
            for (name, _), top in zip(panels, tops, strict=True)
        ),
    )  # fmt: skip
    for k, (name, A) in enumerate(panels):
        maxima = np.abs(A).max(axis=0)
        high = 250 if k == 0 else 30
        ticks = {0: "0", high / 2: f"{high / 2:g}", high: f"{high:g}"}
        box = (50 + 385 * (k % 2), 44 + 200 * (k // 2), 320, 120)
        axes = Axes(svg, box, (0, 256), (0, high))
        axes.frame("channel" if k > 1 else "", name, {17: "17", 101: "101", 255: "255"}, ticks)
        loud = (17, 101)
        for color, channels, width in (
            (BLUE, [c for c in range(len(maxima)) if c not in loud], 0.8), (RED, loud, 2)
        ):  # fmt: skip
            points = [(channel + 0.5, float(maxima[channel])) for channel in channels]
            axes.bars(points, color, width=width, opacity=1)
        svg.text(box[0] + 316, box[1] + 14, f"largest {tops[k]:.1f}", size=12, anchor="end",
                 css="soft")  # fmt: skip
    svg.text(12, 416, "The first panel has a scale of its own; the other three share one.", size=12,
             css="soft")  # fmt: skip
    return svg.render()


def alphas() -> str:
    """Total error over alpha for three kinds of scale."""
    lab = solution("lab-04-activation-outliers-smoothquant")
    X, W = setup()
    exact = X @ W.T

    def by_row(A: np.ndarray) -> np.ndarray:
        return np.stack([lab.fake_quant(row) for row in A])

    kinds: tuple[tuple[str, Callable, Callable, str], ...] = (
        ("one scale each", lab.fake_quant, lab.fake_quant, BLUE),
        ("a scale per row of W", lab.fake_quant, by_row, ORANGE),
        ("per token of X, row of W", by_row, by_row, GREEN),
    )
    grid = [k / 20 for k in range(21)]
    svg = Svg(760, 330, "Error of W8A8 over the smoothing strength alpha", "")
    axes = Axes(svg, (60, 40, 500, 230), (0, 1), (0.003, 0.1), log_y=True)
    axes.frame(
        "alpha: share of the difficulty that goes to W",
        "relative error of the output, logarithmic",
        {0: "0", 0.25: "0.25", 0.5: "0.5", 0.75: "0.75", 1: "1"},
        {0.003: "0.003", 0.01: "0.01", 0.03: "0.03", 0.1: "0.1"},
    )
    said = []
    for k, (name, of_x, of_w, color) in enumerate(kinds):
        errors = []
        for alpha in grid:
            X_s, W_s, _ = lab.smooth(X, W, alpha)
            errors.append(rel(of_x(X_s) @ of_w(W_s).T, exact))
        best = int(np.argmin(errors))
        axes.curve(list(zip(grid, errors, strict=True)), color)
        axes.dots([(grid[best], errors[best])], color)
        svg.text(576, 80 + 44 * k, name, size=12, fill=color, bold=True)
        svg.text(576, 97 + 44 * k, f"least {errors[best]:.4f} at {grid[best]:.2f}", size=12,
                 css="soft")  # fmt: skip
        said.append(f"{name}: least {errors[best]:.4f} at alpha {grid[best]:.2f}.")
    raw = rel(lab.w8a8_matmul(X, W), exact)
    axes.curve([(0, raw), (1, raw)], GREY, dash="5 4")
    axes.label(
        0.5, raw, f"not smoothed, one scale each: {raw:.3f}", GREY, dx=0, dy=-6, anchor="middle"
    )
    svg.description = " ".join([*said, f"Not smoothed, one scale each: {raw:.4f}."])
    return svg.render()


# ------------------------------------------------------------------ lab 06-05


def kernel_walk() -> str:
    """Three layers and devices down the list of kernels, with the objections."""
    lab = solution("lab-05-dispatch")
    usual = {"act_type": "float16", "in_features": 4096, "full_in_features": 4096}
    square, odd = {**usual, "out_features": 4096}, {**usual, "out_features": 4104}
    columns = (
        ("AWQ, groups of 128, H100 (9.0)", 90,
         lab.Request("uint4", group_size=128, zero_points=True, **square)),
        ("GPTQ, groups of 32, L4 (8.9)", 89,
         lab.Request("uint4b8", group_size=32, zero_points=False, **square)),
        ("the same with 4,104 outputs", 89,
         lab.Request("uint4b8", group_size=32, zero_points=False, **odd)),
    )  # fmt: skip
    title = "Down the list of kernels to the first that does not object"
    svg = Svg(800, 350, title, "")
    svg.text(12, 24, title, bold=True)
    said = [title + "."]
    for column, (words, capability, request) in enumerate(columns):
        x = 12 + 262 * column
        svg.text(x, 52, words, size=12.5, bold=True)
        chosen = lab.choose_kernel(request, capability)
        reached = False
        for row, kernel in enumerate(lab.KERNELS):
            y = 64 + 46 * row
            if reached:
                note, color = "not asked", GREY
            elif kernel is chosen:
                note, color, reached = "chosen", GREEN, True
            else:
                note = kernel.objection(request, capability)
                if capability < kernel.min_capability:
                    note = f"needs capability {kernel.min_capability}"
                color = RED
            short = {
                "needs capability 90, no more and no less": "needs capability 90",
                "out_features must be a multiple of 64, in_features of 128":
                    "outputs must be a multiple of 64",
            }.get(note, note)  # fmt: skip
            svg.rect(x, y, 252, 40, fill=color, opacity=0.18, radius=5, stroke=color)
            svg.text(x + 10, y + 16, kernel.name.removesuffix("LinearKernel"), size=12, bold=True)
            svg.text(x + 10, y + 32, short, size=10.5, css="soft")
            said.append(f"{words}, {kernel.name}: {note}.")
    svg.description = " ".join(said)
    return svg.render()


# ------------------------------------------------------------------ the metric trap


def trap_channels() -> str:
    """Error of the whole product and of the quiet channels' part over loudness."""
    rows = measured("metric-trap.json")["channels"]
    svg = Svg(
        760,
        330,
        "The total error falls while 254 of 256 channels are erased",
        " ".join(
            f"{r['times']} times: whole {r['whole']:.3f}, quiet channels {r['quiet']:.3f}."
            for r in rows
        ),
    )
    axes = Axes(svg, (60, 40, 560, 230), (1, 1000), (0, 1), log_x=True)
    axes.frame(
        "loudness of two of 256 channels, logarithmic",
        "relative error of W8A8, one scale each",
        {1: "1", 10: "10", 80: "80", 1000: "1,000"},
        {0: "0", 0.25: "25 %", 0.5: "50 %", 0.75: "75 %", 1: "100 %"},
    )
    quiet = [(r["times"], r["quiet"]) for r in rows]
    whole = [(r["times"], r["whole"]) for r in rows]
    axes.curve(quiet, RED)
    axes.dots(quiet, RED, radius=3)
    axes.curve(whole, BLUE)
    axes.dots(whole, BLUE, radius=3)
    axes.label(1000, 1, "what the 254", RED, dy=2)
    axes.label(1000, 1, "quiet channels say", RED, dy=18)
    axes.label(1000, whole[-1][1], "the whole product", BLUE, dy=2)
    peak = max(whole, key=lambda point: point[1])
    axes.label(*peak, f"most: {peak[1]:.1%}", BLUE, dx=0, dy=-8, anchor="middle")
    return svg.render()


def trap_rows() -> str:
    """Each row of the shipped embedding table in int4: size and error, used or never trained."""
    common, trap = study("study_tools"), study("metric_trap")
    saved = measured("metric-trap.json")
    W = common.checkpoint().weights["model.embed_tokens.weight"].astype(float)
    got = trap.one_scale(W, 7)
    errors, sizes = trap.row_errors(got, W), np.linalg.norm(W, axis=1)
    used = {token for name in saved["texts"] for token in common.text_of(name)}
    first = saved["tensors"][0]
    whole, mine_, others = (
        first[key] for key in ("whole", "rows of bytes in these texts", "rows of all other bytes")
    )
    title = "257 rows of the embedding table in int4, one scale"
    svg = Svg(
        760,
        340,
        title,
        f"Every row by its norm and its relative error. Rows of bytes that the texts use have "
        f"norms near 3 and an error of {mine_:.2f}; rows of other bytes, most of them never "
        f"trained, norms up to 8.7 and an error of {others:.2f}. The whole table: {whole:.2f}.",
    )
    axes = Axes(svg, (60, 44, 480, 230), (2, 9), (0, 0.8))
    axes.frame(
        "norm of the row",
        "relative error of the row",
        {2: "2", 4: "4", 6: "6", 8: "8"},
        {0: "0", 0.2: "20 %", 0.4: "40 %", 0.6: "60 %", 0.8: "80 %"},
    )
    for color, rows in ((GREY, set(range(len(W))) - used), (RED, used)):
        points = [(float(sizes[token]), float(errors[token])) for token in sorted(rows)]
        tips = [f"byte {token}: {errors[token]:.2f}" for token in sorted(rows)]
        axes.dots(points, color, radius=3, tips=tips)
    axes.curve([(2, whole), (9, whole)], BLUE, dash="5 4")
    for row, (color, words, value) in enumerate((
        (RED, "bytes in the two texts", mine_),
        (GREY, "all other bytes", others),
        (BLUE, "the whole table", whole),
    )):  # fmt: skip
        svg.circle(562, 96 + 46 * row, 4, color)
        svg.text(574, 100 + 46 * row, words, size=12, bold=True)
        svg.text(574, 117 + 46 * row, f"error {value:.1%}", size=12, css="soft")
    return svg.render()


# ------------------------------------------------------------------ code points


def code_grids() -> str:
    """All values of five formats with their largest at 1, under the histogram of real weights."""
    codes = study("code_points")
    histogram = measured("code-points.json")["histogram"]
    svg = Svg(
        780,
        430,
        "Code points against real weights",
        "Above, the histogram of the shipped model's projection weights, each divided by its "
        f"tensor's largest: {histogram['within a tenth']:.0%} lie within a tenth. Below, every "
        "value of int8, int4, E4M3, E5M2 and E2M1 with the largest at 1: the integers are "
        "evenly spaced, the floats crowd towards 0.",
    )
    axes = Axes(svg, (70, 40, 690, 120), (-1, 1), (0, max(histogram["shares"]) * 1.05))
    axes.frame("", "share of the weights, by size over their tensor's largest", {})
    edges, shares = histogram["edges"], histogram["shares"]
    bars = [(edge, share) for edge, share in zip(edges, shares, strict=False) if share]
    wide = edges[1] - edges[0]
    axes.bars([(edge + wide / 2, share) for edge, share in bars], BLUE, width=0.95 * wide,
              opacity=0.55)  # fmt: skip
    colors = (BLUE, BLUE, ORANGE, ORANGE, GREEN)
    for row, (name, color) in enumerate(zip(codes.FORMATS, colors, strict=True)):
        y = 200 + 42 * row
        values = codes.grid(name)
        svg.text(60, y + 4, name, size=12, anchor="end", bold=True)
        svg.line(70, y, 760, y, css="grid-line")
        for value in {*(values / values[-1]), *(-values / values[-1])}:
            svg.line(axes.x(float(value)), y - 11, axes.x(float(value)), y + 11, stroke=color,
                     width=0.7 if len(values) > 20 else 1.8)  # fmt: skip
    for value, words in ((-1, "−1"), (-0.5, "−1/2"), (0, "0"), (0.5, "1/2"), (1, "1: the largest")):
        anchor = "end" if value == 1 else "start" if value == -1 else "middle"
        svg.text(axes.x(value), 416, words, size=11, anchor=anchor, css="soft")
    return svg.render()


def code_errors() -> str:
    """RMS relative error of a number over its size, for five formats."""
    found = measured("code-points.json")["by size"]
    svg = Svg(
        760,
        340,
        "What a small number loses when the largest sets the scale",
        "The integers' error doubles with every halving until the number is rounded to 0. E4M3 "
        "stays near 2.4 percent and E5M2 near 4.5 percent over the whole range; E2M1 is a float "
        "for two octaves only.",
    )
    axes = Axes(svg, (66, 40, 520, 236), (-10.67, 0), (0.002, 1.2), log_y=True)
    axes.frame(
        "numbers from half this size to this size, the tensor's largest being 1",
        "RMS relative error, logarithmic",
        {-10: "1/1,024", -8: "1/256", -6: "1/64", -4: "1/16", -2: "1/4", 0: "1"},
        {0.003: "0.3 %", 0.01: "1 %", 0.03: "3 %", 0.1: "10 %", 0.3: "30 %", 1: "100 %"},
    )
    named = (("int8", BLUE), ("int4", PURPLE), ("E4M3", ORANGE), ("E5M2", RED), ("E2M1", GREEN))
    for name, color in named:
        points = [
            (float(np.log2(size)), error)
            for size, error in zip(found["size"], found[name], strict=True)
        ]
        axes.curve(points, color, name=name)
    axes.legend(604, 60)
    return svg.render()


# ------------------------------------------------------------------ drift


def drift_loudness() -> str:
    """Error with the scale of calibration and with the batch's own, over a factor on the input."""
    rows = measured("drift.json")["loudness"]
    svg = Svg(
        760,
        330,
        "A scale from calibration, on inputs that are louder or quieter",
        " ".join(f"{r['factor']:g} times: static {r['static']:.3f}." for r in rows)
        + f" The batch's own scale: {rows[0]['dynamic']:.3f} throughout.",
    )
    axes = Axes(svg, (66, 40, 560, 226), (1 / 64, 64), (0.005, 1.2), log_x=True, log_y=True)
    axes.frame(
        "inputs times this factor, logarithmic",
        "relative error of the output, logarithmic",
        {1 / 64: "1/64", 1 / 8: "1/8", 1: "1", 8: "8", 64: "64"},
        {0.01: "1 %", 0.03: "3 %", 0.1: "10 %", 0.3: "30 %", 1: "100 %"},
    )
    static = [(r["factor"], r["static"]) for r in rows]
    dynamic = [(r["factor"], r["dynamic"]) for r in rows]
    axes.curve(static, RED)
    axes.dots(static, RED, radius=3)
    axes.curve(dynamic, BLUE)
    axes.label(64, static[-1][1], "static", RED)
    axes.label(64, dynamic[-1][1], "dynamic", BLUE)
    axes.label(1 / 12, 0.3, "too few codes", RED, anchor="middle", dx=0)
    axes.label(6, 0.09, "clipped", RED, dx=10)
    return svg.render()


def drift_texts() -> str:
    """Divergence of the shipped model in W8A8 by text and kind of activation scale."""
    saved = measured("drift.json")["texts"]
    modes = (("static", RED), ("static x2", ORANGE), ("dynamic tensor", BLUE),
             ("dynamic token", GREEN))  # fmt: skip
    said = [
        f"{text}: " + ", ".join(f"{m} {saved[text][m]['divergence']:.4f}" for m, _ in modes) + "."
        for text in saved
    ]
    svg = Svg(780, 340, "W8A8 on five texts, scales calibrated on prose", " ".join(said))
    axes = Axes(svg, (66, 70, 690, 210), (0, len(saved)), (0, 0.12))
    axes.frame("", "divergence from the exact model, bits per byte", {}, (0, 0.04, 0.08, 0.12))
    for k, (mode, color) in enumerate(modes):
        values = [row[mode]["divergence"] for row in saved.values()]
        points = [(column + 0.2 + 0.19 * k, value) for column, value in enumerate(values)]
        tips = [f"{mode}: {value:.4f}" for value in values]
        axes.bars(points, color, width=0.16, opacity=0.85, tips=tips, name=mode)
        for x, value in points:
            svg.text(axes.x(x), axes.y(value) - 4, f"{value:.3f}", size=9, anchor="middle",
                     css="soft")  # fmt: skip
    for column, (text, row) in enumerate(saved.items()):
        words = "prose (calibration)" if text == "prose" else text
        svg.text(axes.x(column + 0.5), 298, words, size=12, anchor="middle", bold=True)
        svg.text(axes.x(column + 0.5), 315, f"exact: {row['exact']:.2f} bits per byte", size=10.5,
                 anchor="middle", css="soft")  # fmt: skip
    axes.legend(66, 18, columns=4)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-02-bytes.svg": format_bytes,
    "lab-02-claims.svg": claims,
    "lab-04-migration.svg": migration,
    "lab-04-alpha.svg": alphas,
    "lab-05-kernels.svg": kernel_walk,
    "trap-quiet-channels.svg": trap_channels,
    "trap-rows.svg": trap_rows,
    "codes-grids.svg": code_grids,
    "codes-error.svg": code_errors,
    "drift-loudness.svg": drift_loudness,
    "drift-texts.svg": drift_texts,
}
