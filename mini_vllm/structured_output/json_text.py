"""How JSON is spelled: strings, numbers, values, and the space between.

Promises: everything here is JSON by RFC 8259. A string under no condition may use every escape; one
under a condition has one spelling only, so that the condition sees each character once. Spaces and
order are xgrammar's: any space or exactly `, ` and `: `
(`vllm/v1/structured_output/backend_xgrammar.py:77` `XgrammarBackend.compile_grammar`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from mini_vllm.structured_output.expressions import (
    EMPTY,
    Call,
    Chars,
    Expression,
    Repeat,
    choice,
    complement,
    concat,
    intersection,
    normal,
    optional,
    text,
)

VALUE, STRING, NUMBER, INTEGER = "json value", "json string", "json number", "json integer"
ARRAY, OBJECT, CHAR = "json array", "json object", "json char"
"""Names of the shared rules."""

QUOTE = text('"')
DIGIT = Chars(((48, 57),))
NONZERO = Chars(((49, 57),))
_HEX = Chars(((48, 57), (65, 70), (97, 102)))
_PLAIN = complement([(0, 31), (34, 34), (92, 92)])
_SHORT = {34: '"', 92: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_RAW = Chars(_PLAIN)


class Spelling:
    """The spaces of one grammar, and the rules that every schema may use."""

    def __init__(self, compact: bool) -> None:
        """`compact`: `, ` and `: ` and no other space; else any space between the parts."""
        self.compact = compact
        space: Expression = Repeat(Chars(normal([(9, 10), (13, 13), (32, 32)])), 0, None)
        self.space = EMPTY if compact else space
        self.comma = text(", ") if compact else concat(space, text(","), space)
        self.colon = text(": ") if compact else concat(space, text(":"), space)

    def bracketed(self, left: str, body: Expression, right: str) -> Expression:
        """A body that is not empty, in brackets."""
        return concat(text(left), self.space, body, self.space, text(right))

    def empty(self, left: str, right: str) -> Expression:
        """Nothing, in brackets."""
        return concat(text(left), self.space, text(right))

    def listed(self, item: Expression) -> Expression:
        """One item or more, with commas."""
        return concat(item, Repeat(concat(self.comma, item), 0, None))

    def shared_rules(self) -> dict[str, Expression]:
        """Any value, and each of its kinds."""
        pair = concat(Call(STRING), self.colon, Call(VALUE))
        return {
            VALUE: choice(
                [*(Call(each) for each in (STRING, NUMBER, ARRAY, OBJECT)),
                 *map(text, ("true", "false", "null"))]
            ),
            STRING: concat(QUOTE, Repeat(choice([_RAW, _escape()]), 0, None), QUOTE),
            CHAR: choice([_RAW, _escape(surrogates=False)]),
            INTEGER: integer(),
            NUMBER: concat(
                integer(),
                optional(concat(text("."), Repeat(DIGIT, 1, None))),
                optional(concat(Chars(((69, 69), (101, 101))),
                                optional(Chars(((43, 43), (45, 45)))), Repeat(DIGIT, 1, None))),
            ),
            ARRAY: choice(
                [self.bracketed("[", self.listed(Call(VALUE)), "]"), self.empty("[", "]")]
            ),
            OBJECT: choice([self.bracketed("{", self.listed(pair), "}"), self.empty("{", "}")]),
        }  # fmt: skip

    def value(self, value: Any, loose: bool) -> Expression:
        """A given value; `loose`: a whole number may end in `.0`."""
        if isinstance(value, dict):
            pairs = [concat(text(json.dumps(key, ensure_ascii=False)), self.colon,
                            self.value(each, loose)) for key, each in value.items()]  # fmt: skip
            return self._joined("{", pairs, "}")
        if isinstance(value, list):
            return self._joined("[", [self.value(each, loose) for each in value], "]")
        if is_number(value):
            exact = decimal(value)
            if exact == exact.to_integral_value():
                zeros = optional(concat(text("."), Repeat(text("0"), 1, None)))
                return concat(text(f"{exact:f}".partition(".")[0]), zeros if loose else EMPTY)
            return text(f"{exact:f}")
        return text(json.dumps(value, ensure_ascii=False))

    def _joined(self, left: str, parts: list[Expression], right: str) -> Expression:
        if not parts:
            return self.empty(left, right)
        body = [parts[0]]
        for part in parts[1:]:
            body += [self.comma, part]
        return self.bracketed(left, concat(*body), right)


def integer() -> Expression:
    """A whole number without leading zeros."""
    return concat(optional(text("-")), choice([text("0"), concat(NONZERO, Repeat(DIGIT, 0, None))]))


def spelled(ranges: tuple[tuple[int, int], ...]) -> Expression:
    """One character of a class as it stands in a JSON string, in one spelling: itself, or the
    shortest escape where it needs one."""
    options: list[Expression] = []
    if plain := intersection(ranges, _PLAIN):
        options.append(Chars(plain))
    for low, high in intersection(ranges, ((0, 31), (34, 34), (92, 92))):
        for code in range(low, high + 1):
            known = _SHORT.get(code)
            options.append(text(f"\\{known}" if known else f"\\u{code:04x}"))
    return choice(options)


def _escape(surrogates: bool = True) -> Expression:
    """Any escape; without `surrogates` only those that are a character by themselves."""
    four: Expression = Repeat(_HEX, 4, 4)
    if not surrogates:
        no_d = Chars(((48, 57), (65, 67), (69, 70), (97, 99), (101, 102)))
        four = choice([
            concat(no_d, Repeat(_HEX, 3, 3)),
            concat(Chars(((68, 68), (100, 100))), Chars(((48, 55),)), Repeat(_HEX, 2, 2)),
        ])  # fmt: skip
    short = Chars(normal((ord(char), ord(char)) for char in '"\\/bfnrt'))
    return concat(text("\\"), choice([short, concat(text("u"), four)]))


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are none."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def decimal(value: Any) -> Decimal:
    """A JSON number exactly as it was written."""
    return value if isinstance(value, Decimal) else Decimal(str(value))


@dataclass(frozen=True, slots=True)
class Given:
    """A value of `enum` or `const`. Equal as JSON has it: 1 is 1.0, true is not 1, the order of
    keys does not count."""

    key: str
    value: Any = field(compare=False, hash=False)


def given(value: Any) -> Given:
    """The value with what it is compared by."""
    return Given(_key(value), value)


def _key(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_key(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    if is_number(value):
        exact = decimal(value).normalize()
        return "0" if exact == 0 else str(exact)
    return json.dumps(value)
