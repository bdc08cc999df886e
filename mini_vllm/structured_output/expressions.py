"""What every kind of constraint is turned into: rules over literals, classes, choices and repeats.

Promises: an expression says a language and nothing about how it is recognised; `Grammar` is what
`regex`, `ebnf` and `json_schema` make and `network` compiles. Plays the part of xgrammar's
`Grammar`, which `vllm/v1/structured_output/backend_xgrammar.py:268` `validate_xgrammar_grammar`
builds at the front door.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
"""Code points that no UTF-8 text holds."""

COMPILE_SECONDS = 0.8
"""What parsing a constraint may take, and compiling it again; upstream has no such bound."""


class GrammarError(ValueError):
    """A constraint that cannot be served: malformed, not supported, or too large."""


@dataclass(frozen=True, slots=True)
class Literal:
    """These bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class: inclusive ranges of code points, ascending and apart."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Bytes:
    """One byte, of a character or not: bit b of `allowed` stands for byte b."""

    allowed: int


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other; none: the empty text."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of them; none: no text at all."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; None means without a bound."""

    body: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """Whatever the named rule says: what makes nesting possible."""

    rule: str


Expression = Literal | Chars | Bytes | Concat | Choice | Repeat | Call

EMPTY = Concat(())
NOTHING = Choice(())


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name and the one that texts must match from end to end."""

    rules: dict[str, Expression]
    root: str = "root"


@dataclass(slots=True)
class Effort:
    """What parsing or compiling may still spend. It is asked often and raises when it is over.

    Counted is the compiling thread's processor time: on a busy machine a grammar takes longer and
    is no harder.
    """

    seconds: float = field(default_factory=lambda: COMPILE_SECONDS)
    cancelled: bool = False
    """Set when the request waits no longer."""
    _thread: int = 0
    _seen: float = 0.0

    def check(self) -> None:
        """Raises GrammarError once time is up or no request waits."""
        if self.cancelled:
            raise GrammarError("the grammar's compilation was cancelled")
        now, thread = time.thread_time(), threading.get_ident()
        if thread == self._thread:
            self.seconds -= now - self._seen
        self._thread, self._seen = thread, now
        if self.seconds < 0.0:
            raise GrammarError(f"the grammar takes more than {COMPILE_SECONDS} s to prepare")


def text(value: str) -> Literal:
    """A literal in UTF-8."""
    return Literal(value.encode())


def concat(*parts: Expression) -> Expression:
    """One after the other, flat; neighbouring literals are one."""
    each = (e for part in parts for e in (part.parts if isinstance(part, Concat) else (part,)))
    flat: list[Expression] = []
    for are_literals, run in itertools.groupby(each, lambda e: isinstance(e, Literal)):
        if are_literals:
            flat.append(Literal(b"".join(e.data for e in run if isinstance(e, Literal))))
        else:
            flat += run
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def choice(options: Iterable[Expression]) -> Expression:
    """Any of them, each once."""
    found = tuple(dict.fromkeys(options))
    return found[0] if len(found) == 1 else Choice(found)


def optional(body: Expression) -> Expression:
    """It or nothing."""
    return Choice((EMPTY, body))


def normal(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same code points, ranges ascending, apart, and without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    kept: list[tuple[int, int]] = []
    for low, high in merged:
        if high < SURROGATES[0] or low > SURROGATES[1]:
            kept.append((low, high))
            continue
        if low < SURROGATES[0]:
            kept.append((low, SURROGATES[0] - 1))
        if high > SURROGATES[1]:
            kept.append((SURROGATES[1] + 1, high))
    return tuple(kept)


def complement(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Every other code point."""
    found: list[tuple[int, int]] = []
    start = 0
    for low, high in normal(ranges):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        found.append((start, MAX_CODE_POINT))
    return normal(found)


def intersection(
    one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """The code points in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return normal((low, high) for low, high in pairs if low <= high)


ANY_CHAR = Chars(normal([(0, MAX_CODE_POINT)]))
