"""A conversation becomes a prompt: the checkpoint's chat template, run where it can do no harm.

Mirrors `vllm/renderers/hf.py:634` `safe_apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.protocol_chat import Message

TEXT_PARTS = ("text", "refusal", "input_text", "output_text")
OURS = ("messages", "tools", "self", "chat_template", "tokenize")
"""Names that `chat_template_kwargs` must not have: they are set by the request itself."""


def flat(messages: Sequence[Message], with_pictures: bool = False) -> list[dict[str, Any]]:
    """Messages as a template sees them: content as one text, arguments of calls as objects.

    With pictures a content of parts stays one, and each picture is `{"type": "image"}`: its place
    among the texts is the template's business.

    Raises:
        APIError: a part of the content is not text, or arguments that are not JSON.
    """
    found = []
    for message in messages:
        raw = message.model_dump(exclude_unset=True)
        content = raw.get("content")
        if isinstance(content, list):
            kinds = [part.get("type", "text") for part in content]
            taken = (*TEXT_PARTS, "image_url") if with_pictures else TEXT_PARTS
            if wrong := [kind for kind in kinds if kind not in taken]:
                raise APIError(f"messages: content of type {wrong[0]!r}: need text")
            if "image_url" in kinds:
                raw["content"] = [
                    {"type": "image"} if kind == "image_url"
                    else {"type": "text", "text": str(part.get("text", ""))}
                    for kind, part in zip(kinds, content, strict=True)
                ]  # fmt: skip
            else:
                raw["content"] = "\n".join(str(part.get("text", "")) for part in content)
        for call in raw.get("tool_calls") or ():
            function = call.get("function") or {}
            if isinstance(function.get("arguments"), str):
                try:
                    function["arguments"] = json.loads(function["arguments"] or "{}")
                except (ValueError, RecursionError) as error:
                    raise APIError(f"messages: arguments of tool_calls: {error}") from None
        found.append(raw)
    return found


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None,
    request: Mapping[str, Any],
) -> str:  # fmt: skip
    """The prompt of a conversation.

    Raises:
        APIError: the template fails on it, whatever it raises, as upstream has it.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    own = request.get("chat_template_kwargs") or {}
    if taken := [name for name in OURS if name in own]:
        raise APIError(
            f"chat_template_kwargs: {taken[0]}: need another name, the request itself sets this one"
        )
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    last = request.get("continue_final_message") and messages
    generation = {"add_generation_prompt": request.get("add_generation_prompt", True)}
    try:
        text = environment.from_string(template).render(
            messages=list(messages), tools=tools, **(own | generation)
        )
    except Exception as error:
        raise APIError(f"chat template: {type(error).__name__}: {error}") from None
    if last:
        final = str(messages[-1].get("content") or "").strip()
        end = text.rfind(final)
        text = text[: end + len(final)] if end >= 0 else text
    return text
