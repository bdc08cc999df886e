"""Our incremental detokenizer beside the real ones, byte by byte."""

from __future__ import annotations

from conformance import parts
from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.tokenizer import ByteTokenizer


def pieces(data: bytes) -> list[str]:
    """What each byte adds, the request going on."""
    made = IncrementalDetokenizer(ByteTokenizer())
    return [made.update(list(data[:end])) for end in range(1, len(data) + 1)]


def test_every_piece_of_the_real_ones_is_ours() -> None:
    cases = [case for case in parts.load("detokenizer") if not case["stop"]]
    assert len(cases) > 400
    for case in cases:
        assert pieces(bytes.fromhex(case["bytes"])) == case["slow"] == case["fast"], case["bytes"]


def test_the_end_says_what_the_real_ones_drop() -> None:
    data = bytes.fromhex("6162F09F9A")
    made = IncrementalDetokenizer(ByteTokenizer())
    for end in range(1, len(data)):
        made.update(list(data[:end]))
    assert made.update(list(data), finished=True) == "\ufffd"
    case = next(case for case in parts.load("detokenizer") if case["bytes"] == data.hex().upper())
    assert "".join(case["fast"]) + case["ended"][1] == "ab"
