"""Calls of tools as Mistral's models write them: a token, a name, and arguments in JSON.

Promises: every delta is the real parser's, with a tokenizer in Hugging Face's format whose
vocabulary has the token `[ARGS]`. A tokenizer of `mistral_common` has vLLM constrain the whole
answer by a grammar instead, and one without `[ARGS]` writes calls as a list; neither is served.
Mirrors `vllm/tool_parsers/mistral_tool_parser.py:115` `MistralToolParser`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mini_vllm.entrypoints.openai.tool_parsers import Sent, ToolCall, ToolParser, said_in

CALLS, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"


def call_id() -> str:
    """A new id, of nine letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))


@dataclass(slots=True)
class MistralToolParser(ToolParser):
    """`mistral`: `[TOOL_CALLS]` before each call must be a token of the vocabulary, and `[ARGS]`.

    Raises:
        ValueError: they are not.
    """

    reading: Literal["content", "name", "arguments"] = "content"
    name: str | None = None
    """Of the call that is being read, None once it was sent."""
    seen: bool = False
    """Whether the token before a call has come, with its text or without."""

    tags: ClassVar[tuple[str, ...]] = (CALLS,)

    def __post_init__(self) -> None:
        if missing := [tag for tag in (CALLS, ARGUMENTS) if tag not in self.vocab]:
            raise ValueError(
                f"tool_call_parser='mistral': need a vocabulary with the tokens {CALLS} and "
                f"{ARGUMENTS}, this one lacks {' and '.join(missing)}"
            )

    def extract_tool_calls(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Content and calls; arguments are as the model writes them, whether JSON or not."""
        content, *found = text.split(CALLS)
        if not found:
            return text, []
        calls = []
        for body in found:
            name, brace, arguments = body.partition("{")
            if brace:
                calls.append(ToolCall(name.replace(ARGUMENTS, ""), brace + arguments, call_id()))
        return said_in(content), calls

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What a piece adds to the message; an empty delta while arguments say nothing new.

        A piece with content before a call drops the tokens before further calls in it.
        """
        self.text += piece
        self.seen = self.seen or self.vocab[CALLS] in token_ids or CALLS in self.text
        content = ""
        if self.reading == "content":
            if not self.seen or CALLS not in piece:
                return {"content": piece}
            content, *rest = piece.split(CALLS)
            if content:
                piece = CALLS + "".join(rest)
        calls = self._new_calls(piece)
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = calls
        return delta if delta or self.reading == "arguments" else None

    def _new_calls(self, text: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        while text:
            if self.reading == "content":  # the text begins with the token before a call
                self.calls.append(Sent())
                self.reading, self.name, text = "name", "", text[len(CALLS) :]
            made = None
            if self.reading == "name":
                before, brace, arguments = text.partition("{")
                self.name = (self.name or "") + before
                if not brace:
                    break
                self.name = self.calls[-1].name = self.name.replace(ARGUMENTS, "")
                self.reading, text, made = "arguments", brace + arguments, call_id()
            new, another, rest = text.partition(CALLS)
            self.calls[-1].arguments += new
            if self.name or new:
                name = {} if self.name is None else {"name": self.name}
                deltas.append({
                    "index": len(self.calls) - 1, "type": "function", "id": made,
                    "function": {**name, "arguments": new},
                })  # fmt: skip
                self.name = None
            if not another:
                break
            self.reading, text = "content", another + rest
        return deltas
