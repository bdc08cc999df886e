"""The figures of labs 04-01, 04-03, 04-04 and of the experiments.

States, reads and merges come from the labs' reference solutions; measured curves from
`experiments/measured/`. No upstream counterpart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes

PHASE = Path(__file__).resolve().parents[1]


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(PHASE / "labs" / folder / "solution.py")


# ------------------------------------------------------------------ lab 04-01


def two_blocks() -> str:
    """The worked example of lab 04-01: four tokens in blocks 4 and 1, one state per block."""
    lab = solution("lab-01-paged-attention-gather")
    table, scores, values = [4, 1], np.log([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 2.0, 3.0, 4.0])
    states = [lab.empty_state(1)]
    for start in (0, 2):
        rows = values[start : start + 2, None]
        states.append(lab.softmax_step(states[-1], scores[start : start + 2], rows))
    out = float(states[-1].acc[0] / states[-1].denom)
    svg = Svg(
        780,
        352,
        "Four tokens, two blocks, three states",
        "Physical blocks 0 to 4; the block table 4, 1 sends tokens 0 and 1 to block 4 and tokens 2 "
        "and 3 to block 1. The state starts at -inf, 0, 0. Block 4 makes it ln 2, 1.5, 2.5. Block "
        "1 raises the maximum to ln 8, so both sums shrink to a quarter before its own are added: "
        f"1.875 and 6.125. The output is {out:.4f}.",
    )
    svg.text(
        16, 28, "physical blocks of 2 rows; only the coloured ones are this sequence's", bold=True
    )
    colors = {4: BLUE, 1: ORANGE}
    for block in range(5):
        x = 16 + block * 152
        color = colors.get(block)
        svg.text(x, 56, f"block {block}", size=12, css="ink" if color else "soft")
        for row in range(2):
            y = 64 + row * 32
            if color is None:
                svg.rect(x, y, 136, 28, css="paper", radius=3)
                svg.text(x + 68, y + 19, "not ours", size=11, anchor="middle", css="soft")
                continue
            token = table.index(block) * 2 + row
            words = f"t{token}: s = ln {2**token}, v = {values[token]:.0f}"
            svg.rect(x, y, 136, 28, fill=color, opacity=0.25, stroke=color, radius=3)
            svg.text(x + 68, y + 19, words, size=12, anchor="middle")
    svg.text(16, 164, "block table [4, 1]: read block 4, then block 1", bold=True)
    for index, state in enumerate(states):
        x = 16 + index * 268
        color = (GREY, BLUE, ORANGE)[index]
        title = ("before", "after block 4", "after block 1")[index]
        m = "-inf" if math.isinf(state.m) else f"ln {round(math.exp(state.m))}"
        svg.rect(x, 180, 196, 104, fill=color, opacity=0.18, stroke=color, radius=6)
        svg.text(x + 12, 202, title, bold=True)
        for row, words in enumerate(
            (f"m     = {m}", f"denom = {state.denom:g}", f"acc   = {float(state.acc[0]):g}")
        ):
            svg.text(x + 12, 226 + row * 22, words, size=13, css="ink mono")
    for index, words in enumerate(("corr 0", "corr 1/4")):
        x = 216 + index * 268
        svg.line(x, 232, x + 62, 232, width=2, arrow=True)
        svg.text(x + 31, 222, words, size=12, anchor="middle")
    svg.text(16, 314, "denom = 1.5 x 1/4 + (1/2 + 1)", size=12, css="ink mono")
    svg.text(284, 314, "acc = 2.5 x 1/4 + (1/2 x 3 + 1 x 4)", size=12, css="ink mono")
    svg.text(
        16,
        338,
        f"output = acc / denom = 6.125 / 1.875 = 49/15 = {out:.4f}",
        size=12,
        css="ink mono",
    )
    return svg.render()


def weights_without_corr() -> str:
    """The weight of each of 16 tokens, with and without rescaling, scores rising and falling."""
    lab = solution("lab-01-paged-attention-gather")

    def weights(scores: np.ndarray, rescale: bool) -> np.ndarray:
        state = lab.empty_state(16)
        for start in range(0, 16, 4):
            if not rescale:  # what the sums are when nobody brings them to the new maximum
                m = max(state.m, float(scores[start : start + 4].max()))
                state = lab.State(m, state.denom, state.acc)
            part = slice(start, start + 4)
            state = lab.softmax_step(state, scores[part], np.eye(16)[part])
        return state.acc / state.denom

    rising = np.linspace(0, 3, 16)
    cases = (("scores rise: the maximum moves in every block", rising),
             ("scores fall: the maximum is in the first block", rising[::-1]))  # fmt: skip
    svg = Svg(
        780,
        300,
        "What a forgotten correction does to the weights",
        "Bars: the weight of each of 16 tokens in four blocks. When scores rise, leaving out the "
        "correction makes the early blocks weigh too much and the last too little. When the "
        "largest score is in the first block, both results are the same.",
    )
    top = 0.25
    for number, (title, scores) in enumerate(cases):
        left, bottom, height = 44.0 + number * 384, 236.0, 160.0
        right, wrong = weights(scores, True), weights(scores, False)
        svg.text(left - 28, 28, title, bold=True)
        for tick in (0, 0.1, 0.2):
            y = bottom - tick / top * height
            svg.line(left, y, left + 340, y, css="grid-line")
            svg.text(left - 6, y + 4, f"{tick:g}", size=11, anchor="end", css="soft")
        for token in range(16):
            x = left + 6 + token * 21
            for shift, weight, color in ((0, right[token], BLUE), (9, wrong[token], RED)):
                size = weight / top * height
                svg.rect(x + shift, bottom - size, 8, size, fill=color, opacity=0.85,
                         tip=f"token {token}: {weight:.4f}")  # fmt: skip
        for block in range(4):
            x = left + 6 + block * 84
            svg.text(x + 38, bottom + 18, f"block {block}", size=11, anchor="middle", css="soft")
            if block:
                svg.line(x - 3, 60, x - 3, bottom, css="grid-line")
    svg.rect(44, 272, 12, 12, fill=BLUE, opacity=0.85)
    svg.text(62, 283, "weight of the token", size=12)
    svg.rect(214, 272, 12, 12, fill=RED, opacity=0.85)
    svg.text(232, 283, "without corr: early blocks weigh too much, unless nothing rises", size=12)
    return svg.render()


# ------------------------------------------------------------------ lab 04-03


def tiles_and_blocks() -> str:
    """13 positions as chunks of 5 and 8, tiles of 4 rows, blocks of 4 keys: who reads what."""
    n, size, tile, chunks = 13, 4, 4, ((0, 5), (5, 13))
    cell, left, top = 22.0, 128.0, 64.0
    tiles = [
        (row, min(row + tile, stop)) for start, stop in chunks for row in range(start, stop, tile)
    ]
    reads = [-(-stop // size) for _, stop in tiles]
    pairs = n * (n + 1) // 2
    svg = Svg(
        780,
        400,
        "A causal mask, cut into tiles and blocks",
        f"Rows are query positions 0 to 12 in chunks of 5 and 8 tokens, each cut into tiles of 4 "
        f"rows; columns are key positions in blocks of 4. Row p sees keys 0 to p. The "
        f"{len(tiles)} tiles read {', '.join(map(str, reads))} blocks: {sum(reads)} reads instead "
        "of 28 row by row.",
    )
    svg.text(left, 28, "key positions, in logical blocks of 4", bold=True)
    for block in range(-(-n // size)):
        x = left + block * size * cell + block * 6
        svg.text(x, 54, f"block {block}", size=11, css="soft")
    colors = (BLUE, GREEN, ORANGE, PURPLE)
    y = top
    for number, (start, stop) in enumerate(tiles):
        color = colors[number % len(colors)]
        if start in (chunk[0] for chunk in chunks):
            words = f"chunk, start_pos {start}"
            svg.text(8, y + 15, words, size=11, bold=True)
        for row in range(start, stop):
            svg.text(left - 8, y + 15, str(row), size=11, anchor="end", css="soft")
            for key in range(n):
                x = left + key * cell + key // size * 6
                if key <= row:
                    svg.rect(x, y, cell - 2, cell - 2, fill=color, opacity=0.8, radius=2)
                elif key < stop:
                    svg.rect(x, y, cell - 2, cell - 2, fill=color, opacity=0.15, radius=2)
                else:
                    svg.rect(x, y, cell - 2, cell - 2, css="paper", radius=2)
            y += cell
        words = f"tile of {stop - start}: {reads[number]} block{'s' * (reads[number] > 1)} read"
        svg.text(
            left + n * cell + 36, y - (stop - start) * cell / 2 + 2, words, size=12, fill=color
        )
        y += 8
    svg.text(
        8, y + 16,
        f"strong: visible, {pairs} of {n * n} pairs; light: read by the tile, hidden from "
        "this row; grey: not read",
        size=12, css="soft",
    )  # fmt: skip
    return svg.render()


def ragged_batch() -> str:
    """One step of mini_vllm that holds a decode, a chunk and a whole prompt, with its metadata."""
    from mini_vllm import EngineParts, LLMEngine, SamplingParams
    from mini_vllm.attention import paged_attention

    batches = []

    def keep(query, layer_cache, batch, scale):  # type: ignore[no-untyped-def]
        if not batches or batches[-1] is not batch:
            batches.append(batch)
        return paged_attention(query, layer_cache, batch, scale)

    engine = LLMEngine(
        num_blocks=40,
        block_size=8,
        max_num_batched_tokens=24,
        dtype="float64",
        parts=EngineParts(attention=keep),
    )
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("A block table", params)
    engine.step()
    engine.add_request("Attention reads keys through it", params)
    engine.step()
    engine.add_request("Then the next", params)
    engine.step()
    batch = batches[-1]
    offsets, lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    query_lens = np.diff(offsets).tolist()
    described = "; ".join(
        f"request {r}: {query} new of {length} tokens, start_pos {length - query}"
        for r, (query, length) in enumerate(zip(query_lens, lens, strict=True))
    )
    svg = Svg(
        780,
        330,
        "One step, three kinds of request, one call",
        f"A step of mini_vllm with a budget of 24 tokens. query_start_loc {offsets}, seq_lens "
        f"{lens}. {described}.",
    )
    cell, left = 17.0, 130.0
    svg.text(16, 28, "one step of the mini engine: rows of Q, end to end", bold=True)
    colors = (BLUE, ORANGE, GREEN)
    for r, query in enumerate(query_lens):
        x = left + offsets[r] * cell
        svg.rect(x, 44, query * cell - 2, 26, fill=colors[r], opacity=0.8, radius=3)
        svg.text(x, 86, str(offsets[r]), size=11, css="soft")
    svg.text(left + offsets[-1] * cell, 86, str(offsets[-1]), size=11, css="soft")
    svg.text(16, 62, "Q", bold=True)
    svg.text(16, 86, "query_start_loc", size=11, css="soft")
    for r, (query, length) in enumerate(zip(query_lens, lens, strict=True)):
        y = 116.0 + r * 66
        start = length - query
        kind = "decode" if query == 1 else "chunk" if start else "whole prompt"
        svg.text(16, y + 18, f"request {r}", bold=True)
        svg.text(16, y + 34, kind, size=12, css="soft")
        for t in range(length):
            fill, shade = colors[r], 0.85 if t >= start else 0.2
            x = left + t * cell + t // 8 * 5
            svg.rect(x, y, cell - 2, 26, fill=fill, opacity=shade, radius=2, tip=f"position {t}")
        tables = batch.block_tables[r, : -(-length // 8)].tolist()
        words = f"seq_len {length}, query_len {query}, start_pos {start}, block table {tables}"
        svg.text(left, y + 42, words, size=12, css="soft")
    svg.text(
        16, 320, "light: already in the cache; strong: this step's tokens, written before they "
        "are attended", size=12, css="soft",
    )  # fmt: skip
    return svg.render()


# ------------------------------------------------------------------ lab 04-04


def splits_and_merge() -> str:
    """One walk over all keys beside four splits and their merge, with real partials."""
    lab = solution("lab-04-flash-decoding-partitions")
    rng = np.random.default_rng(3)
    q, keys, values = rng.standard_normal(8), rng.standard_normal((64, 8)), np.arange(64.0)[:, None]
    parts = [
        lab.attend_partial(2 * q, k, v)
        for k, v in zip(np.split(keys, 4), np.split(values, 4), strict=True)
    ]
    out, whole = (float(lab.merge_partials(some)[0]) for some in (
        parts, [lab.attend_partial(2 * q, keys, values)]
    ))  # fmt: skip
    svg = Svg(
        780,
        330,
        "One program walks all keys, or four share them",
        "Left: one program takes 64 keys in 8 turns. Right: four programs take 16 keys in 2 turns "
        "each and leave m, denom and acc; a merge gives the same output. "
        + "; ".join(f"m {p.m:.2f}, denom {p.denom:.2f}, acc {float(p.acc[0]):.1f}" for p in parts)
        + f". Both outputs are {out:.4f}.",
    )
    svg.text(16, 28, "one split", bold=True)
    svg.text(16, 48, "8 turns, one after the other", size=12, css="soft")
    for turn in range(8):
        y = 62.0 + turn * 26
        svg.rect(16, y, 150, 22, fill=BLUE, opacity=0.3 + 0.07 * turn, stroke=BLUE, radius=3)
        svg.text(91, y + 16, f"keys {turn * 8} to {turn * 8 + 7}", size=11, anchor="middle")
    svg.text(91, 302, f"output {whole:.4f}", anchor="middle", bold=True)
    svg.line(91, 272, 91, 286, width=2, arrow=True)
    colors = (BLUE, GREEN, ORANGE, PURPLE)
    svg.text(230, 28, "four splits", bold=True)
    svg.text(230, 48, "2 turns, at the same time, and a merge", size=12, css="soft")
    for split, (part, color) in enumerate(zip(parts, colors, strict=True)):
        x = 230 + split * 136
        for turn in range(2):
            y, first = 62.0 + turn * 26, split * 16 + turn * 8
            svg.rect(x, y, 124, 22, fill=color, opacity=0.35, stroke=color, radius=3)
            svg.text(x + 62, y + 16, f"keys {first} to {first + 7}", size=11, anchor="middle")
        svg.line(x + 62, 116, x + 62, 134, width=2, arrow=True)
        svg.rect(x, 138, 124, 70, fill=color, opacity=0.15, stroke=color, radius=6)
        for row, words in enumerate(
            (f"m {part.m:.2f}", f"denom {part.denom:.2f}", f"acc {float(part.acc[0]):.1f}")
        ):
            svg.text(x + 10, 158 + row * 20, words, size=12, css="ink mono")
        svg.line(x + 62, 210, 488 + (split - 1.5) * 50, 238, width=2, arrow=True)
    svg.box(338, 242, 300, 34, ["each times exp(m - largest m), summed"], fill=GREY, size=12)
    svg.line(488, 278, 488, 288, width=2, arrow=True)
    svg.text(488, 302, f"output {out:.4f}", anchor="middle", bold=True)
    return svg.render()


def predicted_latency() -> str:
    """The model of `run.py` over context: splits 1 and automatic, batch 1 and 64."""
    run = load_module(PHASE / "labs" / "lab-04-flash-decoding-partitions" / "run.py")
    arguments = run.parse([])
    svg = Svg(
        780,
        360,
        "Predicted latency of one layer's decode attention",
        "A model, not a measurement: 3.35 TB/s, 65 GB/s per program, 4 us per launch, 32 query and "
        "8 KV heads of 128, float16. Batch 1 with one split rises far above the automatic number "
        "of splits; at batch 64 the two agree.",
    )
    axes = Axes(svg, (80, 44, 560, 250), (900, 150_000), (7, 20_000), log_x=True, log_y=True)
    axes.frame(
        "context, tokens",
        "predicted, us: a model, not a measurement",
        {1024: "1k", 4096: "4k", 16384: "16k", 65536: "64k", 131072: "128k"},
        {10: "10", 100: "100", 1000: "1,000", 10_000: "10,000"},
    )
    lines = (
        (64, "auto", PURPLE, None, "batch 64, both", -2),
        (64, 1, ORANGE, "3 5", "", 0),
        (1, 1, RED, None, "batch 1, one split", 4),
        (1, "auto", BLUE, None, "batch 1, automatic", 4),
    )
    for batch, splits, color, dash, words, shift in lines:
        points = [
            (
                context,
                run.prediction(
                    batch,
                    context,
                    run.auto_splits(batch, 8, context, 132) if splits == "auto" else splits,
                    arguments,
                ),
            )
            for context in arguments.context
        ]
        axes.curve(points, color, dash=dash)
        axes.dots(points, color, radius=3)
        if words:
            axes.label(*points[-1], words, color, dx=12, dy=shift)
    return svg.render()


# ------------------------------------------------------------------ traffic


def measured(name: str) -> dict[str, Any]:
    """A file of `experiments/measured`."""
    text = (PHASE / "experiments" / "measured" / name).read_text(encoding="utf-8")
    return dict(json.loads(text))


def traffic_tiles() -> str:
    """Counted block reads over the rows of a query tile."""
    saved = measured("traffic.json")
    rows = saved["tiles"]
    n, size = saved["num_tokens"], saved["block_size"]
    least = -(-n // size)
    svg = Svg(
        780,
        330,
        "Block reads over the size of a query tile",
        f"Prefill of {n} tokens in blocks of {size}, counted. "
        + ", ".join(f"tile {row['tile']}: {row['block_reads']:,} reads" for row in rows)
        + f". Each block once would be {least}.",
    )
    axes = Axes(svg, (80, 44, 640, 220), (0.9, 300), (90, 250_000), log_x=True, log_y=True)
    axes.frame(
        "query rows per tile",
        f"block reads of K, prefill of {n:,} tokens, blocks of {size}",
        {row["tile"]: str(row["tile"]) for row in rows},
        {100: "100", 1000: "1,000", 10_000: "10,000", 100_000: "100,000"},
    )
    axes.curve([(0.9, least), (300, least)], GREY, dash="5 4")
    axes.label(1, least, f"each block once: {least}", dy=-7)
    points = [(row["tile"], row["block_reads"]) for row in rows]
    axes.curve(points, BLUE)
    axes.dots(points, BLUE)
    for x, y in points:
        axes.label(x, y, f"{y:,}", dx=8, dy=-6)
    return svg.render()


# ------------------------------------------------------------------ precision


def _error_axes(
    svg: Svg, rows: list[dict[str, Any]], key: str, label: str, ticks: dict[float, str]
) -> Axes:
    values = [row[key] for row in rows]
    box = (80, 44, 560, 250)
    axes = Axes(svg, box, (min(values) * 0.9, max(values) * 1.1), (3e-8, 1), log_x=True, log_y=True)
    exponents = {10.0**-n: "1" if n == 0 else f"1e-{n}" for n in range(8)}
    axes.frame(label, "relative error of the output, against float64", ticks, exponents)
    ends = (("bf16", RED, "bf16 sums"), ("fp16", ORANGE, "fp16 sums"), ("fp32", BLUE, "fp32 sums"))
    for name, color, words in ends:
        points = [(row[key], row[name]) for row in rows]
        axes.curve(points, color)
        axes.dots(points, color, radius=3)
        axes.label(*points[-1], words, color, dx=12)
    return axes


def precision_context() -> str:
    """Error over context for three types of running sums."""
    rows = measured("precision.json")["by_context"]
    svg = Svg(
        780,
        350,
        "The error of attention over context, by the type of its running sums",
        "One split. "
        + "; ".join(
            f"context {row['context']:,}: fp16 {row['fp16']:.1e}, bf16 {row['bf16']:.1e}, "
            f"fp32 {row['fp32']:.1e}"
            for row in rows
        )
        + ".",
    )
    ticks = {float(row["context"]): f"{row['context']:,}" for row in rows}
    _error_axes(svg, rows, "context", "context, tokens", ticks)
    return svg.render()


def precision_splits() -> str:
    """Error over the number of splits at one context."""
    saved = measured("precision.json")
    rows = saved["by_splits"]
    svg = Svg(
        780,
        350,
        "The error of attention over the number of splits",
        f"Context {rows[0]['context']:,}. "
        + "; ".join(
            f"{row['splits']} splits: fp16 {row['fp16']:.1e}, bf16 {row['bf16']:.1e}, fp32 "
            f"{row['fp32']:.1e}"
            for row in rows
        )
        + ".",
    )
    ticks = {float(row["splits"]): str(row["splits"]) for row in rows}
    label = f"splits, context {rows[0]['context']:,}"
    _error_axes(svg, rows, "splits", label, ticks)
    return svg.render()


# ------------------------------------------------------------------ MLA


def mla_bytes() -> str:
    """Bytes of cache per token for three ways to keep K and V."""
    saved = measured("mla.json")
    sizes = {
        name: values * saved["layers"] * 2 / 1024
        for name, values in saved["values_per_token_and_layer"].items()
    }
    svg = Svg(
        780,
        190,
        "Cache per token, DeepSeek-V3's shape",
        f"{saved['layers']} layers, 2 bytes a value. "
        + "; ".join(f"{name}: {size:,.1f} KiB" for name, size in sizes.items())
        + ".",
    )
    svg.text(
        16, 28, f"KiB of cache per token, {saved['layers']} layers, 2 bytes a value", bold=True
    )
    largest = max(sizes.values())
    for row, ((name, size), color) in enumerate(
        zip(sizes.items(), (RED, ORANGE, BLUE), strict=True)
    ):
        y = 50.0 + row * 44
        svg.text(16, y + 20, name, size=12)
        width = max(size / largest * 440, 2)
        svg.rect(200, y, width, 28, fill=color, opacity=0.8, radius=3)
        svg.text(208 + width, y + 19, f"{size:,.1f}", size=13, bold=True)
    return svg.render()


def mla_crossover() -> str:
    """FLOP of both forms over the number of new tokens."""
    saved = measured("mla.json")
    pairs = {
        "expanded": list(zip(saved["queries"], saved["flops_mha"], strict=True)),
        "in the latent": list(zip(saved["queries"], saved["flops_mqa"], strict=True)),
    }
    wins = saved["crossover"][str(saved["keys"])]
    svg = Svg(
        780,
        350,
        "Two forms of MLA: FLOP of one layer over the number of new tokens",
        f"Over {saved['keys']:,} cached tokens, all pairs counted. The latent form starts at "
        f"{saved['flops_mqa'][0] / 1e9:.1f} GFLOP for one token and grows in proportion; the "
        f"expanded form starts at {saved['flops_mha'][0] / 1e9:.0f} and wins from {wins} tokens "
        "on.",
    )
    axes = Axes(svg, (80, 44, 560, 250), (0.9, 4600), (1e9, 2e13), log_x=True, log_y=True)
    axes.frame(
        f"new tokens, over {saved['keys']:,} cached ones",
        "FLOP of one layer, 128 heads",
        {1: "1", 16: "16", 128: "128", 1024: "1,024", 4096: "4,096"},
        {1e9: "1e9", 1e10: "1e10", 1e11: "1e11", 1e12: "1e12", 1e13: "1e13"},
    )
    for (name, points), color, shift in zip(pairs.items(), (ORANGE, BLUE), (4, -4), strict=True):
        axes.curve(points, color)
        axes.dots(points, color, radius=3)
        axes.label(*points[-1], name, color, dx=12, dy=shift)
    axes.rule(x=wins)
    axes.label(wins, 2e9, f"expanded wins from {wins} on", dx=8)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-two-blocks.svg": two_blocks,
    "lab-01-weights.svg": weights_without_corr,
    "lab-03-tiles.svg": tiles_and_blocks,
    "lab-03-ragged.svg": ragged_batch,
    "lab-04-splits.svg": splits_and_merge,
    "lab-04-predicted.svg": predicted_latency,
    "traffic-tiles.svg": traffic_tiles,
    "precision-context.svg": precision_context,
    "precision-splits.svg": precision_splits,
    "mla-bytes.svg": mla_bytes,
    "mla-crossover.svg": mla_crossover,
}
