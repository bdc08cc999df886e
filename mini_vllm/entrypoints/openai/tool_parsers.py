"""Calls of tools in a model's text: found in the whole of it, or piece by piece.

Promises: however the text is cut, the pieces joined are what the real parser's are; text that may
still become a tag is held back. Mirrors `vllm/tool_parsers/hermes_tool_parser.py:34`
`Hermes2ProToolParser` and `vllm/tool_parsers/streaming.py:62` `extract_named_tool_call_streaming`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def call_id() -> str:
    """A new id of a call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


@dataclass(slots=True)
class ToolCall:
    """One whole call; `arguments` is JSON as text."""

    name: str
    arguments: str
    id: str = field(default_factory=call_id)

    def message(self) -> dict[str, Any]:
        """As a message holds it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def held_back(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`, at most all but one."""
    for count in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:count]):
            return count
    return 0


def said_in(content: str | None) -> str | None:
    """Content beside calls, None for a blank one."""
    return content if content and content.strip() else None


def parse_calls(text: str) -> tuple[str | None, list[ToolCall]]:
    """Content and calls of a whole text in Hermes' format; a text that is broken is all content.

    As there, content is what stands before the first tag, and the last call may lack its end.
    """
    start = text.find(OPEN)
    if start < 0:
        return text, []
    calls = []
    try:
        for block in text[start + len(OPEN) :].split(OPEN):
            found = json.loads(block.split(CLOSE)[0])
            arguments = json.dumps(found["arguments"], ensure_ascii=False)
            calls.append(ToolCall(found["name"], arguments))
    except (ValueError, KeyError, TypeError):
        return text, []
    return text[:start] or None, calls


@dataclass(slots=True)
class Sent:
    """What a client has been sent of one call."""

    name: str | None = None
    arguments: str = ""
    parsed: str = ""
    """The arguments where a parser reads them twice; "": they are what was sent."""

    @property
    def expected(self) -> str:
        """The arguments that the parser believes in, "{}" before there are any."""
        return self.parsed or self.arguments or "{}"


@dataclass(slots=True)
class ToolParser:
    """What a family of parsers is; each reads one choice of one answer, whole or in pieces.

    Mirrors `vllm/tool_parsers/abstract_tool_parser.py:43` `ToolParser`.
    """

    vocab: Mapping[str, int] = field(default_factory=dict)
    """Ids of tokens by name."""
    tools: Sequence[Any] = ()
    """What the request offers, as `mini_vllm/entrypoints/openai/protocol_chat.py` `Tool`."""
    tool_choice: Any = "auto"
    """The request's; a tool's name in an object where one is named."""
    text: str = ""
    """All pieces so far."""
    calls: list[Sent] = field(default_factory=list)
    """Every call that has begun, in the order in which a client hears of them."""

    supports_required_and_named: ClassVar[bool] = True
    """Whether a forced call is made by a constraint, as JSON; if not, `feed` reads it too."""
    tags: ClassVar[tuple[str, ...]] = ()
    """What is read in a text, and must not be left out of it as a special token."""

    def extract_tool_calls(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Content and calls of a whole text, which is all content where it calls nothing."""
        raise NotImplementedError

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What a piece and its tokens add to the message, None while nothing can be said."""
        raise NotImplementedError


@dataclass(slots=True)
class HermesStream(ToolParser):
    """Pieces of a text in, deltas of a message out."""

    num_sent: int = 0
    """Characters of content that were sent."""

    tags: ClassVar[tuple[str, ...]] = OPEN, CLOSE

    def extract_tool_calls(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """As `parse_calls`; blank content beside calls is none."""
        content, calls = parse_calls(text)
        return said_in(content) if calls else content, calls

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What a piece adds to the message, None while nothing can be said.

        The whole text is looked at again each time, so n pieces of one character read n(n + 1)/2.
        """
        self.text += piece
        delta: dict[str, Any] = {}
        end = self.text.find(OPEN)
        if end < 0:
            end = len(self.text) - held_back(self.text, OPEN)
        if end > self.num_sent:
            delta["content"] = self.text[self.num_sent : end]
            self.num_sent = end
        calls = self._new_calls()
        return {"content": None, **delta, "tool_calls": calls} if delta or calls else None

    def _new_calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for index, (body, whole) in enumerate(self._bodies()):
            if index == len(self.calls):
                self.calls.append(Sent())
            sent = self.calls[index]
            if sent.name is None:
                name = re.search(r'"name"\s*:\s*"([^"]+)"', body)
                if name is None:
                    break  # calls are told in their order
                sent.name = name[1]
                calls.append(
                    {"id": call_id(), "type": "function", "index": index,
                     "function": {"name": sent.name}}
                )  # fmt: skip
            arguments = _arguments_of(body, whole)
            if arguments is not None and len(arguments) > len(sent.arguments):
                new, sent.arguments = arguments[len(sent.arguments) :], arguments
                calls.append({"index": index, "function": {"arguments": new}})
        return calls

    def _bodies(self) -> list[tuple[str, bool]]:
        """The text of each call so far, and whether it is whole."""
        bodies = []
        at = self.text.find(OPEN)
        while at >= 0:
            begin = at + len(OPEN)
            end = self.text.find(CLOSE, begin)
            if end < 0:
                rest = self.text[begin:]
                rest = rest[: len(rest) - held_back(rest, CLOSE)].strip()
                bodies.append((rest, _is_json(rest)))
                break
            bodies.append((self.text[begin:end].strip(), True))
            at = self.text.find(OPEN, end + len(CLOSE))
        return bodies


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _arguments_of(body: str, whole: bool) -> str | None:
    """The text of a call's arguments so far; of a whole call without the brace that ends it."""
    found = re.search(r'"arguments"\s*:\s*', body)
    if found is None:
        return None
    text = body[found.end() :]
    return text.rstrip().removesuffix("}").rstrip() if whole else text


def last_delta(delta: dict[str, Any], calls: Sequence[Sent]) -> dict[str, Any]:
    """The last delta of a stream, its arguments those of the last call that were not sent before.

    What else such a delta says is lost, as in the real server: content, the arguments that follow a
    name in it, and other calls. Mirrors
    `vllm/entrypoints/openai/chat_completion/serving.py:1572`
    `OpenAIServingChat._create_remaining_args_delta`.

    Args:
        delta: returned as it is if its first call says nothing of arguments, or there is none.
        calls: of the stream, at least one.
    """
    deltas = delta.get("tool_calls")
    newest = deltas[0]["function"].get("arguments") if deltas else None
    if not deltas or newest is None:
        return delta
    index, last = len(calls) - 1, calls[-1]
    before = last.arguments[: -len(newest)] if newest else last.arguments
    own: dict[str, Any] = next((call for call in deltas if call["index"] == index), {})
    name = own.get("function", {}).get("name")
    function = {"name": name, "arguments": last.expected.replace(before, "", 1)}
    call = {"id": own.get("id"), "type": own.get("type"), "index": index, "function": function}
    return {"tool_calls": [call]}


@dataclass(slots=True)
class NamedStream:
    """The pieces of one named tool's arguments: everything the model says."""

    name: str
    begun: bool = False

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """One delta per piece; the first one names the call."""
        call: dict[str, Any] = {"index": 0, "function": {"arguments": piece}}
        if not self.begun:
            self.begun = True
            function = {"name": self.name, "arguments": piece}
            call = {"id": call_id(), "type": "function", "index": 0, "function": function}
        return {"tool_calls": [call]}


@dataclass(slots=True)
class RequiredStream:
    """Pieces of a JSON array of `{"name", "parameters"}`, as `tool_choice="required"` forces it.

    Mirrors `vllm/tool_parsers/streaming.py:103` `extract_required_tool_call_streaming`, with what
    it does when a piece holds the end of one call and more: the first delta of a call filters its
    arguments with the braces that were open before the piece, so a piece of a whole array loses a
    brace at the end and keeps the bracket.
    """

    text: str = ""
    named: bool = False
    """Whether the call that is being written has been named."""

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What a piece adds to the message, None while nothing can be said."""
        before, self.text = self.text, self.text + piece
        calls = _objects(self.text)
        kept, closes = _inside(piece, before)
        if not calls or not (closes or _PARAMETERS.search(calls[-1])):
            self.named = False
            return None
        call: dict[str, Any] = {"index": len(calls) - 1}
        if self.named:
            call["function"] = {"name": None, "arguments": kept}
            return {"tool_calls": [call]} if kept else None
        if closes and not _PARAMETERS.search(calls[-1]):
            calls.pop()
        self.named = True
        begun = self.text.rpartition('"parameters":')[2].lstrip()
        arguments, _ = _inside(begun, before)
        function = {"name": _name_of(calls[-1]), "arguments": arguments}
        return {"tool_calls": [call | {"id": call_id(), "type": "function", "function": function}]}


_PARAMETERS = re.compile(r'"parameters"\s*:\s*\S')


def _inside(piece: str, before: str) -> tuple[str, bool]:
    """The characters of a piece inside of braces, up to a comma between two calls, and whether its
    last brace closes a call. As `vllm/tool_parsers/streaming.py:38` `filter_delta_text`."""
    depth = before.count("{") - before.count("}")
    kept, closes = "", False
    for character in piece:
        if character in "{}":
            depth += 1 if character == "{" else -1
            closes = depth == 0
        if depth:
            kept += character
        elif character == ",":
            break
    return kept, closes


def _objects(text: str) -> list[str]:
    """The objects of an array that is being written; the last one may lack its end."""
    found: list[str] = []
    depth, begin, at = 0, 0, 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"?|[{}]', text):
        at = match.end()
        if match[0] == "{":
            depth += 1
            if depth == 1:
                begin = match.start()
        elif match[0] == "}":
            depth -= 1
            if depth == 0:
                found.append(text[begin:at])
    return [*found, text[begin:]] if depth else found


def _name_of(call: str) -> str:
    found = re.search(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")', call)
    return json.loads(found[1]) if found else ""


def required_calls(text: str) -> list[ToolCall]:
    """The calls of a whole array; none of one that was cut."""
    try:
        found = json.loads(text)
        return [
            ToolCall(call["name"], json.dumps(call["parameters"], ensure_ascii=False))
            for call in found
        ]
    except (ValueError, KeyError, TypeError):
        return []
