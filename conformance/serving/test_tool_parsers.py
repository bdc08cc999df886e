"""Our parsers of tool calls against the real ones, on texts in pieces."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance import parts
from mini_vllm.entrypoints.openai import tool_parsers
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


cases = functools.cache(parts.load)


def nameless(delta: Any) -> Any:
    for call in (delta or {}).get("tool_calls") or ():
        if call.get("id") is not None:
            call["id"] = True
    return delta


def differing(kind: str, make: Any) -> tuple[int, int, str]:
    """Streams recorded, those that `make`'s parser answers otherwise, and the first of them."""
    count, wrong, first = 0, 0, ""
    for case in cases("tool_parsers"):
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_every_delta_of_the_real_parser_is_ours(kind: str) -> None:
    count, wrong, first = differing(kind, STREAMS[kind])
    assert count > 20
    assert wrong == 0, first


def test_a_whole_text_is_parsed_as_the_real_parser_does() -> None:
    for case in cases("tool_parsers"):
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


WRONG = (
    (
        "holds nothing back",
        "for count in range(min(len(tag) - 1, len(text)), 0, -1):",
        "for count in ():",
    ),
    ("sends text behind a call", "        end = self.text.find(OPEN)\n", "        end = -1\n"),
    ("counts what was sent from the start", "            self.num_sent = end\n", ""),
    ("names a call again", "                sent.name = name[1]\n", ""),
    (
        "skips a call without a name",
        "                    break  # calls are told in their order",
        "                    continue",
    ),
    (
        "numbers every call 0",
        '"type": "function", "index": index,',
        '"type": "function", "index": 0,',
    ),
    ("keeps the brace that ends a call", '.removesuffix("}")', ""),
    (
        "forgets what was sent of the arguments",
        "sent.arguments = arguments[len(sent.arguments) :], arguments",
        'sent.arguments = arguments[len(sent.arguments) :], ""',
    ),
    ("waits for the end tag", "bodies.append((rest, _is_json(rest)))", "pass"),
    (
        "holds no end tag back",
        "rest = rest[: len(rest) - held_back(rest, CLOSE)].strip()",
        "rest = rest.strip()",
    ),
    (
        "reads no call after the first",
        "            at = self.text.find(OPEN, end + len(CLOSE))",
        "            at = -1",
    ),
    ("names a forced call each time", "            self.begun = True\n", ""),
    ("counts braces after the piece", 'depth = before.count("{") - before.count("}")', "depth = 0"),
    ("stops at no comma", '        elif character == ",":\n            break\n', ""),
    (
        "names a required call at once",
        "if not calls or not (closes or _PARAMETERS.search(calls[-1])):",
        "if not calls:",
    ),
    (
        "never begins the next call",
        "            self.named = False\n            return None\n",
        "            return None\n",
    ),
)
"""Wrong parsers, each one edit away from the right one: its name, what is replaced, by what."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "old", "new"), WRONG, ids=[name for name, *_ in WRONG])
def test_the_recorded_streams_catch_a_parser_that(name: str, old: str, new: str) -> None:
    source = Path(tool_parsers.__file__).read_text(encoding="utf-8")
    assert source.count(old) >= 1, "the parser has changed: mend the mutant"
    module = ModuleType("wrong_tool_parsers")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source.replace(old, new, 1), module.__name__, "exec"), module.__dict__)
        makes = {
            "hermes": module.HermesStream,
            "required": module.RequiredStream,
            "named": lambda: module.NamedStream("f"),
        }
        assert any(differing(kind, make)[1] for kind, make in makes.items()), name
    finally:
        del sys.modules[module.__name__]
