"""Our incremental detokenizer beside the real ones, byte by byte."""

from __future__ import annotations

from conformance import parts
from mini_vllm.detokenizer import IncrementalDetokenizer, finished_text
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


def test_a_text_that_ends_is_what_the_real_ones_have_said_by_then() -> None:
    for case in (case for case in parts.load("detokenizer") if not case["stop"]):
        text = finished_text(bytes.fromhex(case["bytes"]), ByteTokenizer())
        assert text == "".join(case["fast"]) + case["ended"][1], case["bytes"]
