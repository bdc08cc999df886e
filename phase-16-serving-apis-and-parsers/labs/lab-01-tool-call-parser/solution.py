"""Lab 16-01: calls out of text that comes in pieces.

A model that calls a tool writes `<tool_call>`, a JSON object and `</tool_call>` into its text. The
pieces a server gets are cut anywhere. What holds:

- T1: chunking changes nothing. Events joined, and the failure if there is one, are those of the
  text at once, however it was cut.
- T2: eager. Text outside blocks is given with the first piece after which it cannot be part of an
  opening tag; a call with the piece that completes its closing tag.
- T3: nothing leaks. No character of a tag or of a block is ever given as content.
- T4: nothing is swallowed. What looked like a tag and is none is content, at the end, too.
- T5: a block that is no call, or has no end, is an error, not text.
- T6: outside a block at most 10 characters are kept, and a block's JSON is read once.

Source: `vllm/tool_parsers/hermes_tool_parser.py:34` `Hermes2ProToolParser`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

Event = tuple[str, Any]
"""`("content", text)`, the text not empty, or `("tool_call", call)`."""


class ToolCallError(ValueError):
    """A block that is no call, or that has no end; `events` precede it (given)."""

    def __init__(self, message: str, events: Iterable[Event] = ()) -> None:
        super().__init__(message)
        self.events = list(events)


def _trailing_tag_prefix(text: str, tag: str = OPEN) -> int:
    """Length of the longest proper prefix of `tag` with which `text` ends; 0 for none.

    A trace: "x <tool" 5, "<<" 1, "<tool_call>" 0, since the whole tag is no proper prefix.
    """
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _call(body: str) -> dict[str, Any]:
    """The call that stands in a block; ToolCallError without events if none does."""
    shown = body if len(body) <= 60 else f"{body[:60]}..."
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"no JSON in a block: {shown!r}") from error
    if not isinstance(call, dict):
        raise ToolCallError(f"a block holds no object: {shown!r}")
    if not isinstance(call.get("name"), str) or not call["name"]:
        raise ToolCallError(f"a call needs a name, a string that is not empty: {shown!r}")
    if not isinstance(call.get("arguments"), dict):
        raise ToolCallError(f"a call needs arguments, an object: {shown!r}")
    return call


class StreamingToolParser:
    """Events out of the pieces of one text.

    `in_block` is true from the end of an opening tag to the end of its closing one.

    A trace: "Sure. <tool" gives `[("content", "Sure. ")]`; then "box>" gives
    `[("content", "<toolbox>")]`. "a<" gives `[("content", "a")]`; then "<tool_call>" gives
    `[("content", "<")]`, and `in_block` is true.
    """

    def __init__(self) -> None:
        self.in_block = False
        self._held = ""
        self._searched = 0
        self._over = False

    def feed(self, chunk: str) -> list[Event]:
        """The events that this piece makes certain, in the order of the text; "" makes none.

        A call is a JSON object with a non-empty string `name` and an object `arguments`; whatever
        else it holds is kept. White space around it is allowed. A block ends at the first closing
        tag, wherever that stands.

        Raises:
            ToolCallError: a block that ends in this piece is no call. Its `events` are those of
                this piece before that block.
            RuntimeError: after `finish`, or after a ToolCallError.
        """
        self._check_open()
        self._held += chunk
        events: list[Event] = []
        while True:
            tag = CLOSE if self.in_block else OPEN
            at = self._held.find(tag, self._searched)
            if at < 0:
                break
            before, self._held = self._held[:at], self._held[at + len(tag) :]
            self._searched = 0
            if self.in_block:
                try:
                    events.append(("tool_call", _call(before)))
                except ToolCallError as error:
                    self._over = True
                    error.events = events
                    raise
            elif before:
                events.append(("content", before))
            self.in_block = not self.in_block
        if self.in_block:
            self._searched = max(0, len(self._held) - len(CLOSE) + 1)
            return events
        certain = len(self._held) - _trailing_tag_prefix(self._held)
        if certain:
            events.append(("content", self._held[:certain]))
            self._held = self._held[certain:]
        return events

    def finish(self) -> list[Event]:
        """No piece follows: the content that was held, if any.

        Raises:
            ToolCallError: within a block; it has no events.
            RuntimeError: after `finish`, or after a ToolCallError.
        """
        self._check_open()
        self._over = True
        if self.in_block:
            raise ToolCallError(f"a block without an end: {self._held[:60]!r}")
        return [("content", self._held)] if self._held else []

    def _check_open(self) -> None:
        """RuntimeError once the text is over."""
        if self._over:
            raise RuntimeError("this parser has finished or failed: make a new one")


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """A text at once: all content, joined as it stands, and the calls in their order.

    A trace: 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b' gives "a  b", with both
    spaces, and one call.

    Raises:
        ToolCallError: as `feed` and `finish` say; `events` are all that precede the failure.
    """
    parser = StreamingToolParser()
    events = parser.feed(text)
    try:
        events += parser.finish()
    except ToolCallError as error:
        error.events = events
        raise
    content = "".join(value for kind, value in events if kind == "content")
    return content, [value for kind, value in events if kind == "tool_call"]
