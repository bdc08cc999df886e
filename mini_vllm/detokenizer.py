"""Text that grows with its tokens: each step decodes only what is new.

Promises: the pieces joined are the text of all tokens decoded at once; bytes of an unfinished
UTF-8 character are held back, and dropped where the output ends. Mirrors
`vllm/v1/engine/detokenizer.py:68` `BaseIncrementalDetokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"


def finished_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of tokens that end here, less an unfinished character: all pieces joined."""
    return tokenizer.decode(list(token_ids)).rstrip(_UNFINISHED)


class IncrementalDetokenizer:
    """The text of one request's output tokens.

    Decodes a window that starts a few tokens before what is shown, since a token's text may depend
    on its neighbours (a leading space, a character of several tokens), and keeps the difference.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = ""
        self._start = 0  # the window's first token
        self._shown = 0  # tokens whose text is in `text`

    def update(self, token_ids: Sequence[int]) -> str:
        """What the tokens add to `text`, "" while a character is unfinished.

        Args:
            token_ids: all output tokens so far; only grows between calls.
        """
        decode = self._tokenizer.decode
        before = decode(list(token_ids[self._start : self._shown]))
        window = decode(list(token_ids[self._start :]))
        if window.endswith(_UNFINISHED):
            return ""
        piece = window[len(before) :]
        self._start, self._shown = self._shown, len(token_ids)
        self.text += piece
        return piece
