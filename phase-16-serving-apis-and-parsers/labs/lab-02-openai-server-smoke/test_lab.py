"""What lab 16-02 pins: the bytes of real streams, whole, killed and broken by rule.

What must come out of a whole one is what the same server gave at once. Of a broken one it is what
the events before the break say, which are read here from the recording, block by block.
"""

from __future__ import annotations

import json
import random

import pytest

from conformance.serving import breaks, streams
from labkit import refused, same

PLAIN = "chat, streamed"
TWO = "chat, two completions, streamed"
CALLS = "chat, two calls, streamed"
EVERY = "chat, usage in every chunk"
KEPT = streams.kept()


@pytest.fixture(scope="module")
def real():
    """Bytes of vLLM's streams by the request's name."""
    return {name: line["text"].encode() for name, line in KEPT.items()}


def asked(name):
    """How many choices a recorded request asked for."""
    return KEPT[name]["asked"].get("n", 1)


def fed(lab, data, n=1, closed=True, pieces=None):
    """A client that was fed these bytes."""
    client = lab.Client(n)
    for piece in pieces or [data]:
        client.feed(piece)
    if closed:
        client.close()
    return client


def cuts(data, rng):
    pieces = []
    while data:
        length = rng.randint(1, rng.choice((1, 7, 90)))
        pieces.append(data[:length])
        data = data[length:]
    return pieces


def events(data):
    """What the blocks of a recorded stream hold, without [DONE]."""
    return [breaks.event_of(block) for block in breaks.blocks(data)[:-1]]


def written(*said):
    """Events as the server writes them, and [DONE]."""
    return b"".join(breaks.block_of(event) for event in said) + breaks.DONE


def text_of(said, index=0):
    """The content of a choice in these events."""
    parts = (part for event in said for part in event.get("choices", ()))
    return "".join(part["delta"].get("content") or "" for part in parts if part["index"] == index)


def view(answer):
    """A whole answer in the terms of this file: by choice content, calls, finish reason."""
    return {
        index: [c.content, [[k["name"], k["arguments"]] for k in c.tool_calls], c.finish_reason]
        for index, c in answer.choices.items()
    }


def at_once(line):
    """The same of what the server gave without a stream."""
    found = {}
    for choice in line["at_once"]:
        calls = choice["message"].get("tool_calls") or ()
        said = [[c["function"]["name"], c["function"]["arguments"]] for c in calls]
        found[choice["index"]] = [choice["message"]["content"] or "", said, choice["finish_reason"]]
    return found


# --- whole answers --------------------------------------------------------------------------------


def test_a_stream_of_the_real_server(lab, real):
    client = lab.Client()
    *first, last = breaks.blocks(real[PLAIN])
    for block in first:
        client.feed(block)
    same(client.answer().state, "open", "every event but [DONE] was fed: the end is still to come")
    client.feed(last)
    answer = client.answer()
    same(answer.state, "whole", "and with [DONE] the answer is whole")
    line = KEPT[PLAIN]
    same(view(answer), at_once(line), "what the same server says at once: content, calls, reason")
    same(answer.choices[0].role, "assistant", "the first event has a role")
    client.close()
    same(client.answer().state, "whole", "that the connection closes afterwards changes nothing")


DIFFER = {
    "a call that is no JSON": (
        ["", [], "tool_calls"], ["<tool_call>\n{name: oops}\n</tool_call>", [], "stop"],
    ),
    "a call cut off": (
        ["", [["get_weather", ""]], "tool_calls"],
        ['<tool_call>\n{"name": "get_weather", "arg', [], "length"],
    ),
    "a tool required": (
        ["", [["get_weather", '{"city": "Lima"}']] * 2, "tool_calls"], ["", [], "length"],
    ),
}  # fmt: skip
"""Streamed, then at once: where vLLM itself says two things of one request."""


def test_streamed_as_at_once(lab, record_property):
    """Every recorded stream of both servers beside the answer that came at once."""
    for server in ("vllm", "mini"):
        differ, count = {}, 0
        for name, line in streams.kept(server).items():
            if "at_once" not in line:
                continue
            count += 1
            n = line["asked"].get("n", 1)
            answer = fed(lab, line["text"].encode(), n).answer()
            same(answer.state, "whole", f"{server}, {name}: nothing is wrong with it")
            want, got = at_once(line), view(answer)
            if got != want:
                differ[name.removesuffix(", streamed").removeprefix("chat, ")] = got[0], want[0]
        assert count == len(streams.chats()), f"streams of {server}: {count}"
        same(differ, DIFFER, f"{server}: where streams say something else: streamed, then at once")
    record_property("measured.cut", differ["a call cut off"][0][2])
    named = fed(lab, KEPT["chat, a named tool, streamed"]["text"].encode()).answer()
    record_property("measured.named", named.choices[0].finish_reason)


def test_two_choices_interleaved(lab, real):
    said = events(real[TWO])
    order = [part["index"] for event in said for part in event["choices"]]
    assert order != sorted(order), f"the recorded choices take turns: {order}"
    client = lab.Client(2)
    for number, block in enumerate(breaks.blocks(real[TWO])[:-1], 1):
        client.feed(block)
        got = {index: choice.content for index, choice in client.answer().choices.items()}
        want = {
            part["index"]: text_of(said[:number], part["index"])
            for event in said[:number]
            for part in event["choices"]
        }
        same(got, want, f"after {number} events of two choices that take turns")
    client.feed(breaks.DONE)
    same(client.answer().state, "whole", "both have a finish reason")


def test_usage_wherever_it_stands(lab, real):
    for name in (PLAIN, TWO, EVERY):
        want = [event["usage"] for event in events(real[name]) if event.get("usage")]
        answer = fed(lab, real[name], asked(name)).answer()
        same(answer.usage, want[-1], f"{name}: the last of {len(want)} usages, not their sum")
    answer = fed(lab, real["chat, streamed without usage"]).answer()
    same([answer.state, answer.usage], ["whole", None], "no usage was asked for, and none came")


# --- bytes ----------------------------------------------------------------------------------------


def test_cut_anywhere(lab, real):
    rng, other = random.Random(16), "chat, a call with other letters, streamed"
    assert "\u2028".encode() in real["chat, separators, streamed"], "a character to cut"
    for name in (PLAIN, other, "chat, separators, streamed"):
        for data in (real[name], real[name].replace(b"\n", b"\r\n")):
            for pieces in ([bytes([b]) for b in data], *(cuts(data, rng) for _ in range(20))):
                answer = fed(lab, data, pieces=[b"", *pieces]).answer()
                same(
                    [answer.state, view(answer)], ["whole", at_once(KEPT[name])],
                    f"{name}, in {len(pieces)} pieces, lines end with {data[-2:]!r}",
                )  # fmt: skip


def test_what_is_complete_is_known_at_once(lab, real):
    client, said = lab.Client(), events(real[PLAIN])
    for number, block in enumerate(breaks.blocks(real[PLAIN])[:-1]):
        before = text_of(said[:number])
        client.feed(block[:-1])
        got = client.answer().choices.get(0)
        same(
            got.content if got else "", before, f"event {number} without its last byte says nothing"
        )
        client.feed(block[-1:])
        got = client.answer().choices.get(0)
        same(got and got.content, text_of(said[: number + 1]), f"event {number} is complete")


def test_separators_of_unicode_belong_to_the_line(lab, real):
    """U+2028, U+2029, U+0085 and a form feed end lines for `str.splitlines`."""
    answer = fed(lab, real["chat, separators, streamed"]).answer()
    same(
        [answer.state, answer.choices[0].content if answer.choices else None],
        ["whole", streams.SEPARATORS],
        "vLLM writes these characters as they are; only \\n and \\r\\n end a line",
    )


@pytest.mark.parametrize("rule", breaks.HARMLESS)
def test_said_otherwise(lab, real, rule):
    for name in (PLAIN, TWO, "chat, separators, streamed"):
        n, want = asked(name), at_once(KEPT[name])
        data = breaks.HARMLESS[rule](real[name])
        for pieces in ([data], [bytes([b]) for b in data]):
            answer = fed(lab, data, n, pieces=pieces).answer()
            same(
                [answer.state, view(answer)], ["whole", want],
                f"{name}, {rule}: {data[:90]!r}... is the same answer",
            )  # fmt: skip


def test_data_lines_are_joined_by_a_line_end(lab, real):
    place = real[PLAIN].index(b'"total_tokens":') + len(b'"total_tokens":') + 1
    data = real[PLAIN][:place] + b"\ndata: " + real[PLAIN][place:]
    same(
        fed(lab, data).answer().state, "malformed",
        "a number cut by a line end is two numbers, and that is not JSON: "
        f"{data[place - 20 : place + 12]!r}",
    )  # fmt: skip


# --- ends that are none ---------------------------------------------------------------------------


def before_the_break(real, name):
    """The events that stand before the place where the rules of `breaks` break a stream."""
    said = events(real[name])
    return said[: max(1, len(said) // 2)]


@pytest.mark.parametrize(
    "rule", ["closed inside an event", "closed between two events", "closed before [DONE]",
             "closed before the empty line of [DONE]", "[DONE] before a finish reason"],
)  # fmt: skip
def test_an_answer_that_was_cut(lab, real, rule):
    for name in streams.BROKEN_OF:
        data, n = breaks.BROKEN[rule](real[name]), asked(name)
        client = fed(lab, data, n, closed=False)
        if not rule.startswith("[DONE]"):
            same(client.answer().state, "open", f"{name}, {rule}: more bytes may come")
            client.close()
        answer = client.answer()
        same(answer.state, "cut", f"{name}, {rule}: it ended and was not whole")
        said = events(real[name])
        if rule.startswith("closed b") and "DONE" in rule:
            want = text_of(said)
        elif rule.startswith("closed"):
            want = text_of(before_the_break(real, name))
        else:
            continue
        got = answer.choices[0].content if answer.choices else None
        same(got, want, f"{name}, {rule}: what had been said stays")


def test_a_choice_that_never_ended(lab, real):
    same(
        fed(lab, real[PLAIN], n=2).answer().state, "cut",
        "two choices were asked for, and the server spoke of one",
    )  # fmt: skip
    for index in (0, 1):
        said = [
            event for event in events(real[TWO])
            if not any(p["index"] == index and p["finish_reason"] for p in event["choices"])
        ]  # fmt: skip
        answer = fed(lab, written(*said), n=2).answer()
        same(answer.state, "cut", f"choice {index} has no finish reason, the other one has")
        got = answer.choices[1 - index].finish_reason
        same(got, "stop", "of the other the caller knows that it ended")


@pytest.mark.parametrize(
    "rule", ["half an event, then the rest", "bytes that are not UTF-8", "an event after [DONE]",
             "[DONE] behind two spaces"],
)  # fmt: skip
def test_bytes_that_are_no_stream(lab, real, rule):
    for name in streams.BROKEN_OF:
        data, n = breaks.BROKEN[rule](real[name]), asked(name)
        for pieces in ([data], [bytes([b]) for b in data]):
            answer = fed(lab, data, n, pieces=pieces).answer()
            same(answer.state, "malformed", f"{name}, {rule}: ...{data[-60:]!r}")
        half = rule.startswith(("half", "bytes"))
        want = text_of(before_the_break(real, name) if half else events(real[name]))
        same(answer.choices[0].content, want, f"{name}, {rule}: what had been said stays")


def test_json_that_is_no_object(lab, real):
    said = breaks.blocks(real[PLAIN])
    for text in ("7", "[]", "null", '"a"'):
        data = b"".join([*said[:2], f"data: {text}\n\n".encode(), *said[2:]])
        same(fed(lab, data).answer().state, "malformed", f"an event that is {text}")


def test_an_error_after_the_200(lab, real):
    error = streams.error_block(real["chat, the engine dies"].decode())
    for name in streams.BROKEN_OF:
        for closed in (False, True):
            data = breaks.failed_at(real[name], error, closed)
            answer = fed(lab, data, asked(name)).answer()
            same(
                [answer.state, answer.error], ["failed", breaks.event_of(error)["error"]],
                f"{name}, an error event in the middle, then {'nothing' if closed else '[DONE]'}",
            )  # fmt: skip
            want = text_of(before_the_break(real, name))
            same(answer.choices[0].content, want, "what preceded the error stays")
    late = b"".join(breaks.blocks(real[PLAIN])[:2]) + error + real[PLAIN]
    answer = fed(lab, late).answer()
    want = text_of(events(real[PLAIN])[:2])
    same([answer.state, answer.choices[0].content], ["failed", want], "nothing is read after it")


def test_servers_that_were_killed(lab, real):
    """vLLM's engine says so in an event; a server that is gone says nothing."""
    dead = fed(lab, real["chat, the engine dies"]).answer()
    same(dead.state, "failed", f"...{real['chat, the engine dies'][-200:]!r}")
    for server in ("vllm", "mini"):
        line = streams.kept(server)["chat, the server dies"]
        answer = fed(lab, line["text"].encode()).answer()
        same(answer.state, "cut", f"{server}, killed in a stream: ...{line['text'][-60:]!r}")
        assert answer.choices[0].content, f"{server}: some text had come; came {answer}"


def test_what_the_openai_package_makes_of_it(lab, real, record_property):
    error, silent, count = streams.error_block(real["chat, the engine dies"].decode()), set(), 0
    for line in streams.openai_heard():
        if line["broken"] is None:
            continue
        data = breaks.broken(real[line["name"]], error)[line["broken"]]
        state = fed(lab, data, asked(line["name"])).answer().state
        assert state in ("failed", "cut", "malformed"), (
            f"{line['name']}, {line['broken']}: expected failed, cut or malformed\ncame     {state}"
        )
        count += 1
        if line["openai"]["raises"] is None:
            silent.add(line["broken"])
    assert count == 44, f"broken streams that the openai package was fed: {count}"
    record_property("measured.trusted", len(silent))


# --- what counts, and what may be done ------------------------------------------------------------


def changed(real, name, change):
    """A recorded stream with `change` made to its events."""
    said = events(real[name])
    change(said)
    return written(*said)


def test_null_says_nothing(lab, real):
    usage = events(real[PLAIN])[-1]["usage"]
    quiet = {
        "choices": [{"index": 0, "finish_reason": None, "delta": {"content": None, "role": None}}],
        "usage": None, "error": None,
    }  # fmt: skip
    data = changed(real, PLAIN, lambda said: said.append(quiet))
    answer = fed(lab, data).answer()
    same(view(answer), at_once(KEPT[PLAIN]), "an event of nulls behind the answer")
    got = [answer.state, answer.usage, answer.choices[0].role]
    same(got, ["whole", usage, "assistant"], "an error that is null is none; usage and role stay")
    piece = {"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": None}}
    quiet = {"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": None}]}
    data = changed(real, CALLS, lambda said: said.insert(-1, quiet))
    want = at_once(KEPT[CALLS])
    same(view(fed(lab, data).answer()), want, "and a piece of a call that is all null")


def test_the_last_that_was_said_counts(lab, real):
    reason = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    more = {"choices": [], "usage": {"total_tokens": 99}}
    data = changed(real, PLAIN, lambda said: said.extend([reason, more]))
    answer = fed(lab, data).answer()
    same(answer.choices[0].finish_reason, "stop", "two finish reasons: the last")
    same(answer.usage, {"total_tokens": 99}, "two usages: the last")


def test_thoughts_are_not_content(lab, real):
    def change(said):
        for event in said[1:4]:
            for part in event["choices"]:
                part["delta"]["reasoning"] = part["delta"].pop("content", "")

    said = events(real[PLAIN])
    answer = fed(lab, changed(real, PLAIN, change)).answer()
    got = [answer.choices[0].reasoning, answer.choices[0].content]
    want = [text_of(said[1:4]), text_of([*said[:1], *said[4:]])]
    same(got, want, "a delta's `reasoning` is joined by itself")


def test_calls_in_pieces(lab, real):
    want = [["get_weather", '{"city": "Oslo"}'], ["get_time", '{"zone": "UTC", "exact": true}']]
    answer = fed(lab, real[CALLS]).answer()
    same(view(answer)[0][1], want, "two calls, each in pieces of its own index")

    def change(said):
        """The pieces of both calls take turns, as a server may send them."""
        deltas = [e for e in said if any("tool_calls" in p["delta"] for p in e["choices"])]
        others = [e for e in said if e not in deltas]
        by_call = [[e for e in deltas if piece_of(e)["index"] == index] for index in (1, 0)]
        longest = max(map(len, by_call))
        turns = [e for k in range(longest) for of in by_call for e in of[k : k + 1]]
        said[:] = [others[0], *turns, *others[1:]]

    answer = fed(lab, changed(real, CALLS, change)).answer()
    same(view(answer)[0][1], want, "the same pieces, the calls in turn, the second one first")
    ids = [call["id"] for call in answer.choices[0].tool_calls]
    assert all(ids), f"each call has the id that its first piece says; came {ids}"


def piece_of(event):
    """The first piece of a call in an event."""
    return event["choices"][0]["delta"]["tool_calls"][0]


def test_calls_that_may_be_run(lab, real):
    city = {"city": "Oslo"}
    for name, want in (
        (PLAIN, []),
        ("chat, one call, streamed", [(0, "get_weather", city)]),
        (CALLS, [(0, "get_weather", city), (0, "get_time", {"zone": "UTC", "exact": True})]),
        ("chat, a call cut off, streamed", []),
        ("chat, a call that is no JSON, streamed", []),
        ("chat, a tool required, streamed", [(0, "get_weather", {"city": "Lima"})] * 2),
    ):
        client = lab.Client()
        for block in breaks.blocks(real[name])[:-1]:
            client.feed(block)
            same(client.calls(), [], f"{name}: an open stream, nothing may be run")
        client.feed(breaks.DONE)
        same(client.answer().state, "whole", f"{name} ends well")
        same(client.calls(), want, f"{name}, {client.answer().choices[0].finish_reason}")
    named = fed(lab, real["chat, a named tool, streamed"])
    assert named.calls(), (
        "a named tool: the finish reason is stop, and the call is whole\n"
        f"expected one call\ncame     {named.calls()} of {named.answer()}"
    )
    for rule in breaks.BROKEN:
        got = fed(lab, breaks.BROKEN[rule](real[CALLS])).calls()
        same(got, [], f"two calls, {rule}: nothing of a broken stream is run")


def test_arguments_that_are_no_object(lab, real):
    one = "chat, one call, streamed"
    for arguments, name in (("[1]", "f"), ('"a"', "f"), ("null", "f"), ("{}", None), ("{", "f")):
        made = {"index": 1, "id": "c", "function": {"arguments": arguments}}
        if name:
            made["function"]["name"] = name
        extra = {"choices": [{"index": 0, "delta": {"tool_calls": [made]}, "finish_reason": None}]}
        data = changed(real, one, lambda said, extra=extra: said.insert(-2, extra))
        same(
            fed(lab, data).calls(), [(0, "get_weather", {"city": "Oslo"})],
            f"a second call, name {name}, arguments {arguments}: only the first may be run",
        )  # fmt: skip


# --- the client as a part of a program ------------------------------------------------------------


def test_after_the_end(lab, real):
    client = fed(lab, real[PLAIN], closed=False)
    client.feed(b": bye\n\nretry: 9\n\n\n")
    same(client.answer().state, "whole", "lines that say nothing may follow [DONE]")
    client.feed(b'data: {"cho')
    client.close()
    same(client.answer().state, "whole", "an event that is not complete says nothing there, either")
    refused(lambda: client.feed(b"\n"), "bytes for a stream that was closed")
    for name in ("chat, the engine dies", "chat, the server dies"):
        client = fed(lab, real[name])
        before = client.answer().state
        client.close()
        same(client.answer().state, before, f"{name}: closed twice")


def test_an_answer_is_the_callers(lab, real):
    client, *said = lab.Client(), *breaks.blocks(real[CALLS])
    half = len(said) // 2
    client.feed(b"".join(said[:half]))
    answer = client.answer()
    kept = repr(answer)
    client.feed(b"".join(said[half:]))
    same(repr(answer), kept, "an answer that was given earlier: later bytes do not change it")
    for choice in answer.choices.values():
        choice.content, choice.tool_calls = "mine", []
        choice.tool_calls.append({"name": "mine"})
    want = at_once(KEPT[CALLS])
    same(view(client.answer()), want, "and what the caller writes into it stays with the caller")


def test_each_event_is_parsed_once(lab, real, monkeypatch):
    parsed = []
    decode = json.JSONDecoder.raw_decode

    def counted(self, s, idx=0):
        parsed.append(len(s))
        return decode(self, s, idx)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted)
    name = "chat, a stop text, streamed"
    client, length = lab.Client(), len(real[name])
    for place in range(0, length, 16):
        client.feed(real[name][place : place + 16])
        client.answer()
    monkeypatch.undo()
    same(client.answer().state, "whole", "in pieces of 16 bytes, asked after each")
    assert 0 < sum(parsed) <= length, (
        f"characters of JSON that were parsed: the stream has {length:,} bytes, each event is "
        f"parsed once, and no question parses it again\nexpected at most {length:,}\n"
        f"came     {sum(parsed):,} in {len(parsed)} calls"
    )
