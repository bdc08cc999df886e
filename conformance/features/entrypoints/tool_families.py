"""Record what the real v0.22.1 parsers of other families than Hermes say to texts in pieces.

Each text is cut into two pieces at every place, into characters, and into runs of tokens. An id
comes with its text or a piece earlier, as from a detokenizer that holds text back. After the text
comes what ends a request: no text and the end token's id.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"text", "choice", "whole": [content, calls], "cuts": [[lengths of the pieces, '
    "late, deltas]]}`. The recorder's `TOOLS` are offered, none with the choice None. `late`: the "
    "ids come that many pieces before their text. A delta is what the client is sent, None for "
    'nothing, `{"raises"}` for an error; ids keep their form alone.'
)
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
VOCABULARY = {tag: number for number, tag in enumerate(TAGS, 1)}
SPLIT = "|".join(map(re.escape, TAGS))
EOS = 0

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        ("get_weather", {"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"},
        }}),
        ("note", {"type": "object", "properties": {
            "text": {"type": "string"}, "maybe": {"type": ["string", "null"]},
            "tags": {"type": "array"}, "meta": {"type": "object"}, "sure": {"type": "boolean"},
            "ratio": {"type": "number"}, "kind": {"enum": ["a", 1, 1.5, True, None, [], {}]},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "short": {"type": " Text"}, "bare": True, "plain": {},
        }}),
        ("now", None),
    )
]  # fmt: skip
"""What is offered: every type, and a tool without parameters."""


def hermes(name: str, /, **arguments: Any) -> str:
    """A call as Hermes' family writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def glm45(name: str, end: str = "\n", /, **arguments: Any) -> str:
    """As GLM 4.5 writes it."""
    pairs = (
        f"<arg_key>{key}</arg_key>{end}<arg_value>{_text(value)}</arg_value>{end}"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{end}{''.join(pairs)}</tool_call>"


def glm47(name: str, /, **arguments: Any) -> str:
    """As GLM 4.7 writes it, without line ends."""
    return glm45(name, "", **arguments)


def qwen3_coder(name: str, /, **arguments: Any) -> str:
    """As Qwen3-Coder writes it."""
    pairs = (f"<parameter={k}>\n{_text(value)}\n</parameter>\n" for k, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def mistral(name: str, /, **arguments: Any) -> str:
    """As Mistral's models since version 11 of their tokenizer write it."""
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


FORMS = {
    "hermes": hermes, "glm45": glm45, "glm47": glm47, "qwen3_coder": qwen3_coder,
    "mistral": mistral,
}  # fmt: skip
"""How each family writes a call."""

SAME: dict[str, dict[str, Any]] = {
    "get_weather": {"city": "Oslo", "days": 3},
    "note": {"text": 'say "hé"\n  twice', "tags": ["a", {"b": 1}], "sure": True},
    "now": {},
}
"""The same three calls for every family: arguments by name."""

_GLM = glm45("get_weather", city="Oslo", days=3)
_LESS = "<tool_call>f<arg_key>x</arg_key><arg_value>"
GLM = (
    "", "No call at all.", _GLM, f"Let me look. {_GLM}", f"  {_GLM}", f"{_GLM}\n{_GLM}",
    f"{_GLM} then {glm45('now')} Done.", glm47("get_weather", city="Oslo", days=3), glm45("now"),
    glm47("now"), "<tool_call>\nnow\n</tool_call>", "<tool_call></tool_call>after",
    "<tool_call>", "<tool_call><tool_call>", "a <tool> b <tool_calls c", "a<<tool_call>", "a <tool",
    "text </tool_call> text", _GLM[:58], _GLM.removesuffix("</tool_call>"),
    f"<tool_call></tool_call>{_GLM}", f"{_GLM}{_GLM[:40]}",
    glm45("note", text=' a "b"\n', maybe="null", tags="['a', (1,)]", meta='{"k": {"l": 1}}'),
    glm45("note", sure="True", ratio="1.50", kind="a", either=" 7 ", short="x", bare="None"),
    glm45("note", plain="{'a': True}", other='"q"'), glm45("f", x="..."), glm45("f", x="{1}"),
    glm45("f", x=" 1.50 ", y="0x1F", z=""),
    glm45("héllo", ö="日本"), "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</tool_call>",
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os</tool_call>",
    f"{_LESS}1</arg_value><arg_value>2</arg_value></tool_call>", f"{_LESS}<arg_key>y</arg_key>2",
    "<tool_call>f\n<arg_value>1</arg_value></tool_call>", "<tool_call>f\n<arg_value>1",
    f"{_LESS}</tool_call></arg_value></tool_call>", "<tool_call>f g\nx</tool_call>tail",
)  # fmt: skip

_QWEN = qwen3_coder("get_weather", city="Oslo", days=3)
_BARE = "<tool_call><function=f><parameter=x>"
QWEN = (
    "", "No call at all.", _QWEN, f"Let me look. {_QWEN}", f"{_QWEN}\n{_QWEN}",
    f"{_QWEN} then {qwen3_coder('now')} Done.", _QWEN.replace("\n", ""), qwen3_coder("now"),
    "<tool_call></tool_call>after", "<tool_call>", "a <tool> b <tool_calls c", "a<<tool_call>",
    "a <tool", "text </tool_call> text", _QWEN[:60], _QWEN.removesuffix("\n</tool_call>"),
    _QWEN.removeprefix("<tool_call>\n"), f"<tool_call>x</tool_call>{_QWEN}", f"{_QWEN}{_QWEN[:40]}",
    qwen3_coder("note", text=' a "b"\n', maybe="null", tags="[1, 2", meta='{"k": {"l": 1}}'),
    qwen3_coder("note", sure="True", ratio="1.50", kind="7", either=" 7 ", short="5", bare="x"),
    qwen3_coder("note", plain="{'a': True}", other='"q"'),
    qwen3_coder("f", x=" 1.50 ", y="[", z=""),
    qwen3_coder("note", kind="null", sure="0", ratio="2.0", either="x", bare="[1]"),
    qwen3_coder("note", ratio="1e999"), qwen3_coder("note", ratio="nan", sure="maybe"),
    qwen3_coder("héllo", ö="日本"), f"{_BARE}1</function></tool_call>",
    f"{_BARE}1<parameter=y>2</parameter></function></tool_call>", f"{_BARE}1</tool_call>",
    f"{_BARE}1<parameter=y>2</function></tool_call>",
    "<tool_call><function=f></tool_call>", "<tool_call><function=f", "<function=f>x</function>",
    "<tool_call><function=f><parameter=x</parameter></function></tool_call>",
    "<tool_call><function=f</function></tool_call>",
    "<tool_call><function=f></function><function=g></function></tool_call>",
)  # fmt: skip

MISTRAL = (
    "", "No call at all.", mistral("now"), mistral("get_weather", city="Oslo", days=3),
    f"Let me look. {mistral('now')}", mistral("f", x=1) + mistral("g", y={"z": "{}"}),
    'a [TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g{}', "[TOOL_CALLS]", "[TOOL_CALLS]f", "[TOOL_CALLS]f{",
    "[TOOL_CALLS][TOOL_CALLS]f{}", "a [TOOL", "a [TOOL_CALLS] b", "[TOOL_CALLS]f{} after",
    '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', "[TOOL_CALLS]f [ARGS] {oops",
    mistral("héllo", ö="日本"), 'x[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}',
    f"{mistral('now')}\n{mistral('now')}",
)  # fmt: skip


TEXTS = {"glm45": GLM, "glm47": GLM, "qwen3_coder": QWEN, "mistral": MISTRAL}


def _asked(family: str) -> Iterator[tuple[str, str | None]]:
    """A text and the choice of tools; one that begins with `<think>` is thought aloud."""
    call = FORMS[family]("now")
    yield from ((text, "auto") for text in TEXTS[family])
    for choice in ("none", None, "required"):
        if choice != "required" or family.startswith("glm"):
            yield f"a {call}", choice
    yield f"<think>so {call}</think>a {call}", "auto"
    yield f"<think>so {call}</think>a", "auto"
    yield f"<think></think>{call}", "auto"
    yield "".join(FORMS[family](name, **given) for name, given in SAME.items()), "auto"


def thinks(text: str) -> bool:
    """Whether a server that reads it parses reasoning, too."""
    return text.startswith("<think>")


def ids_of(piece: str) -> list[int]:
    """The tokens of a piece: a tag that is whole is one, and any other character is one."""
    parts = re.split(f"({SPLIT})", piece)
    return [VOCABULARY.get(t, 9 + ord(t[0])) for part in parts for t in _tokens(part)]


def fed(text: str, lengths: Sequence[int], late: int) -> Iterator[tuple[str, list[int]]]:
    """What a parser gets: each piece with token ids, the last one empty with the end's."""
    pieces = []
    for length in lengths:
        pieces.append(text[:length])
        text = text[length:]
    if late:
        yield "", ids_of(pieces[0])
        yield from zip(pieces, [*map(ids_of, pieces[1:]), [EOS]], strict=True)
    else:
        yield from ((piece, ids_of(piece)) for piece in pieces)
        yield "", [EOS]


def cuts_of(text: str, rng: random.Random) -> Iterator[tuple[list[int], int]]:
    """Lengths of pieces, and whether their ids come a piece earlier.

    The whole, two pieces at every place, single characters; then runs of tokens, of which a tag is
    one and any other character is one: of equal lengths, of random ones, and all that is left after
    single ones.
    """
    yield [len(text)], 0
    yield from (([at, len(text) - at], at % 2) for at in range(1, len(text)))
    if text:
        yield [1] * len(text), 0
    tokens = token_lengths(text)
    for size in (1, 2, 3, 5, 8):
        yield runs(tokens, [size] * len(tokens)), 0
    yield runs(tokens, [1] * len(tokens)), 1
    yield [length for token in tokens or [0] for length in (token, 0)], 1
    for part in (1, 2, 3):
        yield runs(tokens, [1] * (len(tokens) * part // 4) + [len(tokens)]), 0
    for number in range(16):
        yield runs(tokens, [rng.randint(1, 9) for _ in tokens]), number % 2


def token_lengths(text: str) -> list[int]:
    """Of each token of a text."""
    return [len(token) for part in re.split(f"({SPLIT})", text) for token in _tokens(part)]


def _tokens(part: str) -> list[str]:
    return [part] if part in VOCABULARY else list(part)


def runs(tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Lengths of pieces of so many tokens each."""
    ends = [end for end in itertools.accumulate(sizes) if end < len(tokens)]
    return [sum(tokens[a:b]) for a, b in itertools.pairwise([0, *ends, len(tokens)])]


def nameless(delta: Any) -> Any:
    """A delta as an object, of ids their form alone."""
    if delta is None:
        return None
    found = (
        delta if isinstance(delta, dict) else json.loads(delta.model_dump_json(exclude_unset=True))
    )
    for call in found.get("tool_calls") or ():
        if call.get("id") is not None:
            call["id"] = form_of(call["id"])
    return found


def form_of(call_id: str) -> str:
    """An id without what is random in it."""
    return re.sub(r"[0-9a-f]{16,}$|^[0-9A-Za-z]{9}$", "ID", call_id)


def cases(family: str) -> Iterator[Case]:
    """The cases of one family; the same every time."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.entrypoints.openai.engine.serving import OpenAIServing
    from vllm.parser.abstract_parser import _WrappedParser
    from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
    from vllm.tool_parsers import ToolParserManager

    tokenizer = SimpleNamespace(get_vocab=lambda: VOCABULARY)
    offered = [ChatCompletionToolsParam(**tool) for tool in TOOLS]
    rng = random.Random(family)
    for text, choice in _asked(family):

        class Parser(_WrappedParser):
            tool_parser_cls = ToolParserManager.get_tool_parser(family)
            reasoning_parser_cls = DeepSeekR1ReasoningParser if thinks(text) else None

        tools = offered if choice is not None else None
        request: Any = SimpleNamespace(tools=tools, tool_choice=choice)
        cuts = []
        for lengths, late in cuts_of(text, rng):
            parser, deltas = Parser(tokenizer, tools), []
            for piece, ids in fed(text, lengths, late):
                try:
                    deltas.append(nameless(parser.parse_delta(piece, ids, request, [EOS])))
                except Exception as error:
                    deltas.append({"raises": type(error).__name__})
                    break
            cuts.append([lengths, late, deltas])
        found, content = OpenAIServing._parse_tool_calls_from_content(
            request, tokenizer, True, Parser.tool_parser_cls, text
        )
        calls = [[form_of(c.id), c.name, c.arguments] for c in found or ()]
        whole = None if choice == "none" or thinks(text) else [content, calls]
        yield {"text": text, "choice": choice, "whole": whole, "cuts": cuts}
