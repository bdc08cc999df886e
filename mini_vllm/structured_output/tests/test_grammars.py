"""Grammars without an engine: what they accept, what they refuse, how large they may become."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from mini_vllm.structured_output import GrammarError, StructuredOutputsParams, compiler
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.ebnf import parse_ebnf
from mini_vllm.structured_output.explain import allowed_bytes, machine_of
from mini_vllm.structured_output.expressions import (
    Chars,
    Concat,
    Effort,
    Grammar,
    Literal,
    concat,
)
from mini_vllm.structured_output.json_conditions import Properties, Shape
from mini_vllm.structured_output.json_references import node
from mini_vllm.structured_output.json_schema import SchemaCompiler, refused_by_xgrammar
from mini_vllm.structured_output.machine import MAX_ITEMS, Machine
from mini_vllm.structured_output.masks import allocate_bitmask, apply_row, pack, row_of, unpack
from mini_vllm.structured_output.matcher import Matcher
from mini_vllm.structured_output.network import MAX_STATES, compile_network
from mini_vllm.structured_output.utf8 import byte_sequences
from mini_vllm.structured_output.vocabulary import Vocabulary
from mini_vllm.tokenizer import ByteTokenizer

BYTES = Vocabulary.of(ByteTokenizer(), [256])
CHARS = Chars(((97, 98),))


def machine(kind: str, spec: Any, compact: bool = True, closed: bool = True) -> Machine:
    text = json.dumps(spec) if kind in ("json", "choice") else spec
    effort = Effort(seconds=math.inf)  # how fast the machine is does not matter here
    grammar = grammar_of((kind, text, compact, closed), effort=effort)
    return Machine(compile_network(grammar, effort))


def accepts(made: Machine, text: str) -> bool:
    state = made.run(made.initial, text.encode())
    return state is not None and state.accepting


# ------------------------------------------------------------------ regex


@pytest.mark.parametrize(
    "pattern",
    [
        "a+a",
        "[0-9]+5",
        "(ab|a)(c|bcd)*",
        "a?b?c?",
        "(a|b)*abb",
        "a{2,3}b{0,2}",
        "(a{2}){2}",
        "[^ab]c|ab",
        "(a|b|)c",
        "((a|c)(b|)){1,2}",
        "a*?b+?",
        "[a-b]{2,}",
        "(a*)*b",
        "c{0}a",
    ],
)
def test_a_regex_accepts_what_re_matches_from_end_to_end(pattern):
    made = machine("regex", pattern)
    texts = map("".join, itertools.chain(*(itertools.product("abc5", repeat=n) for n in range(6))))
    assert not [t for t in texts if accepts(made, t) != bool(re.fullmatch(pattern, t))]


def test_classes_are_sets_of_code_points_and_never_half_a_character():
    made = machine("regex", "[é-ü]+|日?[α-ω]")
    assert accepts(made, "éü") and accepts(made, "日ω") and not accepts(made, "z")
    state = made.run(made.initial, b"\xc3")
    assert state is not None and not state.accepting
    assert all(0x80 <= byte <= 0xBF for byte in range(256) if state.allowed >> byte & 1)


@pytest.mark.parametrize("span", [(0, 0x10FFFF), (0x7F, 0x800), (0xE000, 0x10000), (0x3B1, 0x3C9)])
def test_byte_sequences_are_the_utf8_of_a_range(span):
    low, high = span
    edges = [c for c in (low, high, low - 1, high + 1, 0x7FF, 0xFFFF, 0x10000) if 0 <= c < 0x110000]
    found = list(byte_sequences([span] if span[0] else [(0, 0xD7FF), (0xE000, high)]))
    for code in edges:
        if not 0xD800 <= code <= 0xDFFF:
            data = chr(code).encode()
            inside = any(
                len(s) == len(data) and all(a <= b <= c for b, (a, c) in zip(data, s, strict=True))
                for s in found
            )
            assert inside == (low <= code <= high), hex(code)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)b", "lookahead"),
        ("(?<!a)b", "lookbehind"),
        ("(a)\\1", "a backreference"),
        ("\\bfoo", "a word boundary"),
        ("(?i)a", "flags in a group"),
        ("(?P<n>a)", "named group"),
        ("\\p{L}", "a Unicode property"),
        ("a**", "two repetitions in a row"),
        ("[]", "an empty class"),
        ("*a", "with nothing to repeat"),
        ("a{2,1}", "at least 2 and at most 1"),
        ("a^", "after the"),
        ("[z-a]", "reversed"),
        ("(a", "without ')'"),
        ("a)", "without '('"),
        ("a$b", "before the end"),
        ("[a", "without ']'"),
        ("\\", "a backslash at the end"),
        ("a{,3}", "repetition count"),
        ("\\xg0", "hexadecimal"),
        ("\\q", "the escape"),
        ("a{9999999}", "more than 100000"),
    ],
)
def test_what_is_no_regular_expression_here_is_refused_by_name(pattern, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        machine("regex", pattern)


# ------------------------------------------------------------------ masks and tokens


def test_a_token_is_allowed_when_its_bytes_never_leave_the_language():
    words = [b"0", b"x", b"0x", b"1", b"a", b"ff", b"1x", b"q", b"@", b"zz", b"", None]
    vocabulary = Vocabulary([*words, b"</s>"], [12])
    made = machine("regex", "0x[0-9a-f]+")
    matcher = Matcher(made, vocabulary)
    seen = []
    for token in (0, 1, 5):
        seen.append(set(np.flatnonzero(~matcher.forbidden()).tolist()))
        assert matcher.accept_tokens("r", [token])
    seen.append(set(np.flatnonzero(~matcher.forbidden()).tolist()))
    assert seen == [{0, 2}, {1}, {0, 3, 4, 5}, {0, 3, 4, 5, 12}]


def test_bits_are_packed_as_the_real_engine_packs_them():
    allowed = sum(1 << token for token in (0, 31, 32, 39))
    row = pack(allowed, 40)
    assert row.tolist() == [-2147483647, 129] and row.dtype == np.int32
    assert np.flatnonzero(unpack(row, 40)).tolist() == [0, 31, 32, 39]
    masked = apply_row(np.arange(40, dtype=np.float32), row)
    assert np.flatnonzero(np.isfinite(masked)).tolist() == [0, 31, 32, 39]
    assert allocate_bitmask(2, 40).tolist() == [[-1, -1]] * 2


def test_a_mask_is_worked_out_once_per_state():
    made = machine("regex", "[0-9]+")
    first = made.run(made.initial, b"1")
    second = made.run(made.initial, b"77")
    assert first is second is not None
    assert row_of(made, first, BYTES) is row_of(made, second, BYTES)


def test_a_matcher_takes_back_what_it_accepted_and_the_end_too():
    matcher = Matcher(machine("regex", "[0-9]+"), BYTES)
    before = matcher.forbidden()
    assert matcher.accept_tokens("r", [49, 50]) and matcher.is_accepting()
    assert not matcher.is_terminated() and matcher.accept_tokens("r", [256])
    assert matcher.is_terminated() and matcher.forbidden() is None
    row = np.zeros((1, 9), np.int32)
    matcher.fill_bitmask(row, 0)
    assert (row == -1).all() and not matcher.accept_tokens("r", [49])
    matcher.rollback(3)
    assert matcher.forbidden() is before
    with pytest.raises(ValueError, match="num_tokens=1"):
        matcher.rollback(1)


def test_validating_says_how_far_drafts_would_go_and_advances_nothing():
    matcher = Matcher(machine("choice", ["yes", "no"]), BYTES)
    assert matcher.validate_tokens([*b"yes", 256, 1]) == [*b"yes", 256]
    assert matcher.validate_tokens(list(b"nay")) == [*b"n"]
    assert matcher.num_accepted == 0


# ------------------------------------------------------------------ EBNF


def test_rules_nest_and_a_rule_may_begin_with_itself_directly():
    made = machine(
        "grammar",
        'root ::= expr # sums\nexpr ::= expr "+" term | term\nterm ::= "(" expr ")" | [0-9]+',
    )
    good = ["1", "1+22", "((1)+(2+3))+4"]
    assert all(accepts(made, text) for text in good)
    assert not any(accepts(made, text) for text in ["", "1+", "(1", "1)", "+1"])


def test_two_readings_of_one_text_are_followed_together():
    made = machine("grammar", 'root ::= s\ns ::= "(" s ")" s | "(" s ")" | ""')
    assert accepts(made, "(()())()") and not accepts(made, "(()")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('top ::= "a"', "no rule named 'root'"),
        ("root ::= a", "'a', which is undefined"),
        ('root ::= a\na ::= b "x" | "y"\nb ::= a', "begins with itself"),
        ('root ::= "a" (="b")', "lookahead"),
        ('root ::= "a', "closing quote"),
        ('root ::= TagDispatch("a")', "macro 'TagDispatch'"),
        ("root ::=", "need an element"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= root "a"', "no text"),
    ],
)
def test_what_is_no_grammar_here_is_refused_by_name(source, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        compile_network(parse_ebnf(source))


# ------------------------------------------------------------------ JSON Schema


def test_json_is_written_in_the_schemas_order_with_xgrammars_spaces():
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "y"]}},
        "required": ["b"],
    }
    made = machine("json", schema)
    assert accepts(made, '{"b": 1, "a": "x"}') and accepts(made, '{"b": -7}')
    for wrong in ('{"a": "x", "b": 1}', '{"b":1}', '{"b": 01}', '{"b": 1, "c": 2}', "{}"):
        assert not accepts(made, wrong)
    free = machine("json", schema, compact=False)
    assert accepts(free, '{ "b" :\n1 , "a": "y" }') and not accepts(free, ' {"b": 1}')


def test_a_schema_may_use_itself():
    tree = {
        "$defs": {
            "t": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}},
                },
                "required": ["v"],
            }
        },
        "$ref": "#/$defs/t",
    }
    made = machine("json", tree)
    assert accepts(made, '{"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}')
    assert not accepts(made, '{"v": 1, "kids": [{}]}')


@pytest.mark.parametrize("seed", range(6))
def test_bounds_of_numbers_are_kept_to_the_last_digit(seed):
    rng = random.Random(seed)
    low = rng.choice([-12.5, -3, 0, 0.25, 7, 99])
    high = low + rng.choice([0.75, 1, 13, 100.5])
    schema: dict[str, Any] = {"type": "number", "minimum": low, "exclusiveMaximum": high}
    if seed % 2:
        schema["multipleOf"] = 0.25
    made = machine("json", schema)
    for _ in range(300):
        value = round(rng.uniform(low - 3, high + 3), rng.choice([0, 1, 2]))
        value = rng.choice([value, low, high, low + 0.25])
        text = f"{value:.2f}".rstrip("0").rstrip(".")
        if text != "-0":
            fits = low <= value < high and (seed % 2 == 0 or value % 0.25 == 0)
            assert accepts(made, text) == fits, (schema, text)


def test_conditions_on_a_string_hold_together_and_count_characters():
    schema = {
        "type": "string",
        "pattern": '^[a-zé"]+$',
        "minLength": 2,
        "maxLength": 3,
        "not": {"enum": ["abc"]},
    }
    made = machine("json", schema)
    assert accepts(made, '"éé"') and accepts(made, '"a\\"b"') and accepts(made, '"abd"')
    assert not any(accepts(made, t) for t in ('"a"', '"abcd"', '"abc"', '"aB"', '"a"b"'))


def test_what_is_not_allowed_is_written_as_little_as_what_is_not_meant():
    made = machine("json", {"type": "number", "not": {"enum": [1, 2.5]}})
    assert all(accepts(made, text) for text in ("0", "11", "2.51", "-1", "2.05"))
    assert not any(accepts(made, text) for text in ("1", "1.0", "2.5", "2.50"))
    one_of = {"oneOf": [{"type": "integer"}, {"minimum": 2, "type": "number"}]}
    made = machine("json", one_of, closed=False)
    assert accepts(made, "1") and accepts(made, "2.5")
    assert not accepts(made, "3") and not accepts(made, "3.0") and not accepts(made, "1.5")


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "multipleOf": 2}, "multipleOf"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"type": "array", "contains": {}}}}, "contains"),
        ({"type": "string", "format": "nonsense"}, "format 'nonsense'"),
        ({"anyOf": [{"type": "object", "patternProperties": {}}]}, "patternProperties"),
        ({"type": "object", "propertyNames": {}}, "propertyNames"),
    ],
)
def test_what_upstream_refuses_for_xgrammar_is_refused_by_name(schema, keyword):
    assert refused_by_xgrammar(schema) == keyword
    params = StructuredOutputsParams(json=schema)
    with pytest.raises(GrammarError, match=f"{keyword} is not supported by backend xgrammar"):
        machine_of(params, backend="xgrammar")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "other.json"}, "not part of the schema"),
        ({"$ref": "#/nowhere"}, "no such place"),
        ({"$ref": "#"}, "defined by itself"),
        ({"type": "text"}, "type='text'"),
        (False, "no text"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$dynamicRef": "#a"}, "no such anchor"),
        ({"not": {"pattern": "a"}}, "pattern inside of not"),
        ({"minLength": -1}, "minLength=-1"),
        ({"required": "a"}, "required"),
        ({"pattern": "(?=a)"}, "lookahead"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text"),
    ],
)
def test_what_cannot_be_kept_of_a_schema_is_refused_by_name(schema, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        machine("json", schema)


# ------------------------------------------------------------------ bounds

HOSTILE: tuple[tuple[str, Any], ...] = (
    ("regex", "(a{1000}){1000}"),
    ("regex", "a{100000}"),
    ("regex", "(a|a)*b"),
    ("regex", "((a*)*)*b"),
    ("regex", "[ab]*a[ab]{200}"),
    ("regex", "((a?){1000}){1000}"),
    ("regex", "(" * 2000 + ")" * 2000),
    ("regex", "|".join("a" * n for n in range(1, 400))),
    ("json", {"enum": list(range(20_000))}),
    ("json", {"type": "string", "maxLength": 10**9}),
    ("json", {"type": "array", "maxItems": 10**7}),
    ("json", {"type": "string", "pattern": "(a|b)*a(a|b){20}"}),
    ("json", {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(12)]}),
    (
        "json",
        {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(5000)}},
    ),
    ("grammar", 'root ::= "(" root ")" root | "(" root root | ""'),
    ("grammar", 'root ::= "a"' + "*" * 5000),
)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), HOSTILE, ids=lambda each: str(each)[:30])
def test_a_hostile_constraint_is_refused_or_stays_within_its_bounds(kind, spec):
    try:
        made = machine(kind, spec)
    except GrammarError as error:
        assert str(error)
        return
    assert len(made.network.moves) <= MAX_STATES
    state = made.initial
    for byte in b"a" * 40:
        state = made.step(state, byte) or made.initial
        assert len(state.moves) <= MAX_ITEMS


def test_a_compilation_whose_time_is_up_ends_with_an_error():
    with pytest.raises(GrammarError, match=r"more than 0\.8 s"):
        grammar_of(("json", '{"minimum": 1}', True, True), effort=Effort(seconds=-1.0))
    with pytest.raises(GrammarError, match=r"more than 0\.8 s"):
        compile_network(grammar_of(("regex", "a", False, False)), Effort(seconds=-1.0))
    with pytest.raises(GrammarError, match="cancelled"):
        compile_network(grammar_of(("regex", "a", False, False)), Effort(cancelled=True))


@pytest.mark.slow
def test_a_constraint_that_grows_too_large_is_refused_with_its_bound():
    with pytest.raises(GrammarError, match="more than 60000 states"):
        machine("regex", "a{100000}")


# ------------------------------------------------------------------ to look at


def test_places_say_what_may_come_what_must_and_where_the_text_may_end():
    params = StructuredOutputsParams(regex="abc(d|e)?")
    places = allowed_bytes(params, "abc")
    assert [bytes(place.allowed) for place in places] == [b"a", b"b", b"c", b"de"]
    assert places[0].forced == b"abc" and places[3].may_end and not places[2].may_end
    assert len(allowed_bytes(params, "aX")) == 2


def test_neighbouring_literals_are_joined_once_and_not_copied_for_each():
    class Once(bytes):
        def __add__(self, other):
            raise AssertionError("a copy of everything before, for each neighbour")

    parts = [Literal(Once(b"ab"))] * 1000
    assert concat(*parts) == Literal(b"ab" * 1000)
    inner = [Concat((Literal(b"a"), CHARS)), Literal(b"b"), Literal(b"c"), CHARS]
    assert concat(*inner) == Concat((Literal(b"a"), CHARS, Literal(b"bc"), CHARS))


def test_the_names_of_an_object_are_walked_once_and_not_for_each_name():
    walks = 0

    class Walked(tuple):
        def __iter__(self):
            nonlocal walks
            walks += 1
            return super().__iter__()

    compiler = SchemaCompiler({}, True, True, Effort(seconds=math.inf))
    named = Walked((f"p{i}", node({"type": "integer"}, "")) for i in range(500))
    compiler.objects.of(Shape(objects=(Properties(named, (), None),)), "root")
    assert walks < 5


SPENT = {
    "a long pattern": ("regex", "[ab]" * 250_000),
    "alternatives": ("regex", "a|" * 500_000 + "b"),
    "a class": ("regex", "[" + "a-b" * 300_000 + "]"),
    "rules": ("grammar", "root ::= " + '"a" | ' * 150_000 + '"b"'),
    "a text": ("grammar", 'root ::= "' + "a" * 1_000_000 + '"'),
    "required": ("json", json.dumps({"type": "object", "required": [f"{i}" for i in range(9000)]})),
    "enum": ("json", json.dumps({"enum": [f"a{i}" for i in range(90_000)]})),
    "anyOf": ("json", json.dumps({"anyOf": [{"const": i} for i in range(200)]})),
    "pattern": ("json", json.dumps({"type": "string", "pattern": "a" * 10_000})),
}


@pytest.mark.parametrize("name", SPENT)
def test_parsing_asks_what_it_may_still_spend(name):
    with pytest.raises(GrammarError, match="takes more than"):
        grammar_of((*SPENT[name], False, False), effort=Effort(seconds=-1.0))


def test_what_one_thread_has_parsed_another_finds(monkeypatch):
    parsed = []
    monkeypatch.setattr(
        compiler, "grammar_of", lambda key, *_: parsed.append(key) or Grammar({"root": CHARS})
    )
    parser = compiler.GrammarParser(refuse_as_xgrammar=False)
    key = ("regex", "a+", False, False)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(parser.parse, key).result()
    assert parser.parse(key) is parser.parse(key) and parsed == [key]
    for index in range(3):  # the longest that are allowed: two of them are kept
        parser.parse(("regex", "a" * compiler.MAX_SPEC + str(index), False, False))
    parser.parse(key)
    assert len(parsed) == 5


def test_compiled_grammars_are_kept_by_their_size_too(monkeypatch):
    monkeypatch.setattr(compiler, "MAX_KEPT_STATES", 1_000)
    made = compiler.GrammarCompiler(lambda: BYTES)

    def use(pattern: str) -> None:
        key = ("regex", pattern, False, False)
        compilation = made.submit(key, grammar_of(key))
        compilation.future.result()
        made.release(compilation)

    for index in range(4):
        use(".{400}" + str(index))
    use("a")
    assert made.num_compiled == 5
    use(".{400}3")  # used last: still there
    assert made.num_compiled == 5
    use(".{400}0")
    assert made.num_compiled == 6
