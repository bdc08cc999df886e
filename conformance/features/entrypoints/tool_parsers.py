"""Record what the real v0.22.1 parsers of tool calls say to texts in pieces.

The Hermes parser and the two forms of forced calls; each text whole, cut once at every place, one
character at a time, and in pieces of random lengths.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"kind": "hermes" | "required" | "named", "text", "whole": [content, calls], "cuts": '
    "[[lengths of the pieces, deltas]]}`. A delta is what the client is sent for a piece, None for "
    'nothing; ids are left out but for `"id": true`. `whole` is what the text is parsed to at once.'
)

_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
_NESTED = (
    '<tool_call>{"name": "f", "arguments": {"a": {"b": [1, {"c": "}"}]}, "d": "<tool"}}</tool_call>'
)
HERMES = (
    "",
    "No call at all.",
    _CALL,
    f"Let me look. {_CALL}",
    f"{_CALL}\n{_CALL}",
    f"{_CALL} Done.",
    _NESTED,
    "a <tool> b <tool_calls c",
    "a<<tool_call>",
    "<tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": null}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
    "<tool_call>{name: oops}</tool_call>",
    _CALL[:40],
    _CALL.removesuffix("\n</tool_call>"),
    '<tool_call>{"name": "héllo", "arguments": {"ö": "日本"}}</tool_call>',
    '<tool_call>  {"name" : "f" , "arguments" : { "x" : 1 } }  </tool_call>tail',
    f"<tool_call>broken</tool_call>{_CALL}",
    f"{_CALL}<tool_call>broken</tool_call>",
    "text </tool_call> text",
    f"{_CALL}{_CALL[:30]}",
    "<tool_call><tool_call>",
    "If a <tool",
    f"A{_CALL}B{_CALL}C",
    '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
)
REQUIRED = (
    "[]",
    "",
    "[{",
    '[{"name": "f", "parameters": {}}]',
    '[{"name": "f", "parameters": {"x": 1}}]',
    '[{"name": "f", "parameters": {"x": {"y": [1, 2]}}}, '
    '{"name": "g", "parameters": {"z": "a, b"}}]',
    '[{"name": "f", "parameters": {"x": 1}},{"name": "f", "parameters": {"x": 2}}]',
    '[{"name": "long_name", "parameters": {"city": "Par',
    '[{"name": "f"',
)
NAMED = ("", '{"city": "Oslo"}', "{}", '{"city": "Os')


def cut(text: str, rng: random.Random) -> Iterator[list[str]]:
    """The ways that one text is cut."""
    yield [text]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    yield list(text)
    for _ in range(12):
        pieces, rest = [], text
        while rest:
            length = rng.randint(1, 9)
            pieces.append(rest[:length])
            rest = rest[length:]
        yield pieces


def nameless(delta: Any) -> Any:
    """A delta as an object, its ids only said to be there."""
    if delta is None:
        return None
    found = json.loads(delta.model_dump_json(exclude_unset=True))
    for call in found.get("tool_calls") or ():
        if call.get("id") is not None:
            call["id"] = True
    return found


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionNamedFunction,
        ChatCompletionNamedToolChoiceParam,
    )
    from vllm.parser.abstract_parser import _WrappedParser
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    class Parser(_WrappedParser):
        tool_parser_cls = Hermes2ProToolParser

    tokenizer = SimpleNamespace(get_vocab=dict, encode=lambda text: list(text.encode()))
    named = ChatCompletionNamedToolChoiceParam(function=ChatCompletionNamedFunction(name="f"))
    rng = random.Random(16)
    for kind, texts, choice in (
        ("hermes", HERMES, "auto"), ("required", REQUIRED, "required"), ("named", NAMED, named),
    ):  # fmt: skip
        for text in texts:
            request: Any = SimpleNamespace(tool_choice=choice, tools=[])
            cuts = []
            for pieces in cut(text, rng):
                parser = Parser(tokenizer, None)
                deltas = [
                    nameless(parser.parse_delta(p, list(p.encode()), request, [1])) for p in pieces
                ]
                cuts.append([[len(piece) for piece in pieces], deltas])
            whole: Any = None
            if kind == "hermes":
                found = Parser(tokenizer, None).extract_tool_calls(text, request)
                calls = [[c.function.name, c.function.arguments] for c in found.tool_calls]
                whole = [found.content, calls]
            yield {"kind": kind, "text": text, "whole": whole, "cuts": cuts}
