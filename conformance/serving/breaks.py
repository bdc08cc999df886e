"""Streams that broke, or only look odd: made of recorded ones, each by one rule.

A rule takes the bytes of a whole stream and gives other bytes. `HARMLESS` changes how the same is
said, `BROKEN` what is said. Promises: equal bytes give equal bytes, and nothing but the bytes of
the stream, and of the recorded error event, goes in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Rule = Callable[[bytes], bytes]
DONE = b"data: [DONE]\n\n"


def blocks(data: bytes) -> list[bytes]:
    """The events of a recorded stream as the server wrote them, `[DONE]` the last."""
    found = [block + b"\n\n" for block in data.split(b"\n\n") if block]
    if not found or found[-1] != DONE:
        raise ValueError(f"the stream ends with {data[-20:]!r}: need a whole one, with [DONE]")
    return found


def event_of(block: bytes) -> dict[str, Any]:
    """The object of a block that is not `[DONE]`."""
    found = json.loads(block.removeprefix(b"data: "))
    assert isinstance(found, dict)
    return found


def block_of(event: dict[str, Any]) -> bytes:
    """An object as the server writes it."""
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _middle(found: list[bytes]) -> int:
    """The event in the middle of those that say something, which is not the first."""
    return max(1, (len(found) - 1) // 2)


def _after_first_colon(block: bytes, text: bytes) -> bytes:
    """A block with `text` between the first name of its object and the value."""
    place = block.index(b'":') + 2
    return block[:place] + text + block[place:]


def _everywhere(change: Callable[[bytes], bytes]) -> Rule:
    """A rule that changes each event but `[DONE]`."""

    def rule(data: bytes) -> bytes:
        return b"".join(change(b) if b != DONE else b for b in blocks(data))

    return rule


HARMLESS: dict[str, Rule] = {
    "lines that end with \\r\\n": lambda data: data.replace(b"\n", b"\r\n"),
    "a comment before each event": _everywhere(lambda b: b": ping\n\n" + b),
    "names, ids and retries": _everywhere(
        lambda b: b"event: message\nid: 7\nretry: 9\ndatabase: 1\n" + b
    ),
    "no space after the colon": lambda data: data.replace(b"data: ", b"data:"),
    "a \\r between two tokens of JSON": _everywhere(lambda b: _after_first_colon(b, b"\r")),
    "an event on two data lines": _everywhere(lambda b: _after_first_colon(b, b"\ndata: ")),
    "a comment between two data lines": _everywhere(
        lambda b: _after_first_colon(b, b"\n: ping\ndata: ")
    ),
    "more empty lines": _everywhere(lambda b: b + b"\n\n"),
}
"""The same answer, said otherwise: as a proxy, or another server, may write it."""


def _cut_inside(data: bytes) -> bytes:
    found = blocks(data)
    middle = _middle(found)
    return b"".join(found[:middle]) + found[middle][: len(found[middle]) // 2]


def _closed(data: bytes) -> bytes:
    found = blocks(data)
    return b"".join(found[: _middle(found)])


def _half_an_event(data: bytes) -> bytes:
    found = blocks(data)
    middle = _middle(found)
    found[middle] = found[middle][: len(found[middle]) // 2] + b"\n\n"
    return b"".join(found)


def _without_reason(data: bytes) -> bytes:
    """Without what follows the last event that has no finish reason; `[DONE]` stays."""
    found = blocks(data)
    first = next(
        place
        for place, block in enumerate(found[:-1])
        if any(part.get("finish_reason") for part in event_of(block)["choices"])
    )
    return b"".join(found[:first]) + DONE


def _no_utf8(data: bytes) -> bytes:
    found = blocks(data)
    middle = _middle(found)
    place = found[middle].index(b'":"') + 3  # inside the first text
    found[middle] = found[middle][:place] + b"\xff" + found[middle][place:]
    return b"".join(found)


BROKEN: dict[str, Rule] = {
    "closed inside an event": _cut_inside,
    "closed between two events": _closed,
    "closed before [DONE]": lambda data: data.removesuffix(DONE),
    "closed before the empty line of [DONE]": lambda data: data[:-1],
    "[DONE] before a finish reason": _without_reason,
    "half an event, then the rest": _half_an_event,
    "bytes that are not UTF-8": _no_utf8,
    "an event after [DONE]": lambda data: data + blocks(data)[-2],
    "[DONE] behind two spaces": lambda data: data.removesuffix(DONE) + b"data:  [DONE]\n\n",
}
"""Not the whole answer, or not in the format."""


def failed_at(data: bytes, error: bytes, closed: bool = False) -> bytes:
    """The first half of a stream, then a recorded error event, then `[DONE]`, or nothing."""
    found = blocks(data)
    return b"".join(found[: _middle(found)]) + error + (b"" if closed else DONE)


def broken(data: bytes, error: bytes) -> dict[str, bytes]:
    """All that `BROKEN` makes of a stream, and the two ways in which a server fails in it."""
    made = {name: rule(data) for name, rule in BROKEN.items()}
    made["an error event, then [DONE]"] = failed_at(data, error)
    made["an error event, then closed"] = failed_at(data, error, closed=True)
    return made
