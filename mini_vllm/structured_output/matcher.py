"""A grammar on its way through one request's tokens.

Promises: the six methods that the real engine asks of a grammar, with their meaning there: a
refused token changes nothing, validating advances nothing, what was accepted can be rolled back,
EOS too. Mirrors `vllm/v1/structured_output/backend_types.py:31` `StructuredOutputGrammar` and
`vllm/v1/structured_output/backend_xgrammar.py:132` `XgrammarGrammar`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mini_vllm.structured_output.machine import Machine, State
from mini_vllm.structured_output.masks import FULL, forbidden, row_of
from mini_vllm.structured_output.vocabulary import Vocabulary


class Matcher:
    """One request's place in a grammar. The machine is shared, the history is its own."""

    def __init__(self, machine: Machine, vocabulary: Vocabulary) -> None:
        self.machine = machine
        self.vocabulary = vocabulary
        self._states: list[State | None] = [machine.initial]  # None: EOS was accepted

    @property
    def state(self) -> State | None:
        """Where the text stands; None once EOS was accepted."""
        return self._states[-1]

    @property
    def num_accepted(self) -> int:
        """Tokens accepted and not rolled back."""
        return len(self._states) - 1

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Advance over the tokens; False at the first that may not follow, which is not taken."""
        for token in tokens:
            before = self._states[-1]
            if before is None or not 0 <= token < self.vocabulary.size:
                return False
            if token in self.vocabulary.eos_token_ids:
                if not before.accepting:
                    return False
                self._states.append(None)
                continue
            data = self.vocabulary.token_bytes[token]
            after = self.machine.run(before, data) if data else None
            if after is None:
                return False
            self._states.append(after)
        return True

    def validate_tokens(self, tokens: Sequence[int]) -> list[int]:
        """The longest prefix of the tokens that could follow; nothing advances."""
        before = self.num_accepted
        self.accept_tokens("", tokens)
        count = self.num_accepted - before
        self.rollback(count)
        return list(tokens[:count])

    def forced_tokens(self, most: int) -> list[int]:
        """The tokens that must come next, whatever the model says; nothing advances.

        What xgrammar calls jump-forward, in tokens: each of them is the only one allowed.
        """
        found: list[int] = []
        while len(found) < most and (state := self.state) is not None:
            allowed = np.flatnonzero(~forbidden(self.machine, state, self.vocabulary))
            if len(allowed) != 1:
                break
            found.append(int(allowed[0]))
            self.accept_tokens("", found[-1:])
        self.rollback(len(found))
        return found

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens.

        Raises:
            ValueError: more than were accepted.
        """
        if not 0 <= num_tokens <= self.num_accepted:
            raise ValueError(f"num_tokens={num_tokens}: need 0 to {self.num_accepted}")
        if num_tokens:
            del self._states[-num_tokens:]

    def fill_bitmask(self, bitmask: np.ndarray, index: int) -> None:
        """Write row `index` of [rows, words] int32; all ones after EOS."""
        state = self.state
        bitmask[index] = FULL if state is None else row_of(self.machine, state, self.vocabulary)

    def is_terminated(self) -> bool:
        """Whether EOS was accepted; accepting alone is not the end, as after the 1 of `[0-9]+`."""
        return self.state is None

    def reset(self) -> None:
        """Back to the beginning."""
        del self._states[1:]

    def is_accepting(self) -> bool:
        """Whether the text so far is a whole text of the grammar."""
        return self.state is None or self.state.accepting

    def forbidden(self) -> np.ndarray | None:
        """[vocab_size] bool, read-only: the tokens that may not follow; None after EOS."""
        state = self.state
        return None if state is None else forbidden(self.machine, state, self.vocabulary)
