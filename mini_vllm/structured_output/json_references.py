"""Where a `$ref` leads: one document, its embedded resources, its anchors.

Promises: a reference is followed inside of the schema that was given and nowhere else; another
document is refused by name, never fetched. JSON Schema 2020-12 core, sections 8.2 and 9.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from mini_vllm.structured_output.expressions import Effort, GrammarError

_IN_PLACE = ("additionalProperties", "unevaluatedProperties", "items", "unevaluatedItems", "not",
             "contains", "propertyNames", "if", "then", "else", "contentSchema")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")

DRAFT = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = ("https://json-schema.org/draft/", "http://json-schema.org/draft-")
"""What `$schema` may begin with. All are read as 2020-12."""


@dataclass(frozen=True, slots=True)
class Node:
    """A schema and the URI that its references start from. Equal text, equal node."""

    base: str
    text: str
    schema: Any = field(compare=False, hash=False)


def node(schema: Any, base: str) -> Node:
    """The node of a schema, which must be an object or a boolean.

    Raises:
        GrammarError: it is something else.
    """
    if not isinstance(schema, Mapping | bool):
        raise GrammarError(f"json: {str(schema)[:40]!r} is no schema: need an object or a boolean")
    if isinstance(schema, Mapping) and isinstance(schema.get("$id"), str):
        base = urljoin(base, schema["$id"])
    return Node(base, json.dumps(schema), schema)


class References:
    """The resources and anchors of a document, by absolute URI."""

    def __init__(self, document: Any, effort: Effort) -> None:
        self.effort = effort
        self.root = node(document, "")
        self._known: dict[str, Node] = {}
        self._num_dynamic: dict[str, int] = {}
        self._collect(document, "")

    def resolve(self, reference: Any, base: str) -> Node:
        """The schema that a `$ref` means.

        Raises:
            GrammarError: another document, or a place that does not exist.
        """
        if not isinstance(reference, str):
            raise GrammarError(f"json: $ref={reference!r}: need a text")
        inside = reference.startswith("#")
        target = urldefrag(base)[0] + reference if inside else urljoin(base, reference)
        resource, fragment = urldefrag(target)
        if f"{resource}#{fragment}" in self._known and fragment:
            return self._known[f"{resource}#{fragment}"]
        found = self._known.get(resource)
        if found is None:
            raise GrammarError(f"json: $ref={reference!r}: the document is not part of the schema")
        if not fragment:
            return found
        if not fragment.startswith("/"):
            raise GrammarError(f"json: $ref={reference!r}: there is no such anchor")
        schema, at = found.schema, found.base
        for raw in fragment[1:].split("/"):
            step = unquote(raw).replace("~1", "/").replace("~0", "~")
            try:
                schema = schema[int(step)] if isinstance(schema, list) else schema[step]
            except (KeyError, IndexError, ValueError, TypeError):
                raise GrammarError(f"json: $ref={reference!r}: there is no such place") from None
            if isinstance(schema, Mapping) and isinstance(schema.get("$id"), str):
                at = urljoin(at, schema["$id"])
        return node(schema, at)

    def dynamic(self, reference: Any, base: str) -> Node:
        """The schema that a `$dynamicRef` means, where no other can be meant.

        Raises:
            GrammarError: several schemas have the anchor, so that it depends on the way there; or
                see `resolve`.
        """
        name = str(reference).partition("#")[2]
        if self._num_dynamic.get(name, 0) > 1:
            raise GrammarError(f"json: $dynamicRef={reference!r}: several $dynamicAnchor {name!r}")
        return self.resolve(reference, base)

    def _collect(self, schema: Any, base: str) -> None:
        todo = [(schema, base, True)]
        while todo:
            schema, base, is_root = todo.pop()
            self.effort.check()
            if not isinstance(schema, Mapping):
                if is_root:
                    self._known[""] = node(schema, "")
                continue
            named = isinstance(schema.get("$id"), str)
            if named:
                base = urldefrag(urljoin(base, schema["$id"]))[0]
            if named or is_root:
                self._known[base] = Node(base, json.dumps(schema), schema)
                if is_root:
                    self.root = self._known[base]
            if isinstance(name := schema.get("$dynamicAnchor"), str):
                self._num_dynamic[name] = self._num_dynamic.get(name, 0) + 1
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(keyword), str):
                    self._known[f"{base}#{anchor}"] = Node(base, json.dumps(schema), schema)
            todo += [(child, base, False) for child in _children(schema)]


def _children(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The subschemas of a schema; values of `enum` and `const` are none."""
    for keyword in _IN_PLACE:
        if keyword in schema:
            yield schema[keyword]
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            yield from schema[keyword]
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), Mapping):
            yield from schema[keyword].values()
