"""What the schema of a tool says of one argument: its types, and a text as a value of them.

Mirrors `vllm/tool_parsers/utils.py:158` `find_tool_properties`,
`vllm/tool_parsers/utils.py:453` `extract_types_from_schema` and
`vllm/tool_parsers/utils.py:526` `coerce_to_schema_type`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BY_VALUE = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip
_ALIASES = {
    "string": "str text varchar char enum",
    "integer": "int int32 int64 uint uint32 uint64 long short unsigned",
    "number": "float float32 float64 double",
    "boolean": "bool",
    "object": "dict",
    "array": "arr list sequence",
}
_TYPE_OF = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


def properties_of(tools: Sequence[Any], name: str) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by their names; none for a tool that was not offered."""
    for tool in tools:
        if tool.function.name == name:
            return (tool.function.parameters or {}).get("properties", {})
    return {}


def types_of(schema: Any) -> set[str]:
    """The types that a schema allows; "string" where it says nothing of them."""
    if not isinstance(schema, dict):
        return {"string"}
    types: set[str] = set()
    given = schema.get("type")
    types.update(kind for kind in (given if isinstance(given, list) else [given])
                 if isinstance(kind, str))  # fmt: skip
    values = schema.get("enum")
    types.update(_BY_VALUE[type(value)] for value in (values if isinstance(values, list) else ()))
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            types |= types_of(choice)
    return types or {"string"}


def coerced(text: str, types: Iterable[str]) -> Any:
    """A text as the first of these types that it can be, else as JSON, else the text.

    The types are tried in the order null, integer, number, boolean, object, array, string.

    Raises:
        OverflowError: a number beyond every float, as upstream has it.
    """
    named = {_TYPE_OF.get(kind.strip().lower(), kind.strip().lower()) for kind in types}
    lower = text.lower()
    if "null" in named and lower == "null":
        return None
    if "integer" in named and (found := _number(int, text)) is not None:
        return found
    if "number" in named and (found := _number(_float, text)) is not None:
        return found
    if "boolean" in named and lower.strip() in ("true", "1", "false", "0"):
        return lower.strip() in ("true", "1")
    if "string" in named and not named & {"object", "array"}:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _number(kind: Any, text: str) -> int | float | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _float(text: str) -> int | float:
    found = float(text)
    return int(found) if found == int(found) else found
