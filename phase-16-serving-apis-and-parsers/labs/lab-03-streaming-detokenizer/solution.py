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

_SECOND = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""Where a second byte has a narrower range than 80 to BF: overlong forms, surrogates, the end."""


def utf8_expected_len(byte: int) -> int:
    """Bytes of a character that begins with `byte`; 0 if none begins so.

    A trace: 0x41 1, 0xC3 2, 0xE4 3, 0xF0 4; 0x9F, 0xC0 and 0xF5 0.

    Raises:
        ValueError: `byte` is not 0 to 255.
    """
    if not 0 <= byte <= 255:
        raise ValueError(f"byte={byte}: need 0 to 255")
    for last, length in ((0x7F, 1), (0xC1, 0), (0xDF, 2), (0xEF, 3), (0xF4, 4)):
        if byte <= last:
            return length
    return 0


def _complete_prefix_len(buf: Sequence[int]) -> int:
    """How many bytes of `buf`, from its start, have a text that no byte after `buf` can change.

    The rest begins a character and does not end it, or is empty.

    A trace: 61 F0 9F gives 1; E0 41 gives 2, since 41 cannot follow E0; ED A0 gives 2, since a
    surrogate is no character.
    """
    start = 0
    while start < len(buf):
        length = utf8_expected_len(buf[start])
        low, high = _SECOND.get(buf[start], (0x80, 0xBF))
        end = start + 1
        while end < start + length:
            if end == len(buf):
                return start
            if not low <= buf[end] <= high:
                break
            low, high = 0x80, 0xBF
            end += 1
        start = end
    return start


class StreamingDetokenizer:
    """The text of one stream of byte tokens.

    A trace: the rocket, F0 9F 9A 80, gives "", "", "" and then the rocket. E0 41 C3 A9 gives "",
    "\ufffdA", "" and "\u00e9". 61 F0 9F gives "a", "" and "", and its flush gives "\ufffd".
    """

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, token_id: int) -> str:
        """What this token makes certain, by D1 and D2; "" for nothing.

        An id of 256 or more is no byte: it gives "" and changes nothing, not even what is held.

        Raises:
            ValueError: `token_id` is negative; nothing is changed.
        """
        if token_id < 0:
            raise ValueError(f"token_id={token_id}: need 0 or more")
        if token_id > 255:
            return ""
        self._held.append(token_id)
        length = _complete_prefix_len(self._held)
        text = self._held[:length].decode("utf-8", "replace")
        del self._held[:length]
        return text

    def flush(self) -> str:
        """No token follows: what D3 says of the bytes held, "" for none. Then as if made anew."""
        text = self._held.decode("utf-8", "replace")
        self._held.clear()
        return text
