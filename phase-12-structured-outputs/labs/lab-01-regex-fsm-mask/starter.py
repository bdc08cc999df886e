"""Lab 12-01: a regular expression as a mask over tokens.

A pattern becomes a table of states; a token may follow when its characters, read one after the
other, never leave the table; tokens that may not follow get the logit -inf. What holds throughout:

- F1: a table says of every text what Python's `re.fullmatch` says of it.
- F2: a token is judged by all of its characters, and a token without any is never legal.
- F3: EOS is legal exactly where the text so far is a whole match.
- F4: which tokens a state allows is worked out once in a generation, however often it is visited.

Sources: `vllm/v1/structured_output/backend_outlines.py:108` `OutlinesGrammar`,
`vllm/v1/structured_output/utils.py:44` `apply_grammar_bitmask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SPECIAL = set("*?|(){}^$.")
"""Characters that need a backslash to stand for themselves (given), as do `+`, `[` and `]`."""


@dataclass(frozen=True)
class FSM:
    """A deterministic table (given): `transitions[state][character]` is the next state.

    Every state has an entry in `transitions`, one without edges an empty one. A character without
    an edge is not allowed there.
    """

    transitions: dict[int, dict[str, int]]
    accepting: frozenset[int]
    """States in which the text so far is a whole match."""
    start: int = 0


@dataclass(frozen=True)
class Generation:
    """What a constrained generation came to (given)."""

    text: str
    """Without EOS."""
    token_ids: list[int]
    """Without EOS."""
    finish_reason: str
    """ "stop" where EOS was chosen, "length" where there were no more tokens."""


def parse_atoms(pattern: str) -> list[tuple[frozenset[str], bool]]:
    """The parts of a pattern: the characters of each, and whether `+` follows it.

    A part is a character, a backslash and a punctuation character (any of ASCII that is no letter
    and no digit), or a class such as `[0-9a-f]`, which holds characters and ranges; a hyphen that
    is first or last in it stands for itself.

    A trace: `0x[0-1]+` is [({"0"}, False), ({"x"}, False), ({"0", "1"}, True)]; `""` is [].

    Raises:
        ValueError: whatever is not in this subset, so that a pattern that passes means here what
            it means to `re`: one of `* ? | ( ) { } ^ $ .` or `]` outside of a class, a `+` with
            nothing before it or after another, a class that is empty, negated or not closed, a `[`
            or backslash inside of one, a range whose end is below its start, a hyphen in a class
            that is neither first nor last nor between the two ends of a range (`[a-c-e]`, `[--a]`),
            and a backslash at the end or before a letter, a digit or what is not ASCII.
    """
    raise NotImplementedError


def compile_pattern(pattern: str) -> FSM:
    """The table of a pattern (F1).

    Neighbouring parts may share characters: `a+a` matches "aa" and "aaa", not "a". A state has at
    most one edge for a character all the same.

    A trace: `0x[0-9a-f]+` has 4 states with 1, 1, 16 and 16 edges; the last alone accepts.

    Raises:
        ValueError: as `parse_atoms`.
    """
    raise NotImplementedError


def advance(fsm: FSM, state: int, text: str) -> int | None:
    """The state after reading `text`, or None when one of its characters has no edge.

    Nothing is changed, and "" leads back to `state`. No character is read after the one that has
    no edge.
    """
    raise NotImplementedError


def allowed_tokens(fsm: FSM, state: int, vocab: Mapping[int, str]) -> set[int]:
    """Ids of the tokens that may follow (F2). EOS is not this function's affair.

    A trace: after "0x" of `0x[0-9a-f]+` the vocabulary {0: "0", 1: "x", 5: "ff", 6: "1x"} has
    {0, 5}: "1x" begins well and dies.
    """
    raise NotImplementedError


def pack_row(allowed: set[int], vocab_size: int) -> np.ndarray:
    """[words] int32: token t is bit t % 32, counted from the lowest, of word t // 32; 1 is allowed.

    As many words as `vocab_size` tokens need, and the bits past them 0.

    A trace: of 40 tokens {0, 31, 32, 39} are [-2147483647, 129].

    Raises:
        ValueError: an id outside [0, vocab_size).
    """
    raise NotImplementedError


def apply_row(logits: np.ndarray, row: np.ndarray) -> np.ndarray:
    """New logits [vocab_size], as given for allowed tokens and -inf for all others.

    Args:
        logits: [vocab_size], any float dtype; the result has it, too.
        row: [words] int32 as `pack_row` makes it; a word of -1 allows its 32 tokens.
    """
    raise NotImplementedError


def constrained_generate(
    fsm: FSM,
    vocab: Mapping[int, str],
    score_fn: Callable[[Sequence[int]], Mapping[int, float]],
    eos_id: int,
    max_tokens: int,
) -> Generation:
    """Generate greedily, among legal tokens only (F2, F3, F4).

    In each step the legal token with the highest score is taken, of equal ones the lowest id. EOS
    ends the text and uses up a step like any other token. With `max_tokens` 0 there is no step: an
    empty text, "length".

    A trace: `[0-9]+`, a vocabulary of "0" to "9" and EOS, a model that likes EOS best and "9" next:
    text "9", reason "stop"; with `max_tokens=1` text "9", reason "length".

    Args:
        vocab: text by id; EOS may be in it, and its text does not count.
        score_fn: the model: the ids so far to a score by id, for each id of `vocab` and EOS.

    Raises:
        RuntimeError: no token is legal and the text is no whole match. The model is not asked then.
    """
    raise NotImplementedError
