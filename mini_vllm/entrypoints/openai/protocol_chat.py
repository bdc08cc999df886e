"""What a client of chats may send: messages, tools, and texts to tokenize.

Promises: those of `protocol.py`. Mirrors
`vllm/entrypoints/openai/chat_completion/protocol.py:183` `ChatCompletionRequest`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mini_vllm.entrypoints.openai.errors import FieldError
from mini_vllm.entrypoints.openai.protocol import Body, Generation, TokenId, number_of


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    defer_loading: bool | None = None


class Tool(Body):
    """A tool on offer. Fields that are not named here, `strict` among them, are kept: templates see
    them, and nothing else reads them by default."""

    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None

    def offered(self) -> dict[str, Any]:
        """As a template gets it: what is left out is null there, but for `defer_loading`."""
        tool = self.model_dump()
        function = tool["function"]
        if function["defer_loading"] is None:
            function["defer_loading"] = self.defer_loading
        for part in (tool, function):
            if part["defer_loading"] is None:
                del part["defer_loading"]
        return tool


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    function: NamedFunction
    type: Literal["function"] = "function"


class CalledFunction(Body):
    arguments: Any = None


class CalledTool(Body):
    """A call in a message of the past."""

    function: CalledFunction | None = None


class Message(Body):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[CalledTool] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        """As the types of `vllm/entrypoints/chat_utils.py:354` `ChatCompletionMessageParam`: who
        calls tools may say nothing; others may leave the content out, but not name it null."""
        silent = self.content is None and "content" in self.model_fields_set
        if silent and self.role not in ("assistant", "function"):
            raise ValueError(f"content of {self.role}: need a text or parts")
        return self


class ChatCompletionRequest(Generation):
    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    parallel_tool_calls: bool | None = True
    bad_words: list[str] = Field(default_factory=list)
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )

    @model_validator(mode="before")
    @classmethod
    def _check_chat(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        top = number_of(data, "top_logprobs")
        if top is not None:
            if top < -1:
                raise FieldError(f"top_logprobs={top}: need 0 or more, or -1", "top_logprobs")
            if top and not data.get("logprobs"):
                raise FieldError("top_logprobs: need logprobs=true", "top_logprobs")
        if data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise ValueError("continue_final_message: need add_generation_prompt=false")
        tools = data.get("tools")
        if tools == []:
            raise ValueError("tools: need at least one, or leave them out")
        if tools and "tool_choice" not in data:
            data = data | {"tool_choice": "auto"}
        choice = data.get("tool_choice")
        if choice not in (None, "none") and not tools:
            raise ValueError("tool_choice: need tools")
        if isinstance(choice, dict) and isinstance(tools, list):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            offered = (t.get("function") for t in tools if isinstance(t, dict))
            names = [each.get("name") for each in offered if isinstance(each, dict)]
            if not name or name not in names:
                raise ValueError(f"tool_choice: need one of the tools, {names}")
        return data

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        """The tools as a template gets them."""
        return None if self.tools is None else [tool.offered() for tool in self.tools]

    @property
    def named_tool(self) -> str | None:
        """The one tool that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None

    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def _prompt_logprobs(self) -> int | None:
        return (
            self.top_logprobs
            if self.prompt_logprobs is None and self.echo
            else (self.prompt_logprobs)
        )


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def tool_dicts(self) -> list[dict[str, Any]] | None:
        """The tools as a template gets them."""
        return None if self.tools is None else [tool.offered() for tool in self.tools]

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if self.prompt is None and self.messages is None:
            raise ValueError("body has neither prompt nor messages: need one of them")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[TokenId]
