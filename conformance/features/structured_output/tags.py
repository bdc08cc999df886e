"""Record structural tags: the pin's door, its backend's grammar, and xgrammar's masks in it.

    course engine run -m conformance.record grammar_tags

Each specification goes through `vllm/v1/structured_output/backend_xgrammar.py:268`
`validate_xgrammar_grammar`. Those in `TAGS` are then compiled by
`vllm/v1/structured_output/backend_xgrammar.py:77` `XgrammarBackend.compile_grammar` and walked over
bytes and over the vocabulary of words of `masks.py`: tokens that its mask allows, drawn by seed,
often such as the specification itself is written with. A walk ends with a token of any kind.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

ABOUT = (
    'One line per specification and vocabulary: `{"vocabulary", "name", "spec", "texts": [[token, '
    '...]], "masks": ["hex of the number whose bit t is token t"], "real": [[index into masks, one '
    'per prefix, the empty one first]], "last": [[token, whether it is taken after the text]]}`. '
    'Before them `{"vocabulary": name, "tokens": [hex], "eos"}`, behind them `{"spec", "taken": '
    'whether the door takes it}`, and last `{"spec", "after": text, "mask": hex}`.'
)
WALKS = {"bytes": 30, "words": 8}
LONGEST = 48

BOOLEAN = {"type": "json_schema", "json_schema": {"type": "boolean"}}
CITY = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 14},
        },
        "required": ["city"],
    },
}  # fmt: skip
LIST = {"type": "json_schema", "json_schema": {"type": "array", "items": {"enum": ["<a>", "b", 1]}}}
TEXT = {"type": "any_text"}


def const(value: Any) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, end: Any, content: Any = BOOLEAN) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def tags(triggers: Any, found: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": found, **more}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def whole(form: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


_ONE = [tag("<f>", "</f>")]
_OLDER = [
    {"begin": "<function=city>", "schema": CITY["json_schema"], "end": "</function>"},
    {"begin": "<function=ok>", "schema": {"type": "boolean"}, "end": "</function>"},
]
_ANALYSIS = "<|channel|>analysis"
"""As `vllm/reasoning/gptoss_reasoning_parser.py:21` `no_func_reasoning_tag` has it."""

TAGS: dict[str, Any] = {
    "the older spelling": {
        "type": "structural_tag", "structures": _OLDER, "triggers": ["<function="],
    },
    "two tags, one trigger": whole(tags(["<f"], [tag("<f>", "</f>", CITY), tag("<fx>", "!")])),
    "two triggers": whole(tags(["<a", "[b"], [tag("<a>", "</a>"), tag("[b]", "[/b]", LIST)])),
    "one tag at least": whole(tags(["<f"], _ONE, at_least_one=True)),
    "one tag at most": whole(tags(["<f"], _ONE, stop_after_first=True)),
    "one tag": whole(tags(["<f"], _ONE, at_least_one=True, stop_after_first=True)),
    "text without some words": whole(tags(["<f"], _ONE, excludes=["aab", "ab>", "é"])),
    "a trigger that begins again": whole(tags(["aab"], [tag("aabaa", "aab", const("a"))])),
    "a trigger alone is the tag": whole(tags(["ab"], [tag("ab", "", LIST), tag("abc", "b")])),
    "an end that begins a trigger": whole(tags(["<f"], [tag("<f>", "<"), tag("<f1>", "<f")])),
    "equal begins": whole(tags(["<"], [tag("<f>", "1"), tag("<f>", "2", const("true"))])),
    "characters of several bytes": whole(tags(["é«"], [tag("é«è", "»", const("日本"))])),
    "tags in a tag": whole(tag("<o>", "</o>", tags(["<f"], [tag("<f>", "</", TEXT)]))),
    "tags in tags": whole(
        tags(["<o"], [tag("<o>", ["</o>", "|"], tags(["[f"], [tag("[f]", "!")]))])
    ),
    "several ends": whole(tag("(", ["aba", "b)", ""], TEXT)),
    "an end in text": whole(tag("(", "aab", sequence(TEXT, const("b")))),
    "reasoning, then tags": whole(
        sequence(tag("", "</think>", TEXT), const("\n"), tags(["<f"], _ONE, excludes=["<think>"]))
    ),
    "upstream's own": whole(
        tags([_ANALYSIS], [{"begin": _ANALYSIS + "<|message|>", "content": TEXT, "end": "<|end|>"}])
    ),
    "text alone": whole(sequence(const("a: "), TEXT, const("!"))),
    "JSON alone": whole(CITY),
}  # fmt: skip

DOOR: tuple[Any, ...] = (
    [1], {}, {"type": "x", "format": TEXT}, {"format": TEXT}, whole(True),
    {"structures": [], "triggers": ["a"]}, {"structures": _OLDER, "triggers": []},
    {"structures": _OLDER, "triggers": ["<function=", "<f"]}, {"structures": _OLDER},
    {"structures": [{"begin": "a", "schema": None, "end": "b"}], "triggers": ["a"]},
    {"structures": [{"begin": "a", "schema": {}, "end": ["b"]}], "triggers": ["a"]},
    {"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]},
    *map(whole, (
        {"type": "x"}, const(3), const(""), sequence(), tag("a", []), tag("a", "", TEXT),
        tag("a", "", sequence(TEXT, const("x"))), tag("a", "", tags(["b"], [tag("b", "c")])),
        {"type": "json_schema"}, {**BOOLEAN, "json_schema": "{}"}, {**BOOLEAN, "style": "x"},
        {**BOOLEAN, "json_schema": False}, {**TEXT, "excludes": [""]},
        tags([], _ONE), tags([""], _ONE), tags(["<f"], []), tags(["<f"], [const("<f>")]),
        tags(["<g"], _ONE), tags(["<f", "<g"], _ONE), tags(["<f", "<f"], _ONE),
        tags(["<f", "<f>"], _ONE), tags(["<f"], _ONE, excludes=[""]),
        tags(["<f"], _ONE, at_least_one=1), tags(["<f"], [{**_ONE[0], "type": "x"}]),
        {"type": "regex", "pattern": "a"}, {"type": "grammar", "grammar": 'root ::= "a"'},
        {"type": "or", "elements": [TEXT]}, {"type": "optional", "content": TEXT},
        {"type": "tags_with_separator", "tags": _ONE, "separator": ","},
        {"value": "no type"}, {**TEXT, "max_chars": 3}, {**TEXT, "other": 3},
        {**BOOLEAN, "style": "qwen_xml"}, {**BOOLEAN, "any_order": True},
        {**BOOLEAN, "json_schema": {"type": "array", "uniqueItems": True}},
        tags(["ab", "b"], [tag("ab", "!"), tag("bc", "!")]),
        tags(["b"], [tag("b", "!")], excludes=["abc"]), tag("(", "</f", tags(["<"], _ONE)),
    )),
)  # fmt: skip

DRAWN = 80
"""Specifications drawn by seed, of texts that overlap one another as often as not."""

OVERLOOKED = whole(tags(["abc", "b"], [tag("abc", "!"), tag("bd", "!")])), b"ab"
"""A text that ends with a trigger, inside of what another trigger begins with."""


def cases() -> Iterator[dict[str, Any]]:
    """Walks over bytes, over words, then what the door says of every specification."""
    from conformance.features.structured_output import peers
    from conformance.features.structured_output.masks import trained

    logging.disable(logging.ERROR)  # every refused token is reported
    _, words, end = trained()
    vocabularies = {"bytes": (peers.BYTES, peers.EOS), "words": (words, end)}
    for name, (tokens, eos) in vocabularies.items():
        hexed = [token.hex() for token in tokens]
        yield {"vocabulary": name, "tokens": hexed, "eos": eos}
        peer = peers.XGrammar(tokens, eos)
        asked = [(title, spec, WALKS[name]) for title, spec in TAGS.items()]
        if name == "bytes":
            seeds = (f"drawn {number}" for number in range(DRAWN))
            asked += [(seed, drawn(random.Random(seed)), 6) for seed in seeds]
        for title, spec, count in asked:
            walks = _Walks(peer, tokens, eos, spec, random.Random(f"{name} {title}"))
            yield {"vocabulary": name, "name": title, "spec": spec, **walks.taken(count)}
    for spec in (*TAGS.values(), *DOOR):
        yield {"spec": spec, "taken": door_takes(json.dumps(spec))}
    peer, (spec, text) = peers.XGrammar(), OVERLOOKED
    grammar = real_grammar(peer, json.dumps(spec))
    assert grammar.accept_tokens("", list(text))
    yield {"spec": spec, "after": text.decode(), "mask": hex(peer.mask(grammar.matcher))[2:]}


def drawn(rng: random.Random) -> dict[str, Any]:
    """Tags over three letters. No trigger stands in another, nor in what free text may not hold."""

    def some(least: int, most: int) -> str:
        return "".join(rng.choice("ab<") for _ in range(rng.randint(least, most)))

    while True:
        triggers = list({some(1, 3): None for _ in range(rng.randint(1, 2))})
        excludes = [some(1, 3) for _ in range(rng.randint(0, 2))]
        ends = [some(1, 3) for _ in range(rng.choice((0, 0, 1, 2)))]
        around = [*triggers, *excludes, *ends]
        if not any(t in each for t in triggers for each in around if each != t):
            break
    contents = (const(some(0, 2)), const("x"), LIST, TEXT)
    found = [
        tag(trigger + some(0, 2), some(1, 3), rng.choice(contents))
        for trigger in triggers
        for _ in range(rng.randint(1, 2))
    ]
    options = {each: rng.random() < 0.2 for each in ("at_least_one", "stop_after_first")}
    form = tags(triggers, found, excludes=excludes, **options)
    if ends:
        form = tag("[", ends, form)
    return whole(sequence(form, const(some(1, 2))) if rng.random() < 0.2 else form)


def door_takes(spec: str) -> bool:
    """Whether the real front door lets the specification through."""
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    asked: Any = SimpleNamespace(regex=None, choice=None, json=None, grammar=None)
    asked.structural_tag = spec
    params: Any = SimpleNamespace(structured_outputs=asked)
    try:
        validate_xgrammar_grammar(params)
    except ValueError:
        return False
    return True


def real_grammar(peer: Any, spec: str, num_drafts: int = 0) -> Any:
    """The grammar that the real backend makes of a specification."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    backend: Any = XgrammarBackend.__new__(XgrammarBackend)
    backend.compiler, backend.vocab_size = peer.compiler, peer.size
    backend.num_speculative_tokens, backend.disable_any_whitespace = num_drafts, True
    return backend.compile_grammar(StructuredOutputOptions.STRUCTURAL_TAG, spec)


def texts_in(found: Any) -> list[bytes]:
    """Every text in a specification."""
    if isinstance(found, str):
        return [found.encode()] if found else []
    values = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [text for each in values for text in texts_in(each)]


class _Walks:
    """Through one specification, over one vocabulary."""

    def __init__(
        self, peer: Any, tokens: Sequence[bytes], eos: int, spec: Any, rng: random.Random
    ) -> None:
        self.peer, self.tokens, self.eos, self.rng = peer, tokens, eos, rng
        self.spec, self.texts = json.dumps(spec), texts_in(spec)
        written = {byte for text in self.texts for byte in text} | set(b'{}[]",:0')
        self.near = {t for t, each in enumerate(tokens) if t != eos and set(each) <= written}

    def taken(self, count: int) -> dict[str, Any]:
        """So many walks, and what each was allowed on its way."""
        self.known: dict[int, int] = {}
        texts, masks, last = zip(*(self._walk() for _ in range(count)), strict=True)
        return {
            "texts": texts, "masks": [hex(mask)[2:] for mask in self.known], "real": masks,
            "last": last,
        }  # fmt: skip

    def _walk(self) -> tuple[list[int], list[int], tuple[int, bool]]:
        rng, grammar, text = self.rng, real_grammar(self.peer, self.spec), list[int]()
        masks = [mask := self.peer.mask(grammar.matcher)]
        self.coming = b""
        while len(text) < LONGEST and not (mask >> self.eos & 1 and rng.random() < 0.03):
            options = [t for t in range(self.peer.size) if mask >> t & 1 and t != self.eos]
            if not options:
                break
            text.append(self._next(options))
            assert grammar.accept_tokens("", text[-1:])
            masks.append(mask := self.peer.mask(grammar.matcher))
        token = self.eos if rng.random() < 0.5 else rng.randrange(self.peer.size)
        indices = [self.known.setdefault(mask, len(self.known)) for mask in masks]
        return text, indices, (token, bool(grammar.accept_tokens("", [token])))

    def _next(self, options: list[int]) -> int:
        """A token of one of the specification's texts, often; else one with its letters, or any."""
        rng = self.rng
        if not self.coming and rng.random() < 0.4:
            self.coming = rng.choice(self.texts)
        found = [t for t in options if self.tokens[t] and self.coming.startswith(self.tokens[t])]
        if not found:
            self.coming = b""
            found = [t for t in options if t in self.near and rng.random() < 0.9] or options
        token = rng.choice(found)
        self.coming = self.coming[len(self.tokens[token]) :]
        return token
