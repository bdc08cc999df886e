"""What a client of `/v1/messages` may send.

Promises: those of `protocol.py`. Mirrors `vllm/entrypoints/anthropic/protocol.py:103`
`AnthropicMessagesRequest`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from mini_vllm.entrypoints.openai.protocol import Body


class Block(Body):
    type: Literal[
        "text", "image", "tool_use", "tool_result", "tool_reference", "thinking",
        "redacted_thinking",
    ]  # fmt: skip
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    thinking: str | None = None


class AnthropicMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    @field_validator("input_schema")
    @classmethod
    def _add_type(cls, value: dict[str, Any]) -> dict[str, Any]:
        return value if "type" in value else {**value, "type": "object"}


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None

    @model_validator(mode="after")
    def _check_name(self) -> AnthropicToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("tool_choice: type tool needs a name")
        return self


class CountTokensRequest(Body):
    """What a prompt is made of."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tool_choice: AnthropicToolChoice | None = None
    tools: list[AnthropicTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: str) -> str:
        if not value:
            raise ValueError("model: need a name")
        return value


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @field_validator("max_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int) -> int:
        if value <= 0:
            raise ValueError(f"max_tokens={value}: need at least 1")
        return value
