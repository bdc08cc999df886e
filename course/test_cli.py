"""The `course` command, as a learner and a maintainer meet it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import typer

from course import commands, terminal
from course.conftest import REPOSITORY
from course.learning import mine
from course.learning.labs import find_labs

RIGHT = """\
def num_blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)
"""
WRONG = RIGHT.replace("-(-num_tokens // block_size)", "num_tokens // block_size")


@pytest.fixture
def starter(little_course):
    return find_labs(little_course)[0].starter


@pytest.mark.slow
def test_without_a_command_it_shows_the_phases_the_time_left_and_the_next_lab(course):
    ran = course()
    assert ran.code == 0
    assert "90 Little" in ran.out and "0/2" in ran.out and "10 min left. Next:" in ran.out
    assert "course check 90-00" in ran.out


@pytest.mark.slow
def test_piped_output_carries_no_colour_codes(course, starter):
    starter.write_text(WRONG)
    assert "\x1b" not in course().out + course("check").out + course("hint").out


@pytest.mark.slow
def test_check_shows_the_first_failing_test_and_the_one_command_for_a_hint(course, starter):
    starter.write_text(WRONG)
    ran = course("check", "90-00")
    assert ran.code == 1
    assert "17 tokens need a second block of 16: expected 2, came 1" in ran.out
    assert ran.out.rstrip().endswith("A hint: course hint 90-00")


@pytest.mark.slow
def test_check_without_a_lab_grades_the_next_one(course):
    assert course("check").out.startswith("90-00 A sound lab\n")


@pytest.mark.slow
def test_passing_names_what_was_built_the_reference_and_the_next_lab(course, starter):
    starter.write_text(RIGHT)
    ran = course("check")
    assert ran.code == 0
    assert "Passed: all 1 tests. You built: num_blocks." in ran.out
    assert "course solution 90-00 --diff" in ran.out
    assert "90-01 A sound lab" in ran.out.partition("Next:")[2]


@pytest.mark.slow
def test_check_all_grades_what_was_touched_and_nothing_else(course, starter):
    starter.write_text(RIGHT)
    ran = course("check", "--all")
    assert ran.code == 0 and ran.out.count("You built") == 1


@pytest.mark.slow
def test_commands_are_shown_as_they_must_be_typed_under_uv(course, monkeypatch):
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    ran = course("check")
    assert ran.out.rstrip().endswith("A hint: uv run course hint 90-00")


def test_every_command_is_known_to_what_puts_uv_in_front(monkeypatch):
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    names = set(typer.main.get_command(commands.app).commands)
    assert {
        name for name in names if not terminal.as_typed(f"course {name}").startswith("uv")
    } == set()
    for extra, command in (("upstream", "course upstream fetch"), ("serve", "course serve --mine")):
        told = f"uv run --extra {extra} {command}"
        assert terminal.as_typed(command) == told == terminal.as_typed(told)


@pytest.mark.slow
def test_watch_grades_now_and_whatever_is_saved_until_interrupted(
    course, starter, little_course, monkeypatch
):
    other = little_course / "phase-90-little" / "labs" / "lab-01-blocks-1" / "starter.py"
    saves = iter([(starter, WRONG), (other, RIGHT)])

    def watch(*folders, **_):
        path, text = next(saves, (None, ""))
        if path is None:
            raise KeyboardInterrupt
        path.write_text(text)
        yield {(2, str(path.parent / "README.md")), (2, str(path))}

    monkeypatch.setattr("watchfiles.watch", watch)
    ran = course("watch")
    assert ran.code == 0
    graded = [line for line in ran.out.splitlines() if line.endswith(" A sound lab")][:3]
    assert graded == ["90-00 A sound lab", "90-00 A sound lab", "90-01 A sound lab"]
    assert "num_blocks is not written yet" in ran.out and "expected 2, came 1" in ran.out
    assert ran.out.endswith("Stopped. Your progress is kept.\n")


@pytest.mark.slow
def test_watch_grades_what_was_saved_while_it_was_grading(course, starter, monkeypatch):
    from course.learning import grading

    real, saves = grading.run, iter([WRONG, RIGHT])

    def saved_meanwhile(*arguments, **options):
        report = real(*arguments, **options)
        if text := next(saves, ""):
            starter.write_text(text)
        return report

    def watch(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(grading, "run", saved_meanwhile)
    monkeypatch.setattr("watchfiles.watch", watch)
    ran = course("watch", "90-00")
    assert ran.out.count("were saved while they ran: nothing was kept") == 2
    assert "Passed: all 1 tests." in ran.out
    assert "1/2" in course().out


@pytest.mark.slow
def test_a_file_saved_while_it_was_graded_is_not_recorded(course, starter, monkeypatch):
    from course.learning import grading

    real = grading.run

    def broken_meanwhile(*arguments, **options):
        report = real(*arguments, **options)
        starter.write_text(WRONG)
        return report

    starter.write_text(RIGHT)
    monkeypatch.setattr(grading, "run", broken_meanwhile)
    ran = course("check", "90-00")
    assert ran.code == 1 and "Once more: course check 90-00" in ran.out
    assert "0/2" in course().out


@pytest.mark.slow
def test_watch_waits_for_a_file_that_an_editor_has_put_aside(course, starter, monkeypatch):
    starter.rename(starter.with_suffix(".bak"))

    def watch(*_, **__):
        starter.write_text(RIGHT)
        yield set()  # no event told of it
        raise KeyboardInterrupt

    monkeypatch.setattr("watchfiles.watch", watch)
    ran = course("watch", "90-00")
    assert "starter.py is gone" in ran.out and "Passed: all 1 tests." in ran.out


@pytest.mark.parametrize("text", [RIGHT, WRONG])
@pytest.mark.slow
def test_a_result_that_cannot_be_kept_is_shown_all_the_same(course, starter, little_course, text):
    starter.write_text(text)
    (little_course / ".course").write_text("in the way of the folder")
    ran = course("check", "90-00")
    assert ran.code == (0 if text == RIGHT else 1)
    assert "The result cannot be kept (" in ran.out
    assert ("Passed: all 1 tests." if text == RIGHT else "expected 2, came 1") in ran.out
    assert "Seventeen tokens" in course("hint", "90-00", "--test", "test_rounds_up").out


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["0", "-5", "nan", "inf", "1e300"])
@pytest.mark.parametrize("command", [("check",), ("watch",), ("selfcheck",), ("gpu", "run")])
def test_a_time_limit_that_is_none_is_refused_in_one_line(course, starter, command, limit):
    starter.write_text(RIGHT)
    ran = course(*command, "--time-limit", limit)
    assert ran.code == 2 and ran.err.startswith("--time-limit is ") and ran.err.count("\n") == 1


@pytest.mark.slow
def test_a_reset_that_cannot_keep_your_file_changes_nothing(
    course, starter, little_course, monkeypatch
):
    starter.write_text(WRONG)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("course.files.os.fsync", full)
    ran = course("reset", "90-00", "--yes")
    assert ran.code == 2 and "Nothing was changed" in ran.err and "No space left" in ran.err
    assert starter.read_text() == WRONG
    assert list((little_course / ".course" / "backup").iterdir()) == []


@pytest.mark.slow
def test_a_solution_that_gives_no_starter_is_named_not_traced(course, starter):
    solution = starter.parent / "solution.py"
    solution.write_text("def num_blocks(")
    ran = course()
    assert ran.code == 2 and "90-00: no starter can be made: '(' was never closed" in ran.err
    solution.unlink()
    starter.write_text(WRONG)
    assert course().code == 0
    ran = course("reset", "90-00", "--yes")
    assert (
        ran.code == 2 and "solution.py, which is gone" in ran.err and starter.read_text() == WRONG
    )


@pytest.mark.slow
@pytest.mark.parametrize("text", [b"\xff", b"[" * 500])
def test_a_manifest_that_is_no_text_is_named_not_traced(course, starter, text):
    (starter.parent / "lab.yaml").write_bytes(text)
    ran = course()
    assert ran.code == 2 and "lab.yaml: not " in ran.err


def test_ctrl_c_while_the_command_is_loading_leaves_no_traceback():
    program = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "from course.cli import main\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "main()\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (130, "")


@pytest.mark.slow
def test_hints_unfold_and_end_with_the_reference(course, starter):
    starter.write_text(WRONG)
    course("check")
    ran = course("hint")
    assert "90-00 test_rounds_up\n  1. Seventeen tokens do not fit into sixteen slots." in ran.out
    assert "That was the last. The reference: course solution 90-00" in ran.out


@pytest.mark.slow
def test_hints_are_those_for_what_failed_last(course, starter):
    manifest = starter.parent / "lab.yaml"
    text = manifest.read_text()
    manifest.write_text(
        text.replace(
            'sixteen slots."]',
            'sixteen slots.", {field: came, text: Round up.}, {field: waiting, text: Who waits}]',
        )
    )
    starter.write_text(WRONG)
    course("check")
    first, second = course("hint").out, course("hint").out
    assert first.startswith("90-00 test_rounds_up (came)\n  1. Seventeen tokens")
    assert "  2. Round up.\nThat was the last." in second and "Who waits" not in second
    starter.write_text(WRONG.replace("return", "return 'waiting' or"))
    course("check")
    assert course("hint").out.startswith("90-00 test_rounds_up (came, waiting)\n  1. Seventeen")


def test_a_hint_for_an_unknown_test_names_the_tests(course):
    ran = course("hint", "90-00", "--test", "test_x")
    assert ran.code == 2 and "Its tests are:\n  test_rounds_up" in ran.err


def test_reset_brings_the_pristine_starter_back_without_git_and_keeps_yours(
    course, starter, little_course
):
    pristine_text = starter.read_text()
    starter.write_text(WRONG)
    ran = course("reset", "90-00", "--yes")
    assert ran.code == 0 and starter.read_text() == pristine_text
    kept = list((little_course / ".course" / "backup").iterdir())
    assert [file.read_text() for file in kept] == [WRONG]


@pytest.mark.slow
def test_a_file_in_another_encoding_is_graded_kept_and_reset(course, starter, little_course):
    text = starter.read_text()
    starter.write_bytes(b"# caf\xe9\n" + WRONG.encode())
    assert "expected 2, came 1" in course("check").out
    assert course("reset", "90-00", "--yes").code == 0
    kept = list((little_course / ".course" / "backup").iterdir())
    assert kept[0].read_bytes().startswith(b"# caf\xe9") and starter.read_text() == text


@pytest.mark.slow
def test_reset_also_brings_back_a_deleted_starter(course, starter):
    text = starter.read_text()
    starter.unlink()
    assert "Put it back: course reset 90-00" in course("check", "90-00").err
    course("reset", "90-00", "--yes")
    assert starter.read_text() == text


def test_the_reference_is_not_shown_unasked_before_the_lab_is_passed(course):
    ran = course("solution", "90-00")
    assert ran.code == 2 and "course hint 90-00" in ran.err and "num_blocks" not in ran.out


@pytest.mark.slow
def test_the_reference_shows_after_passing_as_a_difference_from_yours(course, starter):
    starter.write_text(RIGHT)
    course("check")
    ran = course("solution", "90-00", "--diff")
    assert "--- yours: starter.py" in ran.out and "+++ reference: solution.py" in ran.out


def test_an_unknown_lab_is_refused_in_one_line(course):
    ran = course("check", "17-01")
    assert (ran.code, ran.err) == (2, "There is no lab '17-01'. The labs are: 90-00, 90-01.\n")


def test_a_broken_manifest_is_named_not_traced(course, starter):
    manifest = starter.parent / "lab.yaml"
    manifest.write_text(manifest.read_text() + "colour: red\n")
    ran = course()
    assert ran.code == 2 and "unknown key 'colour'" in ran.err


def test_trace_prints_each_step_and_saves_the_same_as_json(course, little_course):
    ran = course("trace", "--model", "toy", "--max-tokens", "2", "--block-size", "4",
                 "--ignore-eos", "hello world", "hello work")  # fmt: skip
    data = json.loads((little_course / ".course" / "trace.json").read_text())
    assert ran.code == 0
    assert "A:11 B:2+8c" in ran.out
    assert data["steps"][0]["num_scheduled_tokens"] == {"A": 11, "B": 2}
    assert data["steps"][0]["num_cached_tokens"]["B"] == 8
    assert [len(request["output_token_ids"]) for request in data["requests"]] == [2, 2]


def test_a_prompt_the_engine_refuses_is_refused_in_words(course):
    ran = course("trace", "--model", "toy", "--num-blocks", "2", "x" * 100)
    assert ran.code == 2 and "the pool has 1" in ran.err


MY_SAMPLER = '''\
from mini_vllm import Sampler as Theirs


class Sampler(Theirs):
    """The engine's own, under the learner's name."""

    def sample(self, logits, params, rng=None):
        {body}
        return super().sample(logits, params, rng)


def num_blocks(num_tokens, block_size):
    return -(-num_tokens // block_size)
'''


@pytest.fixture
def own_sampler(starter):
    manifest = starter.parent / "lab.yaml"
    manifest.write_text(manifest.read_text() + "part: sampler\n")
    return lambda body: starter.write_text(MY_SAMPLER.format(body=body))


@pytest.mark.slow
def test_run_mine_says_which_parts_were_yours(course, own_sampler):
    own_sampler("pass")
    ran = course("run", "--mine", "--model", "toy", "--max-tokens", "3", "hi")
    assert ran.code == 0
    assert "sampler            yours, from lab 90-00" in ran.out
    assert "block_pool         the course's" in ran.out


@pytest.mark.slow
def test_trace_and_mine_use_the_parts_that_pass_and_say_whose_they_are(
    course, own_sampler, tmp_path, monkeypatch
):
    from course.learning import own_engine

    monkeypatch.setattr(own_engine, "speed", lambda parts: (1.0, 2.0))
    assert "nothing to write" in course("mine", "--out", str(tmp_path / "none")).err
    own_sampler("pass")
    traced = course("trace", "--mine", "--model", "toy", "hi").out
    assert "sampler            yours, from lab 90-00: 8 calls" in traced
    ran = course("mine")
    assert "1 of 1 parts are yours" in ran.out and "sampler            yours" in ran.out
    assert "It decides" not in ran.out  # a sampler plans nothing
    out = tmp_path / "my-engine"
    assert course("mine", "--out", str(out)).code == 0
    assert sorted(p.name for p in (out / "my_engine").iterdir()) == [
        "__init__.py", "__main__.py", "lab_90_00.py",
    ]  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", "import my_engine; print(my_engine.PARTS.sampler.__module__)"],
        cwd=out, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert ran.stdout == "my_engine.lab_90_00\n", ran.stderr
    assert "the folder exists already" in course("mine", "--out", str(out)).err
    for name, why in (
        ("1.2", "need a name of letters"), ("class", "need a name of letters"),
        ("mini-vllm", "a module mini_vllm is installed"), ("no/such", "create it first"),
    ):  # fmt: skip
        assert why in course("mine", "--out", str(tmp_path / name)).err


@pytest.mark.slow
def test_the_badge_counts_what_parts_decide_as_vllm(monkeypatch):
    from course.learning import own_engine
    from mini_vllm.block_pool import BlockPool
    from mini_vllm.compilation.dispatcher import CudagraphDispatcher

    class HeadFirst(BlockPool):
        def free_blocks(self, ordered_blocks):
            super().free_blocks(reversed(list(ordered_blocks)))

    class NoGraphs(CudagraphDispatcher):
        def dispatch(self, num_tokens, uniform, forbid_full=False):
            return "NONE", num_tokens

    right = own_engine.badge(REPOSITORY, {"block_pool": BlockPool})
    wrong = own_engine.badge(REPOSITORY, {"block_pool": HeadFirst})
    assert right.whole_run == right.of_whole_run == 442 and right.differ == 0
    assert wrong.differ > 0 and wrong.steps < right.steps
    assert own_engine.badge(REPOSITORY, {"sampler": None}) is None
    late = own_engine.badge(REPOSITORY, {"stop_check": lambda request, max_model_len=None: None})
    assert late.differ == late.workloads, "no request ends"
    graphs = own_engine.badge(REPOSITORY, {"dispatcher": CudagraphDispatcher})
    assert graphs.is_vllms and graphs.text == "names the graphs of 33,320 recorded steps, 0 differ"
    none = own_engine.badge(REPOSITORY, {"dispatcher": NoGraphs})
    assert none.dispatches_differ > 10_000 and not none.is_vllms


@pytest.mark.slow
def test_run_mine_uses_no_lab_that_does_not_pass(course, own_sampler, starter):
    own_sampler("pass")
    starter.write_text(starter.read_text().replace("-(-num_tokens", "(num_tokens"))
    ran = course("run", "--mine", "--model", "toy", "--max-tokens", "3", "hi")
    assert "You have not passed a lab that supplies a part yet" in ran.out


@pytest.mark.slow
def test_an_error_in_your_part_is_shown_as_yours(course, own_sampler):
    own_sampler("raise KeyError('lost')")
    ran = course("run", "--mine", "--model", "toy", "hi")
    assert ran.code == 2
    assert "Your part from lab 90-00 stopped the engine: KeyError: 'lost'" in ran.err
    assert "starter.py, line 8, in sample: raise KeyError('lost')" in ran.err


@pytest.mark.slow
def test_passing_a_part_says_how_to_run_it(course, own_sampler):
    own_sampler("pass")
    assert (
        'Sampler now runs in the engine: course run --mine "Once upon a time"'
        in course("check").out
    )


COUNTED = """from pathlib import Path

from {module} import {name} as theirs


def {name}(*given, **named):
    Path(__file__).with_name("called").touch()
    return theirs(*given, **named)


"""


@pytest.fixture
def own_part(starter):
    """Have the little lab supply a part that leaves a file behind when the engine calls it."""

    def put(part, module):
        manifest = starter.parent / "lab.yaml"
        manifest.write_text(manifest.read_text() + f"part: {part}\n")
        starter.write_text(COUNTED.format(module=module, name=mine.attribute_of(part)) + RIGHT)
        return starter.with_name("called")

    return put


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "module"),
    [("experts", "mini_vllm.models.moe"), ("adapter_delta", "mini_vllm.lora.layers")],
)
def test_the_command_that_a_passed_part_names_calls_it(course, own_part, part, module):
    called = own_part(part, module)
    assert mine.command(part) in course("check").out
    plain = course("run", "--mine", "--max-tokens", "3", "hi")
    assert f"{part:<18} yours, not called here: course run --mine" in plain.out
    assert not called.exists()
    ran = course("run", "--mine", "--max-tokens", "3", *shlex.split(mine.ASKED_BY[part]), "hi")
    assert ran.code == 0 and called.exists()
    assert f"{part:<18} yours, from lab 90-00" in ran.out


def test_an_unknown_adapter_is_refused_with_those_there_are(course):
    ran = course("run", "--adapter", "whisper", "hi")
    assert ran.code == 2
    assert ran.err.startswith("--adapter 'whisper': need code, quote, shout, or a folder")


def test_the_demo_shows_the_batch_and_the_prefix_hits_in_a_pipe(course):
    ran = course("demo", "--model", "toy")
    assert ran.code == 0
    assert "step  0: A:64" in ran.out and "came from the prefix cache" in ran.out


def test_a_model_that_is_not_there_is_refused_in_words(course):
    ran = course("demo", "--model", "no-such-folder/at-all")
    assert ran.code == 2 and "no-such-folder/at-all" in ran.err


@pytest.mark.slow
def test_doctor_names_what_is_missing_what_it_enables_and_how_to_get_it(course):
    ran = course("doctor")
    assert "ok       Python: " in ran.out
    assert "pinned vLLM tree: upstream/ is absent" in ran.out
    assert "get it:       course upstream fetch" in ran.out


@pytest.mark.slow
def test_outside_the_repository_it_still_starts_as_a_module(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "course.cli", "--help"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
    )  # fmt: skip
    assert ran.returncode == 0 and "selfcheck" in ran.stdout


@pytest.mark.slow
def test_run_real_refuses_by_name_what_was_not_compared_and_says_how_to_get_the_engine(
    course, tmp_path, monkeypatch
):
    monkeypatch.setenv("COURSE_ENGINE", str(tmp_path / "nowhere"))
    for options, word in (
        ((), "--mine"), (("--mine", "--drafts", "2"), "--drafts"),
        (("--mine", "--regex", "a+"), "--regex"), (("--mine", "--adapter", "shout"), "--adapter"),
        (("--mine", "--temperature", "1"), "--temperature"),
        (("--mine", "--model", "byte-moe"), "--model byte-moe"),
        (("--mine",), "course engine install"),
    ):  # fmt: skip
        ran = course("run", "--real", *options, "hi")
        assert ran.code == 2 and ran.err.startswith("run --real: ") and word in ran.err


@pytest.mark.slow
def test_the_first_mend_is_shown_broken_then_whole(course, little_course):
    broken = course("first")
    assert broken.code == 1 and "the plan is empty while C, D have not finished" in broken.out
    path = little_course / ".course" / "first.py"
    path.write_text(
        path.read_text().replace("wanted if wanted <= budget else 0", "min(wanted, budget)")
    )
    whole = course("first")
    assert whole.code == 0 and "Whole: 11 steps, each as vLLM's rule decides." in whole.out
    path.write_text("def schedule(:")
    wrong = course("first")
    assert wrong.code == 2 and ".course/first.py: line 1: invalid syntax" in wrong.err
