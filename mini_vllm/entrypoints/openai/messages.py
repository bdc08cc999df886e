"""`/v1/messages`: Anthropic's messages become a chat, and the chat's answer a message of blocks.

Promises: nothing is generated here: each request is a `ChatCompletionRequest`, each answer and each
chunk of a stream one of `chat.py`, in the other format. Not served, and refused by name: a
server that parses reasoning, pictures, and transfers of KV. Mirrors
`vllm/entrypoints/anthropic/serving.py:56` `AnthropicServingMessages`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mini_vllm.entrypoints.openai.chat import Chat, ChatServing
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.openapi import NUMBER, OBJECT, TEXT, answer
from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest, NamedTool
from mini_vllm.entrypoints.openai.protocol_messages import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
)
from mini_vllm.entrypoints.openai.serving import Served, sse

MESSAGE = answer(
    id=TEXT, type=TEXT, role=TEXT, model=TEXT, content={"type": "array", "items": OBJECT},
    usage=answer(input_tokens=NUMBER, output_tokens=NUMBER),
)  # fmt: skip
COUNTED = answer(
    input_tokens=NUMBER, context_management=answer(original_input_tokens=NUMBER)
)  # fmt: skip
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""A text of `stop_sequences` ends a turn as the model does: `stop_sequence` is never named."""
BILLING = "x-anthropic-billing-header"
"""How a block of `system` begins that differs per request: it would keep the prefix cache cold."""


class MessagesError(APIError):
    """An error in Anthropic's shape; one that FastAPI's checks find has OpenAI's."""

    def __init__(self, message: str, kind: str = "internal_error", status: int = 500) -> None:
        super().__init__(message, kind, status)

    def body(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


@contextmanager
def _as_theirs() -> Iterator[None]:
    """Errors of the chat as this route tells them: 404 stays, all else is the server's own error,
    `vllm/entrypoints/anthropic/api_router.py:60` `create_messages`."""
    try:
        yield
    except MessagesError:
        raise
    except APIError as error:
        if error.status == 404:
            raise MessagesError(error.message, error.kind, error.status) from None
        raise MessagesError(error.message) from None
    except ValueError as error:
        raise MessagesError(str(error)) from None


class MessagesServing:
    """Answers of one server, made of its chats."""

    def __init__(self, served: Served, chats: ChatServing) -> None:
        self.served, self.chats = served, chats

    def begin(self, request: MessagesRequest, header: str | None) -> _Messages:
        """Check a request; nothing has reached the engine when it is refused.

        Raises:
            MessagesError: it is refused.
        """
        with _as_theirs():
            self._check_served(request)
            chat = chat_of(request)
            offered = [tool.function.name for tool in chat.tools or ()]
            if chat.named_tool is not None and chat.named_tool not in offered:
                raise MessagesError(f"tool_choice: need one of the tools, {offered}")
            return _Messages(request, self.chats.begin(chat, header))

    def _check_served(self, request: MessagesRequest) -> None:
        """Refuse what was not compared with vLLM's answers.

        Raises:
            MessagesError: 501, as there where a model has no such route.
        """
        wrong = None
        if self.served.reasoning_tags is not None:
            wrong = "/v1/messages: need a server without --reasoning-parser"
        elif self.served.harmony is not None:
            wrong = "/v1/messages: need a server that does not read harmony, gpt-oss's format"
        elif self.served.engine.about.image is not None and _pictures(request):
            wrong = "messages: content of type 'image': need text"
        elif request.kv_transfer_params is not None:
            wrong = "kv_transfer_params: not available"
        if wrong is not None:
            raise MessagesError(wrong, "NotImplementedError", 501)

    def count(self, request: CountTokensRequest) -> dict[str, Any]:
        """How many tokens the prompt has.

        Raises:
            MessagesError: it is refused, or does not fit.
        """
        with _as_theirs():
            self.served.adapter_of(request.model)
            chat = chat_of(request)
            _, text = self.chats.prompt_of(chat)
            count = len(self.served.fit(text, chat))
        return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


@dataclass(slots=True)
class _Messages:
    """One request that was accepted."""

    request: MessagesRequest
    chat: Chat

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            MessagesError: the request ended in an error.
        """
        with _as_theirs():
            return message_of(await self.chat.answer())

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The events of the stream."""
        blocks = BlockEvents()
        async with aclosing(self.chat.chunks()) as chunks:
            async for chunk in chunks:
                for event in blocks.feed(chunk):
                    yield named(event)
                    if event["type"] == "error":  # the last one there, without `message_stop`
                        return


def named(event: Mapping[str, Any]) -> str:
    """One server-sent event, its type before its data."""
    return f"event: {event['type']}\n{sse(event)}"


# ---------------------------------------------------------------------- request


def chat_of(request: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that is asked for.

    Raises:
        MessagesError: the chat cannot be asked for.
    """
    body: dict[str, Any] = {
        "model": request.model, "messages": messages_of(request.system, request.messages),
        "chat_template_kwargs": request.chat_template_kwargs,
    }  # fmt: skip
    if isinstance(request, MessagesRequest):
        body |= {
            "max_tokens": request.max_tokens, "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences, "temperature": request.temperature,
            "top_p": request.top_p, "top_k": request.top_k,
        }  # fmt: skip
        if request.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    try:
        chat = ChatCompletionRequest.model_validate(body)
        # Set after the check, as there: a choice without tools is not refused
        chat.tool_choice = _choice_of(request.tool_choice)
        if request.tools is not None:
            checked = {"messages": [], "tools": [_tool_of(tool) for tool in request.tools]}
            chat.tools = (
                ChatCompletionRequest.model_validate(checked).tools if request.tools else []
            )
            chat.tool_choice = chat.tool_choice or "auto"
    except ValidationError as error:
        raise MessagesError(str(error)) from None
    return chat


def _choice_of(choice: AnthropicToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        return NamedTool.model_validate({"function": {"name": choice.name}})
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _tool_of(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def messages_of(
    system: str | Sequence[Block] | None, messages: Sequence[AnthropicMessage]
) -> list[dict[str, Any]]:
    """Messages of a chat; a tool's answer becomes one of its own, before the rest of its turn."""
    found: list[dict[str, Any]] = []
    if isinstance(system, str) and system:
        found.append({"role": "system", "content": system})
    elif system:
        texts = (block.text for block in system if block.type == "text" and block.text)
        system_text = "".join(text for text in texts if not text.startswith(BILLING))
        found.append({"role": "system", "content": system_text})
    for message in messages:
        if isinstance(message.content, str):
            found.append({"role": message.role, "content": message.content})
            continue
        made = _message_of(message.role, message.content, found)
        if message.role == "assistant" or "content" in made:
            found.append(made)
    return found


def _message_of(role: str, blocks: Sequence[Block], found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that blocks make; answers of tools are added to `found`."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        if block.type == "text" and block.text:
            parts.append({"type": "text", "text": block.text})
        elif block.type == "image" and block.source:
            parts.append(_picture(block.source))
        elif block.type == "thinking" and block.thinking is not None:
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
            made = {"id": block.id or f"call_{uuid.uuid4().hex[:10]}", "type": "function"}
            calls.append(made | {"function": function})
        elif block.type == "tool_result" and role == "user":
            found += _results(block)
        elif block.type == "tool_result":
            result = str(block.content) if block.content else ""
            parts.append({"type": "text", "text": f"Tool result: {result}"})
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if alone else parts
    return message


def _results(block: Block) -> list[dict[str, Any]]:
    """A tool's answer: its texts, then its pictures, then the tools that it refers to."""
    text, pictures, tools = "", [], []
    if isinstance(block.content, str):
        text = block.content
    elif block.content is not None:
        kinds = [(item.get("type"), item) for item in block.content]
        text = "\n".join(item.get("text", "") for kind, item in kinds if kind == "text")
        pictures = [_picture(item.get("source", {})) for kind, item in kinds if kind == "image"]
        names = [i.get("tool_name") or i.get("name") for k, i in kinds if k == "tool_reference"]
        tools = [name for name in names if name]
    head = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
    made: list[dict[str, Any]] = [head | {"content": text}]
    if pictures:
        made.append({"role": "user", "content": pictures})
    if tools:
        made.append(head | {"content": "\n".join(tools)})
    return made


def _pictures(request: CountTokensRequest) -> bool:
    """Whether a message, or a tool's answer in one, holds a picture."""
    blocks = [b for m in request.messages if not isinstance(m.content, str) for b in m.content]
    results = [item for b in blocks if isinstance(b.content, list) for item in b.content]
    return any(b.type == "image" for b in blocks) or any(i.get("type") == "image" for i in results)


def _picture(source: Mapping[str, Any]) -> dict[str, Any]:
    url = source.get("url", "")
    if source.get("type") != "url":
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


# ---------------------------------------------------------------------- answer


def message_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A message of blocks, of a whole answer of `chat.py`; what is None is left out."""
    (choice,) = answer["choices"]
    message, used = choice["message"], answer["usage"]
    content: list[dict[str, Any]] = []
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in message["tool_calls"]:
        function = call["function"]
        call_fields = {"name": function["name"], "input": json.loads(function["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **call_fields})
    reason = STOP_REASONS.get(choice["finish_reason"])
    return {
        "id": answer["id"], "type": "message", "role": "assistant", "content": content,
        "model": answer["model"], **({} if reason is None else {"stop_reason": reason}),
        "usage": _usage(used["prompt_tokens"], used["completion_tokens"]),
    }  # fmt: skip


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    return {"input_tokens": num_prompt_tokens, "output_tokens": num_tokens}


@dataclass(slots=True)
class BlockEvents:
    """Events of a streamed chat in, those of a streamed message out.

    One block is open at a time; text, and each call that is named, opens the next.
    """

    begun: bool = False
    index: int = 0
    """Of the block that is open, or the next one."""
    kind: str | None = None
    """Of the block that is open."""
    tool_use_id: str | None = None
    """Of the call whose block is open."""
    ids: dict[int, str] = field(default_factory=dict)
    """Each call's id by its place."""
    finish_reason: str | None = None

    def feed(self, chunk: str) -> list[dict[str, Any]]:
        """What one event of the chat becomes; `message_stop` of `[DONE]`."""
        text = chunk.removeprefix("data: ").strip()
        if text == "[DONE]":
            return [{"type": "message_stop"}]
        event = json.loads(text)
        if "error" in event:
            error = {"type": "internal_error", "message": event["error"]["message"]}
            return [{"type": "error", "error": error}]
        used = event.get("usage") or {"prompt_tokens": 0, "completion_tokens": 0}
        if not self.begun:
            self.begun = True
            message = {
                "id": event["id"], "content": [], "model": event["model"], "stop_reason": None,
                "stop_sequence": None, "usage": _usage(used["prompt_tokens"], 0),
            }  # fmt: skip
            return [{"type": "message_start", "message": message}]
        if not event["choices"]:
            reason = STOP_REASONS.get(self.finish_reason or "stop")
            usage = _usage(used["prompt_tokens"], used["completion_tokens"])
            delta = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage}
            return [*self._closed(), delta]
        (choice,) = event["choices"]
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        return self._blocks(choice["delta"])

    def _blocks(self, delta: Mapping[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if content := delta.get("content"):
            if self.kind != "text":
                events += [*self._closed(), self._opened({"type": "text", "text": ""})]
            events.append(self._delta({"type": "text_delta", "text": content}))
        for call in delta.get("tool_calls") or ():
            function, made = call.get("function") or {}, call.get("id")
            if made is not None:
                self.ids[call["index"]] = made
                name = function.get("name")
                if made != self.tool_use_id and name is not None:
                    block = {"type": "tool_use", "id": made, "name": name, "input": {}}
                    events += [*self._closed(), self._opened(block)]
            of = self.ids.get(call["index"])
            if function.get("arguments") and of is not None and of == self.tool_use_id:
                piece = {"type": "input_json_delta", "partial_json": function["arguments"]}
                events.append(self._delta(piece))
        return events

    def _opened(self, block: dict[str, Any]) -> dict[str, Any]:
        self.kind, self.tool_use_id = block["type"], block.get("id")
        return {"type": "content_block_start", "index": self.index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def _closed(self) -> list[dict[str, Any]]:
        if self.kind is None:
            return []
        self.kind = self.tool_use_id = None
        self.index += 1
        return [{"type": "content_block_stop", "index": self.index - 1}]
