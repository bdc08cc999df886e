"""Our families of tool parsers against the real ones: texts in pieces, and chats around them."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs pydantic (the extra serve)")

from conformance import mutants, parts
from conformance.features.entrypoints import tool_chats, tool_families
from conformance.features.entrypoints.tool_families import (
    FORMS,
    SAME,
    TOOLS,
    VOCABULARY,
    fed,
    form_of,
    nameless,
)
from conformance.serving.at_once import at_once
from conformance.serving.wrong_families import WRONG, WRONG_CHATS
from mini_vllm.entrypoints.async_llm import Delta
from mini_vllm.entrypoints.openai import (
    chat,
    reasoning_parsers,
    serving,
    tool_parsers,
    tool_parsers_glm,
    tool_parsers_qwen,
    tool_schemas,
)
from mini_vllm.entrypoints.openai.chat import Chat
from mini_vllm.entrypoints.openai.messages import BlockEvents
from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest, Tool
from mini_vllm.entrypoints.openai.reasoning_parsers import ReasoningFirst, Tags, ThinkingStream
from mini_vllm.entrypoints.openai.serving import Grown, Served, framed, sse
from mini_vllm.entrypoints.openai.tool_parser_manager import get_tool_parser
from mini_vllm.entrypoints.openai.tool_parsers import ToolParser
from mini_vllm.sampling_params import SamplingParams

FAMILIES = ("glm45", "glm47", "qwen3_coder", "mistral")
OFFERED = [Tool(**tool) for tool in TOOLS]

cases = functools.cache(parts.load)


def made(family: type[ToolParser], case: Mapping[str, Any]) -> ToolParser:
    choice = case["choice"]
    return family(VOCABULARY, () if choice is None else OFFERED, choice)


def stream(family: type[ToolParser], case: Mapping[str, Any]) -> ToolParser | ReasoningFirst:
    if not tool_families.thinks(case["text"]):
        return made(family, case)
    tags = Tags.of(VOCABULARY)
    return ReasoningFirst(ThinkingStream(tags), made(family, case), over=False)


def said_to(
    parser: ToolParser | ReasoningFirst, pieces: Iterator[tuple[str, list[int]]]
) -> list[Any]:
    """Its deltas, as they are recorded."""
    said: list[Any] = []
    for piece, ids in pieces:
        try:
            said.append(nameless(parser.feed(piece, ids)))
        except (TypeError, OverflowError) as error:
            return [*said, {"raises": type(error).__name__}]
    return said


def whole_of(parser: ToolParser, text: str) -> list[Any]:
    content, calls = parser.extract_tool_calls(text)
    return [content, [[form_of(call.id), call.name, call.arguments] for call in calls]]


def differing(name: str, family: type[ToolParser], every: int = 1) -> tuple[int, str]:
    """Texts and streams compared, one in `every`; the first that is otherwise."""
    asked = cases(f"tool_families-{name}")
    for count, case in enumerate(asked, 1):
        text = case["text"]
        if case["whole"] and (ours := whole_of(made(family, case), text)) != case["whole"]:
            return count, f"{text!r}: {case['whole']} theirs, {ours} ours"
    for case in asked:
        text = case["text"]
        for lengths, late, deltas in case["cuts"][count % every :: every]:
            ours, count = said_to(stream(family, case), fed(text, lengths, late)), count + 1
            if ours != deltas:
                return count, f"{text!r} cut {lengths}, {late}: {deltas} theirs, {ours} ours"
    return count, ""


@pytest.mark.upstream
def test_families_have_upstream_s_names_and_classes() -> None:
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER

    for name in FAMILIES:
        assert get_tool_parser(name).__name__ == _TOOL_PARSERS_TO_REGISTER[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_and_deltas_are_the_real_parser_s(name: str) -> None:
    count, first = differing(name, get_tool_parser(name), every=40)
    assert count > 40
    assert not first


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_delta_at_every_cut_is_the_real_parser_s(name: str) -> None:
    count, first = differing(name, get_tool_parser(name))
    assert count > 900
    assert not first


def chat_of(family: type[ToolParser], asked: Mapping[str, Any], made: Any = Chat) -> Chat:
    """A chat with the recorded tools, without an engine."""
    engine: Any = SimpleNamespace()
    served = Served(engine, "m", 100, "m", tool_parser=family, vocab=VOCABULARY)
    request = ChatCompletionRequest(messages=[], tools=TOOLS, stream=True, **asked)
    return made(served, request, "r", [], "p", [0], [0], SamplingParams())


def streamed(chat: Chat, case: Mapping[str, Any], lengths: Sequence[int]) -> list[str]:
    """The events of our stream."""
    choice, parser = Grown(), chat._parser()
    pieces = tool_chats.pieces_of(case["text"], lengths)

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for number, (piece, ids) in enumerate(pieces, 1):
            delta = Delta(0, piece, ids, [], case["reason"] if number == len(pieces) else None)
            choice.take(delta)
            if chunk := chat._chunk(delta, choice, parser):
                yield chunk

    async def events() -> list[str]:
        return [event async for event in framed(chunks())]

    return at_once(events())


def blocks(events: Sequence[str]) -> list[Any]:
    """What our `/v1/messages` makes of them; an error is the last."""
    made, said = BlockEvents(), []
    for event in [events[0], *events]:
        said += made.feed(event)
        if said[-1:] and said[-1]["type"] == "error":
            break
    return tool_chats.blocks_of([sse(event) for event in said[1:]])


def whole(chat: Chat, case: Mapping[str, Any]) -> Any:
    """The choice of our answer."""
    choice = chat._choice(0, Grown(case["text"], finish_reason=case["reason"]))
    nameless(choice["message"])
    return choice


def differing_chat(name: str, every: int = 1, made: Any = Chat) -> tuple[int, str]:
    """Answers and streams compared, of one chat in `every`; the first that is otherwise."""
    family, count = get_tool_parser(name), 0
    for case in cases(f"tool_chats-{name}")[::every]:
        about, count = f"{case['text']!r} for {case['asked']}", count + 1
        if (ours := whole(chat_of(family, case["asked"], made), case)) != case["whole"]:
            return count, f"{about}: {case['whole']} theirs, {ours} ours"
        for lengths, *theirs in case["cuts"]:
            events = streamed(chat_of(family, case["asked"], made), case, lengths)
            ours = [tool_chats.choices_of(events), None if theirs[1] is None else blocks(events)]
            count += 1
            if ours != theirs:
                return count, f"{about} cut {lengths}: {theirs} theirs, {ours} ours"
    return count, ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", *FAMILIES])
def test_chunks_and_finish_reasons_of_a_chat_are_the_real_server_s(name: str) -> None:
    count, first = differing_chat(name, every=4)
    assert count > 90
    assert not first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", *FAMILIES])
def test_every_chunk_of_every_chat_is_the_real_server_s(name: str) -> None:
    count, first = differing_chat(name)
    assert count == 9 * {"glm45": 75, "glm47": 75, "qwen3_coder": 49}.get(name, 46)
    assert not first


def test_the_same_calls_are_the_same_in_every_family() -> None:
    expected = list(SAME.items())
    for name, form in FORMS.items():
        text = "".join(form(call, **given) for call, given in SAME.items())
        family = get_tool_parser(name)
        _, calls = family(VOCABULARY, OFFERED).extract_tool_calls(text)
        assert [(call.name, json.loads(call.arguments)) for call in calls] == expected, name

        parser = family(VOCABULARY, OFFERED)
        for piece, ids in fed(text, tool_families.token_lengths(text), 0):
            parser.feed(piece, ids)
        sent = [(call.name, json.loads(call.arguments)) for call in parser.calls if call.name]
        bare = name == "glm47"  # whose call without arguments and line end is never named
        assert sent == (expected[:2] if bare else expected), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "old", "new"),
    WRONG,
    ids=[f"{w[0].__name__.rpartition('_')[2]}, {w[1]}" for w in WRONG],
)
def test_the_recorded_texts_catch_a_family_that(
    module: ModuleType, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = mutants.edited(module, old, new)
    if module is reasoning_parsers:
        monkeypatch.setitem(globals(), "ReasoningFirst", wrong.ReasoningFirst)
    if module is tool_schemas:
        for user in (tool_parsers_glm, tool_parsers_qwen):
            for function in ("properties_of", "types_of", "coerced"):
                if hasattr(user, function):
                    monkeypatch.setattr(user, function, getattr(wrong, function))
    for family in reversed(FAMILIES):
        right = get_tool_parser(family)
        shared = module in (reasoning_parsers, tool_schemas)
        tried = right if shared else getattr(wrong, right.__name__, None)
        if tried and differing(family, tried)[1]:
            return
    pytest.fail(f"no recorded text is read otherwise by a family that {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "old", "new"), WRONG_CHATS, ids=[w[1] for w in WRONG_CHATS]
)
def test_the_recorded_chats_catch_one_that(
    module: ModuleType, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = mutants.edited(module, old, new)
    made: Any = wrong.Chat if module is chat else Chat
    if module is serving:
        monkeypatch.setitem(globals(), "framed", wrong.framed)
    if module is tool_parsers:
        monkeypatch.setattr(chat, "last_delta", wrong.last_delta)
        monkeypatch.setattr(tool_parsers, "said_in", wrong.said_in)
        monkeypatch.setattr(tool_parsers.Sent, "expected", wrong.Sent.expected)
    for family in ("hermes", *FAMILIES):
        if differing_chat(family, made=made)[1]:
            return
    pytest.fail(f"no recorded chat differs from one that {name}")


@pytest.mark.upstream
@pytest.mark.parametrize(
    "tool",
    [
        {"function": {"name": "f"}},
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"a": None}}},
        {"function": {"strict": False, "name": "f", "description": None, "defer_loading": True}},
        {"defer_loading": False, "x": 1, "function": {"name": "f", "parameters": {}}},
    ],
)
def test_a_template_gets_the_tool_that_vllm_gives_it(tool: dict[str, Any]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    theirs = ChatCompletionToolsParam(**tool).model_dump()
    assert json.dumps(Tool(**tool).offered()) == json.dumps(theirs)


def constraint_of(name: str, strict: bool | None) -> Any:
    """What vLLM's parser makes of a choice left to the model, None for no constraint."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
    function |= {} if strict is None else {"strict": strict}
    body = {"messages": [], "tools": [{"type": "function", "function": function}]}
    request = ChatCompletionRequest(**body)
    tokenizer: Any = SimpleNamespace(get_vocab=lambda: VOCABULARY)
    parser = ToolParserManager.get_tool_parser(name)(tokenizer, request.tools)
    made = parser.adjust_request(request).structured_outputs
    return None if made is None else json.loads(made.structural_tag)


@pytest.mark.upstream
def test_strict_is_read_by_one_family_of_ours_and_with_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.tool_parsers import abstract_tool_parser

    names = ("hermes", *FAMILIES)
    assert [constraint_of(name, True) for name in names] == [None] * len(names)
    monkeypatch.setattr(abstract_tool_parser, "VLLM_ENFORCE_STRICT_TOOL_CALLING", True)
    assert [name for name in names if constraint_of(name, True)] == ["qwen3_coder"]
    schemas = [
        constraint_of("qwen3_coder", strict)["format"]["tags"][0]["content"]["json_schema"]
        for strict in (True, None, False)
    ]
    assert schemas == [{"type": "object"}, {"type": "object"}, True]


@pytest.mark.upstream
def test_vllm_goes_on_when_a_plug_in_fails_and_replaces_a_name(tmp_path: Path) -> None:
    from vllm.tool_parsers import ToolParserManager

    path = tmp_path / "a_plug_in_that_fails.py"
    path.write_text("import no_such_module")
    ToolParserManager.import_tool_parser(str(path))
    with pytest.raises(KeyError, match="not found"):
        ToolParserManager.get_tool_parser("of_the_plug_in")
    before = dict(ToolParserManager.lazy_parsers)
    try:
        ToolParserManager.register_module("hermes")(type("Mine", (), {}))
        assert ToolParserManager.lazy_parsers["hermes"][1] == "Mine"
    finally:
        ToolParserManager.lazy_parsers = before
