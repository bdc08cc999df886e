"""From a JSON Schema to rules: what may be written so that the schema holds.

Promises: whatever is written to its end is JSON and satisfies the schema; keys come in the schema's
order, others after them; what cannot be kept is refused by name, never ignored. Subschemas become
rules by what they say, so that schemas that use themselves end. Mirrors
`vllm/v1/structured_output/backend_xgrammar.py:77` `XgrammarBackend.compile_grammar`; the refusals
are those of
`vllm/v1/structured_output/backend_xgrammar.py:221` `has_xgrammar_unsupported_json_features`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mini_vllm.structured_output.dfa import Dfa
from mini_vllm.structured_output.expressions import (
    EMPTY,
    NOTHING,
    Call,
    Effort,
    Expression,
    Grammar,
    GrammarError,
    Repeat,
    choice,
    concat,
    text,
)
from mini_vllm.structured_output.formats import FORMATS
from mini_vllm.structured_output.json_conditions import Shape
from mini_vllm.structured_output.json_numbers import fits, number_dfa, without_numbers
from mini_vllm.structured_output.json_objects import Objects
from mini_vllm.structured_output.json_references import Node, References
from mini_vllm.structured_output.json_shapes import Shapes
from mini_vllm.structured_output.json_strings import Strings
from mini_vllm.structured_output.json_text import (
    ARRAY,
    CHAR,
    INTEGER,
    NUMBER,
    QUOTE,
    STRING,
    VALUE,
    Spelling,
    decimal,
    is_number,
    spelled,
)

MAX_RULES = 20_000


def parse_json_schema(
    schema: Any, compact: bool, closed: bool, refuse_as_xgrammar: bool, effort: Effort
) -> Grammar:
    """The grammar of a schema.

    Args:
        schema: an object or a boolean.
        compact: `, ` and `: ` and no other space; else any space between the parts.
        closed: xgrammar's reading: an object has the properties that its schema names and no other,
            a tuple no more items, a format is a condition. Else the standard's.
        refuse_as_xgrammar: refuse what upstream refuses for xgrammar.
        effort: what may be spent.

    Raises:
        GrammarError: not a schema, a keyword that is not supported or refused, a schema that
            nothing satisfies, or too large.
    """
    if refuse_as_xgrammar and (refused := refused_by_xgrammar(schema)):
        raise GrammarError(f"json: {refused} is not supported by backend xgrammar")
    try:
        return SchemaCompiler(schema, compact, closed, effort).grammar()
    except RecursionError:
        raise GrammarError("json: the schema is nested too deeply") from None


def refused_by_xgrammar(schema: Any) -> str | None:
    """The first keyword that upstream refuses for xgrammar, wherever it stands; None if none."""
    todo = [schema]
    for found in todo:
        if isinstance(found, list):
            todo += [each for each in found if isinstance(each, Mapping)]
        if not isinstance(found, Mapping):
            continue
        kind = found.get("type")
        if kind in ("integer", "number") and "multipleOf" in found:
            return "multipleOf"
        of_kind = {
            "array": ("uniqueItems", "contains", "minContains", "maxContains"),
            "object": ("patternProperties", "propertyNames"),
        }.get(kind if isinstance(kind, str) else "", ())
        for key in of_kind:
            if key in found:
                return key
        if kind == "string" and "format" in found and found["format"] not in FORMATS:
            return f"format {found['format']!r}"
        todo += list(found.values())
    return None


class SchemaCompiler:
    """One schema on its way. Rules are named by the schemas that they must satisfy."""

    def __init__(self, schema: Any, compact: bool, closed: bool, effort: Effort) -> None:
        self.spelling = Spelling(compact)
        self.closed, self.effort = closed, effort
        references = References(schema, effort)
        self.root = (references.root,)
        self.shapes = Shapes(references, effort)
        self.strings = Strings(self, effort)
        self.objects = Objects(self)
        self.rules: dict[str, Expression] = {}
        self._names: dict[tuple[Node, ...], str] = {}
        self._todo: list[tuple[str, tuple[Node, ...]]] = []

    def grammar(self) -> Grammar:
        """All rules that the root needs, and those every schema may use."""
        self.rules |= self.spelling.shared_rules()
        root = self.call(self.root)
        while self._todo:
            name, nodes = self._todo.pop()
            self.rules[name] = self.any_of(self.shapes.of(nodes), name)
            self.effort.check()
            if len(self.rules) > MAX_RULES:
                raise GrammarError(f"json: the schema needs more than {MAX_RULES} rules")
        self.rules["root"] = root
        return Grammar(self.rules)

    def call(self, nodes: Sequence[Node]) -> Expression:
        """A value that satisfies all of these schemas; NOTHING where none can."""
        wanted = tuple(dict.fromkeys(each for each in nodes if each.schema is not True))
        if not wanted:
            return Call(VALUE)
        if any(each.schema is False for each in wanted):
            return NOTHING
        if wanted not in self._names:
            if not self.shapes.of(wanted):
                return NOTHING
            self._names[wanted] = f"schema {len(self._names)}"
            self._todo.append((self._names[wanted], wanted))
        return Call(self._names[wanted])

    def any_of(self, shapes: Sequence[Shape], name: str) -> Expression:
        """One of the shapes; `name` begins the names of rules that are added for it."""
        return choice(
            each for i, s in enumerate(shapes) for each in self.of_shape(s, f"{name}.{i}")
        )

    def of_shape(self, shape: Shape, name: str) -> list[Expression]:
        """The ways to satisfy a shape, one per type at most, or one per value."""
        if shape.is_free:
            return [Call(VALUE)]
        found: list[Expression] = []
        for word in ("null", "true", "false"):
            if word in shape.types:
                found.append(text(word))
        if shape.values is not None:
            loose = not self.closed
            for each in shape.values:
                if self._holds(shape, each.value):
                    found.append(self.spelling.value(each.value, loose))
                self.effort.check()
            return found
        if "number" in shape.types:
            found.append(self._number(shape, name))
        if "string" in shape.types:
            found.append(self._string(shape, name))
        if "array" in shape.types:
            found.append(self.array(shape, name))
        if "object" in shape.types:
            found.append(self.objects.of(shape, name))
        return [each for each in found if each != NOTHING]

    # ------------------------------------------------------------------ scalars

    def _number(self, shape: Shape, name: str) -> Expression:
        excluded = shape.multiples or shape.unlike or shape.broken
        if shape.low is None and shape.high is None and not excluded:
            if not shape.whole:
                return Call(NUMBER)
            if self.closed:
                return Call(INTEGER)
        dfa = number_dfa(
            shape.low, shape.high, shape.multiples, shape.whole, not self.closed, self.effort
        )
        dfa = without_numbers(dfa, shape.unlike, shape.broken, self.effort)
        return self.of_dfa(dfa, f"{name} number", plain=True)

    def _string(self, shape: Shape, name: str) -> Expression:
        conditions = shape.patterns, shape.without, self.strings.formats_of(shape)
        if not any(conditions):
            if shape.longest is None and shape.shortest == 0:
                return Call(STRING)
            return concat(QUOTE, Repeat(Call(CHAR), shape.shortest, shape.longest), QUOTE)
        dfa = self.strings.dfa_of(shape)
        body = self.of_dfa(dfa, f"{name} string")
        return NOTHING if body == NOTHING else concat(QUOTE, body, QUOTE)

    def of_dfa(self, dfa: Dfa, name: str, plain: bool = False) -> Expression:
        """A call of the automaton's rules; `plain`: its characters need no escape."""
        if dfa.is_empty:
            return NOTHING
        self.rules |= dfa.rules(name, spelled)
        return Call(name)

    def _holds(self, shape: Shape, value: Any) -> bool:
        """Whether one of a shape's values satisfies its other conditions."""
        if isinstance(value, str):
            return "string" in shape.types and self.strings.holds(shape, value)
        if is_number(value):
            exact = decimal(value)
            is_whole = exact == exact.to_integral_value()
            whole = (is_whole or not shape.whole) and not (is_whole and shape.broken)
            whole = whole and exact not in shape.unlike
            fit = fits(exact, shape.low, shape.high, shape.multiples)
            return "number" in shape.types and whole and fit
        kind = "array" if isinstance(value, list) else "object"
        if kind not in shape.types:
            return False
        free = replace(shape, values=None, types=frozenset({kind}))
        if free == Shape(types=frozenset({kind})):
            return True
        from mini_vllm.structured_output.json_values import satisfies

        return satisfies(self, free, value)

    # ------------------------------------------------------------------ arrays

    def array(self, shape: Shape, name: str) -> Expression:
        """The arrays of a shape."""
        least, most = shape.least_items, shape.most_items
        length = max((len(each.prefix) for each in shape.items), default=0)
        if self.closed and length and not any(each.rest for each in shape.items):
            most = length if most is None else min(most, length)
        if shape.unique and (most is None or most > 1):
            raise GrammarError("json: uniqueItems is not supported")
        if shape.contains:
            return self._containing(shape, name, length, most)
        if not shape.items and least == 0 and most is None:
            return Call(ARRAY)
        rest = self.call(self._at(shape, length))
        if rest == NOTHING:
            most = length if most is None else min(most, length)
        for index in range(length):
            if most is not None and index >= most:
                break
            if self.call(self._at(shape, index)) == NOTHING:
                most = index
        if most is not None and least > most:
            return NOTHING
        return self._sequence(shape, name, length, rest, most)

    def _sequence(
        self, shape: Shape, name: str, length: int, rest: Expression, most: int | None
    ) -> Expression:
        """Items one after the other, from the last to the first: what may follow each."""
        least = shape.least_items
        comma = self.spelling.comma
        length = length if most is None else min(length, most)
        after: Expression = EMPTY
        if most is None or most > length:
            room = None if most is None else most - length
            needed = max(0, least - length)
            if length == 0:
                room = None if room is None else room - 1
                more = Repeat(concat(comma, rest), max(0, needed - 1), room)
                after = concat(rest, more)
            else:
                after = Repeat(concat(comma, rest), needed, room)
        for index in range(length - 1, -1, -1):
            item = self.call(self._at(shape, index))
            body = concat(item, after) if index == 0 else concat(comma, item, after)
            if index and index >= least:
                body = choice([EMPTY, body])
            rule = f"{name} item {index}"
            self.rules[rule] = body
            after = Call(rule)
        options = [self.spelling.empty("[", "]")] if least == 0 else []
        if most is None or most > 0:
            options.append(self.spelling.bracketed("[", after, "]"))
        return choice(options)

    def _containing(self, shape: Shape, name: str, length: int, most: int | None) -> Expression:
        """Arrays in which enough items, and not too many, satisfy one more schema."""
        if len(shape.contains) > 1:
            raise GrammarError("json: more than one contains is not supported")
        wanted, enough, too_many = shape.contains[0]
        last = max(length, shape.least_items, most or 0)
        cap = enough if too_many is None else max(enough, too_many + 1)
        if (last + 1) * (cap + 1) > 2000:
            raise GrammarError("json: contains in arrays of this length is not supported")
        others = None
        if too_many is not None:
            others = self.objects.negation(wanted)
        comma = self.spelling.comma

        def rule(index: int, count: int) -> str:
            return f"{name} item {min(index, last)} {min(count, cap)} {int(index > 0)}"

        for index in range(last + 1):
            for count in range(cap + 1):
                for started in {int(index > 0), 1}:
                    options: list[Expression] = []
                    fine = too_many is None or count <= too_many
                    if index >= shape.least_items and count >= enough and fine and started:
                        options.append(EMPTY)
                    nodes = self._at(shape, index)
                    before = comma if started else EMPTY
                    if most is None or index < most:
                        hit = self.call((*nodes, wanted))
                        miss = self.call(nodes if others is None else (*nodes, others))
                        for item, total in ((hit, count + 1), (miss, count)):
                            if item != NOTHING and (too_many is None or total <= too_many):
                                target = rule(index + 1, total)
                                options.append(concat(before, item, Call(target)))
                    key = f"{name} item {index} {count} {started}"
                    self.rules[key] = choice(options)
        options = []
        if shape.least_items == 0 and enough == 0:
            options.append(self.spelling.empty("[", "]"))
        if most is None or most > 0:
            options.append(self.spelling.bracketed("[", Call(rule(0, 0)), "]"))
        return choice(options)

    @staticmethod
    def _at(shape: Shape, index: int) -> tuple[Node, ...]:
        """What an item at an index must satisfy."""
        found = []
        for each in shape.items:
            if index < len(each.prefix):
                found.append(each.prefix[index])
            elif each.rest is not None:
                found.append(each.rest)
        return tuple(found)
