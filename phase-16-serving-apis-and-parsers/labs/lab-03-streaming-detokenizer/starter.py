"""Lab 16-03: text that is sent while it is still bytes.

A byte-level token is a byte, and a character is up to four of them. What holds:

- D1: eager. What no later byte can change is given now.
- D2: honest. What a later byte may still change is kept: at most three bytes, which begin a
  character.
- D3: lossless. All pieces and the flush, joined, are what `bytes.decode("utf-8", "replace")` says
  of all bytes, whatever they are.
- D4: a byte is looked at a bounded number of times, however long the text grows.

Source: `vllm/v1/engine/detokenizer.py:68` `BaseIncrementalDetokenizer`; the bytes of a character
are those of RFC 3629 and of table 3-7 of Unicode's chapter 3.
"""

from __future__ import annotations

from collections.abc import Sequence


def utf8_expected_len(byte: int) -> int:
    """Bytes of a character that begins with `byte`; 0 if none begins so.

    A trace: 0x41 1, 0xC3 2, 0xE4 3, 0xF0 4; 0x9F, 0xC0 and 0xF5 0.

    Raises:
        ValueError: `byte` is not 0 to 255.
    """
    raise NotImplementedError


def _complete_prefix_len(buf: Sequence[int]) -> int:
    """How many bytes of `buf`, from its start, have a text that no byte after `buf` can change.

    The rest begins a character and does not end it, or is empty.

    A trace: 61 F0 9F gives 1; E0 41 gives 2, since 41 cannot follow E0; ED A0 gives 2, since a
    surrogate is no character.
    """
    raise NotImplementedError


class StreamingDetokenizer:
    """The text of one stream of byte tokens.

    A trace: the rocket, F0 9F 9A 80, gives "", "", "" and then the rocket. E0 41 C3 A9 gives "",
    "\ufffdA", "" and "\u00e9". 61 F0 9F gives "a", "" and "", and its flush gives "\ufffd".
    """

    def __init__(self) -> None:
        raise NotImplementedError

    def feed(self, token_id: int) -> str:
        """What this token makes certain, by D1 and D2; "" for nothing.

        An id of 256 or more is no byte: it gives "" and changes nothing, not even what is held.

        Raises:
            ValueError: `token_id` is negative; nothing is changed.
        """
        raise NotImplementedError

    def flush(self) -> str:
        """No token follows: what D3 says of the bytes held, "" for none. Then as if made anew."""
        raise NotImplementedError
