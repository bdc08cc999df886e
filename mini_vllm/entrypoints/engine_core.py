"""The engine's side of a server: takes requests from a pipe, steps, and says what is new.

Promises: everything that comes in is answered, and one step's news is one message; a constraint is
parsed beside the steps; it ends when the pipe closes. Mirrors `vllm/v1/engine/core.py:835`
`EngineCoreProc`, a process of its own there as well, so that writing answers and computing the next
do not share an interpreter, with a thread that takes in requests while the loop steps.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.engine import LLMEngine
from mini_vllm.observe.stats import StepStats
from mini_vllm.outputs import RequestOutput, text_of
from mini_vllm.request import Request
from mini_vllm.sample.logprobs import Logprob, TokenLogprobs, as_dicts
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.tokenizer import Tokenizer

PARSERS = 4
"""Threads that parse constraints; those of several clients do not wait for one another."""
SWITCH_S = 0.0005
"""Seconds that a thread which parses may keep the interpreter when the loop wants it: a step takes
it many times, and a tenth of the default adds little to each."""


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


@dataclass(frozen=True, slots=True)
class About:
    """What the other side must know of an engine, told once."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int | None
    max_logprobs: int
    chat_template: str | None
    config: str
    image: tuple[int, int] | None = None
    """The token that stands for a picture, and as how many placeholders it counts; None for a model
    that does not see."""

    @classmethod
    def of(cls, engine: LLMEngine) -> About:
        """Of an engine."""
        sees = engine.feature("multimodal")
        return cls(
            engine.tokenizer, engine.inputs.vocab_size, tuple(engine.eos_token_ids),
            engine.max_model_len, engine.config.max_logprobs, engine.chat_template,
            repr(engine.config),
            sees and (sees.config.image_token_index, sees.config.num_image_tokens),
        )  # fmt: skip


@dataclass(slots=True)
class Unsent:
    """The tokens of a request that the other side has not got."""

    request: Request
    num_sent: int = 0
    done: bool = False
    """Whether it was told of the end."""

    def take(self) -> tuple[list[int], Sequence[TokenLogprobs]] | None:
        """What the last step added, each token with what was noted of it; None if nothing."""
        request, tokens = self.request, self.request.output_token_ids
        if self.done or (len(tokens) == self.num_sent and not request.is_finished):
            return None
        start, self.num_sent, self.done = self.num_sent, len(tokens), request.is_finished
        noted: Sequence[TokenLogprobs] = ()
        if request.sampling_params.num_logprobs is not None:
            noted = request.logprobs.sample[start : len(tokens)]
        return tokens[start:], noted


@dataclass(slots=True)
class Collected(Unsent):
    """The same by way of a front door part, whose collector keeps it for the reader."""

    collector: Any = None
    """Its `get_nowait()` gives what waits, each with `token_ids` and `finish_reason`, or None."""

    def take(self) -> tuple[list[int], Sequence[TokenLogprobs]] | None:
        """What the collector has."""
        if not (deltas := self.collector.get_nowait()):
            return None
        tokens = [token for delta in deltas for token in delta.token_ids]
        start, self.num_sent = self.num_sent, self.num_sent + len(tokens)
        self.done = any(delta.finish_reason is not None for delta in deltas)
        noted: Sequence[TokenLogprobs] = ()
        if self.request.sampling_params.logprobs is not None:
            noted = self.request.logprobs.sample[start : self.num_sent]
        return tokens, noted


@dataclass(slots=True)
class _Watched:
    """One completion, as far as the other side has heard of it."""

    unsent: Unsent
    index: int
    detokenizer: IncrementalDetokenizer
    hold: int
    """Characters that may begin a stop text and are kept back until the end."""
    num_chars: int = 0

    def delta(self, tokenizer: Tokenizer) -> Delta | None:
        """What the last step added, None if nothing."""
        request = self.unsent.request
        if (new := self.unsent.take()) is None:
            return None
        tokens, noted = new
        if request.is_finished:
            shown = text_of(request, tokenizer)
        else:
            self.detokenizer.update(request.text_token_ids)
            text = self.detokenizer.text
            shown = text[: max(self.num_chars, len(text) - self.hold)]
        logprobs: list[dict[int, Logprob]] = []
        if noted:
            before = request.output_token_ids[: self.unsent.num_sent - len(tokens)]
            logprobs = as_dicts(noted, before, tokenizer)
        found = Delta(
            self.index, shown[self.num_chars :], tokens, logprobs, request.finish_reason,
            request.stop_reason,
        )  # fmt: skip
        self.num_chars = len(shown)
        return found


@dataclass(slots=True)
class _Stream:
    """One prompt and its completions."""

    requests: list[Request]
    watched: list[_Watched]
    about_prompt: bool
    """Whether log-probabilities of the prompt are wanted, with the first news."""


@dataclass(slots=True)
class News:
    """What a step says of one prompt."""

    name: str
    deltas: list[Delta]
    num_cached_tokens: int | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With the first news, if they were asked for."""


class EngineCore:
    """The loop.

    In: `("open", number, name, arguments)`, `("call", number, function, arguments)`, `("abort",
    name)`, `("shutdown",)`, `("close",)`. Out: `("answer", number, value)`, `("refused", number,
    error)`, `("news", [News], Stats)`, `("dead", reason)`.
    """

    def __init__(self, engine: LLMEngine, pipe: Connection) -> None:
        self.engine, self.pipe = engine, pipe
        self.stats = StepStats(engine)
        make = engine.parts.of_room("entrypoints", "front_door")
        self.front_door = None if make is None else make(engine)
        """A part that opens plain requests, steps the engine and lets clients leave; None: the loop
        does so itself."""
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._preparing: dict[str, tuple[int, Future[None]]] = {}
        """Requests whose constraint is being parsed; an abort takes them out."""
        self._pool: ThreadPoolExecutor | None = None
        self._stale = False
        """Whether requests have gone since the other side was last told the numbers."""
        self._shutting_down = False
        """Whether requests end as aborted, those under way and those that still come."""

    def run(self) -> None:
        """Until the pipe closes."""
        threading.Thread(target=self._listen, name="engine inbox", daemon=True).start()
        try:
            while True:
                while not self.engine.has_unfinished_requests() or not self._inbox.empty():
                    if self._stale and self._inbox.empty():
                        self._tell()  # an abort makes no step, and the gauges must fall
                    self._take(*self._inbox.get())
                (self.engine if self.front_door is None else self.front_door).step()
                self._tell()
        except (EOFError, OSError):  # asked to end, or the other side is gone
            pass
        except Exception as error:
            self.pipe.send(("dead", f"{type(error).__name__}: {error}"))
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self.pipe.close()

    def _listen(self) -> None:
        """On a thread: take in what comes, so that a sender never waits for a step."""
        message: tuple[Any, ...] = ()
        while message != ("close",):
            try:
                message = self.pipe.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed while it was read
                message = ("close",)
            self._inbox.put(message)

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "close":
            raise EOFError
        if kind == "abort":
            self._abort(rest[0])
        elif kind == "shutdown":
            self._shut_down()
        elif kind == "ready":
            self._ready(*rest)
        elif kind == "open" and rest[2][1].structured_outputs is not None:
            self._prepare(*rest)
        else:
            number, what, arguments = rest
            if kind == "open":
                self._answer(number, lambda: self._open(what, *arguments))
            else:
                self._answer(number, lambda: what(self.engine, *arguments))

    def _answer(self, number: int, work: Callable[[], Any]) -> None:
        """Send what the work returns, or the exception that it raises."""
        try:
            self.pipe.send(("answer", number, work()))
        except Exception as error:
            self.pipe.send(("refused", number, error))

    def _abort(self, name: str) -> None:
        """End a request, also one that is still being prepared."""
        if (preparing := self._preparing.pop(name, None)) is not None:
            preparing[1].cancel()
        self._streams.pop(name, None)
        if self.front_door is not None:
            self.front_door.leave(name)
        self.engine.abort_request(name)
        self._stale = True

    def _shut_down(self) -> None:
        """End all requests with the finish reason "abort", and say so.

        As `vllm/v1/engine/core.py:1258` `EngineCoreProc._handle_shutdown` without a timeout.
        """
        self._shutting_down = True
        for name in list(self._streams):
            self._end_as_aborted(name)

    def _end_as_aborted(self, name: str) -> None:
        """Abort a request that is watched, so that what it has and its end are told."""
        if self.front_door is not None:  # it forgets the request, so its rest is told from here
            self.front_door.leave(name)
            for watched in self._streams[name].watched:
                unsent = watched.unsent
                watched.unsent = Unsent(unsent.request, unsent.num_sent, unsent.done)
        self.engine.abort_request(name)
        self._stale = True

    def _prepare(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        """Parse a request's constraint on a thread: it may take long, and the others step on.

        As `vllm/v1/engine/core.py:794` `EngineCore.preprocess_add_request`, which runs on a thread
        as well.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(PARSERS, "constraint")

        def prepare() -> None:
            refused = None
            try:
                self.engine.prepare(arguments[1])
            except Exception as error:
                refused = error
            self._inbox.put(("ready", number, name, arguments, refused))

        self._preparing[name] = number, self._pool.submit(prepare)

    def _ready(
        self, number: int, name: str, arguments: tuple[Any, ...], refused: Exception | None
    ) -> None:
        """A constraint was parsed, or refused; the client may have left meanwhile."""
        if name not in self._preparing or self._preparing[name][0] != number:
            return
        del self._preparing[name]
        if refused is not None:
            self.pipe.send(("refused", number, refused))
        else:
            self._answer(number, lambda: self._open(name, *arguments))

    def _open(
        self,
        name: str,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Queue a prompt and watch its completions; its token ids. `options` as
        `InputProcessor.process` takes them."""
        hold = max(map(len, params.stop), default=1) - 1
        hold *= not params.include_stop_str_in_output
        is_plain = params.n == 1 and isinstance(prompt, str | list) and not any(options.values())
        if self.front_door is not None and is_plain:
            token_ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            collector = self.front_door.open(name, list(token_ids), params)
            requests = [self.engine.requests[name]]
            unsent: list[Unsent] = [Collected(requests[0], collector=collector)]
        else:
            _, requests = self.engine.inputs.process(prompt, params, name, **options)
            self.engine.queue_requests(name, requests)
            unsent = [Unsent(request) for request in requests]
        watched = [
            _Watched(each, index, self.engine.parts.detokenizer(self.engine.tokenizer), hold)
            for index, each in enumerate(unsent)
        ]
        self._streams[name] = _Stream(requests, watched, params.prompt_logprobs is not None)
        if self._shutting_down:
            self._end_as_aborted(name)
        return requests[0].prompt_token_ids

    def _tell(self) -> None:
        """Say what the step added."""
        tokenizer = self.engine.tokenizer
        news = []
        for name, stream in list(self._streams.items()):
            deltas = [d for w in stream.watched if (d := w.delta(tokenizer)) is not None]
            if not deltas:
                continue
            entry = News(name, deltas, stream.requests[0].num_cached_tokens)
            if stream.about_prompt:
                stream.about_prompt = False
                output = RequestOutput.of(name, stream.requests, "", tokenizer)
                entry.prompt_logprobs = output.prompt_logprobs
            news.append(entry)
            if all(watched.unsent.done for watched in stream.watched):
                del self._streams[name]
        self._stale = False
        self.pipe.send(("news", news, self.stats.read()))


def serve(pipe: Connection, make: Callable[..., LLMEngine], arguments: dict[str, Any]) -> None:
    """In a process of its own: make the engine, say what it is, serve until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole group; the front end ends this one
    sys.setswitchinterval(SWITCH_S)
    try:
        engine = make(**arguments)
    except Exception as error:
        pipe.send(("refused", 0, error))
        return
    pipe.send(("answer", 0, About.of(engine)))
    try:
        EngineCore(engine, pipe).run()
    finally:
        engine.close()


def serve_in_thread(engine: LLMEngine, pipe: Connection) -> threading.Thread:
    """The same beside others in this process, for tests and small uses."""
    pipe.send(("answer", 0, About.of(engine)))
    thread = threading.Thread(target=EngineCore(engine, pipe).run, name="engine", daemon=True)
    thread.start()
    return thread
