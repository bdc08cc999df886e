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
    atoms: list[tuple[frozenset[str], bool]] = []
    place = 0
    while place < len(pattern):
        char = pattern[place]
        if char == "+":
            if not atoms or atoms[-1][1]:
                raise ValueError(f"pattern={pattern!r}: + at {place} repeats nothing")
            atoms[-1] = atoms[-1][0], True
            place += 1
        elif char == "[":
            end = pattern.find("]", place)
            if end < 0:
                raise ValueError(f"pattern={pattern!r}: the class at {place} is not closed")
            atoms.append((_class(pattern, pattern[place + 1 : end]), False))
            place = end + 1
        elif char == "\\":
            escaped = pattern[place + 1 : place + 2]
            if not escaped or not escaped.isascii() or escaped.isalnum():
                raise ValueError(f"pattern={pattern!r}: need punctuation after the \\ at {place}")
            atoms.append((frozenset(escaped), False))
            place += 2
        elif char in SPECIAL or char == "]":
            raise ValueError(f"pattern={pattern!r}: {char} at {place} is not supported")
        else:
            atoms.append((frozenset(char), False))
            place += 1
    return atoms


def _class(pattern: str, inner: str) -> frozenset[str]:
    """The characters between the brackets of a class."""
    if not inner or inner[0] == "^" or "[" in inner or "\\" in inner:
        raise ValueError(f"pattern={pattern!r}: class [{inner}] is not supported")
    found: set[str] = set()
    place = 0
    while place < len(inner):
        if inner[place] == "-" and 0 < place < len(inner) - 1:
            raise ValueError(f"pattern={pattern!r}: the hyphen in [{inner}] is not at an end of it")
        if place + 2 < len(inner) and inner[place + 1] == "-":
            if "-" in (inner[place], inner[place + 2]):
                raise ValueError(f"pattern={pattern!r}: [{inner}] has a hyphen as a range's end")
            first, last = ord(inner[place]), ord(inner[place + 2])
            if first > last:
                raise ValueError(f"pattern={pattern!r}: the range in [{inner}] is reversed")
            found |= {chr(code) for code in range(first, last + 1)}
            place += 3
        else:
            found.add(inner[place])
            place += 1
    return frozenset(found)


def compile_pattern(pattern: str) -> FSM:
    """The table of a pattern (F1).

    Neighbouring parts may share characters: `a+a` matches "aa" and "aaa", not "a". A state has at
    most one edge for a character all the same.

    A trace: `0x[0-9a-f]+` has 4 states with 1, 1, 16 and 16 edges; the last alone accepts.

    Raises:
        ValueError: as `parse_atoms`.
    """
    atoms = parse_atoms(pattern)
    first = frozenset([0])
    numbers = {first: 0}
    todo = [first]
    transitions: dict[int, dict[str, int]] = {}
    for places in todo:
        after: dict[str, set[int]] = {}
        for place in places:
            if place < len(atoms):
                for char in atoms[place][0]:
                    after.setdefault(char, set()).add(place + 1)
            if place and atoms[place - 1][1]:
                for char in atoms[place - 1][0]:
                    after.setdefault(char, set()).add(place)
        row = transitions[numbers[places]] = {}
        for char in sorted(after):
            target = frozenset(after[char])
            if target not in numbers:
                numbers[target] = len(numbers)
                todo.append(target)
            row[char] = numbers[target]
    accepting = frozenset(number for places, number in numbers.items() if len(atoms) in places)
    return FSM(transitions, accepting)


def advance(fsm: FSM, state: int, text: str) -> int | None:
    """The state after reading `text`, or None when one of its characters has no edge.

    Nothing is changed, and "" leads back to `state`. No character is read after the one that has
    no edge.
    """
    for char in text:
        row = fsm.transitions[state]
        if char not in row:
            return None
        state = row[char]
    return state


def allowed_tokens(fsm: FSM, state: int, vocab: Mapping[int, str]) -> set[int]:
    """Ids of the tokens that may follow (F2). EOS is not this function's affair.

    A trace: after "0x" of `0x[0-9a-f]+` the vocabulary {0: "0", 1: "x", 5: "ff", 6: "1x"} has
    {0, 5}: "1x" begins well and dies.
    """
    return {
        token for token, text in vocab.items() if text and advance(fsm, state, text) is not None
    }


def pack_row(allowed: set[int], vocab_size: int) -> np.ndarray:
    """[words] int32: token t is bit t % 32, counted from the lowest, of word t // 32; 1 is allowed.

    As many words as `vocab_size` tokens need, and the bits past them 0.

    A trace: of 40 tokens {0, 31, 32, 39} are [-2147483647, 129].

    Raises:
        ValueError: an id outside [0, vocab_size).
    """
    if any(not 0 <= token < vocab_size for token in allowed):
        raise ValueError(f"allowed: need ids from 0 to {vocab_size - 1}")
    words = [0] * -(-vocab_size // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return np.array(words, np.uint32).view(np.int32)


def apply_row(logits: np.ndarray, row: np.ndarray) -> np.ndarray:
    """New logits [vocab_size], as given for allowed tokens and -inf for all others.

    Args:
        logits: [vocab_size], any float dtype; the result has it, too.
        row: [words] int32 as `pack_row` makes it; a word of -1 allows its 32 tokens.
    """
    bits = np.unpackbits(row.astype("<i4").view(np.uint8), bitorder="little")
    allowed = bits[: len(logits)].astype(bool)
    return np.where(allowed, logits, np.array(-np.inf, logits.dtype))


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
    texts = {token: text for token, text in vocab.items() if token != eos_id}
    legal_in: dict[int, list[int]] = {}
    state, token_ids = fsm.start, []
    while len(token_ids) < max_tokens:
        if state not in legal_in:
            legal = allowed_tokens(fsm, state, texts)
            if state in fsm.accepting:
                legal.add(eos_id)
            legal_in[state] = sorted(legal)
        if not legal_in[state]:
            raise RuntimeError(f"after {[texts[token] for token in token_ids]} no token may follow")
        scores = score_fn(token_ids)
        token = max(legal_in[state], key=lambda each: scores[each])
        if token == eos_id:
            return Generation(_text(texts, token_ids), token_ids, "stop")
        token_ids = [*token_ids, token]
        after = advance(fsm, state, texts[token])
        assert after is not None
        state = after
    return Generation(_text(texts, token_ids), token_ids, "length")


def _text(texts: Mapping[int, str], token_ids: Sequence[int]) -> str:
    return "".join(texts[token] for token in token_ids)
