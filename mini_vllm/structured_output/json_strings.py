"""Conditions on strings: patterns, lengths, formats, and strings that are left out.

Promises: conditions are about the decoded characters, as the standard counts them; several hold
together. Patterns are searched for, not matched from end to end, and are read as ECMA 262 reads
them. JSON Schema 2020-12, validation section 6.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mini_vllm.structured_output.dfa import Dfa, combined, dfa_of, one_of
from mini_vllm.structured_output.expressions import ANY_CHAR, Effort, GrammarError, Repeat
from mini_vllm.structured_output.formats import FORMATS
from mini_vllm.structured_output.json_conditions import Shape
from mini_vllm.structured_output.regex import parse_regex, search

if TYPE_CHECKING:
    from mini_vllm.structured_output.json_schema import SchemaCompiler


class Strings:
    """The automata of one schema's strings, each made once."""

    def __init__(self, schema: SchemaCompiler, effort: Effort) -> None:
        self.schema, self.effort = schema, effort
        self._patterns: dict[str, Dfa] = {}

    def formats_of(self, shape: Shape) -> tuple[str, ...]:
        """Which formats are conditions: the known ones in xgrammar's reading. In the standard's a
        format says nothing of validity (section 7.2.1).

        Raises:
            GrammarError: an unknown one in xgrammar's reading.
        """
        if not self.schema.closed:
            return ()
        for name in shape.formats:
            if name not in FORMATS:
                raise GrammarError(f"json: format {name!r} is not supported")
        return shape.formats

    def pattern(self, pattern: str) -> Dfa:
        """The strings that a `pattern` finds something in."""
        if pattern not in self._patterns:
            try:
                self._patterns[pattern] = dfa_of(search(pattern, self.effort), self.effort)
            except GrammarError as error:
                raise GrammarError(f"json: pattern {error}") from None
        return self._patterns[pattern]

    def finds(self, pattern: str, key: str) -> bool:
        """Whether a `pattern` finds something in a key."""
        return self.pattern(pattern).accepts(key)

    def holds(self, shape: Shape, value: str) -> bool:
        """Whether a given string satisfies a shape's conditions."""
        long_enough = len(value) >= shape.shortest
        short_enough = shape.longest is None or len(value) <= shape.longest
        if value in shape.without or not (long_enough and short_enough):
            return False
        formats = self.formats_of(shape)
        return all(self.finds(each, value) for each in shape.patterns) and all(
            dfa_of(parse_regex(FORMATS[name]), self.effort).accepts(value) for name in formats
        )

    def dfa_of(self, shape: Shape) -> Dfa:
        """The strings, decoded, of a shape."""
        parts = [(self.pattern(each), True) for each in shape.patterns]
        for name in self.formats_of(shape):
            parts.append((dfa_of(parse_regex(FORMATS[name]), self.effort), True))
        if shape.without:
            parts.append((one_of(shape.without, self.effort), False))
        if shape.shortest or shape.longest is not None or not any(keep for _, keep in parts):
            length = Repeat(ANY_CHAR, shape.shortest, shape.longest)
            parts.append((dfa_of(length, self.effort), True))
        return combined(parts, self.effort)

    def language(self, shapes: list[Shape]) -> list[Dfa]:
        """The strings of any of the shapes, one automaton each."""
        found = []
        for shape in shapes:
            if "string" not in shape.types:
                continue
            if shape.values is not None:
                allowed = [v.value for v in shape.values if isinstance(v.value, str)]
                kept = [value for value in allowed if self.holds(shape, value)]
                found.append(one_of(kept, self.effort))
            else:
                found.append(self.dfa_of(shape))
        return [dfa for dfa in found if not dfa.is_empty]
