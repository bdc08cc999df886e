"""Record what the real v0.22.1 detokenizers say to bytes that come one at a time.

Both classes, each with the shipped tokenizer, whose ids 0 to 255 are the bytes; with and without
stop strings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.features import ROOT

Case = dict[str, Any]

ABOUT = (
    '`{"bytes": hex, "stop", "slow", "fast", "ended": [slow, fast], "matched"}`. `slow` and `fast` '
    "are what each class gives to a client after each byte; `ended` what it adds when the request "
    "ends there, out of tokens; `matched` the stop string found, after which no byte is fed."
)

TOKENIZER = ROOT / "models" / "byte-llama"
NAMED = (
    "F09F9A80", "6162F09F9A", "808080808080808061", "EFBFBD41", "E041C3A9", "EFBFBD", "EDA080",
    "F0", "F09F", "C3", "C328", "C0AF", "F4908080", "F09F87ABF09F87B7", "61F09F9A62", "FF", "FF41",
    "F09F9A80F09F9A", "80C3A9", "E28480E2", "EDA0", "C3A9FF80E4BDA0", "",
)  # fmt: skip
TEXTS = ("naïve café — 你好 🚀🇫🇷", "plain words", "a\ufffdb", "\u200d🏳\ufe0f\u200d🌈")
STOPS = (
    ("abcdef", ["END"]), ("abENcd", ["END"]), ("abENDcd", ["END"]), ("ENENDxyz", ["END"]),
    ("aaab", ["aab"]), ("naïve 🚀END", ["END"]), ("ab", ["a long stop"]), ("xyz", ["z", "yz!"]),
)  # fmt: skip
_BOUNDARIES = (
    0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xC3, 0xDF, 0xE0, 0xE1, 0xED,
    0xEF, 0xF0, 0xF4, 0xF5, 0xFF,
)  # fmt: skip


def inputs() -> Iterator[tuple[bytes, list[str]]]:
    """Bytes and stop strings; the same every time."""
    for name in NAMED:
        yield bytes.fromhex(name), []
    for text in TEXTS:
        yield text.encode(), []
    for text, stop in STOPS:
        yield text.encode(), stop
    rng = random.Random(16)
    for number in range(400):
        source = range(256) if number % 2 else _BOUNDARIES
        yield bytes(rng.choice(source) for _ in range(rng.randint(1, 16))), []


def streamed(made: Any, data: Sequence[int]) -> tuple[list[str], str, str | None]:
    """The pieces a client is sent, what the end adds, and the stop string that ended it early."""
    pieces = []
    for byte in data:
        matched = made.update([byte], False)
        pieces.append(made.get_next_output_text(matched is not None, delta=True))
        if matched is not None:
            return pieces, "", matched
    return pieces, made.get_next_output_text(True, delta=True), None


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    from types import SimpleNamespace

    from transformers import PreTrainedTokenizerFast
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
    assert [tokenizer.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
    for data, stop in inputs():
        found: Case = {"bytes": data.hex().upper(), "stop": stop, "ended": []}
        for name, kind in (
            ("slow", SlowIncrementalDetokenizer), ("fast", FastIncrementalDetokenizer),
        ):  # fmt: skip
            request: Any = SimpleNamespace(
                request_id="r", prompt_token_ids=[], prompt_embeds=None,
                sampling_params=SamplingParams(stop=stop),
            )  # fmt: skip
            found[name], ended, found["matched"] = streamed(kind(tokenizer, request), data)
            found["ended"].append(ended)
        yield found
