"""From a model to a server that listens, and its end.

Promises: it listens on this machine alone unless it has a key, and holds its port before a model is
loaded; it ends on SIGINT, on SIGTERM and when its engine dies. Mirrors
`vllm/entrypoints/openai/api_server.py:681` `run_server_worker`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mini_vllm.engine import LLMEngine
from mini_vllm.entrypoints.async_llm import AsyncLLM
from mini_vllm.entrypoints.openai.checkpoint import generation_defaults, names_of_tokens
from mini_vllm.entrypoints.openai.http import HTTPServer, listening
from mini_vllm.entrypoints.openai.reasoning_parsers import Tags
from mini_vllm.entrypoints.openai.server import MAX_CONCURRENT, build_app
from mini_vllm.entrypoints.openai.serving import Served, version
from mini_vllm.entrypoints.openai.tool_parser_manager import get_tool_parser, import_tool_parser
from mini_vllm.llm import LLM
from mini_vllm.models.loader import resolve

__all__ = [
    "check_open",
    "keep_alive_of",
    "listening",
    "make_engine",
    "run",
    "serve_engine",
    "with_adapters",
]


def make_engine(model: str, lora_modules: Mapping[str, str], knobs: Mapping[str, Any]) -> LLMEngine:
    """The engine of a server, its adapters loaded; runs where the engine is.

    Raises:
        ValueError: what `LLM` refuses of the knobs, or an adapter that cannot be loaded.
    """
    return with_adapters(LLM(model, **knobs).llm_engine, lora_modules)


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
    tool_call_parser: str | None = None, tool_parser_plugin: Path | None = None,
    reasoning_parser: str | None = None, lora_modules: Mapping[str, str] | None = None,
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
        tool_call_parser: the name of a family, such as "hermes", or None for no calls in free text.
        tool_parser_plugin: a file that registers a family of its own.
        reasoning_parser: "deepseek_r1"; "openai_gptoss", which `tool_call_parser="openai"` brings;
            or None for a model that does not think.
        lora_modules: folders of adapters by the name that clients call them.

    Raises:
        ValueError: an unknown parser, or one whose tags no text will have; a plug-in that fails;
            an adapter that cannot be loaded; a name taken twice; a model without `max_model_len`;
            or what the engine refuses.
    """
    if tool_parser_plugin is not None:
        import_tool_parser(tool_parser_plugin)
    parser = None if tool_call_parser is None else get_tool_parser(tool_call_parser)
    strict = os.environ.get("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")
    if parser is not None and strict != "0":
        raise ValueError(
            f"VLLM_ENFORCE_STRICT_TOOL_CALLING={strict}: need 0, no structural tag is made of tools"
        )
    if reasoning_parser not in (None, "deepseek_r1", "openai_gptoss"):
        raise ValueError(
            f"reasoning_parser={reasoning_parser!r}: need 'deepseek_r1', 'openai_gptoss', or none"
        )
    harmony: Any = None
    if tool_call_parser == "openai" or reasoning_parser == "openai_gptoss":
        harmony = get_tool_parser("openai")
        if tool_call_parser not in (None, "openai") or reasoning_parser == "deepseek_r1":
            raise ValueError(
                f"reasoning_parser={reasoning_parser!r}: need 'openai_gptoss' with "
                f"tool_call_parser='openai', and no other, not {tool_call_parser!r}"
            )
    name, modules = served_model_name or model, lora_modules or {}
    if name in modules:
        raise ValueError(
            f"lora_modules holds {name!r}, the served model's own name: need another, or another "
            "served_model_name"
        )
    folder = resolve(model)
    defaults = generation_defaults(folder)
    pieces, specials = names_of_tokens(folder)
    parses = parser is not None or reasoning_parser is not None
    vocab = {name: number for number, name in pieces.items()} if parses else {}
    if parser is not None:
        parser(vocab)  # one whose tags it lacks is refused
        if lost := [tag for tag in parser.tags if tag in specials.values()]:
            raise ValueError(
                f"tool_call_parser={tool_call_parser!r}: need {' and '.join(lost)} in texts, which "
                "leave out what the tokenizer marks as special"
            )
    tags = Tags.of(vocab) if reasoning_parser == "deepseek_r1" else None
    if isinstance(engine, LLMEngine):
        asking = AsyncLLM(with_adapters(engine, modules))
    else:
        asking = AsyncLLM(engine, model=model, lora_modules=modules, knobs=knobs or {})
    about = asking.about
    if about.max_model_len is None:
        asking.close()
        raise ValueError(
            f"max_model_len=None: need a length, since the config of {model} names none"
        )
    mark = hashlib.sha256(f"{model} {about.config}".encode()).hexdigest()[:8]
    return Served(
        asking, name, about.max_model_len, model, requests_of(modules), defaults,
        about.chat_template if chat_template is None else chat_template,
        trust_request_chat_template, parser, tags, harmony, f"mini-vllm-{version()}-{mark}", pieces,
        specials, vocab,
    )  # fmt: skip


def check_open(host: str, api_keys: Sequence[str]) -> None:
    """Refuse to listen to other machines without a key.

    Raises:
        ValueError: `host` is not this machine and there is no key; an empty one counts as none.
    """
    try:
        alone = ipaddress.ip_address(host).is_loopback
    except ValueError:
        alone = host == "localhost"
    if not alone and not any(api_keys):
        raise ValueError(
            f"host={host!r}: other machines could ask without a key; need an api_key, or 127.0.0.1"
        )


def keep_alive_of(text: str) -> int:
    """Seconds that a connection may be idle, as `VLLM_HTTP_TIMEOUT_KEEP_ALIVE` says them.

    As `vllm/envs.py:99` `VLLM_HTTP_TIMEOUT_KEEP_ALIVE`.

    Raises:
        ValueError: it is not a number of seconds.
    """
    if not text.isdecimal():
        raise ValueError(f"VLLM_HTTP_TIMEOUT_KEEP_ALIVE={text!r}: need whole seconds, 0 or more")
    return int(text)


def run(
    served: Served, host: str = "127.0.0.1", port: int = 8000, api_keys: Sequence[str] = (),
    max_concurrent: int = MAX_CONCURRENT, chat_page: bool = False,
    held: socket.socket | None = None, enable_request_id_headers: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Listen until a signal ends the process, or the engine dies.

    Args:
        held: a socket of `listening`; None takes one for `host` and `port`.
        enable_request_id_headers: answer with the request's `X-Request-Id`, or a new one.
        options: of `HTTPServer`, such as `shutdown_timeout`.

    Raises:
        ValueError: `host` is not this machine and there is no key, the port is taken, or what
            `HTTPServer` refuses.
        EngineDead: the engine has died; it was said in the log.
    """
    check_open(host, api_keys)
    held = held or listening(host, port)
    keys = tuple(filter(None, api_keys))
    app = build_app(served, keys, max_concurrent, chat_page, enable_request_id_headers)
    found = held.getsockname()[1]
    server = HTTPServer(app, served.engine, host, found, **options)
    at = f"[{host}]" if ":" in host else host
    print(f"mini-vllm serves {served.name} at http://{at}:{found}/v1 until Ctrl-C", flush=True)
    with _ending_well():
        server.run(sockets=[held])
    if server.died is not None:
        raise server.died


@contextmanager
def _ending_well() -> Iterator[None]:
    """The signal that ended a server does not end this process as well: uvicorn raises it anew."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
