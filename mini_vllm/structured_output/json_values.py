"""Whether a given array or object satisfies a shape: asked of the shape's own grammar.

Promises: a value of `enum` or `const` is judged by the rules that would write it, in any order of
its keys.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mini_vllm.structured_output.expressions import Grammar, GrammarError, choice
from mini_vllm.structured_output.json_conditions import Shape
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.network import compile_network

if TYPE_CHECKING:
    from mini_vllm.structured_output.json_schema import SchemaCompiler

MAX_ORDERS = 200


def orders(value: Any) -> Iterator[Any]:
    """The value with its keys, and those inside, in every order; at most `MAX_ORDERS` of them."""
    yield from itertools.islice(_orders(value), MAX_ORDERS)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in itertools.product(*(list(orders(item)) for item in value)):
            yield list(each)
    elif isinstance(value, dict):
        for keys in itertools.permutations(value):
            for values in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    else:
        yield value


def satisfies(schema: SchemaCompiler, shape: Shape, value: Any) -> bool:
    """Whether the value satisfies the shape."""
    judge = type(schema)(schema.root[0].schema, True, schema.closed, schema.effort)
    judge.shapes = schema.shapes
    options = judge.of_shape(shape, "judged")
    judge.rules["asked"] = choice(options)
    grammar = judge.grammar()
    try:
        rules = {**grammar.rules, "root": judge.rules["asked"]}
        machine = Machine(compile_network(Grammar(rules), schema.effort))
    except GrammarError:
        return False
    return any(
        (state := machine.run(machine.initial, json.dumps(each, ensure_ascii=False).encode()))
        is not None
        and state.accepting
        for each in orders(value)
    )
