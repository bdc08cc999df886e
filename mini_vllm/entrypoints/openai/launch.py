"""From a model to a server that listens, and its end.

Promises: it listens on this machine alone unless it has a key; it ends on SIGINT and SIGTERM after
the answers under way, or after `GRACE_S`. Mirrors `vllm/entrypoints/openai/api_server.py:681`
`run_server_worker`.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import uvicorn

from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints.async_llm import AsyncLLM
from mini_vllm.entrypoints.openai.reasoning_parsers import Tags
from mini_vllm.entrypoints.openai.server import MAX_CONCURRENT, build_app
from mini_vllm.entrypoints.openai.serving import (
    Served,
    generation_defaults,
    names_of_tokens,
    version,
)
from mini_vllm.models.loader import resolve

GRACE_S = 5
"""Seconds that answers under way have when the server is asked to end."""


def make_engine(model: str, lora_modules: Mapping[str, str], knobs: Mapping[str, Any]) -> LLMEngine:
    """The engine of a server, its adapters loaded; runs where the engine is.

    Raises:
        ValueError: what `LLMEngine` refuses, or an adapter that cannot be loaded.
    """
    return with_adapters(LLMEngine(model, **knobs), lora_modules)


def with_adapters(engine: LLMEngine, lora_modules: Mapping[str, str]) -> LLMEngine:
    """The engine, these adapters in its memory.

    Raises:
        ValueError: it takes none, or one cannot be loaded.
    """
    for adapter in requests_of(lora_modules).values():
        if engine.feature("lora") is None:
            raise ValueError("lora_modules: need enable_lora=True")
        engine.feature("lora").add_adapter(adapter)
    return engine


def requests_of(lora_modules: Mapping[str, str]) -> dict[str, Any]:
    """`LoRARequest` by name."""
    if not lora_modules:
        return {}
    from mini_vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(lora_modules.items(), 1)
    }


def serve_engine(
    engine: LLMEngine | Callable[..., LLMEngine], *, model: str,
    knobs: Mapping[str, Any] | None = None, served_model_name: str | None = None,
    chat_template: str | None = None, trust_request_chat_template: bool = False,
    tool_call_parser: str | None = None, reasoning_parser: str | None = None,
    lora_modules: Mapping[str, str] | None = None,
) -> Served:  # fmt: skip
    """What a server serves; its engine runs from now on.

    Args:
        engine: made like `make_engine`, in a process of its own; or an engine, which runs on a
            thread of this process, and nobody else may step it.
        model: where it comes from: a name, a folder or a hub id.
        knobs: of the engine that is made.
        served_model_name: what clients call it; default `model`.
        chat_template: Jinja text; default the checkpoint's.
        trust_request_chat_template: take templates from requests.
        tool_call_parser: "hermes", or None for no calls in free text.
        reasoning_parser: "deepseek_r1", or None for a model that does not think in tags.
        lora_modules: folders of adapters by the name that clients call them.

    Raises:
        ValueError: an unknown parser, an adapter that cannot be loaded, a name taken twice, a model
            without `max_model_len`, or what the engine refuses.
    """
    if tool_call_parser not in (None, "hermes"):
        raise ValueError(f"tool_call_parser={tool_call_parser!r}: need 'hermes', or none")
    if reasoning_parser not in (None, "deepseek_r1"):
        raise ValueError(f"reasoning_parser={reasoning_parser!r}: need 'deepseek_r1', or none")
    name, modules = served_model_name or model, lora_modules or {}
    if name in modules:
        raise ValueError(f"lora_modules holds {name!r}: the model has that name")
    folder = resolve(model)
    defaults = generation_defaults(folder)
    pieces, specials = names_of_tokens(folder)
    tags = Tags.of({p: i for i, p in enumerate(pieces)}) if reasoning_parser else None
    if isinstance(engine, LLMEngine):
        asking = AsyncLLM(with_adapters(engine, modules))
    else:
        asking = AsyncLLM(engine, model=model, lora_modules=modules, knobs=knobs or {})
    about = asking.about
    if about.max_model_len is None:
        asking.close()
        raise ValueError("max_model_len: need one, this model has no context length of its own")
    mark = hashlib.sha256(f"{model} {about.config}".encode()).hexdigest()[:8]
    return Served(
        asking, name, about.max_model_len, model, requests_of(modules), defaults,
        about.chat_template if chat_template is None else chat_template,
        trust_request_chat_template, tool_call_parser, tags,
        f"mini-vllm-{version()}-{mark}", pieces, specials,
    )  # fmt: skip


def check_open(host: str, api_keys: Sequence[str]) -> None:
    """Refuse to listen to other machines without a key.

    Raises:
        ValueError: `host` is not this machine and there is no key.
    """
    try:
        alone = ipaddress.ip_address(host).is_loopback
    except ValueError:
        alone = host == "localhost"
    if not alone and not api_keys:
        raise ValueError(f"host={host!r}: need an api_key, or 127.0.0.1")


def run(
    served: Served, host: str = "127.0.0.1", port: int = 8000, api_keys: Sequence[str] = (),
    max_concurrent: int = MAX_CONCURRENT, chat_page: bool = False,
) -> None:  # fmt: skip
    """Listen until a signal ends the process.

    Raises:
        ValueError: `host` is not this machine and there is no key.
    """
    check_open(host, api_keys)
    app = build_app(served, tuple(api_keys), max_concurrent, chat_page)
    uvicorn.run(
        app, host=host, port=port, log_level="info", timeout_graceful_shutdown=GRACE_S,
        access_log=False, timeout_keep_alive=5, h11_max_incomplete_event_size=64 * 1024,
    )  # fmt: skip
