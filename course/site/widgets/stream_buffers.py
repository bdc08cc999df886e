"""A text in pieces, and what a tag parser sends and holds: what the widget shows.

Promises: every delta and every held character is the engine's own parser's, which says what the
real one says to the recorded texts; the browser draws and computes nothing. Mirrors
`vllm/tool_parsers/hermes_tool_parser.py:203` `Hermes2ProToolParser.extract_tool_calls_streaming`.
"""

from __future__ import annotations

from typing import Any

from mini_vllm.entrypoints.openai.tool_parsers import CLOSE, OPEN, HermesStream, held_back

CALL = f'{OPEN}{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}{CLOSE}'
TEXTS = {
    "text and a call": f"Let me look. {CALL}",
    "nearly a tag": "a <tool> and <tool_calls, a<b",
    "two calls": f"{CALL}{CALL}",
    "a call and text behind it": f"{CALL} It rains.",
    "a call cut off": CALL[:48],
}
LENGTHS = (1, 2, 3, 5, 8, 13, 1000)
"""Characters of a piece; the last is the whole text at once."""


def stream(text: str, length: int) -> dict[str, Any]:
    """What happens to a text in pieces of `length` characters.

    Returns:
        `steps`: for each piece the piece, what it adds to the message ("content", "name" and
        "arguments" as text), and what is held after it; `deltas`: pieces that something was sent
        for; `held`: the most characters of content held at once; `content` and `calls` in all.
    """
    parser, steps, num_calls = HermesStream(), [], 0
    for at in range(0, len(text), length):
        piece = text[at : at + length]
        delta = parser.feed(piece) or {}
        calls = [call["function"] for call in delta.get("tool_calls", ())]
        num_calls += sum("name" in call for call in calls)
        held = "" if OPEN in parser.text else parser.text[parser.num_sent :]
        if OPEN in parser.text:
            inside = parser.text[parser.text.rfind(OPEN) + len(OPEN) :]
            held = inside[len(inside) - held_back(inside, CLOSE) :]
        steps.append(
            {
                "piece": piece, "content": delta.get("content") or "",
                "name": " ".join(call["name"] for call in calls if "name" in call),
                "arguments": "".join(call.get("arguments", "") for call in calls), "held": held,
            }
        )  # fmt: skip
    return {
        "steps": steps,
        "deltas": sum(any(s[key] for key in ("content", "name", "arguments")) for s in steps),
        "held": max(len(step["held"]) for step in steps),
        "content": "".join(step["content"] for step in steps),
        "calls": num_calls,
    }  # fmt: skip


QUESTIONS: tuple[tuple[str, str, int, str, str], ...] = (
    ("One character a piece, text that is nearly a tag. How many characters are held at most?",
     "nearly a tag", 1, "held",
     "<tool_call may still become a tag, so it waits."),
    ("A call in front of a text, three characters a piece. How many characters of content come?",
     "a call and text behind it", 3, "content",
     "What stands behind a call is not sent."),
    ("Two calls in one piece. How many pieces is something sent for?", "two calls", 1000, "deltas",
     "One piece, one message; both calls are in it."),
    ("A call cut off before its end. How many calls has the client heard of?",
     "a call cut off", 1, "calls",
     "A name is sent as soon as it is whole."),
)  # fmt: skip
"""What is asked, of which text in pieces of which length, and the field that answers."""


def document() -> dict[str, Any]:
    """The widget's document."""
    films = {
        name: {str(length): stream(text, length) for length in LENGTHS}
        for name, text in TEXTS.items()
    }
    questions = []
    for ask, name, length, field, because in QUESTIONS:
        found = films[name][str(length)][field]
        answer = len(found) if isinstance(found, str) else found
        questions.append(
            {"ask": ask, "text": name, "length": length, "answer": answer, "because": because}
        )
    return {"texts": TEXTS, "lengths": list(LENGTHS), "films": films, "questions": questions}
