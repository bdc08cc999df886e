"""What clients hear of a server that is asked to end, and which headers it takes: recorded.

    course engine run -m conformance.record endings              # the real engine

Promises: the same clients ask any server, whatever ends it. Each situation has a server of its own:
answers of four dialects are under way, streamed and whole, and a search by beams; a body is half
sent, a connection idle. Then a signal comes. Texts, and how far they got, are a matter of time and
are not kept. It asks what `vllm/entrypoints/launcher.py:26` `serve_http` runs.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance import recording
from conformance.serving.battery import BASE, KEY, MESSAGES, MODEL, PROMPT, Ask
from conformance.serving.recorded import ROOT, flags, parsed

KEPT = Path(__file__).parents[1] / "recordings" / "engine" / "endings.jsonl.gz"
LENGTH = 400
"""Tokens of each answer: more than a server makes until the signal comes."""
SILENCE_S = 10.0
"""Seconds without a byte, beyond the server's own timeout, after which a client leaves."""
WAIT_S = 60.0
"""Seconds until a server must have done what is waited for."""

ABOUT = (
    '`{"situation", "client", "status", "reason", "error", "last", "end"}` of each client: the '
    'reason for which its answer ended, the last event of a stream if it is an end, and whether '
    'the answer is "whole", "cut" or followed by silence; then `{"situation", "exit", "after"}` '
    'of the server: its status, and whether it ended by itself or after its clients had left. '
    'Then `{"headers", "parser", "taken"}` of requests with many headers, to servers that bound '
    'them to 64 KiB and 256; and `{"id", "what", "header", "of_body"}` of answers to requests '
    'with and without an `X-Request-Id`.'
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Situation:
    """How a server is asked to end."""

    name: str
    timeout: int
    """Of `--shutdown-timeout`, in seconds."""
    to_core: bool = False
    """Whether the signal goes to the engine's process alone."""
    second: signal.Signals | None = None
    """What follows when no connection is taken any more."""


SITUATIONS = (
    Situation("at once", 0),
    Situation("at once, again", 0),
    Situation("at once, to the core", 0, to_core=True),
    Situation("drained", 120),
    Situation("too late", 1),
    Situation("drained, then SIGINT", 120, second=signal.SIGINT),
    Situation("drained, then SIGTERM", 120, second=signal.SIGTERM),
)


def clients() -> list[Ask]:
    """Who waits for an answer when the signal comes."""
    long = {**BASE, "max_tokens": LENGTH, "ignore_eos": True}
    bodies = {
        "/v1/completions": long | {"prompt": PROMPT},
        "/v1/chat/completions": long | {"messages": MESSAGES},
        "/v1/messages": {**BASE, "messages": MESSAGES, "max_tokens": LENGTH},
        "/v1/responses": {**BASE, "input": PROMPT, "max_output_tokens": LENGTH, "ignore_eos": True},
    }
    found = [
        Ask(f"{path}, {how}", path, body | {"stream": how == "streamed"})
        for path, body in bodies.items()
        for how in ("streamed", "whole")
    ]
    beams = long | {"prompt": PROMPT, "use_beam_search": True, "n": 2}
    return [*found, Ask("beams", "/v1/completions", beams)]


RUNNING, FINISHED = "vllm:num_requests_running", "vllm:request_success_total"
Get = Callable[[], http.client.HTTPResponse]
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


def _connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)


def _events(data: bytes) -> list[Any]:
    blocks = data.decode("utf-8", "replace").split("\n\n")
    lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
    return [parsed(line.removeprefix("data: ").encode()) for line in lines]


def _reason(said: Any) -> str | None:
    """Why an answer ended, as a body or an event says it."""
    if not isinstance(said, dict):
        return None
    if choices := said.get("choices"):
        return choices[0].get("finish_reason")
    inner = said.get("response", said)
    if inner.get("object") == "response":
        return None if inner["status"] == "in_progress" else inner["status"]
    delta = said.get("delta") if said.get("type") == "message_delta" else said
    return delta.get("stop_reason") if isinstance(delta, dict) else None


def _heard(name: str, status: int | None, kind: str, data: bytes, end: str) -> dict[str, Any]:
    """What a client has of its answer."""
    said = _events(data) if kind == "text/event-stream" else [parsed(data)]
    reasons = [reason for each in said if (reason := _reason(each)) is not None]
    errors = [each["error"] for each in said if isinstance(each, dict) and each.get("error")]
    error = {k: errors[0].get(k) for k in ("type", "code")} if errors else None
    last = said[-1] if kind == "text/event-stream" and said else None
    if isinstance(last, dict):
        last = last["type"] if last.get("type") in ("message_stop", "response.completed") else None
    reason = reasons[-1] if reasons else None
    return {
        "client": name, "status": status, "reason": reason, "error": error, "last": last,
        "end": end,
    }  # fmt: skip


def _read(name: str, get: Get) -> dict[str, Any]:
    """An answer until it ends, is cut, or nothing comes any more."""
    status, kind, data, end = None, "", b"", "whole"
    try:
        answer = get()
        status, kind = answer.status, (answer.getheader("Content-Type") or "").split(";")[0]
        while piece := answer.read1(1 << 16):
            data += piece
    except TimeoutError:
        end = "silence"
    except (http.client.HTTPException, ConnectionError):
        end = "cut"
    return _heard(name, status, kind, data, end)


def metric(port: int, name: str) -> float:
    """A number of the server's `/metrics`, summed over its labels."""
    connection = _connect(port)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    lines = [line for line in text.splitlines() if line.split("{")[0] == name]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _until(happened: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not happened():
        if time.monotonic() > end:
            raise SystemExit(f"waited in vain: {what}")
        time.sleep(0.02)


def takes_connections(port: int) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionError:
        return False
    return True


@contextmanager
def heard(
    port: int, signalled: Callable[[], None], silence: float,
    again: Callable[[], None] | None = None, closes: bool = True,
) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """What all clients hear; their connections are open until the block is left.

    Args:
        signalled: asks the server to end.
        silence: seconds without a byte after which a client takes nothing for an answer.
        again: asks a second time, when no connection is taken any more.
        closes: whether the server takes no connection any more, which is waited for.
    """
    *answers, beams = clients()
    half = Ask("half a body", "/v1/completions", {**BASE, "prompt": PROMPT, "max_tokens": 4})
    content = half.content() or b""
    late = _connect(port)
    late.putrequest("POST", half.path)
    for name, value in {**HEADERS, "Content-Length": str(len(content))}.items():
        late.putheader(name, value)
    late.endheaders(content[:9])
    begun = [_begun(port, ask) for ask in answers]
    _until(lambda: metric(port, RUNNING) >= len(answers), "all answers are under way")
    begun.append(_begun(port, beams))
    _until(lambda: metric(port, FINISHED) >= 1, "the beams are one token long")
    idle = _connect(port)
    idle.request("GET", "/health")
    idle.getresponse().read()
    connections = [*(connection for connection, _ in begun), late, idle]
    for connection in connections:
        assert connection.sock is not None
        connection.sock.settimeout(silence)
    with ThreadPoolExecutor(len(begun)) as together:
        waiting = [
            together.submit(_read, ask.name, get)
            for ask, (_, get) in zip(clients(), begun, strict=True)
        ]
        signalled()
        found = []
        if closes:
            _until(lambda: not takes_connections(port), "no connection is taken")
            if again is not None:
                again()
            found = [_late(late, content[9:]), _idle(idle), _new(port)]
        else:
            late.close()
            idle.close()
        found += [each.result() for each in waiting]
    yield sorted(found, key=lambda one: str(one["client"]))
    for connection in connections:
        connection.close()


def _begun(port: int, ask: Ask) -> tuple[http.client.HTTPConnection, Get]:
    """A request that was sent, and what gets its answer; of a stream the first line was read."""
    connection = _connect(port)
    connection.request(ask.method, ask.path, ask.content(), HEADERS)
    if not ask.body.get("stream"):
        return connection, connection.getresponse
    answer = connection.getresponse()
    answer.readline()
    return connection, lambda: answer


def _late(connection: http.client.HTTPConnection, rest: bytes) -> dict[str, Any]:
    """A request whose body ends after the signal."""

    def get() -> http.client.HTTPResponse:
        connection.send(rest)
        return connection.getresponse()

    return _read("half a body", get)


def _idle(connection: http.client.HTTPConnection) -> dict[str, Any]:
    """A request on a connection that was idle when the signal came."""
    connection.auto_open = 0

    def get() -> http.client.HTTPResponse:
        connection.request("GET", "/health")
        return connection.getresponse()

    return _read("an idle connection", get)


def _new(port: int) -> dict[str, Any]:
    """A connection that is opened after the signal."""
    end = "taken" if takes_connections(port) else "refused"
    return _heard("a new connection", None, "", b"", end)


# ---------------------------------------------------------------------- the real server


@contextmanager
def started(*more: str, **variables: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """vLLM's server: its port and its process; whatever is left of it is killed."""
    from conformance import serve_stream

    env = os.environ | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | variables
    port = serve_stream.free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", f"models/{MODEL}"]
    server = subprocess.Popen(
        [*command, *flags(port), *more], cwd=ROOT, env=env, start_new_session=True
    )
    try:
        serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
        yield port, server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _exit_of(server: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return server.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def of_situation(situation: Situation) -> Iterator[dict[str, Any]]:
    """What the clients of a server of vLLM hear, and how it ends."""
    from conformance.serving.streams import core_of

    with started("--shutdown-timeout", str(situation.timeout)) as (port, server):
        target = core_of(server.pid) if situation.to_core else server.pid
        second = situation.second
        with heard(
            port, lambda: os.kill(target, signal.SIGTERM), situation.timeout + SILENCE_S,
            None if second is None else lambda: server.send_signal(second),
            closes=not situation.to_core,
        ) as found:  # fmt: skip
            for each in found:
                if each["client"] == "beams" and situation.timeout == 0 and not situation.to_core:
                    continue  # whether its next round finds the engine gone is a matter of time
                yield {"situation": situation.name, **each}
            status, after = _exit_of(server, WAIT_S), "by itself"
        if status is None:
            status, after = _exit_of(server, WAIT_S), "its clients have left"
        yield {"situation": situation.name, "exit": status, "after": after}


# ---------------------------------------------------------------------- headers

HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
MANY = {
    "256 headers": HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(254)) + b"\r\n",
    "257 headers": HEAD + b"".join(b"X-%d: a\r\n" % n for n in range(255)) + b"\r\n",
    "300 KB in a header": HEAD + b"X: " + b"a" * 300_000 + b"\r\n\r\n",
    "5 MB in a header": HEAD + b"X: " + b"a" * 5_000_000 + b"\r\n\r\n",
}
"""Requests with many headers, or long ones."""


def takes(port: int, sent: bytes) -> bool:
    """Whether a server answers these bytes, and does not refuse them or close the connection."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as client:
        try:
            client.sendall(sent)
            while piece := client.recv(65536):
                said += piece
        except ConnectionError:
            pass  # it had heard enough, and its answer may be lost
    return said.startswith(b"HTTP/1.1 200")


def request_ids(port: int) -> Iterator[dict[str, Any]]:
    """Of requests with and without an `X-Request-Id`: the header, the id in the body."""
    for name, sent in (("sent", {"X-Request-Id": "mine"}), ("not sent", {})):
        for what, key in (("answered", KEY), ("refused", "another")):
            connection = _connect(port)
            body = Ask("", "", {**BASE, "prompt": PROMPT, "max_tokens": 1}).content()
            headers = {**HEADERS, "Authorization": f"Bearer {key}", **sent}
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            header = answer.getheader("X-Request-Id")
            connection.close()
            yield {
                "id": name, "what": what, "header": header if sent else _kind(header),
                "of_body": header is not None and found.get("id") == f"cmpl-{header}",
            }  # fmt: skip


def _kind(header: str | None) -> str | None:
    """What a made-up id looks like."""
    made = header is not None and len(header) == 32 and not set(header) - set("0123456789abcdef")
    return "32 hexadecimal digits" if made else header


def of_headers() -> Iterator[dict[str, Any]]:
    """Which of `MANY` are taken: by the parser that is installed beside vLLM, and by h11.

    Both have the flags that should bound them, to 64 KiB and 256 headers.
    """
    small = ("--h11-max-incomplete-event-size", "65536", "--h11-max-header-count", "256")
    hidden = str(Path(__file__).with_name("without_httptools"))
    path = os.pathsep.join([hidden, os.environ.get("PYTHONPATH", "")])
    for parser, variables in (("httptools", {}), ("h11", {"PYTHONPATH": path})):
        with started(*small, "--enable-request-id-headers", **variables) as (port, _):
            for name, sent in MANY.items():
                yield {"headers": name, "parser": parser, "taken": takes(port, sent)}
            if parser == "httptools":
                yield from request_ids(port)


def recorded() -> Iterator[dict[str, Any]]:
    """Every situation, one server after the other, then the headers."""
    from conformance.real_engine import provenance

    yield {"machine": provenance("float32")}
    for situation in SITUATIONS:
        yield from of_situation(situation)
    yield from of_headers()


def kept(situation: str) -> dict[str, dict[str, Any]]:
    """What was heard in a situation by the client's name; under "" how the server ended."""
    lines = [line for line in recording.lines(KEPT) if line.get("situation") == situation]
    return {
        line.get("client", ""): {k: v for k, v in line.items() if k not in ("situation", "client")}
        for line in lines
    }
