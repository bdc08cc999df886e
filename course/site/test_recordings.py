"""The page of recordings: what it draws is what `course why` says, and what it refuses by name."""

from __future__ import annotations

import base64
import gzip
import json

import pytest

from conformance import why
from course.site import recordings

PACKED = recordings.SAMPLE.read_bytes()
TEXT = gzip.decompress(PACKED)


def dropped(*files):
    return recordings.open_files([[name, base64.b64encode(data).decode()] for name, data in files])


@pytest.fixture(scope="module")
def sample():
    return recordings.sample()


def changed_head(**values):
    head, _, rest = TEXT.partition(b"\n")
    return json.dumps(json.loads(head) | values).encode() + b"\n" + rest


def test_what_is_drawn_is_what_the_server_wrote(sample):
    lines = [json.loads(line) for line in TEXT.splitlines()]
    steps = [line for line in lines if "step" in line]
    assert sample["totals"]["free"] == [line["free"] for line in steps]
    assert sum(sample["totals"]["preempted"]) == sum(len(s.get("preempted", ())) for s in steps) > 0
    plan, expected = [], []
    for line in steps:
        plan = line.get("plan", plan)
        expected.append(dict(zip(map(str, plan[::2]), plan[1::2], strict=True)))
    drawn = [{} for _ in steps]
    for request in sample["requests"]:
        for first, last, _, tokens, _ in request["cells"]:
            for step in range(first, last + 1):
                if tokens:
                    drawn[step][request["id"]] = tokens
    assert drawn == expected
    kinds = {cell[2] for request in sample["requests"] for cell in request["cells"]}
    assert kinds >= {"waiting", "prefill", "hit", "recompute", "decode", "preempted"}


def test_the_reasons_are_those_of_the_command(sample):
    found = why.follow(recordings.SAMPLE)
    assert len(sample["requests"]) == 24 and sample["notice"] == ""
    for request, line in zip(sample["requests"], why.summary(found), strict=True):
        told = [text.partition(": ")[2] for _, text in request["why"]]
        said = [str(line).partition("  ")[2].lstrip() for line in found.log.of(request["id"])]
        assert [text.split("  ")[-1] for text in said] == told
        assert line.endswith(request["summary"])
    assert recordings.prefix("0", "1") == why.prefix_lines(found, "0", "1")


@pytest.mark.slow
def test_a_file_dropped_is_drawn_as_the_sample_is(sample):
    assert dropped(("mine.jsonl.gz", PACKED)) == {**sample, "name": "mine.jsonl.gz"}
    half = TEXT.index(b"\n", len(TEXT) // 2) + 1
    two = dropped(("mine.0000.jsonl", TEXT[:half]), ("mine.0001.jsonl", TEXT[half:]))
    assert two == {**sample, "name": "2 files"}


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_cut_file_is_drawn_to_its_last_whole_line_and_said_to_be_cut(sample, part):
    told = dropped(("mine.jsonl", TEXT[: int(len(TEXT) * part)]))
    steps = len(told["times"])
    assert told["notice"] == "the file is cut here" and 0 < steps < len(sample["times"])
    assert told["totals"]["free"] == sample["totals"]["free"][:steps]


def test_a_packed_file_that_is_cut_is_drawn_too():
    assert dropped(("mine.jsonl.gz", PACKED[: len(PACKED) // 2]))["notice"] == (
        "the file is cut here"
    )


@pytest.mark.slow
def test_a_file_of_two_packed_members_is_drawn_whole(sample):
    half = TEXT.index(b"\n", len(TEXT) // 2) + 1
    two = gzip.compress(TEXT[:half]) + gzip.compress(TEXT[half:])
    assert dropped(("mine.jsonl.gz", two)) == {**sample, "name": "mine.jsonl.gz"}


TOO_LARGE = gzip.compress(b"a") + gzip.compress(bytes(recordings.MOST_UNPACKED))
"""Its first member alone is not."""
GROUPS = [{"kind": "FullAttentionSpec", "block_size": 16}, {"kind": "MambaSpec", "block_size": 16}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "need the files of one recording"),
        ([("a.jsonl", TEXT[:100])], "a.jsonl, line 1: need a head with flight=1"),
        ([("a.jsonl", b'{"hello": 1}\n')], "a.jsonl, line 1"),
        ([("a.png", b"\x89PNG\r\n\x1a\n")], "a.png"),
        ([("a.jsonl.gz", b"no gzip")], "a.jsonl.gz: not packed by gzip"),
        ([("a.jsonl", b"x" * (recordings.MOST_BYTES + 1))], "at most 8 MiB, 64 MiB unpacked"),
        ([("a.jsonl.gz", TOO_LARGE)], "64 MiB unpacked"),
        ([("a.jsonl", changed_head(groups=GROUPS))], "groups of FullAttentionSpec, MambaSpec"),
        ([("a.jsonl", changed_head(vllm="0.19.9"))], "vLLM 0.19.9"),
        ([("a.jsonl", changed_head(connector="Example"))], "connector=Example"),
        ([("a.0001.jsonl", TEXT)], "a: segments 0 to 0 were rotated away"),
        ([("a.0000.jsonl", TEXT), ("b.0000.jsonl", TEXT)], "one recording, found a, b"),
    ],
    ids=range(12),
)  # fmt: skip
def test_what_a_page_does_not_open_is_refused_by_name(files, message):
    with pytest.raises(ValueError, match=message) as refused:
        dropped(*files)
    assert "/tmp" not in str(refused.value)


def test_more_steps_than_a_page_goes_through_are_refused(monkeypatch):
    monkeypatch.setattr(recordings, "MOST_STEPS", 20)
    with pytest.raises(ValueError, match=r"a.jsonl: more than 20 steps.*course why reads any"):
        dropped(("a.jsonl", TEXT))


def test_prompts_are_compared_only_of_what_is_open(monkeypatch):
    monkeypatch.setattr(recordings, "_last", None)
    with pytest.raises(ValueError, match="no recording is open"):
        recordings.prefix("0", "1")
