"""The HTTP parser and the server around it: what comes before any route and any key.

Promises: the headers of a request are bounded, all of them together in number, in bytes and in the
time they take; the parser is h11, whatever else is installed. A server that ends takes no new
connection and no new request, and gives the answers under way `shutdown_timeout` seconds. What is
left ends with the finish reason "abort", and its clients hear so. An engine that dies is said in
one line, and ends the server. Mirrors `vllm/entrypoints/launcher.py:26` `serve_http`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_vllm.entrypoints.async_llm import AsyncLLM, EngineDead

MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line and headers together; upstream has 4 MiB
(`vllm/entrypoints/constants.py:9` `H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT`)."""
MAX_HEADERS = 256
"""Headers of one request (`vllm/entrypoints/constants.py:10` `H11_MAX_HEADER_COUNT_DEFAULT`)."""
HEADER_S = 10.0
"""Seconds until a request's headers must be here, and a new connection's first request."""
KEEP_ALIVE_S = 5
"""Seconds that a connection may be idle between two requests."""
LAST_S = 5
"""Seconds after `shutdown_timeout` that a client has to read how its answer ended."""

_log = logging.getLogger("uvicorn.error")


class _Connection(h11.Connection):
    """A parser that takes a request of more than so many headers for a wrong one."""

    def __init__(self, max_bytes: int, max_headers: int) -> None:
        super().__init__(h11.SERVER, max_bytes)
        self.max_headers = max_headers

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and len(event.headers) > self.max_headers:
            raise h11.RemoteProtocolError(f"{len(event.headers)} headers: need {self.max_headers}")
        return event


class BoundedH11(H11Protocol):
    """A connection that is closed when a request's headers take longer than `header_s`."""

    header_s = HEADER_S
    _waiting: asyncio.TimerHandle | None = None

    def __init__(self, max_bytes: int, max_headers: int, **options: Any) -> None:
        """`options` as uvicorn gives them."""
        super().__init__(**options)
        self.conn = _Connection(max_bytes, max_headers)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.header_s, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class HTTPServer(uvicorn.Server):
    """Serves one application over one engine."""

    def __init__(
        self, app: Any, engine: AsyncLLM, host: str = "127.0.0.1", port: int = 0,
        keep_alive_on_engine_death: bool = False, shutdown_timeout: float = 0,
        h11_max_incomplete_event_size: int = MAX_HEADER_BYTES,
        h11_max_header_count: int = MAX_HEADERS, timeout_keep_alive: int = KEEP_ALIVE_S,
        **options: Any,
    ) -> None:  # fmt: skip
        """Args:
        keep_alive_on_engine_death: go on answering, with errors, when the engine has died.
        shutdown_timeout: seconds that requests under way have when the server is asked to end.
        h11_max_incomplete_event_size: bytes of a request's line and headers together.
        h11_max_header_count: headers of one request.
        timeout_keep_alive: seconds that a connection may be idle between two requests.
        options: of `uvicorn.Config`.

        Raises:
            ValueError: a number is negative, or a bound of the headers is zero.
        """
        for name, value, least in (
            ("shutdown_timeout", shutdown_timeout, 0),
            ("h11_max_incomplete_event_size", h11_max_incomplete_event_size, 1),
            ("h11_max_header_count", h11_max_header_count, 1),
            ("timeout_keep_alive", timeout_keep_alive, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: need at least {least}")
        parser: Any = partial(BoundedH11, h11_max_incomplete_event_size, h11_max_header_count)
        config = uvicorn.Config(
            app, host=host, port=port, http=parser, ws="none", access_log=False,
            timeout_keep_alive=timeout_keep_alive,
            timeout_graceful_shutdown=int(shutdown_timeout) + LAST_S, **options,
        )  # fmt: skip
        super().__init__(config)
        self.engine, self.shutdown_timeout = engine, shutdown_timeout
        self.keep_alive_on_engine_death = keep_alive_on_engine_death
        self.died: EngineDead | None = None
        engine.on_death = self._engine_died

    def _engine_died(self, error: EngineDead) -> None:
        """On the engine's reader's thread."""
        self.died = error
        _log.error("%s", error)
        if not self.keep_alive_on_engine_death:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self.engine.shutdown(self.shutdown_timeout))
        await super().shutdown(sockets)
        ending.cancel()


def listening(host: str, port: int) -> socket.socket:
    """A socket that holds the port, before anything is loaded for it; 0 takes a free one.

    Raises:
        ValueError: there is no such address, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"host={host!r}, port={port}: cannot listen there: {reason}") from None
    return held
