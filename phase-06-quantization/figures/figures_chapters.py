"""Figures of the chapters of phase 06.

`grid`, `row-max`, `fused` and `activations` are drawn from the shipped model's own weights and from
its activations, recorded while the engine runs; `step-size`, `crossover`, `streamed` and `card` are
computed; the others are diagrams. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SERIES, Svg
from course.truth.plots import Axes
from mini_vllm import EngineParts, LLMEngine
from mini_vllm.config import SamplingParams
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Linear

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("qkv", "o", "gate_up", "down")


@cache
def weights() -> dict[str, np.ndarray]:
    """The shipped model's arrays, float32 [out, in]."""
    return dict(load_checkpoint("byte-llama").weights)


@cache
def inputs() -> dict[str, np.ndarray]:
    """What each of the sixteen layers received: float64 [num_tokens, in], by "layer place"."""
    seen: list[list[np.ndarray]] = []

    def recording(
        weight: np.ndarray, bias: np.ndarray | None, name: str
    ) -> Callable[..., np.ndarray]:
        rows: list[np.ndarray] = []
        layer = Linear(weight, bias, name)
        seen.append(rows)

        def forward(x: np.ndarray) -> np.ndarray:
            rows.append(x.copy())
            return layer(x)

        return forward

    engine = LLMEngine(dtype="float64", parts=EngineParts(linear=recording))
    page = (ROOT / "LICENSE").read_text(encoding="utf-8")[:900]
    engine.generate([page], SamplingParams(max_tokens=1))
    names = [f"{layer} {place}" for layer in range(4) for place in PLACES]
    return {name: np.concatenate(rows) for name, rows in zip(names, seen[1:], strict=True)}


# ------------------------------------------------------------------ guide


def pipeline() -> str:
    """What is stored, what is read, and where the 16-bit values come back."""
    title = "Codes and scales travel; 16-bit values exist only in registers"
    words = (
        "A 16-bit matrix W is quantized once, offline, into 4-bit codes and one 16-bit scale per "
        "group. In each step the kernel reads codes and scales from memory, rebuilds 16-bit "
        "values in registers, multiplies with X and writes Y."
    )
    svg = Svg(780, 246, title, words)
    svg.text(12, 22, title, bold=True)
    svg.box(12, 92, 118, 76, ["W", "[out, in], 16 bits", "100 % of the bytes"], fill=GREY)
    svg.line(132, 130, 196, 130, arrow=True)
    svg.text(164, 120, "once,", size=11, anchor="middle", css="soft")
    svg.text(164, 148, "offline", size=11, anchor="middle", css="soft")
    svg.rect(200, 48, 176, 168, css="paper", radius=6)
    svg.text(288, 68, "in HBM", size=12, anchor="middle", css="soft")
    svg.box(212, 80, 152, 58, ["codes", "4 bits each: 25 %"], fill=BLUE)
    svg.box(212, 148, 152, 54, ["scales", "16 bits per 128: 0.8 %"], fill=ORANGE)
    svg.rect(438, 48, 216, 168, css="paper", radius=6)
    svg.text(546, 68, "one GEMM kernel", size=12, anchor="middle", css="soft")
    svg.line(366, 109, 446, 109, arrow=True)
    svg.line(366, 175, 446, 122, arrow=True)
    svg.box(450, 80, 192, 58, ["code x scale", "16 bits, in registers"], fill=GREEN)
    svg.box(450, 148, 192, 54, ["multiply and add", "tensor cores, 16 bits"], fill=PURPLE)
    svg.line(546, 138, 546, 147, arrow=True)
    svg.line(546, 236, 546, 204, arrow=True)
    svg.text(556, 233, "X, 16 bits", size=12, css="soft")
    svg.line(644, 175, 700, 175, arrow=True)
    svg.text(706, 172, "Y", bold=True)
    svg.text(706, 188, "nearly", size=11, css="soft")
    svg.text(706, 202, "the same", size=11, css="soft")
    return svg.render()


def grid() -> str:
    """48 weights of one trained row on int4, and what rounding does to them."""
    row = weights()["model.layers.1.mlp.down_proj.weight"][0, :48].astype(np.float64)
    scale = np.abs(row).max() / 7
    codes = np.clip(np.rint(row / scale), -7, 7)
    error = codes * scale - row
    title = "48 weights of one trained row, on the 15 levels of int4"
    words = (
        f"Weights of layer 1 down_proj, row 0, between {row.min():.2f} and {row.max():.2f}, scale "
        f"{scale:.4f}. Each is moved to the nearest of 15 levels; the errors, drawn below, stay "
        f"within half a step, {scale / 2:.4f}."
    )
    svg = Svg(780, 436, title, words)
    svg.text(12, 22, title, bold=True)
    top = Axes(svg, (60, 52, 700, 226), (-0.5, 47.5), (-7.6 * scale, 7.6 * scale))
    levels = {code * scale: f"{code * scale:+.2f}" for code in range(-7, 8)}
    top.frame("", "weight (circle) and level (square); right: code", {}, levels)
    for code in range(-7, 8):
        svg.text(764, top.y(code * scale) + 4, f"{code}", size=9.5, css="soft")
    for index, (value, code) in enumerate(zip(row, codes, strict=True)):
        x = top.x(index)
        svg.line(x, top.y(value), x, top.y(code * scale), stroke=RED, width=1.5)
        svg.rect(x - 3, top.y(code * scale) - 3, 6, 6, fill=BLUE, opacity=0.9)
        svg.circle(x, top.y(value), 2.8, ORANGE, tip=f"{value:.4f}, code {code:.0f}")
    low = Axes(svg, (60, 322, 700, 76), (-0.5, 47.5), (-0.62 * scale, 0.62 * scale))
    half = scale / 2
    low.frame(
        "place in the row",
        "error",
        range(0, 48, 8),
        {-half: "-scale/2", 0.0: "0", half: "+scale/2"},
    )
    low.bars([(index, value) for index, value in enumerate(error)], RED, width=0.2, opacity=1)
    return svg.render()


def ladder() -> str:
    """Regions that share a scale."""
    title = "Who shares a scale"
    words = (
        "Five copies of a matrix of 8 rows and 16 columns, coloured by region of equal scale: per "
        "tensor one region; per channel one per row; per group of 4 four per row; per block of 4 "
        "by 4 eight; for activations per token one per row of X."
    )
    svg = Svg(780, 226, title, words)
    svg.text(12, 22, title, bold=True)
    kinds: list[tuple[str, str, Callable[[int, int], int]]] = [
        ("per tensor", "1 scale", lambda r, c: 0),
        ("per channel", "out scales", lambda r, c: r),
        ("per group", "out x in/g scales", lambda r, c: r * 4 + c // 4),
        ("per block", "128 x 128 in FP8", lambda r, c: (r // 4) * 7 + c // 4),
        ("per token (X)", "1 per row, at run time", lambda r, c: r),
    ]
    shades = [BLUE, ORANGE, GREEN, PURPLE, RED, GREY]
    for number, (name, note, region) in enumerate(kinds):
        left, top, cell = 14 + number * 154, 62, 8.4
        for r in range(8):
            for c in range(16):
                key = region(r, c)
                svg.rect(
                    left + c * cell,
                    top + r * 13,
                    cell - 0.8,
                    12,
                    fill=shades[key % 5],
                    opacity=0.3 + 0.25 * ((key // 5 + key) % 3),
                )
        svg.text(left, 52, name, size=12.5, bold=True)
        svg.text(left, 186, note, size=11.5, css="soft")
    svg.text(
        14,
        212,
        "rows: output channels; columns: input channels. In the last, rows: tokens.",
        size=11.5,
        css="soft",
    )
    return svg.render()


def row_max() -> str:
    """The loudest weight of each row, over that of its matrix."""
    title = "The largest magnitude of each row, layer 3 of the shipped model"
    svg = Svg(780, 376, title)
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (60, 58, 560, 256), (0, 100), (0.015, 1.15), log_y=True)
    axes.frame(
        "rows, sorted, percent",
        "max|row| / max|matrix|, log scale",
        (0, 20, 40, 60, 80, 100),
        {1.0: "1", 0.5: "0.5", 0.2: "0.2", 0.1: "0.1", 0.05: "0.05", 0.02: "0.02"},
    )
    half = 1 / 14
    axes.rule(y=half, stroke=RED, width=1.5)
    axes.label(100, half, "below: all zero in int4", RED, dx=10)
    said = []
    names = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up")
    for number, name in enumerate((*names, "mlp.down")):
        array = np.abs(weights()[f"model.layers.3.{name}_proj.weight"]).max(axis=1)
        share = np.sort(array) / array.max()
        color = (*SERIES, GREY)[number] if number < 6 else RED
        places = np.linspace(0, 100, share.size)
        keep = np.unique(np.linspace(0, share.size - 1, 160).astype(int))
        axes.curve(
            [(float(places[i]), float(share[i])) for i in keep],
            color,
            dash="2 3" if number == 6 else None,
            name=f"{name.split('.')[1]}_proj",
        )
        lost = int((share < half).sum())
        said.append(f"{name}: quietest {share[0]:.3f}, {lost} of {share.size} rows below 1/14")
    svg.description = "; ".join(said) + "."
    axes.legend(632, 64)
    return svg.render()


def float_steps(mantissa: int, smallest: int, largest: float) -> Callable[[float], float]:
    """Half a step of a small float format at magnitude x, both relative to its maximum."""

    def half_step(share: float) -> float:
        exponent = max(np.floor(np.log2(share * largest)), smallest)
        return float(2.0 ** (exponent - mantissa) / 2 / largest)

    return half_step


def step_size() -> str:
    """Largest rounding error over magnitude: even grids against floating-point ones."""
    title = "Largest rounding error, over the magnitude of the value"
    words = (
        "Both axes relative to the largest value of the grid. int8 is flat at 0.0039, int4 at "
        "0.071. E4M3 is a staircase, 0.036 at the top, halving with each power of two, below int8 "
        "for magnitudes under 1/14 of the maximum. E2M1 is a staircase from 0.17 to 0.042."
    )
    svg = Svg(780, 372, title, words)
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (66, 58, 560, 250), (0.003, 1), (0.0001, 0.3), log_x=True, log_y=True)
    axes.frame(
        "magnitude of the value / maximum",
        "half a step / maximum",
        {1.0: "1", 0.5: "1/2", 1 / 14: "1/14", 0.01: "1/100"},
        {0.1: "10 %", 0.01: "1 %", 0.001: "0.1 %", 0.0001: "0.01 %"},
    )
    span = np.geomspace(0.003, 1, 1200)
    lines: list[tuple[str, str, Callable[[float], float]]] = [
        ("int8: 0.39 %", BLUE, lambda share: 0.5 / 127),
        ("int4: 7.1 %", GREEN, lambda share: 0.5 / 7),
        ("E4M3", ORANGE, float_steps(3, -6, 448)),
        ("E2M1", PURPLE, float_steps(1, 0, 6)),
    ]
    for name, color, half in lines:
        points = [(float(share), half(float(share))) for share in span]
        corners = [
            point
            for i, point in enumerate(points)
            if i in (0, len(points) - 1)
            or point[1] != points[i - 1][1]
            or point[1] != points[i + 1][1]
        ]
        axes.curve(corners, color, width=2.5, name=name)
    axes.legend(636, 64)
    svg.text(636, 176, "Left of 1/14 E4M3 is", size=11.5, css="soft")
    svg.text(636, 192, "finer than int8,", size=11.5, css="soft")
    svg.text(636, 208, "right of it coarser.", size=11.5, css="soft")
    return svg.render()


def factor() -> str:
    """Where each kind of scale can be applied."""
    title = "Which scale can leave the sum over inputs"
    words = (
        "X, tokens by inputs, times the transpose of W, inputs by outputs. A scale per token "
        "labels rows of X and rows of Y; a scale per output channel labels columns of both; both "
        "are applied to Y once. A scale per group applies to a partial sum. A scale per input "
        "channel runs along the summed axis and cannot leave."
    )
    svg = Svg(780, 316, title, words)
    svg.text(12, 22, title, bold=True)
    svg.rect(60, 150, 220, 100, css="paper")
    svg.text(87, 196, "X", anchor="middle", bold=True)
    svg.text(87, 214, "[T, K]", anchor="middle", size=12, css="soft")
    svg.rect(310, 60, 130, 220, css="paper")
    svg.text(375, 92, "Wᵀ, codes [K, N]", anchor="middle", size=12)
    svg.rect(560, 150, 130, 100, css="paper")
    svg.text(625, 205, "sums [T, N]", anchor="middle")
    svg.text(294, 206, "x", anchor="middle", bold=True)
    svg.text(500, 206, "=", anchor="middle", bold=True)
    for row in range(5):
        svg.rect(44, 151 + row * 20, 11, 18, fill=BLUE, opacity=0.85)
        svg.rect(544, 151 + row * 20, 11, 18, fill=BLUE, opacity=0.85)
    for column in range(6):
        svg.rect(311 + column * 21.7, 45, 19, 11, fill=GREEN, opacity=0.85)
        svg.rect(561 + column * 21.7, 135, 19, 11, fill=GREEN, opacity=0.85)
    for group in range(1, 4):
        svg.line(310, 60 + group * 55, 440, 60 + group * 55, stroke=ORANGE, dash="4 3", width=2)
        svg.line(60 + group * 55, 150, 60 + group * 55, 250, stroke=ORANGE, dash="4 3", width=2)
    for cell in range(11):
        svg.rect(61 + cell * 20, 254, 18, 9, fill=RED, opacity=0.85)
        svg.rect(443, 61 + cell * 20, 9, 18, fill=RED, opacity=0.85)
    svg.text(12, 140, "per token: to Y's rows", size=12, fill=BLUE)
    svg.text(311, 38, "per output channel: to Y's columns", size=12, fill=GREEN)
    svg.text(12, 290, "per input channel: a different factor in each summand", size=12, fill=RED)
    svg.text(470, 290, "group: scale each partial sum", size=12, fill=ORANGE)
    svg.text(470, 306, "(dashed: where the sum is cut)", size=11.5, css="soft")
    return svg.render()


def crossover() -> str:
    """Roofline time of a step over batch, on an H100's vendor peaks."""
    title = "Time of a step by the roofline, per billion parameters, H100"
    words = (
        "Vendor peaks: 989 TFLOP/s in 16 bits, twice that in FP8, 3.35 TB/s. 16-bit: 597 µs up to "
        "295 tokens. W4A16 with groups of 128: 154 µs up to 76 tokens, then rising with the "
        "arithmetic, equal to FP8 at 148 and to 16-bit from 295. FP8 W8A8: 299 µs up to 295."
    )
    svg = Svg(780, 372, title, words)
    svg.text(12, 22, title, bold=True)
    rate, bandwidth = 989e12, 3.35e12
    axes = Axes(svg, (66, 58, 540, 250), (1, 1024), (100, 2400), log_x=True, log_y=True)
    ridge = 2 * rate / (2 * bandwidth)
    axes.frame(
        "tokens per step",
        "microseconds",
        (1, 4, 16, 64, 256, 1024),
        {150: "150", 300: "300", 600: "600", 1200: "1,200", 2400: "2,400"},
    )
    for number, (name, bits, speed, color) in enumerate(
        (
            ("16-bit", 16, rate, GREY),
            ("FP8 W8A8", 8, 2 * rate, ORANGE),
            ("W4A16 g128", 4.125, rate, BLUE),
        )
    ):
        batches = [float(b) for b in np.geomspace(1, 1024, 200)]
        points = [(b, max(1e9 * bits / 8 / bandwidth, 2e9 * b / speed) * 1e6) for b in batches]
        axes.curve(points, color, width=2.5, dash="6 4" if number == 0 else None, name=name)
    axes.legend(620, 64)
    star = rate / (2 * bandwidth)
    axes.rule(x=star, stroke=RED, width=1.5)
    axes.label(star, 2400, f"B* = {star:.0f}", RED, dx=-6, dy=16, anchor="end")
    svg.text(620, 160, "left: bytes decide,", size=11.5, css="soft")
    svg.text(620, 176, "4 bits win", size=11.5, css="soft")
    svg.text(620, 200, "right: arithmetic", size=11.5, css="soft")
    svg.text(620, 216, "decides, FP8 wins", size=11.5, css="soft")
    svg.text(620, 244, f"16-bit ridge: {ridge:.0f}", size=11.5, css="soft")
    return svg.render()


def activations() -> str:
    """Channel maxima over their median, inputs of all sixteen linear layers."""
    title = "How loud are the loudest input channels? The shipped model, 900 bytes of text"
    svg = Svg(780, 376, title)
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (60, 58, 560, 256), (0, 100), (0.25, 12), log_y=True)
    axes.frame(
        "channels, sorted, percent",
        "max|channel| / median of these, log scale",
        (0, 20, 40, 60, 80, 100),
        {0.25: "1/4", 0.5: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"},
    )
    colors = dict(zip(PLACES, (BLUE, GREEN, PURPLE, ORANGE), strict=True))
    most: dict[str, float] = {}
    for name, rows in inputs().items():
        place = name.split()[1]
        channel = np.sort(np.abs(rows).max(axis=0))
        share = channel / np.median(channel)
        most[place] = max(most.get(place, 0.0), float(share[-1]))
        keep = np.unique(np.linspace(0, share.size - 1, 120).astype(int))
        places = np.linspace(0, 100, share.size)
        axes.curve(
            [(float(places[i]), max(float(share[i]), 0.25)) for i in keep], colors[place], width=1.4
        )
    svg.description = "Largest ratio of any layer: " + ", ".join(
        f"{place} {value:.1f}" for place, value in most.items()
    )
    for place in PLACES:  # a line of the legend each: what it stands beside is off the plot
        axes.curve([(-1, 1)], colors[place], name=f"into {place}: {most[place]:.1f}x")
    axes.legend(632, 70)
    svg.text(632, 188, "four lines each,", size=11.5, css="soft")
    svg.text(632, 204, "one per layer", size=11.5, css="soft")
    svg.text(632, 236, "Large models have", size=11.5, css="soft")
    svg.text(632, 252, "channels at about 100x", size=11.5, css="soft")
    return svg.render()


SHAPES = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 64, 4864, 151936, True, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 128, 18944, 152064, False, True),
    "Llama-3.1-70B": (8192, 80, 64, 8, 128, 28672, 128256, False, False),
}


def parameters(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Parameters of the linears, of one vocabulary table, and of norms and biases."""
    hidden, layers, heads, kv_heads, head_dim, inner, vocab, _, bias = shape
    attention = hidden * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden
    small = (2 * layers + 1) * hidden + bias * layers * head_dim * (heads + 2 * kv_heads)
    return layers * (attention + 3 * hidden * inner), vocab * hidden, small


def streamed() -> str:
    """Bytes a decode step streams, by format, split into what is quantized and what is not."""
    title = "Bytes streamed per decode step, 16-bit = 100 %"
    said = []
    svg = Svg(780, 302, title)
    svg.text(12, 22, title, bold=True)
    left, width, y = 190, 480, 44
    for name, shape in SHAPES.items():
        linear, table, small = parameters(shape)
        whole = 2 * (linear + table + small)
        for label, bits in (("16-bit", 16.0), ("FP8", 8.0), ("W4 g128", 4.125)):
            parts = linear * bits / 8 / whole, 2 * (table + small) / whole
            svg.text(left - 8, y + 15, label, size=11.5, anchor="end", css="soft")
            svg.rect(left, y + 2, parts[0] * width, 18, fill=BLUE, opacity=0.75)
            svg.rect(left + parts[0] * width, y + 2, parts[1] * width, 18, fill=ORANGE, opacity=0.8)
            ceiling = 1 / sum(parts)
            share = parts[1] / sum(parts)
            note = f"{ceiling:.2f}x, {share:.0%} not quantized" if bits < 16 else ""
            svg.text(left + sum(parts) * width + 7, y + 15, note, size=11.5)
            said.append(
                f"{name} {label}: {sum(parts):.0%} of the bytes, {share:.0%} of them 16-bit"
            )
            y += 22
        svg.text(12, y - 40, name, size=12.5, bold=True)
        y += 14
    svg.description = "; ".join(said) + "."
    svg.rect(left, 276, 12, 12, fill=BLUE, opacity=0.75)
    svg.text(left + 18, 287, "linear layers", size=12)
    svg.rect(left + 130, 276, 12, 12, fill=ORANGE, opacity=0.8)
    svg.text(left + 148, 287, "head, norms, biases: always 16 bits", size=12)
    return svg.render()


def card() -> str:
    """What fits on one 80 GB card, for a 70B model."""
    title = "A 70B model on one card of 79.6 GiB, 92 % of it used"
    svg = Svg(780, 236, title)
    svg.text(12, 22, title, bold=True)
    linear, table, small = parameters(SHAPES["Llama-3.1-70B"])
    budget, per_token, said = 0.92 * 79.6, 2 * 80 * 8 * 128 * 2, []
    left, scale = 120, 4.3
    for number, (name, bits) in enumerate((("16-bit", 16.0), ("FP8", 8.0), ("W4 g128", 4.125))):
        y = 52 + number * 46
        gib = (linear * bits / 8 + 2 * (2 * table + small)) / 2**30
        rest = budget - gib
        svg.text(left - 8, y + 19, name, size=12, anchor="end")
        svg.rect(left, y, gib * scale, 28, fill=BLUE if rest > 0 else RED, opacity=0.7)
        svg.text(left + 8, y + 19, f"weights {gib:.1f} GiB", size=12)
        if rest > 0:
            tokens = rest * 2**30 / per_token
            svg.rect(left + gib * scale, y, rest * scale, 28, fill=GREEN, opacity=0.7)
            note = f"{rest:.1f} GiB: at most {tokens / 1000:.0f}k tokens of KV"
            svg.text(left + budget * scale + 10, y + 19, note, size=12)
        else:
            note = "does not fit"
            svg.text(left + gib * scale + 8, y + 19, note, size=12, fill=RED, bold=True)
        said.append(f"{name}: weights {gib:.1f} GiB, {note}")
    svg.description = "; ".join(said) + "."
    x = left + budget * scale
    svg.line(x, 44, x, 182, stroke=GREY, dash="4 3", width=2)
    svg.text(x, 200, f"{budget:.1f} GiB", size=12, anchor="middle")
    svg.text(
        12,
        224,
        "KV in 16 bits: 327,680 bytes a token. Activations and graphs still come off.",
        size=11.5,
        css="soft",
    )
    return svg.render()


def dispatch() -> str:
    """From a checkpoint to a log line."""
    title = "Config, method, kernel"
    words = (
        "The checkpoint's quantization_config and the quantization argument are reconciled into "
        "one method name and one QuantizationConfig. Each layer asks it for a method by prefix. "
        "The method registers parameters, the loader fills them, process_weights_after_loading "
        "reworks them. The method picks the first kernel of an ordered list that can; a log line "
        "names it; apply calls it."
    )
    svg = Svg(780, 356, title, words)
    svg.text(12, 22, title, bold=True)
    svg.box(12, 44, 160, 48, ["checkpoint", "quantization_config"], fill=GREY, size=12)
    svg.box(12, 104, 160, 48, ["argument", "quantization="], fill=GREY, size=12)
    svg.box(
        234,
        66,
        190,
        62,
        ["QuantizationConfig", "one per model", "ignore list, group size"],
        fill=BLUE,
        size=12,
    )
    svg.line(174, 68, 230, 88, arrow=True)
    svg.line(174, 128, 230, 108, arrow=True)
    svg.box(
        234, 182, 190, 62, ["method", "one per layer", "create_weights, apply"], fill=GREEN, size=12
    )
    svg.line(329, 130, 329, 178, arrow=True)
    svg.text(337, 150, "get_quant_method(", size=11.5, css="soft mono")
    svg.text(337, 165, "  layer, prefix)", size=11.5, css="soft mono")
    svg.box(
        12,
        182,
        160,
        62,
        ["LinearBase", "qkv_proj, o_proj, ...", "knows no format"],
        fill=GREY,
        size=12,
    )
    svg.line(174, 205, 230, 205, arrow=True)
    svg.text(202, 197, "asks", size=11, anchor="middle", css="soft")
    svg.box(
        540,
        182,
        220,
        62,
        ["ordered list of kernels", "first that is supported", "and can"],
        fill=PURPLE,
        size=12,
    )
    svg.line(426, 213, 536, 213, arrow=True)
    svg.text(481, 205, "what I need", size=11, anchor="middle", css="soft")
    svg.line(650, 246, 650, 290, arrow=True)
    svg.box(520, 294, 240, 44, ["Selected ... for ...", "the evidence"], fill=ORANGE, size=12)
    svg.box(
        234,
        294,
        190,
        44,
        ["process_weights_", "after_loading: repack, quantize"],
        fill=GREEN,
        size=12,
    )
    svg.line(329, 246, 329, 290, arrow=True)
    svg.box(12, 294, 160, 44, ["loader", "fills the parameters"], fill=GREY, size=12)
    svg.line(174, 316, 230, 316, arrow=True)
    svg.text(540, 80, "KV cache: a second,", size=12, css="soft")
    svg.text(540, 96, "independent knob,", size=12, css="soft")
    svg.text(540, 112, "kv_cache_dtype", size=12, css="soft mono")
    return svg.render()


# ------------------------------------------------------------------ deep dive


def words_of_eight() -> str:
    """One row of eight codes, in the orders of GPTQ and of AWQ."""
    title = "Eight 4-bit codes in one int32: two orders"
    codes = [-7, -5, -3, -1, 1, 3, 5, 7]
    orders = {"standard": list(range(8)), "AWQ": [0, 2, 4, 6, 1, 3, 5, 7]}
    packed = {
        name: sum((codes[place] + 8) << 4 * slot for slot, place in enumerate(order))
        for name, order in orders.items()
    }
    read = [((packed["AWQ"] >> 4 * slot) & 15) - 8 for slot in range(8)]
    words = "; ".join(f"{name} word 0x{value:08X}" for name, value in packed.items())
    svg = Svg(780, 260, title, f"{words}; the AWQ word read in standard order gives {read}.")
    svg.text(12, 22, title, bold=True)
    svg.text(12, 56, "codes", size=12, css="soft")
    for place, code in enumerate(codes):
        svg.box(110 + place * 64, 40, 56, 24, [f"{code}"], fill=SERIES[place % 6], size=12)
    svg.text(110 + 8 * 64, 56, "index 0 to 7", size=11.5, css="soft")
    for number, (name, order) in enumerate(orders.items()):
        y = 96 + number * 62
        svg.text(12, y + 22, f"{name}", size=12, bold=True)
        for slot in range(8):
            place = order[7 - slot]
            svg.box(
                110 + slot * 64,
                y,
                56,
                34,
                [f"{codes[place] + 8:X}", f"index {place}"],
                fill=SERIES[place % 6],
                size=12,
            )
        svg.text(110 + 8 * 64, y + 22, f"0x{packed[name]:08X}", size=12.5, css="ink mono")
    svg.text(110, 88, "bits 31 to 28", size=10.5, css="soft")
    svg.text(110 + 8 * 64 - 8, 88, "bits 3 to 0", size=10.5, anchor="end", css="soft")
    svg.text(12, 230, "AWQ's word read in standard order:", size=12, css="soft")
    svg.text(240, 230, str(read), size=12.5, css="ink mono", fill=RED)
    svg.text(12, 250, "No error is raised. Every code is a valid code.", size=12, css="soft")
    return svg.render()


def e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest E4M3 values; magnitudes above 448 become 448."""
    exponent = np.floor(np.log2(np.maximum(np.abs(values), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.clip(np.rint(values / step) * step, -448, 448)


def fused() -> str:
    """Error of q, k and v with scales of their own and with the largest of the three."""
    title = "One scale for a fused q, k, v: what its parts pay"
    svg = Svg(780, 330, title)
    svg.text(12, 22, title, bold=True)
    axes = Axes(svg, (66, 58, 560, 216), (-0.6, 11.6), (0, 0.05))
    axes.frame(
        "",
        "relative error of the shard",
        {layer * 3 + i: f"{letter}{layer}" for layer in range(4) for i, letter in enumerate("qkv")},
        {v: f"{v:.0%}" for v in (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)},
    )
    said, rows = [], []
    for layer in range(4):
        shards = [
            weights()[f"model.layers.{layer}.self_attn.{p}_proj.weight"].astype(np.float64)
            for p in "qkv"
        ]
        merged = max(np.abs(shard).max() for shard in shards)
        for index, (letter, shard) in enumerate(zip("qkv", shards, strict=True)):
            own = np.abs(shard).max()
            place = layer * 3 + index
            norm = np.linalg.norm(shard)
            errors = []
            for largest in (own, merged):
                s = largest / 127
                errors.append(np.linalg.norm(np.rint(shard / s) * s - shard) / norm)
            first = own / 448
            once = e4m3(shard / first) * first
            last = merged / 448
            twice = e4m3(once / last) * last
            errors += [np.linalg.norm(a - shard) / norm for a in (once, twice)]
            said.append(f"{letter}{layer} " + "/".join(f"{e:.4f}" for e in errors))
            rows.append((place, errors))
    svg.description = "Errors int8 own, int8 merged, E4M3 own, E4M3 merged: " + "; ".join(said)
    legend = (
        ("int8, own scale", BLUE, 0.4),
        ("int8, largest scale", BLUE, 0.95),
        ("E4M3, own scale", ORANGE, 0.4),
        ("E4M3, merged by\nquantizing again", ORANGE, 0.95),
    )
    for bar, (name, color, light) in enumerate(legend):
        points = [(place - 0.3 + 0.2 * bar, float(errors[bar])) for place, errors in rows]
        axes.bars(points, color, width=0.19, opacity=light, name=name)
    axes.legend(634, 64)
    svg.text(
        66, 316, "letter: projection; number: layer of the shipped model", size=11.5, css="soft"
    )
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "pipeline.svg": pipeline,
    "grid.svg": grid,
    "ladder.svg": ladder,
    "row-max.svg": row_max,
    "step-size.svg": step_size,
    "factor.svg": factor,
    "crossover.svg": crossover,
    "activations.svg": activations,
    "streamed.svg": streamed,
    "card.svg": card,
    "dispatch.svg": dispatch,
    "words.svg": words_of_eight,
    "fused.svg": fused,
}
