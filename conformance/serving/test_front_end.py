"""vLLM's own server over this engine: its answers are those of the whole real server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from labkit import environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.engine
def test_the_real_front_end_answers_the_same_with_our_core_behind_it() -> None:
    found = environment.look(environment.folder(ROOT))
    assert found is not None
    command = [str(found.python), "-m", "conformance.serving.front_end"]
    env = os.environ | environment.variables(found, ROOT)
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    told = [line for line in ran.stdout.splitlines() if "APIServer" not in line]
    assert ran.returncode == 0, "\n".join(told[-8:])
    assert re.fullmatch(r"(\d{3}) requests: 0 differ, 0 documented", told[-1])
