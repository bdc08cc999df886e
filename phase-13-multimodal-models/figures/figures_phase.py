"""The figures of phase 13's chapters; `course figures 13` draws them.

All of them show runs of `mini_vllm` on the shipped byte-sees. No upstream counterpart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from labkit.pictures import single_question
from mini_vllm import LLM, SamplingParams
from mini_vllm.multimodal.inputs import mm_features

COLORS = (BLUE, ORANGE, PURPLE, GREEN)
ONE = SamplingParams(max_tokens=1)


@functools.cache
def pictures() -> tuple[np.ndarray, ...]:
    """Four drawn pictures, the same each time."""
    rng = np.random.default_rng(13)
    return tuple(single_question(rng, "what").pictures[0] for _ in range(4))


def prompt(text: str, *shown: int) -> dict[str, Any]:
    """A prompt with pictures by number."""
    return {"prompt": text, "multi_modal_data": {"image": [pictures()[i] for i in shown]}}


@functools.cache
def _chunks(budget: int) -> list[tuple[int, int, list[int]]]:
    """First token, number of tokens and pictures encoded of each step of one prompt."""
    llm = LLM(
        "byte-sees", max_num_batched_tokens=budget, max_num_encoder_input_tokens=64,
        encoder_cache_size=128, num_blocks=64,
    )  # fmt: skip
    engine, seen = llm.llm_engine, []

    def note(plan: Any) -> None:
        for name, count in plan.num_scheduled_tokens.items():
            ran = plan.features["multimodal"][0].get(name, [])
            seen.append((plan.num_computed_tokens[name], count, list(ran)))

    engine.observers.append(note)
    engine.generate([prompt("look: <image> and <image>\n", 0, 1)], ONE)
    return seen


def steps() -> str:
    """A prompt with two pictures as it is computed in chunks, from a run of the engine."""
    seen = _chunks(48)
    total = seen[-1][0] + seen[-1][1]
    svg = Svg(
        780, 60 + 40 * len(seen) + 30, "A prompt with two pictures, step by step",
        f"{total} tokens in {len(seen)} steps of at most 48; the encoder runs in the steps that "
        "first reach a picture.",
    )  # fmt: skip
    scale, left = 560 / total, 100
    places = [(6, 64), (75, 64)]
    for number, (offset, length) in enumerate(places):
        svg.rect(left + offset * scale, 8, length * scale, 26, fill=COLORS[number], opacity=0.35)
        middle = left + (offset + length / 2) * scale
        svg.text(middle, 26, f"picture {number}: 64", anchor="middle")
    svg.rect(left, 8, total * scale, 26, stroke=GREY)
    svg.text(16, 26, f"{total} tokens", css="soft", size=12)
    for row, (start, count, ran) in enumerate(seen):
        y = 48 + row * 40
        svg.text(16, y + 18, f"step {row + 1}", size=12, css="soft")
        svg.rect(left + start * scale + 1, y, count * scale - 2, 26, fill=GREEN, opacity=0.35)
        svg.text(left + (start + count / 2) * scale, y + 18, str(count), anchor="middle")
        for number in ran:
            svg.text(676, y + 18, f"encodes {number}", size=12, fill=COLORS[number], bold=True)
    y = 48 + len(seen) * 40 + 12
    svg.text(
        16, y, "48 tokens and 64 embeddings a step; byte-sees, mini engine.", size=12, css="soft"
    )
    return svg.render()


@functools.cache
def _cache() -> list[tuple[str, list[tuple[str, int, bool]], list[str]]]:
    """Of each step: what ran, what is cached (name, size, referenced), what was evicted."""
    llm = LLM(
        "byte-sees", max_num_batched_tokens=64, max_num_encoder_input_tokens=64, max_num_seqs=1,
        encoder_cache_size=128, num_blocks=64, enable_prefix_caching=False,
    )  # fmt: skip
    engine, names = llm.llm_engine, {}
    gate = engine.feature("multimodal").gate
    seen = []

    def note(plan: Any) -> None:
        ran, freed = plan.features["multimodal"]
        for request in plan.scheduled_requests:
            for feature in mm_features(request):
                names.setdefault(feature.identifier, f"p{len(names)}")
        there = [(names[key], 64, bool(holders)) for key, holders in gate.cache.cached.items()]
        what = ", ".join(f"{name} {list(which)}" for name, which in ran.items())
        seen.append((what, there, [names[key] for key in freed]))

    engine.observers.append(note)
    for name, shown in (("a", (0,)), ("b", (1,)), ("c", (0, 2)), ("d", (1,))):
        text = "<image>" * len(shown) + "?\n"
        engine.add_request(prompt(text, *shown), ONE, request_id=name)
    while engine.has_unfinished_requests():
        engine.step()
    return seen


def cache() -> str:
    """An encoder cache with room for two pictures, over four requests one after another."""
    seen = _cache()
    svg = Svg(
        780, 220, "An encoder cache with room for two pictures",
        "Requests a, b, c and d bring pictures p0, p1, p0 and p2, p1. p0 is found again, p1 is "
        "evicted for p2 and encoded again for d.",
    )  # fmt: skip
    width = 730 / len(seen)
    for step, (what, there, freed) in enumerate(seen):
        x = 24 + step * width
        svg.text(x, 20, f"step {step + 1}", size=12, css="soft")
        for row, (name, _, referenced) in enumerate(there):
            number = int(name[1:])
            svg.rect(
                x, 34 + row * 46, width - 10, 38, fill=COLORS[number],
                opacity=0.55 if referenced else 0.15, stroke=COLORS[number], radius=4,
            )  # fmt: skip
            svg.text(x + (width - 10) / 2, 58 + row * 46, name, anchor="middle")
        if what:
            svg.text(x, 144, f"runs {what}", size=11, fill=GREEN, bold=True)
        for row, name in enumerate(freed):
            svg.text(x, 162 + row * 16, f"evicts {name}", size=11, fill=RED)
    svg.text(
        24, 206, "Filled: somebody references it. Pale: freeable, still there. Each request "
        "is alone in its steps.", size=12, css="soft",
    )  # fmt: skip
    return svg.render()


@functools.cache
def _tables() -> list[tuple[str, int, list[int]]]:
    """Of each prompt: what it is, tokens found, and its blocks."""
    llm = LLM("byte-sees", block_size=16, num_blocks=64)
    engine, found = llm.llm_engine, []
    hits: dict[str, int] = {}
    tables: dict[str, list[int]] = {}

    def note(plan: Any) -> None:
        hits.update(plan.num_cached_tokens)
        tables.update({name: list(blocks) for name, blocks in plan.block_ids.items()})

    engine.observers.append(note)
    words = "You see pictures. "
    for name, text, shown in (
        ("picture 0", words + "<image>what is it?\n", 0),
        ("picture 1, same text", words + "<image>what is it?\n", 1),
        ("picture 0 again", words + "<image>what is it?\n", 0),
        ("picture 0, two words on", words + "ok <image>what is it?\n", 0),
    ):
        known = engine.add_request(prompt(text, shown), ONE, request_id=name)
        while engine.has_unfinished_requests():
            engine.step()
        found.append((name, hits[known], tables[known]))
    return found


def shared() -> str:
    """Blocks of four prompts of equal words: which are shared."""
    found = _tables()
    first = found[0][2]
    svg = Svg(
        780,
        240,
        "Blocks of four prompts with the same words",
        "; ".join(f"{name}: {hit} tokens found" for name, hit, _ in found) + ".",
    )
    for row, (name, hit, table) in enumerate(found):
        y = 34 + row * 44
        svg.text(16, y + 18, name, size=12)
        for place, block in enumerate(table):
            is_shared = block in first[: len(table)] and place * 16 < hit
            svg.cell(210 + place * 66, y, 60, str(block), BLUE if is_shared or row == 0 else GREY)
        svg.text(210 + len(table) * 66 + 6, y + 18, f"found {hit}", size=12, css="soft")
    svg.text(210, 22, "block ids, 16 tokens each; the picture begins in the second block", size=12,
             css="soft")  # fmt: skip
    svg.text(16, 226, "Blue: a block of the first prompt.", size=12, css="soft")
    return svg.render()


def splice() -> str:
    """Length of each row of `inputs_embeds` around a picture, text and picture apart."""
    llm = LLM("byte-sees", num_blocks=64, dtype="float64")
    engine = llm.llm_engine
    model = engine.feature("multimodal").model
    kept: list[Any] = []
    forward = model.transformer.forward

    def watching(batch: Any) -> Any:
        if batch.inputs_embeds is not None:
            kept.append((batch.inputs_embeds.copy(), model.is_multimodal.copy()))
        return forward(batch)

    model.transformer.forward = watching
    engine.generate([prompt("look: <image> what is it?\n", 0)], ONE)
    rows, mask = kept[0]
    norms = np.linalg.norm(rows, axis=1)
    svg = Svg(
        780, 250, "One row per token, whoever made it",
        f"{len(norms)} rows of {rows.shape[1]} numbers: {int((~mask).sum())} from the vocabulary, "
        f"{int(mask.sum())} from the encoder.",
    )  # fmt: skip
    width, most = 740 / len(norms), float(norms.max())
    for place, (norm, is_picture) in enumerate(zip(norms, mask, strict=True)):
        height = 150 * float(norm) / most
        svg.rect(
            20 + place * width, 180 - height, width - 1.2, height,
            fill=ORANGE if is_picture else BLUE, opacity=0.7,
        )  # fmt: skip
    svg.line(20, 181, 760, 181)
    svg.text(20, 204, "Length of each row of inputs_embeds in one step.", size=12, css="soft")
    svg.text(20, 226, "vocabulary", fill=BLUE, bold=True)
    svg.text(120, 226, "encoder and projector", fill=ORANGE, bold=True)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "splice.svg": splice,
    "steps.svg": steps,
    "cache.svg": cache,
    "shared.svg": shared,
}
