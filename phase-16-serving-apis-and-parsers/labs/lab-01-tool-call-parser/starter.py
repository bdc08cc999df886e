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
    raise NotImplementedError


class StreamingToolParser:
    """Events out of the pieces of one text.

    `in_block` is true from the end of an opening tag to the end of its closing one.

    A trace: "Sure. <tool" gives `[("content", "Sure. ")]`; then "box>" gives
    `[("content", "<toolbox>")]`. "a<" gives `[("content", "a")]`; then "<tool_call>" gives
    `[("content", "<")]`, and `in_block` is true.
    """

    def __init__(self) -> None:
        raise NotImplementedError

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
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """No piece follows: the content that was held, if any.

        Raises:
            ToolCallError: within a block; it has no events.
            RuntimeError: after `finish`, or after a ToolCallError.
        """
        raise NotImplementedError


def parse_tool_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """A text at once: all content, joined as it stands, and the calls in their order.

    A trace: 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b' gives "a  b", with both
    spaces, and one call.

    Raises:
        ToolCallError: as `feed` and `finish` say; `events` are all that precede the failure.
    """
    raise NotImplementedError
