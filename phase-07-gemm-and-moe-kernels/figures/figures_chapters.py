"""Figures of phase 07; `course figures` writes them.

`loads` and `touched` are drawn from traces of `mini_vllm` serving a model with experts, `step-time`
from decode steps measured on an H100 (`benchmarks/gpu/models.json`), `ranks` from the loads of the
same traces and lab 07-04's balancer, `skew` from that lab's arithmetic, `lab-05-paths` from the
recorded choices of the pin's oracles. `groups` and `tiles` are diagrams. No upstream counterpart.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from conformance import parts
from course.files import load_module
from course.truth.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SERIES,
    Svg,
)
from course.truth.plots import Axes
from labkit import moe_model
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.observe.trace import StepRecord, traced_steps

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


TEXTS = (
    "The scheduler gives every request a part of the budget.",
    "def forward(self, hidden_states):",
    "A block that nobody uses is free.",
    "import numpy as np",
    "vLLM is a library for serving",
    "The KV cache of a request",
    "class Expert(nn.Module):",
    "Tokens that arrive together",
)


def lab(number: str) -> object:
    (folder,) = (HERE.parent / "labs").glob(f"lab-{number}-*")
    return load_module(folder / "solution.py")


@functools.cache
def trace(num_requests: int, max_tokens: int = 24) -> tuple[StepRecord, ...]:
    """A served batch, all requests added at once."""
    engine = LLMEngine(model=moe_model(), num_blocks=1200, max_num_seqs=64)
    for number in range(num_requests):
        text = TEXTS[number % len(TEXTS)][number // len(TEXTS) :]
        engine.add_request(text, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return tuple(traced_steps(engine))


def loads() -> str:
    """Expert by step: the share of a step's pairs, first layer with experts."""
    records = trace(8)
    layer = next(iter(records[0].expert_loads))
    rows = np.array([record.expert_loads[layer] for record in records])  # [steps, experts]
    shares = rows / rows.sum(axis=1, keepdims=True)
    cell, high, left, top = 23, 17, 62, 46
    width, height = left + cell * len(rows) + 20, top + high * rows.shape[1] + 58
    svg = Svg(width, height, "Expert loads of every step", "One column a step, one row an expert.")
    svg.text(12, 24, f"Layer {layer}, 8 requests: share of the step's pairs, by expert", size=13)
    for step, row in enumerate(rows):
        for expert, pairs in enumerate(row):
            tip = f"step {step}, expert {expert}: {pairs} of {row.sum()} pairs"
            opacity = min(1.0, 0.05 + 4 * shares[step, expert])
            svg.rect(
                left + cell * step, top + high * expert, cell - 2, high - 2, fill=BLUE,
                opacity=opacity, tip=tip,
            )  # fmt: skip
            if pairs:
                svg.text(
                    left + cell * step + (cell - 2) / 2, top + high * expert + 12, str(pairs),
                    size=10, anchor="middle",
                )  # fmt: skip
    for expert in range(0, rows.shape[1], 3):
        svg.text(left - 8, top + high * expert + 12, f"{expert}", size=11, anchor="end", css="soft")
    svg.text(14, top - 8, "expert", size=11, css="soft")
    bottom = top + high * rows.shape[1] + 16
    svg.text(left + cell / 2, bottom, "prefill", size=11, anchor="middle", css="soft")
    svg.text(left + cell * 9, bottom, "decode: eight tokens a step", size=11, css="soft")
    return svg.render()


def touched() -> str:
    """Distinct experts of a decode step, measured and by the formula."""
    engine = moe_model()
    config = engine.config.moe
    assert config is not None
    points = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        decode = [r for r in trace(batch) if set(r.num_scheduled_tokens.values()) == {1}]
        counts = [sum(load > 0 for load in row) for r in decode for row in r.expert_loads.values()]
        points.append((batch, statistics.mean(counts)))
    svg = Svg(640, 330, "Experts touched by a decode step", "Measured dots under the formula.")
    ticks = {b: str(b) for b, _ in points}
    axes = Axes(svg, (60, 40, 540, 230), (1, 64), (0, config.num_experts), log_x=True)
    axes.frame("requests in the step", "experts touched in a layer, mean", ticks,
               range(0, config.num_experts + 1, 4))  # fmt: skip
    e, k = config.num_experts, config.num_experts_per_tok
    curve = [(b, e * (1 - (1 - k / e) ** b)) for b in np.geomspace(1, 64, 60)]
    axes.curve(curve, GREY, dash="6 4")
    axes.dots(points, BLUE)
    axes.label(1.1, 14.6, "every expert as likely: E (1 - (1 - k/E)^B)", GREY)
    axes.label(16, points[4][1] - 2.4, "measured in the engine", BLUE)
    return svg.render()


def step_time() -> str:
    """Measured decode steps of an H100 and the line through the first and the last."""
    arm = json.loads((ROOT / "benchmarks" / "gpu" / "models.json").read_text())["arms"]["moe"]
    measured = {int(b): statistics.median(ms) for b, ms in arm["decode_ms"].items()}
    module = lab("02")
    size = {b: sum(module.step_bytes(arm["config"], b).values()) for b in range(1, 65)}
    fixed, speed = module.fit_step_time([size[1], size[64]], [measured[1], measured[64]])
    svg = Svg(660, 350, "A decode step of a mixture of experts against batch", "H100, measured.")
    axes = Axes(svg, (58, 40, 560, 250), (1, 64), (0, 16), log_x=True)
    axes.frame("requests in the step", "ms a decode step", list(measured),
               range(0, 17, 4))  # fmt: skip
    axes.curve([(b, size[b] / 3.35e9) for b in size], GREY, dash="6 4")
    axes.curve([(b, fixed + size[b] / speed * 1e3) for b in size], ORANGE)
    axes.curve([(1, fixed), (64, fixed)], PURPLE, dash="2 4")
    axes.dots(list(measured.items()), BLUE, radius=5)
    axes.label(1.15, 6.2, "measured", BLUE)
    axes.label(6.5, 11.6, f"{fixed:.1f} ms + bytes / {speed / 1e12:.2f} TB/s", ORANGE, anchor="end")
    axes.label(12, 4.6, "bytes / 3.35 TB/s", GREY)
    axes.label(30, 2.2, "fixed part", PURPLE)
    return svg.render()


def ranks() -> str:
    """Load of four ranks on the same step loads: linear, packed, with copies."""
    module = lab("04")
    records = trace(64)
    layer = next(iter(records[0].expert_loads))
    total = np.sum([record.expert_loads[layer] for record in records], axis=0)
    plain = np.array_split(np.arange(len(total)), 4)
    ways = [("linear", [list(part) for part in plain])]
    for more in (0, 4):
        slots = module.rebalance(total, len(total) + more, 4)
        name = "packed" if not more else f"packed, {more} copies"
        ways.append((name, [list(part) for part in np.array_split(slots, 4)]))
    svg = Svg(680, 330, "The load of four ranks", "Bars of experts, stacked by rank.")
    mean = total.sum() / 4
    scale = 180 / max(sum(total[e] for e in part) for part in plain)
    for column, (name, packs) in enumerate(ways):
        copies = np.bincount(np.concatenate(packs), minlength=len(total))
        left = 40 + 215 * column
        for rank, part in enumerate(packs):
            y = 270.0
            for expert in part:
                load = total[expert] / copies[expert]
                y -= load * scale
                color = SERIES[expert % len(SERIES)]
                tip = f"rank {rank}, expert {expert}: {load:.0f} pairs"
                svg.rect(
                    left + 46 * rank, y, 38, load * scale - 1, fill=color, opacity=0.75, tip=tip
                )
            busy = sum(total[e] / copies[e] for e in part) / mean
            svg.text(left + 46 * rank + 19, y - 5, f"{busy:.2f}", size=11, anchor="middle")
            svg.text(left + 46 * rank + 19, 286, str(rank), size=11, anchor="middle", css="soft")
        svg.text(left + 88, 306, name, size=13, anchor="middle", bold=True)
    svg.line(30, 270 - mean * scale, 660, 270 - mean * scale, stroke=GREY, dash="5 4")
    svg.text(30, 24, "Load of each rank over the mean; the step waits for the tallest", size=13)
    return svg.render()


def skew() -> str:
    """Time of the busiest of 8 ranks over that of even routing: rows against the hottest share."""
    module = lab("04")
    experts, num_ranks, ridge = 64, 8, 295.0
    tokens = [2**power for power in range(3, 16)]
    shares = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the pairs; k = 2, so at most a half

    def time(rows: int, share: float) -> float:
        chances = np.full(experts, (1 - share) / (experts - 1))
        chances[0] = share
        rng = np.random.default_rng(0)
        draws = rng.multinomial(rows, chances, size=40)
        return statistics.mean(
            module.ep_step_time_roofline(loads, num_ranks, ridge) for loads in draws
        )

    cell_w, cell_h, left, top = 45, 34, 66, 52
    svg = Svg(left + cell_w * len(tokens) + 16, top + cell_h * len(shares) + 62,
              "What a hot expert costs", "Step time over even routing.")  # fmt: skip
    svg.text(
        14,
        22,
        "Step time over that of even routing: 64 experts on 8 ranks, k = 2, ridge 295",
        size=13,
    )
    svg.text(14, 42, "pairs on expert 0", size=11, css="soft")
    for row, share in enumerate(shares):
        y = top + cell_h * row
        svg.text(left - 8, y + 21, f"1/{round(1 / share)}", size=12, anchor="end")
        for column, count in enumerate(tokens):
            ratio = time(2 * count, share) / time(2 * count, 1 / experts)
            x = left + cell_w * column
            color = ORANGE if ratio > 1 else BLUE
            opacity = min(0.85, 0.06 + abs(np.log2(ratio)) / 3)
            svg.rect(x, y, cell_w - 2, cell_h - 2, fill=color, opacity=opacity,
                     tip=f"{count} tokens, share 1/{round(1 / share)}: {ratio:.2f}")  # fmt: skip
            svg.text(x + cell_w / 2 - 1, y + 21, f"{ratio:.1f}", size=11, anchor="middle")
    for column, count in enumerate(tokens):
        words = str(count) if count < 1024 else f"{count // 1024}k"
        svg.text(left + cell_w * (column + 0.5), top + cell_h * len(shares) + 16, words, size=11,
                 anchor="middle", css="soft")  # fmt: skip
    svg.text(left + cell_w * len(tokens) / 2, top + cell_h * len(shares) + 40, "tokens of the step",
             size=12, anchor="middle")  # fmt: skip
    return svg.render()


def groups() -> str:
    """The worked example: four tokens, pairs sorted by expert, blocks of four."""
    svg = Svg(680, 300, "Four tokens, two experts each, grouped", "Pairs sorted into blocks.")
    ids = [[0, 1], [2, 3], [1, 3], [3, 0]]
    svg.text(20, 30, "pairs as routed", size=12, css="soft")
    for token, row in enumerate(ids):
        for slot, expert in enumerate(row):
            x = 20 + 78 * (2 * token + slot)
            svg.box(x, 40, 70, 44, [f"pair {2 * token + slot}", f"token {token} → {expert}"],
                    fill=SERIES[expert], size=12)  # fmt: skip
    svg.text(
        20,
        130,
        "sorted by expert, each filled to a block of 4; pair p is token p // 2",
        size=12,
        css="soft",
    )
    flat = [expert for row in ids for expert in row]
    for expert in range(4):
        mine = [p for p, e in enumerate(flat) if e == expert]
        left = 20 + 162 * expert
        for place in range(4):
            words = str(mine[place]) if place < len(mine) else "·"
            svg.rect(left + 36 * place, 142, 33, 34, fill=SERIES[expert],
                     opacity=0.35 if place < len(mine) else 0.06, radius=3)  # fmt: skip
            svg.text(left + 36 * place + 16, 164, words, size=13, anchor="middle")
        svg.line(left + 70, 180, left + 70, 204, arrow=True)
        svg.box(left, 208, 141, 40, [f"expert {expert}", f"{len(mine)} rows, one product"],
                fill=SERIES[expert], size=12)  # fmt: skip
    svg.text(
        20,
        282,
        "Results go to the rows of their pairs; a token is the weighted sum of its two.",
        size=12,
    )
    return svg.render()


def tiles() -> str:
    """What an output tile reads, and reuse against the tile's sides."""
    svg = Svg(740, 310, "An output tile and what it reads", "Tile of a product; reuse curves.")
    svg.rect(60, 60, 120, 110, fill=GREY, opacity=0.1, stroke=GREY)
    svg.rect(60, 96, 120, 30, fill=BLUE, opacity=0.55)
    svg.text(120, 50, "a: m x k", size=12, anchor="middle")
    svg.rect(200, 60, 110, 120, fill=GREY, opacity=0.1, stroke=GREY)
    svg.rect(240, 60, 36, 120, fill=ORANGE, opacity=0.55)
    svg.text(255, 50, "b: k x n", size=12, anchor="middle")
    svg.text(60, 206, "rows of the tile: tile_m x k", size=12, fill=BLUE)
    svg.text(60, 226, "columns of the tile: k x tile_n", size=12, fill=ORANGE)
    svg.text(60, 252, "tile_m x tile_n x k products for", size=12, css="soft")
    svg.text(60, 268, "(tile_m + tile_n) x k reads", size=12, css="soft")
    axes = Axes(svg, (400, 50, 250, 200), (1, 256), (1, 256), log_x=True, log_y=True)
    axes.frame("tile_n", "uses of an element for each read", {1: "1", 16: "16", 256: "256"},
               {2: "2", 16: "16", 128: "128"})  # fmt: skip
    for tile_m, color in ((256, GREEN), (64, PURPLE), (1, ORANGE)):
        points = [(n, 2 * tile_m * n / (tile_m + n)) for n in np.geomspace(1, 256, 40)]
        axes.curve(points, color)
        axes.label(256, points[-1][1], f"tile_m {tile_m}", color, anchor="start", dx=6, dy=4)
    return svg.render()


def paths() -> str:
    """Deployment by card: what the pin's oracle chose for NVFP4 with FlashInfer."""
    choices = {
        (case["deployment"], case["capability"]): case
        for case in parts.load("expert_backends")
        if case["checkpoint"] == "nvfp4" and case["flashinfer"] and not case["lora"]
    }
    deployments = list(dict.fromkeys(name for name, _ in choices))
    cards = list(dict.fromkeys(card for _, card in choices))
    colors = dict(zip(("CUTLASS", "MARLIN", "CUTEDSL_BATCHED", "TRTLLM"), SERIES, strict=False))
    wide, high, left, top = 130, 32, 146, 62
    svg = Svg(
        left + wide * len(cards) + 14, top + high * len(deployments) + 12,
        "What computes experts in NVFP4, by deployment and card",
        "Eight deployments on five cards with FlashInfer: the backend, a star where its kernel "
        "routes inside, and a dash where the start is an error.",
    )  # fmt: skip
    svg.text(12, 24, "NVFP4 with FlashInfer. *: routes inside its kernel. -: error at the start")
    for column, card in enumerate(cards):
        svg.text(left + wide * (column + 0.5), 52, card, anchor="middle", bold=True)
    for row, name in enumerate(deployments):
        y = top + high * row
        svg.text(left - 8, y + 18, name, anchor="end", css="ink mono")
        for column, card in enumerate(cards):
            case = choices[name, card]
            words = (case["backend"] or "-").removeprefix("FLASHINFER_")
            star = "*" * case.get("monolithic", False)
            color = colors.get(words, GREY)
            svg.cell(left + wide * column + 2, y, wide - 4, words + star, color, 0.3)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "loads.svg": loads,
    "touched.svg": touched,
    "step-time.svg": step_time,
    "ranks.svg": ranks,
    "skew.svg": skew,
    "groups.svg": groups,
    "tiles.svg": tiles,
    "lab-05-paths.svg": paths,
}
