"""A producer and a consumer as two processes, and the client that leads a prompt through both.

    with PrefillDecode("byte-llama") as pair:
        outputs = pair.generate(["hello world"], SamplingParams(max_tokens=8))

Promises: the client sees parameters and tokens, and the K and V go from process to process beside
it; a prompt whose producer is gone is computed by the consumer; at the end no process is left.
Mirrors `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py:219` `_handle_completions`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from mini_vllm.engine import LLMEngine
from mini_vllm.sampling_params import SamplingParams

START_TIMEOUT_S = 120.0
"""A process imports numpy and reads a checkpoint first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine process says of a request that ended."""

    request_id: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    kv_transfer_params: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Offered:
    """What an engine process says of a request that it has queued, and streams."""

    request_id: str
    kv_transfer_params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """What an engine process was asked to make, and why it makes no engine of it."""

    why: str


class EngineLostError(RuntimeError):
    """The process of an engine is gone."""


def engine_of(connection: Connection, model: Any, knobs: Mapping[str, Any]) -> LLMEngine:
    """The engine of a process; where it refuses, the other end hears why, and this process ends."""
    try:
        return LLMEngine(model, **knobs)
    except ValueError as error:
        connection.send(Refused(str(error)))
        raise SystemExit(1) from None


def serve(connection: Connection, model: Any, knobs: Mapping[str, Any]) -> None:
    """The loop of an engine process: requests in, answers out, until the other end is closed."""
    engine = engine_of(connection, model, knobs)
    room = engine.feature("kv_transfer")
    connection.send(None)
    answer_all(engine, connection, room.take_kv_transfer_params)


def answer_all(
    engine: LLMEngine, connection: Connection,
    params_of: Callable[[str], dict[str, Any] | None] = lambda request_id: None,
) -> None:  # fmt: skip
    """Serve an engine until the other end is closed, then close it.

    `params_of` gives the `kv_transfer_params` of a request that ended, or that is streamed.
    """
    try:
        while True:
            while not engine.has_unfinished_requests() or connection.poll():
                try:
                    request_id, *rest = connection.recv()
                except EOFError:
                    return
                _take(engine, connection, request_id, *rest)
                if (early := params_of(request_id)) is not None:
                    connection.send(Offered(request_id, early))
            for request in engine.step():
                params = params_of(request.request_id)
                reason = str(request.finish_reason)
                connection.send(
                    Answer(
                        request.request_id, request.output_token_ids, reason, request.stop_reason,
                        params,
                    )
                )  # fmt: skip
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        engine.close()


def _take(
    engine: LLMEngine, connection: Connection, request_id: str, prompt: Any,
    params: SamplingParams, kv_transfer_params: Mapping[str, Any] | None,
) -> None:  # fmt: skip
    """Queue a request; one that is refused is answered at once."""
    try:
        engine.add_request(
            prompt, params, request_id=request_id, kv_transfer_params=kv_transfer_params
        )
    except ValueError as error:
        connection.send(Answer(request_id, [], "error", str(error), None))


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(
        self, model: Any, knobs: Mapping[str, Any], target: Callable[..., None] = serve
    ) -> None:
        """Start it, and wait until it listens.

        Raises:
            ValueError: the engine refuses `model` or `knobs`, in its own words.
            EngineLostError: the process ends, or says nothing in time.
        """
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, model, knobs), daemon=True)
        self.process.start()
        theirs.close()
        if not self.connection.poll(START_TIMEOUT_S):
            self.close()
            raise EngineLostError(
                f"the engine's process was not ready after {START_TIMEOUT_S:g} s, and was ended"
            )
        self.said: Any = self.receive()
        """What the process says of itself when it is ready."""
        if isinstance(self.said, Refused):
            self.close()
            raise ValueError(self.said.why)

    def submit(
        self, request_id: str, prompt: Any, params: SamplingParams,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Queue a request. Raises EngineLostError."""
        try:
            self.connection.send((request_id, prompt, params, kv_transfer_params))
        except OSError as error:
            raise EngineLostError(f"the engine's process has ended: {error}") from error

    def receive(self) -> Any:
        """The next `Answer`, or `Offered`. Raises EngineLostError."""
        try:
            answer: Answer | Offered = self.connection.recv()
        except (EOFError, OSError) as error:
            raise EngineLostError("the engine's process has ended") from error
        return answer

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class EnginePair:
    """Two engines in processes that begin and end together."""

    engines: dict[str, EngineProcess]
    """By role."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End both processes."""
        for engine in self.engines.values():
            engine.close()


class PrefillDecode(EnginePair):
    """One producer, one consumer, and the proxy between a caller and both."""

    def __init__(
        self, model: Any = "byte-llama", policy: str = "recompute",
        extra: Mapping[str, Any] | None = None, **knobs: Any,
    ) -> None:  # fmt: skip
        """Start both engines.

        Args:
            model: as for `LLM`.
            policy: `kv_load_failure_policy` of the consumer.
            extra: `kv_connector_extra_config` of both; with `{"stream": True}` the consumer is
                asked when a prompt is queued, and reads each layer as soon as it is computed.
            knobs: of both engines, such as `num_blocks`.

        Raises:
            ValueError: an engine refuses what is given.
        """
        self.engines = {}
        self.num_fallbacks = 0
        """Prompts that the consumer computed, since the producer was gone or said no."""
        self._num_requests = 0
        try:
            for role in ("kv_producer", "kv_consumer"):
                config = {
                    "kv_connector": "SocketConnector", "kv_role": role,
                    "kv_load_failure_policy": policy, "kv_connector_extra_config": extra or {},
                }  # fmt: skip
                made = {**knobs, "kv_transfer_config": config}
                self.engines[role] = EngineProcess(model, made)
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[Answer]:
        """Each prompt through the producer and then the consumer.

        Raises:
            EngineLostError: the consumer is gone.
        """
        first = replace(params, max_tokens=1, min_tokens=0)
        jobs: dict[str, Any] = {}
        for prompt in prompts:
            jobs[f"pd-{self._num_requests}"] = prompt
            self._num_requests += 1
        at_producer, streamed, answers = set[str](), set[str](), dict[str, Answer]()
        for request_id, prompt in jobs.items():
            try:
                self.engines["kv_producer"].submit(
                    request_id, prompt, first, {"do_remote_decode": True}
                )
                at_producer.add(request_id)
            except EngineLostError:
                self._decode(request_id, prompt, params, None)
        while len(answers) < len(jobs):
            for role in self._ready(bool(at_producer)):
                try:
                    answer = self.engines[role].receive()
                except EngineLostError:
                    if role == "kv_consumer":
                        raise
                    for request_id in at_producer - streamed:
                        self._decode(request_id, jobs[request_id], params, None)
                    at_producer.clear()
                    continue
                name = answer.request_id
                if role == "kv_consumer":
                    answers[name] = answer
                elif name in at_producer:
                    if name not in streamed:
                        self._decode(name, jobs[name], params, answer.kv_transfer_params)
                    if isinstance(answer, Offered):
                        streamed.add(name)
                    else:
                        at_producer.discard(name)
        return [answers[name] for name in jobs]

    def _decode(self, request_id: str, prompt: Any, params: SamplingParams, kv: Any) -> None:
        self.num_fallbacks += kv is None
        self.engines["kv_consumer"].submit(request_id, prompt, params, kv)

    def _ready(self, wants_producer: bool) -> list[str]:
        """The roles whose engine has said something, or is gone."""
        roles = ["kv_producer", "kv_consumer"] if wants_producer else ["kv_consumer"]
        ready = wait([self.engines[role].connection for role in roles])
        return [role for role in roles if self.engines[role].connection in ready]


def kill(engine: EngineProcess) -> None:
    """End an engine's process as a crash would, for drills."""
    with suppress(OSError):
        engine.process.kill()
    engine.process.join()
