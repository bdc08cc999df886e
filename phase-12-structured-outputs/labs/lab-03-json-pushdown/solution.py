"""Lab 12-03: JSON needs a memory. A machine with one counter, and tests that could fail.

The language, without spaces: a value is an int or an object; an int is `0` or a digit from 1 to 9
and more digits; an object is `{}` or pairs `"key":value` with `,` between them, in braces; a key is
one or more of the letters a, b, c. What holds throughout:

- J1: the machine takes exactly the texts of the language, at any depth.
- J2: `allowed` says what may follow and nothing else: each symbol of it can be fed, no other can.
- J3: a symbol that is refused changes nothing.
- J4: from every state the text can be brought to an end, and `completion` is a shortest way.

Sources: `vllm/v1/structured_output/backend_xgrammar.py:132` `XgrammarGrammar` (the matcher with a
stack), `vllm/v1/structured_output/backend_types.py:31` `StructuredOutputGrammar`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, Self

EOS = "<eos>"
DIGITS = frozenset("0123456789")
LETTERS = frozenset("abc")
SYMBOLS = (*'{}",:', *sorted(LETTERS), *sorted(DIGITS), EOS)
"""All there are (given): 19."""

AFTER_VALUE = frozenset(",}")
MODES: dict[str, frozenset[str]] = {
    "value": DIGITS | {"{"},
    "int": DIGITS,
    "int_zero": frozenset(),
    "obj_first": frozenset('"}'),
    "obj_key": frozenset('"'),
    "key": LETTERS,
    "key_body": LETTERS | {'"'},
    "colon": frozenset(":"),
    "comma_or_close": AFTER_VALUE,
    "done": frozenset(),
}
ENDINGS = {"value": "0", "obj_key": '"a":0', "key": 'a":0', "key_body": '":0', "colon": ":0"}


class JsonMachine:
    """Where a text stands: a mode, and how many braces are open.

    | mode | what has just been read |
    |---|---|
    | value | nothing, or a colon |
    | int, int_zero | a digit of a number; a 0 that began one |
    | obj_first, obj_key | an opening brace; a comma |
    | key, key_body | the quote that begins a key; a letter of it |
    | colon | the quote that ends a key |
    | comma_or_close | the brace that ends an object inside of another |
    | done | the brace that ends the text |

    A trace of `{"a":10}`: obj_first, key, key_body, colon, value, int, int, done; depth 1 up to the
    last.
    """

    def __init__(self) -> None:
        """At the beginning."""
        self.mode = "value"
        self.depth = 0

    def allowed(self) -> set[str]:
        """The symbols that may follow, EOS where the text may end; a new set (J2)."""
        found = set(MODES[self.mode])
        if self.mode in ("int", "int_zero") and self.depth:
            found |= AFTER_VALUE
        if self.accepting():
            found.add(EOS)
        return found

    def feed(self, symbol: str) -> None:
        """Read one symbol.

        Raises:
            ValueError: it may not follow, is EOS, or is no single symbol. Nothing has changed (J3).
        """
        if symbol == EOS or symbol not in self.allowed():
            raise ValueError(f"symbol={symbol!r}: need one of {sorted(self.allowed() - {EOS})}")
        mode = self.mode
        if mode in ("int", "int_zero") and symbol in AFTER_VALUE:
            mode = "comma_or_close"
        if symbol == "{":
            self.mode, self.depth = "obj_first", self.depth + 1
        elif symbol == "}":
            self.depth -= 1
            self.mode = "comma_or_close" if self.depth else "done"
        elif mode == "value":
            self.mode = "int_zero" if symbol == "0" else "int"
        elif mode in ("obj_first", "obj_key"):
            self.mode = "key"
        elif mode in ("key", "key_body"):
            self.mode = "colon" if symbol == '"' else "key_body"
        elif mode == "colon":
            self.mode = "value"
        elif mode == "comma_or_close":
            self.mode = "obj_key"

    def accepting(self) -> bool:
        """Whether the text so far is whole. More may follow all the same, as after `1`."""
        return self.mode == "done" or (self.mode in ("int", "int_zero") and not self.depth)

    def copy(self) -> Self:
        """Another machine of the same class at the same place; neither moves the other."""
        other = type(self)()
        other.mode, other.depth = self.mode, self.depth
        return other

    def completion(self) -> str:
        """A shortest text that brings this one to its end, "" where it is whole (J4).

        A trace: after `{"a":{` it is `}}`, after `{"a":1,` it is `"a":0}`.
        """
        return ENDINGS.get(self.mode, "") + "}" * self.depth


def constrained_generate(
    score_fn: Callable[[str], Mapping[str, float]],
    max_tokens: int,
    close_within_budget: bool = False,
    machine: Callable[[], JsonMachine] = JsonMachine,
) -> tuple[str, str]:
    """Generate greedily, one symbol a token: the allowed symbol with the highest score each time.

    EOS ends the text and uses up a token. Of equal scores the one that stands first in `SYMBOLS` is
    taken. The machine reads each symbol of the text once; only to look ahead in a budget does it
    read more, and then no more than one symbol for each that is allowed.

    A trace: a model that likes `{`, then `"`, `:`, `a`, 7 tokens: `{"a":{"`, reason "length".

    Args:
        score_fn: the model: the text so far to a score for each of `SYMBOLS`.
        close_within_budget: take only symbols after which the shortest ending and EOS still fit.
        machine: makes the machine.

    Returns:
        The text, and "stop" where EOS was taken or "length".

    Raises:
        ValueError: `close_within_budget` with `max_tokens` below 2.
    """
    if close_within_budget and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens}: need at least 2 for a value and its end")
    state, text = machine(), ""
    for used in range(max_tokens):
        allowed = state.allowed()
        if close_within_budget:
            left = max_tokens - used - 1
            allowed = {each for each in allowed if _fits(state, each, left)}
        scores = score_fn(text)
        symbol = max((each for each in SYMBOLS if each in allowed), key=lambda each: scores[each])
        if symbol == EOS:
            return text, "stop"
        state.feed(symbol)
        text += symbol
    return text, "length"


def _fits(state: JsonMachine, symbol: str, left: int) -> bool:
    """Whether the text can end within `left` tokens after `symbol`."""
    if symbol == EOS:
        return True
    after = state.copy()
    after.feed(symbol)
    return len(after.completion()) + 1 <= left


def in_language(text: str) -> bool:
    """The same question asked of `json.loads`: an oracle that shares nothing with the machine.

    What JSON allows and the language does not is refused: spaces, signs, fractions, strings as
    values, arrays, true, false and null, keys of other letters or of none. Depth is at most a few
    hundred and ints have at most 4,000 digits, where Python's reader ends.

    Returns:
        Whether the text is in the language; never an error.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return not set(text) - set("".join(SYMBOLS[:-1])) and _is_value(value)


def _is_value(value: Any) -> bool:
    if isinstance(value, dict):
        return all(key and set(key) <= LETTERS and _is_value(v) for key, v in value.items())
    return type(value) is int


def fuzz(
    machine: Callable[[], JsonMachine],
    redraw: bool,
    seed: int,
    runs: int = 50,
    max_tokens: int = 40,
) -> int:
    """One batch of generations with random scores: how many finished texts are not in the language.

    All randomness comes from `random.Random(seed)`. A score is uniform in [0, 1).

    Args:
        machine: the machine under test.
        redraw: draw all scores anew for every token; or else once for each run, which is one order
            of preference kept to its end.
        runs: generations in the batch, each at most `max_tokens` long.

    Returns:
        How many ended with "stop" and are refused by `in_language`.
    """
    rng = random.Random(seed)
    bad = 0
    for _ in range(runs):
        fixed = {symbol: rng.random() for symbol in SYMBOLS}

        def scores(text: str, fixed: Mapping[str, float] = fixed) -> Mapping[str, float]:
            return {symbol: rng.random() for symbol in SYMBOLS} if redraw else fixed

        text, reason = constrained_generate(scores, max_tokens, machine=machine)
        bad += reason == "stop" and not in_language(text)
    return bad
