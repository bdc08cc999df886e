"""`course gpu run`: execute a lab's run.py and keep what it printed, with where it came from.

With `--cpu` the run uses vLLM's CPU build: the same scheduler, block manager, sampler and log
lines, another model runner and other kernels.

A capture is `captured/<name>.json` in the lab's folder. Promises: a capture is written only after
a run that succeeded; it names the hardware and every version; one of other hardware is never
replaced unasked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from course import machine, processes, terminal
from course.files import write_atomically
from course.learning.labs import CourseError, Lab

FORMAT = 1
PACKAGES = ("torch", "triton", "vllm", "transformers", "flashinfer-python", "numpy")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run used: the GPUs as their driver names them, none in a run on the CPU."""

    gpus: tuple[str, ...]
    driver: str
    memory: tuple[str, ...]
    cuda: str
    processor: str
    cores: int

    @property
    def name(self) -> str:
        """The device in words."""
        return ", ".join(self.gpus) or f"{self.processor}, {self.cores} cores"


def hardware() -> Hardware | None:
    """What nvidia-smi and torch say; None without a GPU that answers."""
    cards = machine.gpus()
    if not cards:
        return None
    return Hardware(
        gpus=tuple(name for name, _, _ in cards),
        driver=cards[0][1],
        memory=tuple(memory for _, _, memory in cards),
        cuda=_cuda(),
        processor=machine.processor(),
        cores=machine.cores(),
    )


def cpu() -> Hardware:
    """This machine without its GPUs.

    Raises:
        CourseError: what is installed is not vLLM's CPU build.
    """
    version = _versions().get("vllm", "none")
    if "cpu" not in version:
        raise CourseError(
            f"--cpu needs vLLM's CPU build, a version that ends in +cpu; installed: {version}. "
            "SETUP.md says how to get it."
        )
    return Hardware((), "none", (), "none", machine.processor(), machine.cores())


def _cuda() -> str:
    """The CUDA version torch was built for, else the one the driver offers, else "unknown"."""
    try:
        import torch

        return str(torch.version.cuda or "none")
    except ImportError:
        return "unknown"


def run(
    console: Console,
    root: Path,
    labs: Sequence[Lab],
    chosen: Lab | None,
    name: str | None,
    arguments: Sequence[str],
    force: bool,
    time_limit: float,
    on_cpu: bool = False,
) -> int:
    """Run the chosen lab, or every lab whose run.py works on the device; the exit status."""
    device = "cpu" if on_cpu else "gpu"
    with_run = [lab for lab in labs if (lab.folder / "run.py").is_file()]
    able = [lab for lab in with_run if device in lab.manifest.run_on]
    if chosen and chosen not in with_run:
        raise CourseError(f"Lab {chosen.id} has no run.py: there is nothing to run.")
    if chosen and chosen not in able:
        others = ", ".join(lab.id for lab in able) or "none"
        raise CourseError(f"The run.py of {chosen.id} needs a GPU. These work with --cpu: {others}")
    if not able:
        raise CourseError(f"No lab has a run.py for a {device.upper()}: there is nothing to run.")
    able = [chosen] if chosen else able
    name = name or ("cpu" if on_cpu else "run")
    found = cpu() if on_cpu else hardware()
    if found is None:
        _say_plan(console, root, able, name, arguments)
        also = ", ".join(lab.id for lab in able if "cpu" in lab.manifest.run_on)
        if also:
            terminal.say(console, f"With --cpu, on vLLM's CPU build (SETUP.md): {also}")
        return 0
    more = f", driver {found.driver}, CUDA {found.cuda}" if found.gpus else ""
    terminal.say(console, found.name + more, "bold")
    failed = 0
    for lab in able:
        failed += _run_one(console, root, lab, found, name, arguments, force, time_limit)
    return 1 if failed else 0


def _say_plan(
    console: Console, root: Path, labs: Sequence[Lab], name: str, arguments: Sequence[str]
) -> None:
    """Without a GPU: what would run, and which captures are there already."""
    terminal.say(console, "No NVIDIA GPU answers here. With one, this would run:", "yellow")
    for lab in labs:
        target = lab.folder / "captured" / f"{name}.json"
        terminal.say(console, f"  {lab.id} {lab.manifest.title}")
        terminal.say(console, f"    {shlex.join(_command(root, lab, arguments))}")
        state = f"captured on {_device_of(target)}" if target.is_file() else "not captured yet"
        terminal.say(console, f"    -> {terminal.relative(target, root)} ({state})")


def _command(root: Path, lab: Lab, arguments: Sequence[str]) -> list[str]:
    return ["python", (lab.folder / "run.py").relative_to(root).as_posix(), *arguments]


def _run_one(
    console: Console,
    root: Path,
    lab: Lab,
    found: Hardware,
    name: str,
    arguments: Sequence[str],
    force: bool,
    time_limit: float,
) -> bool:
    """Run one lab and keep its output; whether it failed."""
    target = lab.folder / "captured" / f"{name}.json"
    if target.is_file() and not force:
        before = _device_of(target)
        if before != found.name:
            terminal.say(
                console,
                f"{lab.id}: {terminal.relative(target, root)} was captured on {before}. "
                "Keep both with --name, or replace it with --force.",
                "red",
            )
            return True
    command = _command(root, lab, arguments)
    terminal.say(console, f"{lab.id}: {shlex.join(command)}")
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    began, date = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    ran = processes.run([sys.executable, *command[1:]], root, env, time_limit)
    seconds = time.perf_counter() - began
    terminal.raw(console, ran.output.rstrip())
    if ran.code != 0:
        what = {
            "time": f"out of time after {time_limit:g} s",
            "output": f"it printed more than {processes.OUTPUT_LIMIT // 2**20} MiB",
        }.get(ran.ended, f"exit status {ran.code}")
        terminal.say(console, f"{lab.id}: {what}; nothing was captured.", "red")
        return True
    capture = {
        "format": FORMAT,
        "lab": lab.id,
        "command": shlex.join(command),
        "date": date,
        "seconds": round(seconds, 2),
        **asdict(found),
        "packages": _versions(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "run_py_sha256": hashlib.sha256((lab.folder / "run.py").read_bytes()).hexdigest(),
        # The folder the repository lies in is nobody's business: paths are given from its root.
        "output": ran.output.replace(f"{root}{os.sep}", ""),
    }
    write_atomically(target, json.dumps(capture, indent=1, ensure_ascii=False) + "\n")
    terminal.say(console, f"{lab.id}: kept in {terminal.relative(target, root)}", "green")
    return False


def _device_of(capture: Path) -> str:
    try:
        kept = json.loads(capture.read_text(encoding="utf-8"))
        return ", ".join(kept["gpus"]) or f"{kept['processor']}, {kept['cores']} cores"
    except (ValueError, KeyError, TypeError):
        return "unknown hardware (the file is not a capture)"


def _versions() -> dict[str, str]:
    """Versions of the packages a GPU lab may use; absent ones are left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
