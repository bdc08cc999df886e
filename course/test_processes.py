"""Programs end in time, print within bounds and leave no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from course import processes
from course.conftest import HOLDER, REPOSITORY, held, read_until_gone


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are adopted on Linux")
@pytest.mark.parametrize("how", ["done", "late", "prints"])
def test_nothing_a_program_started_outlives_it(tmp_path, how):
    path = held(tmp_path)
    endings = {"done": "", "late": "import time\ntime.sleep(600)\n",
               "prints": "while True:\n    print('x' * 1000)\n"}  # fmt: skip
    program = HOLDER.format(path=str(path)) + endings[how]
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    ran = processes.run(
        [sys.executable, "-c", program], tmp_path, dict(os.environ),
        time_limit=2.0 if how == "late" else 60.0, output_limit=10_000,
    )  # fmt: skip
    assert (ran.code, ran.ended) == {
        "done": (0, ""), "late": (None, "time"), "prints": (None, "output")
    }[how]  # fmt: skip
    assert read_until_gone(pipe) == b"ready" and len(ran.output) <= 10_000


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are adopted on Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.usefixtures("usual_signals")
def test_nothing_outlives_the_process_that_asked_for_it(tmp_path, number):
    path = held(tmp_path)
    program = HOLDER.format(path=str(path)) + "import time\ntime.sleep(600)\n"
    asking = (
        "import os, sys, pathlib; from course import processes\n"
        f"processes.run([sys.executable, '-c', {program!r}], pathlib.Path('.'), "
        "dict(os.environ), time_limit=600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", asking], cwd=REPOSITORY, stderr=subprocess.DEVNULL
    ) as process:
        pipe = os.open(path, os.O_RDONLY)  # returns when the program has opened the other end
        while os.read(pipe, 100) != b"ready":
            pass
        process.send_signal(number)
        assert read_until_gone(pipe) == b""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "code"), [("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_an_exit_code_comes_through(tmp_path, program, code):
    ran = processes.run([sys.executable, "-c", program], tmp_path, dict(os.environ), 60.0)
    assert (ran.code, ran.ended) == (code, "")


@pytest.mark.skipif(os.name != "posix", reason="signals have no numbers here")
def test_a_signal_comes_through(tmp_path):
    program = "import os, signal; print('before', flush=True); os.kill(os.getpid(), 11)"
    ran = processes.run([sys.executable, "-c", program], tmp_path, dict(os.environ), 60.0)
    assert (ran.output, ran.code) == ("before\n", -11)
