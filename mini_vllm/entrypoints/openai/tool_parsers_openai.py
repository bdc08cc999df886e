"""gpt-oss's harmony format: messages on channels, between tokens that are theirs alone.

A message is `<|start|>`, a header, `<|message|>`, text and an end. A request's output begins inside
the first header. The header names a channel: `analysis` is reasoning, `final` is content, and
`commentary` is content too unless it has a recipient, such as `functions.NAME`, which makes it a
call.

Promises: messages, deltas and errors are the real server's over UTF-8, its quirk included: a call
that ends in the delta in which it begins is counted before its index is taken, so the index of a
first call can be 1. Upstream reads ids of one vocabulary, `o200k_harmony`. This parser reads the
text of all tokens, the special ones by their names, so it takes any vocabulary, and takes a tag
that a model spells with other tokens for the tag. Mirrors
`vllm/entrypoints/openai/chat_completion/stream_harmony.py:32` `extract_harmony_streaming_delta` and
`vllm/tool_parsers/openai_tool_parser.py:35` `OpenAIToolParser`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.tool_parsers import ToolCall, ToolParser, call_id, held_back

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
ROLES = ("user", "assistant", "system", "developer", "tool")
BUILT_IN = ("python", "browser", "container")
"""Recipients that are tools of upstream's server, and no functions."""
_SPLIT = re.compile(f"({'|'.join(map(re.escape, (START, MESSAGE, *ENDS)))})")
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space as Unicode has it; Python's own holds four characters more."""


class HarmonyError(APIError):
    """What a model has said is not harmony: an error of the server."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "InternalServerError", 500)


@dataclass(slots=True)
class Message:
    """One message; its text grows."""

    role: str
    channel: str | None
    recipient: str | None
    content_type: str | None
    text: str = ""

    @property
    def calls(self) -> bool:
        """Whether it is a call of a function.

        As `vllm/entrypoints/openai/parser/harmony_utils.py:30` `is_function_recipient`.
        """
        recipient = self.recipient or ""
        if not recipient or recipient.startswith("<|") or recipient == "assistant":
            return False
        first, _, name = recipient.partition(".")
        return bool(name) if first == "functions" and "." in recipient else first not in BUILT_IN

    @property
    def function(self) -> str:
        """The name of the function that it calls."""
        return (self.recipient or "").removeprefix("functions.")

    @property
    def shown(self) -> bool:
        """Whether its text is content, as a preamble's is."""
        return self.channel == "final" or (self.channel == "commentary" and not self.recipient)


def message_of(header: str, first: bool) -> Message:
    """The message that a header begins.

    Args:
        header: between `<|start|>` and `<|message|>`.
        first: of an output, whose prompt has said that the assistant speaks.

    Raises:
        HarmonyError: it names no role or no channel behind `<|channel|>`, or has words left.
    """
    channel = None
    before, tag, after = header.partition(CHANNEL)
    if tag:
        channel = re.split(f"[{_WHITE}<]", after, maxsplit=1)[0]
        if not channel:
            raise HarmonyError(f"a header has no channel behind {CHANNEL}")
        after = after[len(channel) :]
    header = re.sub(f"^[{_WHITE}]+|[{_WHITE}]+$", "", before + after)
    words = re.findall(r"[^ \t\n\f\r]+", header.replace(CONSTRAIN, f" {CONSTRAIN}"))
    role = "assistant"
    if not first:
        if not words:
            raise HarmonyError("a header has no role")
        role = words[0]
        if role not in ROLES:
            if len(words) == 1 and not role.startswith("to="):
                raise HarmonyError(f"a header has the role {role!r}: need one of {ROLES}")
            role = "tool"
            del words[0]
    if words[:1] == [role]:
        del words[0]
    recipient = content_type = None
    if len(words) > 1 and not words[-1].startswith("to="):
        content_type = words.pop()
    if words:
        recipient = words.pop().removeprefix("to=")
    if words:
        raise HarmonyError(f"a header has {' '.join(words)!r} beside role, recipient and type")
    return Message(role, channel, recipient, content_type)


@dataclass(slots=True)
class Messages:
    """Text in, messages out: those that ended, and the one that goes on."""

    ended: list[Message] = field(default_factory=list)
    current: Message | None = None
    header: str | None = ""
    """Of the message that begins, None before `<|start|>`."""

    def read(self, text: str) -> Iterator[tuple[Message | None, str]]:
        """Take text in which no tag is cut; yields each part, and the message it belongs to.

        Raises:
            HarmonyError: something is not harmony.
        """
        for part in filter(None, _SPLIT.split(text)):
            if self.current is not None:
                if part in ENDS:
                    self.ended.append(self.current)
                    self.current = self.header = None
                    yield None, ""
                else:
                    self.current.text += part
                    yield self.current, part
            elif self.header is None:
                if part != START:
                    raise HarmonyError(f"{part!r} stands between messages: need {START}")
                self.header = ""
                yield None, ""
            elif part == MESSAGE:
                self.current = message_of(self.header, not self.ended)
                yield self.current, ""
            else:
                self.header += part
                yield None, ""

    @property
    def unfinished(self) -> list[Message]:
        """The one that goes on, if it has text."""
        return [self.current] if self.current and self.current.text else []


def _read(text: str) -> Messages:
    """The messages of a whole text.

    Raises:
        HarmonyError: it is not harmony.
    """
    messages = Messages()
    for _ in messages.read(text):
        pass
    return messages


def _arguments(message: Message) -> str:
    """Of a call: JSON as Python writes it, or the text as it is."""
    if message.content_type and "json" not in message.content_type:
        return message.text
    try:
        return json.dumps(json.loads(message.text))
    except json.JSONDecodeError:
        return message.text


@dataclass(slots=True)
class OpenAIToolParser(ToolParser):
    """`openai`: reads a choice of gpt-oss, its reasoning too.

    `calls` stays empty, since upstream's own parser keeps no arguments to complete at the end.
    """

    text_of: Callable[[Sequence[int]], str] | None = None
    """The text of tokens, special ones by their names; None takes pieces as they are."""
    include_reasoning: bool = True
    """Whether the client wants it."""
    messages: Messages = field(default_factory=Messages)
    pending: list[int] = field(default_factory=list)
    """Tokens that end in an unfinished character."""
    num_read: int = 0
    """Characters of theirs that were read."""
    held: str = ""
    """Text that may become a tag, in a vocabulary that lacks the tags."""

    supports_required_and_named: ClassVar[bool] = False

    def extract_tool_calls(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """Content and calls: the last final message, or the last preamble where that is empty.

        Raises:
            HarmonyError: it is not harmony.
        """
        read = _read(text)
        said = [message for message in read.ended if message.role == "assistant"]
        calls = [ToolCall(call.function, _arguments(call)) for call in said if call.calls]
        shown = [message for message in said if not message.calls] + read.unfinished
        content = {message.channel: message.text for message in shown if message.shown}
        return content.get("final") or content.get("commentary"), calls

    @staticmethod
    def parse_chat_output(text: str) -> tuple[str | None, str | None]:
        """Reasoning and content of a whole text, of each channel all messages, a line each.

        As `vllm/entrypoints/openai/parser/harmony_utils.py:383` `parse_chat_output`.

        Raises:
            HarmonyError: it is not harmony.
        """
        read = _read(text)
        messages = read.ended + read.unfinished
        reasoning = "\n".join(message.text for message in messages if message.channel == "analysis")
        content = "\n".join(message.text for message in messages if message.shown)
        return reasoning or None, content or None

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What tokens add to the message, None while nothing can be said.

        A token of content without a whole character adds an empty text.

        Raises:
            HarmonyError: something is not harmony.
        """
        read = self.messages
        before = read.current
        parts = list(read.read(self._text(piece, token_ids)))
        if not parts and token_ids:
            parts = [(before, "")]
        index = sum(message.calls for message in read.ended)
        following = index + (before is not None and before.calls)
        recipient = before.recipient if before else None
        content: str | None = None
        reasoning = ""
        calls: list[dict[str, Any]] = []
        for message, text in _joined(parts):
            if message.channel == "final":
                content = (content or "") + text
            elif message.calls:
                at = index
                if message.recipient != recipient:
                    recipient = message.recipient
                    at = following
                    following += 1
                    calls.append(
                        {"id": call_id(), "type": "function", "index": at,
                         "function": {"name": message.function, "arguments": ""}}
                    )  # fmt: skip
                if text:
                    calls.append({"index": at, "function": {"arguments": text}})
            elif message.channel == "commentary" and message.recipient is None:
                content = (content or "") + text
            elif message.channel == "analysis" and self.include_reasoning:
                reasoning += text
        delta: dict[str, Any] = {} if content is None else {"content": content}
        if reasoning:
            delta["reasoning"] = reasoning
        if calls:
            delta["tool_calls"] = calls
        return delta or None

    def _text(self, piece: str, token_ids: Sequence[int]) -> str:
        """The text that can be read now; the rest is kept."""
        if self.text_of is not None:
            self.pending += token_ids
            text = self.text_of(self.pending)
            known = text.rstrip("\ufffd")
            piece = known[self.num_read :]
            self.num_read = len(known)
            if known == text:
                self.pending = []
                self.num_read = 0
        if self.vocab.keys() >= set(TAGS):
            return piece
        piece = self.held + piece
        end = len(piece) - max(held_back(piece, tag) for tag in TAGS)
        self.held = piece[end:]
        return piece[:end]


def _joined(parts: Sequence[tuple[Message | None, str]]) -> Iterator[tuple[Message, str]]:
    """The parts of each message, joined; none of headers."""
    for _, group in itertools.groupby(parts, lambda part: id(part[0])):
        messages, texts = zip(*group, strict=True)
        if messages[0] is not None:
            yield messages[0], "".join(texts)
