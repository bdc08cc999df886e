"""`/v1/chat/completions`: messages become a prompt, text becomes messages and calls of tools.

Mirrors `vllm/entrypoints/openai/chat_completion/serving.py:85` `OpenAIServingChat`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_vllm.entrypoints.async_llm import Delta
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.images import pictures_of
from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from mini_vllm.entrypoints.openai.reasoning_parsers import (
    ReasoningFirst,
    ThinkingStream,
    parse_reasoning,
)
from mini_vllm.entrypoints.openai.serving import (
    LOWEST,
    Grown,
    Served,
    beam_params_of,
    beams_of,
    framed,
    merged,
    new_id,
    piece,
    prompt_logprobs,
    raise_if_failed,
    usage,
    usage_chunk,
)
from mini_vllm.entrypoints.openai.templates import flat, render
from mini_vllm.entrypoints.openai.tool_parsers import (
    NamedStream,
    RequiredStream,
    ToolCall,
    ToolParser,
    last_delta,
    required_calls,
)
from mini_vllm.input_processor import Prompt
from mini_vllm.sampling_params import BeamSearchParams, SamplingParams

_Parser = ToolParser | NamedStream | RequiredStream | ReasoningFirst


class ChatServing:
    """Answers of one server."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def prompt_of(
        self, request: Any, with_pictures: bool = False
    ) -> tuple[list[dict[str, Any]], str]:
        """The conversation, and the text that its template makes of it.

        Raises:
            APIError: there is no template, the client brings one, or it fails.
        """
        if self.served.harmony is not None and isinstance(request, ChatCompletionRequest):
            return self._harmony_prompt_of(request)
        given = request.chat_template
        if given and not self.served.trust_request_chat_template:
            raise APIError(
                "chat_template: need none; this server was started without "
                "--trust-request-chat-template"
            )
        template = given or self.served.chat_template
        if template is None:
            raise APIError(
                "messages: this model has no chat template; start the server with "
                "--chat-template, or use /v1/completions"
            )
        if not request.messages:
            raise APIError("messages: need at least one")
        messages = flat(request.messages, with_pictures)
        options = {
            "add_generation_prompt": request.add_generation_prompt,
            "continue_final_message": request.continue_final_message,
            "chat_template_kwargs": request.chat_template_kwargs,
        }
        return messages, render(template, messages, request.tool_dicts(), options)

    @staticmethod
    def _harmony_prompt_of(request: ChatCompletionRequest) -> tuple[list[dict[str, Any]], str]:
        from mini_vllm.entrypoints.openai.harmony_prompt import render_for_completion

        if not request.messages:
            raise APIError("messages: need at least one")
        messages = [message.model_dump(exclude_unset=True) for message in request.messages]
        return messages, render_for_completion(
            messages, request.tool_dicts(), request.reasoning_effort
        )

    def begin(self, request: ChatCompletionRequest, header: str | None) -> Chat:
        """Check a request; nothing has reached the engine when it is refused.

        Raises:
            APIError: it is refused.
        """
        served = self.served
        served.adapter_of(request.model)
        parser = served.harmony or served.tool_parser
        if parser is None and request.tool_choice not in (None, "none"):
            raise APIError(
                "tool_choice: need 'none'; this server was started without --tool-call-parser"
            )
        if request.echo and served.harmony is not None:
            raise APIError("echo: need false with harmony, gpt-oss's format")
        pictures = pictures_of(request.messages) if served.engine.about.image else []
        conversation, text = self.prompt_of(request, served.engine.about.image is not None)
        ids = served.fit(text, request)
        prompt: Prompt = ids
        if pictures:
            if request.use_beam_search:
                raise APIError("use_beam_search: need false with pictures")
            prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}
            ids = served.with_placeholders(ids, len(pictures), request)
        most = served.most_tokens(request, len(ids))
        params: SamplingParams | BeamSearchParams
        if request.use_beam_search:
            params = beam_params_of(served, request, len(ids))
        else:
            forced = self.forced(request) if served.forces_json else None
            params = served.params_of(request, most, forced)
        request_id = new_id("chatcmpl", request, header)
        return Chat(served, request, request_id, conversation, text, prompt, ids, params)

    @staticmethod
    def forced(request: ChatCompletionRequest) -> Any:
        """The constraint that makes a model call a tool, None where it may choose."""
        if not request.tools or (request.named_tool is None and request.tool_choice != "required"):
            return None
        from mini_vllm.structured_output.params import StructuredOutputsParams

        tools = {tool.function.name: tool.function for tool in request.tools or ()}
        if request.named_tool is not None:
            return StructuredOutputsParams(json=tools[request.named_tool].parameters or {})
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": function.parameters or {"type": "object", "properties": {}},
                },
                "required": ["name", "parameters"],
            }
            for name, function in tools.items()
        ]
        each = {"type": "object", "anyOf": calls}
        return StructuredOutputsParams(json={"type": "array", "minItems": 1, "items": each})


@dataclass(slots=True)
class Chat:
    """One request that was accepted."""

    served: Served
    request: ChatCompletionRequest
    request_id: str
    conversation: list[dict[str, Any]]
    text: str
    """What the template has made of it."""
    prompt: Prompt
    """What the engine gets."""
    ids: list[int]
    """The prompt's tokens, placeholders included."""
    params: SamplingParams | BeamSearchParams
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def role(self) -> str:
        """Who answers."""
        own = self.conversation[-1].get("role", "assistant") if self.conversation else "assistant"
        return "assistant" if self.request.add_generation_prompt else own

    @property
    def num_choices(self) -> int:
        return self.request.n or 1

    @property
    def forced(self) -> bool:
        """Whether the request wants a call, or a certain one."""
        return self.request.named_tool is not None or self.request.tool_choice == "required"

    @property
    def parses(self) -> bool:
        """Whether calls are looked for in free text."""
        if not self.request.tools or self.served.tool_parser is None:
            return False
        if self.forced:
            return not self.served.forces_json
        return self.request.tool_choice in ("auto", None)

    def head(self, kind: str) -> dict[str, Any]:
        """What every answer and chunk begins with."""
        return {
            "id": self.request_id, "object": kind, "created": self.created,
            "model": self.served.model_of(self.request.model),
        }  # fmt: skip

    def echoed(self) -> str:
        """The last message's text, where it is repeated in front of the answer."""
        last = self.conversation[-1] if self.conversation else {}
        content = last.get("content") or ""
        if isinstance(content, list):  # with pictures
            content = "".join(part.get("text", "") for part in content)
        return content if self.request.echo and last.get("role") == self.role else ""

    # ------------------------------------------------------------------ whole

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            APIError: the request ended in an error.
        """
        noted = None
        if isinstance(self.params, BeamSearchParams):
            grown = await self._beams(self.params)
        else:
            grown = [Grown() for _ in range(self.num_choices)]
            async with self.served.streams(
                [self.prompt], [self.params], self.request_id, self.request
            ) as streams:
                async for _, delta in merged(streams):
                    raise_if_failed(delta)
                    grown[delta.index].take(delta)
                noted = prompt_logprobs(streams[0])
        total = sum(len(choice.token_ids) for choice in grown)
        back = self.request.return_token_ids
        return {
            **self.head("chat.completion"),
            "choices": [self._choice(i, choice) for i, choice in enumerate(grown)],
            "service_tier": None, "system_fingerprint": self.served.fingerprint,
            "usage": usage(len(self.ids), total) | {"prompt_tokens_details": None},
            "prompt_logprobs": noted, "prompt_token_ids": self.ids if back else None,
            "prompt_text": self.text if self.request.return_prompt_text else None,
            "kv_transfer_params": None,
        }  # fmt: skip

    def _choice(self, index: int, choice: Grown) -> dict[str, Any]:
        request = self.request
        reasoning: str | None = None
        content: str | None = choice.text
        if self.served.harmony is not None:
            reasoning, content, calls = self._harmony(choice.token_ids)
        else:
            if self.served.reasoning_tags is not None:
                reasoning, content = parse_reasoning(choice.text)
            content, calls = self._parsed(content)
            if calls and request.parallel_tool_calls is False:
                calls = calls[:1]
        if not request.include_reasoning:
            reasoning = None
        if self.request.echo:
            content = self.echoed() + (content or "")
        reason = choice.finish_reason
        called = bool(calls) and self.parses and not self.forced
        if self.served.harmony is not None:
            reason = "tool_calls" if calls else reason
        elif called or (request.tool_choice == "required" and reason == "stop"):
            reason = "tool_calls"
        message = {
            "role": self.role, "content": content, "refusal": None, "annotations": None,
            "audio": None, "function_call": None,
            "tool_calls": [call.message() for call in calls], "reasoning": reasoning,
        }  # fmt: skip
        noted = self.logprobs_of(choice.token_ids, choice.logprobs) if request.logprobs else None
        return {
            "index": index, "message": message, "logprobs": noted, "finish_reason": reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if request.return_token_ids else None,
            "routed_experts": None,
        }  # fmt: skip

    def _parsed(self, text: str | None) -> tuple[str | None, list[ToolCall]]:
        """Content and calls."""
        if text is None:
            return None, []
        if self.parses and (parser := self.family()):
            content, calls = parser.extract_tool_calls(text)
            return "" if self.forced else content, calls
        if self.request.named_tool is not None:
            return "", [ToolCall(self.request.named_tool, text)]
        if self.request.tool_choice == "required":
            return "", required_calls(text)
        return text, []

    def _harmony(self, token_ids: Sequence[int]) -> tuple[str | None, str | None, list[ToolCall]]:
        """Reasoning, content and calls of a choice in gpt-oss's format."""
        assert self.served.harmony is not None
        text = self.served.text_of(token_ids).rstrip("\ufffd")
        reasoning, content = self.served.harmony.parse_chat_output(text)
        if (parser := self.family()) is None:
            return reasoning, content, []
        return reasoning, *parser.extract_tool_calls(text)

    def family(self) -> ToolParser | None:
        """A new parser of the server's family, for one choice."""
        family, request = self.served.tool_parser, self.request
        if family is None:
            return None
        return family(self.served.vocab, request.tools or (), request.tool_choice)

    def logprobs_of(self, ids: Sequence[int], noted: Sequence[Any]) -> dict[str, Any]:
        """The `logprobs` object of consecutive tokens."""
        request, as_id = self.request, self.request.return_tokens_as_token_ids
        most = request.top_logprobs or 0
        content = []
        for token_id, entry in zip(ids, noted, strict=True):
            likeliest = list(entry.items())
            kept = likeliest if most == -1 else likeliest[:most]
            own = entry[token_id]
            content.append(
                {
                    "token": piece(token_id, own, as_id), "logprob": max(own.logprob, LOWEST),
                    "bytes": list((own.decoded_token or "").encode()),
                    "top_logprobs": [
                        {"token": piece(t, e, as_id), "logprob": max(e.logprob, LOWEST),
                         "bytes": list(piece(t, e, as_id).encode())}
                        for t, e in kept
                    ],
                }
            )  # fmt: skip
        return {"content": content}

    # ------------------------------------------------------------------ streamed

    def _parser(self) -> _Parser | None:
        if (harmony := self.served.harmony) is not None:
            return harmony(
                self.served.vocab, text_of=self.served.text_of,
                include_reasoning=self.request.include_reasoning,
            )  # fmt: skip
        if (tags := self.served.reasoning_tags) is None:
            return self.tool_stream()
        return ReasoningFirst(ThinkingStream(tags), self.tool_stream(), tags.ended(self.ids))

    def tool_stream(self) -> ToolParser | NamedStream | RequiredStream | None:
        if self.forced and self.served.forces_json:
            name = self.request.named_tool
            return RequiredStream() if name is None else NamedStream(name)
        return self.family()  # whatever tools are offered

    def chunks(self) -> AsyncGenerator[str, None]:
        """The events of the stream, the last one `[DONE]`."""
        if isinstance(self.params, BeamSearchParams):
            return framed(self._beams_at_once(self.params))
        return framed(self._chunks(self.params))

    async def _chunks(self, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
        grown = [Grown() for _ in range(self.num_choices)]
        parsers = [self._parser() for _ in grown]
        begun = False
        opened = self.served.streams([self.prompt], [params], self.request_id, self.request)
        async with opened as streams:
            async for _, delta in merged(streams):
                raise_if_failed(delta)
                if not begun:
                    begun = True
                    for chunk in self._first():
                        yield chunk
                choice = grown[delta.index]
                choice.take(delta)
                found = self._chunk(delta, choice, parsers[delta.index])
                if found is not None:
                    yield self._with_usage(found, len(choice.token_ids))
            if self.request.include_usage:
                head = self.head("chat.completion.chunk")
                yield usage_chunk(self.served, head, len(self.ids), grown)

    async def _beams(self, params: BeamSearchParams) -> list[Grown]:
        return await beams_of(self.served, self.request, self.ids, params, self.request_id)

    async def _beams_at_once(
        self, params: BeamSearchParams
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Beams are known when all have ended: one chunk each."""
        grown = await self._beams(params)
        for chunk in self._first():
            yield chunk
        for index, choice in enumerate(grown):
            delta = Delta(index, choice.text, choice.token_ids, [], choice.finish_reason)
            yield self._chunk(delta, choice, self._parser()) or {}

    def _first(self) -> list[dict[str, Any]]:
        """The chunks that come before any text: who speaks, and what is echoed."""
        chunks = []
        for index in range(self.num_choices):
            choice = {"index": index, "delta": {"role": self.role, "content": ""}}
            choice |= {"logprobs": None, "finish_reason": None}
            head = self.head("chat.completion.chunk") | {"choices": [choice]}
            head["prompt_token_ids"] = self.ids if self.request.return_token_ids else None
            head["prompt_text"] = self.text if self.request.return_prompt_text else None
            chunks.append(self._with_usage(head, 0))
        if text := self.echoed():
            for index in range(self.num_choices):
                choice = {"index": index, "delta": {"content": text}}
                choice |= {"logprobs": None, "finish_reason": None}
                head = self.head("chat.completion.chunk") | {"choices": [choice]}
                chunks.append(self._with_usage(head, 0))
        return chunks

    def _with_usage(self, chunk: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        if self.request.continuous_usage:
            chunk["usage"] = usage(len(self.ids), num_tokens)
        return chunk

    def _chunk(
        self, delta: Delta, choice: Grown, parser: _Parser | None
    ) -> dict[str, Any] | None:  # fmt: skip
        """What one delta becomes; None where a parser holds it back."""
        request, back = self.request, bool(self.request.return_token_ids)
        ended = delta.finish_reason is not None
        message: dict[str, Any] | None = {"content": delta.text}
        if parser is not None:
            message = parser.feed(delta.text, delta.token_ids)
            if message is None:
                if not ended and not back:
                    return None
                message = {}
        assert message is not None
        choice.called = choice.called or bool(message.get("tool_calls"))
        reader = parser.rest if isinstance(parser, ReasoningFirst) else parser
        calls = reader.calls if isinstance(reader, ToolParser) else []
        reason = delta.finish_reason
        named = request.named_tool is not None and self.served.harmony is None
        if ended and (calls or (choice.called and not named)):
            reason = "tool_calls"  # a call that was begun is enough, whatever stands behind it
        if ended and calls:
            message = last_delta(message, calls)
        if request.parallel_tool_calls is False and message.get("tool_calls"):
            message["tool_calls"] = [c for c in message["tool_calls"] if c["index"] == 0]
        noted = self.logprobs_of(delta.token_ids, delta.logprobs) if request.logprobs else None
        sent: dict[str, Any] = {"index": delta.index, "delta": message, "logprobs": noted}
        sent["finish_reason"] = reason
        if ended:
            sent["stop_reason"] = delta.stop_reason
        sent["token_ids"] = delta.token_ids if back else None
        chunk = self.head("chat.completion.chunk") | {"choices": [sent]}
        if ended and not request.include_usage:
            chunk["system_fingerprint"] = self.served.fingerprint
        return chunk
