"""The recorder around vLLM's own scheduler, and its files read back by the mini engine."""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance import flight as reader
from conformance import real_core, why, workloads
from conformance.real_core.archive import number_of
from conformance.recorders import combined, hybrid
from conformance.recorders import run as walk
from course.site import recordings
from mini_vllm.observe.flight import Flight, FlightError, pairs

ROOT = Path(__file__).resolve().parents[1]
PIN = "0.22.1"


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "vllm_flight_recorder", ROOT / "vllm_flight_recorder.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def recording_core(recorder: ModuleType, version: str) -> Any:
    """The core of a release whose schedulers record."""
    if why := real_core.why_not(version):
        pytest.skip(why)
    core = copy.copy(real_core.core_of(version))
    for name in ("_scheduler", "_async_scheduler"):
        base = getattr(core, name)
        made = recorder.recording(base)
        made.__signature__ = inspect.signature(base)  # by which the core knows what to pass
        setattr(core, name, made)
    return core


Record = Callable[..., Path]


@pytest.fixture
def record(recorder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Run one workload on a recording scheduler; the folder of the recording."""

    def run(workload: dict[str, Any], version: str = PIN, name: str = "flight") -> Path:
        core = recording_core(recorder, version)
        folder = tmp_path / name
        monkeypatch.setenv(recorder.DIRECTORY, str(folder))
        monkeypatch.setattr(recorder, "version", lambda: version)
        made = walk.Run(copy.deepcopy(workload), core)
        with contextlib.suppress(walk.Stalled):
            made.recorded()
        made.scheduler.flight.note("close")
        return folder

    return run


def whole(folder: Path) -> bytes:
    (path,) = folder.iterdir()
    return path.read_bytes()


KINDS: dict[str, list[str]] = {
    "drafts": ["drafts"], "adapters": ["adapters"], "grammars": ["grammars"], "async": ["async"],
    "asynchronous drafts": ["async", "drafts"], "asynchronous adapters": ["async", "adapters"],
    "all but drafts": ["async", "adapters", "grammars"],
}  # fmt: skip


def workload(seed: int, kind: str) -> dict[str, Any]:
    return combined.generate(seed, KINDS[kind]) if kind in KINDS else workloads.generate(seed)


def check(result: reader.Replayed) -> None:
    assert result.difference is None, f"the mini engine decided otherwise: {result.difference}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_what_a_scheduler_decided_is_decided_again(record, kind):
    steps = 0
    for seed in range(3):
        result = reader.replay(record(workload(seed, kind), name=f"{seed}"))
        check(result)
        steps += result.num_steps
    assert steps > 30, "hardly a step was compared"


def test_groups_with_windows_are_decided_again(record):
    steps = 0
    for seed in range(8):
        folder = record(hybrid.generate(seed), name=f"groups-{seed}")
        result = reader.replay(folder)
        check(result)
        steps += result.num_steps
    assert steps > 100, "hardly a step was compared"


def test_a_window_that_is_another_one_is_seen(record):
    """The blocks behind a window are freed by its length; the file does not list them."""
    seen = 0
    for seed in range(8):
        folder = record(hybrid.generate(seed), name=f"other-{seed}")
        (path,) = folder.iterdir()
        first, _, rest = path.read_bytes().partition(b"\n")
        head = json.loads(first)
        for group in head["groups"]:
            if "sliding_window" in group:
                group["sliding_window"] += group["block_size"]
        path.write_bytes(json.dumps(head).encode() + b"\n" + rest)
        seen += reader.replay(folder).difference is not None
    assert seen >= 2, "no recording shows which window the engine had"


@pytest.mark.slow
def test_a_hundred_runs_with_groups_are_read_back(record):
    kinds = set()
    for seed in range(1000, 1100):
        folder = record(hybrid.generate(seed), name=f"{seed}")
        check(reader.replay(folder))
        kinds.add(tuple(group["kind"] for group in Flight(folder).head["groups"]))
    assert len(kinds) == 4, f"orders of groups: {kinds}"


def test_groups_of_states_are_refused_by_name(record):
    folder = record(hybrid.generate_states(0), name="states")
    with pytest.raises(reader.NotReplayable, match="MambaSpec"):
        reader.replay(folder)
    with pytest.raises(why.WhyError, match="MambaSpec"):
        why.follow(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_two_hundred_recorded_runs_are_read_back(record, kind):
    for seed in range(1000, 1025):
        check(reader.replay(record(workload(seed, kind), name=f"{seed}")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("version", ["0.23.0", "0.27.1", "0.33.0"])
def test_a_later_release_is_read_back_with_its_rules(record, version, kind):
    for seed in range(25):
        check(reader.replay(record(workload(seed, kind), version, name=f"{seed}")))


@pytest.mark.parametrize(
    ("folder", "release", "steps"), [(".", "0.22.1", 138), ("0.27.1", "0.27.1", 69)]
)
def test_what_whole_servers_recorded_is_read_back(folder, release, steps):
    """Both by `python -m conformance.sample_server`, each in an environment of its release."""
    path = recordings.SAMPLE.parent / folder
    flight = Flight(path)
    assert flight.head["vllm"].partition("+")[0] == release
    preempted = sum(len(line.get("preempted", ())) for line in flight if "step" in line)
    found = reader.replay(path)
    check(found)
    assert (found.num_requests, found.num_steps) == (24, steps) and preempted > 0


HERE = [version for version in real_core.present() if number_of(version) >= number_of(PIN)]


def as_observed(folder: Path) -> Iterator[dict[str, Any]]:
    """Each step of a file in the words of `conformance.recorders.run.observe`, of the planned."""
    names: dict[int, str] = {}
    tables: dict[str, list[int]] = {}
    last: dict[str, list[int]] = {"plan": [], "running": [0], "waiting": [0], "skipped": [0]}
    for line in Flight(folder):
        if "add" in line:
            names[line["add"]] = line["id"]
        if "step" not in line:
            continue
        last |= {name: line[name] for name in last if name in line}
        came = [names[n] for name in ("new", "resumed") for n, _ in pairs(line.get(name, ()))]
        for number, ids in pairs(line.get("blocks", ())):
            name = names[number]
            tables[name] = ids if name in came else tables[name] + ids
        plan = {names[number]: count for number, count in pairs(last["plan"])}
        yield {
            "num_scheduled_tokens": plan, "came": sorted(came),
            "preempted": sorted(names[number] for number in line.get("preempted", ())),
            "running": [names[number] for number in last["running"][1:]],
            "waiting": [names[number] for number in last["waiting"][1:]],
            "block_ids": {name: tables[name] for name in plan}, "free_blocks": line["free"],
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", *KINDS, "groups"])
@pytest.mark.parametrize("version", HERE)
def test_a_release_decides_as_it_does_without_the_recorder_and_the_file_says_what(
    record, version, kind, caplog
):
    """Of every release that lies here, also where no mini engine decides as it does."""
    many = 0
    with caplog.at_level("WARNING", logger="vllm.flight_recorder"):
        for seed in range(2, 6):  # both policies
            made = hybrid.generate(seed) if kind == "groups" else workload(seed, kind)
            plain = walk.Run(copy.deepcopy(made), real_core.core_of(version))
            with contextlib.suppress(walk.Stalled):
                plain.recorded()
            kept = as_observed(record(made, version, name=f"{seed}"))
            for step, (said, found) in enumerate(zip(plain.steps, kept, strict=True)):
                said["came"] = sorted({*said["new"], *said["resumed"]})
                said["block_ids"] = {r: said["block_ids"][r] for r in said["num_scheduled_tokens"]}
                if kind == "groups":  # blocks that a window has passed are not in the file
                    del found["block_ids"]
                assert {name: said[name] for name in found} == found, f"seed {seed}, step {step}"
            many += len(plain.steps)
    assert many > 30 and not caplog.records, f"{many} steps; {caplog.messages}"


@pytest.mark.parametrize("kind", ["plain", "all but drafts", "groups"])
def test_every_step_of_a_server_is_explained(record, kind, capsys):
    folder = record(hybrid.generate(3) if kind == "groups" else workload(5, kind))
    found = why.follow(folder)
    assert not found.ends
    for number in found.names:
        spans = found.log.of(number)
        assert spans[-1].kind == "ends"
        steps = {n for s in spans if s.kind.startswith(("waits", "gets", "preempted"))
                 for n in range(s.first, s.last + 1)}  # fmt: skip
        assert steps <= set(range(len(found.times)))
    name = next(iter(found.names.values()))
    assert why.run(folder, name, None, None) == 0
    assert " s " in capsys.readouterr().out


def test_a_page_draws_a_recording_with_windows(record):
    (path,) = record(hybrid.generate(3)).iterdir()
    drawn = recordings.open_files([[path.name, base64.b64encode(path.read_bytes()).decode()]])
    steps = sum("step" in line for line in Flight(path))
    assert drawn["notice"] == "" and len(drawn["totals"]["free"]) == steps > 0
    assert all(each["why"] for each in drawn["requests"])


def test_what_is_not_proved_is_refused_by_name(record):
    folder = record(workload(1, "plain"))
    (path,) = folder.iterdir()
    first, *rest = path.read_text().splitlines(keepends=True)
    for key, value in (("connector", "Nixl"), ("encoder", [1, 2]), ("scheduler", "Mine")):
        path.write_text(json.dumps(json.loads(first) | {key: value}) + "\n" + "".join(rest))
        with pytest.raises(reader.NotReplayable, match=key):
            reader.replay(folder)
    path.write_text(json.dumps(json.loads(first) | {"vllm": "9.9.9"}) + "\n" + "".join(rest))
    with pytest.raises(reader.NotReplayable, match=r"9\.9\.9"):
        reader.replay(folder)


def test_a_decision_that_was_changed_is_found_at_its_step(record):
    folder = record(workload(1, "plain"))
    (path,) = folder.iterdir()
    lines = path.read_text().splitlines(keepends=True)
    at, line = next((i, json.loads(x)) for i, x in enumerate(lines) if '"step":3,' in x)
    *most, last = line["plan"]
    for field, value in (("free", line["free"] + 1), ("plan", [*most, last + 1])):
        changed = [*lines[:at], json.dumps(line | {field: value}) + "\n", *lines[at + 1 :]]
        path.write_text("".join(changed))
        difference = reader.replay(folder).difference
        assert difference is not None and (difference.step, difference.field) == (3, field)


def test_nothing_of_a_text_is_written(record):
    """No token id: a request whose tokens are large numbers leaves none of them in the file."""
    made = workload(2, "plain")
    for event in made["events"]:
        for add in event["add"]:
            add["prompt_token_ids"] = [987_654_321_000 + t for t in add["prompt_token_ids"]]
    text = whole(record(made)).decode()
    assert "987654321" not in text and "prompt_token" not in text


def test_the_same_blocks_have_other_hashes_in_another_recording(record):
    first, second = (whole(record(workload(2, "plain"), name=n)).decode() for n in "ab")
    hashes = [
        {h for text in re.findall(r'"([0-9a-f]{16,})"', t) for h in re.findall(".{16}", text)}
        for t in (first, second)
    ]
    assert hashes[0] and not hashes[0] & hashes[1]


def test_a_file_that_was_cut_anywhere_reads_up_to_its_last_whole_line(record):
    folder = record(workload(1, "plain"))
    (path,) = folder.iterdir()
    text = path.read_bytes()
    head = text.index(b"\n") + 1
    for size in range(head, len(text), 97):
        path.write_bytes(text[:size])
        flight = Flight(folder)
        lines = list(flight)
        assert len(lines) == text[:size].count(b"\n") - 1
        assert flight.is_cut == (text[size - 1 : size] != b"\n")
    path.write_bytes(text[: len(text) // 2])
    result = reader.replay(folder)
    check(result)
    assert result.is_cut and "cut" in str(result)


def test_a_file_that_is_none_is_refused_by_line(tmp_path):
    path = tmp_path / "x.0000.jsonl"
    for text, named in (
        ("", "need a head"), ("{}\n", "need an object"), ("nonsense\n", "line 1: not JSON"),
        ('{"flight": 9}\n', "need a head with flight=1"), ('{"add": 1}\n', "need a head"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(FlightError, match=named):
            Flight(path)
    with pytest.raises(FlightError, match="no such file"):
        Flight(tmp_path / "nothing.jsonl")


def test_a_failure_in_the_recorder_ends_the_recording_and_not_the_engine(
    recorder, record, monkeypatch, caplog
):
    written = []
    write = recorder.Files.write

    def full(files: Any, line: Any) -> None:
        if len(written) == 20:
            raise OSError(28, "No space left on device")
        written.append(line)
        write(files, line)

    monkeypatch.setattr(recorder.Files, "write", full)
    with caplog.at_level("WARNING"):
        folder = record(workload(3, "plain"))
    said = [each.getMessage() for each in caplog.records]
    assert [x for x in said if "No space left" in x] == said and len(said) == 1
    check(reader.replay(folder))


def test_a_folder_that_cannot_be_made_ends_the_recording_and_not_the_engine(
    record, tmp_path, caplog
):
    (tmp_path / "taken").write_text("")
    with caplog.at_level("WARNING"):
        record(workload(3, "plain"), name="taken")
    assert [x.getMessage() for x in caplog.records if "has stopped" in x.getMessage()]


@pytest.mark.slow
def test_files_rotate_below_their_bound_and_the_first_one_stays(recorder, tmp_path):
    files = recorder.Files(tmp_path / "many", int(1e6))
    for number in range(4000):
        files.write({"step": number, "plan": [0] * 500})
    files.close()
    paths = sorted((tmp_path / "many").iterdir())
    names = [path.name.split(".")[1] for path in paths]
    assert len(paths) == 4 and names[0] == "0000" and int(names[1]) > 1
    assert sum(path.stat().st_size for path in paths) <= 1e6
    with pytest.raises(FlightError, match="rotated away"):
        Flight(paths[0])


def test_a_bound_that_is_too_small_is_said(recorder, tmp_path):
    with pytest.raises(ValueError, match=r"MAX_MB=0\.5: need at least 1"):
        recorder.Files(tmp_path, int(5e5))
