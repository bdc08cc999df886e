"""What a schema does not allow, as a schema: for `not`, `oneOf` and `if`.

Promises: the negation of a schema holds for exactly the values for which the schema does not; what
cannot be said so is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mini_vllm.structured_output.expressions import GrammarError

FORBIDDEN = "x-mini-forbidden"
"""Keyword of negations: keys that must not be there."""
WITHOUT = "x-mini-without"
"""Keyword of negations: strings that the value must not be."""
UNLIKE = "x-mini-unlike"
"""Keyword of negations: numbers that the value must not be."""
BROKEN = "x-mini-broken"
"""Keyword of negations: no whole number."""
NOT_REF = "x-mini-not-ref"
"""Keyword of negations: a reference whose schema must not hold."""

ALL = ("null", "boolean", "number", "string", "array", "object")
_IGNORED = {
    "$comment", "$schema", "$id", "$anchor", "$defs", "definitions", "title", "description",
    "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "contentMediaType",
    "contentEncoding", "contentSchema", "then", "else", "minContains", "maxContains",
    "$dynamicAnchor",
}  # fmt: skip


def negated(schema: Any) -> Any:
    """The schema of all other values; references in it start where they did.

    Raises:
        GrammarError: a keyword whose negation is not supported.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        raise GrammarError(f"json: {str(schema)[:40]!r} is no schema")
    options: list[Any] = []
    for keyword, value in schema.items():
        if keyword in _IGNORED or keyword not in _WAYS:
            if keyword in _REFUSED:
                raise GrammarError(f"json: {keyword} inside of not, oneOf or if is not supported")
            continue
        options += _WAYS[keyword](value, schema)
    return {"anyOf": options} if options else False


def _type(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    named = [value] if isinstance(value, str) else list(value)
    others = [each for each in ALL if each not in named]
    if "integer" not in named or "number" in named:
        return [{"type": others}] if others else []
    kept = [each for each in others if each != "number"]
    return [{"type": kept}, {"type": "number", BROKEN: True}]


def _values(values: Any) -> list[Any]:
    """Everything that is none of some values: strings and numbers can be excluded one by one, null,
    true and false by type."""
    types = {"string", "null", "boolean", "number"}
    texts, numbers, plain = [], [], set()
    for value in values:
        if isinstance(value, str):
            texts.append(value)
        elif value is None or isinstance(value, bool):
            plain.add(value)
        elif isinstance(value, int | float):
            numbers.append(value)
        else:
            raise GrammarError(
                "json: arrays and objects in enum or const inside of not, oneOf or if are not "
                "supported"
            )
    options: list[Any] = [{"type": [each for each in ALL if each not in types]}]
    options.append({"type": "string", WITHOUT: texts})
    options.append({"type": "number", UNLIKE: numbers})
    options += [{"const": each} for each in (None, True, False) if each not in plain]
    return options


def _opposite(kind: str, key: str, shift: int = 0) -> Callable[[Any, Mapping[str, Any]], list[Any]]:
    def ways(value: Any, schema: Mapping[str, Any]) -> list[Any]:
        moved = value + shift if shift else value
        return [] if shift and moved < 0 else [{"type": kind, key: moved}]

    return ways


def _required(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    return [{"type": "object", FORBIDDEN: [key]} for key in value]


def _properties(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    return [
        {"type": "object", "required": [key], "properties": {key: {"not": each}}}
        for key, each in value.items()
    ]


def _items(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    if schema.get("prefixItems"):
        raise GrammarError("json: items after prefixItems inside of not is not supported")
    return [{"type": "array", "contains": {"not": value}}]


def _prefix(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    return [
        {"type": "array", "minItems": index + 1, "prefixItems": [True] * index + [{"not": each}]}
        for index, each in enumerate(value)
    ]


def _if(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    return [
        {"allOf": [value, {"not": schema.get("then", True)}]},
        {"allOf": [{"not": value}, {"not": schema.get("else", True)}]},
    ]


_REFUSED = {
    "multipleOf", "pattern", "contains", "uniqueItems", "patternProperties",
    "additionalProperties", "propertyNames", "dependentRequired", "dependentSchemas",
    "unevaluatedItems", "unevaluatedProperties", FORBIDDEN, WITHOUT, UNLIKE, BROKEN, "$dynamicRef",
}  # fmt: skip

_WAYS: dict[str, Callable[[Any, Mapping[str, Any]], list[Any]]] = {
    "type": _type,
    "const": lambda value, schema: _values([value]),
    "enum": lambda value, schema: _values(value),
    "minimum": _opposite("number", "exclusiveMaximum"),
    "maximum": _opposite("number", "exclusiveMinimum"),
    "exclusiveMinimum": _opposite("number", "maximum"),
    "exclusiveMaximum": _opposite("number", "minimum"),
    "minLength": _opposite("string", "maxLength", -1),
    "maxLength": _opposite("string", "minLength", 1),
    "minItems": _opposite("array", "maxItems", -1),
    "maxItems": _opposite("array", "minItems", 1),
    "minProperties": _opposite("object", "maxProperties", -1),
    "maxProperties": _opposite("object", "minProperties", 1),
    "required": _required,
    "properties": _properties,
    "items": _items,
    "prefixItems": _prefix,
    "$ref": lambda value, schema: [{NOT_REF: value}],
    NOT_REF: lambda value, schema: [{"$ref": value}],
    "allOf": lambda value, schema: [{"not": each} for each in value],
    "anyOf": lambda value, schema: [{"allOf": [{"not": each} for each in value]}],
    "not": lambda value, schema: [value],
    "if": _if,
}
