"""Thinking apart from the answer: two tags that are tokens of the vocabulary.

Promises: every delta is the real parser's, its quirk included: a start tag that shares a delta with
what follows it, but not with the end tag, stays in the reasoning. Mirrors
`vllm/reasoning/deepseek_r1_reasoning_parser.py:10` `DeepSeekR1ReasoningParser`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

START, END = "<think>", "</think>"


class PieceParser(Protocol):
    """Pieces of text in, deltas of a message out."""

    def feed(self, piece: str, token_ids: Sequence[int] = ()) -> dict[str, Any] | None:
        """What a piece adds to the message, None while nothing can be said."""
        ...


@dataclass(frozen=True, slots=True)
class Tags:
    """The ids of the two tags."""

    start: int
    end: int

    @classmethod
    def of(cls, token_ids: Mapping[str, int]) -> Tags:
        """From a vocabulary, ids by name.

        Raises:
            ValueError: it lacks one of the tags.
        """
        if missing := [tag for tag in (START, END) if tag not in token_ids]:
            raise ValueError(
                f"reasoning_parser: the vocabulary has no token {' and '.join(missing)}"
            )
        return cls(token_ids[START], token_ids[END])

    def ended(self, token_ids: Sequence[int]) -> bool:
        """Whether thinking is over after these tokens: the last tag is the end."""
        for token_id in reversed(token_ids):
            if token_id in (self.start, self.end):
                return token_id == self.end
        return False


def parse_reasoning(text: str) -> tuple[str | None, str | None]:
    """Reasoning and content of a whole text; without an end tag all of it is reasoning."""
    before, tag, after = text.partition(START)
    reasoning, end, content = (after if tag else before).partition(END)
    return reasoning, (content or None) if end else None


@dataclass(slots=True)
class ThinkingStream:
    """Pieces of text with their tokens in, deltas of a message out."""

    tags: Tags
    started: bool = False
    over: bool = False

    def feed(self, piece: str, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """What a piece adds to the message, None for a tag alone."""
        starts = self.tags.start in token_ids and not self.started
        ends, over = self.tags.end in token_ids, self.over
        self.started, self.over = self.started or starts, over or ends
        if len(token_ids) == 1 and token_ids[0] in (self.tags.start, self.tags.end):
            return None
        if ends:
            begin = piece.find(START) + len(START) if starts else 0
            end = piece.find(END)
            content = piece[end + len(END) :]
            return {"reasoning": piece[begin:end], "content": content or None}
        if over and not starts:
            return {"content": piece}
        return {"reasoning": piece}


@dataclass(slots=True)
class ReasoningFirst:
    """Thinking, then what another parser makes of the rest.

    As `vllm/parser/abstract_parser.py:659` `DelegatingParser.parse_delta`.
    """

    thinking: ThinkingStream
    rest: PieceParser | None
    over: bool
    """Whether the prompt has ended the thinking already."""

    def feed(self, piece: str, token_ids: Sequence[int]) -> dict[str, Any] | None:
        """What a piece adds to the message, None while nothing can be said."""
        delta: dict[str, Any] | None = None
        if not self.over:
            delta = self.thinking.feed(piece, token_ids)
            if self.thinking.tags.end not in token_ids:
                return delta
            self.over, piece = True, (delta or {}).get("content") or ""
            token_ids = token_ids[token_ids.index(self.thinking.tags.end) + 1 :]
        if self.rest is None:
            return {"content": piece} if delta is None else delta
        reasoning = (delta or {}).get("reasoning")
        delta = self.rest.feed(piece, token_ids)
        return {**(delta or {}), "reasoning": reasoning} if reasoning else delta
