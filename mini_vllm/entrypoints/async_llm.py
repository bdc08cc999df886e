"""The engine on a thread of its own, and requests that are awaited piece by piece.

Promises: the engine is touched by its own thread only; a reader that is slow gets several steps'
text at once and holds nobody up; who stops reading is aborted. Mirrors
`vllm/v1/engine/async_llm.py:70` `AsyncLLM` and `vllm/v1/engine/output_processor.py:45`
`RequestOutputCollector`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.engine import LLMEngine
from mini_vllm.outputs import text_of
from mini_vllm.request import Request
from mini_vllm.sample.logprobs import Logprob, as_dicts
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.lora.request import LoRARequest


HANDOVER_S = 0.05
"""Seconds that the engine waits for the loop to take what a step said. Both share one interpreter:
without the wait the engine runs on, and readers get several steps at once."""


class EngineDead(RuntimeError):
    """The engine's thread has ended, by `close` or by an exception; nothing can be asked of it."""


@dataclass(slots=True)
class Delta:
    """What is new of one completion since the last time it was asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    """Per token, as `CompletionOutput.logprobs`; empty unless they were asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def merge(self, later: Delta) -> None:
        """Take in what came after it."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class _Watched:
    """One completion of a stream, seen by the engine's thread."""

    request: Request
    index: int
    detokenizer: IncrementalDetokenizer
    hold: int
    """Characters that may begin a stop text and are kept back until the end."""
    num_tokens: int = 0
    num_chars: int = 0
    done: bool = False

    def delta(self, tokenizer: Tokenizer) -> Delta | None:
        """What the last step added, None if nothing."""
        request, tokens = self.request, self.request.output_token_ids
        if self.done or (len(tokens) == self.num_tokens and not request.is_finished):
            return None
        if request.is_finished:
            shown = text_of(request, tokenizer)
        else:
            self.detokenizer.update(request.text_token_ids)
            text = self.detokenizer.text
            shown = text[: max(self.num_chars, len(text) - self.hold)]
        noted: list[dict[int, Logprob]] = []
        if request.sampling_params.logprobs is not None:
            entries = request.logprobs.sample[self.num_tokens : len(tokens)]
            noted = as_dicts(entries, tokens[: self.num_tokens], tokenizer)
        found = Delta(
            self.index, shown[self.num_chars :], tokens[self.num_tokens :], noted,
            request.finish_reason, request.stop_reason,
        )  # fmt: skip
        self.num_tokens, self.num_chars = len(tokens), len(shown)
        self.done = request.is_finished
        return found


@dataclass(slots=True)
class Stream:
    """One prompt on its way; `deltas` yields what its completions say."""

    request_id: str
    prompt_token_ids: list[int]
    requests: list[Request]
    watched: list[_Watched]
    loop: asyncio.AbstractEventLoop
    error: BaseException | None = None
    arrived: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock."""
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: dict[int, Delta] = field(default_factory=dict)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that its first completion found in the prefix cache."""
        return self.requests[0].num_cached_tokens

    def put(self, deltas: list[Delta]) -> None:
        """On the loop's thread: what a step added; merged with what nobody has read yet."""
        for delta in deltas:
            if (waiting := self._pending.get(delta.index)) is None:
                self._pending[delta.index] = delta
            else:
                waiting.merge(delta)
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """On the loop's thread: there will be no more."""
        self.error = error
        self._ready.set()

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything that its completions say, until all have ended.

        Raises:
            EngineDead: the engine ended first.
        """
        num_open = len(self.watched)
        while num_open:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, {}
            for delta in pending.values():
                yield delta
                num_open -= delta.finish_reason is not None
            if self.error is not None and num_open:
                raise self.error


def _deliver(
    loop: asyncio.AbstractEventLoop, pairs: list[tuple[Stream, list[Delta]]], taken: threading.Event
) -> None:
    """On the loop's thread: wake every reader, let each have its turn, then say so."""
    for stream, deltas in pairs:
        stream.put(deltas)
    loop.call_soon(loop.call_soon, loop.call_soon, taken.set)


class AsyncLLM:
    """An engine that others await. Close it, or its thread keeps the process alive."""

    def __init__(self, engine: LLMEngine) -> None:
        """Start the thread; nobody else may step `engine` from now on."""
        self.engine = engine
        self.observers: list[Callable[[Stream, list[Delta]], None]] = []
        """Each is called on the engine's thread with what a step said; for metrics."""
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._streams: dict[str, Stream] = {}
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def errored(self) -> bool:
        """Whether the engine has ended."""
        return self._stopping or self._error is not None

    def close(self) -> None:
        """End the thread after the step that it is in; open streams raise `EngineDead`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that the engine's thread runs between two steps.

        Raises:
            EngineDead: the engine has ended.
            Exception: what the function raises.
        """
        answer: Future[Any] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                if self.errored:
                    raise EngineDead("the engine has ended")
                answer.set_result(function(*arguments))
            except BaseException as error:
                answer.set_exception(error)

        with self._changed:
            if self.errored:
                raise EngineDead("the engine has ended")
            self._calls.append(run)
            self._changed.notify()
        return await asyncio.wrap_future(answer)

    async def open(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Stream:
        """Queue a prompt and return its stream; end it with `abort` if it is not read to the end.

        Raises:
            ValueError: as `LLMEngine.add_request`.
            EngineDead: the engine has ended.
        """
        loop = asyncio.get_running_loop()

        def begin() -> Stream:
            name, requests = self.engine.inputs.process(
                prompt, params, request_id, priority, None, cache_salt, lora_request
            )
            hold = max(map(len, params.stop), default=1) - 1
            hold *= not params.include_stop_str_in_output
            watched = [
                _Watched(r, i, IncrementalDetokenizer(self.engine.tokenizer), hold)
                for i, r in enumerate(requests)
            ]
            stream = Stream(name, requests[0].prompt_token_ids, requests, watched, loop)
            self.engine.queue_requests(name, requests)
            self._streams[name] = stream
            return stream

        opening = asyncio.ensure_future(self.call(begin))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:  # the client left before it had its stream
            opening.add_done_callback(self._abort_when_open)
            raise

    def _abort_when_open(self, opening: asyncio.Future[Stream]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self.abort(opening.result().request_id)

    def abort(self, request_id: str) -> None:
        """End a request between two steps, from any thread; an unknown id is a no-op."""

        def end() -> None:
            self._streams.pop(request_id, None)
            self.engine.abort_request(request_id)

        with self._changed:
            self._calls.append(end)
            self._changed.notify()

    # ------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._calls or self._stopping or self._busy()):
                        self._changed.wait()
                    if self._stopping:
                        return
                    calls, self._calls = self._calls, []
                for call in calls:
                    call()
                if self._busy():
                    self.engine.step()
                    self._publish()
        except BaseException as error:
            self._error = error
        finally:
            self._end()

    def _busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def _publish(self) -> None:
        """Hand what the step said to whoever waits for it."""
        tokenizer = self.engine.tokenizer
        said: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[Delta]]]] = {}
        for name, stream in list(self._streams.items()):
            found = [d for w in stream.watched if (d := w.delta(tokenizer)) is not None]
            if not found:
                continue
            for observer in self.observers:
                observer(stream, found)
            if all(watched.done for watched in stream.watched):
                del self._streams[name]
            said.setdefault(stream.loop, []).append((stream, found))
        for loop, pairs in said.items():
            taken = threading.Event()
            loop.call_soon_threadsafe(_deliver, loop, pairs, taken)
            taken.wait(HANDOVER_S)

    def _end(self) -> None:
        reason = "it was closed" if self._error is None else repr(self._error)
        error = EngineDead(f"the engine has ended: {reason}")
        error.__cause__ = self._error
        with self._changed:
            self._stopping = True
            calls, self._calls = self._calls, []
        for stream in self._streams.values():
            if not stream.loop.is_closed():
                stream.loop.call_soon_threadsafe(stream.fail, error)
        for call in calls:  # each is told that the engine has ended
            call()
