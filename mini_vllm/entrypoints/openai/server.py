"""Routes, keys and bounds: the HTTP of the server.

Promises: a body that is too large, too many requests at once, a wrong key and a body that is no
JSON are answered before anything is parsed or queued; a client that leaves ends its requests.
Mirrors `vllm/entrypoints/openai/api_server.py:157` `build_app`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mini_vllm.entrypoints.async_llm import EngineDead
from mini_vllm.entrypoints.openai.chat import ChatServing
from mini_vllm.entrypoints.openai.completion import CompletionServing
from mini_vllm.entrypoints.openai.errors import APIError, FieldError
from mini_vllm.entrypoints.openai.metrics import Metrics
from mini_vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    TokenizeRequest,
)
from mini_vllm.entrypoints.openai.serving import Served, new_id, version

MAX_BODY_BYTES = 4 * 2**20
MAX_CONCURRENT = 1024
GUARDED_PATHS = ("/v1", "/v2", "/inference")
"""Where a key is needed, as upstream's `AuthenticationMiddleware`; the rest is open."""


class Keyed:
    """Answers 401 below `/v1` to whoever has none of the keys."""

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


async def _body(request: Request) -> Any:
    """The object in a request's body.

    Raises:
        APIError: it is too large, of another content type, or no JSON object.
    """
    kind = request.headers.get("content-type", "").lower().split(";")[0].strip()
    if kind != "application/json":
        raise APIError("Content-Type: need application/json", "Bad Request")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise APIError(f"body: more than {MAX_BODY_BYTES} bytes", "Bad Request", 413)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise APIError(f"body: no JSON: {error}", "Bad Request") from None
    if not isinstance(found, dict):
        raise APIError(f"body: need an object, not a {type(found).__name__}", "Bad Request")
    return found


def _checked(model: type[BaseModel], body: Any) -> Any:
    """The body as a request.

    Raises:
        APIError: a field is wrong; each is named.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        wrong = [
            ".".join(map(str, e["loc"])) + (": " if e["loc"] else "") + e["msg"]
            for e in error.errors(include_url=False, include_input=False, include_context=False)
        ]
        causes = [e.get("ctx", {}).get("error") for e in error.errors(include_url=False)]
        param = next((cause.param for cause in causes if isinstance(cause, FieldError)), None)
        raise APIError("; ".join(wrong), "Bad Request", param=param) from None
    except RecursionError:
        raise APIError("body: nested too deeply", "Bad Request") from None


class Server:
    """The handlers of one server."""

    def __init__(self, served: Served, max_concurrent: int = MAX_CONCURRENT) -> None:
        self.served = served
        self.max_concurrent = max_concurrent
        self.num_open = 0
        """Generations that are being answered."""
        self.completions, self.chats = CompletionServing(served), ChatServing(served)
        self.metrics = Metrics(served)
        served.left = self.metrics.left

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self.completions)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatCompletionRequest, self.chats)

    async def _generate(self, request: Request, model: type[BaseModel], serving: Any) -> Response:
        """One generation: checked, counted, streamed or whole."""
        asked = _checked(model, await _body(request))
        if self.num_open >= self.max_concurrent:
            raise APIError("too many requests at once", "TooManyRequests", 429)
        job = await serving.begin(asked, request.headers.get("x-request-id"))
        self.num_open += 1
        if asked.stream:
            return StreamingResponse(self._counted(job.chunks()), media_type="text/event-stream")
        try:
            return JSONResponse(await self._unless_left(request, job.answer()))
        finally:
            self.num_open -= 1

    async def _counted(self, chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            self.num_open -= 1
            await chunks.aclose()  # type: ignore[attr-defined]

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
        asked = _checked(TokenizeRequest, await _body(request))
        self.served.adapter_of(asked.model)
        text = asked.prompt
        if asked.messages is not None:
            _, text = self.chats.prompt_of(asked)
        ids = self.served.tokenizer.encode(text)
        pieces = None
        if asked.return_token_strs:
            pieces = [self.served.piece_of(token) for token in ids]
        return JSONResponse(
            {"count": len(ids), "max_model_len": self.served.max_model_len, "tokens": ids,
             "token_strs": pieces}
        )  # fmt: skip

    async def detokenize(self, request: Request) -> Response:
        asked = _checked(DetokenizeRequest, await _body(request))
        self.served.adapter_of(asked.model)
        most = self.served.engine.about.vocab_size
        if wrong := [token for token in asked.tokens if token >= most]:
            raise APIError(f"tokens holds {wrong}: need ids from 0 to {most - 1}")
        return JSONResponse({"prompt": self.served.text_of(asked.tokens)})

    async def render_completion(self, request: Request) -> Response:
        asked = _checked(CompletionRequest, await _body(request))
        self.served.adapter_of(asked.model)
        prompts = [self.served.fit(prompt, asked) for prompt in asked.prompts()]
        return JSONResponse([self._rendered("cmpl", asked, ids) for ids in prompts])

    async def render_chat(self, request: Request) -> Response:
        asked = _checked(ChatCompletionRequest, await _body(request))
        self.served.adapter_of(asked.model)
        _, text = self.chats.prompt_of(asked)
        return JSONResponse(self._rendered("chatcmpl", asked, self.served.fit(text, asked)))

    def _rendered(self, prefix: str, asked: Generation, ids: list[int]) -> dict[str, Any]:
        """What would be generated from: the prompt's tokens and the sampling parameters."""
        params = self.served.params_of(asked, self.served.most_tokens(asked, len(ids)))
        changed = {
            f.name: getattr(params, f.name)
            for f in dataclasses.fields(params)
            if not f.name.startswith("_") and getattr(params, f.name) != f.default
        }
        return {
            "request_id": new_id(prefix, asked, None), "token_ids": ids, "features": None,
            "sampling_params": changed, "model": asked.model, "stream": bool(asked.stream),
            "stream_options": asked.stream_options and asked.stream_options.model_dump(),
            "cache_salt": asked.cache_salt, "priority": asked.priority, "kv_transfer_params": None,
        }  # fmt: skip

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.served.engine.errored else 200)

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
) -> Any:
    """The application; its shutdown closes the engine."""
    server = Server(served, max_concurrent)
    routes = [
        Route("/v1/completions", server.complete, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/completions/render", server.render_completion, methods=["POST"]),
        Route("/v1/chat/completions/render", server.render_chat, methods=["POST"]),
        Route("/v1/models", server.models), Route("/health", server.health),
        Route("/ping", server.health, methods=["GET", "POST"]),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/version", server.version), Route("/load", server.load),
        Route("/metrics", server.show_metrics),
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
    return app


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
