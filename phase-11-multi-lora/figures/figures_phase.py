"""The figures of phase 11; `course figures` draws them.

`waits` and `blocks` show traces of `mini_vllm` on the shipped model and its adapters, run here in
float64; `order` is what the engine's own sort says; the rest is arithmetic. No upstream
counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.lora.layers import BASE, sort_by_slot
from mini_vllm.lora.request import LoRARequest

ROOT = Path(__file__).resolve().parents[2]
SHOUT, QUOTE, CODE = (
    LoRARequest(name, number, str(ROOT / "models" / "adapters" / name))
    for number, name in enumerate(("shout", "quote", "code"), start=1)
)
COLORS = {"shout": ORANGE, "quote": GREEN, "code": PURPLE, "base": GREY}
DAY: dict[int, list[tuple[str, LoRARequest | None, int]]] = {
    1: [("a", SHOUT, 7), ("b", QUOTE, 3), ("c", CODE, 4), ("d", None, 5), ("e", SHOUT, 2)],
    3: [("f", QUOTE, 3)],
}
"""By the step before which they come: name, adapter, tokens."""
LONG = "The scheduler plans a step. It gives each request some tokens, and no more than fit. Then"
LLAMA_3_8B = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
LLAMA_3_8B += [(4096, 14336), (4096, 14336), (14336, 4096)]
BASE_BYTES = 8_030_261_248 * 2


def name_of(adapter: LoRARequest | None) -> str:
    """As the figures label it."""
    return adapter.lora_name if adapter else "base"


# ------------------------------------------------------------------ from traces


@functools.cache
def day() -> list[tuple[list[str], list[str], dict[int, int]]]:
    """Of each step: who runs, who was passed over, slot of each resident adapter; two slots."""
    engine = LLMEngine(dtype="float64", enable_lora=True, max_loras=2)
    steps: list[tuple[list[str], list[str], dict[int, int]]] = []
    ran: list[list[str]] = []
    engine.observers.append(lambda p: ran.append([r.request_id for r in p.scheduled_requests]))
    while len(steps) < max(DAY) or engine.has_unfinished_requests():
        for name, adapter, tokens in DAY.get(len(steps) + 1, ()):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            prompt = "Return the number of tokens in the block."
            engine.add_request(prompt, params, request_id=name, lora_request=adapter)
        engine.step()
        cache = engine.feature("lora").slots  # type: ignore[union-attr]
        slots = {adapter: cache.slot_of(adapter) for adapter in cache.resident()}
        steps.append((ran[-1], [r.request_id for r in engine.scheduler.skipped], slots))
    return steps


def waits() -> str:
    """Who runs and who is passed over, step by step."""
    steps = day()
    asked = [each for arrivals in DAY.values() for each in arrivals]
    first = next(i for i, (runs, _, _) in enumerate(steps, 1) if "c" in runs)
    svg = Svg(
        780, 336, "Two slots, three adapters: who waits",
        f"Six requests over {len(steps)} steps. a and e are under shout, b and f under quote, d "
        f"has no adapter. c, under code, is passed over until step {first}, although f came later.",
    )  # fmt: skip
    width = 600 / len(steps)
    for step in range(len(steps)):
        svg.text(160 + (step + 0.5) * width, 26, str(step + 1), anchor="middle", size=13)
    svg.text(16, 26, "step", size=12, css="soft")
    for row, (name, adapter, _) in enumerate(asked):
        y, kind = 38 + row * 34, name_of(adapter)
        svg.text(16, y + 18, f"{name}: {kind}", size=14, bold=True)
        for step, (runs, passed, _) in enumerate(steps):
            x = 160 + step * width
            if name in runs:
                svg.cell(x, y, width - 4, "runs", COLORS[kind])
            elif name in passed:
                svg.cell(x, y, width - 4, "waits", RED, opacity=0.2)
    svg.text(16, 266, "slots", size=12, css="soft")
    kinds = {name: name_of(adapter) for name, adapter, _ in asked}
    for step, (runs, _, slots) in enumerate(steps):
        used = {kinds[r] for r in runs} - {"base"}
        assert len(used) <= 2
        for number, slot in slots.items():
            kind = name_of((SHOUT, QUOTE, CODE)[number - 1])
            opacity = 0.45 if kind in used else 0.15
            svg.cell(160 + step * width, 250 + slot * 30, width - 4, kind, COLORS[kind], opacity)
    svg.text(16, 328, "Pale: resident, and used by nobody in this step.", size=12, css="soft")
    return svg.render()


@functools.cache
def shared() -> list[tuple[str, list[int], int]]:
    """Of the same prompt asked five times: adapter, block ids of the prompt, cached tokens."""
    engine = LLMEngine(dtype="float64", block_size=8, enable_lora=True, max_loras=3)
    found: list[tuple[str, list[int], int]] = []
    for adapter in (SHOUT, QUOTE, None, SHOUT, QUOTE):
        name = engine.add_request(LONG, SamplingParams(max_tokens=4), lora_request=adapter)
        request = engine.requests[name]
        engine.step()
        blocks = list(engine.scheduler.kv.get_block_ids(name))[: len(LONG) // 8]
        found.append((name_of(adapter), blocks, request.num_cached_tokens or 0))
        while engine.has_unfinished_requests():
            engine.step()
    return found


def blocks() -> str:
    """Block ids of one prompt under adapters."""
    rows = shared()
    svg = Svg(
        780, 262, "One prompt, five requests: which blocks are shared",
        "Under shout, quote and no adapter the same prompt has blocks of its own. Asked again "
        "under shout and quote it adopts the blocks of the first and the second request.",
    )  # fmt: skip
    svg.text(
        160, 24, f"ids of the {len(rows[0][1])} full blocks of the prompt", size=12, css="soft"
    )
    svg.text(680, 24, "cached tokens", size=12, css="soft")
    for row, (kind, ids, cached) in enumerate(rows):
        y = 36 + row * 40
        svg.text(16, y + 18, f"{row + 1}: {kind}", size=14, bold=True)
        for place, block in enumerate(ids):
            opacity = 0.2 if cached else 0.5
            svg.cell(160 + place * 46, y, 42, str(block), COLORS[kind], opacity=opacity)
        svg.text(680, y + 18, f"{cached} of {len(LONG)}", size=13)
    svg.text(16, 252, "full colour: computed; pale: adopted", size=12, css="soft")
    return svg.render()


# ------------------------------------------------------------------ drawn


def batch() -> str:
    """Rows of one batch through the base once and through their own patch."""
    svg = Svg(
        780, 316, "One batch, one reading of the base",
        "Seven rows: three for shout, two for quote, two without adapter. All pass the base "
        "weights in one product; each group passes its own shrink and expand.",
    )  # fmt: skip
    rows = ["shout", "base", "quote", "shout", "quote", "base", "shout"]
    svg.text(16, 26, "rows of the step", size=12, css="soft")
    for place, kind in enumerate(rows):
        svg.cell(16, 36 + place * 36, 90, kind, COLORS[kind])
    svg.rect(210, 36, 150, 110, fill=BLUE, opacity=0.35, radius=6)
    svg.text(285, 84, "W, once", anchor="middle", size=15, bold=True)
    svg.text(285, 106, "all 7 rows", anchor="middle", size=13)
    svg.line(114, 91, 204, 91, arrow=True)
    for kind, count, y in (("shout", 3, 180), ("quote", 2, 242)):
        svg.line(114, y + 20, 204, y + 20, arrow=True)
        svg.rect(210, y, 44, 40, fill=COLORS[kind], opacity=0.45, radius=4)
        svg.text(232, y + 25, "A", anchor="middle", size=14)
        svg.rect(316, y, 44, 40, fill=COLORS[kind], opacity=0.45, radius=4)
        svg.text(338, y + 25, "B", anchor="middle", size=14)
        svg.line(256, y + 20, 312, y + 20, arrow=True)
        svg.text(285, y + 12, "r", anchor="middle", size=12)
        svg.text(285, y + 54, f"its {count} rows", anchor="middle", size=12, css="soft")
        svg.line(366, y + 22, 560, 150 if kind == "shout" else 176, arrow=True)
    svg.line(366, 91, 560, 130, arrow=True)
    svg.rect(564, 132, 40, 40, fill=BLUE, opacity=0.25, radius=20)
    svg.text(584, 158, "+", anchor="middle", size=18, bold=True)
    svg.line(608, 152, 660, 152, arrow=True)
    svg.text(668, 157, "y, in order", size=13)
    return svg.render()


def shapes() -> str:
    """Shrink and expand beside a square matrix."""
    hidden, rank = 4096, 16
    svg = Svg(
        780, 270, "x through W, and through A and B beside it",
        f"W has {hidden} times {hidden} = {hidden * hidden:,} parameters; A and B of rank {rank} "
        f"together {2 * hidden * rank:,}.",
    )  # fmt: skip
    svg.rect(20, 60, 16, 150, fill=GREY, opacity=0.5, radius=3)
    svg.text(16, 48, f"x: {hidden:,}", size=13)
    svg.line(44, 100, 176, 100, arrow=True)
    svg.rect(184, 24, 150, 150, fill=BLUE, opacity=0.35, radius=4)
    svg.text(259, 96, f"W  {hidden:,} x {hidden:,}", anchor="middle", size=13)
    svg.text(259, 118, f"{hidden * hidden:,}", anchor="middle", size=13)
    svg.line(44, 222, 176, 222, arrow=True)
    svg.rect(184, 217, 150, 10, fill=ORANGE, opacity=0.7)
    svg.text(259, 250, f"A  {rank} x {hidden:,}: shrink", anchor="middle", size=13)
    svg.line(340, 222, 416, 222, arrow=True)
    svg.text(378, 212, f"{rank} numbers", anchor="middle", size=12)
    svg.rect(424, 130, 10, 120, fill=ORANGE, opacity=0.7)
    svg.text(444, 246, f"B  {hidden:,} x {rank}: expand, and times s", size=13)
    svg.line(340, 100, 590, 100, arrow=True)
    svg.line(440, 190, 590, 130, arrow=True)
    svg.rect(598, 94, 36, 36, fill=GREY, opacity=0.3, radius=18)
    svg.text(616, 118, "+", anchor="middle", size=18, bold=True)
    svg.line(640, 112, 690, 112, arrow=True)
    svg.text(696, 117, "y", size=14)
    svg.text(520, 190, f"A and B: {2 * hidden * rank:,}", size=13, fill=ORANGE, bold=True)
    return svg.render()


def traffic() -> str:
    """What a decode step reads, over the adapters in it."""
    svg = Svg(
        780, 340, "Bytes of a decode step over its adapters, Llama 3 8B in bf16",
        "In parts of the base weights. Rank 8 and 16 stay below 1.2 at 32 adapters; rank 64 "
        "reaches 1.67.",
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 600, 250), (0, 32), (1, 1.8))
    axes.frame(
        "distinct adapters in the step, all linears adapted", "bytes / base bytes",
        range(0, 33, 4), {1 + i / 5: f"{1 + i / 5:.1f}" for i in range(5)},
    )  # fmt: skip
    for rank, color in ((8, GREEN), (16, BLUE), (64, ORANGE)):
        size = 32 * sum(rank * (i + o) for i, o in LLAMA_3_8B) * 2
        points = [(n, 1 + n * size / BASE_BYTES) for n in range(33)]
        axes.curve(points, color, width=2.5)
        axes.label(32, points[-1][1], f"rank {rank}: {points[-1][1]:.2f}", fill=color)
    return svg.render()


def order() -> str:
    """The deep dive's worked example, as the engine sorts it."""
    slots = np.array([0, 0, BASE, 1, 1, 0])
    sequence, kinds, counts, starts = sort_by_slot(slots)
    colors = {BASE: GREY, 0: ORANGE, 1: GREEN}
    svg = Svg(
        780, 250, "Tokens sorted by slot",
        f"Slots {slots.tolist()} give the order {sequence.tolist()}, groups {kinds.tolist()} of "
        f"{counts.tolist()} tokens that begin at {starts.tolist()[:-1]}.",
    )  # fmt: skip
    svg.text(16, 52, "batch order", size=12, css="soft")
    svg.text(16, 172, "sorted", size=12, css="soft")
    place_of = {int(token): place for place, token in enumerate(sequence)}
    for token, slot in enumerate(slots.tolist()):
        svg.cell(140 + token * 100, 34, 84, f"{token}: slot {slot}", colors[slot])
        svg.cell(140 + place_of[token] * 100, 154, 84, str(token), colors[slot])
        svg.line(182 + token * 100, 64, 182 + place_of[token] * 100, 150, arrow=True)
    for kind, count, start in zip(
        kinds.tolist(), counts.tolist(), starts.tolist()[:-1], strict=True
    ):
        x = 140 + start * 100
        svg.line(x, 192, x + count * 100 - 16, 192, stroke=colors[kind], width=4)
        words = "left out" if kind == BASE else f"slot {kind}: {count} tokens"
        svg.text(x, 214, words, size=13)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "batch.svg": batch,
    "shapes.svg": shapes,
    "waits.svg": waits,
    "blocks.svg": blocks,
    "traffic.svg": traffic,
    "order.svg": order,
}
