"""The figures of the labs of phase 13: their solutions, and what releases of vLLM did, drawn.

`course figures 13` writes them. No upstream counterpart.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import replay
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Svg
from course.truth.plots import Axes
from mini_vllm.multimodal.encoder_cache_manager import EncoderCacheManager
from mini_vllm.multimodal.gate import EncoderGate
from mini_vllm.multimodal.inputs import PlaceholderRange
from mini_vllm.releases.encoder_cache import DuplicatesReferenced

LABS = Path(__file__).resolve().parents[1] / "labs"
COLORS = (BLUE, ORANGE, GREEN, PURPLE)


def solution(folder: str, file: str = "solution.py") -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / file)


def expand() -> str:
    """Lab 01: a prompt with three markers, and what the engine sees."""
    lab = solution("lab-01-image-token-expansion")
    image = lab.IMAGE_TOKEN_ID
    given, counts = [image, 7, image, image, 8], [2, 3, 1]
    ids, ranges = lab.expand_prompt(given, counts)
    svg = Svg(
        780, 190, "Three markers become six placeholders",
        f"The prompt {given} with pictures of {counts} tokens becomes {ids}.",
    )  # fmt: skip
    svg.text(16, 24, "as it was written", css="soft")
    marker = 0
    for place, token in enumerate(given):
        is_marker = token == image
        svg.cell(
            160 + place * 64, 8, 58, "IMG" if is_marker else str(token),
            COLORS[marker] if is_marker else GREY,
        )  # fmt: skip
        if is_marker:
            one = ranges[marker]
            middle = 160 + (one.offset + one.length / 2) * 64 - 3
            svg.line(160 + place * 64 + 29, 38, middle, 84, arrow=True)
            marker += 1
    svg.text(16, 110, "as it is scheduled", css="soft")
    for place, token in enumerate(ids):
        owner = next(
            (i for i, r in enumerate(ranges) if r.offset <= place < r.offset + r.length), None
        )
        svg.cell(
            160 + place * 64, 92, 58, str(token) if owner is None else "IMG",
            GREY if owner is None else COLORS[owner],
        )  # fmt: skip
    for owner, one in enumerate(ranges):
        svg.text(
            160 + one.offset * 64, 140, f"({one.offset}, {one.length})", size=12,
            fill=COLORS[owner], css="mono",
        )  # fmt: skip
    svg.text(16, 140, "offset, length", css="soft")
    svg.text(16, 172, "Marker and placeholder are the same id; -100 here.", size=12, css="soft")
    return svg.render()


def chunks() -> str:
    """Lab 03: a prompt of 300 tokens in chunks, under three pairs of budgets."""
    lab = solution("lab-03-encoder-scheduling")
    places = (PlaceholderRange(50, 100), PlaceholderRange(180, 100))
    svg = Svg(
        780, 262, "A prompt of 300 tokens in chunks",
        "Pictures at 50 to 150 and 180 to 280. With 300 tokens and 150 embeddings a step there are "
        "two chunks; with 64 and 100 five; with 64 and 99 the second chunk is empty.",
    )  # fmt: skip
    scale, left = 1.9, 180
    for place, name in zip(places, "AB", strict=True):
        svg.rect(left + place.offset * scale, 10, place.length * scale, 24, fill=BLUE, opacity=0.3)
        svg.text(left + (place.offset + 50) * scale, 27, f"picture {name}, 100", anchor="middle")
    svg.rect(left, 10, 300 * scale, 24, stroke=GREY)
    svg.text(16, 27, "300 tokens", css="soft")
    for row, (tokens, budget) in enumerate(((300, 150), (64, 100), (64, 99))):
        y = 52 + row * 70
        svg.text(16, y + 16, f"{tokens} tokens a step,", size=12, css="soft")
        svg.text(16, y + 32, f"{budget} embeddings", size=12, css="soft")
        computed, cached = 0, set[int]()
        for _ in range(8):
            new, encode, _ = lab.plan_chunk(
                computed, min(tokens, 300 - computed), places, budget, cached
            )
            x = left + computed * scale
            if not new:
                svg.text(x + 6, y + 20, "0 tokens, and so on for ever", fill=RED)
                break
            svg.rect(x + 1, y, new * scale - 2, 28, fill=GREEN, opacity=0.35, radius=4)
            svg.text(x + new * scale / 2, y + 18, str(new), anchor="middle")
            if encode:
                names = " and ".join("AB"[i] for i in encode)
                svg.text(x + 2, y + 44, f"encodes {names}", size=12, fill=ORANGE, bold=True)
            computed, cached = computed + new, cached | set(encode)
            if computed == 300:
                break
    return svg.render()


def price() -> str:
    """Lab 04: tokens of a square picture for three models."""
    lab = solution("lab-04-price-a-picture")
    sides = range(28, 2017, 28)
    svg = Svg(
        780, 330, "Tokens over the side of a square picture",
        "LLaVA-1.5 has 576 for every size. Pixtral grows to 4,160 at 1,024 pixels and stays. "
        "Qwen2-VL grows with the area to its limit of pixels.",
    )  # fmt: skip
    axes = Axes(svg, (66, 24, 540, 250), (0, 2016), (0, 5500))
    axes.frame("pixels of a side", "tokens", range(0, 2017, 336), range(0, 5501, 1000))
    for name, color in zip(lab.MODELS, COLORS, strict=False):
        points = [(side, lab.price(name, side, side).tokens) for side in sides]
        axes.curve(points, color, width=2.5)
        axes.label(points[-1][0], points[-1][1], f"{name}: {points[-1][1]:,}", fill=color)
    return svg.render()


def spin() -> str:
    """Lab 05: the reported prompt on three releases."""
    path = LABS / "lab-05-why-does-the-engine-spin" / "recordings" / "spins.jsonl.gz"
    with gzip.open(path, "rt") as file:
        case = json.loads(file.readline())
    svg = Svg(
        780, 220, "A prompt of 20 tokens on three releases",
        "Pictures of 5 tokens at 0 and 6, a cache of 6, states every 8 tokens. 0.22.1 and 0.27.1 "
        "plan 0 tokens for ever; 0.33.0 plans 6, 2, 8 and 4.",
    )  # fmt: skip
    scale, left = 26, 120
    for (offset, length), name in zip(case["pictures"], "AB", strict=True):
        svg.rect(left + offset * scale, 10, length * scale, 24, fill=BLUE, opacity=0.3)
        svg.text(left + (offset + length / 2) * scale, 27, name, anchor="middle")
    svg.rect(left, 10, case["num_tokens"] * scale, 24, stroke=GREY)
    for at in range(0, case["num_tokens"] + 1, case["block_size"]):
        svg.line(left + at * scale, 6, left + at * scale, 196, dash="3 4")
        svg.text(left + at * scale, 212, str(at), size=12, anchor="middle", css="soft")
    for row, (release, told) in enumerate(case["releases"].items()):
        y, at = 50 + row * 46, 0
        svg.text(16, y + 18, release, css="mono")
        for count, encoded in told["chunks"]:
            if not count:
                words = "0 tokens, again and again: cut at B, aligned to the block's beginning"
                svg.text(left + at * scale + 8, y + 18, words, fill=RED)
                break
            svg.rect(left + at * scale + 1, y, count * scale - 2, 28, fill=GREEN, opacity=0.35)
            names = "".join("AB"[i] for i in encoded)
            words = f"{count}, encodes {names}" if names and count > 3 else f"{count} {names}"
            svg.text(left + (at + count / 2) * scale, y + 18, words, size=12, anchor="middle")
            at += count
    return svg.render()


def _twice(gate: Any, manager: Any) -> Sequence[dict[str, Any]]:
    workload = solution("lab-06-what-may-be-freed", "test_lab.py").workload()
    made = functools.partial(gate, encoder_cache_manager=manager)
    build = functools.partial(replay.mini_scheduler, gates={"multimodal": made})
    return replay.run(workload, build)["steps"]


def twice() -> str:
    """Lab 06: a picture in two places, at the pin and with references per place."""
    mended = solution("lab-06-what-may-be-freed").Mended
    svg = Svg(
        780, 270, "A picture twice in a prompt, and another that wants its room",
        "At the pin the encoder runs for A, for B, and for A again. With references per place it "
        "runs once for each.",
    )  # fmt: skip
    rows = (
        ("at the pin", EncoderGate, EncoderCacheManager),
        ("held by place", DuplicatesReferenced, mended),
    )
    for row, (words, gate, manager) in enumerate(rows):
        y = 34 + row * 124
        svg.text(16, y - 12, words, bold=True)
        for line, name in enumerate(("twice: A A", "other: B")):
            svg.text(16, y + 20 + line * 32, name, size=12, css="mono")
        for index, step in enumerate(_twice(gate, manager)[:7]):
            x = 140 + index * 90
            svg.text(x + 40, y - 12, f"step {index}", size=12, anchor="middle", css="soft")
            for line, name in enumerate(("twice", "other")):
                count = step["num_scheduled_tokens"].get(name, 0)
                runs = step["encoder_inputs"].get(name)
                if count:
                    picture = "A" if name == "twice" else "B"
                    shown = f"{count} +{picture}" if runs else str(count)
                    svg.cell(x, y + 2 + line * 32, 82, shown, ORANGE if runs else GREY)
            for mm_hash in step["freed_encoder_hashes"]:
                svg.text(x, y + 80, f"evicts {mm_hash}", size=12, fill=RED)
    svg.text(
        16, 262, "Tokens of a step; + names the picture whose encoder runs.", size=12, css="soft"
    )
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-01-expand.svg": expand,
    "lab-03-chunks.svg": chunks,
    "lab-04-price.svg": price,
    "lab-05-spin.svg": spin,
    "lab-06-twice.svg": twice,
}
