"""Record what the real v0.22.1 coordinator of data-parallel engines sends, event by event.

The loop is the real one; only its sockets, its poller and its clock are scripted, so that a case
says exactly what came when.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Case = dict[str, Any]

ABOUT = (
    '`{"num_engines", "interval_ms", "wave_coordination", "events": [{"now_ms", "wait_ms", '
    '"event", "front", "start_wave"}]}`. `wait_ms`: how long the coordinator was ready to wait at '
    '`now_ms`. `event`: `["timeout"]`; `["counts", engine, wave, step, waiting, running]`; '
    '`["first", engine, wave]` from a front end; `["complete", wave]` and `["start", engine, '
    "wave]` from an engine. `front` and `start_wave`: what was sent because of it."
)


class _Over(Exception):
    """The script has ended."""


class _Script:
    """Sockets, poller and clock in one: hands out one event per poll and notes what is sent."""

    def __init__(self, rng: random.Random, num_engines: int) -> None:
        self.rng, self.num_engines = rng, num_engines
        self.now_ms = 1_000_000
        self.left = 30
        self.steps: list[dict[str, Any]] = []
        self.wave = self.step = 0

    def time(self) -> float:
        # Whole milliseconds, and a little more: `int(seconds * 1000)` must not fall below.
        return (self.now_ms + 0.25) / 1000

    def draw(self) -> list[Any]:
        rng = self.rng
        kind = rng.choices(("timeout", "counts", "first", "complete", "start"), (5, 9, 2, 1, 1))[0]
        engine = rng.randrange(self.num_engines)
        near = max(0, self.wave + rng.choice((-1, 0, 0, 0, 1)))
        if kind == "counts":
            self.step = max(0, self.step + rng.choice((-1, 0, 0, 1, 1)))
            if rng.random() < 0.1:
                self.wave, self.step = self.wave + 1, 0
            return [kind, engine, near, self.step, rng.randint(0, 9), rng.randint(0, 9)]
        if kind in ("first", "start"):
            return [kind, engine, near]
        if kind == "complete":
            self.wave = max(self.wave, near)
            return [kind, near]
        return [kind]


def _sockets(script: _Script) -> Any:
    """`make_zmq_socket` for the loop: front, back and outputs, in the order they are made."""
    import msgspec
    import zmq
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackEncoder

    names: list[str] = []
    encoder = MsgpackEncoder()

    class Socket:
        def __init__(self, name: str) -> None:
            self.name, self.inbox = name, []  # type: ignore[var-annotated]

        def recv(self) -> Any:
            return self.inbox.pop(0) if self.inbox else b"\x01"  # an engine subscribes

        def send(self, message: bytes) -> None:
            if self.name == "front":
                script.steps[-1]["front"].append(msgspec.msgpack.decode(message))

        def send_multipart(self, messages: tuple[bytes, bytes]) -> None:
            script.steps[-1]["start_wave"].append(msgspec.msgpack.decode(messages[1]))

    made: dict[str, Socket] = {}

    @contextmanager
    def make(**asked: Any) -> Iterator[Socket]:
        name = ("front", "outputs", "back")[len(names)]
        names.append(name)
        made[name] = Socket(name)
        yield made[name]

    class Poller:
        def register(self, socket: Any, flags: int) -> None:
            pass

        def poll(self, timeout: int) -> list[tuple[Socket, int]]:
            if not script.left:
                raise _Over
            script.left -= 1
            event = script.draw()
            script.steps.append(
                {"now_ms": script.now_ms, "wait_ms": timeout, "event": event, "front": [],
                 "start_wave": []}
            )  # fmt: skip
            kind, *rest = event
            if kind == "timeout":
                script.now_ms += timeout
                return []
            script.now_ms += script.rng.randint(0, timeout)
            if kind == "first":
                made["front"].inbox.append(msgspec.msgpack.encode(rest))
                return [(made["front"], zmq.POLLIN)]
            if kind == "counts":
                engine, wave, step, waiting, running = rest
                stats = SchedulerStats(
                    num_running_reqs=running, num_waiting_reqs=waiting, step_counter=step,
                    current_wave=wave,
                )  # fmt: skip
                told = EngineCoreOutputs(engine_index=engine, scheduler_stats=stats)
            elif kind == "complete":
                told = EngineCoreOutputs(wave_complete=rest[0])
            else:
                told = EngineCoreOutputs(engine_index=rest[0], start_wave=rest[1])
            made["outputs"].inbox.append(encoder.encode(told)[0])
            return [(made["outputs"], zmq.POLLIN)]

    return make, Poller


def cases(count: int = 1000) -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.v1.engine import coordinator

    for number in range(count):
        rng = random.Random(number)
        num_engines = rng.choice((2, 2, 3, 4, 8))
        interval_ms = rng.choice((20, 50, 100, 100, 1000))
        waves = rng.random() < 0.75
        script = _Script(rng, num_engines)
        make, poller = _sockets(script)
        with (
            mock.patch.object(coordinator, "set_process_title"),
            mock.patch.object(coordinator, "make_zmq_socket", make),
            mock.patch.object(coordinator.zmq, "Poller", poller),
            mock.patch.object(coordinator.time, "time", script.time),
        ):
            real = coordinator.DPCoordinatorProc(num_engines, interval_ms, waves)
            try:
                real.process_input_socket("front", "outputs", "back")
            except _Over:
                pass
            finally:
                real.ctx.term()
        yield {
            "num_engines": num_engines, "interval_ms": interval_ms, "wave_coordination": waves,
            "events": script.steps,
        }  # fmt: skip
