"""A learner's parts in `course run`, `trace`, `bench` and `serve`: called, counted and named."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from conformance.serve_stream import free_port
from course.learning import mine
from course.learning.engine_commands import Own
from course.learning.engine_options import EngineOptions
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from mini_vllm.entrypoints.async_llm import EngineDead

ROOT = Path(__file__).resolve().parents[2]
LABS = ["01-03", "01-05", "05-03", "10-01", "16-03", "16-04"]
WATCHED = ("step", "stop_check", "dispatcher", "shards", "detokenizer", "front_door")


def calls(said: str) -> dict[str, int]:
    """How often each part was called, by what a command says; 0 for one of theirs that rested."""
    told = re.findall(r"^  (\w+) +yours, (?:not called|rests|.*: ([\d,]+) calls?)", said, re.M)
    return {part: int(count.replace(",", "") or 0) for part, count in told}


@pytest.fixture
def course(tmp_path, monkeypatch, capsys):
    return PassedCourse(tmp_path, LABS, monkeypatch, capsys)


@pytest.mark.slow
def test_with_every_part_passed_the_command_that_a_pass_names_calls_it(
    tmp_path, monkeypatch, capsys
):
    labs = [lab.id for lab in find_labs(ROOT) if lab.manifest.part]
    course = PassedCourse(tmp_path, labs, monkeypatch, capsys)
    by_command: dict[str, set[str]] = {}
    for part in mine.part_names():
        by_command.setdefault(mine.command(part), set()).add(part)
    assert by_command.pop("course serve --mine") == {"front_door"}
    for command, parts in by_command.items():
        counted = calls(course.say(*shlex.split(command)[1:]))
        assert {part for part in parts if not counted[part]} == set(), command
    for model in ("byte-window", "byte-state"):
        counted = calls(course.run("hi", "--mine", "--model", model, max_tokens=3))
        assert counted["step"] and counted["stop_check"] and not counted["kv_cache_manager"]


@pytest.mark.slow
def test_each_command_calls_what_it_says_it_calls(course):
    ranks, graphs = ("--tensor-parallel-size", "2"), ("--cudagraph-mode", "FULL")
    for command, options, called in (
        (("run", "--max-tokens", "3", "hi"), (), {"step", "stop_check", "detokenizer"}),
        (
            ("run", "--max-tokens", "3", "hi"),
            ranks,
            {"step", "stop_check", "detokenizer", "shards"},
        ),
        (
            ("run", "--max-tokens", "3", "hi"),
            graphs,
            {"step", "stop_check", "detokenizer", "dispatcher"},
        ),
        (("trace", "--max-tokens", "3", "hi", "ho"), (), {"step", "stop_check", "detokenizer"}),
        (
            ("trace", "--max-tokens", "3", "hi"),
            ranks,
            {"step", "stop_check", "detokenizer", "shards"},
        ),
        (
            ("trace", "--max-tokens", "3", "hi"),
            graphs,
            {"step", "stop_check", "detokenizer", "dispatcher"},
        ),
        (("bench", "--requests", "2"), (), {"step", "stop_check"}),
        (("bench", "--requests", "2"), ranks, {"step", "stop_check", "shards"}),
        (("bench", "--requests", "2"), graphs, {"step", "stop_check", "dispatcher"}),
    ):
        counted = calls(course.say(*command, "--mine", *options))
        assert set(counted) == {*WATCHED}
        assert {part for part, count in counted.items() if count} == called, (command, options)


@pytest.mark.slow
def test_a_served_engine_calls_the_front_door_the_detokenizer_and_the_stop_check(course, tmp_path):
    pytest.importorskip("uvicorn", reason="needs the extra 'serve'")
    port = free_port()
    command = [
        sys.executable, "-m", "course.cli", "serve", "--mine", "--adapter", "shout",
        "--port", str(port),
    ]  # fmt: skip
    server = subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""},
                              stdout=subprocess.PIPE)  # fmt: skip
    said = {}
    try:
        for model in ("byte-llama", "shout"):
            body = json.dumps({"model": model, "prompt": "The", "max_tokens": 8}).encode()
            post = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body,
                {"Content-Type": "application/json"},
            )  # fmt: skip
            for _ in range(600):
                try:
                    with urllib.request.urlopen(post, timeout=30) as answer:
                        said[model] = json.load(answer)["choices"][0]["text"]
                    break
                except ConnectionError:
                    pass
                except OSError as error:
                    assert isinstance(getattr(error, "reason", None), ConnectionError), error
                assert server.poll() is None
                time.sleep(0.05)
    finally:
        server.send_signal(signal.SIGINT)
        told = server.communicate(timeout=60)[0].decode()
    assert len(said) == 2 and said["byte-llama"] != said["shout"], said
    counted = calls(told)
    assert {part for part, n in counted.items() if n} == {
        "step",
        "stop_check",
        "front_door",
        "detokenizer",
    }
    assert counted["stop_check"] == 16


@pytest.mark.slow
def test_the_package_has_every_part_a_trace_a_benchmark_and_runs(course, tmp_path):
    (tmp_path / "conformance").symlink_to(ROOT / "conformance")
    out = tmp_path / "my-engine"
    assert "6 parts of yours" in course.say("mine", "--out", str(out))
    said = {}
    for arguments in (
        ("The",), ("trace", "The"), ("bench",), ("--adapter", "shout", "The"),
        ("--tensor-parallel-size", "2", "The"),
    ):  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-m", "my_engine", *arguments], cwd=out, capture_output=True,
            text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        said[arguments] = ran.stdout
    assert said["The",].startswith("The") and said["--adapter", "shout", "The"] != said["The",]
    assert said["--tensor-parallel-size", "2", "The"] == said["The",]
    assert "A:3" in said["trace", "The"]
    assert re.search(r"\d+ steps, [\d,]+ tokens at", said["bench",])
    readme = (out / "README.md").read_text()
    assert "decides 442 of 442 steps of a run of vLLM as vLLM did" in readme
    assert "names the graphs of 33,320 recorded steps, 0 differ" in readme
    assert all(f"`{part}`: lab" in readme for part in WATCHED)


def test_every_part_has_a_command_that_calls_it():
    for part in mine.part_names():
        assert mine.command(part).startswith(("course run --mine", "course serve --mine"))


def test_parts_that_ranks_cannot_hold_rest_and_are_named():
    parts = {"attention": 1, "scheduler": 2, "drafter": 3}
    owners = dict.fromkeys(parts)
    told = EngineOptions(tensor_parallel_size=2).rest(parts, owners)
    assert told == ["The ranks use the engine's own parts in place of yours: attention, drafter."]
    assert parts == {"scheduler": 2}


def test_a_dead_engine_is_blamed_on_a_part_only_if_that_is_what_ended_it():
    class Owner:
        id, folder = "10-01", Path(__file__).parent

    def failing():
        raise KeyError("lost")

    own = Own({"shards": failing}, {"shards": Owner()})
    with pytest.raises(KeyError):
        own.given["shards"]()
    theirs = "Your part from lab 10-01 stopped the engine: "
    dead = "the engine has ended: "
    assert own.why(EngineDead(f"{dead}KeyError: 'lost'")).startswith(f"{theirs}KeyError: 'lost'")
    assert own.why(EngineDead(f"{dead}MemoryError: ")) == f"{dead}MemoryError: "
    told = own.why(EngineDead(f"{dead}RuntimeError: shards part: gave rank 0"))
    assert told == f"{theirs}shards part: gave rank 0"


def test_what_a_part_returns_that_the_engine_cannot_use_is_said_as_theirs():
    class Owner:
        id, folder = "10-01", Path("nowhere")

    told = mine.own_failure(RuntimeError("shards part: gave rank 0"), {"shards": Owner()})
    assert told == "Your part from lab 10-01 stopped the engine: shards part: gave rank 0"
    assert mine.own_failure(RuntimeError("another part of it"), {"shards": Owner()}) == ""
