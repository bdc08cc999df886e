"""`course gpu run`: execute a lab's run.py and keep what it printed, with where it came from.

With `--cpu` the run uses vLLM's CPU build: the same scheduler, block manager, sampler and log
lines, another model runner and other kernels.

A capture is `captured/<name>.json` in the lab's folder. Promises: a capture is written only after
a run that succeeded; it names the hardware and every version; one of other hardware is never
replaced unasked; a run is heard while it runs, and whatever it started ends with it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from course import machine, processes, terminal
from course.files import write_atomically
from course.learning.labs import CourseError, Lab
from labkit import environment
from labkit.environment import Environment

FORMAT = 1
ORDER = ("02-04", "05-07", "04-04", "04-02", "05-04", "02-03", "03-03", "01-02", "08-02", "06-02")
"""Runs by what they give for their time: kernels in seconds, then one engine, then several, then
what needs a download. Borrowed machines go away, so what is cheap comes first."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a run used: the GPUs as their driver names them, none in a run on the CPU."""

    gpus: tuple[str, ...]
    driver: str
    memory: tuple[str, ...]
    processor: str
    cores: int

    @property
    def name(self) -> str:
        """The device in words."""
        return ", ".join(self.gpus) or f"{self.processor}, {self.cores} cores"


def hardware() -> Hardware | None:
    """What nvidia-smi says; None without a GPU that answers."""
    cards = machine.gpus()
    if not cards:
        return None
    return Hardware(
        gpus=tuple(name for name, _, _ in cards),
        driver=cards[0][1],
        memory=tuple(memory for _, _, memory in cards),
        processor=machine.processor(),
        cores=machine.cores(),
    )


def cpu() -> Hardware:
    """This machine without its GPUs."""
    return Hardware((), "none", (), machine.processor(), machine.cores())


def choose(root: Path, on_cpu: bool) -> Environment:
    """The environment a run is for: this one, else the real engine's own if that fits better.

    Raises:
        CourseError: neither has vLLM's build for processors, and `on_cpu` asks for it.
    """
    own = environment.here()
    if own.on_cpu if on_cpu else own.vllm:
        return own
    other = environment.look(environment.folder(root))
    if other is not None and other.on_cpu == on_cpu:
        return other
    if on_cpu:
        raise CourseError(
            "--cpu needs vLLM's build for processors, a version that ends in +cpu; installed: "
            f"{own.vllm or (other.vllm if other else 'none')}. To get it: course engine install"
        )
    return own  # kernels need no vLLM


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for on the command line."""

    name: str
    arguments: tuple[str, ...]
    force: bool
    resume: bool
    time_limit: float


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
    resume: bool = False,
) -> int:
    """Run the chosen lab, or every lab whose run.py works on the device; the exit status.

    Args:
        resume: leave the labs alone that this device has captured with this run.py and command.
    """
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
    wish = Wish(name, tuple(arguments), force, resume, time_limit)
    found = cpu() if on_cpu else hardware()
    if found is None:
        _say_plan(console, root, able, wish)
        also = ", ".join(lab.id for lab in able if "cpu" in lab.manifest.run_on)
        if also:
            terminal.say(
                console, f"With --cpu, on vLLM's CPU build (course engine install): {also}"
            )
        return 0
    within = choose(root, on_cpu)
    cuda = f", driver {found.driver}, CUDA {within.cuda}" if found.gpus else ""
    terminal.say(console, f"{found.name}{cuda}, vLLM {within.vllm or 'not installed'}", "bold")
    failed = [
        lab.id
        for lab in sorted(able, key=lambda lab: _rank(lab, wish))
        if not _run_one(console, root, lab, found, within, wish)
    ]
    if failed and len(able) > 1:
        again = "course gpu run --resume" + " --cpu" * on_cpu
        terminal.say(console, f"Not captured: {', '.join(failed)}. To go on: {again}", "red")
    return 1 if failed else 0


def _rank(lab: Lab, wish: Wish) -> tuple[bool, int, str]:
    """What is not captured yet comes first, then `ORDER`, then the rest by number."""
    place = ORDER.index(lab.id) if lab.id in ORDER else len(ORDER)
    return (_target(lab, wish).is_file(), place, lab.id)


def _target(lab: Lab, wish: Wish) -> Path:
    return lab.folder / "captured" / f"{wish.name}.json"


def _say_plan(console: Console, root: Path, labs: Sequence[Lab], wish: Wish) -> None:
    """Without a GPU: what would run, and which captures are there already."""
    terminal.say(console, "No NVIDIA GPU answers here. With one, this would run:", "yellow")
    for lab in labs:
        target = _target(lab, wish)
        terminal.say(console, f"  {lab.id} {lab.manifest.title}")
        terminal.say(console, f"    {shlex.join(_command(root, lab, wish.arguments))}")
        state = f"captured on {_device(_read(target))}" if target.is_file() else "not captured yet"
        terminal.say(console, f"    -> {terminal.relative(target, root)} ({state})")


def _command(root: Path, lab: Lab, arguments: Sequence[str]) -> list[str]:
    return ["python", (lab.folder / "run.py").relative_to(root).as_posix(), *arguments]


def _run_one(
    console: Console, root: Path, lab: Lab, found: Hardware, within: Environment, wish: Wish
) -> bool:
    """Run one lab and keep its output; whether there is a capture of it now."""
    target = _target(lab, wish)
    command = _command(root, lab, wish.arguments)
    run_py = hashlib.sha256((lab.folder / "run.py").read_bytes()).hexdigest()
    if target.is_file() and not wish.force:
        before = _read(target)
        if wish.resume and _same(before, found, shlex.join(command), run_py):
            terminal.say(console, f"{lab.id}: captured already", "green")
            return True
        if _device(before) != found.name:
            terminal.say(
                console,
                f"{lab.id}: {terminal.relative(target, root)} was captured on {_device(before)}. "
                "Keep both with --name, or replace it with --force.",
                "red",
            )
            return False
    terminal.say(console, f"{lab.id}: {shlex.join(command)}")
    began, date = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
    ran = processes.run(
        [str(within.python), *command[1:]],
        root,
        environment.variables(within, root),
        wish.time_limit,
        echo=heard(console),
    )
    seconds = time.perf_counter() - began
    if ran.code != 0:
        what = {
            "time": f"out of time after {wish.time_limit:g} s",
            "output": f"it printed more than {processes.OUTPUT_LIMIT // 2**20} MiB",
        }.get(ran.ended, f"exit status {ran.code}")
        terminal.say(console, f"{lab.id}: {what}; nothing was captured.", "red")
        return False
    capture = {
        "format": FORMAT,
        "lab": lab.id,
        "command": shlex.join(command),
        "date": date,
        "seconds": round(seconds, 2),
        **asdict(found),
        "cuda": within.cuda if found.gpus else "none",
        "packages": within.packages,
        "python": within.python_version,
        "platform": f"{platform.system()} {platform.machine()}",
        "run_py_sha256": run_py,
        # The folder the repository lies in is nobody's business: paths are given from its root.
        "output": ran.output.replace(f"{root}{os.sep}", ""),
    }
    write_atomically(target, json.dumps(capture, indent=1, ensure_ascii=False) + "\n")
    terminal.say(console, f"{lab.id}: kept in {terminal.relative(target, root)}", "green")
    return True


def heard(console: Console) -> Callable[[bytes], None]:
    """What another program prints, passed on as it comes, in its own lines."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def echo(chunk: bytes) -> None:
        console.file.write(decoder.decode(chunk))
        console.file.flush()

    return echo


def _read(capture: Path) -> dict[str, Any]:
    try:
        kept = json.loads(capture.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _device(kept: dict[str, Any]) -> str:
    try:
        return ", ".join(kept["gpus"]) or f"{kept['processor']}, {kept['cores']} cores"
    except (KeyError, TypeError):
        return "unknown hardware (the file is not a capture)"


def _same(kept: dict[str, Any], found: Hardware, command: str, run_py: str) -> bool:
    """Whether a capture is what this run would make."""
    told = (_device(kept), kept.get("command"), kept.get("run_py_sha256"))
    return told == (found.name, command, run_py)
