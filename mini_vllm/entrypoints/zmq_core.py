"""This engine behind vLLM's own front end: `vllm serve` talks to it through its ZMQ boundary.

    vllm serve MODEL --data-parallel-size-local 0 --data-parallel-address 127.0.0.1 \
        --data-parallel-rpc-port 29550
    mini-vllm core tcp://127.0.0.1:29550 MODEL

vLLM's front end can wait for an engine core of another machine; this is one. It parses HTTP,
tokenizes, detokenizes and counts; what runs next, and every number of the model, is ours.
Promises: every request that comes is answered, one that this engine does not serve with the finish
reason "error"; it ends when the front end does. Mirrors `vllm/v1/engine/core.py:835`
`EngineCoreProc`; needs the extra `core`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints import wire
from mini_vllm.entrypoints.engine_core import Unsent
from mini_vllm.kv_cache import PrefixCacheStats
from mini_vllm.observe.stats import StepStats
from mini_vllm.plan import SchedulerOutput

IDENTITY = (0).to_bytes(2, "little")
"""The first engine of its front end."""
HANDSHAKE_S = 300.0
"""Seconds to wait for a front end that is starting."""
LINGER_MS = 4000


class FrontEndGone(ConnectionError):
    """The other side has closed, or never came."""


@dataclass(slots=True)
class _Live:
    """A request, as far as its front end has heard of it."""

    unsent: Unsent
    client: int
    events: list[tuple[int, float]] = field(default_factory=list)
    started: bool = False

    def news(self) -> list[Any] | None:
        """What the last step added, None if nothing."""
        request, first = self.unsent.request, not self.started
        if (new := self.unsent.take()) is None:
            return None
        tokens, noted = new
        wants_prompt = first and request.sampling_params.prompt_logprobs is not None
        found = wire.output(
            request.request_id,
            tokens,
            logprobs=noted,
            prompt_logprobs=request.logprobs.prompt if wants_prompt else (),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            events=self.events,
            prefill=(request.num_prompt_tokens, request.num_cached_tokens or 0) if first else None,
        )
        self.started, self.events = True, []
        return found


class ZmqCore:
    """The loop between one front end and one engine."""

    def __init__(self, engine: LLMEngine, address: str, timeout: float = HANDSHAKE_S) -> None:
        """Greet the front end that waits at `address` and say that the engine is ready.

        Args:
            engine: only this core may step it.
            address: of the handshake, as `tcp://127.0.0.1:29550`.
            timeout: seconds until the front end must have answered.

        Raises:
            ValueError: `address` is none, the front end's answer is not one, or it wants several
                engines to act together.
            FrontEndGone: it did not answer, or left before it did.
        """
        self.engine = engine
        self._live: dict[str, _Live] = {}
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._clients: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self.stats = StepStats(engine)
        engine.observers.append(self._planned)
        try:
            self._greet(address, timeout)
        except BaseException:
            self.close()
            raise

    def _socket(self, kind: int, address: str, name: str) -> zmq.Socket[bytes]:
        """A socket with its monitor; a ValueError names an address that is none."""
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        if kind == zmq.DEALER:
            socket.setsockopt(zmq.IDENTITY, IDENTITY)
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        self._monitors.append(socket.get_monitor_socket(events))
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ValueError(f"{name}={address!r}: need tcp://HOST:PORT ({error})") from None
        return socket

    def _greet(self, address: str, timeout: float) -> None:
        """As `vllm/v1/engine/core.py:1055` `EngineCoreProc.startup_handshake`: hello, addresses,
        ready. An engine of another machine is said to be headless."""
        about = {"local": False, "headless": True}
        shaking = self._socket(zmq.DEALER, address, "address")
        (leaving,), self._monitors = self._monitors, []
        with shaking:
            shaking.send(wire.pack({"status": "HELLO"} | about))
            found = dict(self._wait(shaking, leaving, timeout))
            shaking.disable_monitor()
            if shaking not in found:
                shaking.setsockopt(zmq.LINGER, 0)
                how = "left before it answered" if found else f"did not answer for {timeout:g} s"
                raise FrontEndGone(f"the front end at {address} {how}")
            inputs, outputs = wire.addresses(shaking.recv())
            ready = wire.pack(self._ready())
            for asking_at, telling_at in zip(inputs, outputs, strict=True):
                asking = self._socket(zmq.DEALER, asking_at, "inputs")
                asking.send(ready)
                self._poller.register(asking, zmq.POLLIN)
                self._clients.append((asking, self._socket(zmq.PUSH, telling_at, "outputs")))
            shaking.send(wire.pack({"status": "READY"} | about))
            if not self._all_connected(timeout):
                raise FrontEndGone(f"the front end at {address} left after its answer")
        for monitor in self._monitors:
            self._poller.register(monitor, zmq.POLLIN)

    def _all_connected(self, timeout: float) -> bool:
        """Whether every socket came to its front end in time, and none was left meanwhile: the
        others then never come."""
        poller, coming = zmq.Poller(), set(self._monitors)
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        until = time.monotonic() + timeout
        while coming and (found := poller.poll(max(0, int(1e3 * (until - time.monotonic()))))):
            for monitor, _ in found:
                if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    return False
                coming.discard(monitor)
        return not coming

    @staticmethod
    def _wait(shaking: Any, leaving: Any, timeout: float) -> list[tuple[Any, int]]:
        """Which of the two has something: an answer, or the news that the other side has left."""
        poller = zmq.Poller()
        poller.register(shaking, zmq.POLLIN)
        poller.register(leaving, zmq.POLLIN)
        until = time.monotonic() + timeout
        while found := poller.poll(max(0, int(1e3 * (until - time.monotonic())))):
            if shaking in dict(found):
                break
            if recv_monitor_message(leaving)["event"] == zmq.EVENT_DISCONNECTED:
                break
        return found

    @staticmethod
    def _heard(monitor: zmq.Socket[bytes]) -> None:
        """Take one event of a connection; its end is the front end's."""
        if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
            raise FrontEndGone("the front end has closed its connection")

    def _ready(self) -> dict[str, Any]:
        """What the front end adopts: `vllm/v1/engine/__init__.py:68` `EngineCoreReadyResponse`."""
        return {
            "max_model_len": self.engine.max_model_len,
            "num_gpu_blocks": self.engine.config.cache.num_blocks,
            "dp_stats_address": None,
        }

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until the front end has gone.

        Raises:
            FrontEndGone: it has.
            Exception: the engine failed; the front end has been told.
        """
        try:
            while True:
                self._take_all(wait=not self.engine.has_unfinished_requests())
                if self.engine.has_unfinished_requests():
                    self.engine.step()
                    self._tell()
        except FrontEndGone:
            raise
        except Exception:
            for _, telling in self._clients:
                telling.send(wire.DEAD)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Close every socket; what was sent goes out first."""
        self._context.destroy(LINGER_MS)

    def _take_all(self, wait: bool) -> None:
        """Take in everything that has come; with `wait`, at least one message."""
        while ready := self._poller.poll(None if wait else 0):
            for socket, _ in ready:
                if socket in self._monitors:
                    self._heard(socket)
                    continue
                kind, *frames = socket.recv_multipart()
                self._take(kind, frames)
            wait = False

    def _take(self, kind: bytes, frames: list[bytes]) -> None:
        if kind == wire.ADD:
            self._add(wire.request(frames[0]))
        elif kind == wire.ABORT:
            for request_id in wire.unpack(frames[0]):
                if self._live.pop(request_id, None):
                    self.engine.abort_request(request_id)
        elif kind == wire.UTILITY:
            self._call(*wire.unpack(frames[0]))
        elif kind != wire.START_DP_WAVE:
            raise ValueError(
                f"message of kind {kind!r}: need a kind of vLLM's EngineCoreRequestType"
            )

    def _add(self, message: Mapping[str, Any]) -> None:
        request_id, client = message["request_id"], message["client_index"]
        try:
            wire.check(message)
            params = wire.sampling_params(message["sampling_params"])
            rest = message["priority"], message["arrival_time"], message["cache_salt"]
            _, (request,) = self.engine.inputs.process(
                message["prompt_token_ids"],
                params,
                request_id,
                *rest,
                lora_request=self._adapter(message),
            )
            self.engine.queue_requests(request_id, [request])
        except ValueError as error:
            print(f"{request_id}: {error}", flush=True)
            self._send(client, [wire.output(request_id, (), finish_reason="error")])
            return
        self._live[request_id] = _Live(Unsent(request), client, [(wire.QUEUED, time.monotonic())])

    @staticmethod
    def _adapter(message: Mapping[str, Any]) -> Any:
        if message["lora_request"] is None:
            return None
        from mini_vllm.lora.request import LoRARequest

        return LoRARequest(*message["lora_request"][: len(wire.LORA)])

    # ------------------------------------------------------------------ what goes out

    def _planned(self, plan: SchedulerOutput) -> None:
        """Note when requests began and were put back; the front end's metrics are made of it."""
        now = time.monotonic()
        for kind, ids in (
            (wire.SCHEDULED, plan.scheduled_new_req_ids),
            (wire.PREEMPTED, plan.preempted_req_ids),
        ):
            for request_id in ids:
                if request_id in self._live:
                    self._live[request_id].events.append((kind, now))

    def _tell(self) -> None:
        """One message for each front end that has news; the first carries the step's numbers."""
        news: dict[int, list[list[Any]]] = {}
        for request_id, live in list(self._live.items()):
            if (output := live.news()) is not None:
                news.setdefault(live.client, []).append(output)
                if live.unsent.done:
                    del self._live[request_id]
        stats: dict[str, Any] | None = self._stats()
        for client in sorted({0, *news}):
            self._send(client, news.get(client, []), stats)
            stats = None

    def _send(
        self, client: int, news: list[list[Any]], stats: Mapping[str, Any] | None = None
    ) -> None:
        self._clients[client][1].send(wire.outputs(news, stats, time.monotonic()))

    def _stats(self) -> dict[str, Any]:
        """As `vllm/v1/metrics/stats.py:171` `SchedulerStats`: of the step that has just ended."""
        kv, stats = self.engine.scheduler.kv, self.stats.read()
        seen, kv.stats = kv.stats, PrefixCacheStats()
        names = PrefixCacheStats.__dataclass_fields__
        return {
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "kv_cache_usage": stats.usage,
            "prefix_cache_stats": {name: getattr(seen, name) for name in names},
        }

    # ------------------------------------------------------------------ calls

    def _call(self, client: int, call_id: int, name: str, arguments: list[Any]) -> None:
        """Answer a call by name, or say that there is none of that name."""
        calls: dict[str, Callable[..., Any]] = {
            "get_supported_tasks": lambda: ["generate"],
            "reset_prefix_cache": lambda running=False, _connector=False: (
                self.engine.reset_prefix_cache(running)
            ),
            "reset_mm_cache": lambda: None,
            "is_sleeping": lambda: False,
            "add_lora": self._add_lora,
        }
        value, failure = None, None
        try:
            value = calls[name](*arguments)
        except KeyError:
            failure = f"{name}: this core has no such call; it has {', '.join(sorted(calls))}"
        except Exception as error:
            failure = f"{name}: {type(error).__name__}: {error}"
        self._clients[client][1].send(wire.answer(call_id, value, failure, time.monotonic()))

    def _add_lora(self, sent: list[Any]) -> bool:
        from mini_vllm.lora.request import LoRARequest

        if self.engine.feature("lora") is None:
            raise ValueError("add_lora: start this core with --enable-lora")
        self.engine.feature("lora").add_adapter(LoRARequest(*sent[: len(wire.LORA)]))
        return True
