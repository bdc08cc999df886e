"""Grading survives whatever a learner's file does, and says what happened in words."""

from __future__ import annotations

import io
import os
import re

import pytest
from rich.console import Console

from course.conftest import REPOSITORY
from course.learning import grading, runner, show
from course.learning.labs import Lab, find_labs


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


@pytest.mark.slow
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


LESS_OFTEN = {"unprintable", "exception", "reads the keyboard", "dead process", "function gone"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) if case in LESS_OFTEN else case for case in WORDS],
)
def test_a_failing_file_is_explained_without_a_traceback(little_course, case):
    text, words = WORDS[case]
    report, told = grade(little_course, text)
    assert not report.ok
    assert " ".join(words.split()) in " ".join(told.split())
    assert "Traceback" not in told and "_pytest" not in told


@pytest.mark.slow
def test_an_endless_loop_ends_at_the_time_limit_and_says_where_it_was(little_course):
    report, told = grade(little_course, body("while True:\n    num_tokens += 0"), time_limit=1.0)
    assert report.stuck_test.endswith("::test_rounds_up")
    assert "Out of time: after 1 s the tests were still running in test_rounds_up." in told
    assert re.search(r"Your code was at starter.py, line [23], in num_blocks.", told)


@pytest.mark.slow
def test_an_endless_loop_after_a_failed_test_says_where_it_was_too(little_course):
    (path,) = little_course.glob("phase-90-little/labs/lab-00-*/test_lab.py")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n\ndef test_zeta(lab):\n    assert lab.num_blocks(99, 1) == 99, 'zeta'\n")
    report, told = grade(
        little_course,
        body("while num_tokens == 99:\n    __import__('time').sleep(0.1)\nreturn 0"),
        time_limit=1.0,
    )
    assert [result.outcome for result in report.results] == ["failed"]
    assert report.stuck_test.endswith("::test_zeta")
    assert re.search(r"Your code was at starter.py, line [23], in num_blocks.", told)


@pytest.mark.slow
def test_what_the_code_printed_is_shown_with_the_failing_test(little_course):
    _, told = grade(little_course, body("print('size', block_size)\nreturn 0"))
    assert "    Your code printed:\n      size 16\n" in told


@pytest.mark.slow
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


@pytest.mark.slow
def test_cancelling_the_time_limit_does_not_put_it_off(little_course):
    report, told = grade(
        little_course,
        "import faulthandler\n"
        + body(
            "faulthandler.cancel_dump_traceback_later()\n"
            "while True:\n    __import__('time').sleep(0.1)"
        ),
        time_limit=1.0,
    )
    # Only the process itself can say where it was: ended from outside it could not.
    assert "Your code was at starter.py, line" in told and not report.ok


@pytest.mark.parametrize("limit", [0, -5, float("nan"), float("inf"), 1e300])
def test_a_time_limit_that_is_none_is_refused(little_course, limit):
    with pytest.raises(ValueError, match=r"time_limit is .*: give seconds, more than 0, at most"):
        grading.run(little_course, find_labs(little_course)[0].test_file, time_limit=limit)


TWO_TESTS = "\n\ndef test_zeta(lab):\n    assert lab.num_blocks(1, 1) == 1, 'zeta'\n"


WAYS_OUT = [
    ("raise KeyboardInterrupt", "num_blocks raised KeyboardInterrupt: "),
    ("pytest.exit('enough', 0)", "num_blocks raised Exit: enough"),
    ("pytest.skip('not today')", "num_blocks raised Skipped: not today"),
    ("pytest.xfail('known')", "num_blocks raised Skipped: known"),
]
IN_THE_LAST_TEST = "num_tokens == 1"


@pytest.mark.parametrize(
    ("when", "statement", "words"),
    [
        *(("num_tokens == 17", *way) for way in WAYS_OUT[:2]),
        (IN_THE_LAST_TEST, *WAYS_OUT[0]),
        *(pytest.param("num_tokens == 17", *way, marks=pytest.mark.slow) for way in WAYS_OUT[2:]),
        *(pytest.param(IN_THE_LAST_TEST, *way, marks=pytest.mark.slow) for way in WAYS_OUT[1:]),
    ],
)
def test_a_test_the_code_gets_out_of_is_failed(little_course, statement, words, when):
    (path,) = little_course.glob("phase-90-little/labs/lab-00-*/test_lab.py")
    path.write_text(path.read_text() + TWO_TESTS)
    report, told = grade(
        little_course,
        "import pytest\n"
        + body(f"if {when}:\n    {statement}\nreturn -(-num_tokens // block_size)"),
    )
    assert not report.ok and words in told


@pytest.mark.slow
def test_tests_that_never_ran_are_named(little_course):
    (path,) = little_course.glob("phase-90-little/labs/lab-00-*/test_lab.py")
    path.write_text(path.read_text() + TWO_TESTS)
    _, told = grade(little_course, body("raise KeyboardInterrupt"))
    assert "Without a result, since the tests ended early: test_zeta." in told


@pytest.mark.slow
def test_a_test_that_was_to_be_there_and_is_not_is_no_pass(little_course):
    lab = find_labs(little_course)[0]
    lab.starter.write_text(body("return -(-num_tokens // block_size)"))
    report = grading.run(little_course, lab.test_file, expected=["test_rounds_up", "test_gone"])
    assert not report.ok and "test_gone" in report.trouble


@pytest.mark.slow
def test_a_skip_of_the_tests_own_is_no_failure(little_course):
    (path,) = little_course.glob("phase-90-little/labs/lab-00-*/test_lab.py")
    path.write_text(
        path.read_text() + "\n\ndef test_there(lab):\n    import pytest\n    pytest.skip('none')\n"
    )
    report, _ = grade(little_course, body("return -(-num_tokens // block_size)"))
    assert report.ok and [r.outcome for r in report.results] == ["passed", "skipped"]


@pytest.mark.slow
def test_a_fork_at_import_reports_nothing_twice(little_course):
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    report, _ = grade(
        little_course, "import os\nos.fork()\n" + body("return -(-num_tokens // block_size)")
    )
    assert [result.outcome for result in report.results] == ["passed"] and report.ok


@pytest.mark.slow
def test_a_loop_that_prints_ends_with_words_and_not_with_a_full_disk(little_course, monkeypatch):
    pytest.importorskip("resource", reason="the system limits no file sizes")
    small = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))\n"
    report, told = grade(little_course, small + body("while True:\n    print('x' * 1000)"))
    assert not report.ok and "look for a loop that prints without end" in told


@pytest.mark.slow
def test_the_limit_on_printing_is_set_before_the_code_runs(little_course):
    pytest.importorskip("resource", reason="the system limits no file sizes")
    _, told = grade(
        little_course,
        "import resource\n" + body("return resource.getrlimit(resource.RLIMIT_FSIZE)[0]"),
    )
    assert f"came {runner.LARGEST_FILE}" in told
