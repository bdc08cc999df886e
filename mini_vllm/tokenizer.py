"""Text to token ids and back, one byte at a time.

Promises: no download, no merges, no added BOS or EOS; every string encodes, every id list decodes.
Mirrors the interface of `vllm/tokenizers/protocol.py:13` `TokenizerLike`.
"""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes are token ids 0-255; 256 is end of sequence; the vocabulary holds 257 ids."""

    vocab_size = 257
    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        """One id per UTF-8 byte of `text`, nothing added: "hello" gives 5 ids, an emoji 4."""
        return list(text.encode("utf-8"))

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`; ids above 255 are skipped, invalid UTF-8 becomes U+FFFD.

        Sampled bytes need not form valid UTF-8, so decoding never raises.
        """
        return bytes(t for t in token_ids if 0 <= t < 256).decode("utf-8", errors="replace")


class MarkedByteTokenizer(ByteTokenizer):
    """Bytes, EOS, and one marker more: the text `marker` is token 257, wherever it stands."""

    vocab_size = 258

    def __init__(self, marker: str) -> None:
        """`marker`: such as "<image>"."""
        self.marker = marker

    def encode(self, text: str) -> list[int]:
        """As `ByteTokenizer.encode`; "<image>hi" gives 3 ids."""
        first, *rest = text.split(self.marker)
        ids = super().encode(first)
        for piece in rest:
            ids += [self.vocab_size - 1, *super().encode(piece)]
        return ids
