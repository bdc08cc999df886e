"""Objects: keys in the schema's order, then others, each with its comma and its conditions.

Promises: a key that the schema names is written at most once and at its place; a required one is
never left out; other keys satisfy every pattern that they match. What counts properties refuses to
count keys that could be written twice. JSON Schema 2020-12, applicator section 10.3.2 and
validation section 6.5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mini_vllm.structured_output.dfa import Dfa, combined, dfa_of, one_of
from mini_vllm.structured_output.expressions import (
    ANY_CHAR,
    EMPTY,
    NOTHING,
    Call,
    Expression,
    GrammarError,
    Repeat,
    choice,
    concat,
    text,
)
from mini_vllm.structured_output.json_conditions import Properties, Shape
from mini_vllm.structured_output.json_negation import negated
from mini_vllm.structured_output.json_references import Node, node
from mini_vllm.structured_output.json_text import OBJECT, QUOTE, STRING

if TYPE_CHECKING:
    from mini_vllm.structured_output.json_schema import SchemaCompiler

MAX_PATTERNS = 4
"""Of `patternProperties`: every combination has a rule."""

Extra = tuple[Expression, Expression]
"""A key that the schema does not name, in quotes, and its value."""


class Objects:
    """Builds the objects of one schema."""

    def __init__(self, schema: SchemaCompiler) -> None:
        self.schema = schema

    def of(self, shape: Shape, name: str) -> Expression:
        """The objects of a shape."""
        least, most = shape.least_properties, shape.most_properties
        counted = least > 0 or most is not None
        if not (shape.objects or shape.required or shape.names or shape.forbidden or counted):
            return Call(OBJECT)
        named: list[tuple[str, Expression, bool]] = []
        gone = list(shape.forbidden)
        names = self._names(shape)
        groups = [_by_key(group) for group in shape.objects]
        required, forbidden = set(shape.required), set(shape.forbidden)
        for key in dict.fromkeys([*(key for group in groups for key in group), *shape.required]):
            self.schema.effort.check()
            value = self.schema.call(self._named(shape, groups, key))
            fine = key not in forbidden and all(any(d.accepts(key) for d in n) for n in names)
            if fine and value != NOTHING:
                named.append((key, value, key in required))
            elif key in required:
                return NOTHING
            else:
                gone.append(key)
        extras = self._extras(shape, [*(key for key, _, _ in named), *gone], names, name)
        needed = sum(is_required for _, _, is_required in named)
        least = 0 if least <= needed else least
        if extras and least > 1:
            raise GrammarError(
                f"json: minProperties={least} where other keys are allowed is not supported"
            )
        return self._chain(named, extras, least, most, name)

    def negation(self, schema: Node) -> Node:
        """The schema of everything else.

        Raises:
            GrammarError: see `negated`.
        """
        return node(negated(schema.schema), schema.base)

    def _chain(
        self, named: Sequence[tuple[str, Expression, bool]], extras: Sequence[Extra], least: int,
        most: int | None, name: str,
    ) -> Expression:  # fmt: skip
        """A rule per place and count: what may follow there."""
        spelling = self.schema.spelling
        cap = max(1, least, 0 if most is None else most + 1)
        last = len(named)
        if (last + 1) * (cap + 1) > 20_000:
            raise GrammarError("json: counting this many properties is not supported")

        def rule(index: int, count: int) -> Call:
            return Call(f"{name} property {index} {min(count, cap)}")

        for index in range(last, -1, -1):
            self.schema.effort.check()
            for count in range(min(cap, index if index < last else cap) + 1):
                options: list[Expression] = []
                comma = spelling.comma if count else EMPTY
                room = most is None or count < most
                if index < last:
                    key, value, required = named[index]
                    if room:
                        pair = concat(
                            comma, text(json.dumps(key, ensure_ascii=False)), spelling.colon, value
                        )
                        options.append(concat(pair, rule(index + 1, count + 1)))
                    if not required:
                        options.append(rule(index + 1, count))
                else:
                    if count >= least:
                        options.append(EMPTY)
                    for key_text, value in extras if room else ():
                        pair = concat(comma, key_text, spelling.colon, value)
                        options.append(concat(pair, rule(index, count + 1)))
                self.schema.rules[rule(index, count).rule] = choice(options)
        first = f"{name} property 0 0"
        required = any(needed for _, _, needed in named)
        if required or least:
            return spelling.bracketed("{", Call(first), "}")
        return self._maybe_empty(named, extras, most, rule, name)

    def _maybe_empty(
        self, named: Sequence[tuple[str, Expression, bool]], extras: Sequence[Extra],
        most: int | None, rule: Callable[[int, int], Call], name: str,
    ) -> Expression:  # fmt: skip
        """The same where nothing is required: the first pair, whichever it is, or none."""
        spelling = self.schema.spelling
        options: list[Expression] = []
        if most is None or most > 0:
            for index, (key, value, _) in enumerate(named):
                pair = concat(text(json.dumps(key, ensure_ascii=False)), spelling.colon, value)
                options.append(concat(pair, rule(index + 1, 1)))
            for key_text, value in extras:
                options.append(concat(key_text, spelling.colon, value, rule(len(named), 1)))
        empty = spelling.empty("{", "}")
        if not options:
            return empty
        self.schema.rules[f"{name} first"] = choice(options)
        return choice([spelling.bracketed("{", Call(f"{name} first"), "}"), empty])

    def _named(
        self, shape: Shape, groups: Sequence[Mapping[str, list[Node]]], key: str
    ) -> tuple[Node, ...]:
        """What the value under a given key must satisfy; `groups`: the shape's, by key."""
        found: list[Node] = []
        for group, named in zip(shape.objects, groups, strict=True):
            mine = list(named.get(key, ()))
            mine += [p for text, p in group.patterns if self.schema.strings.finds(text, key)]
            found += mine or ([] if group.rest is None else [group.rest])
        return tuple(found)

    @staticmethod
    def _matching(shape: Shape, matched: Sequence[str]) -> tuple[Node, ...]:
        """What the value under a key that is not named must satisfy, where it matches these."""
        found: list[Node] = []
        for group in shape.objects:
            mine = [each for pattern, each in group.patterns if pattern in matched]
            found += mine or ([] if group.rest is None else [group.rest])
        return tuple(found)

    def _extras(
        self, shape: Shape, named: Sequence[str], names: Sequence[Sequence[Dfa]], name: str
    ) -> list[Extra]:
        """Keys that the schema does not name, by the patterns that they match."""
        rests = [group.rest for group in shape.objects]
        patterns = list(dict.fromkeys(p for group in shape.objects for p, _ in group.patterns))
        if self.schema.closed and named and not patterns and not any(rests):
            return []
        if len(patterns) > MAX_PATTERNS:
            raise GrammarError(f"json: more than {MAX_PATTERNS} patternProperties")
        found: list[Extra] = []
        effort = self.schema.effort
        for chosen in range(1 << len(patterns)):
            matched = [p for i, p in enumerate(patterns) if chosen >> i & 1]
            value = self.schema.call(self._matching(shape, matched))
            if value == NOTHING:
                continue
            if not patterns and not named and not names:
                found.append((Call(STRING), value))
                continue
            parts = [(self.schema.strings.pattern(p), p in matched) for p in patterns]
            if named:
                parts.append((one_of(named, effort), False))
            if not any(keep for _, keep in parts):
                parts.append((dfa_of(Repeat(ANY_CHAR, 0, None), effort), True))
            for number, chosen_names in enumerate(_products(names)):
                both = combined([*parts, *((dfa, True) for dfa in chosen_names)], effort)
                key = self.schema.of_dfa(both, f"{name} key {chosen} {number}")
                if key != NOTHING:
                    found.append((concat(QUOTE, key, QUOTE), value))
        return found

    def _names(self, shape: Shape) -> list[list[Dfa]]:
        """Per `propertyNames` its alternatives."""
        strings = self.schema.strings
        return [strings.language(self.schema.shapes.of([each])) for each in shape.names]


def _by_key(group: Properties) -> dict[str, list[Node]]:
    """What a schema says of each key that it names."""
    found: dict[str, list[Node]] = {}
    for key, each in group.named:
        found.setdefault(key, []).append(each)
    return found


def _products(names: Sequence[Sequence[Dfa]]) -> list[list[Dfa]]:
    """One alternative of each."""
    found: list[list[Dfa]] = [[]]
    for each in names:
        found = [[*one, dfa] for one in found for dfa in each]
    return found
