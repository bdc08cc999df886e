"""Structural tags: free text, and from a trigger on one of the tags that begin with it.

Promises: free text holds any bytes but a trigger, what it excludes and what ends the tag around it;
whatever is read of a trigger, over however many tokens, counts; a tag is its `begin`, its content
and one of its ends; formats and options that were not compared with xgrammar are refused by name.
A special token stands for no text, so that none of them is part of a trigger.
Both spellings of `vllm/v1/structured_output/backend_xgrammar.py:93` `compile_grammar`: the older
one with `structures` and `triggers`, and xgrammar's own with `format`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_vllm.structured_output.expressions import (
    ANY_CHAR,
    EMPTY,
    Bytes,
    Call,
    Choice,
    Concat,
    Effort,
    Expression,
    Grammar,
    GrammarError,
    Repeat,
    choice,
    concat,
    text,
)

Fields = Mapping[str, Any]

REQUIRED = {
    "any_text": (),
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "sequence": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags"),
}
"""The formats, and the fields without a default."""

OPTIONAL: Mapping[str, Fields] = {
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "json_schema": {
        "style": "json", "any_order": False, "max_whitespace_cnt": None, "excludes": [],
    },
    "triggered_tags": {"at_least_one": False, "stop_after_first": False, "excludes": []},
}  # fmt: skip
"""The other fields that xgrammar writes, and their defaults."""

FREE = {
    ("any_text", "excludes"),
    *(("triggered_tags", each) for each in OPTIONAL["triggered_tags"]),
}
"""Optional fields whose value is free; of the others the default alone is supported."""

ALL_BYTES = (1 << 256) - 1


def parse_structural_tag(
    spec: str, parse_schema: Callable[[Any], Grammar], effort: Effort
) -> Grammar:
    """The grammar of a structural tag.

    Args:
        spec: its JSON text.
        parse_schema: the grammar of a JSON Schema.
        effort: what may be spent.

    Raises:
        GrammarError: not a structural tag, or a format, a field or a value that is not supported.
    """
    try:
        found = json.loads(spec)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise GrammarError("structural_tag: holds half of a surrogate pair") from None
    except ValueError as error:
        raise GrammarError(f"structural_tag: not JSON ({error})") from None
    if not isinstance(found, Mapping) or found.get("type", "structural_tag") != "structural_tag":
        raise GrammarError(f"structural_tag={spec[:60]!r}: need an object of type 'structural_tag'")
    if "structures" in found:
        found = {"format": _triggered_tags(found)}
    elif "format" not in found:
        raise GrammarError(f"structural_tag={spec[:60]!r}: need format, or structures and triggers")
    compiler = _Compiler(parse_schema, effort)
    root = compiler.format(found["format"], ())
    return Grammar({"root": root, **compiler.rules})


def _triggered_tags(found: Fields) -> Fields:
    """The older spelling in the words of the newer one."""
    structures = found["structures"]
    if not isinstance(structures, list):
        raise GrammarError(f"structures={structures!r}: need a list")
    tags = []
    for each in structures:
        known = _fields("structures", each, ("begin", "schema", "end"), {})
        if not isinstance(known["end"], str):
            raise GrammarError(f"structures: end={known['end']!r}: need a text")
        content = {"type": "json_schema", "json_schema": known["schema"]}
        tags.append({"begin": known["begin"], "content": content, "end": known["end"]})
    return {"type": "triggered_tags", "triggers": found.get("triggers"), "tags": tags}


def _fields(kind: str, found: Any, required: Sequence[str], optional: Fields) -> dict[str, Any]:
    """Every field of a format, those left out with their default."""
    if not isinstance(found, Mapping):
        raise GrammarError(f"{kind}: {found!r}: need an object")
    for name, value in found.items():
        if name not in (*required, *optional, "type"):
            raise GrammarError(f"{kind}: {name}={value!r}: not supported")
        if name in optional and (kind, name) not in FREE and value != optional[name]:
            raise GrammarError(f"{kind}: {name}={value!r}: need {optional[name]!r}")
    for name in required:
        if name not in found:
            raise GrammarError(f"{kind}: need {name}")
    return {**optional, **found}


def _texts(kind: str, name: str, value: Any, least: int) -> list[str]:
    """A list of texts that are not empty."""
    if (
        not isinstance(value, list)
        or len(value) < least
        or not all(isinstance(each, str) and each for each in value)
    ):
        wanted = "texts, at least one, none empty" if least else "texts, none empty"
        raise GrammarError(f"{kind}: {name}={value!r}: need {wanted}")
    return value


class _Compiler:
    """One structural tag on its way."""

    def __init__(self, parse_schema: Callable[[Any], Grammar], effort: Effort) -> None:
        self.parse_schema, self.effort = parse_schema, effort
        self.rules: dict[str, Expression] = {}
        self._schemas: dict[str, Expression] = {}
        self._num_texts = 0

    def format(self, found: Any, ends: Sequence[str]) -> Expression:
        """A format of any kind.

        Args:
            found: it.
            ends: of the tag around it; free text holds none of them.
        """
        kind = found.get("type") if isinstance(found, Mapping) else None
        if not isinstance(kind, str) or kind not in REQUIRED:
            named = ", ".join(REQUIRED)
            raise GrammarError(f"structural_tag: format {kind!r}: need one of {named}")
        known = _fields(kind, found, REQUIRED[kind], OPTIONAL.get(kind, {}))
        if kind == "any_text":
            excludes = [*_texts(kind, "excludes", known["excludes"], 0), *ends]
            return self.text(excludes, {}) if excludes else Repeat(ANY_CHAR, 0, None)
        if kind == "const_string":
            if not isinstance(known["value"], str):
                raise GrammarError(f"const_string: value={known['value']!r}: need a text")
            return text(known["value"])
        if kind == "json_schema":
            return self.schema(known["json_schema"])
        if kind == "sequence":
            if not isinstance(known["elements"], list) or not known["elements"]:
                raise GrammarError(f"sequence: elements={known['elements']!r}: need formats")
            return concat(*(self.format(each, ends) for each in known["elements"]))
        if kind == "tag":
            return self.tag(found, "")
        return self.triggered_tags(known, ends)

    def schema(self, schema: Any) -> Expression:
        """JSON of a schema; equal schemas share their rules."""
        if not isinstance(schema, Mapping | bool):
            raise GrammarError(f"json_schema: {schema!r}: need an object, True or False")
        key = json.dumps(schema)
        if key not in self._schemas:
            prefix = f"schema {len(self._schemas)} "
            grammar = self.parse_schema(schema)
            for name, body in grammar.rules.items():
                self.rules[prefix + name] = _renamed(body, prefix)
            self._schemas[key] = Call(prefix + grammar.root)
        return self._schemas[key]

    def tag(self, found: Any, trigger: str) -> Expression:
        """What follows a trigger that a tag begins with: the rest of `begin`, content, an end."""
        known = _fields("tag", found, REQUIRED["tag"], {})
        if known.get("type", "tag") != "tag":
            raise GrammarError(f"tags: format {known['type']!r}: need 'tag'")
        begin, end = known["begin"], known["end"]
        ends = [end] if isinstance(end, str) else end
        if not isinstance(begin, str):
            raise GrammarError(f"tag: begin={begin!r}: need a text")
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            raise GrammarError(f"tag: end={end!r}: need a text, or texts, at least one")
        seen = [each for each in ends if each]
        if not seen and _has_free_text(known["content"]):
            raise GrammarError(f"tag: end={end!r}: need a text that ends the free text")
        content = self.format(known["content"], seen)
        return concat(text(begin[len(trigger) :]), content, choice(map(text, ends)))

    def triggered_tags(self, known: Fields, ends: Sequence[str]) -> Expression:
        """Free text, and from a trigger on one of the tags that begin with it."""
        kind = "triggered_tags"
        triggers = _texts(kind, "triggers", known["triggers"], 1)
        excludes = [*_texts(kind, "excludes", known["excludes"], 0), *ends]
        for name in ("at_least_one", "stop_after_first"):
            if not isinstance(known[name], bool):
                raise GrammarError(f"{kind}: {name}={known[name]!r}: need True or False")
        if not isinstance(known["tags"], list) or not known["tags"]:
            raise GrammarError(f"{kind}: tags={known['tags']!r}: need tags, at least one")
        tags: dict[str, list[Any]] = {each: [] for each in triggers}
        for tag in known["tags"]:
            begin = tag.get("begin") if isinstance(tag, Mapping) else None
            found = [t for t in triggers if isinstance(begin, str) and begin.startswith(t)]
            if len(found) != 1:
                raise GrammarError(f"{kind}: begin={begin!r}: need one trigger that begins it")
            tags[found[0]].append(tag)
        for trigger, those in tags.items():
            around = [each for each in (*triggers, *excludes) if each != trigger]
            if (holder := next((e for e in around if trigger in e), None)) is not None:
                raise GrammarError(f"{kind}: trigger {trigger!r}: need one that {holder!r} lacks")
            if not those:
                raise GrammarError(f"{kind}: trigger {trigger!r}: need a tag that begins with it")
        first = choice(self.tag(each, "") for each in known["tags"])
        if known["at_least_one"] and known["stop_after_first"]:
            return first
        after = {t: choice(self.tag(each, t) for each in those) for t, those in tags.items()}
        free = self.text(excludes, after, not known["stop_after_first"])
        return concat(first, free) if known["at_least_one"] else free

    def text(
        self, excludes: Sequence[str], after: Mapping[str, Expression], goes_on: bool = True
    ) -> Expression:
        """Free text: one rule per state of an automaton that looks for all texts at once.

        A state is the longest end of what was read that some text begins with (Aho and Corasick,
        1975).

        Args:
            excludes: texts that it does not hold.
            after: by trigger, what follows it.
            goes_on: whether free text follows that again.
        """
        forbidden = [each.encode() for each in excludes]
        triggers = {trigger.encode(): body for trigger, body in after.items()}
        looked_for = [*forbidden, *triggers]
        begins = {each[:n] for each in looked_for for n in range(len(each))}
        letters = sorted({byte for each in looked_for for byte in each})
        self._num_texts += 1
        names = {state: f"text {self._num_texts} {state!r}" for state in begins}
        again = Call(names[b""]) if goes_on else EMPTY
        for state in sorted(begins):
            targets: dict[bytes, int] = defaultdict(int)
            targets[b""] = ALL_BYTES
            options: list[Expression] = [EMPTY]
            for byte in letters:
                self.effort.check()
                read, bit = state + bytes([byte]), 1 << byte
                targets[b""] &= ~bit
                if any(read.endswith(each) for each in forbidden):
                    continue
                found = [body for each, body in triggers.items() if read.endswith(each)]
                options += [concat(Bytes(bit), body, again) for body in found]
                if not found:
                    kept = next(read[n:] for n in range(len(read) + 1) if read[n:] in begins)
                    targets[kept] |= bit
            options += [concat(Bytes(of), Call(names[to])) for to, of in targets.items()]
            self.rules[names[state]] = Choice(tuple(options))
        return Call(names[b""])


def _has_free_text(found: Any) -> bool:
    """Whether a content has free text that only an end bounds."""
    kind = found.get("type") if isinstance(found, Mapping) else None
    if kind == "sequence" and isinstance(found.get("elements"), list):
        return any(map(_has_free_text, found["elements"]))
    return kind in ("any_text", "triggered_tags")


def _renamed(body: Expression, prefix: str) -> Expression:
    """The same with other names of rules."""
    if isinstance(body, Call):
        return Call(prefix + body.rule)
    if isinstance(body, Repeat):
        return Repeat(_renamed(body.body, prefix), body.least, body.most)
    if isinstance(body, Concat):
        return Concat(tuple(_renamed(each, prefix) for each in body.parts))
    if isinstance(body, Choice):
        return Choice(tuple(_renamed(each, prefix) for each in body.options))
    return body
