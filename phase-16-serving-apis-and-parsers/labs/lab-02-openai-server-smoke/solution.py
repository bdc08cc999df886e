"""Lab 16-02: a client that knows a whole answer from one that broke.

A server sends its status before the first token. Everything that goes wrong later stands in the
bytes of the stream, or is missing there. The class is empty: what it is fed was recorded from
`vllm serve`, whole, killed on the way, and broken by the rules of `conformance/serving/breaks.py`.

Sources: `vllm/entrypoints/openai/chat_completion/serving.py:400`
`OpenAIServingChat.chat_completion_stream_generator`, and the standard of server-sent events.
"""

from __future__ import annotations

import copy
import json
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


def _json(text: str | bytes) -> Any:
    """What JSON says, None where it is none."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except ValueError:
        return None


def _last(new: Any, old: Any) -> Any:
    """Of two values the newer that says something."""
    return old if new is None else new


def _take(choice: Choice, part: dict[str, Any]) -> None:
    """Take in what an event says of one choice."""
    delta = part.get("delta") or {}
    choice.role = _last(delta.get("role"), choice.role)
    choice.content += delta.get("content") or ""
    choice.reasoning += delta.get("reasoning") or ""
    choice.finish_reason = _last(part.get("finish_reason"), choice.finish_reason)
    for piece in delta.get("tool_calls") or ():
        while len(choice.tool_calls) <= piece["index"]:
            choice.tool_calls.append({"id": None, "name": None, "arguments": ""})
        call, function = choice.tool_calls[piece["index"]], piece.get("function") or {}
        call["id"] = _last(piece.get("id"), call["id"])
        call["name"] = _last(function.get("name"), call["name"])
        call["arguments"] += function.get("arguments") or ""


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

    def __init__(self, n: int = 1) -> None:
        super().__init__(n)
        self._known = Answer()
        self._rest = b""  # a line without its end
        self._data: list[bytes] = []  # of the event that is not complete
        self._closed = False

    def feed(self, data: bytes) -> None:
        if self._closed:
            raise ValueError(f"feed({data[:20]!r}): the stream was closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line.removesuffix(b"\r"))

    def close(self) -> None:
        self._closed = True
        if self._known.state == "open":
            self._known.state = "cut"

    def answer(self) -> Answer:
        return copy.deepcopy(self._known)

    def calls(self) -> list[tuple[int, str, dict[str, Any]]]:
        if self._known.state != "whole":
            return []
        return [
            (index, call["name"], arguments)
            for index, choice in sorted(self._known.choices.items())
            for call in choice.tool_calls
            if call["name"] and isinstance(arguments := _json(call["arguments"]), dict)
        ]

    def _line(self, line: bytes) -> None:
        """Take in one line, without its end."""
        if line.startswith(b"data:"):
            self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
        elif not line and self._data:
            data, self._data = b"\n".join(self._data), []
            if data and self._known.state in ("open", "whole"):
                self._event(data)

    def _event(self, data: bytes) -> None:
        """Take in the data of one event."""
        known = self._known
        if known.state == "whole":
            known.state = "malformed"
            return
        if data == b"[DONE]":
            ended = {i for i, choice in known.choices.items() if choice.finish_reason is not None}
            known.state = "whole" if ended >= set(range(self.n)) else "cut"
            return
        event = _json(data)
        if not isinstance(event, dict):
            known.state = "malformed"
            return
        if event.get("error") is not None:
            known.state, known.error = "failed", event["error"]
            return
        known.usage = _last(event.get("usage"), known.usage)
        for part in event.get("choices") or ():
            _take(known.choices.setdefault(part["index"], Choice()), part)
