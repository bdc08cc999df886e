"""Faults on purpose: each is injected, and the alarms that come are compared with those due.

    python phase-19-capstone-maintainer-and-startup/service/drill.py

Promises: nothing is timed. A look is taken when the drill takes it; what a fault needs to have
happened first is asked until it has. Exit code 1 where an alarm is missing, or one too many; 2
where the service cannot be started or a fault cannot be injected, with what is wrong.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.modules import sibling

SERVICE = sibling(__file__, "service")
TRIES = 20_000
"""Times that something is asked before the drill gives up; each is a request of its own."""
LONG = "x" * 2000
"""A prompt whose step, at the file's price for pairs, lasts minutes: nothing moves meanwhile."""


RULES = {f"{name} {what}": f"{rule} {name}" for name in "abcdefgh" for what, rule in
         (("down", "ServerDown"), ("stalled", "ServerStandsStill"))}  # fmt: skip
"""What `alarms.yaml` calls an alarm of the service."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one part of the drill saw."""

    name: str
    due: list[str]
    alarms: list[str]
    health: dict[str, bool]
    """Of each server: whether `/health` says 200."""
    alive: int
    """The gateway's `/alive`."""
    served: int
    """Of four requests after the alarms, how many were answered with 200."""
    fires: list[str] | None = None
    """What a real Prometheus fires of the two alarms; None where there is none."""

    @property
    def passed(self) -> bool:
        fires = self.fires is None or self.fires == [RULES[each] for each in self.due]
        return self.alarms == self.due and self.served == 4 and fires


def post(port: int, prompt: str, **more: Any) -> http.client.HTTPResponse:
    """One completion through the gateway; the answer is not read yet."""
    connection = http.client.HTTPConnection(SERVICE.HOST, port, timeout=SERVICE.PATIENCE)
    body = {"model": "byte-llama", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), {
        "Content-Type": "application/json"})  # fmt: skip
    return connection.getresponse()


def status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection(SERVICE.HOST, port, timeout=SERVICE.PATIENCE)
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def until(port: int, holds: Callable[[], bool], what: str) -> None:
    """Ask the gateway until something holds. Raises RuntimeError where it never does."""
    for _ in range(TRIES):
        if holds():
            return
        status(port, "/health")
    raise RuntimeError(f"never came: {what}")


def drill(config: dict[str, Any]) -> list[Found]:
    """The whole drill, on servers of its own."""
    found: list[Found] = []
    with SERVICE.running(config) as (service, port), _beside(config, service, port) as prometheus:

        def fired(due: list[str]) -> list[str] | None:
            """What Prometheus fires, once it is what is due; it scrapes and judges by itself."""
            if prometheus is None:
                return None
            prometheus.follow(service)
            seen: list[str] = []

            def is_due() -> bool:
                alerts = prometheus.alerts() or []
                seen[:] = [each for each in alerts if each in RULES.values()]
                return seen == [RULES[each] for each in due]

            with contextlib.suppress(RuntimeError):  # what it fires instead is told
                until(port, is_due, "the alarms of Prometheus")
            return seen

        def idle() -> bool:
            return not any(server.in_flight for server in service.servers)

        def judge(name: str, due: list[str], looks: int = 1) -> None:
            for _ in range(looks):
                alarms = service.look()
            fires = fired(due)
            alive = status(port, "/alive")
            health = {s.name: s.get("/health") is not None for s in service.servers}
            served = sum(_answered(port, f"{name} {number}") for number in range(4))
            found.append(Found(name, due, alarms, health, alive, served, fires))

        judge("nothing", [])

        refused = post(port, "x", max_tokens=0)
        refused.read()
        until(port, idle, "the refused request's end")
        judge("a bad request", [])

        stream = post(port, "hello", max_tokens=1500, stream=True)
        stream.read(1)
        stream.close()
        until(port, idle, "the end of the request whose client has left")
        judge("a client that leaves", [])

        first = service.servers[0]
        first.stop()
        judge("a server that is killed", [f"{first.name} down"])
        first.start()
        judge("the same, started again", [])

        def stuck() -> None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # it is ended under it
                post(port, LONG).read()

        thread = threading.Thread(target=stuck, daemon=True)
        thread.start()
        until(port, lambda: not idle(), "the long request")
        held = next((server for server in service.servers if server.in_flight), None)
        if held is None:
            raise RuntimeError("the long request ended too soon: a step of it must last minutes")
        judge("a server that stands still", [f"{held.name} stalled"], config["looks"] + 2)
        held.stop()
        thread.join()
        until(port, idle, "the end of the broken request")
        held.start()
        judge("the same, started again after the stall", [])
    return found


def _beside(config: dict[str, Any], service: Any, port: int) -> Any:
    """A Prometheus that scrapes each second, where the file asks for one."""
    return SERVICE.watched(service, port, 1) if config["prometheus"] else contextlib.nullcontext()


def _answered(port: int, prompt: str) -> bool:
    answer = post(port, prompt)
    answer.read()
    return answer.status == 200


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else SERVICE.HERE / "service.yaml"
    try:
        found = drill(SERVICE.read(path))
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    for each in found:
        health = ", ".join(f"{name} {200 if ok else 'none'}" for name, ok in each.health.items())
        print(
            f"{'ok  ' if each.passed else 'FAIL'} {each.name}: alarms {each.alarms or 'none'}, "
            f"due {each.due or 'none'}; /health {health}; /alive {each.alive}; "
            f"{each.served} of 4 served"
            + ("" if each.fires is None else f"; Prometheus fires {each.fires or 'none'}")
        )
    return 0 if all(each.passed for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
