"""What byte-sees answers to held-out questions, the first right and wrong one of each kind.

`course figures 13` writes it: the engine is asked, in float64, so that every machine says the same.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from course.truth.figures import GREEN, RED, Svg
from labkit.pictures import KINDS, SIZE, Turn, single_question
from mini_vllm import LLM, SamplingParams

PER_KIND = 6
"""Questions asked of each kind; what comes after the first right and wrong one is not shown."""
SEED, HELD_OUT = 0, 1
"""The stream of `models/train_sees.py` that training does not draw from."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, and what was said."""

    turn: Turn
    said: str

    @property
    def is_right(self) -> bool:
        """To the last letter."""
        return self.said == self.turn.question.answer


def answers() -> dict[str, list[Answer]]:
    """By kind what the engine says to the first held-out questions, all asked in one call."""
    asked = []
    for number, kind in enumerate(KINDS):
        rng = np.random.default_rng([SEED, HELD_OUT, number])
        asked += [single_question(rng, kind) for _ in range(PER_KIND)]
    llm = LLM("byte-sees", dtype="float64", num_blocks=1024)
    prompts = [
        {
            "prompt": "<image>" * len(turn.pictures) + turn.question.text + "\n",
            "multi_modal_data": {"image": list(turn.pictures)},
        }
        for turn in asked
    ]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=72))
    found: dict[str, list[Answer]] = {kind: [] for kind in KINDS}
    for turn, output in zip(asked, outputs, strict=True):
        found[turn.question.kind].append(Answer(turn, output.outputs[0].text))
    return found


def gif(pixels: np.ndarray) -> bytes:
    """A picture as a GIF in at most 252 colours: bytes that no library's version changes."""
    levels = np.array([6, 7, 6])
    steps = np.rint(pixels / 255 * (levels - 1)).astype(int)  # [h, w, 3]
    used, index = np.unique(steps.reshape(-1, 3), axis=0, return_inverse=True)
    bits = max(2, int(len(used) - 1).bit_length())
    palette = np.zeros((1 << bits, 3), np.uint8)
    palette[: len(used)] = np.rint(used * 255 / (levels - 1))
    height, width = pixels.shape[:2]
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0xF0 | bits - 1, 0, 0)
    image = struct.pack("<BHHHHBB", 0x2C, 0, 0, width, height, 0, bits)
    data = packed(index.ravel().tolist(), bits)
    blocks = b"".join(
        bytes([len(data[i : i + 255])]) + data[i : i + 255] for i in range(0, len(data), 255)
    )
    return head + palette.tobytes() + image + blocks + b"\0;"


def packed(indices: list[int], bits: int) -> bytes:
    """LZW as GIF has it: codes that grow by a bit when the table does, the least bit first."""
    clear, end = 1 << bits, (1 << bits) + 1
    table: dict[tuple[int, ...], int] = {}
    size, value, filled, out = bits + 1, 0, 0, bytearray()

    def put(code: int) -> None:
        nonlocal value, filled
        value |= code << filled
        filled += size
        while filled >= 8:
            out.append(value & 255)
            value, filled = value >> 8, filled - 8

    put(clear)
    known: tuple[int, ...] = ()
    for index in indices:
        longer = (*known, index)
        if len(longer) == 1 or longer in table:
            known = longer
            continue
        put(table[known] if len(known) > 1 else known[0])
        table[longer] = end + 1 + len(table)
        if table[longer] == 1 << size and size < 12:
            size += 1
        elif len(table) >= 4096 - end - 2:
            put(clear)
            table, size = {}, bits + 1
        known = (index,)
    put(table[known] if len(known) > 1 else known[0])
    put(end)
    if filled:
        out.append(value & 255)
    return bytes(out)


def gallery() -> str:
    """Right answers on the left, wrong ones on the right, with what would have been right."""
    found = answers()
    row, side = 74, SIZE
    height = 44 + row * len(KINDS)
    right = sum(answer.is_right for each in found.values() for answer in each)
    total = PER_KIND * len(KINDS)
    svg = Svg(
        860, height, f"byte-sees: {right} of {total} held-out questions are answered rightly",
        "For each kind of question the first right and the first wrong answer of the mini engine.",
    )  # fmt: skip
    svg.text(16, 24, "right", bold=True, fill=GREEN)
    svg.text(440, 24, "wrong", bold=True, fill=RED)
    for number, (_, each) in enumerate(found.items()):
        y = 38 + row * number
        for x, wanted in ((16, True), (440, False)):
            shown = next((answer for answer in each if answer.is_right is wanted), None)
            if shown is None:
                svg.text(x, y + 32, f"none of {PER_KIND}", css="soft")
                continue
            for place, pixels in enumerate(shown.turn.pictures):
                data = base64.b64encode(gif(pixels)).decode()
                svg.raw(
                    f'<image x="{x + place * (side + 6)}" y="{y}" width="{side}" height="{side}" '
                    f'href="data:image/gif;base64,{data}"/>'
                )
            left = x + len(shown.turn.pictures) * (side + 6) + 6
            svg.text(left, y + 16, shown.turn.question.text, size=12, css="soft")
            svg.text(left, y + 34, shown.said, size=12, bold=True, fill=GREEN if wanted else RED)
            if not wanted:
                svg.text(left, y + 51, shown.turn.question.answer, size=12)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {"gallery.svg": gallery}
