"""Structural tags without an engine: where text is free, where a tag is, what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mini_vllm.structured_output import GrammarError, StructuredOutputsParams
from mini_vllm.structured_output.explain import allowed_bytes, machine_of

YES = {"type": "json_schema", "json_schema": {"type": "boolean"}}
TEXT = {"type": "any_text"}


def const(value: Any) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, end: Any, content: Any = YES) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(triggers: Any, found: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": found, **more}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def params(form: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(
        structural_tag=json.dumps({"type": "structural_tag", "format": form})
    )


def accepted(form: Any, texts: str) -> list[bool]:
    """Of each text, apart by a space, whether it is a whole one of the format."""
    made = machine_of(params(form))
    found = [made.run(made.initial, each.encode()) for each in texts.split(" ")]
    return [state is not None and state.accepting for state in found]


CALLS = tags(["<f"], [tag("<f>", "</f>"), tag("<fx>", "</fx>", const("2"))])


def test_text_is_free_until_a_trigger_and_after_a_tags_end():
    assert all(accepted(CALLS, "a  <f>true</f> x<f>false</f>y<<fx>2</fx>< <1>"))
    assert not any(
        accepted(CALLS, "a<f <f> <f>true <f>1</f> <fx>true</fx> <f>true</fx> <fy> a<fx>2")
    )


def test_after_a_trigger_each_tag_that_begins_with_it_can_follow_and_nothing_else():
    assert allowed_bytes(params(CALLS), "some <f")[-1].allowed == tuple(b">x")
    place = allowed_bytes(params(CALLS), "some <f>true</f>")[-1]
    assert place.may_end and len(place.allowed) == 256


def test_free_text_is_any_bytes_beside_tags_and_characters_where_there_are_none():
    assert machine_of(params(CALLS)).run(machine_of(params(CALLS)).initial, b"\xff\xc3a")
    alone = machine_of(params(TEXT))
    assert alone.run(alone.initial, "é".encode()) and not alone.run(alone.initial, b"\xff")


def test_a_tag_may_be_asked_for_first_and_may_be_the_last_thing():
    found = [tag("<f>", "!")]
    first = tags(["<f"], found, at_least_one=True)
    assert accepted(first, "<f>true! <f>true!a<f>true! a<f>true! ") == [True, True, False, False]
    last = tags(["<f"], found, stop_after_first=True)
    assert accepted(last, "a a<f>true! <f>true!a <f>true!<f>true!") == [True, True, False, False]
    both = tags(["<f"], found, at_least_one=True, stop_after_first=True)
    assert accepted(both, "<f>true! a<f>true! <f>true!a ") == [True, False, False, False]


def test_the_end_of_the_tag_around_it_ends_free_text():
    around = tag("(", ")", tags(["<f"], [tag("<f>", "!", TEXT)]))
    assert accepted(around, "() (a) (a)b (<f>)!) (a)) (<f>x!)") == [1, 1, 0, 1, 0, 1]
    several = tag("(", ["ab", "]"], {**TEXT, "excludes": ["q"]})
    assert accepted(several, "(ab (aab (b] (abab (q] (a]") == [1, 1, 1, 0, 0, 1]


def test_what_is_left_out_of_free_text_is_found_over_its_own_beginnings():
    without = {**TEXT, "excludes": ["aab", "é"]}
    assert accepted(without, "aaab aaa ab aé è aaaaaab") == [False, True, True, False, True, False]


def test_formats_follow_one_another_and_the_older_spelling_says_the_same():
    row = sequence(tag("", "</t>", TEXT), const("\n"), CALLS)
    assert accepted(row, "why</t>\na why</t>a </t>\n<f>true</f>") == [True, False, True]
    structures = [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}]
    older = StructuredOutputsParams(
        structural_tag=json.dumps({"structures": structures, "triggers": ["<f"]})
    )
    newer = params(tags(["<f"], [tag("<f>", "</f>")]))
    for text in ("a<f>true</f>b", "<f>1", "<g>"):
        assert allowed_bytes(older, text) == allowed_bytes(newer, text)


def test_json_in_tags_may_have_any_space_and_rules_of_equal_names_stay_apart():
    schemas = [{"type": "object", "properties": {"a": each}, "required": ["a"]}
               for each in ({"enum": ["x"]}, {"enum": ["y"]})]  # fmt: skip
    found = [tag(f"<{n}>", "!", {"type": "json_schema", "json_schema": schema})
             for n, schema in enumerate(schemas)]  # fmt: skip
    both = tags(["<"], found)
    assert accepted(both, '<0>{"a":"x"}! <1>{"a":"y"}! <0>{"a":"y"}!') == [True, True, False]
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}
    assert ord("\n") in allowed_bytes(params(both), "<0>{", **compact)[-1].allowed


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "not JSON"),
        ('{"format": {"type": "const_string", "value": "\\ud800"}}', "half of a surrogate pair"),
        (
            '{"format": %s}' % ('{"type": "sequence", "elements": [' * 3000 + "{}" + "]}" * 3000),
            "nested too deeply",
        ),
        ("[1]", "need an object of type 'structural_tag'"),
        ('{"type": "x", "format": {}}', "need an object of type 'structural_tag'"),
        ("{}", "need format, or structures and triggers"),
        ('{"structures": 1}', "structures=1: need a list"),
        ('{"structures": [], "triggers": ["a"]}', "tags=[]: need tags, at least one"),
        ('{"structures": [{"begin": "a", "end": "b"}]}', "structures: need schema"),
        (
            '{"structures": [{"begin": "a", "schema": {}, "end": ["b"]}], "triggers": ["a"]}',
            "end=['b']: need a text",
        ),
    ],
)
def test_what_is_not_a_structural_tag_is_refused(spec, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        machine_of(StructuredOutputsParams(structural_tag=spec))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "regex", "pattern": "a"}, "format 'regex': need one of any_text, const_string"),
        ({"type": "grammar", "grammar": ""}, "format 'grammar': need one of"),
        ({"value": "x"}, "format None: need one of"),
        ({**TEXT, "max_tokens": 3}, "any_text: max_tokens=3: need None"),
        ({**TEXT, "excludes": [""]}, "excludes=['']: need texts, none empty"),
        ({**TEXT, "other": 1}, "any_text: other=1: not supported"),
        (const(3), "value=3: need a text"),
        ({**YES, "style": "qwen_xml"}, "json_schema: style='qwen_xml': need 'json'"),
        ({"type": "json_schema"}, "json_schema: need json_schema"),
        ({**YES, "json_schema": "{}"}, "'{}': need an object, True or False"),
        ({**YES, "json_schema": {"uniqueItems": True}}, "uniqueItems"),
        (sequence(), "elements=[]: need formats"),
        (tag({"type": "token", "token": 1}, "b"), "need a text"),
        (tag("a", []), "end=[]: need a text, or texts, at least one"),
        (tag("a", "", TEXT), "end='': need a text that ends the free text"),
        (tag("a", "", sequence(TEXT, const("x"))), "need a text that ends the free text"),
        (tags([], [tag("a", "b")]), "triggers=[]: need texts, at least one"),
        (tags([""], [tag("a", "b")]), "triggers=['']"),
        (tags(["a"], []), "tags=[]: need tags, at least one"),
        (tags(["a"], [const("a")]), "begin=None: need one trigger that begins it"),
        (tags(["a"], [{**const("a"), "begin": "a"}]), "tag: value='a': not supported"),
        (tags(["a"], [{**tag("a", "b"), "type": "x"}]), "format 'x': need 'tag'"),
        (tags(["a"], [tag("a", "b"), tag("b", "c")]), "begin='b': need one trigger"),
        (tags(["a", "b"], [tag("a", "c")]), "trigger 'b': need a tag that begins with it"),
        (tags(["a"], [tag("a", "b")], at_least_one=1), "at_least_one=1: need True or False"),
        (tags(["ab", "b"], [tag("ab", "c"), tag("b", "c")]), "'b': need one that 'ab' lacks"),
        (tags(["b"], [tag("b", "c")], excludes=["abc"]), "'b': need one that 'abc' lacks"),
        (tag("(", "</f", tags(["<"], [tag("<f", "!")])), "'<': need one that '</f' lacks"),
    ],
)
def test_formats_and_fields_that_were_not_compared_are_refused_by_name(form, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        machine_of(params(form))


def test_the_standards_reading_has_no_structural_tags():
    with pytest.raises(GrammarError, match="structural_tag: need backend auto or xgrammar"):
        machine_of(params(CALLS), backend="guidance")
