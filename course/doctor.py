"""`course doctor`: what this machine has, and what each missing piece would enable.

Promises: nothing is changed, nothing is downloaded, and every missing thing comes with the one
command that brings it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from course import machine, terminal
from course.truth import upstream
from labkit import environment

PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `needed` things missing make the exit status 1."""

    name: str
    ok: bool
    detail: str
    enables: str = ""
    get: str = ""
    needed: bool = False


def run(console: Console, root: Path) -> int:
    """Print every finding; 1 when something the CPU labs need is missing."""
    findings = list(examine(root))
    for finding in findings:
        mark = "ok     " if finding.ok else "MISSING" if finding.needed else "absent "
        style = "green" if finding.ok else "red" if finding.needed else "yellow"
        terminal.say(console, f"{mark}  {finding.name}: {finding.detail}", style)
        if not finding.ok:
            terminal.say(console, f"           would enable: {finding.enables}")
            terminal.say(console, f"           get it:       {finding.get}")
    broken = [finding.name for finding in findings if finding.needed and not finding.ok]
    console.print()
    if broken:
        terminal.say(console, f"The CPU labs need: {', '.join(broken)}.", "red")
    else:
        terminal.say(console, "Everything the CPU labs need is here. Next: course", "green")
    return 1 if broken else 0


def examine(root: Path) -> Iterator[Finding]:
    """Everything the course may use, the needed things first."""
    version = platform.python_version()
    yield Finding(
        "Python",
        sys.version_info[:2] >= PYTHON,
        f"{version} at {sys.executable}",
        "anything here",
        "install Python 3.11 or newer, or let uv do it: uv python install 3.12",
        needed=True,
    )
    for name in ("numpy", "safetensors", "PyYAML", "rich", "typer", "pytest"):
        yield _package(name, "every CPU lab", "pip install -e .", needed=True)
    yield _package("watchfiles", "course watch", "pip install -e .", needed=True)
    model = root / "models" / "byte-llama" / "model.safetensors"
    yield Finding(
        "shipped model",
        model.is_file(),
        terminal.relative(model.parent, root) if model.is_file() else "no models/byte-llama",
        "demo, run, and every experiment on real weights",
        "it belongs to the repository: git checkout -- models, or clone again",
        needed=True,
    )
    yield Finding(
        "progress",
        _writable(root),
        f"kept in {terminal.relative(root / '.course', root)}",
        "progress between two commands",
        "make the repository's folder writable",
        needed=True,
    )
    status = upstream.verify(root)
    yield Finding(
        "pinned vLLM tree",
        status.ok,
        status.detail,
        "reading the cited code locally; course upstream show; course cite check",
        "course upstream fetch",
    )
    yield _package("torch", "labs and tests marked torch", "pip install -e '.[torch]'")
    yield _package("transformers", "comparing the engine with it", "pip install -e '.[torch]'")
    yield _package("huggingface_hub", "models by hub id", "pip install -e '.[hf]'")
    yield _engine(root)
    yield _gpu()
    yield Finding(
        "uv",
        shutil.which("uv") is not None,
        shutil.which("uv") or "not on the PATH",
        "the commands as the pages write them (plain pip works too)",
        "pip install uv",
    )


def _package(name: str, enables: str, get: str, needed: bool = False) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", enables, get, needed)


def _engine(root: Path) -> Finding:
    """vLLM, in this environment or in its own."""
    found = environment.find(root)
    enables = "course gpu run, with and without a GPU; pytest -m engine"
    if found is None:
        return Finding("real engine", False, "no vLLM", enables, "course engine install")
    at = terminal.relative(found.python, root)
    return Finding("real engine", True, f"vLLM {found.vllm}, Python {found.python_version}, {at}")


def _writable(root: Path) -> bool:
    folder = root / ".course"
    return os.access(folder if folder.exists() else root, os.W_OK)


def _gpu() -> Finding:
    """The GPU as its driver reports it, and whether torch sees it."""
    absent = Finding(
        "GPU",
        False,
        "no NVIDIA GPU answered nvidia-smi",
        "GPU labs and course gpu run; every CPU lab is graded without one",
        "SETUP.md names machines that can be rented by the hour",
    )
    cards = [", ".join(card) for card in machine.gpus()]
    if not cards:
        return absent
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            return Finding(
                "GPU",
                False,
                f"{'; '.join(cards)}, but this torch ({torch.__version__}) cannot use it",
                "GPU labs and course gpu run",
                "install a CUDA build of torch that fits the driver",
            )
    return Finding("GPU", True, "; ".join(cards))
