"""Calls of tools as GLM 4.5 and 4.7 write them: keys and values in tags, types from the schema.

Promises: every delta is the real parser's. A value that is not a string is sent as it is written,
and compared by length with its JSON when its end tag comes, so arguments can depend on the cut.
Mirrors `vllm/tool_parsers/glm4_moe_tool_parser.py:50` `Glm4MoeModelToolParser`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mini_vllm.entrypoints.openai.tool_parsers import (
    CLOSE,
    OPEN,
    Sent,
    ToolCall,
    ToolParser,
    call_id,
    held_back,
    said_in,
)
from mini_vllm.entrypoints.openai.tool_schemas import properties_of, types_of

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_REGION = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)
_KEY = re.compile(f"{KEY}(.*?){KEY_END}", re.DOTALL)
_PAIR = re.compile(rf"{KEY}(.*?){KEY_END}\s*{VALUE}(.*?){VALUE_END}", re.DOTALL)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _deserialized(text: str) -> Any:
    """A value of JSON, or else of Python, or else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(slots=True)
class Glm4MoeModelToolParser(ToolParser):
    """`glm45`: a name, a line end, and pairs of tags."""

    sent_to: int = 0
    """Where the text begins of which nothing was sent as content."""

    supports_required_and_named: ClassVar[bool] = False
    tags: ClassVar[tuple[str, ...]] = OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END
    detail: ClassVar[re.Pattern[str]] = re.compile(rf"{OPEN}([^\n]*)\n(.*){CLOSE}", re.DOTALL)
    """A whole call: its name, and its pairs."""

    def extract_tool_calls(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Content and calls; a call without its end tag is none, and a broken one is left out.

        A value that JSON cannot hold, such as Python's `...`, makes all of it content.
        """
        try:
            found = [self.detail.search(region) for region in _REGION.findall(text)]
            calls = [self._call(each) for each in found if each]
        except Exception:  # whatever two readers of literals raise
            return text, []
        if not calls:
            return text, []
        return said_in(text[: text.find(OPEN)]), calls

    def _call(self, found: re.Match[str]) -> ToolCall:
        name, pairs = found[1].strip(), _PAIR.findall(found[2] or "")
        arguments = {key.strip(): self._value(name, key.strip(), value) for key, value in pairs}
        return ToolCall(name, _dumped(arguments))

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """The same for a piece; without tools to call, the piece is content.

        Raises:
            TypeError: a value that JSON cannot hold, as upstream has it.
        """
        if not self.tools or self.tool_choice == "none":
            return {"content": piece} if piece else None
        self.text += piece
        content, calls = self._new_content(), self._new_calls()
        return {"content": content or None, "tool_calls": calls} if content or calls else None

    def _new_content(self) -> str:
        """Text outside of calls, that between and behind them too."""
        content, at = "", self.sent_to
        while at < len(self.text):
            begin = self.text.find(OPEN, at)
            if begin < 0:
                end = len(self.text) - held_back(self.text[at:], OPEN)
                content, at = content + self.text[at:end], end
                break
            content += self.text[at:begin]
            end = self.text.find(CLOSE, begin)
            if end < 0:
                at = begin
                break
            at = end + len(CLOSE)
        self.sent_to = at
        return content

    def _new_calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        for index, (body, whole) in enumerate(self._bodies()):
            if index == len(self.calls):
                self.calls.append(Sent())
            sent = self.calls[index]
            name = _name_of(body)
            if name is None:
                break
            if sent.name is None:
                sent.name = name
                function = {"name": name, "arguments": ""}
                calls.append({"id": call_id(), "type": "function", "index": index,
                              "function": function})  # fmt: skip
            arguments = self._arguments_so_far(name, body, whole)
            if len(arguments) > len(sent.arguments):
                new, sent.arguments = arguments[len(sent.arguments) :], arguments
                calls.append({"index": index, "function": {"arguments": new}})
        return calls

    def _bodies(self) -> list[tuple[str, bool]]:
        """The text of each call so far, and whether its end tag has come."""
        bodies = []
        at = self.text.find(OPEN)
        while at >= 0:
            begin = at + len(OPEN)
            end = self.text.find(CLOSE, begin)
            if end < 0:
                bodies.append(
                    (self.text[begin : len(self.text) - held_back(self.text, CLOSE)], False)
                )
                break
            bodies.append((self.text[begin:end], True))
            at = self.text.find(OPEN, end)
        return bodies

    def _arguments_so_far(self, name: str, body: str, whole: bool) -> str:
        """JSON of the pairs, of the last value as much as is there; closed once the call is."""
        parts = []
        for key, value in _PAIR.findall(body):
            key = key.strip()
            parts.append(f"{_dumped(key)}: {_dumped(self._value(name, key, value))}")
        begin = body.rfind(VALUE)
        keys = _KEY.findall(body[:begin]) if begin >= 0 else []
        if keys and body.rfind(VALUE_END) < begin:  # the last value lacks its end
            key, value = keys[-1].strip(), body[begin + len(VALUE) :]
            value = value[: len(value) - held_back(value, VALUE_END)]
            if whole:
                written = _dumped(self._value(name, key, value))
            elif self._is_string(name, key):
                written = _dumped(value)[:-1]
            else:
                written = value
            parts.append(f"{_dumped(key)}: {written}")
        if not parts:
            return "{}" if whole else ""
        return "{" + ", ".join(parts) + ("}" if whole else "")

    def _value(self, name: str, key: str, text: str) -> Any:
        """What a value is: of a string every character counts."""
        return text if self._is_string(name, key) else _deserialized(text.strip())

    def _is_string(self, name: str, key: str) -> bool:
        schema = properties_of(self.tools, name).get(key)
        return schema is not None and types_of(schema) - {"null"} == {"string"}


def _name_of(body: str) -> str | None:
    """What stands before the first line end or key, None while neither is there."""
    found = re.match(rf"(.*?)(?:\n|{KEY})", body, re.DOTALL)
    return (found[1].strip() or None) if found else None


@dataclass(slots=True)
class Glm47MoeModelToolParser(Glm4MoeModelToolParser):
    """`glm47`: a whole call needs neither line end nor pairs.

    In a stream a call without both is never named, as in the real parser. Mirrors
    `vllm/tool_parsers/glm47_moe_tool_parser.py:25` `Glm47MoeModelToolParser`.
    """

    detail: ClassVar[re.Pattern[str]] = re.compile(
        rf"{OPEN}\s*(\S+?)\s*({KEY}.*)?{CLOSE}", re.DOTALL
    )
