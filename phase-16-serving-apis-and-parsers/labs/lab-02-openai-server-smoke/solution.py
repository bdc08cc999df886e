"""Lab 16-02: what a server's answer is made of, and which layer made it.

One request passes a web server, checks, a template, the engine, a detokenizer, a parser and a
writer of events; only the engine infers. What holds:

- V1: the bytes of a stream may be cut anywhere, inside a character, too; the events are the same.
- V2: what a client puts together from a stream is what the same request gets at once, where the
  server says the same. Where it does not, the client has what was streamed, not what it hoped for.
- V3: after a 200 an error is an event, and it is not an answer.
- V4: a request is refused by the first layer that can: its body, its model, its tools, its length,
  its sampling. Nothing later is looked at.

Sources: `vllm/entrypoints/openai/chat_completion/serving.py:400`
`OpenAIServingChat.chat_completion_stream_generator`, `vllm/entrypoints/serve/render/serving.py:185`
`OpenAIServingRender.render_chat`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"

LAYERS = ("http", "validation", "template", "engine", "detokenizer", "tool_parser", "sse")
"""What an artifact may belong to (given)."""

ARTIFACTS = (
    "405 for a GET",
    "400 for temperature=-1",
    "404 for an unknown model",
    "the words 'user:' in the prompt",
    "the tools' schemas in the prompt",
    "completion_tokens",
    "finish_reason length",
    "logprobs",
    "U+FFFD in content",
    "text withheld before a stop string",
    "the name of a call",
    "content without <tool_call>",
    "data: [DONE]",
    "the chunk with role and an empty content",
    "an error after the 200",
)
"""What a client can see (given)."""


@dataclass(slots=True)
class Reply:
    """What a client has at the end of a stream (given).

    `tool_calls` holds `{"id", "name", "arguments"}`, the last a JSON string as it came.
    """

    role: str | None = None
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class StreamFailed(ValueError):
    """An error event: `error` is its object, `reply` what had come before it (given)."""

    def __init__(self, error: dict[str, Any], reply: Reply) -> None:
        super().__init__(str(error.get("message")))
        self.error, self.reply = error, reply


@dataclass(frozen=True, slots=True)
class Server:
    """What of a server decides whether it takes a chat (given)."""

    models: Sequence[str]
    max_model_len: int
    prompt_tokens: Callable[[dict[str, Any]], int]
    """Tokens of a request's prompt, template and all."""
    auto_tools: bool = True
    """`--enable-auto-tool-choice` and a tool parser."""


def parse_sse(chunks: Iterable[bytes]) -> list[dict[str, Any] | str]:
    """The events of a stream in their order: objects, and "[DONE]" as the last.

    An event is the `data:` lines before an empty line, joined by a line end; one space after the
    colon is not part of them. Other lines are left out. A line ends with \\n or \\r\\n and
    with nothing else: a lone \\r and the line separators of Unicode belong to the line.

    A trace: b'data: {"a": "\\xc3' and b'\\xa9"}\\n\\ndata: [DONE]\\n\\n' give an object, whose a is
    "\u00e9", and "[DONE]".

    Raises:
        ValueError: an event that is no JSON object, an end without "[DONE]", or an event after it.
    """
    events: list[dict[str, Any] | str] = []
    lines: list[str] = []
    for raw in b"".join(chunks).split(b"\n"):
        line = raw.removesuffix(b"\r").decode()
        if line.startswith("data:"):
            lines.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and lines:
            data, lines = "\n".join(lines), []
            if DONE in events:
                raise ValueError(f"an event after {DONE}: {data!r}")
            event = DONE if data == DONE else json.loads(data)
            if data != DONE and not isinstance(event, dict):
                raise ValueError(f"an event that is no object: {data!r}")
            events.append(event)
    if DONE not in events:
        raise ValueError(f"the stream ended without {DONE}")
    return events


def _merge_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Put one delta of a call into the calls."""
    while len(calls) <= delta["index"]:
        calls.append({"id": None, "name": None, "arguments": ""})
    call, function = calls[delta["index"]], delta.get("function") or {}
    call["id"] = call["id"] or delta.get("id")
    call["name"] = call["name"] or function.get("name")
    call["arguments"] += function.get("arguments") or ""


def assemble(events: Iterable[dict[str, Any] | str], choice: int = 0) -> Reply:
    """What the events of a chat say together about one of its choices.

    Content, reasoning and a call's arguments are joined; a call's pieces are told apart by their
    `index`, its id and name are said once; the last finish reason and the last usage count. A field
    that is missing or null says nothing.

    Raises:
        StreamFailed: one of the events is an error.
    """
    reply = Reply()
    for event in events:
        if isinstance(event, str):
            continue
        if "error" in event:
            raise StreamFailed(event["error"], reply)
        reply.usage = event.get("usage") or reply.usage
        for part in event.get("choices") or ():
            if part["index"] != choice:
                continue
            delta = part.get("delta") or {}
            reply.role = delta.get("role") or reply.role
            reply.content += delta.get("content") or ""
            reply.reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                _merge_call(reply.tool_calls, call)
            reply.finish_reason = part.get("finish_reason") or reply.finish_reason
    return reply


def _tools_refused(request: dict[str, Any]) -> bool:
    """Whether tools and their choice do not fit together, by the body alone."""
    tools, choice = request.get("tools"), request.get("tool_choice")
    if tools is not None and not tools:
        return True
    if tools is None:
        return choice not in (None, "none")
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict):
        return (choice.get("function") or {}).get("name") not in names
    return choice not in (None, "none", "auto", "required")


def predict_error(request: dict[str, Any], server: Server) -> tuple[int, str | None] | None:
    """Status and `param` of the error with which a chat is refused; None if it is served.

    Only these rules are asked for, and the first that is broken decides; null is as left out:

    - body: `messages` are there; `tools` are not an empty list; a `tool_choice` other than "none"
      has tools, is "auto", "required" or an object, and an object names one of them: 400, no param.
      `stream_options` want `stream`: 400, param `stream_options`.
    - model: one of the server's, if named: 404, `model`.
    - tools: beside tools any choice but "none", one left out too, wants the server's flags: 400, no
      param.
    - length: `max_tokens` is at most the context: 400, `max_tokens`. Prompt and `max_tokens` are at
      most the context together: 400, `input_tokens`.
    - sampling: `temperature` is at least 0, `top_p` above 0 and at most 1, `max_tokens` at least 1,
      in this order: 400, each with its own name.
    """
    limit, choice = request.get("max_tokens"), request.get("tool_choice")
    if "messages" not in request or _tools_refused(request):
        return 400, None
    if request.get("stream_options") and not request.get("stream"):
        return 400, "stream_options"
    if request.get("model") is not None and request["model"] not in server.models:
        return 404, "model"
    if not server.auto_tools and request.get("tools") and choice != "none":
        return 400, None
    if limit is not None and limit > server.max_model_len:
        return 400, "max_tokens"
    if server.prompt_tokens(request) + (limit or 0) > server.max_model_len:
        return 400, "input_tokens"
    temperature, top_p = request.get("temperature"), request.get("top_p")
    if temperature is not None and temperature < 0:
        return 400, "temperature"
    if top_p is not None and not 0 < top_p <= 1:
        return 400, "top_p"
    if limit is not None and limit < 1:
        return 400, "max_tokens"
    return None


_OWNED = {
    "http": 1, "validation": 2, "template": 2, "engine": 3, "detokenizer": 2, "tool_parser": 2,
    "sse": 3,
}  # fmt: skip
"""How many of the artifacts each layer has, in their order."""


def owner(artifact: str) -> str:
    """The layer, one of `LAYERS`, that makes one of `ARTIFACTS`.

    Raises:
        ValueError: no such artifact.
    """
    if artifact not in ARTIFACTS:
        raise ValueError(f"artifact={artifact!r}: need one of {', '.join(ARTIFACTS)}")
    owners = [layer for layer, count in _OWNED.items() for _ in range(count)]
    return owners[ARTIFACTS.index(artifact)]
