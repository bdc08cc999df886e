"""Bounds and multiples of numbers, as what digits may say.

Promises: exactly the numbers that satisfy the bounds, written without exponent; a whole number may
end in `.0` where that is asked for. Bounds are compared digit by digit, never as floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from mini_vllm.structured_output.dfa import Dfa, Edge, _trimmed, combined, dfa_of
from mini_vllm.structured_output.expressions import (
    EMPTY,
    Chars,
    Effort,
    Expression,
    GrammarError,
    Repeat,
    choice,
    concat,
    optional,
    text,
)
from mini_vllm.structured_output.json_text import DIGIT, NONZERO, integer

MAX_DIGITS = 60
MAX_REMAINDERS = 1500

_DIGITS = Repeat(DIGIT, 0, None)
_NATURAL = choice([text("0"), concat(NONZERO, _DIGITS)])
_FRACTION = optional(concat(text("."), Repeat(DIGIT, 1, None)))


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit; `strict` leaves the limit itself out."""

    value: Decimal
    strict: bool


def number_dfa(
    low: Bound | None,
    high: Bound | None,
    multiples: tuple[Decimal, ...],
    whole: bool,
    loose: bool,
    effort: Effort,
) -> Dfa:
    """The numbers from `low` to `high` that are multiples of each of `multiples`.

    Raises:
        GrammarError: limits of more than `MAX_DIGITS` digits, or multiples of too many steps.
    """
    zeros = optional(concat(text("."), Repeat(text("0"), 1, None))) if loose else EMPTY
    shape = concat(integer(), zeros if whole else _FRACTION)
    parts = [dfa_of(shape, effort)]
    if low is not None:
        parts.append(dfa_of(_at_least(low), effort))
    if high is not None:
        parts.append(dfa_of(_at_most(high), effort))
    parts += [_multiples(each) for each in multiples]
    return combined([(part, True) for part in parts], effort)


def without_numbers(numbers: Dfa, values: Sequence[Decimal], whole: bool, effort: Effort) -> Dfa:
    """The numbers without some values, however they are written; `whole`: without whole ones."""
    zeros = Repeat(text("0"), 0, None)
    point = optional(concat(text("."), Repeat(text("0"), 1, None)))
    gone: list[Expression] = [concat(integer(), point)] if whole else []
    for value in values:
        if value == value.to_integral_value():
            digits = text(f"{abs(value):f}".partition(".")[0])
            sign = optional(text("-")) if value == 0 else text("-" * (value < 0))
            gone.append(concat(sign, digits, point))
        else:
            gone.append(concat(text(f"{value.normalize():f}"), zeros))
    if not gone:
        return numbers
    return combined([(numbers, True), (dfa_of(choice(gone), effort), False)], effort)


def fits(value: Decimal, low: Bound | None, high: Bound | None,
         multiples: tuple[Decimal, ...]) -> bool:  # fmt: skip
    """Whether a given number satisfies them."""
    if low is not None and (value <= low.value if low.strict else value < low.value):
        return False
    if high is not None and (value >= high.value if high.strict else value > high.value):
        return False
    return all((value / each) == (value / each).to_integral_value() for each in multiples)


def _at_least(bound: Bound) -> Expression:
    if bound.value > 0:
        return _more(bound.value, bound.strict)
    negative = concat(text("-"), _less(-bound.value, bound.strict))
    if bound.value == 0:
        return _more(bound.value, True) if bound.strict else concat(_NATURAL, _FRACTION)
    return choice([concat(_NATURAL, _FRACTION), negative])


def _at_most(bound: Bound) -> Expression:
    if bound.value < 0:
        return concat(text("-"), _more(-bound.value, bound.strict))
    below = concat(text("-"), _more(Decimal(0), True))
    return choice([below, _less(bound.value, bound.strict)])


def _split(value: Decimal) -> tuple[str, str]:
    """Digits before and after the point, no zeros at the end."""
    if abs(value.adjusted()) > MAX_DIGITS or len(value.as_tuple().digits) > MAX_DIGITS:
        raise GrammarError(f"json: the bound {value} has more than {MAX_DIGITS} digits")
    before, _, after = f"{value:f}".partition(".")
    return before, after.rstrip("0")


def _digit(low: int, high: int) -> Expression:
    return Chars(((48 + low, 48 + high),)) if low <= high else choice([])


def _more(value: Decimal, strict: bool) -> Expression:
    """Decimals without sign of at least `value`, or more than it."""
    before, after = _split(value)
    options: list[Expression] = [concat(NONZERO, Repeat(DIGIT, len(before), None), _FRACTION)]
    for index, digit in enumerate(before):
        rest = Repeat(DIGIT, len(before) - index - 1, len(before) - index - 1)
        larger = _digit(max(int(digit) + 1, int(index == 0)), 9)
        options.append(concat(text(before[:index]), larger, rest, _FRACTION))
    if before == "0":
        options = [concat(NONZERO, _DIGITS, _FRACTION)]
    equal: list[Expression] = []
    for index, digit in enumerate(after):
        equal.append(concat(text(after[:index]), _digit(int(digit) + 1, 9), _DIGITS))
    nonzero = concat(Repeat(text("0"), 0, None), NONZERO, _DIGITS)
    if after:
        equal.append(concat(text(after), nonzero if strict else _DIGITS))
        options.append(concat(text(before + "."), choice(equal)))
    else:
        options.append(concat(text(before), concat(text("."), nonzero) if strict else _FRACTION))
    return choice(options)


def _less(value: Decimal, strict: bool) -> Expression:
    """Decimals without sign of at most `value`, or less than it."""
    before, after = _split(value)
    options: list[Expression] = []
    if len(before) > 1:
        shorter = choice([text("0"), concat(NONZERO, Repeat(DIGIT, 0, len(before) - 2))])
        options.append(concat(shorter, _FRACTION))
    for index, digit in enumerate(before):
        rest = Repeat(DIGIT, len(before) - index - 1, len(before) - index - 1)
        least = 1 if index == 0 and len(before) > 1 else 0
        smaller = _digit(least, int(digit) - 1)
        options.append(concat(text(before[:index]), smaller, rest, _FRACTION))
    zeros = Repeat(text("0"), 0, None)
    if after:
        equal: list[Expression] = []
        for index, digit in enumerate(after):
            equal.append(concat(text(after[:index]), _digit(0, int(digit) - 1), _DIGITS))
            if index:
                equal.append(text(after[:index]))
        if not strict:
            equal.append(concat(text(after), zeros))
        options.append(concat(text(before), optional(concat(text("."), choice(equal)))))
    elif not strict:
        options.append(concat(text(before), optional(concat(text(".0"), zeros))))
    return choice(options)


def _multiples(step: Decimal) -> Dfa:
    """The multiples of a positive number: remainders of the digits read so far."""
    exponent = step.normalize().as_tuple().exponent
    places = max(0, -exponent) if isinstance(exponent, int) else 0
    modulus = int(step.scaleb(places))
    if modulus * (places + 1) > MAX_REMAINDERS:
        raise GrammarError(f"json: multipleOf={step} takes more than {MAX_REMAINDERS} states")
    known: dict[tuple[str, int, int], int] = {}
    todo: list[tuple[str, int, int]] = []

    def number(state: tuple[str, int, int]) -> int:
        if state not in known:
            known[state] = len(known)
            todo.append(state)
        return known[state]

    number(("start", 0, 0))
    all_edges: list[list[Edge]] = []
    accepting: set[int] = set()
    for phase, remainder, count in todo:
        edges: list[Edge] = []
        if phase == "start":
            edges.append((45, 45, number(("sign", 0, 0))))
        is_multiple = remainder * 10 ** (places - count) % modulus == 0
        if phase in ("whole", "fraction") and is_multiple:
            accepting.add(known[phase, remainder, count])
        if phase == "whole":
            edges.append((46, 46, number(("point", remainder, 0))))
        for digit in range(10):
            if phase in ("point", "fraction") and count == places:
                if digit == 0:
                    edges.append((48, 48, number(("fraction", remainder, count))))
                continue
            after = (remainder * 10 + digit) % modulus
            if phase in ("point", "fraction"):
                target = "fraction", after, count + 1
            else:
                target = "whole", after, 0
            edges.append((48 + digit, 48 + digit, number(target)))
        all_edges.append(sorted(edges))
    return _trimmed(all_edges, accepting)
