"""What a schema says, as alternatives of conditions per type.

Promises: a conjunction of schemas becomes alternatives ("shapes") whose conditions are gathered per
type, so that `allOf`, `$ref` and their neighbours need no automaton of their own; an alternative
that nothing can satisfy is dropped; a keyword that cannot be kept is refused by name. JSON Schema
2020-12, validation sections 6.1 to 6.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from mini_vllm.structured_output.expressions import Effort, GrammarError
from mini_vllm.structured_output.json_conditions import (
    TYPES,
    Items,
    Properties,
    Shape,
    merged,
    tighter,
    type_of,
)
from mini_vllm.structured_output.json_negation import (
    BROKEN,
    FORBIDDEN,
    NOT_REF,
    UNLIKE,
    WITHOUT,
    negated,
)
from mini_vllm.structured_output.json_numbers import Bound
from mini_vllm.structured_output.json_references import DRAFT, DRAFTS, Node, References, node
from mini_vllm.structured_output.json_text import decimal, given, is_number

MAX_SHAPES = 256
"""Alternatives of one schema."""

_TYPES_OF = {
    "null": {"null"},
    "boolean": {"true", "false"},
    "number": {"number"},
    "integer": {"number"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
_REFUSED = ("$recursiveRef", "dependencies", "additionalItems", "$recursiveAnchor")


class Shapes:
    """Expands schemas. Results are kept by node."""

    def __init__(self, references: References, effort: Effort) -> None:
        self.references, self.effort = references, effort
        self._known: dict[Node, list[Shape]] = {}
        self._open: set[Node] = set()

    def of(self, nodes: Sequence[Node]) -> list[Shape]:
        """The alternatives of all of these at once.

        Raises:
            GrammarError: a keyword that is not supported, a reference that leads nowhere or back
                to itself, or too many alternatives.
        """
        found = [Shape()]
        for each in nodes:
            found = self._both(found, self._of(each))
        return found

    def _of(self, schema: Node) -> list[Shape]:
        self.effort.check()
        if schema not in self._known:
            if schema in self._open:
                raise GrammarError("json: a schema that is defined by itself alone")
            self._open.add(schema)
            try:
                self._known[schema] = self._expand(schema)
            finally:
                self._open.discard(schema)
        return self._known[schema]

    def _both(self, one: list[Shape], other: list[Shape]) -> list[Shape]:
        found: dict[Shape, None] = {}
        for a, b in itertools.product(one, other):
            self.effort.check()
            if (both := merged(a, b)) is not None:
                found[both] = None
            if len(found) > MAX_SHAPES:
                raise GrammarError(f"json: more than {MAX_SHAPES} alternatives")
        return list(found)

    def _expand(self, at: Node) -> list[Shape]:
        schema, base = at.schema, at.base
        if isinstance(schema, bool):
            return [Shape()] if schema else []
        for keyword in _REFUSED:
            if keyword in schema:
                raise GrammarError(f"json: {keyword} is not supported")
        written_for = str(schema.get("$schema", DRAFT))
        if not written_for.startswith(DRAFTS):
            raise GrammarError(f"json: $schema={written_for!r} is not supported")
        found = self._local(schema, base)
        if "$ref" in schema:
            found = self._both(found, self._of(self.references.resolve(schema["$ref"], base)))
        if NOT_REF in schema:
            target = self.references.resolve(schema[NOT_REF], base)
            shapes = self._of(node(negated(target.schema), target.base))
            found = self._both(found, [shape.plain() for shape in shapes])
        if "$dynamicRef" in schema:
            target = self.references.dynamic(schema["$dynamicRef"], base)
            found = self._both(found, self._of(target))
        for each in _list(schema, "allOf"):
            found = self._both(found, self._of(node(each, base)))
        apart = "unevaluatedItems" in schema or "unevaluatedProperties" in schema
        if "anyOf" in schema:
            found = self._both(found, self._any(_list(schema, "anyOf"), base, apart))
        if "oneOf" in schema:
            found = self._both(found, self._one(_list(schema, "oneOf"), base))
        if "not" in schema:
            shapes = self._of(node(negated(schema["not"]), base))
            found = self._both(found, [shape.plain() for shape in shapes])
        if "if" in schema and ("then" in schema or "else" in schema or apart):
            found = self._both(found, self._if(schema, base))
        found = self._dependent(found, schema, base)
        return self._unevaluated(found, schema, base) if apart else found

    def _any(self, options: Sequence[Any], base: str, apart: bool) -> list[Shape]:
        """One alternative or more; `apart`: told apart by which of them hold."""
        found: list[Shape] = []
        if not apart:
            for each in options:
                found += self._of(node(each, base))
            return found
        if len(options) > 4:
            raise GrammarError("json: anyOf of more than 4 beside unevaluated... is not supported")
        for chosen in range(1, 1 << len(options)):
            part = [Shape()]
            for index, each in enumerate(options):
                if chosen >> index & 1:
                    part = self._both(part, self._of(node(each, base)))
                else:
                    shapes = self._of(node(negated(each), base))
                    part = self._both(part, [shape.plain() for shape in shapes])
            found += part
        return found

    def _one(self, options: Sequence[Any], base: str) -> list[Shape]:
        """Exactly one: where two can hold together, each without the other."""
        each = [self._of(node(option, base)) for option in options]
        found: list[Shape] = []
        for index, shapes in enumerate(each):
            part = shapes
            for other, theirs in enumerate(each):
                if other != index and self._overlap(part, theirs):
                    without = self._of(node(negated(options[other]), base))
                    part = self._both(part, [shape.plain() for shape in without])
            found += part
        return found

    def _overlap(self, one: list[Shape], other: list[Shape]) -> bool:
        """Whether something may satisfy both; not where a key that both require cannot."""
        for shape in self._both(one, other):
            if shape.types != {"object"}:
                return True
            try:
                named = [(key, each) for group in shape.objects for key, each in group.named]
                keys = {key: [n for k, n in named if k == key] for key in shape.required}
                if all(self.of(nodes) for nodes in keys.values()):
                    return True
            except GrammarError:
                return True
        return False

    def _if(self, schema: Mapping[str, Any], base: str) -> list[Shape]:
        holds = self._both(
            self._of(node(schema["if"], base)), self._of(node(schema.get("then", True), base))
        )
        fails = [shape.plain() for shape in self._of(node(negated(schema["if"]), base))]
        return holds + self._both(fails, self._of(node(schema.get("else", True), base)))

    def _dependent(self, found: list[Shape], schema: Mapping[str, Any], base: str) -> list[Shape]:
        for key, names in _map(schema, "dependentRequired").items():
            there = Shape(types=frozenset({"object"}), required=(key, *names))
            found = self._both(found, [*_without_key(key), there])
        for key, each in _map(schema, "dependentSchemas").items():
            there = Shape(types=frozenset({"object"}), required=(key,))
            held = self._both([there], self._of(node(each, base)))
            found = self._both(found, [*_without_key(key), *held])
        return found

    def _unevaluated(self, found: list[Shape], schema: Mapping[str, Any], base: str) -> list[Shape]:
        """What no neighbour has looked at, in each alternative."""
        result = []
        for shape in found:
            if "unevaluatedProperties" in schema:
                groups = [each for each in shape.objects if each.evaluates]
                if not any(each.rest is not None for each in groups):
                    free = node(True, base)
                    rest = Properties(
                        tuple((name, free) for each in groups for name, _ in each.named),
                        tuple((text, free) for each in groups for text, _ in each.patterns),
                        node(schema["unevaluatedProperties"], base),
                    )
                    shape = replace(shape, objects=(*shape.objects, rest))
            if "unevaluatedItems" in schema:
                if shape.contains:
                    raise GrammarError("json: contains beside unevaluatedItems is not supported")
                parts = [each for each in shape.items if each.evaluates]
                if not any(each.rest is not None for each in parts):
                    length = max((len(each.prefix) for each in parts), default=0)
                    last = Items(
                        (node(True, base),) * length, node(schema["unevaluatedItems"], base)
                    )
                    shape = replace(shape, items=(*shape.items, last))
            result.append(shape)
        return result

    def _local(self, schema: Mapping[str, Any], base: str) -> list[Shape]:
        """The conditions that stand in the schema itself."""
        shape = _counts(schema)
        types = schema.get("type")
        named = [types] if isinstance(types, str) else types
        if named is not None:
            if not isinstance(named, list) or any(each not in _TYPES_OF for each in named):
                raise GrammarError(f"json: type={types!r}: need one of {', '.join(_TYPES_OF)}")
            allowed = frozenset(t for each in named for t in _TYPES_OF[each])
            whole = "integer" in named and "number" not in named
            shape = replace(shape, types=allowed, whole=whole)
        named_properties = _map(schema, "properties")
        patterns = _map(schema, "patternProperties")
        rest = schema.get("additionalProperties")
        if named_properties or patterns or rest is not None:
            group = Properties(
                tuple((key, node(each, base)) for key, each in named_properties.items()),
                tuple((key, node(each, base)) for key, each in patterns.items()),
                None if rest is None else node(rest, base),
            )
            shape = replace(shape, objects=(group,))
        if "prefixItems" in schema or "items" in schema:
            prefix = tuple(node(each, base) for each in _list(schema, "prefixItems"))
            items = node(schema["items"], base) if "items" in schema else None
            shape = replace(shape, items=(Items(prefix, items),))
        if "contains" in schema:
            least, most = _count(schema, "minContains", 1), _count(schema, "maxContains", None)
            if least or most is not None:
                wanted = node(schema["contains"], base)
                shape = replace(shape, contains=((wanted, least or 0, most),))
        if "propertyNames" in schema:
            shape = replace(shape, names=(node(schema["propertyNames"], base),))
        found: list[Shape] = [shape]
        for key in ("enum", "const"):
            if key in schema:
                values = schema[key] if key == "enum" else [schema[key]]
                if not isinstance(values, list):
                    raise GrammarError(f"json: enum={str(values)[:40]}: need a list")
                found = self._both(found, [_of_values(values)])
        return found


def _counts(schema: Mapping[str, Any]) -> Shape:
    """Bounds and counts of a schema."""
    low, high = None, None
    for key, strict in (("minimum", False), ("exclusiveMinimum", True)):
        low = tighter(low, _bound(schema, key, strict), 1)
    for key, strict in (("maximum", False), ("exclusiveMaximum", True)):
        high = tighter(high, _bound(schema, key, strict), -1)
    multiples: tuple[Decimal, ...] = ()
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        if not is_number(step) or decimal(step) <= 0:
            raise GrammarError(f"json: multipleOf={step!r}: need a number above 0")
        multiples = (decimal(step).normalize(),)
    required, patterns = schema.get("required", []), schema.get("pattern")
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise GrammarError(f"json: required={str(required)[:40]}: need a list of texts")
    if patterns is not None and not isinstance(patterns, str):
        raise GrammarError(f"json: pattern={patterns!r}: need a text")
    formats = (schema["format"],) if isinstance(schema.get("format"), str) else ()
    return Shape(
        low=low, high=high, multiples=multiples,
        shortest=_count(schema, "minLength", 0) or 0, longest=_count(schema, "maxLength", None),
        patterns=(patterns,) if patterns is not None else (), formats=formats,
        broken=bool(schema.get(BROKEN)), unlike=tuple(map(decimal, schema.get(UNLIKE, ()))),
        without=tuple(schema.get(WITHOUT, ())), forbidden=tuple(schema.get(FORBIDDEN, ())),
        least_items=_count(schema, "minItems", 0) or 0,
        most_items=_count(schema, "maxItems", None),
        unique=schema.get("uniqueItems") is True, required=tuple(required),
        least_properties=_count(schema, "minProperties", 0) or 0,
        most_properties=_count(schema, "maxProperties", None),
    )  # fmt: skip


def _of_values(values: Sequence[Any]) -> Shape:
    types = frozenset(map(type_of, values))
    plain = (each for each in values if each is not None and not isinstance(each, bool))
    return Shape(types=types, values=tuple(dict.fromkeys(map(given, plain))))


def _without_key(key: str) -> list[Shape]:
    """Everything that has no such key: other types, and objects without it."""
    return [Shape(types=TYPES - {"object"}), Shape(types=frozenset({"object"}), forbidden=(key,))]


def _bound(schema: Mapping[str, Any], key: str, strict: bool) -> Bound | None:
    if key not in schema:
        return None
    if not is_number(schema[key]):
        raise GrammarError(f"json: {key}={schema[key]!r}: need a number")
    return Bound(decimal(schema[key]), strict)


def _count(schema: Mapping[str, Any], key: str, default: int | None) -> int | None:
    if key not in schema:
        return default
    value = schema[key]
    if not is_number(value) or value < 0 or value != int(value):
        raise GrammarError(f"json: {key}={value!r}: need a whole number, 0 or more")
    return int(value)


def _list(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = schema.get(key, [])
    if not isinstance(found, list):
        raise GrammarError(f"json: {key}: need a list of schemas")
    return found


def _map(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = schema.get(key, {})
    if not isinstance(found, Mapping):
        raise GrammarError(f"json: {key}: need an object")
    return found
