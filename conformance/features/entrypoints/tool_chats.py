"""Record what the real v0.22.1 chat server makes of calls: chunks, finish reasons, whole messages.

Its two generators run on texts in pieces in the place of an engine's, with each family's parser and
each `tool_choice`. The last piece, which has the finish reason, is empty, or the text's own end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from conformance.features.entrypoints import tool_families
from conformance.features.entrypoints.tool_families import (
    EOS,
    FORMS,
    SAME,
    TOOLS,
    VOCABULARY,
    form_of,
    ids_of,
    nameless,
)

Case = dict[str, Any]

ABOUT = (
    '`{"text", "asked", "reason", "whole": a choice, "cuts": [[lengths of the pieces, '
    "choices of the chunks, blocks]]}`. `asked`: what the request says of calls, beside the tools "
    "of `tool_families.py`. A piece comes with its tokens, one of length 0 with the end's. Blocks: "
    "the events of `/v1/messages`, for the choice auto. Ids keep their form alone, errors no words."
)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASKED: tuple[dict[str, Any], ...] = (
    {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": NAMED},
    {"tool_choice": "none"}, {"tool_choice": "auto", "parallel_tool_calls": False},
)  # fmt: skip
JSON = ('[{"name": "now", "parameters": {}}]', '[{"name": "now", "par', '{"city": "Oslo"}', '{"ci')
"""What a constraint lets a model say: the first two for "required", the others for a named tool."""

RAISING = {
    "glm45": FORMS["glm45"]("f", x="..."), "glm47": FORMS["glm47"]("f", x="..."),
    "qwen3_coder": FORMS["qwen3_coder"]("note", ratio="1e999"),
}  # fmt: skip
"""A call in which a family's parser raises an error."""


def texts_of(family: str) -> list[str]:
    """What a model of this family says."""
    form = FORMS[family]
    weather, note, now = (form(name, **given) for name, given in SAME.items())
    return [
        "No call.", f"Let me look. {weather}", weather + note + now, weather + now, now,
        f" {now}", weather[: len(weather) * 2 // 3], weather[: weather.find("O") + 2],
        f"{weather} and {weather[:-6]}", "A <tool_call><function=f", *JSON,
        *([RAISING[family]] if family in RAISING else []),
    ]  # fmt: skip


def possible(text: str, asked: dict[str, Any]) -> bool:
    """Whether a model that is constrained where a call is forced can say this."""
    forced = {"auto": None, "none": None, "required": JSON[:2]}
    allowed = JSON[2:] if asked["tool_choice"] == NAMED else forced[asked["tool_choice"]]
    return allowed is None or text in allowed


def cuts_of(text: str) -> Iterator[list[int]]:
    """Lengths of pieces: the whole, tokens, runs of tokens; the last one empty or not."""
    tokens = tool_families.token_lengths(text)
    for size in (len(tokens), 1, 4, 20):
        lengths = tool_families.runs(tokens, [size] * len(tokens))
        yield lengths
        yield [*lengths, 0]


def pieces_of(text: str, lengths: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Each piece with its tokens."""
    pieces = []
    for length in lengths:
        piece, text = text[:length], text[length:]
        pieces.append((piece, ids_of(piece) or [EOS]))
    return pieces


def server_of(family: str) -> Any:
    """The real chat server's own object, without an engine."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.parser.parser_manager import ParserManager

    server: Any = object.__new__(OpenAIServingChat)
    server.__dict__ |= {
        "response_role": "assistant", "use_harmony": False, "enable_auto_tools": True,
        "tool_call_id_type": "random", "enable_force_include_usage": False,
        "enable_log_outputs": False, "request_logger": None, "system_fingerprint": None,
        "enable_prompt_tokens_details": False, "reasoning_parser_cls": None,
        "tool_parser": ParserManager.get_tool_parser(family, True),
        "parser_cls": ParserManager.get_parser(family, None, True),
    }  # fmt: skip
    return server


async def outputs(pieces: Sequence[tuple[str, list[int]]], reason: str) -> AsyncIterator[Any]:
    """What an engine would give."""
    from vllm.outputs import CompletionOutput, RequestOutput

    for number, (piece, ids) in enumerate(pieces, 1):
        last = number == len(pieces)
        output = CompletionOutput(0, piece, ids, None, None, finish_reason=reason if last else None)
        yield RequestOutput("r", "p", [EOS], None, [output], last)


async def _streamed(server: Any, request: Any, pieces: Any, reason: str) -> list[str]:
    """The events of a stream without the first, which says who speaks."""
    tokenizer = SimpleNamespace(get_vocab=lambda: VOCABULARY)
    events = server.chat_completion_stream_generator(
        request, outputs(pieces, reason), "r", "m", [], tokenizer, SimpleNamespace()
    )
    return [event async for event in events][1:]


def choices_of(events: Sequence[str]) -> list[Any]:
    """The choice of each event, or its error without words; not `[DONE]`."""
    found = []
    for event in events[:-1]:
        data = json.loads(event.removeprefix("data: "))
        if "error" in data:
            found.append({**data["error"], "message": ""})
        else:
            (choice,) = data["choices"]
            nameless(choice["delta"])
            found.append(choice)
    return found


async def _blocks(events: Sequence[str]) -> list[Any]:
    """What `/v1/messages` makes of a chat's events."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    async def chat() -> AsyncIterator[str]:
        for event in [events[0], *events]:  # the first only begins the message
            yield event

    server: Any = object.__new__(AnthropicServingMessages)
    return blocks_of([event async for event in server.message_stream_converter(chat())][1:])


def blocks_of(events: Sequence[str]) -> list[Any]:
    """The data of each event, ids by their form, errors without words."""
    found = [json.loads(event.partition("data: ")[2]) for event in events]
    for event in found:
        if "error" in event:
            event["error"]["message"] = ""
        block = event.get("content_block") or {}
        if "id" in block:
            block["id"] = form_of(block["id"])
    return found


async def _whole(server: Any, request: Any, text: str, reason: str) -> Any:
    tokenizer = SimpleNamespace(get_vocab=lambda: VOCABULARY)
    answer = await server.chat_completion_full_generator(
        request, outputs([(text, [EOS])], reason), "r", "m", [], tokenizer, SimpleNamespace()
    )
    choice = json.loads(answer.model_dump_json())["choices"][0]
    nameless(choice["message"])
    return choice


def cases(family: str) -> Iterator[Case]:
    """The cases of one family; the same every time."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    server = server_of(family)
    for text in texts_of(family):
        reason = "length" if len(text) % 3 == 0 else "stop"
        for asked in ASKED:
            if server.tool_parser.supports_required_and_named and not possible(text, asked):
                continue
            body = {"messages": [], "model": "m", "tools": TOOLS, "stream": True, **asked}
            whole = _whole(server, ChatCompletionRequest(**body), text, reason)
            cuts = []
            for lengths in cuts_of(text):
                request = ChatCompletionRequest(**body)
                pieces = pieces_of(text, lengths)
                events = asyncio.run(_streamed(server, request, pieces, reason))
                blocks = asyncio.run(_blocks(events)) if asked == ASKED[0] else None
                cuts.append([lengths, choices_of(events), blocks])
            yield {
                "text": text, "asked": asked, "reason": reason, "whole": asyncio.run(whole),
                "cuts": cuts,
            }  # fmt: skip
