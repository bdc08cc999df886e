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
    raise NotImplementedError


def assemble(events: Iterable[dict[str, Any] | str], choice: int = 0) -> Reply:
    """What the events of a chat say together about one of its choices.

    Content, reasoning and a call's arguments are joined; a call's pieces are told apart by their
    `index`, its id and name are said once; the last finish reason and the last usage count. A field
    that is missing or null says nothing.

    Raises:
        StreamFailed: one of the events is an error.
    """
    raise NotImplementedError


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
    raise NotImplementedError


def owner(artifact: str) -> str:
    """The layer, one of `LAYERS`, that makes one of `ARTIFACTS`.

    Raises:
        ValueError: no such artifact.
    """
    raise NotImplementedError
