"""The real engine in an environment of its own: where it lies, what is in it, how to start it.

`course engine install` makes it. What needs the real engine asks here: first for the
environment this process runs in, then for that one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit import versions

VARIABLE = "COURSE_ENGINE"
"""Names the environment's folder where it is another than the one that was installed."""
DEFAULT = ".venv-engine"
KEPT = Path(".course") / "engine"
"""Under the repository's root: the folder of `course engine install --into`."""
READY = "engine.json"
"""In the environment's folder: how far its installation came."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter, and what is installed for it."""

    python: Path
    packages: dict[str, str]
    python_version: str
    cuda: str
    """The CUDA version its torch was built for, "none" or "unknown"."""

    @property
    def vllm(self) -> str:
        """The version of vLLM, with "+cpu" for a build for processors; or ""."""
        return self.packages.get("vllm", "")

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.vllm


def folder(root: Path) -> Path:
    """Where the real engine's environment is, or would be."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    kept = root / KEPT
    if kept.is_file():
        return Path(kept.read_text(encoding="utf-8").strip())
    return root / DEFAULT


def interpreter(where: Path) -> Path:
    """The Python of the environment in a folder."""
    return where / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def here() -> Environment:
    """The environment of this process."""
    return Environment(
        Path(sys.executable), versions.installed(), platform.python_version(), versions.cuda()
    )


def look(where: Path) -> Environment | None:
    """What the environment in a folder holds; None without one that has vLLM."""
    python = interpreter(where)
    if not python.is_file():
        return None
    command = [str(python), "-I", versions.__file__]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        told = json.loads(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    found = Environment(python, told["packages"], told["python"], told["cuda"])
    return found if found.vllm else None


def find(root: Path) -> Environment | None:
    """An environment with vLLM: this process's, else the one made for it."""
    own = here()
    return own if own.vllm else look(folder(root))


def variables(found: Environment, root: Path) -> dict[str, str]:
    """This process's environment variables, changed to those that a run in `found` needs.

    The repository is importable there, and nothing of this environment is. The build for
    processors does not compile its model unless TORCH_COMPILE_DISABLE=0 asks for it: that takes
    longer than any run of the course.
    """
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    path = [str(root)]
    if found.python == Path(sys.executable):
        path += filter(None, [env.get("PYTHONPATH")])
    else:
        for name in ("VIRTUAL_ENV", "PYTHONHOME"):
            env.pop(name, None)
        env["PATH"] = os.pathsep.join([str(found.python.parent), env.get("PATH", "")])
    env["PYTHONPATH"] = os.pathsep.join(path)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if found.on_cpu:
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
    return env
