"""A conversation becomes a prompt in gpt-oss's harmony format; no chat template is asked.

Promises: the text is that of the real server's tokens, with the special ones by their names. It is
tokenized as one: a tag in a message's text is read as the tag, where `openai_harmony` makes plain
tokens of it, and parts of a content may merge. Mirrors
`vllm/entrypoints/openai/parser/harmony_utils.py:198` `parse_chat_inputs_to_harmony_messages` and
`vllm/entrypoints/serve/render/serving.py:397` `OpenAIServingRender._make_request_with_harmony`.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.templates import TEXT_PARTS
from mini_vllm.entrypoints.openai.tool_parsers_openai import CHANNEL, MESSAGE, ROLES, START, Message

EFFORTS = ("low", "medium", "high")
CHANNELS = "analysis, commentary, final"


def render_for_completion(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    reasoning_effort: str | None = None,
) -> str:
    """The prompt: who the model is, its tools, what was said, and that the assistant speaks.

    Args:
        messages: as in a request.
        tools: as `mini_vllm/entrypoints/openai/protocol_chat.py` `Tool.offered` gives them.
        reasoning_effort: None is "medium".

    Raises:
        APIError: there is no such effort or role, or a part that cannot be written.
    """
    said = [Message("system", None, None, None, _system(reasoning_effort, bool(tools)))]
    if tools:
        functions = [tool["function"] for tool in tools]
        said.append(Message("developer", None, None, None, _namespace(functions)))
    names = {
        call.get("id"): (call.get("function") or {}).get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    for message in messages:
        said += _messages_of(message, names)
    finals = [i for i, m in enumerate(said) if m.role == "assistant" and m.channel == "final"]
    last = finals[-1] if finals else -1
    kept = [m for i, m in enumerate(said) if i > last or m.channel != "analysis"]
    return f"{''.join(map(_written, kept))}{START}assistant"


def _written(message: Message) -> str:
    to = "" if message.recipient is None else f" to={message.recipient}"
    channel = "" if message.channel is None else f"{CHANNEL}{message.channel}"
    kind = "" if message.content_type is None else f" {message.content_type}"
    end = "<|call|>" if message.role == "assistant" and to else "<|end|>"
    return f"{START}{message.role}{to}{channel}{kind}{MESSAGE}{message.text}{end}"


def _system(effort: str | None, functions: bool) -> str:
    """What `openai_harmony` says of a model unless it is told otherwise, and the day."""
    if effort not in (None, *EFFORTS):
        raise APIError(f"reasoning_effort={effort!r}: need one of {', '.join(EFFORTS)}")
    day = os.environ.get("VLLM_SYSTEM_START_DATE") or datetime.date.today().isoformat()
    channels = f"# Valid channels: {CHANNELS}. Channel must be included for every message."
    if functions:
        channels += "\nCalls to these tools must go to the commentary channel: 'functions'."
    return (
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        f"Current date: {day}\n\nReasoning: {effort or 'medium'}\n\n{channels}"
    )


def _messages_of(message: Mapping[str, Any], names: Mapping[Any, Any]) -> Iterator[Message]:
    """The messages that one of a request becomes; `names` are of functions by their calls' ids."""
    role = message["role"]
    parts = _parts(message.get("content"))
    text = "".join(parts)
    reasoning = message.get("reasoning")
    calls = (message.get("tool_calls") or ()) if role == "assistant" else ()
    if role == "tool":
        name = names.get(message.get("tool_call_id"), "")
        yield Message(f"functions.{name}", "commentary", "assistant", None, text)
        return
    if role not in ROLES:
        raise APIError(f"messages: role={role!r}: need one of {', '.join(ROLES)}")
    if calls and text:
        yield Message(role, "commentary", None, None, text)
    if role == "assistant" and reasoning:
        yield Message(role, "analysis", None, None, reasoning)
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        yield Message(
            role, "commentary", f"functions.{function.get('name', '')}", "json", arguments
        )
    if role != "assistant":
        yield Message(role, None, None, None, text)
    elif not calls and parts and parts[0]:
        yield Message(role, "final", None, None, text)


def _parts(content: Any) -> list[str]:
    if not isinstance(content, list):
        return [content or ""]
    if wrong := [part for part in content if part.get("type", "text") not in TEXT_PARTS]:
        raise APIError(f"messages: content of type {wrong[0]['type']!r}: need text")
    return [str(part.get("text", "")) for part in content]


def _namespace(functions: Sequence[Mapping[str, Any]]) -> str:
    """The tools as types of TypeScript."""
    lines = ["# Tools\n", "## functions\n", "namespace functions {\n"]
    for function in functions:
        name = function["name"]
        description = function.get("description")
        if description is None:
            raise APIError(f"tools: {name}: need a description with harmony")
        lines += [f"// {line.removesuffix(chr(13))}" for line in _lines(description)]
        schema = function.get("parameters")
        arguments = "" if schema is None else f"_: {_type(schema, '')}"
        lines.append(f"type {name} = ({arguments}) => any;\n")
    return "\n".join([*lines, "} // namespace functions"])


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _type(schema: Any, indent: str) -> str:
    """A JSON schema as a type; what is not known is `any`."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_variant(each, indent, bare=False)}" for each in variants)
    kind = schema.get("type")
    if isinstance(kind, list) and (kinds := [each for each in kind if isinstance(each, str)]):
        return " | ".join("number" if each == "integer" else each for each in kinds)
    if kind == "object":
        return _object(schema, indent)
    if kind == "array":
        return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    if kind == "string":
        values = [f'"{value}"' for value in _enum(schema) if isinstance(value, str)]
        return " | ".join(values) or "string"
    names = {"number": "number", "integer": "number", "boolean": "boolean"}
    return names.get(kind, "any") if isinstance(kind, str) else "any"


def _enum(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("enum")
    return found if isinstance(found, list) else []


def _object(schema: Mapping[str, Any], indent: str) -> str:
    """Braces and one property a line, each below what is said of it."""
    text = _comment(schema.get("description"), indent) + "{\n"
    properties = schema.get("properties")
    required = schema.get("required")
    for key, value in properties.items() if isinstance(properties, dict) else ():
        about = value if isinstance(value, dict) else {}
        if title := _comment(about.get("title"), indent):
            text += f"{title}{indent}//\n"
        if "oneOf" not in about:
            text += _comment(about.get("description"), indent)
        if isinstance(examples := about.get("examples"), list) and examples:
            text += f"{indent}// Examples:\n"
            text += "".join(f'{indent}// - "{e}"\n' for e in examples if isinstance(e, str))
        mark = "" if isinstance(required, list) and key in required else "?"
        if isinstance(about.get("oneOf"), list):
            text += _choice(f"{key}{mark}", about, indent)
            continue
        default = "" if "oneOf" in about else "".join(f" // {note}" for note in _default(about))
        text += f"{indent}{key}{mark}: {_nullable(about, indent + '    ')},{default}\n"
    return text + indent + "}"


def _choice(name: str, schema: Mapping[str, Any], indent: str) -> str:
    """A property of several types, one a line; what is said of it and of the first is said once."""
    said = schema.get("description")
    variants = schema["oneOf"]
    first = variants[0].get("description") if variants and isinstance(variants[0], dict) else None
    above = "" if said == first else _comment(said, indent)
    text = above + "".join(f"{indent}// {note}\n" for note in _default(schema))
    text += f"{indent}{name}:\n"
    for number, variant in enumerate(variants):
        hides = number == 0 and bool(above)
        text += f"{indent} | {_variant(variant, indent, said, hides)}\n"
    return f"{text}{indent},\n"


def _variant(
    schema: Any, indent: str, said: Any = None, hides: bool = False, bare: bool = True
) -> str:
    """One of several types, and behind it what is said of it and was not said above."""
    about = schema if isinstance(schema, dict) else {}
    own = about.get("description")
    notes = [own] if isinstance(own, str) and own != said and not hides else []
    notes += _default(about, bare)
    found = _nullable(about, indent + "   ")
    return f"{found} // {' '.join(notes)}" if notes else found


def _nullable(schema: Mapping[str, Any], indent: str) -> str:
    found = _type(schema, indent)
    return f"{found} | null" if schema.get("nullable") is True and "null" not in found else found


def _comment(said: Any, indent: str) -> str:
    return f"{indent}// {said}\n" if isinstance(said, str) else ""


def _default(schema: Mapping[str, Any], bare: bool = True) -> list[str]:
    """A note of the default, if there is one; of an enum's value without quotes where `bare`."""
    if "default" not in schema:
        return []
    default = schema["default"]
    if not isinstance(default, str) or (_enum(schema) and not bare):
        default = json.dumps(default, ensure_ascii=False, separators=(",", ":"))
    elif not _enum(schema):
        default = f'"{default}"'
    return [f"default: {default}"]
