"""What lab 16-03 pins: characters out of bytes, eager, lossless, and beside the real ones."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from conformance import parts
from labkit import refused, same
from mini_vllm.tokenizer import ByteTokenizer

ROCKET = "\U0001f680"
BAD = "\ufffd"
MIXED = "naïve café — 你好 \U0001f680\U0001f1eb\U0001f1f7"
EDGES = (
    0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC, 0xED,
    0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFE, 0xFF,
)  # fmt: skip
UNFINISHED = {
    chr(point).encode()[:length]
    for point in range(0x80, 0x110000, 0x40)
    if not 0xD800 <= point < 0xE000
    for length in range(1, len(chr(point).encode()))
}
"""What a character of several bytes can begin with, without its end: taken from Python's encoder,
one code point for each value of the bytes before the last."""


def feeds(lab, data):
    """What each byte gives, and the flush after them."""
    made = lab.StreamingDetokenizer()
    return [made.feed(byte) for byte in data], made.flush()


def shown(data):
    """Bytes as the messages write them."""
    return " ".join(f"{byte:02X}" for byte in data)


def certain(data):
    """The text of `data` that no later byte can change."""
    for held in (3, 2, 1):
        if len(data) >= held and data[-held:] in UNFINISHED:
            return data[:-held].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


def by_byte(data):
    """Control: each byte decoded alone."""
    return [bytes([byte]).decode("utf-8", "replace") for byte in data]


def cumulative(data):
    """Control: everything decoded again, and what is longer than before is sent."""
    sent, pieces = 0, []
    for end in range(1, len(data) + 1):
        text = data[:end].decode("utf-8", "replace")
        pieces.append(text[sent:])
        sent = max(sent, len(text))
    return pieces


def random_bytes(count, seed=16):
    rng = random.Random(seed)
    for number in range(count):
        yield bytes(
            rng.choice(EDGES) if number % 2 else rng.randrange(256)
            for _ in range(rng.randint(1, 16))
        )


# --- characters -----------------------------------------------------------------------------------


def test_emoji_is_held_until_complete(lab):
    same(
        feeds(lab, ROCKET.encode()), (["", "", "", ROCKET], ""),
        "F0 9F 9A 80 is one character: three silent bytes, then all of it, and nothing to flush",
    )  # fmt: skip


def test_ascii_streams_one_char_per_token(lab):
    same(
        feeds(lab, b"plain"), (list("plain"), ""),
        "a byte below 80 is a character: nothing may be held",
    )  # fmt: skip


@pytest.mark.slow
def test_length_table_over_all_256_bytes(lab):
    for byte in range(256):
        starts = [text for text in UNFINISHED if text[0] == byte]
        expected = 1 if byte < 0x80 else 1 + max(map(len, starts)) if starts else 0
        same(
            lab.utf8_expected_len(byte), expected,
            f"byte {byte:02X}: bytes of a character that begins so, 0 if Python's encoder "
            "writes none",
        )  # fmt: skip
    for byte in (-1, 256):
        refused(lambda byte=byte: lab.utf8_expected_len(byte), f"utf8_expected_len({byte})")


def test_complete_prefix(lab):
    for data, expected in (
        ("", 0), ("61", 1), ("61F09F", 1), ("F09F9A80", 4), ("F09F9A", 0), ("E041", 2), ("EDA0", 2),
        ("ED9F", 0), ("E0A0", 0), ("E09F", 2), ("F48F", 0), ("F490", 2), ("80", 1), ("C3A9C3", 2),
    ):  # fmt: skip
        data = bytes.fromhex(data)
        same(
            lab._complete_prefix_len(data), expected,
            f"{shown(data) or 'no bytes'}: bytes whose text is certain",
        )  # fmt: skip


def test_never_emits_replacement_chars_for_valid_text(lab, record_property):
    pieces, rest = feeds(lab, MIXED.encode())
    same("".join(pieces) + rest, MIXED, "the pieces are the text")
    assert not any(BAD in piece for piece in pieces), (
        f"valid text has no {BAD}: a character was shown before its last byte\ncame {pieces}"
    )
    silent = pieces.count("")
    same(silent, 17, f"{len(MIXED)} code points in 36 bytes: how many bytes are silent")
    record_property("measured.silent", silent)
    same(
        feeds(lab, "\U0001f1eb\U0001f1f7".encode())[0],
        ["", "", "", "\U0001f1eb", "", "", "", "\U0001f1f7"],
        "a flag is two code points; each is given when it is whole. What a reader calls one "
        "character is the client's affair",
    )


def test_naive_approach_really_is_broken(lab):
    data = ROCKET.encode()
    same(by_byte(data), [BAD] * 4, "the control, each byte alone")
    same(
        ["".join(feeds(lab, data)[0]), "".join(by_byte(data))], [ROCKET, BAD * 4],
        "the same bytes, yours and the control's",
    )  # fmt: skip


def test_cumulative_control_loses_the_emoji(lab):
    data = ROCKET.encode()
    same(cumulative(data), [BAD, "", "", ""], "the control: all decoded again, the new end sent")
    same(
        feeds(lab, data)[0][-1], ROCKET,
        "the control has said one character and so never says the rocket; yours must",
    )  # fmt: skip


# --- bytes that are no characters -----------------------------------------------------------------


def test_invalid_lead_does_not_swallow_neighbours(lab):
    same(
        feeds(lab, bytes.fromhex("E041C3A9")), (["", BAD + "A", "", "é"], ""),
        "E0 promises three bytes, and 41 is not one of them: it is an A at once, and C3 A9 is é",
    )  # fmt: skip


def test_genuine_replacement_character_is_text(lab):
    same(
        feeds(lab, bytes.fromhex("EFBFBD41")), (["", "", BAD, "A"], ""),
        "EF BF BD is the character U+FFFD itself, whole at its third byte: no sign of an error",
    )  # fmt: skip


def test_matches_decode_replace_for_arbitrary_bytes(lab):
    every = itertools.chain.from_iterable(
        map(bytes, itertools.product(EDGES, repeat=length)) for length in (1, 2, 3)
    )
    for data in itertools.chain(every, random_bytes(1500)):
        pieces, rest = feeds(lab, data)
        same(
            "".join(pieces) + rest, data.decode("utf-8", "replace"),
            f"{shown(data)}: the pieces {pieces} and the flush {rest!r}, against "
            "bytes.decode('utf-8', 'replace')",
        )  # fmt: skip


def test_hold_is_bounded_by_three_bytes(lab):
    for data in itertools.chain(
        map(bytes, itertools.product(EDGES, repeat=2)), random_bytes(1000, seed=3)
    ):
        made, text = lab.StreamingDetokenizer(), ""
        for end, byte in enumerate(data, 1):
            text += made.feed(byte)
            same(
                text, certain(data[:end]),
                f"after {shown(data[:end])}: all that is certain, and only that. What is held "
                "begins a valid character and has at most three bytes",
            )  # fmt: skip


# --- the end, and what is not a byte --------------------------------------------------------------


def test_flush_handles_truncated_sequence(lab):
    for length in (1, 2, 3):
        same(
            feeds(lab, ROCKET.encode()[:length]), ([""] * length, BAD),
            f"{length} of the rocket's four bytes, then the end: silence, and one {BAD} for what "
            "is one broken character",
        )  # fmt: skip


def test_flush_is_idempotent(lab):
    made = lab.StreamingDetokenizer()
    same([made.feed(0xF0), made.flush(), made.flush()], ["", BAD, ""], "what is flushed is gone")
    same(
        [made.feed(byte) for byte in "é".encode()], ["", "é"],
        "after a flush the object is as new",
    )  # fmt: skip


def test_eos_is_ignored(lab):
    eos = ByteTokenizer.eos_token_id
    same(
        feeds(lab, [0x61, eos, 0x62, 300, 100_000]), (["a", "", "b", "", ""], ""),
        "ids of 256 and more are no bytes",
    )  # fmt: skip


def test_eos_mid_character_keeps_bytes(lab):
    same(
        feeds(lab, [0xF0, 0x9F, 256, 0x9A, 0x80]), (["", "", "", "", ROCKET], ""),
        "an id that is no byte changes nothing, so the bytes on both sides of it still meet",
    )  # fmt: skip
    same(feeds(lab, [0xC3, 256]), (["", ""], BAD), "and what was held is still there at the end")


def test_negative_ids_are_refused(lab):
    made = lab.StreamingDetokenizer()
    made.feed(0xC3)
    for token_id in (-1, -256):
        refused(lambda token_id=token_id: made.feed(token_id), f"feed({token_id})")
    same(made.feed(0xA9), "é", "a refused id changes nothing")


# --- what it costs --------------------------------------------------------------------------------


def bytes_decoded(lab, data):
    """Bytes on which `decode` is called while `data` is fed, whoever calls it."""
    count = 0

    def watch(_frame, event, called):
        nonlocal count
        owner = getattr(called, "__self__", None)
        if event == "c_call" and isinstance(owner, bytes | bytearray):
            count += len(owner) if called.__name__ == "decode" else 0

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        text = "".join(feeds(lab, data)[0])
    finally:
        sys.setprofile(before)
    return count, text


def test_a_byte_is_decoded_a_bounded_number_of_times(lab):
    data = ("a你" * 500).encode()
    count, text = bytes_decoded(lab, data)
    same(len(text), 1000, "characters of 2,000 bytes")
    assert count <= 8 * len(data), (
        f"{len(data)} bytes fed one at a time: decode() was given {count} bytes in all\n"
        f"expected at most {8 * len(data)}: no more than a few bytes at each step\n"
        "A text that is decoded again from its start costs the square of its length"
    )


# --- beside the real ones -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """Bytes without stop strings, and what the two real classes say to each."""
    found = [case for case in parts.load("detokenizer") if not case["stop"]]
    return [(bytes.fromhex(case["bytes"]), case) for case in found]


def test_the_real_ones_agree_on_valid_text(lab, recorded):
    count = 0
    for data, case in recorded:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if BAD in text:
            continue
        count += 1
        pieces, rest = feeds(lab, data)
        for name in ("slow", "fast"):
            same(
                (pieces, rest), (case[name], ""),
                f"{shown(data)}: the real {name} class, byte by byte, and nothing at the end",
            )  # fmt: skip
    assert count >= 8, f"valid texts in the recording: {count}"


def test_where_the_real_ones_differ(lab, recorded, record_property):
    """They wait while the text ends in U+FFFD, and have no flush."""
    differ, lost, longest = 0, 0, 0
    for data, case in recorded:
        pieces, rest = feeds(lab, data)
        for name, ended in zip(("slow", "fast"), case["ended"], strict=True):
            ours = theirs = ""
            for place, (mine, real) in enumerate(zip(pieces, case[name], strict=True), 1):
                ours, theirs = ours + mine, theirs + real
                assert ours.startswith(theirs), (
                    f"{shown(data[:place])}: the real {name} class has said {theirs!r}, and yours "
                    f"{ours!r}: it may be ahead of the real one, not behind or elsewhere"
                )
                if real:
                    same(ours, theirs, f"{shown(data[:place])}: when the real {name} one speaks")
                longest = max(longest, len(ours) - len(theirs))
            same(ended, "", f"{shown(data)}: what the real {name} class adds at the end")
            if name == "fast":
                differ += pieces != case[name]
                lost += ours + rest != theirs
    same(
        (differ, lost, longest), (376, 296, 15),
        f"of {len(recorded)} streams: those whose pieces differ, those whose end the real one "
        "drops, and the most characters it is behind",
    )  # fmt: skip
    stray = next(case for data, case in recorded if data == b"\x80" * 8 + b"a")
    record_property("measured.stray", len("".join(stray["fast"][:8])))
    cut = next(case for data, case in recorded if data == bytes.fromhex("6162F09F9A"))
    said = "".join(cut["fast"]) + cut["ended"][1]
    record_property("measured.tail", {"ab": "nothing", "ab" + BAD: "one U+FFFD"}.get(said, "three"))
