"""Where a model's reasoning ends: until then its request has no grammar.

Promises: asks the two questions that the real manager asks of a parser, and answers them as the
parsers in `PARSERS` do. A parser that answers them differently is refused by name.
Mirrors `vllm/reasoning/basic_parsers.py:18` `BaseThinkingReasoningParser`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from mini_vllm.tokenizer import Tokenizer

PARSERS = {
    "deepseek_r1": ("<think>", "</think>"),
    "ernie45": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
"""By upstream's name: the tokens around the reasoning. Of the parsers that inherit both answers,
those that were compared."""


def check_parser(name: object) -> None:
    """Raises ValueError: not one of `PARSERS`, nor "" for none."""
    if name != "" and (not isinstance(name, str) or name not in PARSERS):
        raise ValueError(f"reasoning_parser={name!r}: need one of {', '.join(PARSERS)}")


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """The two tokens around the reasoning."""

    start_token_id: int
    end_token_id: int

    @classmethod
    def of(cls, name: str, tokenizer: Tokenizer) -> Self:
        """The parser of this name.

        Raises:
            ValueError: unknown, or one of the two is not a token of the tokenizer.
        """
        check_parser(name)
        first, last = (_token_id(name, text, tokenizer) for text in PARSERS[name])
        return cls(first, last)

    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of the two tokens in a prompt is the end. False where neither is."""
        for token in reversed(token_ids):
            if token in (self.start_token_id, self.end_token_id):
                return token == self.end_token_id
        return False

    def is_reasoning_end_streaming(self, delta_ids: Sequence[int]) -> bool:
        """Whether the end is among the tokens of a step."""
        return self.end_token_id in delta_ids


def _token_id(name: str, text: str, tokenizer: Tokenizer) -> int:
    """The id of a mark: from the vocabulary, since `encode` may put a BOS before it."""
    backend: Any = getattr(tokenizer, "_backend", None)
    if hasattr(backend, "get_vocab"):
        known: int | None = backend.get_vocab().get(text)
        found = [] if known is None else [known]
    else:
        found = tokenizer.encode(text)
    if len(found) != 1:
        raise ValueError(
            f"reasoning_parser={name!r}: need a tokenizer in which {text} is one token"
        )
    return found[0]
