"""The figures of phase 14; `course figures` draws them.

`hits`, `tables`, `held` and `states` show runs of `mini_vllm` on the shipped hybrids; `rounds`,
`layers` and `rows` are what the engine's own functions say. No upstream counterpart.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from conformance.features.hybrid.kv_sizing import MODELS
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm import LLM, SamplingParams
from mini_vllm.kv.coordinator import HybridKVCacheManager
from mini_vllm.kv.groups import full_hit, window_hit
from mini_vllm.kv.sizing import cache_size
from mini_vllm.kv_cache_interface import KVCacheSpec
from mini_vllm.models.mapping import Stacked, places_of
from mini_vllm.request import Request

SHARED = "You are an assistant of a team that runs vLLM. " * 9
COLORS = (BLUE, ORANGE, GREEN)
LAB_05 = Path(__file__).parents[1] / "labs" / "lab-05-where-to-checkpoint"


# ------------------------------------------------------------------ from runs


@functools.cache
def _tables(model: str, length: int, budget: int, steps: int) -> list[list[list[int]]]:
    """Of each of the first steps: the tables of the groups."""
    engine = LLM(model, block_size=16, num_blocks=64, max_num_batched_tokens=budget).llm_engine
    kv, seen = engine.scheduler.kv, []
    engine.observers.append(lambda _: seen.append([kv.get_block_ids("a", g) for g in range(3)]))
    params = SamplingParams(max_tokens=steps, ignore_eos=True)
    engine.add_request(SHARED[:length], params, request_id="a")
    while engine.has_unfinished_requests() and len(seen) < steps:
        engine.step()
    return seen


def _draw_tables(
    svg: Svg, seen: Sequence[Sequence[Sequence[int]]], names: Sequence[str], width: float
) -> None:
    for step, tables in enumerate(seen):
        y = 22 + step * 122
        svg.text(16, y, f"step {step + 1}", size=13, bold=True)
        for group, table in enumerate(tables):
            top = y + 8 + group * 32
            svg.text(16, top + 18, names[group], size=12, css="soft")
            for place, block in enumerate(table):
                color, opacity = (GREY, 0.12) if block == 0 else (COLORS[group], 0.45)
                svg.cell(180 + place * width, top, width - 4, str(block), color, opacity=opacity)


def tables() -> str:
    """Three tables of one request of byte-window, as it enters in chunks of 64."""
    seen = _tables("byte-window", 134, 64, 3)
    svg = Svg(
        780, 378, "A table per group, and null blocks",
        f"In step 3 the first window group's table is {seen[2][0]}, the full group's {seen[2][2]}.",
    )  # fmt: skip
    _draw_tables(svg, seen, ("0: window of 64", "1: window of 64", "2: sees all"), 62)
    return svg.render()


def states() -> str:
    """Three tables of one request of byte-state, as it enters in chunks of 96."""
    seen = _tables("byte-state", 200, 96, 3)
    svg = Svg(
        780, 378, "Where states stand",
        f"After three chunks the tables of the states are {seen[2][0]} and {seen[2][1]}, that of "
        f"attention is {seen[2][2]}.",
    )  # fmt: skip
    _draw_tables(svg, seen, ("0: states", "1: states", "2: attention"), 120)
    return svg.render()


@functools.cache
def _growth() -> list[list[tuple[int, int]]]:
    """Of each group of byte-window: tokens, and blocks that one request holds then."""
    engine = LLM("byte-window", block_size=16, num_blocks=200, max_num_batched_tokens=16).llm_engine
    kv = engine.scheduler.kv
    points: list[list[tuple[int, int]]] = [[], [], []]

    def note(plan: object) -> None:
        length = engine.requests["a"].num_computed_tokens
        for group in range(3):
            held = sum(block != 0 for block in kv.get_block_ids("a", group))
            points[group].append((length, held))

    engine.observers.append(note)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.add_request(SHARED[:400], params, request_id="a")
    while engine.has_unfinished_requests():
        engine.step()
    return points


def held() -> str:
    """Blocks of one request over its length."""
    points = _growth()
    svg = Svg(
        780, 300, "Blocks held over tokens",
        f"The full group holds {points[2][-1][1]} blocks at {points[2][-1][0]} tokens, each window "
        f"group {points[0][-1][1]}.",
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 520, 216), (0, 400), (0, 28))
    axes.frame("tokens", "blocks held", range(0, 401, 64), range(0, 29, 4))
    axes.curve(points[2], GREEN, width=2.5)
    axes.curve(points[0], BLUE, width=2.5)
    axes.label(points[2][-1][0], points[2][-1][1], "sees all", fill=GREEN)
    axes.label(points[0][-1][0], points[0][-1][1], "window of 64, each", fill=BLUE)
    return svg.render()


@functools.cache
def _found(model: str) -> list[tuple[int, int]]:
    llm = LLM(model, block_size=16, num_blocks=64)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    llm.generate(SHARED[:257], params)
    points = []
    for length in range(0, 257, 8):
        asked = Request("b", list((SHARED[:length] + "!Who?").encode()), params)
        points.append((length, llm.llm_engine.scheduler.kv.get_computed_blocks(asked)[1]))
    return points


def hits() -> str:
    """Tokens found over tokens shared."""
    window, state = _found("byte-window"), _found("byte-state")
    svg = Svg(
        780, 310, "What a shared prefix is worth",
        "byte-window finds steps of 16 tokens, byte-state steps of 64: of 56 shared tokens "
        f"{dict(window)[56]} and {dict(state)[56]}.",
    )  # fmt: skip
    axes = Axes(svg, (60, 30, 520, 222), (0, 256), (0, 256))
    axes.frame(
        "tokens that two prompts share", "tokens found", range(0, 257, 64), range(0, 257, 64)
    )
    axes.curve(window, BLUE, width=2.5)
    axes.curve(state, ORANGE, width=2.5)
    axes.dots(state, ORANGE)
    axes.label(256, 256, "byte-window", fill=BLUE)
    axes.label(250, 192, "byte-state", fill=ORANGE)
    return svg.render()


# ------------------------------------------------------------------ what the engine says


def rounds() -> str:
    """Cached blocks of three groups, and how the length falls."""
    specs = [KVCacheSpec((0,), 1, 2), KVCacheSpec((1,), 1, 2, 9), KVCacheSpec((2,), 1, 2, 17)]
    kv = HybridKVCacheManager(99, 4, kv_specs=specs)
    first = Request("first", list(range(40)), SamplingParams())
    kv.allocate_slots(first, 40)
    gone = {(1, 8), (1, 4), (2, 5)}
    for group, place in gone:
        kv.block_pool.evict(kv.groups[group].tables["first"][place])
    length, told = 40, []
    while True:
        now, came = length, []
        for look_up, of in zip((full_hit, window_hit, window_hit), kv.groups, strict=True):
            [table] = look_up([of], first.block_hashes, False, 4, now)
            now = 4 * len(table)
            came.append(now)
        told.append(came)
        if now == length:
            break
        length = now
    svg = Svg(
        780, 250, "Asked again until none shortens it",
        f"Ten blocks of four tokens in three groups; the rounds leave {told}.",
    )  # fmt: skip
    for group, name in enumerate(("full", "window 9", "window 17")):
        y = 40 + group * 58
        svg.text(16, y + 20, name, size=13)
        for place in range(10):
            missing = (group, place) in gone
            kept = (place + 1) * 4 <= length
            color = RED if missing else COLORS[group] if kept else GREY
            svg.cell(
                110 + place * 44, y, 40, "gone" if missing else str(place), color,
                opacity=0.25 if missing else 0.5 if kept else 0.15,
            )  # fmt: skip
        for index, came in enumerate(told):
            svg.text(600 + index * 62, y + 20, str(came[group]), anchor="middle", size=15,
                     bold=index == len(told) - 1)  # fmt: skip
    for index in range(len(told)):
        svg.text(600 + index * 62, 26, f"round {index + 1}", anchor="middle", size=12, css="soft")
    svg.text(110, 26, "cached blocks", size=12, css="soft")
    svg.text(16, 236, f"The hit has {length} tokens.", size=13)
    return svg.render()


def layers() -> str:
    """The layers of Gemma 3 27B in their groups."""
    config = MODELS["gemma-3-27b"][0]
    size = cache_size(config, 40 * 2**30, max_model_len=32_768)
    svg = Svg(
        780, 290, "62 layers in seven groups",
        "; ".join(f"{len(members)} {spec.kind}" for spec, members in size.groups)
        + f"; {size.num_padding_layers} places are empty.",
    )  # fmt: skip
    for row, (spec, members) in enumerate(size.groups):
        y = 24 + row * 36
        svg.text(16, y + 18, f"{spec.kind.replace('_', ' ')}", size=12)
        for place in range(size.layers_per_group):
            has = place < len(members)
            color = GREY if not has else GREEN if spec.kind == "full" else BLUE
            svg.cell(
                140 + place * 62, y, 56, str(members[place]) if has else "", color,
                opacity=0.45 if has else 0.08,
            )  # fmt: skip
    svg.text(16, 284, "A column is one piece of memory: its layers take turns.", size=12,
             css="soft")  # fmt: skip
    return svg.render()


def rows() -> str:
    """q, k and v of Llama-3-8B in one matrix, and what two ranks hold of it."""
    parts = (("q", 4096), ("k", 1024), ("v", 1024))
    rule = Stacked("qkv_proj", tuple((f"{name}_proj", size) for name, size in parts))
    places = {name: places_of(f"{name}_proj.weight", [rule])[0].rows for name, _ in parts}
    svg = Svg(
        780, 210, "Three tensors in one parameter",
        "; ".join(f"{name} rows {r.start} to {r.stop}" for name, r in places.items() if r),
    )  # fmt: skip
    scale = 560 / 6144
    colors = {"q": BLUE, "k": ORANGE, "v": PURPLE}
    svg.text(16, 52, "qkv_proj", size=13, bold=True)
    for name, where in places.items():
        assert where is not None
        x, width = 150 + where.start * scale, (where.stop - where.start) * scale
        svg.rect(x, 30, width - 2, 36, fill=colors[name], opacity=0.5)
        svg.text(x + width / 2, 53, f"{name} {where.start}:{where.stop}", anchor="middle", size=11)
    for rank in range(2):
        y, x = 96 + rank * 52, 150.0
        svg.text(16, y + 22, f"rank {rank} of 2", size=13)
        for name, where in places.items():
            assert where is not None
            half = (where.stop - where.start) // 2
            start = where.start + rank * half
            svg.rect(x, y, half * scale - 2, 36, fill=colors[name], opacity=0.35)
            middle = x + half * scale / 2
            svg.text(middle, y + 22, f"{start}" if name != "q" else f"q {start}:{start + half}",
                     anchor="middle", size=11)  # fmt: skip
            x += half * scale
        svg.text(x + 10, y + 22, "3,072 rows", size=12, css="soft")
    return svg.render()


def checkpoints() -> str:
    """What each mode finds of the traces of lab 14-05, from its recordings."""
    with gzip.open(LAB_05 / "recordings" / "hits.jsonl.gz", "rt") as file:
        cases = [json.loads(line) for line in file]
    kinds, names = ("documents", "chat", "mixed"), ("none", "all", "align", "0.33.0")
    shares = {
        (kind, name): sum(sum(c["modes"][name]["hits"]) for c in cases if c["kind"] == kind)
        / sum(c["most"] for c in cases if c["kind"] == kind)
        for kind in kinds
        for name in names
    }
    said = [
        f"{kind}: " + ", ".join(f"{name} {shares[kind, name]:.0%}" for name in names)
        for kind in kinds
    ]
    svg = Svg(780, 330, "What of a trace is found, by mode", ". ".join(said) + ".")
    for row, kind in enumerate(kinds):
        top = 14 + row * 106
        svg.text(16, top + 14, kind, size=13, bold=True)
        for place, name in enumerate(names):
            y, share = top + place * 23, shares[kind, name]
            svg.text(190, y + 15, name, anchor="end", size=12, css="soft")
            svg.rect(
                200, y + 2, max(1, 480 * share), 17, fill=(*COLORS, PURPLE)[place], opacity=0.5
            )
            svg.text(208 + 480 * share, y + 15, f"{share:.0%}", size=12)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "hits.svg": hits,
    "layers.svg": layers,
    "tables.svg": tables,
    "held.svg": held,
    "rounds.svg": rounds,
    "states.svg": states,
    "rows.svg": rows,
    "checkpoints.svg": checkpoints,
}
