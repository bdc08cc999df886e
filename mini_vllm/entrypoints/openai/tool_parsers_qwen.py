"""Calls of tools as Qwen3-Coder writes them: a function and its parameters in tags.

Promises: every delta is the real parser's. It says one kind of thing for each piece (text, a name,
"{", the parameters that are whole, "}"), so a call that comes in few pieces is sent in part, or not
at all. Mirrors `vllm/tool_parsers/qwen3coder_tool_parser.py:41` `Qwen3CoderToolParser`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mini_vllm.entrypoints.openai.tool_parsers import (
    CLOSE,
    OPEN,
    Sent,
    ToolCall,
    ToolParser,
    said_in,
)
from mini_vllm.entrypoints.openai.tool_schemas import coerced, properties_of, types_of

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_BLOCK = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|$)", re.DOTALL)
_CALL = re.compile(rf"{FUNCTION}(.*?)(?:{FUNCTION_END}|\Z)", re.DOTALL)
_PARAMETER = re.compile(f"{PARAMETER}(.*?)(?:{PARAMETER_END}|(?={PARAMETER})|$)", re.DOTALL)


def call_id() -> str:
    """A new id of a streamed call; one of a whole text is as everywhere."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class Qwen3CoderToolParser(ToolParser):
    """`qwen3_coder`: the two tags around a call must be tokens of the vocabulary.

    Raises:
        ValueError: they are not.
    """

    started: bool = False
    """Whether calls are read and text is not sent."""
    index: int = 0
    """The call that is being read."""
    next: Literal["name", "{", "parameters", "end"] = "name"
    """What a piece may say of it."""
    num_parameters: int = 0
    """Of the call, that were sent."""

    tags: ClassVar[tuple[str, ...]] = OPEN, CLOSE

    def __post_init__(self) -> None:
        if missing := [tag for tag in (OPEN, CLOSE) if tag not in self.vocab]:
            raise ValueError(
                "tool_call_parser='qwen3_coder': need a vocabulary with the tokens "
                f"{OPEN} and {CLOSE}, this one lacks {' and '.join(missing)}"
            )

    def extract_tool_calls(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Content and calls; neither the tags around a call nor end tags are needed."""
        if FUNCTION not in text:
            return text, []
        try:
            blocks = _BLOCK.findall(text) or [text]
            found = [self._call(body) for block in blocks for body in _CALL.findall(block)]
        except Exception:  # a parameter without a name, or a number beyond every float
            return text, []
        calls = [call for call in found if call is not None]
        begin = text.find(OPEN) if OPEN in text else text.find(FUNCTION)
        return (said_in(text[:begin]), calls) if calls else (text, [])

    def _call(self, body: str) -> ToolCall | None:
        """What stands behind `<function=`; None without the end of the name."""
        name, end, rest = body.partition(">")
        if not end:
            return None
        arguments = {}
        for parameter in _PARAMETER.findall(rest):
            at = parameter.index(">")
            key, value = parameter[:at], parameter[at + 1 :]
            arguments[key] = self._value(name, key, value.removeprefix("\n").removesuffix("\n"))
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _value(self, name: str, key: str, text: str) -> Any:
        return coerced(text, types_of(properties_of(self.tools, name).get(key, {})))

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What a piece adds to the message, at most one kind of thing.

        Raises:
            OverflowError: a number beyond every float, as upstream has it.
        """
        self.text += piece
        if not piece:
            return self._without_text(token_ids)
        if self.next == "end" and self.text.count(CLOSE) > self.index:
            self.index, self.next, self.num_parameters = self.index + 1, "name", 0
            self.started = self.index < self.text.count(OPEN)
            return None  # the piece is used up
        if not self.started:
            return self._content(piece, token_ids)
        begins = [found.start() for found in re.finditer(OPEN, self.text)]
        if self.index >= len(begins):
            return None
        call = self.text[begins[self.index] :]
        if CLOSE in call:
            call = call[: call.index(CLOSE) + len(CLOSE)]
        return self._of_call(call)

    def _without_text(self, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """An empty content says that tokens came, at the end or while text is held back."""
        if not token_ids or self.vocab[CLOSE] in token_ids:
            return None
        if self.calls and re.search(f"{OPEN}.*?{CLOSE}", self.text, re.DOTALL):
            whole = self.text.count(OPEN) == self.text.count(CLOSE)
            return {"content": ""} if whole else None
        return {"content": ""} if self.text and not self.started else None

    def _content(self, piece: str, token_ids: Sequence[int]) -> dict[str, Any] | None:
        before, tag, _ = piece.partition(OPEN)
        if tag or self.vocab[OPEN] in token_ids:
            self.started = True
            return {"content": before} if tag and before else None
        if not piece.strip() and self.text.rstrip().endswith(CLOSE):
            return None
        return {"content": piece}

    def _of_call(self, call: str) -> dict[str, Any] | None:
        """What can be said next of the text of a call."""
        if self.next == "name":
            found = re.search(rf"{FUNCTION}([^>]*)>", call)
            if found is None:
                return None
            self.next = "{"
            self.calls.append(Sent(found[1], parsed="{}"))
            function = {"name": found[1], "arguments": ""}
            header = {
                "id": call_id(),
                "type": "function",
                "index": self.index,
                "function": function,
            }
            return {"tool_calls": [header]}
        if self.next == "{":
            self.next = "parameters"
            return self._arguments("{")
        if self.next == "end":
            return None
        if new := "".join(self._new_parameters(call)):
            return self._arguments(new)
        if FUNCTION_END not in call:
            return None
        self.next = "end"
        found = _CALL.search(call)
        try:
            whole = self._call(found[1]) if found else None
        except ValueError:  # a parameter without a name
            whole = None
        if whole:
            self.calls[-1].parsed = whole.arguments
        return self._arguments("}")

    def _arguments(self, arguments: str) -> dict[str, Any]:
        self.calls[-1].arguments += arguments
        return {"tool_calls": [{"index": self.index, "function": {"arguments": arguments}}]}

    def _new_parameters(self, call: str) -> Iterator[str]:
        """JSON of each parameter that is whole and was not sent."""
        begins = [found.end() for found in re.finditer(PARAMETER, call)]
        for begin in begins[self.num_parameters :]:
            key, end, value = call[begin:].partition(">")
            value = value.removeprefix("\n")
            stop = value.find(PARAMETER_END)
            if stop < 0:  # the next tag ends it, which need not be its own
                tags = [at for tag in (PARAMETER, FUNCTION_END) if (at := value.find(tag)) >= 0]
                stop = min(tags) if tags else value.find(CLOSE)
            if not end or stop < 0:
                return
            found = self._value(self.calls[-1].name or "", key, value[:stop].removesuffix("\n"))
            written = json.dumps(found, ensure_ascii=False)
            yield f'{", " if self.num_parameters else ""}"{key}": {written}'
            self.num_parameters += 1
