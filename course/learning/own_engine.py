"""`course mine`: the engine that a learner's passed parts make, and how it decides.

Promises: the badge counts steps replayed from recordings of vLLM's own scheduler, and there is none
where no part of theirs plans. The package holds copies of the learner's files and nothing of
the solutions; it is written whole or not at all.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import keyword
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from course import terminal
from course.learning import mine
from course.learning.labs import CourseError, Lab

DECIDING = ("block_pool", "kv_cache_manager", "scheduler")
"""Parts that plan. Recordings judge them, and the stop check and the dispatcher besides."""
RECORDINGS = ("basic", "prefix", "limits", "pressure")
WORKLOADS = 40
"""Of each file, the first."""
WHOLE_RUN = Path("engine") / "arrivals-float32.jsonl.gz"
"""vLLM itself serving the shipped model, 128 requests."""
FOUND = ((False, False, True, True), (False, True, False, True))
"""What each recorded dispatch was asked with: a uniform decode or not, full graphs forbidden."""
BATCH, MAX_TOKENS = 8, 32

INIT = '''"""An engine of one's own: {count} written here, the rest `mini_vllm`'s.

    python -m {name} "The scheduler"
    python -m {name} trace "The scheduler"
    python -m {name} bench
"""

from course.learning.mine import engine_parts
from mini_vllm import LLM as _LLM

{imports}

SUPPLIED = {{
{parts}
}}
PARTS = engine_parts(SUPPLIED)


def LLM(model="byte-llama", **settings):
    """`mini_vllm.LLM` with these parts."""
    return _LLM(model, parts=PARTS, **settings)
'''
MAIN = '''"""Continue a prompt with these parts, show the steps of one, or serve a workload."""

from course.learning.package import main

from . import SUPPLIED

main(SUPPLIED)
'''


@dataclass(frozen=True, slots=True)
class Badge:
    """What a replay against vLLM came to."""

    steps: int = 0
    workloads: int = 0
    differ: int = 0
    whole_run: int = 0
    """Steps of vLLM's own run of the shipped model that were decided equally, from the first on."""
    of_whole_run: int = 0
    dispatches: int = 0
    """Steps whose graph vLLM's own dispatcher was asked for."""
    dispatches_differ: int = 0

    @property
    def is_vllms(self) -> bool:
        """Whether nothing differs."""
        return not (self.differ or self.dispatches_differ) and self.whole_run == self.of_whole_run

    @property
    def text(self) -> str:
        told = []
        if self.steps:
            told.append(
                f"decides {self.whole_run} of {self.of_whole_run} steps of a run of vLLM as vLLM "
                f"did; {self.steps:,} recorded steps of {self.workloads} workloads, {self.differ} "
                "differ"
            )
        if self.dispatches:
            told.append(
                f"names the graphs of {self.dispatches:,} recorded steps, {self.dispatches_differ} "
                "differ"
            )
        return "; ".join(told)


def badge(root: Path, parts: Mapping[str, Any]) -> Badge | None:
    """Replay with the parts that decide; None where none of them is the learner's."""
    from conformance import recording, replay
    from course.learning import lab_contracts

    own = {name: parts[name] for name in DECIDING if name in parts}
    graphs = _dispatched(parts["dispatcher"]) if "dispatcher" in parts else (0, 0)
    if not own and "stop_check" not in parts:
        return Badge(dispatches=graphs[0], dispatches_differ=graphs[1]) if graphs[0] else None
    build, request = partial(replay.mini_scheduler, **own), replay.mini_request
    if "stop_check" in parts:
        request = partial(request, request=lab_contracts.request(parts["stop_check"]))
    folder = root / "conformance" / "recordings"
    steps = workloads = differ = 0
    for name in RECORDINGS:
        for number, entry in enumerate(recording.read(folder / f"{name}.jsonl.gz")):
            if number == WORKLOADS:
                break
            compared, difference = replay.replay(entry, build, request)
            steps, workloads, differ = steps + compared, workloads + 1, differ + bool(difference)
    run = json.loads(gzip.decompress((folder / WHOLE_RUN).read_bytes()))["recording"]
    compared, difference = replay.replay(run, build, request)
    equal = compared - bool(difference)
    return Badge(steps, workloads, differ, equal, len(run["steps"]), *graphs)


def _dispatched(dispatcher: Callable[..., Any]) -> tuple[int, int]:
    """Recorded answers of vLLM's dispatcher, and how many of them this one gives otherwise."""
    from conformance import parts

    compared = differ = 0
    for case in parts.load("cudagraph_modes"):
        if case["kind"] != "dispatch":
            continue
        own = dispatcher(case["mode"], list(case["sizes"]), case["max_num_seqs"])
        for num_tokens, found in enumerate(case["found"], 1):
            for expected, uniform, forbid in zip(found, *FOUND, strict=True):
                if expected is not None:
                    compared += 1
                    differ += [*own.dispatch(num_tokens, uniform, forbid)] != expected
    return compared, differ


def speed(parts: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens per second with these parts and with the engine's own, the best of three in turn."""
    from mini_vllm import LLM, SamplingParams

    engines = [LLM("byte-llama", parts=mine.engine_parts(given)) for given in (parts, {})]
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    best = [0.0, 0.0]
    for _ in range(3):
        for place, llm in enumerate(engines):
            began = time.perf_counter()
            llm.generate([f"{number}: The scheduler" for number in range(BATCH)], params)
            rate = BATCH * MAX_TOKENS / (time.perf_counter() - began)
            best[place] = max(best[place], rate)
    return best[0], best[1]


def show(
    console: Console, root: Path, parts: Mapping[str, Any], owners: Mapping[str, Lab],
    labs: list[Lab],
) -> None:  # fmt: skip
    """Whose each part is, the badge, and the speed."""
    supplying: dict[str, str] = {}
    for lab in labs:
        if lab.manifest.part:
            supplying[lab.manifest.part] = lab.id
    for name in mine.part_names():
        if name in owners:
            told = f"  {name:<18} yours, from lab {owners[name].id}, called by {mine.command(name)}"
            terminal.say(console, told, "green")
        else:
            where = f": lab {supplying[name]}" if name in supplying else ""
            terminal.say(console, f"  {name:<18} the course's{where}", "dim")
    own = f"{len(owners)} of {len(supplying)} parts are yours"
    terminal.say(console, own, "bold")
    if not owners:
        terminal.say(console, "You have not passed a lab that supplies a part yet.")
        return
    if (found := badge(root, parts)) is not None:
        terminal.say(console, f"It {found.text}.", "green" if found.is_vllms else "yellow")
    rate, theirs = speed(parts)
    terminal.say(
        console,
        f"{rate:,.0f} tokens per second beside {theirs:,.0f} of the course's engine, "
        f"{BATCH} prompts at once.",
    )
    terminal.say(console, "As a package: course mine --out my-engine", "cyan")


def write(root: Path, out: Path, parts: Mapping[str, Any], owners: Mapping[str, Lab]) -> Path:
    """Write the package: the learner's files, an `LLM` made of them, a README with the badge.

    Args:
        out: a folder that does not exist yet; the package in it has its name.

    Returns:
        The package's folder.

    Raises:
        CourseError: nothing is passed yet, the folder is there, there is none to write it in, or a
            package cannot have its name.
    """
    if not owners:
        raise CourseError(
            "You have not passed a lab that supplies a part yet, so there is nothing to write."
        )
    if out.exists():
        raise CourseError(f"--out {out.name}: the folder exists already: name a new one")
    name = out.name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise CourseError(f"--out {out.name}: need a name of letters, digits, - and _")
    if importlib.util.find_spec(name) is not None:
        raise CourseError(f"--out {out.name}: a module {name} is installed, need another name")
    if not out.resolve().parent.is_dir():
        raise CourseError(f"--out {out}: {out.parent} is not a folder; create it first")
    found = badge(root, parts)
    modules = {lab.id: f"lab_{lab.id.replace('-', '_')}" for lab in owners.values()}
    with tempfile.TemporaryDirectory(dir=out.resolve().parent) as scratch:
        package = Path(scratch) / "whole" / name
        package.mkdir(parents=True)
        for lab in owners.values():
            shutil.copyfile(lab.starter, package / f"{modules[lab.id]}.py")
        lines = []
        for part, lab in owners.items():
            module = modules[lab.id]
            given = module if part in mine.MODULES else f"{module}.{mine.attribute_of(part)}"
            lines.append(f'    "{part}": {given},')
        imports = f"from . import {', '.join(sorted(set(modules.values())))}"
        text = INIT.format(
            count=terminal.counted(len(owners), "part"),
            name=name,
            imports=imports,
            parts="\n".join(lines),
        )
        (package / "__init__.py").write_text(text, encoding="utf-8")
        (package / "__main__.py").write_text(MAIN, encoding="utf-8")
        told = f"It {found.text}.\n" if found else "None of its parts is judged by recordings.\n"
        listed = "\n".join(f"- `{part}`: lab {lab.id}" for part, lab in owners.items())
        count = terminal.counted(len(owners), "part")
        (package.parent / "README.md").write_text(
            f"# {name}\n\nAn engine with {count} of my own.\n\n{told}\n{listed}\n\n"
            f'`python -m {name} "The scheduler"` runs it, in the environment of the course, with\n'
            f"`trace` before the prompt it shows the steps, and `python -m {name} bench` measures "
            "it.\n",
            encoding="utf-8",
        )
        (Path(scratch) / "whole").rename(out)
    return out / name
