"""Record what the real v0.22.1 chat server makes of gpt-oss's harmony format.

Its two generators run on tokens in the place of an engine's, as for a model of type `gpt_oss`, with
`--tool-call-parser openai` and without. A stream is cut at every place between two tokens, into
tokens, and into runs of several. `harmony_vocabulary.py` says where the vocabulary comes from.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from conformance.features.entrypoints import harmony_vocabulary, tool_chats
from conformance.features.entrypoints.tool_chats import NAMED
from conformance.features.entrypoints.tool_families import TOOLS, nameless

Case = dict[str, Any]
Asked = tuple[str, bool, dict[str, Any]]

ABOUT = (
    '`{"tokens", "parses", "asked", "reason", "whole", "cuts": [[numbers of tokens, choices of the '
    "chunks]]}`. A token is its text, or its bytes where they are not a text alone. `parses`: with "
    "the tool parser. `asked`: what the request says beside its messages and the tools of "
    '`tool_families.py`. `whole`: a choice, or `{"raises"}`. Ids keep their form alone, errors no '
    "words."
)
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)


def said(channel: str, text: str, header: str = "", end: str = END) -> str:
    """A message of the assistant, without what it begins with."""
    return f"{CHANNEL}{channel}{header}{MESSAGE}{text}{end}"


def called(name: str, arguments: str, kind: str = f" {CONSTRAIN}json", end: str = CALL) -> str:
    """A call of a function, as the model writes it."""
    return said("commentary", arguments, f" to=functions.{name}{kind}", end)


NEXT = f"{START}assistant"
THOUGHT = said("analysis", "Add 2 and 2.")
FINAL = said("final", "It is 4.", end=RETURN)
PREAMBLE = said("commentary", "I will look it up.")
WEATHER = called("get_weather", '{"city": "Oslo",\n "days": 3}')
NOTE = called("note", '{"text": "hé 🪿"}')
NOW = called("now", "{}")

TEXTS: tuple[str, ...] = (
    FINAL, THOUGHT, f"{THOUGHT}{NEXT}{FINAL}", f"{THOUGHT}{NEXT}{WEATHER}", WEATHER, NOW,
    f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{WEATHER}", f"{WEATHER}{NEXT}{NOTE}{NEXT}{NOW}",
    f"{NOW}{NEXT}{NOW}", f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}", f"{PREAMBLE}{NEXT}{FINAL}",
    f"{PREAMBLE}{NEXT}{PREAMBLE}", f"{FINAL}{NEXT}{FINAL}", f"{FINAL}{NEXT}{PREAMBLE}",
    f"{WEATHER}{NEXT}{FINAL}", f"{THOUGHT}{NEXT}{said('final', '', end=RETURN)}",
    # calls in other words
    called("now", "{}", " json"), called("now", '{"a":1}', ""),
    called("now", "{}", f"{CONSTRAIN}json"),
    called("now", '{"a":1}', " code"), called("now", "{oops", " json"), called("now", "[1, 2]"),
    called("now", ' {"a": "é"} ', end=END), called("now", "1", f" {CONSTRAIN}text"),
    f"{START}assistant to=functions.now{CHANNEL}commentary json{MESSAGE}{{}}{CALL}",
    f" to=functions.now{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{{}}{CALL}",
    f" to=functions.now{CHANNEL}analysis{MESSAGE}{{}}{CALL}",
    f"{CHANNEL}commentary now{MESSAGE}{{}}{CALL}", f"{CHANNEL}commentary json{MESSAGE}{{}}{CALL}",
    f"{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{{}}{END}",
    f"{CHANNEL}final to=functions.now{MESSAGE}no call{END}", called("", "{}"),
    f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}{{}}{RETURN}",
    f" to=now{MESSAGE}{{}}{CALL}", f" to={MESSAGE}a{END}",
    f"{CHANNEL}commentary to={MESSAGE}a{END}",
    # recipients that are no functions
    *(f"{CHANNEL}commentary to={name} code{MESSAGE}1 + 1{CALL}" for name in (
        "python", "browser.search", "container.exec", "assistant", "<|end|>", "my.tool",
        "functions",
    )),
    # other roles, and none
    f"{FINAL}{START}user{MESSAGE}Hello.{END}",
    f"{THOUGHT}{START}functions.now to=assistant{CHANNEL}commentary{MESSAGE}9{END}{NEXT}{FINAL}",
    f"{THOUGHT}{START}system{CHANNEL}final{MESSAGE}a{END}",
    f"{THOUGHT}{START}nobody{MESSAGE}a{END}", f"{THOUGHT}{START}{MESSAGE}a{END}",
    f"{THOUGHT}{START}user to=functions.now{CHANNEL}commentary{MESSAGE}{{}}{CALL}",
    f"{THOUGHT}{START}to=functions.now{CHANNEL}commentary json{MESSAGE}{{}}{CALL}",
    f"assistant{CHANNEL}final{MESSAGE}a{RETURN}", f"{NEXT}{CHANNEL}final{MESSAGE}a{RETURN}",
    f"{THOUGHT}{NEXT} assistant{CHANNEL}final{MESSAGE}a{END}",
    # malformed
    f"Hello{MESSAGE}a{END}", "Hello", f"{MESSAGE}a{RETURN}", f"{CHANNEL}{MESSAGE}a{END}",
    f"{CHANNEL} final{MESSAGE}a{END}", f"{CHANNEL}final{END}",
    f"{CHANNEL}final{END}{MESSAGE}a{END}",
    f"{FINAL}more", f"{FINAL}{NEXT}", f"{FINAL}{CHANNEL}final{MESSAGE}a{RETURN}", f"{END}{FINAL}",
    f"{CHANNEL}final one two three{MESSAGE}a{END}", f"{CHANNEL}final one two{MESSAGE}a{END}",
    f"{CHANNEL}analysis{CHANNEL}final{MESSAGE}a{END}", f"{CHANNEL}final{MESSAGE}a{CHANNEL}b{END}",
    f"{CHANNEL}final{MESSAGE}a{START}b{MESSAGE}c{END}",
    f"{CHANNEL}final{MESSAGE}a{MESSAGE}b{RETURN}",
    f"{CHANNEL}final\u00a0x{MESSAGE}a{END}", f"{CHANNEL}final\u001cx{MESSAGE}a{END}",
    f"{CHANNEL}final\u000bx{MESSAGE}a{END}", f"\u00a0{CHANNEL}final\u2003{MESSAGE}a{END}",
    called("no\u2003w", "{}"), f"{CHANNEL}other{MESSAGE}a{END}", f"{CHANNEL}Final{MESSAGE}a{END}",
    f"{CHANNEL}commentary to=functions.now {CONSTRAIN}{CONSTRAIN}json{MESSAGE}{{}}{CALL}",
    # cut
    f"{CHANNEL}final{MESSAGE}It is", f"{CHANNEL}analysis{MESSAGE}Add 2", f"{CHANNEL}commentary",
    f"{THOUGHT}{NEXT}{CHANNEL}commentary{MESSAGE}I will", WEATHER[: len(WEATHER) - 12],
    f"{PREAMBLE}{NEXT}{CHANNEL}final{MESSAGE}It", f"{FINAL}{NEXT}{CHANNEL}final{MESSAGE}",
    f"{THOUGHT}{NEXT}{CHANNEL}final{MESSAGE}🪿 größer: 日本 <|", f"{NOW}{NEXT}{WEATHER[:-9]}",
    *(f"{CHANNEL}{name}{MESSAGE}a🪿" for name in ("final", "analysis", "commentary")),
)  # fmt: skip

LAST = "🪿"
"""A character of several tokens; a text that ends in it is cut inside of it."""

ASKED: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS, "tool_choice": "auto"}, {}, {"include_reasoning": False},
    {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": NAMED}, {"tools": TOOLS, "parallel_tool_calls": False},
)  # fmt: skip
VARIED = (
    f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{WEATHER}{NEXT}{NOW}", f"{THOUGHT}{NEXT}{FINAL}",
    f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{FINAL}", '[{"name": "now", "parameters": {}}]',
)  # fmt: skip
"""What is said to every kind of request; the last is what a constraint would force elsewhere."""

WORDS = (
    "analysis", "commentary", "final", "assistant", "user", "tool", "json", " to=functions.now",
    " to=python", " to=", " now", " ", "\n", "{}", '{"a": 1}', "a", " b",
)  # fmt: skip


def drawn(rng: random.Random) -> str:
    """A stream of tags and words, in an order that is often wrong."""
    text = ""
    for _ in range(rng.randint(1, 4)):
        header = [CHANNEL, *rng.choices(WORDS[:3], k=1)] if rng.random() < 0.8 else []
        extra = rng.choices((*WORDS, CONSTRAIN, END), k=rng.choice((0, 0, 1, 1, 2, 3)))
        header = [*extra, *header] if rng.random() < 0.4 else [*header, *extra]
        body = rng.choices((*WORDS, START, CHANNEL), [*[3] * len(WORDS), 1, 1], k=rng.randint(0, 3))
        end = rng.choice((END, END, RETURN, CALL, ""))
        after = rng.choice((START, START, NEXT, NEXT, NEXT, NEXT, NEXT, ""))
        text += "".join([*header, MESSAGE, *body, end, after])
    return text


def encoding() -> Any:
    """The one that vLLM reads harmony with."""
    harmony_vocabulary.find()
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    return get_encoding()


def shown(token: bytes) -> str | list[int]:
    """A token as it is recorded."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)


def cuts_of(count: int, rng: random.Random) -> Iterator[list[int]]:
    """Numbers of tokens in pieces: all, two at every place, runs; the last may be none."""
    yield [count]
    yield from ([at, count - at] for at in range(1, count))
    for size in (1, 2, 3, 5):
        yield _runs(count, itertools.repeat(size))
    yield [*_runs(count, itertools.repeat(1)), 0]
    yield [count, 0]
    for _ in range(4):
        yield _runs(count, iter(lambda: rng.randint(1, 6), None))


def _runs(count: int, sizes: Iterator[int]) -> list[int]:
    found = []
    while count:
        found.append(min(next(sizes), count))
        count -= found[-1]
    return found or [0]


def server_of(parses: bool, tokenizer: Any) -> Any:
    """The real chat server's own object for a model of type `gpt_oss`, without an engine."""
    from vllm.parser.parser_manager import ParserManager

    server = tool_chats.server_of("openai")
    server.use_harmony = True
    server.reasoning_parser_cls = ParserManager.get_reasoning_parser("openai_gptoss")
    if not parses:
        server.tool_parser, server.enable_auto_tools = None, False
    server.parser_cls = ParserManager.get_parser(
        "openai" if parses else None, "openai_gptoss", parses
    )
    return server


def tokenizer_of(known: Any) -> Any:
    """What the parsers ask of a tokenizer."""
    vocabulary = {tag: known.encode(tag, allowed_special="all")[0] for tag in TAGS}
    return SimpleNamespace(
        get_vocab=lambda: vocabulary,
        encode=lambda text: known.encode(text, allowed_special="all"),
    )


def _pieces(ids: Sequence[int], counts: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Each piece without a text, which is not read."""
    ends = list(itertools.accumulate(counts))
    starts = [0, *ends[:-1]]
    return [("", list(ids[a:b])) for a, b in zip(starts, ends, strict=True)]


async def _streamed(server: Any, request: Any, pieces: Any, reason: str, tokenizer: Any) -> Any:
    reasoning = server.reasoning_parser_cls(tokenizer)
    events = server.chat_completion_stream_generator(
        request, tool_chats.outputs(pieces, reason), "r", "m", [], tokenizer, SimpleNamespace(),
        reasoning,
    )  # fmt: skip
    return tool_chats.choices_of([event async for event in events][1:])


async def _whole(server: Any, request: Any, ids: list[int], reason: str, tokenizer: Any) -> Any:
    outputs = tool_chats.outputs([("", ids)], reason)
    reasoning = server.reasoning_parser_cls(tokenizer)
    try:
        answer = await server.chat_completion_full_generator(
            request, outputs, "r", "m", [], tokenizer, SimpleNamespace(), reasoning
        )
    except RuntimeError as error:
        return {"raises": type(error).__name__}
    choice = json.loads(answer.model_dump_json())["choices"][0]
    nameless(choice["message"])
    return choice


def asked_of() -> Iterator[Asked]:
    """A text, whether calls are parsed, and what the request says."""
    rng = random.Random("harmony")
    for text in (*TEXTS, *(drawn(rng) for _ in range(120))):
        yield text, True, ASKED[0]
    for text, parses in itertools.product(VARIED, (True, False)):
        yield from ((text, parses, asked) for asked in ASKED)


def cases(asked: Iterable[Asked] | None = None) -> Iterator[Case]:
    """The cases; the same every time, unless others are asked for."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs each malformed stream
    known, rng = encoding(), random.Random("cuts")
    tokenizer = tokenizer_of(known)
    for text, parses, request_says in asked_of() if asked is None else asked:
        server = server_of(parses, tokenizer)
        ids = known.encode(text, allowed_special="all")
        ids = ids[:-1] if text.endswith(LAST) else ids
        reason = "length" if len(ids) % 3 == 0 else "stop"
        body = {"messages": [], "model": "m", "stream": True, **request_says}
        cuts = []
        for counts in cuts_of(len(ids), rng):
            request = ChatCompletionRequest(**body)
            pieces = _pieces(ids, counts)
            cuts.append(
                [counts, asyncio.run(_streamed(server, request, pieces, reason, tokenizer))]
            )
        whole = asyncio.run(_whole(server, ChatCompletionRequest(**body), ids, reason, tokenizer))
        yield {
            "tokens": [shown(bytes(known._inner.decode_bytes([token]))) for token in ids],
            "parses": parses, "asked": request_says, "reason": reason, "whole": whole, "cuts": cuts,
        }  # fmt: skip
