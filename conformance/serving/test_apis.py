"""`/v1/messages` and `/v1/responses` beside vLLM's recorded answers, and their mutants caught."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from conformance.serving.in_process import chat_server  # first: it may skip

from conformance.serving.battery import MAX_MODEL_LEN, Ask  # isort: skip
from conformance import recording
from conformance.serving.battery_apis import (
    asks,
    counted,
    messages,
    messages_refused,
    responses,
    stored,
)
from conformance.serving.compare_apis import DOCUMENTED, compare, verdict, whole
from conformance.serving.recorded import ADAPTERS, ROOT, kept, send
from conformance.serving.recorded_apis import KEPT, surface

pytestmark = pytest.mark.slow
MODULES = {name: str(ROOT / "models" / "adapters" / name) for name in ADAPTERS}


@contextmanager
def server() -> Iterator[int]:
    """Blocks of 128 tokens, as vLLM has on a CPU: whole blocks are cached, which usage tells."""
    with chat_server(
        MODULES, num_blocks=64, block_size=128, max_model_len=MAX_MODEL_LEN,
        enable_lora=True, max_loras=4,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    ) as found:  # fmt: skip
        yield found


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server() as found:
        yield found


@pytest.fixture(scope="module")
def theirs() -> dict[str, dict[str, Any]]:
    return kept(KEPT)


def wrong(
    port: int, theirs: dict[str, dict[str, Any]], sent: Sequence[Ask], counts_cached: bool = True
) -> Iterator[str]:
    """Requests that are answered otherwise, and how; without what was sent before, if wanted."""
    for ask in sent:
        found = verdict(port, ask, theirs[ask.name])
        if not counts_cached:
            found = [at for at in found if ".cached_tokens: " not in at]
        if found and ask.name not in DOCUMENTED:
            yield f"{ask.name}: {found[:2]}"


def test_every_answer_is_the_recorded_one(port: int, theirs: dict[str, dict[str, Any]]) -> None:
    assert list(wrong(port, theirs, asks())) == []


def test_a_server_that_stores_goes_on_with_what_it_has_said(
    theirs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    with server() as found:
        assert list(wrong(found, theirs, stored())) == []


def test_what_is_documented_differs(port: int, theirs: dict[str, dict[str, Any]]) -> None:
    by_name: dict[str, Ask] = {ask.name: ask for ask in asks()}
    assert [n for n in DOCUMENTED if not verdict(port, by_name[n], theirs[n])] == []


def test_joined_deltas_still_tell_one_stream_from_another(
    theirs: dict[str, dict[str, Any]],
) -> None:
    plain, other = (theirs[f"messages, {n}, streamed"] for n in ("plain", "several turns"))
    joined = plain | {"events": whole(plain["events"])}
    assert len(joined["events"]) == 6
    assert compare(plain, joined) == []
    assert compare(other, joined)


MESSAGES = "mini_vllm.entrypoints.openai.messages"
RESPONSES = "mini_vllm.entrypoints.openai.responses"
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "a stop text is told as a reason of its own": (
        MESSAGES, "STOP_REASONS", '"stop": "end_turn"', '"stop": "stop_sequence"'
    ),
    "the length is the end of a turn": (
        MESSAGES, "STOP_REASONS", '"length": "max_tokens"', '"length": "end_turn"'
    ),
    "the billing header reaches the model": (
        MESSAGES, "messages_of", "if not text.startswith(BILLING)", ""
    ),
    "system blocks on lines": (MESSAGES, "messages_of", '"".join(text', '"\\n".join(text'),
    "an empty system text is a message": (
        MESSAGES, "messages_of", "isinstance(system, str) and system", "isinstance(system, str)"
    ),
    "a message without content is left out": (
        MESSAGES, "messages_of", 'message.role == "assistant" or ', ""
    ),
    "two blocks are one text": (MESSAGES, "_message_of", 'if alone else parts',
        'if alone else "".join(p["text"] for p in parts)'),
    "an assistant's result is a message": (
        MESSAGES, "_message_of", ' and role == "user"', ""
    ),
    "a tool's texts on one line": (MESSAGES, "_results", '"\\n".join(item', '"".join(item'),
    "a reference is not read": (MESSAGES, "_results", "    if tools:", "    if False:"),
    "tools do not reach the template": (
        MESSAGES, "chat_of", "if request.tools is not None:", "if False:"
    ),
    "errors of the client stay the client's": (
        MESSAGES, "_as_theirs", "raise MessagesError(error.message) from None",
        "raise MessagesError(error.message, error.kind, error.status) from None",
    ),
    "an unknown model is the server's error": (
        MESSAGES, "_as_theirs", "error.status == 404", "False"
    ),
    "the first usage counts no input": (
        MESSAGES, "BlockEvents", '_usage(used["prompt_tokens"], 0)', "_usage(0, 0)"
    ),
    "a block is not closed before the next": (
        MESSAGES, "BlockEvents", '[*self._closed(), self._opened(block)]', "[self._opened(block)]"
    ),
    "every block is the first": (MESSAGES, "BlockEvents", "self.index += 1", "self.index += 0"),
    "the last block stays open": (
        MESSAGES, "BlockEvents", "return [*self._closed(), delta]", "return [delta]"
    ),
    "instructions come after the past": (
        RESPONSES, "messages_of", "return messages + items", "return items + messages"
    ),
    "a call is a message of its own": (
        RESPONSES, "_add", "        if last is None:", "        if True:"
    ),
    "an answer of the past loses its text": (
        RESPONSES, "_join", "last.get(name) is None", "False and not last.get(name)"
    ),
    "all texts of an answer are read": (
        RESPONSES, "_add", "texts[0])", '" ".join(texts) + " ")'
    ),
    "tools reach the template when none may be called": (
        RESPONSES, "chat_of", ' and request.tool_choice != "none"', ""
    ),
    "json_object is json_schema": (
        RESPONSES, "chat_of", 'form.type == "json_schema"', "False"
    ),
    "nothing is cut": (RESPONSES, "chat_of", 'request.truncation == "auto"', "False"),
    "the log-probabilities are always told": (
        RESPONSES, "chat_of", '"logprobs": request.with_logprobs', '"logprobs": True'
    ),
    "a cut answer is completed": (
        RESPONSES, "_Response", '"incomplete" if grown', '"completed" if grown'
    ),
    "a greedy answer tells its top_p": (
        RESPONSES, "_Response", "1.0 if greedy else params.top_p", "self.request.top_p or 1.0"
    ),
    "a blank text before a call is a message": (
        RESPONSES, "_Response", "return parser.extract_tool_calls(text)",
        "return text.partition('<')[0], parser.extract_tool_calls(text)[1]"
    ),
    "a forced call does not show as a format": (
        RESPONSES, "_Response", "if forced is None:", "if True:"
    ),
    "a stream parses calls only where tools are offered": (
        RESPONSES, "_Response", "self.chat.tool_stream()",
        "self.chat.tool_stream() if self.request.tools else None",
    ),
    "a stream's log-probabilities have bytes": (
        RESPONSES, "_Response", '"logprob": one["logprob"],',
        '"logprob": one["logprob"], "bytes": one["bytes"],',
    ),
    "an item of a stream is not closed": (
        RESPONSES, "_Response", "for event in items.closed():", "for event in ():"
    ),
    "events are not numbered": (
        RESPONSES, "ItemEvents", "self.sequence_number += 1", "pass"
    ),
    "every item is the first one": (
        RESPONSES, "ItemEvents", "self.index += self.kind is not None", "pass"
    ),
    "a second call goes on with the first": (
        RESPONSES, "ItemEvents", ' or self.place != call["index"]', ""
    ),
    "a call without arguments ends them": (
        RESPONSES, "ItemEvents", "            if self.text:", "            if True:"
    ),
    "a message has no summary": (
        RESPONSES, "ItemEvents", '{**done, "summary": []}', "done"
    ),
}  # fmt: skip
"""What a converter may get wrong: the module, what is changed there, a text and another."""
CAUGHT_BY = {
    "a stop text is told as a reason of its own": "messages, a stop text",
    "the length is the end of a turn": "messages, plain",
    "the billing header reaches the model": "messages, system blocks",
    "system blocks on lines": "messages, system blocks",
    "an empty system text is a message": "messages, an empty system text",
    "a message without content is left out": "messages, a tool used without a word",
    "two blocks are one text": "messages, two blocks",
    "an assistant's result is a message": "messages, an assistant's tool result",
    "a tool's texts on one line": "messages, a tool's answer in parts",
    "a reference is not read": "messages, a tool's answer by reference",
    "tools do not reach the template": "count, tools",
    "errors of the client stay the client's": "count, a conversation longer than the context",
    "an unknown model is the server's error": "count, an unknown model",
    "the first usage counts no input": "messages, plain, streamed",
    "a block is not closed before the next": "messages, any tool, streamed",
    "every block is the first": "messages, plain, streamed",
    "the last block stays open": "messages, plain, streamed",
    "instructions come after the past": "responses, instructions and messages",
    "a call is a message of its own": "responses, a tool's answer and text",
    "an answer of the past loses its text": "responses, a thought of the past",
    "all texts of an answer are read": "responses, an answer of before",
    "tools reach the template when none may be called": "responses, tools and none allowed",
    "json_object is json_schema": "responses, a schema",
    "nothing is cut": "responses, a prompt beyond the context, cut",
    "the log-probabilities are always told": "responses, plain",
    "a cut answer is completed": "responses, plain",
    "a greedy answer tells its top_p": "responses, top_k and top_p",
    "a blank text before a call is a message": "responses, a blank and a call",
    "a forced call does not show as a format": "responses, a named tool",
    "a stream parses calls only where tools are offered": (
        "responses, a call and no tools, streamed"
    ),
    "a stream's log-probabilities have bytes": "responses, logprobs, streamed",
    "an item of a stream is not closed": "responses, plain, streamed",
    "events are not numbered": "responses, plain, streamed",
    "every item is the first one": "responses, text and a call, streamed",
    "a second call goes on with the first": "responses, two calls, streamed",
    "a call without arguments ends them": "responses, a call cut off, streamed",
    "a message has no summary": "responses, plain, streamed",
}
"""The request of the battery that each mutant answers otherwise."""
SENT = {MESSAGES: [*counted(), *messages(), *messages_refused()], RESPONSES: [*responses()]}
"""What is asked of each module."""


def mutated(module: Any, name: str, old: str, new: str) -> Any:
    """What `name` is in the module after the change.

    Raises:
        AssertionError: the text is not there once or more.
    """
    source = inspect.getsource(module)
    part = inspect.getsource(getattr(module, name)) if callable(getattr(module, name)) else source
    assert old in part, "the converter has changed: mend the mutant"
    scope = dict(vars(module))
    if part is source:  # a constant
        changed = dict(getattr(module, name))
        key, value = (text.strip().strip('"') for text in new.split(":"))
        return changed | {key: value}
    exec(
        compile("from __future__ import annotations\n" + part.replace(old, new), "m", "exec"), scope
    )
    return scope[name]


@pytest.mark.parametrize("where", SENT)
def test_without_a_mutant_nothing_differs(
    where: str, port: int, theirs: dict[str, dict[str, Any]]
) -> None:
    assert list(wrong(port, theirs, SENT[where], counts_cached=False)) == []


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_answers_otherwise(
    name: str, port: int, theirs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, what, old, new = MUTANTS[name]
    module = importlib.import_module(where)
    monkeypatch.setattr(module, what, mutated(module, what, old, new))
    sent = [ask for ask in SENT[where] if ask.name == CAUGHT_BY[name]]
    assert next(wrong(port, theirs, sent, counts_cached=False), None), name


# ---------------------------------------------------------------------- /openapi.json

LEFT_OUT = {
    "/generative_scoring", "/inference/v1/generate", "/invocations", "/is_scaling_elastic_ep",
    "/scale_elastic_ep", "/v1/chat/completions/batch",
}  # fmt: skip
"""Routes of vLLM's server that are not served here."""


def test_the_document_has_every_route_method_and_required_field_of_theirs(port: int) -> None:
    theirs = next(line["openapi"] for line in recording.lines(KEPT) if "openapi" in line)
    ours = surface(send(port, Ask("openapi", "/openapi.json", method="GET", key=None))["body"])
    served = {path: methods for path, methods in theirs.items() if path not in LEFT_OUT}
    assert theirs.keys() - ours.keys() == LEFT_OUT
    assert ours == served
