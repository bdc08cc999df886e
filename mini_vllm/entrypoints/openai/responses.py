"""`/v1/responses`: items become a chat, and what the model says becomes items.

Promises: the prompt, the sampling and the parsers are those of `chat.py`. What was not compared
with vLLM's answers is refused by name with 501 (`UNSERVED`). A stream tells every call that a piece
of text holds; vLLM tells the first one. Mirrors
`vllm/entrypoints/openai/responses/serving.py:153` `OpenAIServingResponses`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import PrivateAttr, ValidationError

from mini_vllm.entrypoints.async_llm import Delta
from mini_vllm.entrypoints.openai.chat import Chat, ChatServing
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.openapi import LIST, NUMBER, OBJECT, TEXT, answer
from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from mini_vllm.entrypoints.openai.protocol_responses import TOOL_TYPES, UNSERVED, ResponsesRequest
from mini_vllm.entrypoints.openai.response_items import ItemEvents, call_item, message_item
from mini_vllm.entrypoints.openai.serving import (
    Grown,
    Served,
    merged,
    raise_if_failed,
    sse,
)
from mini_vllm.entrypoints.openai.tool_parsers import HermesStream, ToolCall, required_calls
from mini_vllm.sampling_params import SamplingParams

RESPONSE = answer(
    id=TEXT, object=TEXT, created_at=NUMBER, model=TEXT, status=TEXT, output=LIST, usage=OBJECT
)
MAX_STORED = 1024
"""Answers that a server with a store remembers; vLLM's forgets none."""


class _AsChat(ChatCompletionRequest):
    """The chat that is asked for; its limit has another name, and its tools another form."""

    _offered: list[dict[str, Any]] | None = PrivateAttr(None)

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        return self._offered

    def output_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_completion_tokens


class ResponsesServing:
    """Answers of one server, and those that it remembers."""

    def __init__(self, served: Served, chats: ChatServing, stores: bool = False) -> None:
        """Args:
        stores: remember answers, as with `VLLM_ENABLE_RESPONSES_API_STORE=1`.
        """
        self.served, self.chats, self.stores = served, chats, stores
        self.stored: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        """Answers and the messages before them, by the answers' ids."""

    def begin(self, request: ResponsesRequest, header: str | None) -> _Response:
        """Check a request; nothing has reached the engine when it is refused.

        Raises:
            APIError: it is refused.
        """
        self.served.adapter_of(request.model)
        if request.background and not self.stores:
            raise _invalid(
                "background: need a server that was started with "
                "VLLM_ENABLE_RESPONSES_API_STORE=1", "background",
            )  # fmt: skip
        extra = request.model_extra or {}
        past = request.previous_response_id
        if extra.get("previous_input_messages") and past:
            raise _invalid("previous_response_id: need no previous_input_messages",
                           "previous_response_id")  # fmt: skip
        self._check_served(request)
        before = [] if past is None else self._past(past)
        messages = messages_of(request, before)
        chat = chat_of(request, messages)
        forced = request.named_tool is not None or request.tool_choice == "required"
        form = request.text is not None and request.text.format is not None
        if request.structured_outputs is not None and (form or forced):
            raise APIError("structured_outputs: need no text.format", param="structured_outputs")
        return _Response(self, request, messages, self.chats.begin(chat, None))

    def _check_served(self, request: ResponsesRequest) -> None:
        """Refuse what was not compared with vLLM's answers.

        Raises:
            APIError: 501, naming it.
        """
        wrong = [name for name in UNSERVED if (request.model_extra or {}).get(name)]
        wrong += [f"a tool of type {t['type']!r}" for t in request.tools if t["type"] in TOOL_TYPES]
        if request.background:
            wrong.append("background")
        if not request.skip_special_tokens:
            wrong.append("skip_special_tokens=false")
        if isinstance(request.tool_choice, dict) and request.tool_choice.get("type") != "function":
            wrong.append(f"tool_choice of type {request.tool_choice.get('type')!r}")
        if self.served.tool_parser not in (None, HermesStream):
            wrong.append("/v1/responses with a --tool-call-parser other than hermes")
        if self.served.reasoning_tags is not None or self.served.harmony is not None:
            wrong.append("/v1/responses with --reasoning-parser")
        elif self.served.engine.about.image is not None and _has_picture(request):
            wrong.append("a part of type 'input_image'")
        if wrong:
            raise APIError(f"{wrong[0]}: not available", "NotImplementedError", 501)

    def _past(self, response_id: str) -> list[dict[str, Any]]:
        """What was said until an answer, and the answer's texts, without system messages.

        Raises:
            APIError: 404, it is not remembered.
        """
        response, messages = self._found(response_id)
        said = [part["text"] for i in response["output"] for part in i.get("content") or ()]
        kept = [message for message in messages if message["role"] != "system"]
        return kept + [{"role": "assistant", "content": text} for text in said]

    def _found(self, response_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if response_id not in self.stored:
            raise APIError(f"the response {response_id!r} does not exist", "invalid_request_error",
                           404, "response_id")  # fmt: skip
        return self.stored[response_id]

    def read(self, response_id: str) -> dict[str, Any]:
        """An answer that is remembered.

        Raises:
            APIError: 404, it is not.
        """
        return self._found(response_id)[0]

    def cancel(self, response_id: str) -> dict[str, Any]:
        """Refuse: only answers in the background can be cancelled, and there are none.

        Raises:
            APIError: always.
        """
        self._found(response_id)
        raise _invalid("response_id: need an answer in the background", "response_id")

    def keep(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Remember an answer, if this server does; the oldest is forgotten for it."""
        if self.stores:
            self.stored[response["id"]] = response, messages
            while len(self.stored) > MAX_STORED:
                del self.stored[next(iter(self.stored))]


def _invalid(message: str, param: str) -> APIError:
    return APIError(message, "invalid_request_error", param=param)


# ---------------------------------------------------------------------- request


def _has_picture(request: ResponsesRequest) -> bool:
    items = [] if isinstance(request.input, str) else request.input
    contents = [item.get("content") for item in items]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part.get("type") == "input_image" for part in parts)


def messages_of(
    request: ResponsesRequest, before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Messages of a chat; what an assistant thought, said and called in a row is one message.

    As `vllm/entrypoints/openai/responses/utils.py:79` `construct_input_messages`.

    Raises:
        APIError: an item cannot be read.
    """
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    messages += before
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    items: list[dict[str, Any]] = []
    for item in request.input:
        _add(item, items)
    return messages + items


def _add(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """One item, as a message of its own or as a part of the assistant's last one."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "function": function, "type": "function"}
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = item["output"]
        messages.append({"role": "tool", "content": content, "tool_call_id": item["call_id"]})
    elif kind == "reasoning":
        _join(messages, last, "reasoning", _thought(item))
    elif item["role"] == "assistant" and isinstance(item["content"], list):
        texts = [part.get("text") for part in item["content"]]
        if not texts or texts[0] is None:
            raise APIError("input: content of assistant: need a part of type 'output_text'")
        _join(messages, last, "content", texts[0])
    else:
        messages.append({"role": item["role"], "content": item["content"]})


def _join(
    messages: list[dict[str, Any]], last: dict[str, Any] | None, name: str, text: str
) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _thought(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise APIError("input: encrypted_content: not available")
    parts = item.get("content") or item["summary"]
    return str(parts[0].get("text", "")) if parts else ""


def tools_of(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The tools as the answer repeats them, and as a template gets them."""
    names = (
        "name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading",
        "description", "output_schema",
    )  # fmt: skip
    return [{name: tool.get(name) for name in names} for tool in request.tools]


def chat_of(request: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """The chat that is asked for.

    Raises:
        APIError: an item of the input is none that a chat can have.
    """
    goes_on = False
    if request.input and not isinstance(request.input, str):
        last = request.input[-1]
        begun = last.get("status") in ("in_progress", "incomplete")
        goes_on = begun and last.get("type", "message") == "message"
    body: dict[str, Any] = {
        "model": request.model, "messages": messages, "stream": request.stream,
        "max_completion_tokens": request.max_output_tokens, "temperature": request.temperature,
        "top_p": request.top_p, "top_k": request.top_k, "logit_bias": request.logit_bias,
        "presence_penalty": request.presence_penalty, "seed": request.seed,
        "frequency_penalty": request.frequency_penalty, "stop": request.stop,
        "repetition_penalty": request.repetition_penalty, "ignore_eos": request.ignore_eos,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "priority": request.priority, "cache_salt": request.cache_salt,
        "chat_template_kwargs": request.chat_template_kwargs,
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "logprobs": request.with_logprobs, "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
    }  # fmt: skip
    if request.with_logprobs:
        body["top_logprobs"] = request.top_logprobs
    if request.tools and request.tool_choice != "none":
        offered = [{"type": "function", "function": tool} for tool in tools_of(request)]
        named = {"type": "function", "function": {"name": request.named_tool}}
        body["tools"] = offered
        body["tool_choice"] = request.tool_choice if request.named_tool is None else named
    if request.structured_outputs is not None:
        body["structured_outputs"] = request.structured_outputs.model_dump(by_alias=True)
    elif request.text is not None and request.text.format is not None:
        form = request.text.format
        if form.type == "json_schema":  # json_object constrains nothing there
            body["structured_outputs"] = {"json": form.json_schema}
    try:
        chat = _AsChat.model_validate(body)
        chat._offered = body.get("tools")
        return chat
    except ValidationError as error:
        raise APIError(f"input: {error.errors(include_url=False)[0]['msg']}") from None


# ---------------------------------------------------------------------- answer


@dataclass(slots=True)
class _Response:
    """One request that was accepted."""

    serving: ResponsesServing
    request: ResponsesRequest
    messages: list[dict[str, Any]]
    chat: Chat
    created: int = field(default_factory=lambda: int(time.time()))
    num_cached: int = 0
    """Tokens of the prompt that were cached."""

    @property
    def params(self) -> SamplingParams:
        assert isinstance(self.chat.params, SamplingParams)
        return self.chat.params

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            APIError: the request ended in an error.
        """
        grown = Grown()
        async for delta in self._deltas():
            grown.take(delta)
        return self._ended(grown)

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        chat, request_id = self.chat, self.request.request_id
        opened = chat.served.streams([chat.prompt], [self.params], request_id, chat.request)
        async with opened as streams:
            async for _, delta in merged(streams):
                raise_if_failed(delta)
                self.num_cached = streams[0].num_cached_tokens or 0
                yield delta

    def _ended(self, grown: Grown) -> dict[str, Any]:
        """The whole answer, remembered if that is wanted."""
        status = "incomplete" if grown.finish_reason == "length" else "completed"
        found = self._response(status, self._items(grown))
        num_prompt, num_tokens = len(self.chat.ids), len(grown.token_ids)
        found["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": self.num_cached, "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": num_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": num_prompt + num_tokens,
        }  # fmt: skip
        if self.request.store:
            self.serving.keep(found, self.messages)
        return found

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request, params = self.request, self.params
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        greedy = params.temperature < 1e-5
        effort = request.reasoning
        return {
            "id": request.request_id, "created_at": self.created, "incomplete_details": cut,
            "instructions": request.instructions, "metadata": request.metadata,
            "model": self.chat.served.model_of(request.model), "object": "response",
            "output": output, "parallel_tool_calls": request.parallel_tool_calls,
            "temperature": params.temperature, "tool_choice": self._tool_choice(),
            "tools": tools_of(request), "top_p": 1.0 if greedy else params.top_p,
            "background": request.background, "max_output_tokens": params.max_tokens,
            "max_tool_calls": request.max_tool_calls,
            "previous_response_id": request.previous_response_id, "prompt": None,
            "reasoning": None if effort is None else {
                "context": None, "effort": effort.effort, "mode": None, "summary": effort.summary,
                "generate_summary": effort.generate_summary,
            },
            "service_tier": request.service_tier, "status": status, "text": self._text(),
            "top_logprobs": params.logprobs, "truncation": request.truncation, "usage": None,
            "user": request.user, "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty, "kv_transfer_params": None,
            "input_messages": None, "output_messages": None,
        }  # fmt: skip

    def _tool_choice(self) -> Any:
        name = self.request.named_tool
        return self.request.tool_choice if name is None else {"name": name, "type": "function"}

    def _text(self) -> dict[str, Any] | None:
        """What the text must be; a forced call replaces what the client has asked for."""
        forced = ChatServing.forced(self.chat.request)
        if forced is None:
            return None if self.request.text is None else self.request.text.as_answered()
        schema = forced.json
        if self.request.named_tool is None:  # each call is an object, which is not said there
            items = schema["items"]
            calls = [{k: v for k, v in call.items() if k != "type"} for call in items["anyOf"]]
            schema = {**schema, "items": {**items, "anyOf": calls}}
        form = {
            "name": "tool_calling_response", "schema": schema, "type": "json_schema",
            "description": None, "strict": True,
        }  # fmt: skip
        return {"format": form, "verbosity": None}

    def _items(self, grown: Grown) -> list[dict[str, Any]]:
        """The items of a whole text: a message, then calls."""
        text, calls = self._parsed(grown.text)
        items: list[dict[str, Any]] = []
        if text:
            noted = None
            if self.request.with_logprobs:
                noted = self.chat.logprobs_of(grown.token_ids, grown.logprobs)["content"]
            part: dict[str, Any] = {
                "annotations": [],
                "text": text,
                "type": "output_text",
                "logprobs": noted,
            }
            items.append(message_item(f"msg_{uuid.uuid4().hex}", "completed", [part]))
        for call in calls:
            made = call.message()
            items.append(call_item(f"fc_{uuid.uuid4().hex}", made["id"], call.name, call.arguments,
                               "completed"))  # fmt: skip
        return items

    def _parsed(self, text: str) -> tuple[str | None, list[ToolCall]]:
        request = self.request
        if request.named_tool is not None:
            return None, [ToolCall(request.named_tool, text)]
        if request.tool_choice == "required":
            return None, required_calls(text)
        if request.tool_choice == "auto" and (parser := self.chat.family()):
            return parser.extract_tool_calls(text)
        return text, []

    # ------------------------------------------------------------------ streamed

    async def chunks(self) -> AsyncGenerator[str, None]:
        """The events of the stream."""
        items = ItemEvents()
        try:
            for kind in ("response.created", "response.in_progress"):
                yield items.numbered({"type": kind, "response": self._response("in_progress", [])})
            grown, parser = Grown(), self.chat.tool_stream()
            async for delta in self._deltas():
                grown.take(delta)
                message: dict[str, Any] | None = {"content": delta.text}
                if parser is not None:
                    message = parser.feed(delta.text, delta.token_ids)
                for event in items.feed(message or {}, self._noted(delta)):
                    yield items.numbered(event)
            for event in items.closed():
                yield items.numbered(event)
            ended = self._ended(grown)
            yield items.numbered({"type": "response.completed", "response": ended})
        except APIError as error:
            yield sse(error.body())
        except Exception as error:
            yield sse(APIError(str(error), "InternalServerError", 500).body())

    def _noted(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of a piece, without the bytes that a whole answer has."""
        if not self.request.with_logprobs:
            return []
        found = self.chat.logprobs_of(delta.token_ids, delta.logprobs)["content"]
        return [
            {"token": one["token"], "logprob": one["logprob"],
             "top_logprobs": [{"token": o["token"], "logprob": o["logprob"]}
                              for o in one["top_logprobs"]]}
            for one in found
        ]  # fmt: skip
