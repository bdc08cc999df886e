"""Lab 16-02: a client that knows a whole answer from one that broke.

A server sends its status before the first token. Everything that goes wrong later stands in the
bytes of the stream, or is missing there. The class is empty: what it is fed was recorded from
`vllm serve`, whole, killed on the way, and broken by the rules of `conformance/serving/breaks.py`.

Sources: `vllm/entrypoints/openai/chat_completion/serving.py:400`
`OpenAIServingChat.chat_completion_stream_generator`, and the standard of server-sent events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Choice:
    """What one choice has said so far (given).

    `tool_calls` holds `{"id", "name", "arguments"}`, the last a text as it came.
    """

    role: str | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """What a stream has said so far (given)."""

    state: str = "open"
    """"open", "whole", "failed", "cut" or "malformed"."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """By index, those that were heard of."""
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    """Of an error event, what it says."""


class Stream:
    """What a program asks of a client (given). This one hears nothing."""

    def __init__(self, n: int = 1) -> None:
        """A stream that has not begun; the request asked for `n` choices."""
        self.n = n

    def feed(self, data: bytes) -> None:
        """Take the next bytes, any number of them.

        Raises:
            ValueError: the stream was closed.
        """

    def close(self) -> None:
        """The connection is closed: no bytes will come."""

    def answer(self) -> Answer:
        """What is known by now. It is the caller's: later bytes do not change it."""
        return Answer()

    def calls(self) -> list[tuple[int, str, dict[str, Any]]]:
        """The calls that a program may run now: choice, name, arguments."""
        return []


class Client(Stream):
    """A client of streamed chats. How it is built is yours; what must hold is this.

    - R1 Bytes may be cut anywhere. After each `feed`, `answer` has all that the complete events
      say, and nothing of an event that is not complete.
    - R2 A line ends with \\n or \\r\\n and with nothing else. An empty line ends an event. Its data
      are its `data:` lines, without one space after the colon if there is one, joined by \\n. Other
      lines say nothing, and neither does an event without data.
    - R3 An event is a JSON object in UTF-8, or [DONE], which is the last. A piece belongs to the
      choice of its `index`, and a piece of a call to the call of its own. Content, reasoning and
      arguments are joined; of all else the last counts. A field that is missing or null says
      nothing.
    - R4 A stream is "open" until the first of these: an event with an `error` ("failed"); bytes
      that R3 excludes ("malformed"); the end, by [DONE] or by `close`. At [DONE] it is "whole" if
      each of the `n` choices has a finish reason. Any other end is "cut".
    - R5 A stream that is not open reads on for one reason: an event after a "whole" one makes it
      "malformed". What the stream had said before it ended stays in the answer.
    - R6 A call may be run if the stream is whole and the call has a name and arguments that are a
      JSON object. No finish reason promises that.
    - R7 Each event is parsed once, however often bytes and questions come.

    Recorded: a call that `max_tokens` cut in its arguments is whole, its finish reason is
    "tool_calls", its arguments are "", and there is nothing to run.
    """
