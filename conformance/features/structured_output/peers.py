"""xgrammar and llguidance over a vocabulary of bytes or words: the peers of the masks.

Needs the real engine's environment (`course engine run -m ...`). Both libraries are handed the
bytes of every token and asked, after every token, which may come next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

BYTES = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
EOS = 256


class XGrammar:
    """`xgrammar.GrammarMatcher` for constraints of any kind."""

    def __init__(self, tokens: Sequence[bytes] = BYTES, eos: int = EOS) -> None:
        import xgrammar

        self.xgr, self.size = xgrammar, len(tokens)
        info = xgrammar.TokenizerInfo(
            list(tokens), xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[eos]
        )
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def matcher(self, kind: str, spec: Any, **options: Any) -> Any:
        """A matcher at the beginning. Raises whatever the library raises."""
        if kind == "choice":
            from vllm.v1.structured_output.utils import choice_as_grammar

            kind, spec = "grammar", choice_as_grammar(spec)
        ways: dict[str, Any] = {
            "regex": self.compiler.compile_regex,
            "grammar": self.compiler.compile_grammar,
            "json": self.compiler.compile_json_schema,
        }
        compiled = ways[kind](json.dumps(spec) if kind == "json" else spec, **options)
        return self.xgr.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> int:
        """The tokens that may come next: bit t stands for token t."""
        bitmask = self.xgr.allocate_token_bitmask(1, self.size)
        matcher.fill_next_token_bitmask(bitmask, 0)
        found = int.from_bytes(bitmask.numpy().tobytes(), "little")
        return found & ((1 << self.size) - 1)

    @staticmethod
    def accept(matcher: Any, token: int) -> bool:
        """Whether the token was taken."""
        return bool(matcher.accept_token(token))

    def is_text(self, matcher: Any, data: bytes, eos: int = EOS) -> bool:
        """Whether the matcher takes all of the bytes and may end then."""
        return all(matcher.accept_token(byte) for byte in data) and bool(
            self.mask(matcher) >> eos & 1
        )


class _Stub:
    def __init__(self, tokens: Sequence[bytes], eos: int) -> None:
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens, self.special_token_ids = list(tokens), [eos]

        self._ids = {token: number for number, token in enumerate(tokens) if number != eos}
        self._longest = max(map(len, self._ids))

    def __call__(self, data: bytes) -> list[int]:
        """The longest token that fits, again and again; over bytes that is the byte itself."""
        found: list[int] = []
        while data:
            lengths = range(min(self._longest, len(data)), 0, -1)
            length = next(n for n in lengths if data[:n] in self._ids)
            found.append(self._ids[data[:length]])
            data = data[length:]
        return found


class LLGuidance:
    """`llguidance.LLMatcher` for the same constraints."""

    def __init__(self, tokens: Sequence[bytes] = BYTES, eos: int = EOS) -> None:
        import llguidance
        import llguidance.numpy

        self.ll, self.size = llguidance, len(tokens)
        stub = llguidance.TokenizerWrapper(_Stub(tokens, eos))
        self.tokenizer = llguidance.LLTokenizer(stub)

    def matcher(self, kind: str, spec: Any, **options: Any) -> Any:
        """A matcher at the beginning.

        Raises:
            ValueError: the library refuses the constraint.
        """
        of: Any = self.ll.LLMatcher
        if kind == "regex":
            grammar = of.grammar_from_regex(spec)
        elif kind == "choice":
            named = " | ".join(json.dumps(text, ensure_ascii=False) for text in spec)
            grammar = of.grammar_from_lark(f"start: {named}")
        elif kind == "grammar":
            grammar = of.grammar_from_lark(spec)
        else:
            defaults: Mapping[str, Any] = options or {"whitespace_flexible": True}
            grammar = of.grammar_from_json_schema(json.dumps(spec), defaults=dict(defaults))
        made = of(self.tokenizer, grammar, log_level=0)
        if made.is_error():
            raise ValueError(made.get_error())
        return made

    def mask(self, matcher: Any) -> int:
        """The tokens that may come next: bit t stands for token t."""
        from llguidance import numpy as packed

        bitmask = packed.allocate_token_bitmask(1, self.size)
        packed.fill_next_token_bitmask(matcher, bitmask, 0)
        return int.from_bytes(bitmask.tobytes(), "little") & ((1 << self.size) - 1)

    @staticmethod
    def accept(matcher: Any, token: int) -> bool:
        """Whether the token was taken."""
        return bool(matcher.consume_token(token))

    def is_text(self, matcher: Any, data: bytes, eos: int = EOS) -> bool:
        """Whether the matcher takes all of the bytes and may end then."""
        return matcher.try_consume_tokens(list(data)) == len(data) and bool(matcher.is_accepting())
