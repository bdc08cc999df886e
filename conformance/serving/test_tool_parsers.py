"""Our parsers of tool calls against the real ones, on texts in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import parts
from mini_vllm.entrypoints.openai.tool_parsers import (
    HermesStream,
    NamedStream,
    RequiredStream,
    parse_calls,
)

STREAMS: dict[str, Any] = {
    "hermes": HermesStream, "required": RequiredStream, "named": lambda: NamedStream("f"),
}  # fmt: skip


def nameless(delta: Any) -> Any:
    for call in (delta or {}).get("tool_calls") or ():
        if call.get("id") is not None:
            call["id"] = True
    return delta


def differing(kind: str, make: Any) -> tuple[int, int, str]:
    """Streams recorded, those that `make`'s parser answers otherwise, and the first of them."""
    count, wrong, first = 0, 0, ""
    for case in parts.load("tool_parsers"):
        if case["kind"] != kind:
            continue
        for lengths, deltas in case["cuts"]:
            parser, rest, said = make(), case["text"], []
            for length in lengths:
                piece, rest = rest[:length], rest[length:]
                said.append(nameless(parser.feed(piece)))
            count += 1
            if said != deltas:
                wrong += 1
                first = first or f"{case['text']!r} cut {lengths}: {deltas} theirs, {said} ours"
    return count, wrong, first


@pytest.mark.parametrize("kind", STREAMS)
def test_every_delta_of_the_real_parser_is_ours(kind: str) -> None:
    count, wrong, first = differing(kind, STREAMS[kind])
    assert count > 20
    assert wrong == 0, first


def test_a_whole_text_is_parsed_as_the_real_parser_does() -> None:
    for case in parts.load("tool_parsers"):
        if case["kind"] == "hermes":
            content, calls = parse_calls(case["text"])
            ours = [content, [[call.name, call.arguments] for call in calls]]
            assert ours == case["whole"], case["text"]
