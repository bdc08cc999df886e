"""The figures of the labs of phase 16; `course figures` draws them.

Lab 01 shows the reference solution at work; lab 03 the reference solution, a recording of the real
class, and a control; lab 04 the reference solution before the engine. No upstream counterpart.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from conformance import parts
from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, Svg
from mini_vllm import LLMEngine, SamplingParams

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


def tags() -> str:
    """Lab 01: what is given and what is held, after each character of a short text."""
    lab = solution("lab-01-tool-call-parser")
    call = '{"name":"f","arguments":{}}'
    chunks = [*"a<b <<tool_ca", "ll>", call, "</tool_call>", "!"]
    parser, text, given = lab.StreamingToolParser(), "", 0
    svg = Svg(
        780, 40 + 22 * len(chunks), "What a parser of calls gives, and what it keeps",
        "One line for each piece of a text. A bracket that may begin a tag is held; the character "
        "that rules the tag out releases it; from the tag on nothing is content; the call comes "
        "with the end of its closing tag.",
    )  # fmt: skip
    for x, head in ((14, "piece"), (230, "given"), (520, "held"), (700, "in a block")):
        svg.text(x, 20, head, bold=True)
    for line, chunk in enumerate(chunks):
        y = 44 + line * 22
        events = parser.feed(chunk)
        text += chunk
        content = "".join(value for kind, value in events if kind == "content")
        given += len(content)
        calls = [value["name"] for kind, value in events if kind == "tool_call"]
        if calls:
            given = len(text)
        svg.text(14, y, shown(chunk), css="ink mono", size=12)
        if events:
            svg.rect(224, y - 14, 280, 19, fill=ORANGE if calls else GREEN, radius=3, opacity=0.35)
        words = f"the call of {calls[0]}" if calls else shown(content)
        svg.text(230, y, words, css="ink mono", size=12)
        kept = "" if calls else text[given:]
        if kept:
            svg.rect(514, y - 14, 176, 19, fill=GREY, radius=3, opacity=0.25)
        svg.text(
            520, y, kept if len(kept) < 20 else f"{len(kept)} characters", css="ink mono", size=12
        )
        svg.text(700, y, "yes" if parser.in_block else "", size=12)
    return svg.render()


def shown(text: str) -> str:
    """A piece of text with its spaces visible."""
    return text.replace(" ", "\u00b7")


def pieces() -> str:
    """Lab 04: three readers of one request, by the reference solution and the engine."""
    lab = solution("lab-04-clients-that-leave")
    svg = Svg(
        780, 190, "One request of 24 tokens, three readers",
        "A reader that is always there gets 24 pieces of one token, one that comes at every "
        "eighth step gets three of eight, and one that comes at the end gets one of 24.",
    )  # fmt: skip
    for line, (name, every) in enumerate(
        (("always there", 1), ("every 8th", 8), ("at the end", 24))
    ):
        door = lab.FrontDoor(LLMEngine(model="toy", num_blocks=64))
        reader = door.open("r", [1, 2, 3], SamplingParams(max_tokens=24, ignore_eos=True))
        y, step, found = 40 + line * 48, 0, 0
        svg.text(14, y + 18, name)
        while door.num_open:
            door.step()
            step += 1
            if step % every == 0:
                for delta in reader.get_nowait() or ():
                    wide = len(delta.token_ids) * 24
                    x = 140 + step * 24 - wide
                    svg.rect(x, y, wide - 3, 28, fill=GREEN if every == 1 else BLUE, opacity=0.45)
                    svg.text(x + wide / 2 - 2, y + 19, str(len(delta.token_ids)), anchor="middle")
                    found += 1
        svg.text(728, y + 18, str(found), bold=True)
    svg.text(140, 22, "steps of the engine", size=12, css="soft")
    svg.text(728, 22, "pieces", size=12, css="soft")
    svg.text(14, 184, "a box: one read, and its tokens", size=12, css="soft")
    return svg.render()


FIGURES = {"lab-04-pieces.svg": pieces, "lab-01-tags.svg": tags, "lab-03-held.svg": held}
