"""The figures of the labs of phase 16; `course figures` draws them.

Lab 03's rows are the reference solution's, a recording of the real class's, and a control's. No
upstream counterpart.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from conformance import parts
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, Svg

LABS = Path(__file__).resolve().parents[1] / "labs"
BYTES = "C3A9FF80E4BDA0"


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


def again(data: bytes) -> list[str]:
    """Everything decoded again at each byte, and what is longer than before sent."""
    sent, pieces = 0, []
    for end in range(1, len(data) + 1):
        text = data[:end].decode("utf-8", "replace")
        pieces.append(text[sent:])
        sent = max(sent, len(text))
    return pieces


def held() -> str:
    """Lab 03: one stream of bytes, three ways to give its text."""
    data = bytes.fromhex(BYTES)
    made = solution("lab-03-streaming-detokenizer").StreamingDetokenizer()
    real = next(case for case in parts.load("detokenizer") if case["bytes"] == BYTES)
    rows = (
        ("this lab", [made.feed(byte) for byte in data], GREEN),
        ("vLLM, recorded", real["fast"], BLUE),
        ("all decoded again", again(data), ORANGE),
    )
    svg = Svg(
        780, 210, "Seven bytes, and what each gives",
        "C3 A9 is an e with an accent, FF and 80 are broken, E4 BD A0 is a Chinese character. "
        + " ".join(f"{name}: {', '.join(p or 'nothing' for p in row)}." for name, row, _ in rows),
    )  # fmt: skip
    for place, byte in enumerate(data):
        svg.text(218 + place * 80, 26, f"{byte:02X}", anchor="middle", css="ink mono", bold=True)
    for line, (name, pieces, colour) in enumerate(rows):
        y = 44 + line * 52
        svg.text(14, y + 26, name)
        for place, piece in enumerate(pieces):
            svg.rect(
                182 + place * 80, y, 72, 40, fill=colour if piece else GREY, radius=4,
                opacity=0.45 if piece else 0.12,
            )  # fmt: skip
            words = piece.replace("\ufffd", "\u25c6?")
            svg.text(218 + place * 80, y + 26, words, anchor="middle", size=16)
    svg.text(14, 202, "grey: nothing is given; \u25c6? stands for U+FFFD", size=12, css="soft")
    return svg.render()


FIGURES = {"lab-03-held.svg": held}
