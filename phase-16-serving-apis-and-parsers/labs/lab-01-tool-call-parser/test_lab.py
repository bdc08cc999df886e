"""What lab 16-01 pins: chunking changes nothing, eager, no leak, no swallow; and the real one."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc

import pytest

from conformance import parts
from labkit import same

WORKED = (
    'Sure. <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call> Then '
    '<today> <tool_call>{"name": "f", "arguments": {}}</tool_call>!'
)
WEATHER = {"name": "get_weather", "arguments": {"city": "Paris"}}
F = {"name": "f", "arguments": {}}
TEXTS = (
    WORKED,
    "no call",
    "",
    "a<<tool_call>" + json.dumps(F) + "</tool_call>",
    "<tool_call>"
    + json.dumps(F)
    + "</tool_call><tool_call>"
    + json.dumps(WEATHER)
    + "</tool_call>",
    "<t<to<tool<tool_call<tool_calls></tool_call",
    "x</tool_call>y <tool_call>\n " + json.dumps(WEATHER) + " \n</tool_call> z <",
    '<tool_call>{"name": "f", "arguments": {"s": "<tool_call> and </tool"}}</tool_call>',
    "é\U0001f680<tool_call>" + json.dumps({"name": "é", "arguments": {"ü": "你"}}) + "</tool_call>",
    "a<tool_call>{}</tool_call>b",
    "a<tool_call>" + json.dumps(F) + "</tool_call>b<tool_call>oops</tool_call>c",
    "a<tool_call>" + json.dumps(F) + "</tool_call>b<tool_call>" + json.dumps(F),
)


def joined(events):
    """Neighbouring pieces of content as one."""
    found = []
    for kind, value in events:
        if kind == "content" and found and found[-1][0] == "content":
            found[-1] = (kind, found[-1][1] + value)
        else:
            found.append((kind, value))
    return found


def outcome(lab, chunks):
    """Events of the chunks, joined, and whether it failed."""
    parser, events = lab.StreamingToolParser(), []
    try:
        for chunk in chunks:
            events += parser.feed(chunk)
        events += parser.finish()
    except lab.ToolCallError as error:
        return joined(events + error.events), True
    return joined(events), False


def cuts(text, rng):
    chunks = []
    while text:
        length = rng.randint(1, rng.choice((1, 3, 12, 60)))
        chunks.append(text[:length])
        text = text[length:]
    return chunks


def overlap(text):
    """What of the end of `text` may begin a tag, by trying all."""
    return max(
        length for length in range(len("<tool_call>")) if text.endswith("<tool_call>"[:length])
    )


def certain(text):
    """Events of a text that is not over, from its definition; good blocks only."""
    events = []
    while "<tool_call>" in text:
        content, _, rest = text.partition("<tool_call>")
        events.append(("content", content))
        body, tag, text = rest.partition("</tool_call>")
        if not tag:
            return joined(event for event in events if event[1])
        events.append(("tool_call", json.loads(body)))
    events.append(("content", text[: len(text) - overlap(text)]))
    return joined(event for event in events if event[1] != "")


def raised(lab, call):
    """The ToolCallError of `call`."""
    try:
        got = call()
    except lab.ToolCallError as error:
        return error
    raise AssertionError(f"expected a ToolCallError\ncame     {got}")


# --- the text at once -----------------------------------------------------------------------------


def test_batch_parse(lab):
    content, calls = lab.parse_tool_calls(WORKED)
    same(content, "Sure.  Then <today> !", "all text outside the blocks, joined and not stripped")
    same(calls, [WEATHER, F], "the two calls; arguments are an object here")


def test_multiple_calls_in_order(lab):
    names = ["b", "a", "c", "a"]
    text = "".join(
        f"{n}<tool_call>{json.dumps({'name': n, 'arguments': {'at': at}})}</tool_call>"
        for at, n in enumerate(names)
    )
    content, calls = lab.parse_tool_calls(text)
    same([call["name"] for call in calls], names, "calls stand in the order of the text")
    same(content, "baca", "and the text between them is kept")


def test_prefix_helper_table(lab):
    for text, expected in (
        ("", 0), ("<", 1), ("<<", 1), ("x <tool", 5), ("<tool_call", 10), ("<tool_call>", 0),
        ("<tool_call><", 1), ("<to ", 0), ("<<tool_call", 10), ("tool_call", 0),
    ):  # fmt: skip
        same(
            lab._trailing_tag_prefix(text), expected,
            f"{text!r}: characters at its end that may begin <tool_call>",
        )  # fmt: skip
    same(lab._trailing_tag_prefix("ababa", "ababc"), 3, "the longest one counts: aba, not a")


# --- in pieces ------------------------------------------------------------------------------------


def test_streaming_equals_batch_for_any_chunking(lab):
    rng = random.Random(16)
    for text in TEXTS:
        whole = outcome(lab, [text])
        for chunks in (list(text), *(cuts(text, rng) for _ in range(50))):
            same(outcome(lab, chunks), whole, f"{text!r} cut {chunks}: as at once")


def test_tag_split_across_chunks_is_not_leaked(lab):
    parser = lab.StreamingToolParser()
    same(
        parser.feed("Sure. <tool"), [("content", "Sure. ")],
        "<tool may begin a tag: it is held, and only it",
    )  # fmt: skip
    same((parser.feed("_call>"), parser.in_block), ([], True), "it was a tag: nothing is given")
    same(parser.feed(json.dumps(WEATHER)), [], "a block is not content")
    same(parser.feed("</tool_"), [], "and neither is half its closing tag")
    same(
        (parser.feed("call> ok"), parser.in_block),
        ([("tool_call", WEATHER), ("content", " ok")], False),
        "the call comes with the end of its tag",
    )


def test_false_alarm_prefix_is_released(lab):
    parser = lab.StreamingToolParser()
    same(parser.feed("<to"), [], "held")
    same(parser.feed("day>"), [("content", "<today>")], "it was none: given, with what follows")
    parser, given = lab.StreamingToolParser(), []
    for char in "Hi <b> x":
        given.append("".join(value for _, value in parser.feed(char)))
    same(
        given, ["H", "i", " ", "", "<b", ">", " ", "x"],
        "one character at a time: only the < waits, for one step",
    )  # fmt: skip


def test_emission_is_as_eager_as_possible(lab, record_property):
    for text in TEXTS[:9]:
        parser, events = lab.StreamingToolParser(), []
        for end, char in enumerate(text, 1):
            events += parser.feed(char)
            same(
                joined(events), certain(text[:end]),
                f"after {text[:end]!r}: all that is certain, and only that",
            )  # fmt: skip
    parser = lab.StreamingToolParser()
    record_property("measured.silent", sum(not parser.feed(char) for char in WORKED))


def test_doubled_open_bracket(lab):
    parser = lab.StreamingToolParser()
    same(parser.feed("a<"), [("content", "a")], "the < is held")
    same(
        (parser.feed("<tool_call>"), parser.in_block), ([("content", "<")], True),
        "a second < ends the first hope and begins the next one",
    )  # fmt: skip


def test_two_calls_in_one_chunk(lab):
    block = f"<tool_call>{json.dumps(F)}</tool_call>"
    same(
        lab.StreamingToolParser().feed(block + block), [("tool_call", F)] * 2,
        "a piece may hold more than one block",
    )  # fmt: skip


def test_events_keep_stream_order(lab):
    block = f"<tool_call>{json.dumps(F)}</tool_call>"
    same(
        lab.StreamingToolParser().feed(f"a{block}b{block}c"),
        [("content", "a"), ("tool_call", F), ("content", "b"), ("tool_call", F), ("content", "c")],
        "text after a call is given, in its place",
    )


def test_whitespace_and_newlines_around_json(lab):
    same(
        lab.parse_tool_calls(f"<tool_call>\n\t {json.dumps(F, indent=2)}\n </tool_call>"),
        ("", [F]), "white space around the object is allowed, and is not content",
    )  # fmt: skip


def test_close_tag_split(lab):
    text = f"<tool_call>{json.dumps(F)}</tool_call>."
    for at in range(1, len(text)):
        same(
            outcome(lab, [text[:at], text[at:]]), ([("tool_call", F), ("content", ".")], False),
            f"cut before {text[at:]!r}",
        )  # fmt: skip


def test_empty_pieces_change_nothing(lab):
    parser = lab.StreamingToolParser()
    same(
        [parser.feed(piece) for piece in ("", "<", "", "x", "")],
        [[], [], [], [("content", "<x")], []], 'a "" gives nothing and releases nothing',
    )  # fmt: skip


# --- the end, and what is no call -----------------------------------------------------------------


def test_finish_releases_held_text(lab):
    parser = lab.StreamingToolParser()
    parser.feed("x <tool")
    same(parser.finish(), [("content", "<tool")], "no tag can follow: the text was text")
    parser = lab.StreamingToolParser()
    parser.feed("x")
    same(parser.finish(), [], "nothing was held")


def test_malformed_json_is_loud(lab):
    for body in (
        "oops", "", "{", "[]", "1", '"f"', "null", "{name: f}", '{"name": "f", "arguments": {}} x',
        '{"name": "", "arguments": {}}', '{"name": 1, "arguments": {}}', '{"arguments": {}}',
    ):  # fmt: skip
        for chunks in ([f"<tool_call>{body}</tool_call>"], list(f"<tool_call>{body}</tool_call>")):
            parser = lab.StreamingToolParser()

            def feed(parser=parser, chunks=chunks):
                return [parser.feed(chunk) for chunk in chunks]

            assert isinstance(raised(lab, feed), ValueError), "a ToolCallError is a ValueError"
        raised(lab, lambda body=body: lab.parse_tool_calls(f"<tool_call>{body}</tool_call>"))


def test_missing_arguments_is_loud(lab):
    for arguments in ("", ', "arguments": null', ', "arguments": "{}"', ', "arguments": []'):
        text = f'<tool_call>{{"name": "f"{arguments}}}</tool_call>'
        raised(lab, lambda text=text: lab.parse_tool_calls(text))
    extra = {"name": "f", "arguments": {}, "why": [1]}
    same(
        lab.parse_tool_calls(f"<tool_call>{json.dumps(extra)}</tool_call>"), ("", [extra]),
        "keys beyond the two are kept",
    )  # fmt: skip


def test_deep_nesting_is_no_crash(lab):
    body = '{"name": "f", "arguments": {"x": ' + "[" * 100_000
    raised(lab, lambda: lab.parse_tool_calls(f"<tool_call>{body}</tool_call>"))


def test_unterminated_block_fails_at_finish(lab):
    for text in (
        "<tool_call>",
        f"a<tool_call>{json.dumps(F)}",
        f"<tool_call>{json.dumps(F)}</tool",
    ):
        parser = lab.StreamingToolParser()
        parser.feed(text)
        same(raised(lab, parser.finish).events, [], "what preceded was given by feed")
        raised(lab, lambda text=text: lab.parse_tool_calls(text))


def test_error_carries_preceding_events_for_any_chunking(lab):
    rng = random.Random(7)
    for text in TEXTS[9:]:
        error = raised(lab, lambda text=text: lab.parse_tool_calls(text))
        expected = certain(text.partition("oops")[0])
        if text.startswith("a<tool_call>{}"):
            expected = [("content", "a")]
        same(joined(error.events), expected, f"{text!r} at once: events before the failure")
        for _ in range(50):
            chunks = cuts(text, rng)
            same(outcome(lab, chunks), (expected, True), f"{text!r} cut {chunks}")


def test_nothing_is_taken_after_the_end(lab):
    def used(parser):
        for call in (lambda: parser.feed(""), lambda: parser.feed("x"), parser.finish):
            try:
                got = call()
            except RuntimeError:
                continue
            raise AssertionError(f"a parser that is over must raise RuntimeError; came {got}")

    finished = lab.StreamingToolParser()
    finished.finish()
    used(finished)
    failed = lab.StreamingToolParser()
    raised(lab, lambda: failed.feed("<tool_call></tool_call>"))
    used(failed)
    cut = lab.StreamingToolParser()
    cut.feed("<tool_call>")
    raised(lab, cut.finish)
    used(cut)


# --- what it costs --------------------------------------------------------------------------------


def test_little_is_kept_outside_a_block(lab):
    parser = lab.StreamingToolParser()
    before = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        for _ in range(100):
            parser.feed("plain <t ")
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(3000):
            parser.feed("plain <t ")
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        if not before:
            tracemalloc.stop()
    assert grown < 9000, (
        f"27,000 characters of plain text: the parser keeps {grown} bytes more than before them\n"
        "expected no growth: what is given is needed no more, and a parser that keeps it looks "
        "through it again at every piece"
    )
    same(parser.feed("."), [("content", ".")], "and it still works")


def test_json_is_read_once(lab):
    body = json.dumps({"name": "f", "arguments": {"x": "y" * 500}})
    count = 0

    def watch(frame, event, _arg):
        nonlocal count
        count += event == "call" and frame.f_code.co_name == "raw_decode"

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        events, _ = outcome(lab, list(f"<tool_call>{body}</tool_call>"))
    finally:
        sys.setprofile(before)
    same(events, [("tool_call", json.loads(body))], "a block of 528 characters, one at a time")
    assert count <= 1, (
        f"the block came in {len(body) + 23} pieces, and its JSON was read {count} times\n"
        "expected once: n tries at up to n characters are n squared"
    )


# --- beside the real one --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """What the real Hermes parser says: every text, whole and in every cut."""
    return [case for case in parts.load("tool_parsers") if case["kind"] == "hermes"]


def pieces(case):
    """Of each cut: (piece, what the real parser gave for it), in order."""
    for lengths, deltas in case["cuts"]:
        at, cut = 0, []
        for length, delta in zip(lengths, deltas, strict=True):
            cut.append((case["text"][at : at + length], delta or {}))
            at += length
        yield cut


def test_content_is_held_exactly_as_the_real_one_holds_it(lab, recorded):
    """Up to the first opening tag, piece by piece, each text cut at every place."""
    count = 0
    for case in recorded:
        for cut in pieces(case):
            parser, open_ = lab.StreamingToolParser(), True
            for piece, delta in cut:
                ours = ""
                try:
                    events = parser.feed(piece) if open_ else []
                except lab.ToolCallError as error:
                    events, failed = error.events, True
                else:
                    failed = False
                for kind, value in events if open_ else ():
                    if kind == "tool_call":
                        open_ = False
                        break
                    ours += value
                open_ = open_ and not failed
                same(
                    ours, delta.get("content") or "",
                    f"{case['text']!r} cut {[p for p, _ in cut]}, at {piece!r}: content, yours "
                    "and the real parser's",
                )  # fmt: skip
                count += 1
    assert count > 5000, f"pieces compared: {count}"


def streamed(case):
    """What a client of the real parser has at the end: content, and [name, arguments] of calls."""
    (cut,) = [c for c in pieces(case) if [p for p, _ in c] == list(case["text"])][:1]
    content, calls = "", []
    for _, delta in cut:
        content += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            if "name" in function:
                calls.append([function["name"], ""])
            calls[part["index"]][1] += function.get("arguments", "")
    return content, calls


def as_object(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_where_the_real_one_differs(lab, recorded, record_property):
    """It never fails: what is no call becomes text, or half a call."""
    kept = {"refused": 0, "whole": 0, "streamed": 0}
    for case in recorded:
        whole = case["whole"][0] or "", [[n, as_object(a)] for n, a in case["whole"][1]]
        content, calls = streamed(case)
        theirs = content, [[n, as_object(a)] for n, a in calls]
        try:
            content, calls = lab.parse_tool_calls(case["text"])
        except lab.ToolCallError:
            kept["refused"] += 1
            continue
        ours = content, [[call["name"], call["arguments"]] for call in calls]
        kept["whole"] += ours == whole
        kept["streamed"] += ours == theirs
        if whole[1]:
            same(ours[1], whole[1], f"{case['text']!r}: a call of yours and of the real parser's")
    same(
        (len(recorded), kept), (30, {"refused": 15, "whole": 11, "streamed": 9}),
        "texts recorded; of them those that you refuse, and of the others those in which the real "
        "parser gives the same content and calls, at once and streamed",
    )  # fmt: skip
    find = {case["text"]: case for case in recorded}
    tail = streamed(find["If a <tool"])[0]
    record_property(
        "measured.tail", {"If a <tool": "all of it", "If a ": "If a"}.get(tail, "nothing")
    )
    between = next(text for text in find if text.startswith("A<tool_call>"))
    record_property(
        "measured.between", {"A": "A", "ABC": "A B C"}.get(streamed(find[between])[0], "")
    )
