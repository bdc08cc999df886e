"""The engine's side of a server: takes requests from a pipe, steps, and says what is new.

Promises: everything that comes in is answered, and one step's news is one message; it ends when the
pipe closes. Mirrors `vllm/v1/engine/core.py:835` `EngineCoreProc`, a process of its own there as
well, so that writing answers and computing the next do not share an interpreter.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.engine import LLMEngine
from mini_vllm.observe.stats import StepStats
from mini_vllm.outputs import RequestOutput, text_of
from mini_vllm.request import Request
from mini_vllm.sample.logprobs import Logprob, as_dicts
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.tokenizer import Tokenizer


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

    @classmethod
    def of(cls, engine: LLMEngine) -> About:
        """Of an engine."""
        return cls(
            engine.tokenizer, engine.inputs.vocab_size, tuple(engine.eos_token_ids),
            engine.max_model_len, engine.config.max_logprobs, engine.chat_template,
            repr(engine.config),
        )  # fmt: skip


@dataclass(slots=True)
class _Watched:
    """One completion, as far as the other side has heard of it."""

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
    name)`, `("close",)`. Out: `("answer", number, value)`, `("refused", number, error)`, `("news",
    [News], Stats)`, `("dead", reason)`.
    """

    def __init__(self, engine: LLMEngine, pipe: Connection) -> None:
        self.engine, self.pipe = engine, pipe
        self.stats = StepStats(engine)
        self._streams: dict[str, _Stream] = {}

    def run(self) -> None:
        """Until the pipe closes."""
        try:
            while True:
                while not self.engine.has_unfinished_requests() or self.pipe.poll():
                    self._take(*self.pipe.recv())
                self.engine.step()
                self._tell()
        except (EOFError, OSError):  # asked to end, or nobody is there any more
            pass
        except Exception as error:
            self.pipe.send(("dead", f"{type(error).__name__}: {error}"))
        finally:
            self.pipe.close()

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "close":
            raise EOFError
        if kind == "abort":
            self._streams.pop(rest[0], None)
            self.engine.abort_request(rest[0])
            return
        number, what, arguments = rest
        try:
            done = self._open(what, *arguments) if kind == "open" else what(self.engine, *arguments)
            self.pipe.send(("answer", number, done))
        except Exception as error:
            self.pipe.send(("refused", number, error))

    def _open(
        self,
        name: str,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Queue a prompt; its token ids. `options` as `InputProcessor.process` takes them."""
        _, requests = self.engine.inputs.process(prompt, params, name, **options)
        hold = max(map(len, params.stop), default=1) - 1
        hold *= not params.include_stop_str_in_output
        watched = [
            _Watched(request, index, IncrementalDetokenizer(self.engine.tokenizer), hold)
            for index, request in enumerate(requests)
        ]
        self.engine.queue_requests(name, requests)
        self._streams[name] = _Stream(requests, watched, params.prompt_logprobs is not None)
        return requests[0].prompt_token_ids

    def _tell(self) -> None:
        """Say what the step added."""
        tokenizer = self.engine.tokenizer
        news = []
        for name, stream in list(self._streams.items()):
            deltas = [d for w in stream.watched if (d := w.delta(tokenizer)) is not None]
            if not deltas:
                continue
            told = News(name, deltas, stream.requests[0].num_cached_tokens)
            if stream.about_prompt:
                stream.about_prompt = False
                output = RequestOutput.of(name, stream.requests, "", tokenizer)
                told.prompt_logprobs = output.prompt_logprobs
            news.append(told)
            if all(watched.done for watched in stream.watched):
                del self._streams[name]
        self.pipe.send(("news", news, self.stats.read()))


def serve(pipe: Connection, make: Callable[..., LLMEngine], arguments: dict[str, Any]) -> None:
    """In a process of its own: make the engine, say what it is, serve until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches all; who began this process ends it
    try:
        engine = make(**arguments)
    except Exception as error:
        pipe.send(("refused", 0, error))
        return
    pipe.send(("answer", 0, About.of(engine)))
    EngineCore(engine, pipe).run()


def serve_in_thread(engine: LLMEngine, pipe: Connection) -> threading.Thread:
    """The same beside others in this process, for tests and small uses."""
    pipe.send(("answer", 0, About.of(engine)))
    thread = threading.Thread(target=EngineCore(engine, pipe).run, name="engine", daemon=True)
    thread.start()
    return thread
