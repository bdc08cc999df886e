"""Routes, keys and bounds: the HTTP of the server.

Promises: a wrong key, a body that is too large or too slow and too many requests at once are
answered before anything is parsed; what is made of a body is made on a thread; a client that leaves
ends its requests.
Mirrors `vllm/entrypoints/openai/api_server.py:157` `build_app`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_vllm.entrypoints.async_llm import EngineDead
from mini_vllm.entrypoints.openai.bodies import MAX_BODY_BYTES, checked, parsed
from mini_vllm.entrypoints.openai.chat import ChatServing
from mini_vllm.entrypoints.openai.completion import CompletionServing
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.messages import (
    COUNTED,
    MESSAGE,
    MessagesServing,
)
from mini_vllm.entrypoints.openai.metrics import Metrics
from mini_vllm.entrypoints.openai.openapi import (
    GENERATED,
    MODELS,
    NUMBER,
    RENDERED,
    TEXT,
    TOKENS,
    answer,
    document,
    operation,
)
from mini_vllm.entrypoints.openai.protocol import CompletionRequest, Generation
from mini_vllm.entrypoints.openai.protocol_chat import (
    ChatCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from mini_vllm.entrypoints.openai.protocol_messages import CountTokensRequest, MessagesRequest
from mini_vllm.entrypoints.openai.protocol_responses import ResponsesRequest
from mini_vllm.entrypoints.openai.responses import RESPONSE, ResponsesServing
from mini_vllm.entrypoints.openai.serving import Served, new_id, version

MAX_CONCURRENT = 1024
MAX_BODIES_BYTES = 64 * MAX_BODY_BYTES
"""Of all bodies that are arriving."""
BODY_S = 60.0
"""Seconds that a body may take to arrive."""
GUARDED_PATHS = ("/v1", "/v2", "/inference")
"""Where a key is needed, as upstream's `AuthenticationMiddleware`; the rest is open."""


class Keyed:
    """Answers 401 below `/v1` to a request that has none of the keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app, self.keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED_PATHS):
            headers = dict(scope["headers"])
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            known = [hmac.compare_digest(token, key) for key in self.keys]
            if scope["method"] != "OPTIONS" and not (kind.lower() == b"bearer" and any(known)):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class WithRequestId:
    """Answers with the request's `X-Request-Id`, or a new one if it has none.

    Mirrors `vllm/entrypoints/openai/server_utils.py:92` `XRequestIdMiddleware`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = Headers(scope=scope).get("x-request-id", uuid.uuid4().hex)
                MutableHeaders(scope=message).append("x-request-id", sent)
            await send(message)

        await self.app(scope, receive, send_with_id)


class _Events(StreamingResponse):
    """A stream of events that ends its source, also when the client left before the first one."""

    def __init__(self, events: AsyncGenerator[str, None], closed: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.events, self.closed = events, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.closed()
            await self.events.aclose()


class Server:
    """The handlers of one server."""

    def __init__(self, served: Served, max_concurrent: int = MAX_CONCURRENT) -> None:
        self.served = served
        self.max_concurrent = max_concurrent
        self.num_open = 0
        """Generations that are being answered."""
        self._num_body_bytes = 0
        """Of bodies that are arriving."""
        self.completions, self.chats = CompletionServing(served), ChatServing(served)
        self.messages = MessagesServing(served, self.chats)
        stores = os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") == "1"
        self.responses = ResponsesServing(served, self.chats, stores)
        self.metrics = Metrics(served)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self.completions)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatCompletionRequest, self.chats)

    async def message(self, request: Request) -> Response:
        return await self._generate(request, MessagesRequest, self.messages)

    async def respond(self, request: Request) -> Response:
        return await self._generate(request, ResponsesRequest, self.responses)

    async def read_response(self, request: Request) -> Response:
        return JSONResponse(self.responses.read(request.path_params["response_id"]))

    async def cancel_response(self, request: Request) -> Response:
        return JSONResponse(self.responses.cancel(request.path_params["response_id"]))

    async def count_tokens(self, request: Request) -> Response:
        return JSONResponse(await self._use_body(request, CountTokensRequest, self.messages.count))

    async def _body(self, request: Request) -> bytes:
        """A request's body.

        Raises:
            APIError: it is too large, too slow, of another content type, or one of too many.
        """
        kind = request.headers.get("content-type", "").lower().split(";")[0].strip()
        if kind != "application/json":
            raise APIError("Content-Type: need application/json", "Bad Request")
        content = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    content += chunk
                    self._num_body_bytes += len(chunk)
                    if len(content) > MAX_BODY_BYTES:
                        raise APIError(
                            f"body: more than {MAX_BODY_BYTES} bytes", "Bad Request", 413
                        )
                    if self._num_body_bytes > MAX_BODIES_BYTES:
                        raise APIError(
                            f"body: the server reads at most {MAX_BODIES_BYTES} bytes of bodies at "
                            "once; try again later", "TooManyRequests", 429,
                        )  # fmt: skip
        except TimeoutError:
            raise APIError(f"body: not complete after {BODY_S:g} s", "Bad Request", 408) from None
        finally:
            self._num_body_bytes -= len(content)
        return bytes(content)

    async def _use_body(
        self, request: Request, model: type[BaseModel], use: Callable[..., Any]
    ) -> Any:
        """What `use` makes of a request's body, on a thread: a large one delays no other client.

        Raises:
            APIError: what reading it raises, what `use` raises, or the server is about to end.
        """
        content = await self._body(request)
        if self.served.engine.shutting_down:
            raise APIError("the server is shutting down: ask another", "InternalServerError", 500)
        return await asyncio.to_thread(lambda: use(checked(model, parsed(content))))

    async def _generate(self, request: Request, model: type[BaseModel], serving: Any) -> Response:
        """One generation: counted, checked, streamed or whole."""
        if self.served.engine.error is not None:
            raise self.served.engine.error
        if self.num_open >= self.max_concurrent:
            raise APIError(
                f"too many requests at once: the server takes {self.max_concurrent}; try again "
                "later", "TooManyRequests", 429,
            )  # fmt: skip
        header = request.headers.get("x-request-id")
        self.num_open += 1
        streams = False
        try:
            job = await self._use_body(request, model, lambda body: serving.begin(body, header))
            if streams := bool(job.request.stream):
                return _Events(job.chunks(), self._closed)
            return JSONResponse(await self._unless_left(request, job.answer()))
        finally:
            self.num_open -= not streams

    def _closed(self) -> None:
        self.num_open -= 1

    @staticmethod
    async def _unless_left(request: Request, answer: Awaitable[Any]) -> Any:
        """The answer, given up when the client leaves.

        As `vllm/entrypoints/utils.py:57` `with_cancellation`.
        """
        working = asyncio.ensure_future(answer)

        async def left() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        leaving = asyncio.ensure_future(left())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientDisconnect
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    # ------------------------------------------------------------------ everything else

    async def models(self, request: Request) -> Response:
        served = self.served
        cards = [self._card(served.name, served.root, None, served.max_model_len)]
        cards += [self._card(n, a.lora_path, served.name, None) for n, a in served.adapters.items()]
        return JSONResponse({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, most: int | None) -> dict[str, Any]:
        allowed = ("allow_sampling", "allow_logprobs", "allow_view")
        refused = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning")
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}", "object": "model_permission",
            "created": self.served.created, **dict.fromkeys(allowed, True),
            **dict.fromkeys(refused, False), "organization": "*", "group": None,
            "is_blocking": False,
        }  # fmt: skip
        return {
            "id": name, "object": "model", "created": self.served.created, "owned_by": "vllm",
            "root": root, "parent": parent, "max_model_len": most, "permission": [permission],
        }  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse(await self._use_body(request, TokenizeRequest, self._tokenized))

    def _tokenized(self, body: TokenizeRequest) -> dict[str, Any]:
        self.served.adapter_of(body.model)
        text = body.prompt
        if body.messages is not None:
            _, text = self.chats.prompt_of(body)
        ids = self.served.tokenizer.encode(text or "")
        pieces = [self.served.piece_of(token) for token in ids] if body.return_token_strs else None
        most = self.served.max_model_len
        return {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": pieces}

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse(await self._use_body(request, DetokenizeRequest, self._detokenized))

    def _detokenized(self, body: DetokenizeRequest) -> dict[str, Any]:
        self.served.adapter_of(body.model)
        most = self.served.engine.about.vocab_size
        if wrong := [token for token in body.tokens if token >= most]:
            raise APIError(f"tokens holds {wrong[:8]}: need ids from 0 to {most - 1}")
        return {"prompt": self.served.text_of(body.tokens)}

    async def render_completion(self, request: Request) -> Response:
        def rendered(body: CompletionRequest) -> list[dict[str, Any]]:
            self.served.adapter_of(body.model)
            prompts = [self.served.fit(prompt, body) for prompt in body.prompts()]
            return [self._rendered("cmpl", body, ids) for ids in prompts]

        return JSONResponse(await self._use_body(request, CompletionRequest, rendered))

    async def render_chat(self, request: Request) -> Response:
        def rendered(body: ChatCompletionRequest) -> dict[str, Any]:
            self.served.adapter_of(body.model)
            _, text = self.chats.prompt_of(body)
            return self._rendered("chatcmpl", body, self.served.fit(text, body))

        return JSONResponse(await self._use_body(request, ChatCompletionRequest, rendered))

    def _rendered(self, prefix: str, body: Generation, ids: list[int]) -> dict[str, Any]:
        """What would be generated from: the prompt's tokens and the sampling parameters."""
        params = self.served.params_of(body, self.served.most_tokens(body, len(ids)))
        changed = _changed(params)
        if params.structured_outputs is not None:
            changed["structured_outputs"] = _changed(params.structured_outputs)
        return {
            "request_id": new_id(prefix, body, None), "token_ids": ids, "features": None,
            "sampling_params": changed, "model": body.model, "stream": bool(body.stream),
            "stream_options": body.stream_options and body.stream_options.model_dump(),
            "cache_salt": body.cache_salt, "priority": body.priority, "kv_transfer_params": None,
        }  # fmt: skip

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.served.engine.error else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": version()})

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self.num_open})

    async def show_metrics(self, request: Request) -> Response:
        text, kind = self.metrics.text()
        return Response(text, media_type=kind)


def build_app(
    served: Served,
    keys: tuple[str, ...] = (),
    max_concurrent: int = MAX_CONCURRENT,
    chat_page: bool = False,
    enable_request_id_headers: bool = False,
) -> Any:
    """The application; its shutdown closes the engine."""
    server = Server(served, max_concurrent)
    taken = {
        "/v1/completions": (server.complete, CompletionRequest, GENERATED),
        "/v1/chat/completions": (server.chat, ChatCompletionRequest, GENERATED),
        "/v1/responses": (server.respond, ResponsesRequest, RESPONSE),
        "/v1/messages": (server.message, MessagesRequest, MESSAGE),
        "/v1/messages/count_tokens": (server.count_tokens, CountTokensRequest, COUNTED),
        "/v1/completions/render": (
            server.render_completion, CompletionRequest, {"type": "array", "items": RENDERED}
        ),
        "/v1/chat/completions/render": (server.render_chat, ChatCompletionRequest, RENDERED),
        "/tokenize": (server.tokenize, TokenizeRequest, TOKENS),
        "/detokenize": (server.detokenize, DetokenizeRequest, answer(prompt=TEXT)),
    }  # fmt: skip
    read: dict[str, tuple[Any, Any]] = {
        "/v1/models": (server.models, MODELS), "/health": (server.health, None),
        "/ping": (server.health, None), "/version": (server.version, answer(version=TEXT)),
        "/load": (server.load, answer(server_load=NUMBER)),
        "/v1/responses/{response_id}": (server.read_response, RESPONSE),
    }  # fmt: skip
    generating = (server.complete, server.chat, server.message, server.respond)
    cancel = "/v1/responses/{response_id}/cancel"
    operations = [
        (path, "post", operation(path, answered, model, serve in generating))
        for path, (serve, model, answered) in taken.items()
    ] + [(path, "get", operation(path, answered)) for path, (_, answered) in read.items()]
    operations += [
        (cancel, "post", operation(cancel, RESPONSE)),
        ("/ping", "post", operation("/ping", None)),
        ("/metrics", "get", operation("/metrics", None)),
    ]
    described = document(version(), operations, [model for _, model, _ in taken.values()])

    async def openapi(request: Request) -> Response:
        return JSONResponse(described)

    routes = [
        *(Route(path, serve, methods=["POST"]) for path, (serve, *_) in taken.items()),
        *(Route(path, serve) for path, (serve, _) in read.items()),
        Route("/ping", server.health, methods=["POST"]),
        Route(cancel, server.cancel_response, methods=["POST"]),
        Route("/metrics", server.show_metrics), Route("/openapi.json", openapi),
    ]  # fmt: skip
    if chat_page:
        routes.append(Route("/", _chat_page))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.engine.close)

    handlers: dict[Any, Callable[..., Any]] = {
        APIError: _refused, HTTPException: _nowhere, ValueError: _wrong_value,
        EngineDead: _engine_dead, ClientDisconnect: _left,
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    if keys:
        app.add_middleware(Keyed, keys=keys)
    if enable_request_id_headers:
        app.add_middleware(WithRequestId)
    return app


def _changed(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are by default."""
    return {
        f.name: getattr(record, f.name)
        for f in dataclasses.fields(record)
        if not f.name.startswith("_") and getattr(record, f.name) != f.default
    }


async def _chat_page(request: Request) -> Response:
    page = Path(__file__).with_name("chat_page.html").read_text(encoding="utf-8")
    return Response(page, media_type="text/html")


async def _refused(request: Request, error: APIError) -> Response:
    return JSONResponse(error.body(), error.status)


async def _wrong_value(request: Request, error: ValueError) -> Response:
    return JSONResponse(APIError(str(error)).body(), 400)


async def _engine_dead(request: Request, error: EngineDead) -> Response:
    return JSONResponse(APIError(str(error), "InternalServerError", 500).body(), 500)


async def _left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _nowhere(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)
