"""Which texts xgrammar and llguidance take as JSON of a schema, beside what the standard says.

    course engine run -m conformance.record grammar_language

Texts are walks through what either library allows, and such walks with one byte changed, cut or
doubled; any space is allowed between parts. `valid` is `json.loads` and `jsonschema`, the judge.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from conformance.features.structured_output.texts import SCHEMAS

ABOUT = (
    'One line per schema: `{"schema", "texts": [[hex, valid, xgrammar, llguidance]]}`; a library '
    "that refuses the schema says null."
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 4}, {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{2,4}$"}, {"type": "string", "pattern": "b"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"},
    {"type": "number", "minimum": 1.5, "maximum": 3}, {"type": "integer", "exclusiveMinimum": 7},
    {"type": "number", "maximum": -0.5}, {"enum": [{"x": [1, 2]}, [True], "a"]}, {"const": 2.5},
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": "null"}},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]}, {"type": "number"},
    {"type": ["integer", "string"]}, {"minLength": 2}, {"type": "integer", "multipleOf": 3},
)  # fmt: skip
SCHEMA_LIST = (*SCHEMAS, *OTHERS)
WALKS = 30


def cases() -> Iterator[dict[str, Any]]:
    """Every schema with its texts and what is said of them."""
    import jsonschema  # type: ignore[import-untyped]

    from conformance.features.structured_output import peers as grammar_peers

    peers: tuple[Any, ...] = grammar_peers.XGrammar(), grammar_peers.LLGuidance()
    options: tuple[dict[str, Any], ...] = {"any_whitespace": True}, {"whitespace_flexible": True}
    for number, schema in enumerate(SCHEMA_LIST):
        rng = random.Random(f"language {number}")
        texts: dict[bytes, None] = {}
        usable = []
        for peer, wanted in zip(peers, options, strict=True):
            try:
                peer.matcher("json", schema, **wanted)
                usable.append((peer, wanted))
            except Exception:
                continue
        for peer, wanted in usable:
            for _ in range(WALKS):
                walked = _walk(peer, peer.matcher("json", schema, **wanted), rng)
                for text in (walked, _changed(walked, rng)):
                    texts[text] = None
        judge = jsonschema.Draft202012Validator(schema)
        rows = []
        for text in texts:
            said = [
                peer.is_text(peer.matcher("json", schema, **wanted), text)
                if (peer, wanted) in usable
                else None
                for peer, wanted in zip(peers, options, strict=True)
            ]
            rows.append([text.hex(), _is_valid(judge, text), *said])
        yield {"schema": schema, "texts": rows}


def _walk(peer: Any, matcher: Any, rng: random.Random) -> bytes:
    """Bytes that a library allows, one after the other, until it may end; spaces are rare."""
    text = bytearray()
    while len(text) < 60:
        mask = peer.mask(matcher)
        options = [byte for byte in range(256) if mask >> byte & 1]
        if not options or (mask >> 256 & 1 and rng.random() < 0.4):
            break
        spaces = [byte for byte in options if byte in b" \t\r\n"]
        closing = [byte for byte in options if byte in b'"]},:']
        plain = [byte for byte in options if 33 <= byte < 127]
        kind = rng.random()
        if spaces and kind < 0.05:
            options = spaces
        elif closing and kind < 0.5:
            options = closing
        elif plain and kind < 0.97:
            options = plain
        byte = rng.choice(options)
        assert peer.accept(matcher, byte)
        text.append(byte)
    return bytes(text)


def _changed(text: bytes, rng: random.Random) -> bytes:
    """One byte cut, doubled or changed."""
    if not text:
        return b" "
    at = rng.randrange(len(text))
    new = rng.choice((b"", text[at : at + 1] * 2, bytes([rng.randrange(32, 127)])))
    return text[:at] + new + text[at + 1 :]


def _is_valid(judge: Any, text: bytes) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        value = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except (ValueError, UnicodeDecodeError):
        return False
    return bool(judge.is_valid(value))
