"""What lab 16-02 pins: events out of bytes, an answer out of events, and who said what."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from conformance.serving import battery, recorded
from labkit import refused, same

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def real():
    """Answers of the real server by the request's name, and the requests."""
    asked = {ask.name: ask for ask in battery.asks() if ask.path == CHAT}
    return SimpleNamespace(asked=asked, said=recorded.kept())


def written(events, end="\n"):
    """Events as the server writes them."""
    lines = (e if isinstance(e, str) else json.dumps(e, ensure_ascii=False) for e in events)
    return "".join(f"data: {line}{end}{end}" for line in lines).encode()


def cuts(data, rng):
    chunks = []
    while data:
        length = rng.randint(1, rng.choice((1, 7, 90)))
        chunks.append(data[:length])
        data = data[length:]
    return chunks


def chunk(delta, index=0, reason=None, **more):
    """One event of a chat."""
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason}], **more}


def call(index, id_=None, **function):
    """A delta of a call."""
    return chunk({"tool_calls": [{"index": index, "id": id_, "function": function}]})


# --- events out of bytes --------------------------------------------------------------------------


def test_events_of_a_stream(lab):
    same(
        lab.parse_sse([b'data: {"a": "\xc3', b'\xa9"}\n\ndata: [DONE]\n\n']),
        [{"a": "é"}, "[DONE]"],
        "two pieces, cut inside a character: an object and the end",
    )


def test_cut_anywhere(lab, real):
    rng = random.Random(16)
    for name in ("chat, streamed", "chat, a call with other letters, streamed"):
        events = real.said[name]["events"]
        for end in ("\n", "\r\n"):
            data = written(events, end)
            for chunks in (
                [data],
                [bytes([b]) for b in data],
                *(cuts(data, rng) for _ in range(50)),
            ):
                same(
                    lab.parse_sse(iter(chunks)), events,
                    f"{name}, in {len(chunks)} pieces, lines that end with {end!r}",
                )  # fmt: skip


def test_lines_that_are_no_data(lab):
    data = b': ping\n\nevent: message\nid: 7\ndata:{"a":\ndata: 1}\n\nretry: 9\ndata: [DONE]\n\n'
    same(
        lab.parse_sse([data]), [{"a": 1}, "[DONE]"],
        "a comment, a name and an id are left out; two data lines are one event; the space after "
        "the colon may be missing",
    )  # fmt: skip


def test_a_line_ends_with_a_line_feed(lab):
    """U+2028, U+0085 and a form feed end lines for `str.splitlines`, a lone \\r for both."""
    text = "one\u2028two\x85three"
    data = f'data: {{"a": "{text}"}}\n\ndata: {{"b":\r 1}}\n\ndata: [DONE]\n\n'.encode()
    same(
        lab.parse_sse([data]), [{"a": text}, {"b": 1}, "[DONE]"],
        "a separator inside a text, and a \\r between two tokens of JSON, belong to their line",
    )  # fmt: skip


def test_data_lines_are_joined_by_a_line_end(lab):
    refused(
        lambda: lab.parse_sse([b'data: {"a": 1\ndata: 2}\n\ndata: [DONE]\n\n']),
        'two data lines, {"a": 1 and 2}: a line end stands between them, so the number is not 12',
    )
    refused(
        lambda: lab.parse_sse([b'data: {"a": 1}\n\ndata:  [DONE]\n\n']),
        "[DONE] behind two spaces: only one of them is left out, and the rest is not the end",
    )


def test_a_stream_that_is_cut_off(lab):
    for data, what in (
        (b"", "nothing at all"),
        (b'data: {"a": 1}\n\n', "an end without [DONE]"),
        (b'data: {"a": 1}\n\ndata: [DONE]', "a [DONE] without its empty line"),
        (b'data: {"a": \n\ndata: [DONE]\n\n', "half an object"),
        (b"data: 7\n\ndata: [DONE]\n\n", "JSON that is no object"),
        (b'data: [DONE]\n\ndata: {"a": 1}\n\n', "an event after [DONE]"),
    ):
        refused(lambda data=data: lab.parse_sse([data]), f"parse_sse of {what}")


# --- an answer out of events ----------------------------------------------------------------------


def test_two_calls_in_pieces(lab):
    events = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Let "}), chunk({"content": "me.", "tool_calls": []}),
        call(0, "id-a", name="f"), call(0, arguments='{"x'),
        call(1, "id-b", name="g", arguments=""), call(0, arguments='": 1}'),
        call(1, arguments="{}", name=None), chunk({}, reason="tool_calls"),
        {"choices": [], "usage": {"total_tokens": 9}}, "[DONE]",
    ]  # fmt: skip
    reply = lab.assemble(events)
    same(
        reply.tool_calls,
        [
            {"id": "id-a", "name": "f", "arguments": '{"x": 1}'},
            {"id": "id-b", "name": "g", "arguments": "{}"},
        ],
        "two calls at once: pieces go to the call of their index; a null says nothing",
    )
    same(
        [reply.role, reply.content, reply.finish_reason, reply.usage],
        ["assistant", "Let me.", "tool_calls", {"total_tokens": 9}],
        "and the rest of the answer; the usage comes in a chunk without choices",
    )


def test_reasoning_and_choices(lab):
    events = [
        chunk({"role": "assistant"}), chunk({"reasoning": "hm"}), chunk({"reasoning": "m"}),
        chunk({"content": "A"}), chunk({"content": "B"}, index=1), chunk({}, reason="stop"),
        chunk({}, index=1, reason="length"), "[DONE]",
    ]  # fmt: skip
    first, second = lab.assemble(events), lab.assemble(events, choice=1)
    same(
        [first.reasoning, first.content, first.finish_reason], ["hmm", "A", "stop"],
        "the first choice, and its reasoning beside its content",
    )  # fmt: skip
    same([second.content, second.finish_reason], ["B", "length"], "the second one, alone")


def test_a_usage_in_every_chunk(lab, real):
    events = real.said["chat, usage in every chunk"]["events"]
    same(
        lab.assemble(events).usage, events[-2]["usage"],
        "continuous usage: the last one counts, and they are not added up",
    )  # fmt: skip


def test_the_last_that_was_said_counts(lab):
    events = [
        chunk({"content": "A"}, usage={"total_tokens": 3}), chunk({}, reason="stop"),
        chunk({"content": "B"}, reason="length", usage=None), chunk({}, usage={"total_tokens": 9}),
        chunk({}, usage=None), "[DONE]",
    ]  # fmt: skip
    reply = lab.assemble(events)
    same(reply.usage, {"total_tokens": 9}, "a usage, another one, then null: null says nothing")
    same(reply.finish_reason, "length", "stop, then length, then null: the last one counts")


def test_an_error_after_the_200(lab):
    error = {"message": "the engine died", "type": "InternalServerError", "code": 500}
    events = [chunk({"role": "assistant", "content": "He"}), {"error": error}, "[DONE]"]
    same(lab.parse_sse([written(events)]), events, "it is an event as others are")
    try:
        got = lab.assemble(events)
    except lab.StreamFailed as failed:
        same((failed.error, failed.reply.content), (error, "He"), "the error, and what preceded it")
    else:
        raise AssertionError(f"an error is no answer: expected StreamFailed\ncame     {got}")


CITY = ["get_weather", '{"city": "Lima"}']
DIFFER = {
    "a call that is no JSON": (
        ["", [], "tool_calls"], ["<tool_call>\n{name: oops}\n</tool_call>", [], "stop"],
    ),
    "a call cut off": (
        ["", [["get_weather", ""]], "tool_calls"],
        ['<tool_call>\n{"name": "get_weather", "arg', [], "length"],
    ),
    "a tool required": (["", [CITY, CITY], "tool_calls"], ["", [], "length"]),
}  # fmt: skip
"""Streamed, then at once: content, calls, finish reason. The last one ran into its limit, too."""


def answer(choice):
    """What a whole answer says, in the terms of a Reply."""
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"]]
    return [message["content"] or "", calls, choice["finish_reason"]]


def test_streamed_as_at_once(lab, real, record_property):
    """Every chat of the battery that was asked both ways."""
    differ, count, first = {}, 0, None
    for name, said in real.said.items():
        if "events" not in said or not name.startswith("chat") or not name.endswith(", streamed"):
            continue
        whole = real.said[name.removesuffix(", streamed")]["body"]
        events = lab.parse_sse([written(said["events"])])
        first = first or events[0]["choices"][0]["delta"]
        for place, choice in enumerate(whole["choices"]):
            reply = lab.assemble(events, place)
            count += 1
            calls = [[c["name"], c["arguments"]] for c in reply.tool_calls]
            same(
                [reply.role, reply.usage["total_tokens"]],
                ["assistant", whole["usage"]["total_tokens"]], f"{name}: role and tokens",
            )  # fmt: skip
            streamed, want = [reply.content, calls, reply.finish_reason], answer(choice)
            if streamed != want:
                differ[name.removesuffix(", streamed").removeprefix("chat, ")] = streamed, want
    assert count >= 24, f"chats asked both ways: {count}"
    same(differ, DIFFER, "where a client of the stream has something else: streamed, then at once")
    record_property("measured.cut", differ["a call cut off"][0][2])
    named = lab.assemble(real.said["chat, a named tool, streamed"]["events"])
    record_property("measured.named", named.finish_reason)
    kinds = {"": "an empty text", None: "nothing"}
    record_property("measured.first", kinds.get(first.get("content"), "the first token"))


# --- what is refused, and who says so -------------------------------------------------------------


def prompt_tokens(request):
    """Tokens of the battery's template, a byte each."""
    tools = "".join(
        f"{tool['function']['name']}: {tool['function']['description']}\n"
        for tool in request.get("tools") or ()
    )
    told = "".join(f"{m['role']}: {m.get('content') or ''}\n" for m in request["messages"])
    return len((f"Tools:\n{tools}" if tools else "") + told + "assistant:")


def server(lab, **more):
    known = {"models": ["byte-llama", *recorded.ADAPTERS], "max_model_len": battery.MAX_MODEL_LEN}
    return lab.Server(**known, prompt_tokens=prompt_tokens, **more)


ASKED = (
    "chat, an unknown model", "chat, too hot", "chat, top_p of two", "chat, fewer than no tokens",
    "chat, more tokens than the context", "chat, options without a stream", "chat, no messages",
    "chat, a prompt too long", "chat, an empty list of tools", "chat, a choice without tools",
    "chat, an unknown choice", "chat, a tool that is not offered",
    "chat, a choice without a function",
)  # fmt: skip
"""The recorded errors that the rules are about."""


def test_the_errors_of_the_real_server(lab, real):
    for name in ASKED:
        said = real.said[name]
        same(
            lab.predict_error(real.asked[name].body, server(lab)),
            (said["status"], said["body"]["error"]["param"]),
            f"{name}: {real.asked[name].body}\nthe server says: {said['body']['error']['message']}",
        )  # fmt: skip


def test_what_the_real_server_serves(lab, real):
    count = 0
    for name, ask in real.asked.items():
        if real.said[name]["status"] != 200 or not isinstance(ask.body, dict):
            continue
        if any(isinstance(m.get("content"), list) for m in ask.body["messages"]):
            continue
        count += 1
        same(lab.predict_error(ask.body, server(lab)), None, f"{name} is served: {ask.body}")
    assert count > 50, f"chats that were served: {count}"


def test_tools_without_flags(lab):
    tools = {"messages": battery.MESSAGES, "tools": [battery.WEATHER]}
    for request, expected in (
        (tools, (400, None)),
        ({**tools, "tool_choice": "auto"}, (400, None)),
        ({**tools, "tool_choice": "required"}, (400, None)),
        (
            {**tools, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            (400, None),
        ),
        ({**tools, "tool_choice": "none"}, None),
        ({"messages": battery.MESSAGES}, None),
    ):
        same(
            lab.predict_error(request, server(lab, auto_tools=False)), expected,
            f"a server without --enable-auto-tool-choice, asked with {sorted(request)} and the "
            f"choice {request.get('tool_choice', 'left out')}: beside tools, none means auto, and "
            "only the choice \"none\" needs no parser",
        )  # fmt: skip
    for more, expected in (
        ({"model": "nope"}, (404, "model")),
        ({"max_tokens": 99999}, (400, None)),
    ):
        same(
            lab.predict_error({**tools, **more}, server(lab, auto_tools=False)), expected,
            f"the same server, and {more}: after the model, before the length",
        )  # fmt: skip


def test_the_first_layer_decides(lab):
    long = [{"role": "user", "content": "w" * 600}]
    base = {"model": "byte-llama", "messages": battery.MESSAGES}
    for more, expected in (
        ({"model": "nope", "temperature": -1}, (404, "model")),
        ({"model": "nope", "tool_choice": "auto"}, (400, None)),
        ({"messages": long, "temperature": -1}, (400, "input_tokens")),
        ({"messages": long, "max_tokens": 99999}, (400, "max_tokens")),
        ({"temperature": -1, "top_p": 2, "max_tokens": 0}, (400, "temperature")),
        ({"top_p": 2, "max_tokens": 0}, (400, "top_p")),
        ({"top_p": 0}, (400, "top_p")),
        ({"temperature": None, "top_p": None, "max_tokens": None, "tools": None}, None),
        ({"model": "nope", "stream_options": {"include_usage": True}}, (400, "stream_options")),
    ):
        same(
            lab.predict_error({**base, **more}, server(lab)), expected,
            f"more than one thing is wrong with {more}: body, model, tools, length, sampling",
        )  # fmt: skip
    fits = battery.MAX_MODEL_LEN - prompt_tokens(base)
    for limit, expected in ((fits, None), (fits + 1, (400, "input_tokens"))):
        same(
            lab.predict_error({**base, "max_tokens": limit}, server(lab)), expected,
            f"a prompt of {prompt_tokens(base)} tokens and max_tokens={limit} of {512}",
        )  # fmt: skip


def test_who_owns_what(lab):
    for artifact in lab.ARTIFACTS:
        got = lab.owner(artifact)
        assert got in lab.LAYERS, f"{artifact}: expected one of {lab.LAYERS}\ncame     {got!r}"
        want = next(layer for layer, made in OWNED.items() if artifact in made)
        same(got, want, f"{artifact}: {WHY[want]}")
    refused(lambda: lab.owner("the weather"), "an artifact that is none")


OWNED = {
    "http": ("405 for a GET",),
    "validation": ("400 for temperature=-1", "404 for an unknown model"),
    "template": ("the words 'user:' in the prompt", "the tools' schemas in the prompt"),
    "engine": ("completion_tokens", "finish_reason length", "logprobs"),
    "detokenizer": ("U+FFFD in content", "text withheld before a stop string"),
    "tool_parser": ("the name of a call", "content without <tool_call>"),
    "sse": (
        "data: [DONE]", "the chunk with role and an empty content", "an error after the 200",
    ),
}  # fmt: skip
WHY = {
    "http": "the web framework answers before any code of the server sees a request",
    "validation": "values are checked before the engine hears of the request",
    "template": "the prompt is text that a template made of messages and tools",
    "engine": "tokens, their count, their limit and their probabilities are inference",
    "detokenizer": "where token ids become text, which stop strings are looked for in",
    "tool_parser": "the engine only wrote text with tags",
    "sse": "the form in which an answer is sent, not what it says",
}
