"""Our parsers of tool calls against the real ones, on texts in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from conformance import parts
from mini_vllm.entrypoints.openai.reasoning_parsers import (
    END,
    START,
    ReasoningFirst,
    Tags,
    ThinkingStream,
    parse_reasoning,
)
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


def test_every_delta_of_the_real_reasoning_parser_is_ours() -> None:
    tags, count = Tags(1, 2), 0
    for case in parts.load("reasoning_parsers"):
        for lengths, deltas in case["cuts"]:
            tools = HermesStream() if case["tools"] else None
            parser = ReasoningFirst(ThinkingStream(tags), tools, case["prompt_ended"])
            rest, said = list(case["pieces"]), []
            for length in lengths:
                taken, rest = rest[:length], rest[length:]
                ids = [{START: 1, END: 2}.get(piece, 3) for piece in taken]
                said.append(nameless(parser.feed("".join(taken), ids)))
            count += 1
            assert said == deltas, (case["pieces"], case["tools"], case["prompt_ended"], lengths)
    assert count > 300


def test_a_whole_text_is_split_as_the_real_parser_does() -> None:
    for case in parts.load("reasoning_parsers"):
        assert list(parse_reasoning("".join(case["pieces"]))) == case["whole"]


def test_a_vocabulary_without_the_tags_is_refused() -> None:
    with pytest.raises(ValueError, match="no token </think>"):
        Tags.of({START: 1})
    assert Tags.of({START: 1, END: 2}).ended([1, 5, 2, 7])
    assert not Tags(1, 2).ended([2, 5, 1])
