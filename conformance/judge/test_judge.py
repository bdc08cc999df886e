"""Programs under test: one that decides as vLLM does, and some that misbehave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance import recording, replay
from conformance.judge import __main__ as judging
from conformance.judge import example, reader

RECORDINGS = Path(recording.__file__).parent / "recordings"
EXAMPLE = f"{sys.executable} {example.__file__}"
PLAIN = ("basic", "pressure", "whole-prompts", "limits", "aborts", "mixed")


def files(*names):
    return [str(RECORDINGS / f"{name}.jsonl.gz") for name in names]


def run(capsys, command, *arguments):
    code = judging.main(["--command", command, *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def program(tmp_path, answer):
    """A program that says ready, then `answer` to every step."""
    path = tmp_path / "program.py"
    path.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    message = json.loads(line)\n"
        "    if 'workload' in message:\n"
        "        print('{}', flush=True)\n"
        "    else:\n"
        f"        {answer}\n"
    )
    return f"{sys.executable} {path}"


def held(name, count):
    """The example, asked in this process about the first workloads of a file."""
    for number, workload in enumerate(reader.workloads(files(name)[0])):
        if number == count:
            return
        if example.cannot(workload["config"]):
            continue
        scheduler = example.Scheduler(workload)
        for step in workload["steps"]:
            decided = step.pop("decided")
            got = scheduler.step(**step)
            for key, want in decided.items():
                assert judging.same(key, want, got[key], decided), (workload["seed"], step, key)


@pytest.mark.parametrize("name", PLAIN)
def test_the_example_decides_as_the_real_scheduler(name):
    held(name, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_the_example_decides_all_that_it_can(name):
    held(name, 10_000)


@pytest.mark.slow
def test_the_example_is_judged_over_its_standard_input(capsys):
    seeds = [f"--seed={seed}" for seed in (0, 9, 18)]
    code, out, _ = run(capsys, EXAMPLE, *files("basic"), *seeds)
    assert code == 0
    assert out.splitlines()[-1].startswith("3 workloads, ")
    assert out.splitlines()[-1].endswith(": 0 differ")
    assert "block_ids" in out


@pytest.mark.slow
def test_what_the_program_cannot_do_is_passed_over_and_counted(capsys):
    code, out, _ = run(capsys, EXAMPLE, *files("prefix"), "--seed=2", "--seed=11")
    assert code == 2
    assert "passed over 2: enable_prefix_caching" in out


@pytest.mark.slow
def test_a_difference_is_shown_with_its_step_and_field(capsys, tmp_path):
    wrong = program(
        tmp_path, "print(json.dumps({'num_scheduled_tokens': {'nobody': 1}}), flush=True)"
    )
    code, out, _ = run(capsys, wrong, *files("basic"), "--seed=0")
    assert code == 1
    assert out.startswith("basic.jsonl.gz, seed 0, step 0, num_scheduled_tokens\n  expected  {")
    assert out.splitlines()[-1].endswith("1 differ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("print('hello', flush=True)", "not JSON: hello"),
        ("print('[]', flush=True)", "not an object"),
        ("print('{}', flush=True)", "without num_scheduled_tokens"),
        ("print(json.dumps({'num_scheduled_tokens': {}, 'plan': 1}), flush=True)", "plan is not a"),
        ("sys.exit(3)", "the program ended with status 3"),
    ],
)
def test_a_program_that_does_not_keep_to_the_format_is_told_how(capsys, tmp_path, answer, problem):
    code, _, err = run(capsys, program(tmp_path, answer), *files("basic"), "--seed=0")
    assert code == 2
    assert problem in err


@pytest.mark.slow
def test_a_program_that_never_answers_is_ended(capsys, tmp_path):
    silent = program(tmp_path, "pass")
    code, _, err = run(capsys, silent, *files("basic"), "--seed=0", "--seconds=0.2")
    assert (code, err) == (2, "no answer within 0.2 s\n")


def test_a_command_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        judging.main(["--command", "no-such-program", *files("basic")])
    assert "no-such-program: No such file" in capsys.readouterr().err


def test_a_file_that_is_not_a_recording_is_named(capsys, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"seed": 1}\n')
    code, _, err = run(capsys, EXAMPLE, str(tmp_path / "other.jsonl"))
    assert code == 2
    assert "other.jsonl:1: not a recording" in err


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.jsonl.gz")), ids=lambda path: path.name)
def test_the_reader_gives_the_tokens_that_a_replay_samples(path):
    kept, read = next(recording.read(path)), next(reader.workloads(path))
    driven = replay.Driven(kept, replay.mini_scheduler(replay.config_of(kept)), replay.mini_request)
    events = replay.events_by_step(kept)
    for number, step in enumerate(read["steps"]):
        told = kept["steps"][number].get("sampled_token_ids")
        drafts = kept["steps"][number].get("draft_token_ids")
        got = driven.step(events.get(number, {}), told, drafts)
        assert step["sampled_token_ids"] == got["sampled_token_ids"], number


def test_the_reader_needs_nothing_but_the_standard_library():
    text = Path(reader.__file__).read_text(encoding="utf-8")
    imported = {
        line.split()[1].split(".")[0] for line in text.splitlines() if line[:4] in ("from", "impo")
    }
    assert imported - {"reader"} <= set(sys.stdlib_module_names)
