"""Our server in this process, with what `recorded.py` gives vLLM's: key, template and parser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance.serving.battery import KEY, MODEL
from conformance.serving.recorded import TEMPLATE
from mini_vllm.engine import LLMEngine
from mini_vllm.tests.server_support import serving


@contextmanager
def chat_server(lora_modules: dict[str, str] | None = None, **knobs: Any) -> Iterator[int]:
    """Its port; `knobs` are the engine's."""
    template = TEMPLATE.read_text(encoding="utf-8")
    options: dict[str, Any] = {"lora_modules": lora_modules} if lora_modules else {}
    options |= {"chat_template": template, "tool_call_parser": "hermes", "model": MODEL}
    with serving(LLMEngine(MODEL, **knobs), keys=(KEY,), **options) as (port, _):
        yield port
