"""What a client of `/v1/responses` may send.

Promises: those of `protocol.py`. Items and tools stay as they are sent, checked. Mirrors
`vllm/entrypoints/openai/responses/protocol.py:136` `ResponsesRequest`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from mini_vllm.entrypoints.openai.errors import FieldError
from mini_vllm.entrypoints.openai.protocol import Body, StructuredOutputs

INCLUDES = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url",
    "message.output_text.logprobs", "reasoning.encrypted_content",
]  # fmt: skip
UNSERVED = (
    "enable_response_messages", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs",
    "previous_input_messages", "vllm_xargs",
)  # fmt: skip
"""Fields that vLLM reads and this server refuses, unless they are left out or empty."""
TOOL_TYPES = (
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
    "image_generation", "local_shell", "mcp", "namespace", "shell", "tool_search", "web_search",
    "web_search_preview",
)  # fmt: skip
"""Tools that a server would run itself, or that no grammar was recorded for."""


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.json_schema is None):
            raise ValueError("text.format: type json_schema needs a name and a schema")
        return self

    def as_answered(self) -> dict[str, Any]:
        """As the answer repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {
            "name": self.name, "schema": self.json_schema, "type": self.type,
            "description": self.description, "strict": self.strict,
        }  # fmt: skip


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def as_answered(self) -> dict[str, Any]:
        """As the answer repeats it."""
        form = None if self.format is None else self.format.as_answered()
        return {"format": form, "verbosity": self.verbosity}


class Reasoning(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Body):
    input: str | list[dict[str, Any]]
    background: bool = False
    include: list[INCLUDES] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    logit_bias: dict[str, float] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int | None = 0
    top_p: float | None = None
    top_k: int | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    request_id: str = Field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1)
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_together(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("background") and not data.get("store", True):
            raise FieldError("background: need store=true", "background")
        if data.get("prompt") is not None:
            raise FieldError("prompt: templates of prompts are not available", "prompt")
        if data.get("cache_salt") is not None and not data["cache_salt"]:
            raise FieldError("cache_salt='': need a text that is not empty", "cache_salt")
        choice, tools = data.get("tool_choice", "auto"), data.get("tools") or []
        named = isinstance(choice, dict) and choice.get("type") == "function"
        names = [t.get("name") for t in tools if isinstance(t, dict)]
        if (choice == "required" and not tools) or (named and choice.get("name") not in names):
            raise FieldError(f"tool_choice: need one of the tools, {names}", "tool_choice")
        if not tools and choice in ("auto", "none"):
            data = data | {"tool_choice": "none"}
        return data

    @model_validator(mode="after")
    def _check_items(self) -> ResponsesRequest:
        for item in [] if isinstance(self.input, str) else self.input:
            check_item(item)
        for tool in self.tools:
            kind = tool.get("type")
            if kind != "function" and kind not in TOOL_TYPES:
                raise ValueError(f"tools: type {kind!r}: need 'function'")
            if kind == "function" and not isinstance(tool.get("name"), str):
                raise ValueError("tools: type 'function' needs a name")
        return self

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        return self.tool_choice["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def with_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


def check_item(item: Mapping[str, Any]) -> None:
    """Refuse an item whose fields are wrong.

    Raises:
        ValueError: as pydantic wants it.
    """
    kind = item.get("type", "message")
    needed = {
        "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"), "reasoning": ("summary",),
    }.get(kind)  # fmt: skip
    if needed is None:
        kinds = "'message', 'function_call', 'function_call_output' or 'reasoning'"
        raise ValueError(f"input: an item of type {kind!r}: need {kinds}")
    if missing := [name for name in needed if item.get(name) is None]:
        raise ValueError(f"input: an item of type {kind!r} needs {missing[0]}")
    if kind == "message":
        if item["role"] not in ("user", "assistant", "system", "developer"):
            raise ValueError(f"input: role {item['role']!r}: need 'user', 'assistant' or 'system'")
        content = item["content"]
        if not isinstance(content, str) and not (
            isinstance(content, list) and all(isinstance(part, dict) for part in content)
        ):
            raise ValueError("input: content: need a text or parts")
    elif kind == "reasoning" and not isinstance(item["summary"], list):
        raise ValueError("input: summary: need a list")
