"""The conditions of one alternative of a schema, per type, and two of them at once.

Promises: what both say is gathered, the tighter bound kept; what nothing can satisfy is gone. JSON
Schema 2020-12, validation sections 6.1 to 6.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from mini_vllm.structured_output.json_numbers import Bound
from mini_vllm.structured_output.json_references import Node
from mini_vllm.structured_output.json_text import Given, is_number

TYPES = frozenset({"null", "true", "false", "number", "string", "array", "object"})


@dataclass(frozen=True, slots=True)
class Items:
    """Of one schema: what stands at which index."""

    prefix: tuple[Node, ...]
    rest: Node | None
    evaluates: bool = True
    """Whether `unevaluatedItems` counts it; what a negation says does not."""


@dataclass(frozen=True, slots=True)
class Properties:
    """Of one schema: what stands under which key."""

    named: tuple[tuple[str, Node], ...]
    patterns: tuple[tuple[str, Node], ...]
    rest: Node | None
    evaluates: bool = True


@dataclass(frozen=True, slots=True)
class Shape:
    """One alternative: all of these hold, each for its own type."""

    types: frozenset[str] = TYPES
    values: tuple[Given, ...] | None = None
    """The only strings, numbers, arrays and objects; None: any."""
    whole: bool = False
    broken: bool = False
    """No whole number."""
    unlike: tuple[Decimal, ...] = ()
    """Numbers that are excluded."""
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Decimal, ...] = ()
    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    """Strings that are excluded."""
    items: tuple[Items, ...] = ()
    least_items: int = 0
    most_items: int | None = None
    unique: bool = False
    contains: tuple[tuple[Node, int, int | None], ...] = ()
    objects: tuple[Properties, ...] = ()
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    least_properties: int = 0
    most_properties: int | None = None
    names: tuple[Node, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether it says nothing."""
        return self == Shape()

    def plain(self) -> Shape:
        """The same, its parts not counted by `unevaluated...`."""
        return replace(
            self,
            items=tuple(replace(each, evaluates=False) for each in self.items),
            objects=tuple(replace(each, evaluates=False) for each in self.objects),
        )


def merged(one: Shape, other: Shape) -> Shape | None:
    """Both at once; None where nothing can satisfy both."""
    values = one.values if other.values is None else other.values
    if one.values is not None and other.values is not None:
        theirs = set(other.values)
        values = tuple(each for each in one.values if each in theirs)
    shape = Shape(
        one.types & other.types, values, one.whole or other.whole, one.broken or other.broken,
        tuple(dict.fromkeys(one.unlike + other.unlike)),
        tighter(one.low, other.low, 1), tighter(one.high, other.high, -1),
        tuple(dict.fromkeys(one.multiples + other.multiples)),
        max(one.shortest, other.shortest), _least(one.longest, other.longest),
        tuple(dict.fromkeys(one.patterns + other.patterns)),
        tuple(dict.fromkeys(one.formats + other.formats)),
        tuple(dict.fromkeys(one.without + other.without)),
        tuple(dict.fromkeys(one.items + other.items)),
        max(one.least_items, other.least_items), _least(one.most_items, other.most_items),
        one.unique or other.unique, tuple(dict.fromkeys(one.contains + other.contains)),
        tuple(dict.fromkeys(one.objects + other.objects)),
        tuple(dict.fromkeys(one.required + other.required)),
        tuple(dict.fromkeys(one.forbidden + other.forbidden)),
        max(one.least_properties, other.least_properties),
        _least(one.most_properties, other.most_properties),
        tuple(dict.fromkeys(one.names + other.names)),
    )  # fmt: skip
    return _possible(shape)


def _possible(shape: Shape) -> Shape | None:
    """Without the types that it cannot have; None if none is left."""
    gone = set()
    if shape.low is not None and shape.high is not None:
        low, high = shape.low, shape.high
        if low.value > high.value or (low.value == high.value and (low.strict or high.strict)):
            gone.add("number")
    if shape.whole and shape.broken:
        gone.add("number")
    if shape.longest is not None and shape.shortest > shape.longest:
        gone.add("string")
    if shape.most_items is not None and shape.least_items > shape.most_items:
        gone.add("array")
    most = shape.most_properties
    if most is not None and max(shape.least_properties, len(shape.required)) > most:
        gone.add("object")
    if set(shape.required) & set(shape.forbidden):
        gone.add("object")
    if shape.values is not None:
        there = {type_of(each.value) for each in shape.values}
        gone |= {"number", "string", "array", "object"} - there
    types = shape.types - gone
    return replace(shape, types=types) if types else None


def type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if is_number(value):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def tighter(one: Bound | None, other: Bound | None, sign: int) -> Bound | None:
    """The one that leaves less; `sign` is 1 for lower and -1 for upper bounds."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda bound: (sign * bound.value, bound.strict))


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
