"""The figures of the labs of phase 10: what their reference solutions say, drawn.

`course figures 10` writes them. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, Svg
from course.truth.plots import Axes

LABS = Path(__file__).resolve().parents[1] / "labs"
COLORS = (BLUE, ORANGE, GREEN, PURPLE)


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def _grid(svg: Svg, x: float, y: float, values: np.ndarray, owner: np.ndarray) -> None:
    """A matrix as cells, each in the colour of the rank that holds it (-1: all)."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            rank = int(owner[row, column])
            fill = GREY if rank < 0 else COLORS[rank]
            left, top = x + column * 30, y + row * 26
            svg.rect(left, top, 28, 24, fill=fill, opacity=0.2 if rank < 0 else 0.45, radius=3)
            words = f"{values[row, column]:g}"
            svg.text(left + 14, top + 17, words, size=12, anchor="middle")


def pair() -> str:
    """Lab 01: the worked MLP on two ranks, numbers and all."""
    lab = solution("lab-01-tp-sharding-math")
    x = np.array([[1.0, 2, 3, 4]])
    w1 = np.array([[1.0, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, -1], [1, 1, -1, 0]])
    w2 = np.array([[1.0, 2, 3, 4], [0, 1, 0, 1]])
    hidden = [lab.relu(x @ lab.shard_columns(w1, rank, 2).T) for rank in (0, 1)]
    addends = [hidden[rank] @ lab.shard_rows(w2, rank, 2).T for rank in (0, 1)]
    y, count = lab.mlp_tp(x, w1, w2, 2)
    assert count == 1 and np.array_equal(sum(addends), y)
    svg = Svg(
        780, 250, "A column-parallel weight, relu, a row-parallel weight, one all-reduce",
        "W1 is cut between its rows, W2 between its columns. Each rank has two hidden units and "
        f"an addend of both outputs: {addends[0].tolist()} and {addends[1].tolist()}, summed "
        f"{y.tolist()}.",
    )  # fmt: skip
    ranks = np.arange(2)
    svg.text(16, 30, "x, on every rank", size=12)
    _grid(svg, 16, 92, x, np.full(x.shape, -1))
    svg.text(170, 30, "W1: rows", size=12)
    _grid(svg, 170, 52, w1, np.repeat(ranks, 2)[:, None].repeat(4, axis=1))
    svg.text(330, 30, "relu(x W1ᵀ): units", size=12)
    _grid(svg, 330, 92, np.concatenate(hidden, axis=1), np.repeat(ranks, 2)[None])
    svg.text(490, 30, "W2: columns", size=12)
    _grid(svg, 490, 80, w2, np.repeat(ranks, 2)[None].repeat(2, axis=0))
    svg.text(650, 30, "addends of y", size=12)
    for rank in (0, 1):
        _grid(svg, 650, 60 + rank * 44, addends[rank], np.full((1, 2), rank))
    for left in (142, 296, 456, 616):
        svg.line(left, 104, left + 22, 104, arrow=True)
    svg.line(679, 132, 679, 170, arrow=True)
    svg.text(690, 156, "all-reduce", size=12, bold=True)
    _grid(svg, 650, 176, y, np.full(y.shape, -1))
    for rank, words in enumerate(("rank 0", "rank 1")):
        svg.rect(16 + rank * 110, 216, 16, 16, fill=COLORS[rank], opacity=0.45, radius=3)
        svg.text(40 + rank * 110, 229, words, size=12)
    svg.rect(236, 216, 16, 16, fill=GREY, opacity=0.2, radius=3)
    svg.text(260, 229, "the same on both", size=12)
    return svg.render()


def memory() -> str:
    """Lab 02: opt-1.3b on cards of 22.03 GiB, one rank, two ranks and two replicas."""
    lab = solution("lab-02-two-way-tp")
    config = {
        "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 50272, "max_position_embeddings": 2048,
    }  # fmt: skip
    gib = 2.0**30
    blocks = {}
    svg = Svg(
        780, 300, "opt-1.3b on one card, on two ranks, and as two replicas",
        "Each card of 22.03 GiB: 4.41 GiB not used, 0.75 GiB of other things, weights, KV. Two "
        "ranks hold half of every token each, so the same memory for KV holds twice the tokens.",
    )  # fmt: skip
    rows = (("one card", 1, 1), ("two ranks", 2, 2), ("two replicas", 1, 2))
    y = 24
    for words, tp, cards in rows:
        weights = lab.opt_weight_bytes_per_rank(config, tp)
        kv = lab.kv_bytes_per_token_per_rank(config, tp)
        blocks[words] = lab.plan_blocks(22.03 * gib, 0.8, 0.75 * gib, weights, kv)
        tokens = 16 * blocks[words] * (cards if tp == 1 else 1)
        svg.text(16, y + 18, words, bold=True)
        svg.text(16, y + 36, f"{tokens:,} tokens", size=12, css="soft")
        for _ in range(cards):
            x = 150.0
            pieces = (
                (weights / gib, BLUE, ("weights", "half")[tp - 1]), (0.75, GREY, ""),
                (16 * kv * blocks[words] / gib, GREEN, f"KV: {kv // 1024} KiB a token"),
                (22.03 * 0.2, PURPLE, "not used"),
            )  # fmt: skip
            for size, color, inside in pieces:
                width = size * 27.5
                svg.rect(x, y, width - 2, 32, fill=color, opacity=0.4, radius=3)
                svg.text(x + 6, y + 21, inside, size=11)
                x += width
            y += 38
        y += 22
    svg.text(150, y + 4, "each bar a card of 22.03 GiB; the small grey piece: 0.75 GiB", size=12)
    return svg.render()


def crossover() -> str:
    """Lab 03: seconds of an all-reduce by payload, three ways, 8 ranks of NVLink."""
    lab = solution("lab-03-tp-comm-cost")
    link, ranks = lab.LINKS["NVLink"], 8
    sizes = [2.0**power for power in range(10, 27)]
    limit = lab.one_shot_limit_bytes(ranks, *link)
    decode, prefill = (lab.allreduce_payload_bytes(tokens, 4096) for tokens in (1, 2048))
    svg = Svg(
        780, 400, "Microseconds of an all-reduce among 8 ranks against its payload",
        "Ring, one shot and two shots by the lab's model: small payloads pay for steps, large ones "
        f"for bytes; one shot stops paying at {limit / 1024:.0f} KiB.",
    )  # fmt: skip
    axes = Axes(svg, (70, 40, 560, 300), (1024, 2.0**26), (1, 4000), log_x=True, log_y=True)
    axes.frame(
        "payload",
        "microseconds, 8 ranks, 300 GB/s, 3 microseconds a hop: a model",
        {
            2.0**10: "1 KiB",
            2.0**14: "16 KiB",
            2.0**18: "256 KiB",
            2.0**22: "4 MiB",
            2.0**26: "64 MiB",
        },
        {1: "1", 10: "10", 100: "100", 1000: "1,000"},
    )
    curves = (
        ("ring", BLUE, [lab.allreduce_time_s(size, ranks, *link) for size in sizes]),
        ("one shot", ORANGE, [lab.direct_allreduce_time_s(s, ranks, *link, 1) for s in sizes]),
        ("two shots", GREEN, [lab.direct_allreduce_time_s(s, ranks, *link, 2) for s in sizes]),
    )
    for words, color, times in curves:
        points = [(x, 1e6 * y) for x, y in zip(sizes, times, strict=True)]
        axes.curve(points, color, name=words)
    axes.legend(644, 56)
    for size, words in (
        (decode, "one token"),
        (limit, "one shot = two"),
        (prefill, "2,048 tokens"),
    ):
        axes.rule(x=size)
        axes.label(size, 1.4, words, dx=5)
    return svg.render()


def pipeline() -> str:
    """Lab 04: a burst, a loop that is full and one that is not, played by the lab's simulators."""
    lab = solution("lab-04-pipeline-bubble")
    panels = (
        ("a burst of 4", lab.simulate_schedule(4, 4)),
        ("a loop of 4 batches", lab.simulate_loop(4, 4, 11)),
        ("a loop of 2 batches", lab.simulate_loop(4, 2, 11)),
    )
    idle = sum(cell is None for row in panels[0][1] for cell in row)
    svg = Svg(
        780, 470, "Four stages: a burst of four microbatches, and loops of four and of two batches",
        f"The burst leaves {idle} of 28 cells idle. A loop of four batches has idle cells only "
        "while it fills; one of two batches leaves half of the cells idle for ever.",
    )  # fmt: skip
    for panel, (words, grid) in enumerate(panels):
        top = 20 + panel * 150
        svg.text(16, top + 8, words, bold=True)
        for stage, row in enumerate(grid):
            y = top + 16 + stage * 28
            svg.text(16, y + 18, f"stage {stage}", size=12, css="soft")
            for tick, batch in enumerate(row):
                fill = GREY if batch is None else COLORS[batch]
                opacity = 0.12 if batch is None else 0.5
                svg.rect(90 + tick * 58, y, 54, 24, fill=fill, opacity=opacity, radius=3)
                if batch is not None:
                    svg.text(117 + tick * 58, y + 17, str(batch), size=12, anchor="middle")
        if panel == 0:
            share = lab.bubble_fraction(4, 4)
            svg.text(510, top + 76, f"{idle} of 28 cells idle: {share:.1%}", size=12)
    svg.text(90, 458, "ticks, from left to right; a number is a microbatch or a batch", size=12)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-pair.svg": pair,
    "lab-02-memory.svg": memory,
    "lab-03-crossover.svg": crossover,
    "lab-04-pipeline.svg": pipeline,
}
