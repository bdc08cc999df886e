"""Traces: what each format gives, and what is refused by its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from mini_vllm.simulate.samples import FOLDER, conversations, write_samples
from mini_vllm.simulate.traces import (
    FORMATS,
    Skipped,
    TraceError,
    TraceRequest,
    arriving_at,
    faster,
    format_of,
    read_trace,
)

SHARED = Path(__file__).parents[4] / "shared" / "traces"
GOOD = {"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}


def lines(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_shipped_samples_are_what_their_script_draws(tmp_path):
    write_samples(tmp_path)
    for path in sorted(FOLDER.iterdir()):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv", "burstgpt.csv", "bench.json"])
def test_formats_with_arrivals_say_the_same_of_the_same_requests(name):
    found = list(read_trace(FOLDER / name))
    rows = conversations(120, seed=18)
    assert [(r.prompt_len, r.output_len) for r in found] == [row[1:3] for row in rows]
    expected = [(row[0] - rows[0][0]) / 1000 for row in rows]
    assert [r.arrival for r in found] == pytest.approx(expected, abs=1e-6)
    assert [r.hash_ids is not None for r in found] == [name == "mooncake.jsonl"] * 120


def test_sharegpt_counts_bytes_and_gives_no_arrivals():
    found = list(read_trace(FOLDER / "sharegpt.json"))
    rows = conversations(120, seed=18)[:20]
    assert [(r.prompt_len, r.output_len) for r in found] == [
        (row[1] % 90 + 1, row[2] % 50 + 1) for row in rows
    ]
    assert {r.arrival for r in found} == {0.0}


def test_a_gzipped_file_and_a_limit(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write((FOLDER / "mooncake.jsonl").read_text())
    assert list(read_trace(path, limit=5)) == list(read_trace(FOLDER / "mooncake.jsonl"))[:5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_length": 0}, "input_length=0: need a whole number from 1"),
        ({"output_length": -3}, "output_length=-3: need a whole number from 1"),
        ({"input_length": 1.5}, "input_length=1.5: need a whole number from 1"),
        ({"output_length": None}, "output_length=None: need a whole number"),
        ({"timestamp": -1}, "timestamp=-1: need a time of 0 to 1e+10 seconds"),
        ({"timestamp": float("nan")}, "timestamp=nan: need a time of 0 to"),
        ({"timestamp": 1e300}, "timestamp=1e+300: need a time of 0 to"),
        ({"timestamp": 10**400}, "int too large to convert to float"),
        ({"input_length": "6_00"}, "input_length='6_00': need a whole number from 1"),
        ({"timestamp": 100}, "arrives at 0.1 s, before the one above (1.5 s)"),
        ({"hash_ids": [0]}, "hash_ids has 1 entries: input_length=700 has 2 blocks of 512"),
        ({"hash_ids": [0, "x"]}, "hash_ids=[0, 'x']: need a list of integers"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_or_counted(tmp_path, change, said):
    path = lines(tmp_path, GOOD, {**GOOD, **change}, GOOD)
    with pytest.raises(TraceError, match="line 2: ") as caught:
        list(read_trace(path))
    assert said in str(caught.value)
    skipped = Skipped()
    assert len(list(read_trace(path, skipped=skipped))) == 2
    assert skipped.count == 1 and said in skipped.first[0]


@pytest.mark.parametrize("bad", [b"\xff\xfe\x00", b"\0" * 40, b"[" * 9000, b"null", b"[1]", b"{"])
def test_a_line_of_other_bytes_is_one_line(tmp_path, bad):
    """Of a file that another program wrote into only that line is lost."""
    path, good = tmp_path / "t.jsonl", json.dumps(GOOD).encode()
    path.write_bytes(b"\n".join((good, bad, good, b"")))
    with pytest.raises(TraceError, match="line 2: "):
        list(read_trace(path))
    skipped = Skipped()
    assert len(list(read_trace(path, skipped=skipped))) == 2 and skipped.count == 1


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("b.json", '{"start_times": [1, "x", null], "input_lens": [1, 2, 3], '
         '"output_lens": [1, 2, 3]}', "request 1: could not convert string"),
        ("b.json", '{"start_times": [1], "input_lens": [1, 2], "output_lens": [1]}',
         "b.json: start_times, input_lens and output_lens differ in length"),
        ("s.json", '[{"conversations": "ab"}]', "entry 0: "),
        ("s.json", '[{"conversations": [{"value": 5}, {"value": "b"}]}]', "entry 0: "),
        ("f.jsonl", '{"flight": 1}\n', "f.jsonl: not as the flight recorder writes it"),
        ("f.jsonl", '{"flight": 1, "block_size": 4}\n{"add": 0, "prompt": "x", "hashes": ""}\n',
         "request 0: prompt='x': need a whole number"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1\n",
         "line 2: GeneratedTokens=None"),
    ],
)  # fmt: skip
def test_a_file_of_the_wrong_kinds_of_values_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(tmp_path / name))
    assert said in str(caught.value)


def test_a_whole_second_of_the_trace_of_2024_is_a_time(tmp_path):
    """Its stamps have a zone, and a whole second has no fraction."""
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,5,1\n"
        "2024-05-10 00:00:01+00:00,5,1\n"
    )
    assert [each.arrival for each in read_trace(path)] == pytest.approx([0, 0.99007])


def test_a_field_that_is_missing_is_named(tmp_path):
    path = lines(tmp_path, {k: v for k, v in GOOD.items() if k != "output_length"})
    with pytest.raises(TraceError, match=r"line 1: no 'output_length'"):
        list(read_trace(path, "mooncake"))


def test_a_file_is_read_as_its_requests_are_wanted(tmp_path):
    """The third line cannot be used, and nobody has asked for it yet."""
    wanted = read_trace(lines(tmp_path, GOOD, GOOD, {**GOOD, "input_length": 0}))
    assert [next(wanted).prompt_len for _ in range(2)] == [700, 700]
    with pytest.raises(TraceError, match="line 3: "):
        next(wanted)


@pytest.mark.parametrize("text", ["", "hello\n", "a,b\n1,2\n", "[]"])
def test_a_file_of_no_known_format_is_refused(tmp_path, text):
    path = tmp_path / "t.txt"
    path.write_text(text)
    with pytest.raises(TraceError, match="not one of mooncake, azure"):
        format_of(path)


def test_what_is_not_there_or_not_a_format_is_refused(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "none.jsonl"))
    with pytest.raises(TraceError, match="format='lines': need one of mooncake"):
        list(read_trace(FOLDER / "azure.csv", "lines"))
    bench = tmp_path / "b.json"
    bench.write_text('{"input_lens": [1], "output_lens": [1]}')
    with pytest.raises(TraceError, match="made without --save-detailed"):
        list(read_trace(bench))


def test_arrivals_can_be_drawn_or_hurried():
    trace = [TraceRequest(float(t), 5, 1) for t in range(400)]
    drawn = list(arriving_at(trace, 4.0, seed=1))
    assert drawn == list(arriving_at(trace, 4.0, seed=1)) != list(arriving_at(trace, 4.0, seed=2))
    assert drawn[0].arrival == 0.0 and 80 < drawn[-1].arrival < 120
    assert [r.arrival for r in faster(trace[:3], 2.0)] == [0.0, 0.5, 1.0]
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate="):
            list(arriving_at(trace, wrong, 0))
        with pytest.raises(ValueError, match="speed="):
            list(faster(trace, wrong))


@pytest.mark.skipif(not SHARED.is_dir(), reason="no real traces here")
@pytest.mark.parametrize(
    ("name", "count", "prompts"),
    [
        ("mooncake_conversation_1.jsonl.gz", 1000, 13_732_944),
        ("azure_2023_code.csv.gz", 8819, None),
    ],
)
def test_real_files_are_read_whole(name, count, prompts):
    found = list(read_trace(SHARED / name, limit=count))
    assert len(found) == count
    assert prompts is None or sum(r.prompt_len for r in found) == prompts


def test_every_format_has_a_sample_or_a_recorder():
    told = {format_of(path) for path in FOLDER.iterdir()}
    assert {*FORMATS} == told | {"flight"}
