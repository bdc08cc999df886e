"""A conversation becomes a prompt: the checkpoint's chat template, run where it can do no harm.

Mirrors `vllm/renderers/hf.py:634` `safe_apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.protocol import Message, Tool


def flat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a template sees them: content as one text, arguments of calls as objects.

    Raises:
        APIError: a part of the content is no text.
    """
    found = []
    for message in messages:
        raw = message.model_dump(exclude_unset=True)
        content = raw.get("content")
        if isinstance(content, list):
            kinds = {part.get("type", "text") for part in content}
            if kinds - {"text", "refusal", "input_text", "output_text"}:
                raise APIError(f"messages: content of type {sorted(kinds)}: need text")
            raw["content"] = "\n".join(str(part.get("text", "")) for part in content)
        for call in raw.get("tool_calls") or ():
            function = call.get("function") or {}
            if isinstance(function.get("arguments"), str):
                function["arguments"] = json.loads(function["arguments"] or "{}")
        found.append(raw)
    return found


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None,
    asked: Mapping[str, Any],
) -> str:  # fmt: skip
    """The prompt of a conversation.

    Raises:
        APIError: the template fails on it.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    offered = None if tools is None else [_dumped(tool) for tool in tools]
    last = asked.get("continue_final_message") and messages
    try:
        text = environment.from_string(template).render(
            messages=list(messages), tools=offered,
            add_generation_prompt=asked.get("add_generation_prompt", True),
            **(asked.get("chat_template_kwargs") or {}),
        )  # fmt: skip
    except TemplateError as error:
        raise APIError(f"chat template: {error}") from None
    if last:
        final = str(messages[-1].get("content") or "").strip()
        end = text.rfind(final)
        text = text[: end + len(final)] if end >= 0 else text
    return text


def _dumped(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_none=True)
