"""`course run --mine --serve`: a learner's sampler behind the server, asked by a real client."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from conformance.serve_stream import free_port
from course.learning import engine_commands
from course.learning.engine_options import EngineOptions
from course.learning.labs import CourseError
from course.terminal import make_console

pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from types import SimpleNamespace
from course.learning import engine_commands
from course.learning.engine_options import EngineOptions
from course.terminal import make_console
from mini_vllm.sampler import Sampler

class Mine(Sampler):
    def sample(self, logits, params, rng=None):
        return 65 + len({asked})

owners = {{"sampler": SimpleNamespace(id="09-01")}}
engine_commands.own_parts = lambda *_: ({{"sampler": Mine}}, owners)
engine_commands.serve(make_console(), lambda: (None, [], None), True, {port}, EngineOptions())
"""


def test_a_learners_sampler_answers_a_client() -> None:
    port = free_port()
    program = PROGRAM.format(port=port, asked="''")
    server = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        body = json.dumps({"prompt": "The", "max_tokens": 5}).encode()
        post = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        for _ in range(400):
            try:
                with urllib.request.urlopen(post, timeout=30) as answer:
                    assert json.load(answer)["choices"][0]["text"] == "AAAAA"
                break
            except OSError:
                assert server.poll() is None
                time.sleep(0.05)
        else:
            pytest.fail("the server never answered")
    finally:
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=30)[0].decode()
    assert "Given to the engine: sampler from 09-01" in said
    assert re.search(r"sampler\s+yours, from lab 09-01: 5 calls", said), said
    assert f"curl http://127.0.0.1:{port}/v1/completions" in said


@pytest.mark.slow
def test_an_error_in_a_part_behind_the_server_is_said_as_theirs() -> None:
    port = free_port()
    program = PROGRAM.format(port=port, asked="{}['lost']").replace(
        'SimpleNamespace(id="09-01")', 'SimpleNamespace(id="09-01", folder=Path("."))'
    )
    command = [sys.executable, "-c", "from pathlib import Path\n" + program]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        body = json.dumps({"prompt": "The", "max_tokens": 5}).encode()
        post = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        for _ in range(400):  # it does not listen yet, then it answers with an error and ends
            if server.poll() is not None:
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(post, timeout=30)
            time.sleep(0.05)
        said = server.communicate(timeout=30)[1].decode()
    finally:
        server.kill()
    assert "Your part from lab 09-01 stopped the engine: KeyError: 'lost'" in said


def test_a_model_that_cannot_be_served_is_said_in_a_line() -> None:
    with pytest.raises(CourseError, match="nowhere"):
        engine_commands.serve(make_console(), lambda: None, False, 0, EngineOptions("nowhere"))  # type: ignore[arg-type, return-value]
