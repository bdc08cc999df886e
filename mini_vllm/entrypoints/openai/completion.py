"""`/v1/completions`: whole answers, and chunks of a stream.

Mirrors `vllm/entrypoints/openai/completion/serving.py:54` `OpenAIServingCompletion`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_vllm.entrypoints.async_llm import Delta, Stream
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.protocol import CompletionRequest
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
from mini_vllm.sample.logprobs import Logprob
from mini_vllm.sampling_params import BeamSearchParams, SamplingParams


class CompletionServing:
    """Answers of one server."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def begin(self, request: CompletionRequest, header: str | None) -> _Completion:
        """Check a request; nothing has reached the engine when it is refused.

        Raises:
            APIError: it is refused.
        """
        served = self.served
        if request.stream and request.use_beam_search:
            raise APIError("use_beam_search: not available with stream=true")
        served.adapter_of(request.model)
        if request.prompt_embeds:
            raise APIError("prompt_embeds: not available", param="prompt_embeds")
        if request.suffix is not None:
            raise APIError("suffix: not available")
        prompts = [served.fit(prompt, request) for prompt in request.prompts()]
        silent = request.echo and request.max_tokens == 0  # the prompt alone; the engine makes one
        params: list[SamplingParams] = []
        beams: list[BeamSearchParams] = []
        if request.use_beam_search:
            beams = [beam_params_of(served, request, len(ids)) for ids in prompts]
        else:
            params = [
                served.params_of(request, 1 if silent else served.most_tokens(request, len(ids)))
                for ids in prompts
            ]
        return _Completion(served, request, new_id("cmpl", request, header), prompts, params, beams)


@dataclass(slots=True)
class _Completion:
    """One request that was accepted."""

    served: Served
    request: CompletionRequest
    request_id: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    beams: list[BeamSearchParams]
    """Instead of `params`, for a beam search."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_choices(self) -> int:
        return self.request.n or 1

    def head(self) -> dict[str, Any]:
        """What every answer and chunk begins with."""
        model = self.served.model_of(self.request.model)
        return {
            "id": self.request_id, "object": "text_completion", "created": self.created,
            "model": model,
        }  # fmt: skip

    # ------------------------------------------------------------------ whole

    async def answer(self) -> dict[str, Any]:
        """The whole answer.

        Raises:
            APIError: a request ended in an error.
        """
        if self.request.use_beam_search:
            choices, num_tokens = await self._beams()
        else:
            choices, num_tokens = await self._generated()
        num_prompt = sum(map(len, self.prompts))
        return {
            **self.head(), "choices": choices, "service_tier": None,
            "system_fingerprint": self.served.fingerprint, "usage": usage(num_prompt, num_tokens)
            | {"prompt_tokens_details": None}, "kv_transfer_params": None,
        }  # fmt: skip

    async def _generated(self) -> tuple[list[dict[str, Any]], int]:
        grown = [Grown() for _ in range(self.num_choices * len(self.prompts))]
        async with self.served.streams(
            self.prompts, self.params, self.request_id, self.request
        ) as streams:
            async for number, delta in merged(streams):
                raise_if_failed(delta)
                grown[number * self.num_choices + delta.index].take(delta)
            choices = []
            for index, choice in enumerate(grown):
                stream = streams[index // self.num_choices]
                choices.append(self._choice(index, choice, stream))
        return choices, sum(len(choice.token_ids) for choice in grown)

    def _choice(self, index: int, choice: Grown, stream: Stream) -> dict[str, Any]:
        request, prompt = self.request, stream.prompt_token_ids
        back = bool(request.return_token_ids)
        text, ids = choice.text, choice.token_ids
        noted: list[Any] = list(choice.logprobs)
        about_prompt = (stream.prompt_logprobs or []) if request.echo else []
        if request.echo:
            shown = "" if back else self.served.tokenizer.decode(prompt)
            if request.max_tokens == 0:
                text, ids, noted = shown, prompt, about_prompt
            else:
                text, ids, noted = shown + text, prompt + ids, about_prompt + noted
        logprobs = None if request.logprobs is None else self._logprobs(ids, noted, 0)
        return {
            "index": index, "text": text, "logprobs": logprobs,
            "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if back else None,
            "prompt_logprobs": prompt_logprobs(stream),
            "prompt_token_ids": prompt if back else None, "routed_experts": None,
        }  # fmt: skip

    async def _beams(self) -> tuple[list[dict[str, Any]], int]:
        searches = (
            beams_of(self.served, self.request, ids, params, f"{self.request_id}-{number}")
            for number, (ids, params) in enumerate(zip(self.prompts, self.beams, strict=True))
        )
        each = [beam for search in searches for beam in await search]
        choices = [
            {"index": index, "text": beam.text, "logprobs": None,
             "finish_reason": beam.finish_reason, "stop_reason": None, "token_ids": None,
             "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
            for index, beam in enumerate(each)
        ]  # fmt: skip
        return choices, sum(len(beam.token_ids) for beam in each)

    def _logprobs(self, ids: Sequence[int], noted: Sequence[Any], offset: int) -> dict[str, Any]:
        """The `logprobs` object of consecutive tokens, the first at character `offset`."""
        request = self.request
        most, as_id = request.logprobs or 0, request.return_tokens_as_token_ids
        tokens: list[str] = []
        values: list[float | None] = []
        likeliest: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, entry in zip(ids, noted, strict=False):
            offsets.append(offset)
            if entry is None:  # the prompt's first token
                bare = Logprob(0.0, None, self.served.tokenizer.decode([token_id]))
                tokens.append(piece(token_id, bare, as_id))
                values.append(None)
                likeliest.append(None)
            else:
                tokens.append(piece(token_id, entry[token_id], as_id))
                values.append(max(entry[token_id].logprob, LOWEST))
                kept = list(entry.items())[: most + 1]
                likeliest.append({piece(t, e, as_id): max(e.logprob, LOWEST) for t, e in kept})
            offset += len(tokens[-1])
        return {
            "text_offset": offsets, "token_logprobs": values, "tokens": tokens,
            "top_logprobs": likeliest,
        }  # fmt: skip

    # ------------------------------------------------------------------ streamed

    def chunks(self) -> AsyncGenerator[str, None]:
        """The events of the stream, the last one `[DONE]`."""
        return framed(self._chunks())

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        grown = [Grown() for _ in range(self.num_choices * len(self.prompts))]
        num_prompt = [len(ids) for ids in self.prompts]
        opened = self.served.streams(self.prompts, self.params, self.request_id, self.request)
        async with opened as streams:
            async for number, delta in merged(streams):
                raise_if_failed(delta)
                index = number * self.num_choices + delta.index
                chunk = self._chunk(index, grown[index], delta, streams[number])
                if self.request.continuous_usage:
                    so_far = len(grown[index].token_ids)
                    chunk["usage"] = usage(num_prompt[number], so_far)
                yield chunk
            if self.request.include_usage:
                yield usage_chunk(self.served, self.head(), sum(num_prompt), grown)

    def _chunk(self, index: int, choice: Grown, delta: Delta, stream: Stream) -> dict[str, Any]:
        request, back = self.request, bool(self.request.return_token_ids)
        text, ids = delta.text, delta.token_ids
        noted: list[Any] = list(delta.logprobs)
        first, choice.begun = not choice.begun, True
        prompt = stream.prompt_token_ids
        if first and request.echo:
            shown = "" if back else self.served.tokenizer.decode(prompt)
            about = stream.prompt_logprobs or []
            if request.max_tokens == 0:
                text, ids, noted = shown, prompt, about
            else:
                text, ids, noted = shown + text, prompt + ids, about + noted
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._logprobs(ids, noted, len(choice.text))
        choice.take(delta)
        sent = {
            "index": index, "text": text, "logprobs": logprobs,
            "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason,
            "prompt_token_ids": prompt if first and (back or request.echo) else None,
            "token_ids": delta.token_ids if back else None,
        }  # fmt: skip
        chunk = {**self.head(), "choices": [sent]}
        if delta.finish_reason is not None and not request.include_usage:
            chunk["system_fingerprint"] = self.served.fingerprint
        return chunk
