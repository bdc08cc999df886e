"""Fixtures of the course tests: a small course of its own in a temporary folder."""

from __future__ import annotations

import os
import select
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from course import cli

REPOSITORY = Path(__file__).parents[1]
TESTDATA = REPOSITORY / "course" / "testdata"
GOOD = TESTDATA / "phase-90-selfcheck" / "labs" / "lab-00-good"


class Ran(NamedTuple):
    """What one `course` command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def little_course(tmp_path: Path) -> Path:
    """A course of two labs (90-00 and 90-01, both the good one), outside any git checkout."""
    root = tmp_path / "little course"  # a path with a space in it
    root.mkdir()
    shutil.copy(REPOSITORY / "conftest.py", root)
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n'
        'markers = ["gpu: x", "torch: x", "upstream: x"]\n',
        encoding="utf-8",
    )
    for number in (0, 1):
        folder = root / "phase-90-little" / "labs" / f"lab-{number:02d}-blocks-{number}"
        shutil.copytree(GOOD, folder)
        manifest = folder / "lab.yaml"
        text = manifest.read_text(encoding="utf-8").replace("90-00", f"90-{number:02d}")
        manifest.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def course(
    little_course: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Run the `course` command in the little course, as its console script does."""
    monkeypatch.chdir(little_course)
    monkeypatch.delenv("COURSE_ROOT", raising=False)
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["course", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


# ------------------------------------------------------------------ what a program leaves behind


def held(tmp_path: Path) -> Path:
    """A named pipe that ends when the last process that opened it for writing is gone."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")
    path = tmp_path / "held"
    os.mkfifo(path)
    return path


HOLDER = """\
import os, subprocess, sys
held = os.open({path!r}, os.O_WRONLY)
wait = [sys.executable, "-c", "import time; time.sleep(600)"]
own_group = subprocess.Popen(wait, pass_fds=[held])
own_session = subprocess.Popen(wait, pass_fds=[held], start_new_session=True)
orphan = [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(" + repr(wait)
          + f", pass_fds=[{{held}}], start_new_session=True)"]
subprocess.run(orphan, pass_fds=[held], check=True)
os.write(held, b"ready")
"""
"""Three processes that wait ten minutes: in our group, with a session of its own, an orphan."""


def read_until_gone(pipe: int) -> bytes:
    """Everything written to `pipe`; returns when every writer is dead."""
    told = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], 60.0)
        assert ready, "a process outlived the one that started it"
        chunk = os.read(pipe, 100)
        if not chunk:
            return told
        told += chunk
