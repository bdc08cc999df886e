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

from collections.abc import Callable, Mapping
from typing import Self

EOS = "<eos>"
DIGITS = frozenset("0123456789")
LETTERS = frozenset("abc")
SYMBOLS = (*'{}",:', *sorted(LETTERS), *sorted(DIGITS), EOS)
"""All there are (given): 19."""


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
        raise NotImplementedError

    def allowed(self) -> set[str]:
        """The symbols that may follow, EOS where the text may end; a new set (J2)."""
        raise NotImplementedError

    def feed(self, symbol: str) -> None:
        """Read one symbol.

        Raises:
            ValueError: it may not follow, is EOS, or is no single symbol. Nothing has changed (J3).
        """
        raise NotImplementedError

    def accepting(self) -> bool:
        """Whether the text so far is whole. More may follow all the same, as after `1`."""
        raise NotImplementedError

    def copy(self) -> Self:
        """Another machine of the same class at the same place; neither moves the other."""
        raise NotImplementedError

    def completion(self) -> str:
        """A shortest text that brings this one to its end, "" where it is whole (J4).

        A trace: after `{"a":{` it is `}}`, after `{"a":1,` it is `"a":0}`.
        """
        raise NotImplementedError


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
    raise NotImplementedError


def in_language(text: str) -> bool:
    """The same question asked of `json.loads`: an oracle that shares nothing with the machine.

    What JSON allows and the language does not is refused: spaces, signs, fractions, strings as
    values, arrays, true, false and null, keys of other letters or of none. Depth is at most a few
    hundred and ints have at most 4,000 digits, where Python's reader ends.

    Returns:
        Whether the text is in the language; never an error.
    """
    raise NotImplementedError


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
    raise NotImplementedError
