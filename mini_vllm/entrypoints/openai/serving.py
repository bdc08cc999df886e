"""What completions and chats share: the model asked for, prompts that fit, chunks of a stream.

Promises: everything that can be refused is refused before the engine hears of it. Mirrors
`vllm/entrypoints/openai/engine/serving.py:132` `OpenAIServing`.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from mini_vllm.entrypoints.async_llm import AsyncLLM, Delta, Stream
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.protocol import Generation
from mini_vllm.entrypoints.openai.reasoning_parsers import Tags
from mini_vllm.entrypoints.openai.tool_parsers import ToolParser
from mini_vllm.input_processor import Prompt
from mini_vllm.sample.beam_search import BeamSearchSequence, Search, check_width
from mini_vllm.sample.logprobs import Logprob
from mini_vllm.sampling_params import BeamSearchParams, SamplingParams
from mini_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.entrypoints.openai.tool_parsers_openai import OpenAIToolParser

LOWEST = -9999.0
"""What JSON says for minus infinity, as OpenAI's servers do."""


@dataclass(slots=True)
class Served:
    """What a server serves, fixed when it starts."""

    engine: AsyncLLM
    name: str
    """The model's name for clients."""
    max_model_len: int
    root: str
    """Where the model is."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """`LoRARequest` by the name that clients ask for."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the checkpoint's generation config."""
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    tool_parser: type[ToolParser] | None = None
    """The family that reads calls in free text."""
    reasoning_tags: Tags | None = None
    """Where thinking begins and ends, for a model that thinks aloud."""
    harmony: type[OpenAIToolParser] | None = None
    """What reads a model of gpt-oss's format, with a parser of tools or without."""
    fingerprint: str = "mini-vllm"
    pieces: Mapping[int, str] = field(default_factory=dict)
    """The vocabulary's own names of its tokens, by id."""
    specials: Mapping[int, str] = field(default_factory=dict)
    """Names of the special tokens."""
    vocab: Mapping[str, int] = field(default_factory=dict)
    """Ids of the tokens by those names, for a server that parses."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def forces_json(self) -> bool:
        """Whether a forced call is made by a constraint, as JSON, and not left to the model."""
        family = self.harmony or self.tool_parser
        return family is None or family.supports_required_and_named

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's."""
        return self.engine.about.tokenizer

    def piece_of(self, token_id: int) -> str:
        """A token's name in the vocabulary; its text where the tokenizer names none."""
        found = self.pieces.get(token_id)
        return self.tokenizer.decode([token_id]) if found is None else found

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones by their names."""
        text, plain = "", []
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id not in self.specials:
                plain.append(token_id)
                continue
            text += self.tokenizer.decode(plain)
            plain = []
            text += "" if token_id is None else self.specials[token_id]
        return text

    def adapter_of(self, model: str | None) -> Any:
        """The adapter that a request's `model` names, None for the base model.

        Raises:
            APIError: 404, there is no such model.
        """
        if model is None or model == "" or model == self.name:
            return None
        if model not in self.adapters:
            raise APIError(f"the model `{model}` does not exist", "NotFoundError", 404, "model")
        return self.adapters[model]

    def model_of(self, model: str | None) -> str:
        """The name that the answer gives."""
        return model if model in self.adapters else self.name  # type: ignore[return-value]

    def fit(self, prompt: str | list[int], request: Generation) -> list[int]:
        """The prompt's token ids, cut as the request wants, if they and the output fit.

        Raises:
            APIError: they do not, or an id is none.
        """
        name, wanted = request.output_limit()
        if wanted is not None and wanted > self.max_model_len:
            need = f"at most max_model_len={self.max_model_len}"
            raise APIError(f"{name}={wanted}: need {need}", param=name)
        room = self.max_model_len - max(wanted or 0, 0)
        cut = request.truncate_prompt_tokens
        if cut is not None and cut > room:
            raise APIError(
                f"truncate_prompt_tokens={cut}: need at most {room}, the context without the "
                "output", param="truncate_prompt_tokens",
            )  # fmt: skip
        if isinstance(prompt, str):
            if cut is None and len(prompt) > room * self._most_chars():
                need = f"more than {room} tokens can hold"
                raise APIError(f"prompt has {len(prompt)} characters: {need}", param="input_text")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if cut is not None:
            most = room if cut < 0 else cut
            # From the left by default: `vllm/tokenizers/registry.py:143` `resolve_tokenizer_args`
            first = 0 if request.truncation_side == "right" else max(0, len(ids) - most)
            ids = ids[first : first + most]
        if len(ids) > room:
            raise APIError(
                f"prompt has {len(ids)} tokens, and the request asks for {wanted or 0} more: need "
                f"at most max_model_len={self.max_model_len} together", param="input_tokens",
            )  # fmt: skip
        return ids

    def with_placeholders(
        self, ids: list[int], num_pictures: int, request: Generation
    ) -> list[int]:
        """The prompt's tokens as the engine will count them, if they and the output fit.

        Raises:
            APIError: they do not, or the prompt has not a marker for each picture.
        """
        from mini_vllm.multimodal.processor import expand

        assert self.engine.about.image is not None
        try:
            ids, _ = expand(ids, *self.engine.about.image, num_pictures)
        except ValueError as error:
            raise APIError(f"messages: {error}") from None
        _, wanted = request.output_limit()
        if len(ids) + max(wanted or 1, 1) > self.max_model_len:
            raise APIError(
                f"prompt has {len(ids)} tokens with its pictures, and the request asks for "
                f"{wanted or 1} more: need at most max_model_len={self.max_model_len} together",
                param="input_tokens",
            )  # fmt: skip
        return ids

    def _most_chars(self) -> int:
        """Characters that one token can stand for."""
        return getattr(self.tokenizer, "max_chars_per_token", 64)

    def most_tokens(self, request: Generation, num_prompt_tokens: int) -> int:
        """Output tokens: what is asked for, within what the context leaves."""
        left = self.max_model_len - num_prompt_tokens
        _, wanted = request.output_limit()
        wanted = self.defaults.get("max_tokens") if wanted is None else wanted
        return left if wanted is None else min(left, wanted)

    def params_of(
        self, request: Generation, max_tokens: int, constraint: Any = None
    ) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            APIError: a value is out of range.
        """
        about = self.engine.about
        for name in ("logit_bias", "allowed_token_ids"):
            ids = [int(token) for token in getattr(request, name) or ()]
            wrong = [i for i in ids if not 0 <= i < about.vocab_size]
            if wrong:
                need = f"0 to {about.vocab_size - 1}"
                raise APIError(f"{name} holds token ids {wrong}: need {need}", param=name)
        most = about.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            count = request.num_logprobs() if name == "logprobs" else request.prompt_logprobs
            wanted = about.vocab_size if count == -1 else count or 0
            if -1 < most < wanted:
                raise APIError(f"{name}={count}: need at most {most}", param=name)
        return request.sampling_params(max_tokens, self.defaults, constraint)

    @asynccontextmanager
    async def streams(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_id: str,
        request: Generation,
    ) -> AsyncIterator[list[Stream]]:  # fmt: skip
        """Streams of all prompts; whatever is unfinished when the block is left is aborted."""
        adapter = self.adapter_of(request.model)
        opened: dict[int, Stream] = {}

        async def open_one(number: int) -> None:
            opened[number] = await self.engine.open(
                prompts[number], params[number], f"{request_id}-{number}",
                priority=request.priority, cache_salt=request.cache_salt, lora_request=adapter,
            )  # fmt: skip

        try:
            async with asyncio.TaskGroup() as together:  # one step takes them all
                for number in range(len(prompts)):
                    together.create_task(open_one(number))
            yield [opened[number] for number in range(len(prompts))]
        except BaseExceptionGroup as refused:
            raise refused.exceptions[0] from None
        finally:
            for stream in opened.values():
                self.engine.abort(stream.request_id)


@dataclass(slots=True)
class Grown:
    """One completion as it grows."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False
    """Whether a chunk of it was sent."""
    called: bool = False
    """Whether it has called a tool."""

    def take(self, delta: Delta) -> None:
        """Add what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def version() -> str:
    """Of this engine, "0" where it runs from a folder that was not installed."""
    try:
        return metadata.version("mini-vllm-course")
    except metadata.PackageNotFoundError:
        return "0"


def new_id(prefix: str, request: Generation, header: str | None) -> str:
    """The id of an answer: the header's, the body's, or a new one."""
    return f"{prefix}-{header or request.request_id or uuid.uuid4().hex}"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(event: Mapping[str, Any] | str) -> str:
    """One server-sent event."""
    text = event if isinstance(event, str) else _encode(event)
    return f"data: {text}\n\n"


def usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    """The `usage` object."""
    total = num_prompt_tokens + num_tokens
    counts = {"prompt_tokens": num_prompt_tokens, "total_tokens": total}
    return {**counts, "completion_tokens": num_tokens}


def usage_chunk(
    served: Served, head: Mapping[str, Any], num_prompt_tokens: int, grown: Iterable[Grown]
) -> dict[str, Any]:
    """The chunk that ends a stream whose client wants to know what it cost."""
    total = sum(len(choice.token_ids) for choice in grown)
    return {
        **head, "choices": [], "usage": usage(num_prompt_tokens, total),
        "system_fingerprint": served.fingerprint,
    }  # fmt: skip


def prompt_logprobs(stream: Stream) -> list[Any] | None:
    """Per prompt token what was noted of it, as JSON; None unless it was asked for."""
    if (found := stream.prompt_logprobs) is None:
        return None
    return [None if at is None else {str(t): _entry(e) for t, e in at.items()} for at in found]


def _entry(noted: Logprob) -> dict[str, Any]:
    value = max(noted.logprob, LOWEST)
    return {"logprob": value, "rank": noted.rank, "decoded_token": noted.decoded_token}


def piece(token_id: int, noted: Logprob, as_id: bool | None) -> str:
    """A token's text as an answer names it."""
    return f"token_id:{token_id}" if as_id else noted.decoded_token or ""


def raise_if_failed(delta: Delta) -> None:
    """A request that got no token because of what it asked for is the client's error."""
    if delta.finish_reason == "error":
        raise APIError(f"the request ended in an error: {delta.stop_reason}")


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of several streams as they come, with the stream's number."""
    if len(streams) == 1:
        async for delta in streams[0].deltas():
            yield 0, delta
        return
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def pump(number: int, stream: Stream) -> None:
        try:
            async for delta in stream.deltas():
                queue.put_nowait((number, delta))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_open -= 1
            else:
                yield found
    finally:
        for task in pumps:
            task.cancel()


async def framed(chunks: AsyncGenerator[Mapping[str, Any], None]) -> AsyncGenerator[str, None]:
    """A stream's events: its chunks, an error in their place if one is raised, and `[DONE]`."""
    try:
        async with aclosing(chunks):  # a client that leaves ends them at once
            async for chunk in chunks:
                yield sse(chunk)
    except APIError as error:
        yield sse(error.body())
    except (ValueError, TypeError, OverflowError) as error:  # upstream takes them for the client's
        yield sse(APIError(str(error)).body())
    except Exception as error:
        yield sse(APIError(str(error), "InternalServerError", 500).body())
    yield sse("[DONE]")


def beam_params_of(served: Served, request: Generation, num_prompt_tokens: int) -> BeamSearchParams:
    """What a beam search is asked for.

    Raises:
        APIError: a length penalty that no score can be divided by.
        ValueError: `BeamSearchParams` refuses a value, or the engine the width.
    """
    most = served.most_tokens(request, num_prompt_tokens)
    params = request.beam_search_params(most, served.defaults)
    about, penalty = served.engine.about, params.length_penalty
    check_width(params, about.max_logprobs, about.vocab_size)
    try:
        1.0 / served.max_model_len**penalty
    except ArithmeticError:
        need = f"a power of the length, at most {served.max_model_len}, that a float holds"
        raise APIError(f"length_penalty={penalty}: need {need}", param="length_penalty") from None
    return params


async def beams_of(
    served: Served, request: Generation, ids: list[int], params: BeamSearchParams, request_id: str
) -> list[Grown]:
    """A prompt's beams, the best first; a stop token counts as a token and has no text.

    Each round is requests of one token that step with all others, so no client waits for a search
    and one whose client leaves is aborted. Mirrors
    `vllm/entrypoints/generate/beam_search/online.py:28` `BeamSearchOnlineMixin.beam_search`.

    Raises:
        APIError: a request ended in an error, or was aborted since the server ends.
        ValueError: a beam outgrew the pool.
    """
    eos = served.tokenizer.eos_token_id
    search = Search(params, eos, [BeamSearchSequence(ids)])
    for number in range(params.max_tokens):
        if not (beams := [beam.tokens for beam in search.live]):
            break
        found: list[Mapping[int, Logprob]] = [{}] * len(beams)
        wanted = [search.one_token()] * len(beams)
        async with served.streams(beams, wanted, f"{request_id}-{number}", request) as streams:
            async for index, delta in merged(streams):
                raise_if_failed(delta)
                if delta.finish_reason == "abort":
                    raise APIError("the search was aborted", "InternalServerError", 500)
                found[index] = delta.logprobs[0]
        search.grow(found)
    grown = []
    for beam in search.best():
        new = beam.tokens[len(ids) :]
        stopped = bool(new) and new[-1] in served.engine.about.eos_token_ids
        text = served.tokenizer.decode(new[:-1] if stopped else new)
        grown.append(Grown(text, new, finish_reason="stop" if stopped else "length"))
    return grown
