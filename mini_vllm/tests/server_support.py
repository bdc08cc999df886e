"""A server of this process on a free port, and a client that speaks plain HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
pytest.importorskip("starlette", reason="needs the extra 'serve'")
pytest.importorskip("prometheus_client", reason="needs the extra 'serve'")

from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints.openai.http import HTTPServer
from mini_vllm.entrypoints.openai.launch import serve_engine
from mini_vllm.entrypoints.openai.server import build_app
from mini_vllm.entrypoints.openai.serving import Served

DEADLINE_S = 30.0


@contextmanager
def serving(
    engine: LLMEngine | Callable[..., LLMEngine], *, keys: tuple[str, ...] = (),
    max_concurrent: int = 1024,
    chat_page: bool = False, http: dict[str, Any] | None = None,
    enable_request_id_headers: bool = False, ends: list[Callable[[], None]] | None = None,
    **options: Any,
) -> Iterator[tuple[int, Served]]:  # fmt: skip
    """Its port and what it serves; it has ended when the block is left.

    `http` are arguments of `HTTPServer`, `options` of `serve_engine`. What asks the server to end,
    as a signal does, is put into `ends`.
    """
    served = serve_engine(engine, **{"model": "byte-llama", **options})
    app = build_app(served, keys, max_concurrent, chat_page, enable_request_id_headers)
    server = HTTPServer(
        app, served.engine, log_level="error", log_config=None, lifespan="on", **(http or {})
    )

    def end() -> None:
        server.should_exit = True

    if ends is not None:
        ends.append(end)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1], served
    finally:
        end()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def run_alone(work: Coroutine[Any, Any, Any]) -> Any:
    """Its result, from a loop of a thread of its own; a browser's loop may run in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def wait_until(happened: Callable[[], Any], seconds: float = DEADLINE_S) -> None:
    """Until it is so; fails when it is not after so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def ask(
    port: int, path: str, body: Any = None, *, method: str | None = None, key: str = "",
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:  # fmt: skip
    """Status and body: an object, or text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    sent = {"Content-Type": "application/json"} | (headers or {})
    if key:
        sent["Authorization"] = f"Bearer {key}"
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, content, sent)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text


def events(text: str) -> list[Any]:
    """The events of a stream, JSON or `[DONE]`."""
    found = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [one if one == "[DONE]" else json.loads(one) for one in found]
