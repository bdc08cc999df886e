"""gpt-oss's harmony format: chats of ours against those of the real server, token by token."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs pydantic (the extra serve)")

from conformance import mutants, parts
from conformance.features.entrypoints import (
    harmony_chats,
    harmony_prompts,
    harmony_vocabulary,
    tool_chats,
)
from conformance.features.entrypoints.harmony_chats import TAGS
from conformance.features.entrypoints.tool_families import nameless
from conformance.serving.at_once import at_once
from conformance.serving.wrong_harmony import WRONG, WRONG_PROMPTS
from mini_vllm.entrypoints.async_llm import Delta
from mini_vllm.entrypoints.openai import chat as chats
from mini_vllm.entrypoints.openai.chat import Chat
from mini_vllm.entrypoints.openai.errors import APIError
from mini_vllm.entrypoints.openai.harmony_prompt import render_for_completion
from mini_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from mini_vllm.entrypoints.openai.serving import Grown, Served, framed
from mini_vllm.entrypoints.openai.tool_parser_manager import get_tool_parser
from mini_vllm.entrypoints.openai.tool_parsers_openai import OpenAIToolParser
from mini_vllm.sampling_params import SamplingParams

cases = functools.cache(lambda: parts.load("harmony_chats"))


VOCABULARY: dict[str | tuple[int, ...], int] = {tag: number for number, tag in enumerate(TAGS)}
"""An id for each token that was met, by its text or its bytes."""
BYTES = [tag.encode() for tag in TAGS]


def ids_of(case: Mapping[str, Any]) -> list[int]:
    found = []
    for token in case["tokens"]:
        key = token if isinstance(token, str) else tuple(token)
        if key not in VOCABULARY:
            VOCABULARY[key] = len(VOCABULARY)
            BYTES.append(token.encode() if isinstance(token, str) else bytes(token))
        found.append(VOCABULARY[key])
    return found


def decode(token_ids: Sequence[int]) -> str:
    """As a tokenizer that leaves out what is special."""
    plain = (BYTES[token] for token in token_ids if token >= len(TAGS))
    return b"".join(plain).decode(errors="replace")


def chat_of(family: type[OpenAIToolParser], case: Mapping[str, Any], made: Any = Chat) -> Chat:
    """A chat of a server that reads harmony, without an engine."""
    engine: Any = SimpleNamespace(about=SimpleNamespace(tokenizer=SimpleNamespace(decode=decode)))
    tags = dict(enumerate(TAGS))
    served = Served(
        engine, "m", 100, "m", tool_parser=family if case["parses"] else None, harmony=family,
        specials=tags, vocab={tag: number for number, tag in tags.items()},
    )  # fmt: skip
    request = ChatCompletionRequest(messages=[], stream=True, **case["asked"])
    return made(served, request, "r", [], "p", [0], [0], SamplingParams())


def streamed(chat: Chat, case: Mapping[str, Any], counts: Sequence[int]) -> list[Any]:
    """The choices of our stream's chunks; an error is the last."""
    choice, parser, ids = Grown(), chat._parser(), iter(ids_of(case))

    async def chunks() -> AsyncGenerator[dict[str, Any], None]:
        for number, count in enumerate(counts, 1):
            new = list(itertools.islice(ids, count))
            # the engine's text lacks the tags, and nothing reads it
            delta = Delta(
                0, decode(new), new, [], case["reason"] if number == len(counts) else None
            )
            choice.take(delta)
            if chunk := chat._chunk(delta, choice, parser):
                yield chunk

    async def events() -> list[str]:
        return [event async for event in framed(chunks())]

    return tool_chats.choices_of(at_once(events()))


def whole(chat: Chat, case: Mapping[str, Any]) -> Any:
    """The choice of our answer."""
    grown = Grown(token_ids=ids_of(case), finish_reason=case["reason"])
    try:
        choice = chat._choice(0, grown)
    except APIError as error:
        return {"raises": type(error).__name__}
    nameless(choice["message"])
    return choice


def differences(
    asked: Sequence[Mapping[str, Any]],
    family: type[OpenAIToolParser] = OpenAIToolParser,
    made: Any = Chat,
) -> Iterator[str]:
    """Every answer, then every stream, that is otherwise."""
    for case in asked:
        if (ours := whole(chat_of(family, case, made), case)) != case["whole"]:
            yield f"{case['tokens']} whole: {case['whole']} theirs, {ours} ours"
    for case in asked:
        for counts, theirs in case["cuts"]:
            if (ours := streamed(chat_of(family, case, made), case, counts)) != theirs:
                yield f"{case['tokens']} cut {counts}: {theirs} theirs, {ours} ours"


@pytest.mark.upstream
def test_harmony_has_upstream_s_names_and_class() -> None:
    from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER

    assert get_tool_parser("openai").__name__ == _TOOL_PARSERS_TO_REGISTER["openai"][1]
    assert "openai_gptoss" in _REASONING_PARSERS_TO_REGISTER


@pytest.mark.upstream
def test_chats_that_were_not_recorded_are_the_real_server_s() -> None:
    if harmony_vocabulary.VARIABLE not in os.environ:
        pytest.skip(f"needs {harmony_vocabulary.VARIABLE}, see harmony_vocabulary.py")
    rng = random.Random(4711)
    asked = [(harmony_chats.drawn(rng), True, harmony_chats.ASKED[0]) for _ in range(200)]
    assert not list(itertools.islice(differences([*harmony_chats.cases(asked)]), 1))


def prompts_differing(render: Any) -> Iterator[str]:
    """Every prompt that is otherwise, or an error that is none there."""
    for case in parts.load("harmony_prompts"):
        request = ChatCompletionRequest(**case["asked"])
        messages = [message.model_dump(exclude_unset=True) for message in request.messages]
        try:
            text = render(messages, request.tool_dicts(), request.reasoning_effort)
        except APIError as error:
            text = None if error.status == 400 else error.message
        if text != case.get("text"):
            yield f"{case['asked']}: {case.get('text')!r} theirs, {text!r} ours"


def test_every_prompt_is_the_real_server_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", harmony_prompts.DAY)
    assert len(parts.load("harmony_prompts")) == len(harmony_prompts.ASKED)
    assert not list(itertools.islice(prompts_differing(render_for_completion), 1))


@pytest.mark.slow
def test_every_chunk_and_answer_is_the_real_server_s() -> None:
    assert sum(1 + len(case["cuts"]) for case in cases()) > 8000
    assert not list(itertools.islice(differences(cases()), 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "old", "new"),
    WRONG,
    ids=[f"{w[0].__name__.rpartition('.')[2]}, {w[1]}" for w in WRONG],
)
def test_the_recorded_chats_catch_one_that(
    module: ModuleType, name: str, old: str, new: str
) -> None:
    wrong = mutants.edited(module, old, new)
    family = getattr(wrong, "OpenAIToolParser", OpenAIToolParser)
    made: Any = wrong.Chat if module is chats else Chat
    assert list(itertools.islice(differences(cases(), family, made), 1)), (
        f"none differs from one that {name}"
    )


@pytest.mark.parametrize(
    ("module", "name", "old", "new"), WRONG_PROMPTS, ids=[w[1] for w in WRONG_PROMPTS]
)
def test_the_recorded_prompts_catch_one_that(
    module: ModuleType, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SYSTEM_START_DATE", harmony_prompts.DAY)
    wrong = mutants.edited(module, old, new)
    differing = prompts_differing(wrong.render_for_completion)
    assert list(itertools.islice(differing, 1)), f"no prompt differs from one that {name}"
