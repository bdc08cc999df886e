"""Lab 15-02: the proxy between a prefill and a decode engine, and what a pair must report.

    client -> proxy -> P (one token, K and V stay there)
              proxy <- P's answer with kv_transfer_params
              proxy -> D (the client's own request, with these) -> client

K and V go from P to D beside the proxy. What should hold:

- X1: P does the prompt and nothing else: one token, no stream, no wish that forbids one token.
- X2: D gets what the client asked for, and P's `kv_transfer_params` where P gave some.
- X3: P has answered before D is asked. P's token is dropped: D makes the first token itself.
- X4: a P that fails costs time and no request. D then computes the prompt.
- X5: nothing that was handed in is changed.

Source: `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py:155` `send_request_to_service`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

Body = dict[str, Any]
Post = Callable[[str, Body, str], Iterator[bytes]]


class LegFailed(Exception):
    """An engine was not reached, answered with an error, or broke off (given)."""


def post(url: str, body: Body, request_id: str) -> Iterator[bytes]:
    """Send a body with an `X-Request-Id`; the answer piece by piece as it comes (given).

    Raises:
        LegFailed: before the first piece, or where the answer breaks off.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        connection.request("POST", parts.path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise LegFailed(f"{url}: {answer.status} {answer.read()[:200]!r}")
        while piece := answer.read1(65_536):
            yield piece
        if answer.length:
            raise LegFailed(f"{url}: the answer ended {answer.length} bytes early")
    except (OSError, http.client.HTTPException) as error:
        raise LegFailed(f"{url}: {error}") from error
    finally:
        connection.close()


def prefill_body(body: Body) -> Body:
    """What P is sent for a client's body (X1, X5).

    `kv_transfer_params` asks P to keep K and V for another engine: `do_remote_decode` True,
    `do_remote_prefill` False, and `remote_engine_id`, `remote_block_ids`, `remote_host`,
    `remote_port` None. A client may bound its tokens by `max_tokens` or `max_completion_tokens`:
    what P gets has the first, and the second only where the client sent it. Not for P:
    `stream_options`, `min_tokens`, `min_completion_tokens`.
    """
    raise NotImplementedError


def decode_body(body: Body, prefill_response: Body) -> Body:
    """What D is sent for a client's body and P's answer (X2, X5)."""
    raise NotImplementedError


def route(body: Body, prefill: str, decode: str, send: Post = post) -> Iterator[bytes]:
    """Serve one request: D's answer, piece by piece as it comes (X3, X4).

    Both legs carry the same `X-Request-Id`, and every request one of its own.

    Args:
        prefill: P's address, such as "http://127.0.0.1:8100/v1/completions".
        decode: D's.
        send: sends a body to an address under a request id, as `post` does.

    Raises:
        LegFailed: D fails.
    """
    raise NotImplementedError


def blocks_and_bytes(num_tokens: int, block_size: int, kv_bytes_per_token: int) -> tuple[int, int]:
    """Blocks that travel for so many tokens, and their bytes: a block travels whole.

    2,031 tokens in blocks of 16 with 12,288 bytes a token are 127 blocks and 24,969,216 bytes.
    """
    raise NotImplementedError


def decode_leg(num_prompt_tokens: int, num_cached: int, block_size: int) -> tuple[int, int]:
    """Blocks that D reads from P, and prompt tokens that D computes, when all goes well.

    Args:
        num_cached: tokens of the prompt in full blocks that D's own prefix cache has; what a
            cache finds never holds the last token (lab 02-05).
    """
    raise NotImplementedError


def parse_transfer_line(line: str) -> dict[str, float] | None:
    """Names and values of a "KV Transfer metrics: ..." line of a log; None for any other line."""
    raise NotImplementedError
