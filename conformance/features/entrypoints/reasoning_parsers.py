"""Record what the real v0.22.1 says of thinking in tags, token by token and in runs of tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]

ABOUT = (
    '`{"tools", "pieces", "prompt_ended", "whole", "cuts": [[tokens per delta, deltas]]}`. '
    "`pieces` are the tokens' texts; a tag is a token. `tools`: whether a Hermes parser reads the "
    "rest. `whole`: [reasoning, content] of the text at once."
)
START, END, OPEN, CLOSE = "<think>", "</think>", "<tool_call>", "</tool_call>"
TEXTS = (
    (START, "so", " it", " is", END, "yes", "."),
    ("so", " it", END, "yes"),
    ("yes", "."),
    (START, "a", END),
    (START, END, "b"),
    (END, "b"),
    (START, "a"),
    (),
    (START,),
    (START, "a", END, OPEN, '{"name": ', '"f", "argu', 'ments": {"x"', ": 1}}", CLOSE),
    (START, "a", END, "b", END, "c"),
    (START, "a", START, "b", END, "c"),
    ("a", START, "b", END, "c", " d", OPEN, '{"name": "g", "arguments": {}}', CLOSE),
)


def nameless(delta: Any) -> Any:
    """A delta as an object, its ids only said to be there."""
    found = None if delta is None else json.loads(delta.model_dump_json(exclude_unset=True))
    for call in (found or {}).get("tool_calls") or ():
        if call.get("id") is not None:
            call["id"] = True
    return found


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from vllm.parser.abstract_parser import _WrappedParser
    from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    pieces_of = sorted({piece for text in TEXTS for piece in text} - {START, END})
    vocabulary = {START: 1, END: 2} | {piece: 3 + i for i, piece in enumerate(pieces_of)}
    tokenizer = SimpleNamespace(get_vocab=lambda: vocabulary, encode=lambda text: [])
    rng = random.Random(16)
    for tools in (False, True):

        class Parser(_WrappedParser):
            reasoning_parser_cls = DeepSeekR1ReasoningParser
            tool_parser_cls = Hermes2ProToolParser if tools else None

        for text in TEXTS:
            for prompt_ended in (False, True):
                request: Any = SimpleNamespace(tool_choice="auto", tools=[])
                whole = Parser(tokenizer, None).extract_reasoning("".join(text), request)
                sizes = [[1] * len(text), [len(text)]] if text else [[]]
                for _ in range(8):
                    lengths, left = [], len(text)
                    while left:
                        lengths.append(min(left, rng.randint(1, 4)))
                        left -= lengths[-1]
                    sizes.append(lengths)
                cuts = []
                for lengths in sizes:
                    parser, rest, deltas = Parser(tokenizer, None), list(text), []
                    for length in lengths:
                        taken, rest = rest[:length], rest[length:]
                        ids = [vocabulary[piece] for piece in taken]
                        prompt = [1, 2] if prompt_ended else [9]
                        said = parser.parse_delta("".join(taken), ids, request, prompt)
                        deltas.append(nameless(said))
                    cuts.append([lengths, deltas])
                yield {
                    "tools": tools, "pieces": list(text), "prompt_ended": prompt_ended,
                    "whole": list(whole), "cuts": cuts,
                }  # fmt: skip
