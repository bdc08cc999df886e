"""The format: endless input is refused in bounded memory, the keys of every family are known."""

from __future__ import annotations

import copy
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from conformance import mutants, recording


@pytest.fixture(scope="module")
def entry() -> dict[str, Any]:
    """A kept recording whose first event is an arrival."""
    kept = recording.read(mutants.RECORDINGS / "basic.jsonl.gz")
    return next(entry for entry in kept if entry["events"][0].get("add"))


def refusal(path: Path) -> str:
    with pytest.raises(recording.RecordingError) as error:
        list(recording.read(path))
    return str(error.value)


# ------------------------------------------------------------------ endless input


def test_brackets_without_end_are_refused_by_line(entry: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(f"{json.dumps(entry)}\n{'[' * 200_000}\n")
    assert refusal(path).startswith(f"{path}:2: not JSON: ")


def test_a_number_of_5000_digits_is_refused_by_line(entry: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "digits.jsonl"
    path.write_text(json.dumps(entry).replace('"seed": ', f'"seed": {"9" * 5000}', 1))
    assert refusal(path).startswith(f"{path}:1: not JSON: ")


@pytest.mark.slow
def test_a_line_of_three_gibibytes_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl.gz"
    member = gzip.compress(b"[" * (1 << 26), 1)
    path.write_bytes(member * 48)  # a gzip file may have several members; together 3 GiB
    assert path.stat().st_size < 20_000_000
    tracemalloc.start()
    try:
        assert refusal(path) == f"{path}:1: longer than {recording.MOST_LINE} characters"
        assert tracemalloc.get_traced_memory()[1] < 6 * recording.MOST_LINE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_blocks", 10**9, "config.num_blocks=1000000000 is not an integer of at least 2"),
        ("num_blocks", True, "config.num_blocks=True is not an integer"),
        ("block_size", 10**9, "config.block_size=1000000000 is not an integer of at least 1"),
        ("policy", ["fcfs"] * 999, "config.policy=['fcfs', 'fcfs', "),
        ("policy", [[[[[[[[["fcfs"]]]]]]]]], "config.policy=[[[[[[[...]]]]]]] is not fcfs"),
    ],
)
def test_a_configuration_beyond_every_machine_is_refused(
    entry: dict[str, Any], key: str, value: Any, message: str
) -> None:
    problem = recording.problem_of({**entry, "config": {**entry["config"], key: value}})
    assert problem.startswith(message)
    assert len(problem) < 200


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "0", None])
def test_an_arrival_at_no_time_is_refused(entry: dict[str, Any], value: Any) -> None:
    wrong = copy.deepcopy(entry)
    wrong["events"][0]["add"][0]["arrival_time"] = value
    assert "arrival_time=" in recording.problem_of(wrong)


# ------------------------------------------------------------------ families

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "drafts": (
        {
            "speculative": {
                "method": "eagle",
                "num_speculative_tokens": 3,
                "num_lookahead_tokens": 3,
                "use_eagle": True,
            }
        },
        {},
        {
            "scheduled_spec_decode_tokens": {"r0": [5, 6]},
            "sampled_token_ids": {"r0": [5, 9]},
            "spec_token_ids": {"r0": [5, 6]},
            "draft_token_ids": {},
        },
    ),
    "queue": (
        {"async_scheduling": True},
        {},
        {
            "scheduled_spec_decode_tokens": {"r0": [-1, -1]},
            "sampled_token_ids": {"r0": [4]},
            "num_output_placeholders": {"r0": 2},
        },
    ),
    "adapters": ({"max_loras": 2}, {"lora": 1}, {"skipped_waiting": ["r1"]}),
    "hybrid": (
        {
            "kv_groups": [
                {"kind": "full", "block_size": 16},
                {"kind": "sliding_window", "block_size": 8, "sliding_window": 20},
            ]
        },
        {},
        {"block_ids": {"r0": [[1, 2], [0, 0, 3]]}},
    ),
    "encoder": (
        {
            "encoder_compute_budget": 64,
            "encoder_cache_size": 64,
            "disable_chunked_mm_input": False,
        },
        {"mm": [{"hash": "a", "offset": 0, "length": 2, "is_embed": [0, 1]}]},
        {
            "encoder_inputs": {"r0": [0]},
            "freed_encoder_hashes": ["a", "a"],
            "encoder_free": [64, 64],
        },
    ),
    "connector": (
        {},
        {
            "kv": {
                "external_tokens": 32,
                "load_async": True,
                "known_at": 2,
                "load_steps": 3,
                "send_steps": None,
            }
        },
        {"finished_recving": ["r0"], "finished_sending": [], "skipped": {"r0": "remote_kvs"}},
    ),
    "grammar": (
        {},
        {"grammar": {"ready_at": 2, "reject_at": None}},
        {
            "skipped": {"r0": "grammar"},
            "grammar_rows": ["r1"],
            "finish_reasons": {"r0": "error"},
        },
    ),
}
"""Per family the keys it adds to configuration, arrival and step."""


def of_family(entry: dict[str, Any], family: str) -> dict[str, Any]:
    config, add, step = copy.deepcopy(FAMILIES[family])
    made = copy.deepcopy(entry)
    made["config"] |= config
    made["events"][0]["add"][0] |= add
    made["steps"][0] |= step
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recording_of_each_family_is_read(
    entry: dict[str, Any], tmp_path: Path, family: str
) -> None:
    made = of_family(entry, family)
    recording.write(tmp_path / "one.jsonl.gz", [made])
    assert list(recording.read(tmp_path / "one.jsonl.gz")) == [made]


KEYS = [
    (family, part, key)
    for family, parts in FAMILIES.items()
    for part, keys in zip(("config", "add", "step"), parts, strict=True)
    for key in keys
    if key != "freed_encoder_hashes"  # these may be anything
]


@pytest.mark.parametrize(("family", "part", "key"), KEYS)
@pytest.mark.parametrize("value", ["x", -1.5, [None], {"r0": "x"}], ids=repr)
def test_a_key_of_a_family_is_refused_when_it_holds_something_else(
    entry: dict[str, Any], family: str, part: str, key: str, value: Any
) -> None:
    if key == "skipped" and isinstance(value, dict):
        value = {"r0": 3}
    wrong = of_family(entry, family)
    holder = {
        "config": wrong["config"],
        "add": wrong["events"][0]["add"][0],
        "step": wrong["steps"][0],
    }
    holder[part][key] = value
    assert f".{key}" in recording.problem_of(wrong)


@pytest.mark.parametrize(
    ("family", "path", "message"),
    [
        ("drafts", ("config", "speculative", "use_eagle"), "config.speculative.use_eagle"),
        ("hybrid", ("config", "kv_groups", 1, "sliding_window"), "config.kv_groups[1].sliding_w"),
        ("encoder", ("events", 0, "add", 0, "mm", 0, "offset"), "events[0].add[0].mm[0].offset"),
        ("connector", ("events", 0, "add", 0, "kv", "load_async"), "events[0].add[0].kv.load_a"),
        ("grammar", ("events", 0, "add", 0, "grammar", "ready_at"), "events[0].add[0].grammar.re"),
    ],
)
def test_what_is_missing_within_a_key_is_named(
    entry: dict[str, Any], family: str, path: tuple[Any, ...], message: str
) -> None:
    wrong = of_family(entry, family)
    holder: Any = wrong
    for step in path[:-1]:
        holder = holder[step]
    del holder[path[-1]]
    problem = recording.problem_of(wrong)
    assert problem.startswith(message)
    assert problem.endswith(" is missing")
