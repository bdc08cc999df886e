"""The mini engine decides as the recordings say, wrong engines do not, wrong files are refused."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import mutants, recording, replay, workloads
from mini_vllm.block_pool import BlockPool, KVCacheBlock
from mini_vllm.scheduler import Scheduler

RECORDINGS = sorted(mutants.RECORDINGS.glob("*.jsonl.gz"))
COUNTS = {
    "async": 1080, "spec": 1000, "async_spec": 600, "lora": 1000, "grammar": 1000, "pipeline": 896,
    "hybrid": 1000, "hybrid_spec": 300, "states": 400, "states_align": 300,
    "encoder": 1000, "encoder_async": 400, "encoder_dense": 375, "encoder_ec": 400,
    "connector": 700, "connector_failures": 300, "connector_async": 100, "kv_events": 148,
}  # fmt: skip
"""Workloads per file of a feature; the profiles of the core hold 400 each."""


@pytest.fixture(scope="module")
def entry() -> dict[str, Any]:
    """One small recording with a preemption, for tests that damage it."""
    for candidate in recording.read(mutants.RECORDINGS / "pressure.jsonl.gz"):
        if any(step["preempted"] for step in candidate["steps"]) and len(candidate["steps"]) < 40:
            return candidate
    raise AssertionError("no short recording with a preemption")


def test_one_file_per_profile_is_kept() -> None:
    names = [path.name.removesuffix(".jsonl.gz") for path in RECORDINGS]
    assert names == sorted([*workloads.PROFILES, *COUNTS])


def some(number: int) -> bool:
    """One line of seven: profiles and depths recur after other numbers of lines."""
    return number % 7 == 1


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_the_mini_engine_decides_as_the_real_scheduler_did_in_some_of_each_file(path: Path) -> None:
    replayed = 0
    for entry in recording.read(path, wanted=some):
        difference = replay.replay(entry)[1]
        assert difference is None, str(difference)
        replayed += 1
    assert replayed > 13


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_the_mini_engine_decides_as_the_real_scheduler_did(path: Path) -> None:
    result = replay.replay_files([path])
    assert not result.differences, str(result.differences[0])
    assert result.num_workloads == COUNTS.get(path.name.removesuffix(".jsonl.gz"), 400)


def test_the_first_difference_names_seed_step_field_and_both_values(entry: dict[str, Any]) -> None:
    wrong = copy.deepcopy(entry)
    wrong["steps"][5]["free_blocks"] += 1
    steps, difference = replay.replay(wrong)
    assert difference is not None
    assert (steps, difference.seed, difference.step) == (6, entry["seed"], 5)
    assert difference.field == "free_blocks"
    assert difference.expected == difference.got + 1
    assert "block_size=" in difference.context
    assert f"running {entry['steps'][4]['running']}" in difference.context


@pytest.fixture(scope="module")
def ahead() -> dict[str, Any]:
    """One recording of the asynchronous scheduler with a preemption."""
    for candidate in recording.read(mutants.RECORDINGS / "async.jsonl.gz"):
        if any(step["preempted"] for step in candidate["steps"]):
            return candidate
    raise AssertionError("no recording with a preemption")


@pytest.fixture(scope="module")
def drafted() -> dict[str, Any]:
    """One recording with drafts."""
    for candidate in recording.read(mutants.RECORDINGS / "spec.jsonl.gz"):
        if any(step["scheduled_spec_decode_tokens"] for step in candidate["steps"]):
            return candidate
    raise AssertionError("no recording with drafts")


@pytest.fixture(scope="module")
def adapted() -> dict[str, Any]:
    """One recording with adapters, where one is skipped."""
    for candidate in recording.read(mutants.RECORDINGS / "lora.jsonl.gz"):
        if any(step["skipped_waiting"] for step in candidate["steps"]):
            return candidate
    raise AssertionError("no recording with a skip")


@pytest.fixture(scope="module")
def constrained() -> dict[str, Any]:
    """One recording with grammars, where one waits and one has a row."""
    for candidate in recording.read(mutants.RECORDINGS / "grammar.jsonl.gz"):
        steps = candidate["steps"]
        if any(step["skipped"] for step in steps) and any(step["grammar_rows"] for step in steps):
            return candidate
    raise AssertionError("no recording with a wait")


@pytest.fixture(scope="module")
def pictured() -> dict[str, Any]:
    """One recording with pictures, where one is evicted."""
    for candidate in recording.read(mutants.RECORDINGS / "encoder.jsonl.gz"):
        if any(step["freed_encoder_hashes"] for step in candidate["steps"]):
            return candidate
    raise AssertionError("no recording with an eviction")


CONNECTED = {
    "finished_recving": "connector", "finished_sending": "connector",
    "invalid_block_ids": "connector_failures", "kv_events": "kv_events",
    "offload_jobs": "installed/offloading", "completed_jobs": "installed/offloading",
    "ec_loads": "encoder_ec",
}  # fmt: skip
"""Fields of connectors, and a file that has them."""


def connected(field: str) -> dict[str, Any]:
    """A recording in which a step has something in this field."""
    for candidate in recording.read(mutants.RECORDINGS / f"{CONNECTED[field]}.jsonl.gz"):
        if any(step.get(field) for step in candidate["steps"]):
            return candidate
    raise AssertionError(f"no recording with {field}")


@pytest.mark.slow
@pytest.mark.parametrize("field", replay.FIELDS)
def test_a_change_of_any_field_is_a_difference(
    entry: dict[str, Any],
    ahead: dict[str, Any],
    drafted: dict[str, Any],
    adapted: dict[str, Any],
    constrained: dict[str, Any],
    pictured: dict[str, Any],
    field: str,
) -> None:
    feature = adapted if "skipped" in field else drafted if "spec" in field else ahead
    feature = constrained if field in ("skipped", "grammar_rows") else feature
    feature = pictured if "encoder" in field else feature
    feature = connected(field) if field in CONNECTED else feature
    wrong = copy.deepcopy(feature if field in replay.FEATURE_FIELDS else entry)
    step = next(step for step in wrong["steps"] if step[field])
    value = step[field]
    if isinstance(value, int):
        step[field] = value + 1
    elif isinstance(value, list):
        step[field] = value[1:]
    elif field == "sampled_token_ids":
        step[field] = dict(list(value.items())[1:])
    else:
        value[next(iter(value))] = "abort" if field == "finish_reasons" else 10**6
    difference = replay.replay(wrong)[1]
    assert difference is not None
    assert (difference.field, difference.step) == (field, wrong["steps"].index(step))


def test_the_order_of_scheduling_is_compared(entry: dict[str, Any]) -> None:
    wrong = copy.deepcopy(entry)
    step = next(step for step in wrong["steps"] if len(step["num_scheduled_tokens"]) > 1)
    step["num_scheduled_tokens"] = dict(reversed(step["num_scheduled_tokens"].items()))
    difference = replay.replay(wrong)[1]
    assert difference is not None
    assert difference.field == "num_scheduled_tokens"


def test_an_exception_of_the_part_under_test_is_a_difference(entry: dict[str, Any]) -> None:
    class Unfinished(BlockPool):
        def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
            raise NotImplementedError

    difference = replay.replay(
        entry, lambda config: replay.mini_scheduler(config, block_pool=Unfinished)
    )[1]
    assert difference is not None
    assert (difference.field, difference.got) == ("exception", "NotImplementedError: ")


def test_a_scheduler_that_cannot_be_built_is_a_difference_at_step_0(entry: dict[str, Any]) -> None:
    def build(config: Any) -> Scheduler:
        raise NotImplementedError("yours")

    difference = replay.replay(entry, build)[1]
    assert difference is not None
    assert (difference.step, difference.got) == (0, "NotImplementedError: yours")


def test_several_events_of_one_step_are_all_applied(entry: dict[str, Any]) -> None:
    events = [
        {"step": event["step"], key: event[key]}
        for event in entry["events"]
        for key in ("add", "abort")
    ]
    events += [{"step": 0, "add": []}]
    assert replay.replay({**entry, "events": events})[1] is None


def test_fields_and_workloads_can_be_chosen(entry: dict[str, Any], tmp_path: Path) -> None:
    wrong = copy.deepcopy(entry)
    wrong["steps"][0]["free_blocks"] += 1
    wrong["seed"] = -1
    path = tmp_path / "two.jsonl"
    recording.write(path, [wrong, entry])
    assert replay.first_difference(path) is not None
    assert replay.first_difference(path, select=lambda e: e["seed"] != -1) is None
    assert replay.first_difference(path, fields=["num_scheduled_tokens", "block_ids"]) is None


def test_requests_left_out_of_the_tables_must_be_unscheduled(entry: dict[str, Any]) -> None:
    wrong = copy.deepcopy(entry)
    step = wrong["steps"][0]
    for field in ("block_ids", "num_computed_tokens"):
        step[field].pop(next(iter(step["num_scheduled_tokens"])))
    difference = replay.replay(wrong)[1]
    assert difference is not None
    assert difference.field == "block_ids"


def write(entry: dict[str, Any], path: Path) -> None:
    recording.write(path, [entry])


def cut(entry: dict[str, Any], path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps(entry).encode())[:-40])


def second_line_cut(entry: dict[str, Any], path: Path) -> None:
    line = json.dumps(entry)
    path.write_bytes(gzip.compress(f"{line}\n{line[:-300]}".encode()))


def changed(key: str, value: Any) -> Callable[[dict[str, Any], Path], None]:
    def damage(entry: dict[str, Any], path: Path) -> None:
        write({**entry, key: value}, path)

    return damage


def changed_step(key: str, value: Any) -> Callable[[dict[str, Any], Path], None]:
    def damage(entry: dict[str, Any], path: Path) -> None:
        steps = [{**entry["steps"][0], key: value}, *entry["steps"][1:]]
        write({**entry, "steps": steps}, path)

    return damage


def without(key: str) -> Callable[[dict[str, Any], Path], None]:
    def damage(entry: dict[str, Any], path: Path) -> None:
        write({name: value for name, value in entry.items() if name != key}, path)

    return damage


DAMAGE: dict[str, tuple[Callable[[dict[str, Any], Path], None], str]] = {
    "a truncated gzip": (cut, ":1: truncated or damaged gzip"),
    "a second line that stops midway": (second_line_cut, ":2: not JSON"),
    "another version": (
        changed("upstream", {"version": "0.9.0", "commit": "abc"}),
        ":1: recorded from vLLM 0.9.0",
    ),
    "another commit": (
        changed("upstream", {"version": "0.22.1", "commit": "abc"}),
        ":1: recorded from vLLM 0.22.1 (abc)",
    ),
    "no upstream": (without("upstream"), ":1: upstream is missing"),
    "no outputs": (without("outputs"), ":1: outputs is missing"),
    "outputs of another type": (changed("outputs", {"r0": "abc"}), ":1: outputs="),
    "an empty config": (changed("config", {}), ":1: config.num_blocks is missing"),
    "a pool without a block": (
        lambda entry, path: write({**entry, "config": {**entry["config"], "num_blocks": 1}}, path),
        ":1: config.num_blocks=1 is not an integer of at least 2",
    ),
    "an abort that is no list": (
        changed("events", [{"step": 0, "abort": "r0"}]),
        ":1: events[0].abort=r0 is not a list of request ids",
    ),
    "an event without a step": (changed("events", [{}]), ":1: events[0].step is missing"),
    "an arrival without a prompt": (
        changed("events", [{"step": 0, "add": [{"request_id": "r0", "prompt_token_ids": []}]}]),
        ":1: events[0].add[0].prompt_token_ids=[] is not token ids, at least one",
    ),
    "an arrival that is no object": (
        changed("events", [{"step": 0, "add": ["r0"]}]),
        ":1: events[0].add=['r0'] is not a list of objects",
    ),
    "steps missing": (changed("steps", []), ":1: truncated: a request arrives at step 0 of 0"),
    "a step without a field": (
        changed("steps", [{"num_scheduled_tokens": {}}]),
        ":1: steps[0].new is missing",
    ),
    "a count that is no number": (
        changed_step("free_blocks", "9"),
        ":1: steps[0].free_blocks=9 is not an integer",
    ),
    "an unknown reason": (
        changed_step("finish_reasons", {"r0": "bored"}),
        ":1: steps[0].finish_reasons=",
    ),
    "a list": (lambda entry, path: path.write_bytes(gzip.compress(b"[]\n")), ":1: not a JSON obj"),
    "nothing": (lambda entry, path: path.write_bytes(gzip.compress(b"")), ":1: the file holds no"),
    "no gzip": (lambda entry, path: path.write_text("{}"), ":1: truncated or damaged gzip"),
    "no text": (
        lambda entry, path: path.write_bytes(gzip.compress(b"\xff\xfe")),
        ":1: not UTF-8 text",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_recording_is_refused_by_name_and_line(
    entry: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    damage, message = DAMAGE[case]
    path = tmp_path / "damaged.jsonl.gz"
    damage(entry, path)
    assert replay.main([str(path)]) == 2
    assert f"{path}{message}" in capsys.readouterr().err


def test_a_missing_file_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["no-such-file.jsonl"]) == 2
    assert (
        capsys.readouterr().err == "no-such-file.jsonl: cannot be read: No such file or directory\n"
    )


def test_the_command_ends_with_the_count_and_status_0(
    entry: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(entry, tmp_path / "one.jsonl")
    assert replay.main([str(tmp_path / "one.jsonl")]) == 0
    assert capsys.readouterr().out == f"1 workloads, {len(entry['steps'])} steps: 0 differ\n"


@pytest.mark.slow
def test_the_command_replays_against_a_part_named_by_its_file(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    write(entry, tmp_path / "one.jsonl")
    (tmp_path / "mine.py").write_text(
        "from mini_vllm.scheduler import Scheduler\n"
        "class Mine(Scheduler):\n"
        "    def _pop_victim(self):\n"
        "        return self.running.pop(0)\n"
    )
    command = [sys.executable, "-m", "conformance.replay", str(tmp_path / "one.jsonl")]
    done = subprocess.run(
        [*command, "--scheduler", f"{tmp_path / 'mine.py'}:Mine"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith("steps: 1 differ")
    assert done.stdout.startswith(f"seed {entry['seed']} of ")
    assert done.stderr == ""


def test_the_command_puts_a_named_part_beside_a_releases_others(
    entry: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from conformance import releases

    kept = recording.read(releases.release_of("0.33.0").path, None)
    recording.write(tmp_path / "some.jsonl", itertools.islice(kept, 9))
    command = [str(tmp_path / "some.jsonl"), "--release", "0.33.0"]
    assert replay.main(command) == 0
    capsys.readouterr()
    assert replay.main([*command, "--block-pool", "mini_vllm.block_pool:BlockPool"]) == 1
    *_, field, counted = capsys.readouterr().out.splitlines()
    number = int(counted.split()[-2])
    assert field.startswith(f"  first in block_ids: {number} workloads, such as seed ")


def test_a_seed_decides_its_workload() -> None:
    assert workloads.generate(4711) == workloads.generate(4711)
    assert workloads.generate(4711) != workloads.generate(4711 + len(workloads.PROFILES))


def test_recordings_are_written_reproducibly(entry: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(entry, tmp_path / f"{name}.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert list(recording.read(tmp_path / "a.jsonl.gz")) == [entry]


def test_the_scheduler_of_a_configuration_has_its_bounds(entry: dict[str, Any]) -> None:
    scheduler = replay.mini_scheduler(entry["config"])
    assert isinstance(scheduler, Scheduler)
    assert scheduler.max_num_seqs == entry["config"]["max_num_seqs"]
    assert scheduler.max_model_len == entry["config"]["max_model_len"]
