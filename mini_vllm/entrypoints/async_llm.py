"""An engine that is awaited: requests go out through a pipe, their text comes back piece by piece.

Promises: a reader that is slow gets several steps' text at once and delays no other; a request is
aborted when its reader stops; an engine that ends is said to all who wait, and leaves no process.
Mirrors `vllm/v1/engine/async_llm.py:70` `AsyncLLM` and `vllm/v1/engine/output_processor.py:45`
`RequestOutputCollector`.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints.engine_core import About, Delta, News, serve, serve_in_thread
from mini_vllm.input_processor import Prompt
from mini_vllm.observe.stats import Stats
from mini_vllm.sample.logprobs import Logprob
from mini_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_vllm.lora.request import LoRARequest

GRACE_S = 5.0
"""Seconds that an engine's process has to end by itself."""


class EngineDead(RuntimeError):
    """The engine has ended, by `close` or by an exception; nothing can be asked of it."""


@dataclass(slots=True)
class Stream:
    """One prompt on its way; `deltas` yields what its completions say."""

    request_id: str
    num_open: int
    """Completions that have not ended."""
    loop: asyncio.AbstractEventLoop
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    arrived: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock."""
    last_news: float | None = None
    """When the last news came, seconds on the monotonic clock; None before the first."""
    error: BaseException | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: dict[int, Delta] = field(default_factory=dict)

    def opened(self, answer: Future[list[int]]) -> None:
        """The engine has taken it, or not."""
        if not answer.cancelled() and answer.exception() is None:
            self.prompt_token_ids = answer.result()

    def put(self, news: News) -> None:
        """On the loop's thread: what a step added; merged with what has not been read yet."""
        self.num_cached_tokens = news.num_cached_tokens
        self.prompt_logprobs = news.prompt_logprobs or self.prompt_logprobs
        for delta in news.deltas:
            self.num_open -= delta.finish_reason is not None
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
        while True:
            await self._ready.wait()
            self._ready.clear()
            pending, self._pending = self._pending, {}
            for delta in pending.values():
                yield delta
            if self._pending:
                continue
            if self.num_open <= 0:
                return
            if self.error is not None:
                raise self.error


class AsyncLLM:
    """The front end's side of one engine. Close it, or its process waits for the pipe to break."""

    def __init__(self, make: Callable[..., LLMEngine] | LLMEngine, **arguments: Any) -> None:
        """Start an engine and wait until it is there.

        Args:
            make: makes the engine in a process of its own; importable, as are its `arguments`. Or
                an engine, which then runs on a thread of this process; only this object may step.

        Raises:
            Exception: what `make` raises.
        """
        self._pipe, theirs = multiprocessing.Pipe()
        self._end: Callable[[], None]
        if isinstance(make, LLMEngine):
            thread = serve_in_thread(make, theirs)
            self._end = Finalize(self, _end_thread, (thread, self._pipe))
        else:
            context = multiprocessing.get_context("spawn")
            process = context.Process(target=serve, args=(theirs, make, arguments), name="engine")
            with _few_threads():
                process.start()
            theirs.close()
            self._end = Finalize(self, _end, (process, self._pipe), exitpriority=10)
        self.stats = Stats()
        """As of the last step that said anything."""
        self.observers: list[Callable[[Stream, News | None], None]] = []
        """Each is called on the loop's thread with what a step said, or None for an abort."""
        self.on_death: Callable[[EngineDead], None] | None = None
        """Called once, on a thread, when the engine ends without having been closed."""
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._asked: dict[int, Future[Any]] = {}
        self._streams: dict[str, Stream] = {}
        self._error: EngineDead | None = None
        self.shutting_down = False
        """Whether `shutdown` was called: what has not been asked yet is refused by who asks."""
        self._closing = False
        try:
            kind, _, found = self._pipe.recv()
        except EOFError:
            raise EngineDead("the engine's process ended before it was ready") from None
        if kind == "refused":
            raise found
        self.about: About = found
        self._reader = threading.Thread(target=self._read, name="engine news", daemon=True)
        self._reader.start()

    @property
    def error(self) -> EngineDead | None:
        """Why the engine has ended; None while it runs."""
        return self._error

    async def shutdown(self, timeout: float) -> None:
        """Give the requests under way `timeout` seconds; what is left then ends as "abort".

        The engine stays until `close`. Mirrors `vllm/v1/engine/async_llm.py:259`
        `AsyncLLM.shutdown`.
        """
        self.shutting_down = True
        await asyncio.sleep(timeout)
        self._send("shutdown")

    def close(self) -> None:
        """End the engine after the step that it is in; open streams raise `EngineDead`."""
        self._closing = True
        self._send("close")
        self._fail("it was closed")
        self._reader.join(GRACE_S)
        self._end()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function(engine, *arguments)` where the engine is, between two steps.

        Raises:
            EngineDead: the engine has ended.
            Exception: what the function raises.
        """
        return await asyncio.wrap_future(self._ask("call", function, arguments))

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Stream:
        """Queue a prompt and return its stream; end it with `abort` if it is not read to the end.

        Raises:
            ValueError: as `LLMEngine.add_request`, or a request with this id is open.
            EngineDead: the engine has ended.
        """
        if request_id in self._streams:
            raise ValueError(f"request_id={request_id!r}: a live request has this id")
        stream = Stream(request_id, params.n, asyncio.get_running_loop())
        self._streams[request_id] = stream
        options = {"priority": priority, "cache_salt": cache_salt, "lora_request": lora_request}
        arguments = (prompt, params, options)
        try:
            answer = self._ask("open", request_id, arguments)
            answer.add_done_callback(stream.opened)  # before any news of it is read
            await asyncio.wrap_future(answer)
        except asyncio.CancelledError:  # the client left before the engine had taken it
            self.abort(request_id)
            raise
        except BaseException:
            self._streams.pop(request_id, None)
            raise
        return stream

    def abort(self, request_id: str) -> None:
        """End a request between two steps; an id that is unknown or has ended is a no-op."""
        if (stream := self._streams.pop(request_id, None)) is None:
            return
        self._send("abort", request_id)
        for observer in self.observers:
            observer(stream, None)

    # ------------------------------------------------------------------ the pipe

    def _send(self, *message: Any) -> None:
        if self._error is None:
            try:
                with self._sending:
                    self._pipe.send(message)
            except OSError:
                self._fail("its process is gone")

    def _ask(self, kind: str, what: Any, arguments: tuple[Any, ...]) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        self._send(kind, number, what, arguments)
        if self._error is not None and self._asked.pop(number, None) is not None:
            raise self._error
        return answer

    def _read(self) -> None:
        """On a thread: hand over what comes, until nothing comes any more."""
        try:
            while True:
                kind, *rest = self._pipe.recv()
                if kind == "news":
                    self._news(*rest)
                elif kind == "dead":
                    self._fail(rest[0])
                    break
                else:
                    answer = self._asked.pop(rest[0], None)
                    if answer is None or not answer.set_running_or_notify_cancel():
                        continue
                    (answer.set_result if kind == "answer" else answer.set_exception)(rest[1])
        except (EOFError, OSError):
            self._fail("its process is gone")
        self._end()  # the process has ended, or is about to: nothing of it stays

    def _news(self, sent: list[News], stats: Stats) -> None:
        self.stats = stats
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, News]]] = {}
        for news in sent:
            if (stream := self._streams.get(news.name)) is not None:
                by_loop.setdefault(stream.loop, []).append((stream, news))
        for loop, pairs in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, pairs)

    def _deliver(self, pairs: list[tuple[Stream, News]]) -> None:
        for stream, news in pairs:
            if self._streams.get(stream.request_id) is not stream:
                continue  # aborted after the news was sent
            stream.put(news)
            if stream.num_open <= 0:
                self._streams.pop(stream.request_id, None)
            for observer in self.observers:
                observer(stream, news)
            stream.last_news = time.monotonic()

    def _fail(self, reason: str) -> None:
        """Tell all who wait; the first reason stays."""
        if self._error is None:
            self._error = EngineDead(f"the engine has ended: {reason}")
            if self.on_death is not None and not self._closing:
                self.on_death(self._error)
        for number in list(self._asked):
            if (answer := self._asked.pop(number, None)) and answer.set_running_or_notify_cancel():
                answer.set_exception(self._error)
        for stream in list(self._streams.values()):
            if not stream.loop.is_closed():
                stream.loop.call_soon_threadsafe(stream.fail, self._error)


@contextmanager
def _few_threads() -> Iterator[None]:
    """A process that is started here leaves one core to the front end.

    As `vllm/utils/ompmultiprocessing.py:25` `OMPProcessManager` reserves one. Where two processes
    both want all cores, the threads of matrix products wait for one another: on two cores the
    server was ten times slower.
    """
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    ours = {name: os.environ.get(name) for name in names}
    for name in names:
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) - 1)))
    try:
        yield
    finally:
        for name, value in ours.items():
            if value is None:
                del os.environ[name]


def _end_thread(thread: threading.Thread, pipe: Connection) -> None:
    pipe.close()
    thread.join()


def _end(process: Any, pipe: Connection) -> None:
    """Where the engine was not asked to end, the closed pipe asks; after `GRACE_S` it is ended."""
    pipe.close()
    process.join(GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()


__all__ = ["AsyncLLM", "Delta", "EngineDead", "Stream"]
