"""The HTTP parser and the server around it: what comes before any route and any key.

Promises: the headers of a request are bounded, all of them together in bytes and in the time they
take; the parser is h11, whatever else is installed. A server that ends gives the answers under way
`GRACE_S`, then every open stream an error event and `[DONE]`. An engine that dies is said in one
line, and ends the server. Mirrors `vllm/entrypoints/launcher.py:26` `serve_http`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mini_vllm.entrypoints.async_llm import AsyncLLM, EngineDead

MAX_HEADER_BYTES = 64 * 1024
"""Of a request's line and headers together."""
HEADER_S = 10.0
"""Seconds until a request's headers must be here, and a new connection's first request."""
GRACE_S = 5.0
"""Seconds that answers under way have when the server is asked to end."""

_log = logging.getLogger("uvicorn.error")


class BoundedH11(H11Protocol):
    """A connection that is closed when a request's headers take longer than `header_s`."""

    header_s = HEADER_S
    _waiting: asyncio.TimerHandle | None = None

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
        keep_alive_on_engine_death: bool = False, grace_s: float = GRACE_S, **options: Any,
    ) -> None:  # fmt: skip
        """Args:
        keep_alive_on_engine_death: go on answering, with errors, when the engine has died.
        options: of `uvicorn.Config`.
        """
        config = uvicorn.Config(
            app, host=host, port=port, http=BoundedH11, ws="none", access_log=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES, timeout_keep_alive=5,
            timeout_graceful_shutdown=int(grace_s) + 5, **options,
        )  # fmt: skip
        super().__init__(config)
        self.engine, self.grace_s = engine, grace_s
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
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        """What is still open after the grace hears that it ends, instead of being cut."""
        await asyncio.sleep(self.grace_s)
        await asyncio.to_thread(self.engine.close)


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
