"""Grading survives whatever a learner's file does, and says what happened in words."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from course import grading, show
from course.conftest import REPOSITORY
from course.labs import Lab, find_labs


def grade(root, text: str, time_limit: float = 60.0) -> tuple[grading.Report, str]:
    """Grade `text` as the starter of the first lab: the report, and what a learner reads."""
    lab = find_labs(root)[0]
    lab.starter.write_text(text, encoding="utf-8")
    report = grading.run(root, lab.test_file, time_limit=time_limit)
    return report, shown(root, lab, report)


def shown(root, lab: Lab, report: grading.Report) -> str:
    stream = io.StringIO()
    show.graded(Console(file=stream, highlight=False, markup=False), root, lab, report)
    return stream.getvalue()


def body(statements: str) -> str:
    lines = "".join(f"    {line}\n" for line in statements.splitlines())
    return f"def num_blocks(num_tokens, block_size):\n{lines}"


def test_a_correct_file_passes(little_course):
    report, _ = grade(little_course, body("return -(-num_tokens // block_size)"))
    assert report.ok and [result.outcome for result in report.results] == ["passed"]


WORDS = {
    "not written": (
        body("raise NotImplementedError"),
        "num_blocks is not written yet (starter.py, line 2).",
    ),
    "wrong value": (
        body("return num_tokens // block_size"),
        "17 tokens need a second block of 16: expected 2, came 1\n    compared: 1 == 2\n",
    ),
    "syntax error": (
        "def num_blocks(a, b)\n    return 1\n",
        "starter.py, line 1 cannot be loaded:\n    def num_blocks(a, b)\n"
        "                        ^\nSyntaxError: expected ':'\n",
    ),
    "import error": (
        "import numpee\n",
        "starter.py, line 1 cannot be loaded:\n    import numpee\nModuleNotFoundError: No module "
        "named 'numpee'\n",
    ),
    "exception": (
        body("return [][num_tokens]"),
        "num_blocks raised IndexError: list index out of range\n"
        "    starter.py, line 2:  return [][num_tokens]\n",
    ),
    "function gone": (
        "x = 1\n",
        "starter.py defines no num_blocks: its names and arguments belong to the lab.",
    ),
    "sys.exit": (
        body("raise SystemExit(3)"),
        "num_blocks raised SystemExit: 3\n",
    ),
    "dead process": (
        "import os\n" + body("os._exit(7)"),
        "The Python process ended in test_rounds_up with exit code 7, before the tests were done.",
    ),
    "unprintable": (
        "class Odd:\n    def __eq__(self, other):\n        return False\n"
        "    def __repr__(self):\n        raise RuntimeError('no')\n" + body("return Odd()"),
        "raised RuntimeError: no\n",
    ),
    "endless recursion": (
        body("return num_blocks(num_tokens, block_size)"),
        "num_blocks raised RecursionError: ",
    ),
    "reads the keyboard": (
        body("return int(input())"),
        "num_blocks raised ",
    ),
}


@pytest.mark.parametrize("case", WORDS)
def test_a_failing_file_is_explained_without_a_traceback(little_course, case):
    text, words = WORDS[case]
    report, told = grade(little_course, text)
    assert not report.ok
    assert " ".join(words.split()) in " ".join(told.split())
    assert "Traceback" not in told and "_pytest" not in told


def test_an_endless_loop_ends_at_the_time_limit_and_says_where_it_was(little_course):
    report, told = grade(little_course, body("while True:\n    num_tokens += 0"), time_limit=1.0)
    assert report.stuck_test.endswith("::test_rounds_up")
    assert "Out of time: after 1 s the tests were still running in test_rounds_up." in told
    assert re.search(r"Your code was at starter.py, line [23], in num_blocks.", told)


def test_an_endless_loop_after_a_failed_test_says_where_it_was_too(little_course):
    (path,) = little_course.glob("phase-90-little/labs/lab-00-*/test_lab.py")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n\ndef test_zeta(lab):\n    assert lab.num_blocks(99, 1) == 99, 'zeta'\n")
    report, told = grade(
        little_course, body("while num_tokens == 99:\n    pass\nreturn 0"), time_limit=1.0
    )
    assert [result.outcome for result in report.results] == ["failed"]
    assert report.stuck_test.endswith("::test_zeta")
    assert re.search(r"Your code was at starter.py, line [23], in num_blocks.", told)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the state of a process in /proc")
def test_a_grader_ends_when_the_process_that_asked_for_it_is_killed():
    grader = (
        "import os; from course import runner; parent = os.getppid()\n"
        "print(os.getpid(), flush=True); runner._end_with(parent)"
    )
    asking = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grader!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", asking], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None
        status = Path(f"/proc/{int(process.stdout.readline())}/status")
        assert status.exists()
        process.kill()
        process.stdout.read()  # ends when the last writer, the grader, closes its files

    def ended() -> bool:  # gone, or a zombie waiting for init
        try:
            return "State:\tZ" in status.read_text(encoding="utf-8")
        except OSError:
            return True

    deadline = time.monotonic() + 10  # the kernel closes files a moment before the state changes
    while not ended():
        assert time.monotonic() < deadline, "the grader outlived the process that asked for it"


def test_what_the_code_left_running_is_ended_with_it(little_course, tmp_path):
    mark = tmp_path / "child.txt"
    program = (
        "import subprocess, sys, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        f"pathlib.Path({str(mark)!r}).write_text(str(child.pid))\n"
        + body("return -(-num_tokens // block_size)")
    )
    report, _ = grade(little_course, program)
    assert report.ok
    # A killed child is gone or a zombie waiting for init; either way it runs nothing.
    status = f"/proc/{mark.read_text()}/status"
    try:
        with open(status, encoding="utf-8") as file:
            assert "State:\tZ" in file.read()
    except FileNotFoundError:
        pass


def test_what_the_code_printed_is_shown_with_the_failing_test(little_course):
    _, told = grade(little_course, body("print('size', block_size)\nreturn 0"))
    assert "    Your code printed:\n      size 16\n" in told


def test_a_variant_sees_only_the_tests_named_for_it():
    folder = REPOSITORY / "course/testdata/phase-90-selfcheck/labs/lab-06-static"
    report = grading.run(
        REPOSITORY,
        folder / "test_lab.py",
        variants={
            "solution": (folder / "solution.py", None),
            "starter": (folder / "starter.py", ["test_without_hints"]),
        },
    )
    assert [r.name for r in report.of("starter")] == ["test_without_hints"]


def test_a_long_message_is_cut():
    message = "x" * 50 + "\nassert " + "y" * 500
    words, compared = show._split_comparison(message)
    assert (len(words), len(compared)) == (50, show.LONGEST_COMPARISON + len(" ..."))
