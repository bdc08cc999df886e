"""From bytes to tokens: which tokens may follow, when it is known which bytes may.

Promises: a token is allowed exactly when its bytes, read one after the other, never leave the
language; a token without bytes never is; EOS is where the text may end. All tokens are tried at
once along a trie, and only along branches that are still alive. Plays the part of xgrammar's
`TokenizerInfo`, made in
`vllm/v1/structured_output/backend_xgrammar.py:36` `XgrammarBackend.__post_init__`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.machine import Machine, State
from mini_vllm.structured_output.table import Table
from mini_vllm.tokenizer import ByteTokenizer, Tokenizer

Lift = Callable[[Table, State, Mapping[int, str]], Iterable[int]]
"""`(table, state, texts)`: ids of the tokens that may follow. EOS is not its affair."""


class _Node:
    __slots__ = ("bytes_", "children", "tokens")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.bytes_ = 0
        self.tokens = 0
        """Bit t stands for token t."""


class Vocabulary:
    """The bytes of every token id, and which of them end a text."""

    def __init__(
        self,
        token_bytes: Sequence[bytes | None],
        eos_token_ids: Sequence[int],
        vocab_size: int | None = None,
        lift: Lift | None = None,
    ) -> None:
        """Build the trie.

        Args:
            token_bytes: by token id; None or b"" for tokens that stand for no text.
            eos_token_ids: ids that end a text; whatever bytes they have do not count.
            vocab_size: ids of the model, if it has more than the tokenizer.
            lift: finds the tokens of a state instead of the trie; see `manager.open_room`.

        Raises:
            ValueError: an EOS id outside, or fewer ids than tokens.
        """
        self.size = len(token_bytes) if vocab_size is None else vocab_size
        if self.size < len(token_bytes):
            raise ValueError(f"vocab_size={vocab_size}: there are {len(token_bytes)} tokens")
        if any(not 0 <= token < self.size for token in eos_token_ids):
            raise ValueError(f"eos_token_ids={eos_token_ids}: need ids from 0 to {self.size - 1}")
        self.eos_token_ids = tuple(eos_token_ids)
        self.eos = sum(1 << token for token in set(eos_token_ids))
        self.token_bytes = [b"" if t in eos_token_ids else b or b"" for t, b in
                            enumerate(token_bytes)]  # fmt: skip
        self.token_bytes += [b""] * (self.size - len(token_bytes))
        self._lift = lift
        self._texts = {t: data.decode("latin-1") for t, data in enumerate(self.token_bytes)}
        self._root = _Node()
        for token, data in enumerate(self.token_bytes):
            node = self._root
            for byte in data:
                node.bytes_ |= 1 << byte
                node = node.children.setdefault(byte, _Node())
            if data:
                node.tokens |= 1 << token
        self._is_bytes = all(
            len(data) <= 1 and data in (b"", bytes([token % 256]))
            for token, data in enumerate(self.token_bytes)
        ) and not any(self.token_bytes[256:])

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        vocab_size: int | None = None,
        lift: Lift | None = None,
    ) -> Vocabulary:
        """The vocabulary of a tokenizer: bytes, or any that the `tokenizers` library runs.

        Raises:
            GrammarError: another kind, whose tokens' bytes are not known.
        """
        if isinstance(tokenizer, ByteTokenizer):
            known: list[bytes | None] = [bytes([byte]) for byte in range(256)]
            return cls([*known, None], eos_token_ids, vocab_size, lift)
        backend = getattr(tokenizer, "backend", None) or getattr(tokenizer, "_backend", None)
        if not hasattr(backend, "get_vocab"):
            kind = type(tokenizer).__name__
            raise GrammarError(f"structured_outputs: the bytes of a {kind}'s tokens are not known")
        return cls(token_bytes_of(backend), eos_token_ids, vocab_size, lift)

    def allowed(self, machine: Machine, state: State) -> int:
        """The tokens that may come next as a number: bit t stands for token t."""
        found = self.eos if state.accepting else 0
        if self._lift is not None:
            return found | self._lifted(Table(machine), state)
        if self._is_bytes:
            return found | (state.allowed & self._root.bytes_)
        todo = [(self._root, state)]
        while todo:
            node, at = todo.pop()
            alive = node.bytes_ & at.allowed
            while alive:
                lowest = alive & -alive
                alive ^= lowest
                byte = lowest.bit_length() - 1
                child = node.children[byte]
                found |= child.tokens
                if child.bytes_:
                    after = machine.step(at, byte)
                    assert after is not None
                    todo.append((child, after))
        return found

    def _lifted(self, table: Table, state: State) -> int:
        """What the part finds. Raises ValueError: an id that has no text."""
        assert self._lift is not None
        found = 0
        for token in self._lift(table, state, self._texts):
            if not self._texts.get(token):
                raise ValueError(f"token_masks part: {token!r}: need ids of tokens with text")
            found |= 1 << token
        return found


def token_bytes_of(backend: Any) -> list[bytes | None]:
    """The bytes of every token of a `tokenizers.Tokenizer`; None for special tokens.

    Byte-level vocabularies spell each byte as a printable character, others spell a space as U+2581
    and single bytes as `<0x0A>`.

    Raises:
        GrammarError: its decoder is of neither kind.
    """
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder") or {})
    specials = {t for t, added in backend.get_added_tokens_decoder().items() if added.special}
    vocab: dict[str, int] = backend.get_vocab()
    found: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    if "ByteLevel" in decoder:
        spelled = _byte_level()
    elif "ByteFallback" in decoder or "Metaspace" in decoder or "\u2581" in decoder:
        spelled = None
    else:
        raise GrammarError("structured_outputs: need a byte-level or byte-fallback tokenizer")
    for word, token in vocab.items():
        if token in specials:
            continue
        if spelled is not None:
            known = all(char in spelled for char in word)
            found[token] = bytes(spelled[c] for c in word) if known else word.encode()
        elif len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
            found[token] = bytes([int(word[3:5], 16)])
        else:
            found[token] = word.replace("\u2581", " ").encode()
    return found


def _byte_level() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(b): b for b in itself} | {chr(256 + i): b for i, b in enumerate(others)}
