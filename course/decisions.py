"""vLLM's own scheduler at the terminal: beside ours, release beside release, and when it changed.

Promises: every answer comes from a release's own code, loaded from its archive without torch; what
is missing is named with the command that gets it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from conformance import bisect as bisection
from conformance import decisions, replay, workload_file
from conformance import releases as compared
from conformance.ask import ask, lines
from conformance.real_core import ArchiveError, LoadError, RealCore, core_of, present
from conformance.recording import UPSTREAM
from conformance.words import show
from conformance.workloads import Workload
from course import terminal
from course.learning.labs import CourseError

PIN = UPSTREAM["version"]


def core(version: str) -> RealCore:
    """The core of a release.

    Raises:
        CourseError: it is not here, or does not load.
    """
    try:
        return core_of(version)
    except (ArchiveError, LoadError) as error:
        raise CourseError(str(error)) from None


def workload(name: str) -> Workload:
    """The workload of a seed or a file.

    Raises:
        CourseError: it cannot be read.
    """
    try:
        return workload_file.read(name)
    except workload_file.WorkloadError as error:
        raise CourseError(str(error)) from None


def beside(console: Console, name: str, version: str, parts: Mapping[str, Any]) -> int:
    """Print both schedulers' decisions; 1 where they differ.

    Args:
        console: where to print.
        name: a seed, a file or FILE:SEED.
        version: the release that is asked.
        parts: `scheduler`, `kv_cache_manager`, `block_pool` of a learner; without any, the mini
            engine's that decide as the release does.
    """
    asked, real = workload(name), core(version)
    build: replay.Build = replay.mini_scheduler
    make_request: replay.MakeRequest = replay.mini_request
    ours = "yours" if parts else "mini_vllm"
    if version != PIN:
        try:
            build, make_request = compared.builders(version)
        except ValueError:
            terminal.say(console, f"mini_vllm has no parts of {version}: the pin's decide.", "dim")
    build = functools.partial(build, **parts)
    try:
        answer = ask(asked, real, build, make_request)
    except ValueError as error:
        raise CourseError(str(error)) from None
    for line in lines(answer, f"vLLM {version}", ours):
        terminal.raw(console, line)
    return 1 if answer.difference else 0


def drift(console: Console, one: str, other: str, count: int) -> int:
    """Print which decisions differ between two releases, each with its smallest workload."""
    core(one)
    core(other)
    for line in decisions.report((one, other), count):
        terminal.raw(console, line)
    return 0


def bisect(console: Console, name: str, fields: Sequence[str], bad: str, every: bool) -> int:
    """Print since when and until when releases decide a workload as `bad` does; 1 if all do."""
    asked, here = workload(name), present()
    core(bad)
    fields = fields or decisions.DECISIONS
    try:
        history = bisection.bisect(asked, here, fields, bad, every)
    except (ArchiveError, LoadError, ValueError) as error:
        raise CourseError(str(error)) from None
    found = history.stretch
    say = functools.partial(terminal.say, console)
    say(f"Bad is what decides as {bad} does, in {', '.join(fields)}.")
    before = f"{found.last_good} is good" if found.last_good else "no older one is here"
    say(f"first bad   {found.first_bad} ({before})")
    good = found.first_good or "none, and no newer one is here"
    say(f"first good  {good} ({found.last_bad} is the last bad one)")
    if found.elsewhere:
        say(f"The verdict comes and goes: {', '.join(found.elsewhere)} are bad, too.")
    for version, why in history.left_out.items():
        say(f"{version} cannot be asked: {why}", "dim")
    left = [v for v in here if v not in found.asked and v not in history.left_out]
    told = [f"{v} {'bad' if found.asked[v] else 'good'}" for v in here if v in found.asked]
    say(f"{len(told)} of {len(here)} asked: {', '.join(told)}")
    if left:
        say(f"Not asked, and taken to be as those beside them: {', '.join(left)}. --all asks them.")
    changes = (
        (found.last_good, found.first_bad, history.came),
        (found.last_bad, found.first_good, history.went),
    )
    for one, other, parts in changes:
        if parts is not None:
            say(f"{one} and {other} part in step {parts.step}, {parts.field}:")
            terminal.raw(console, f"  {one:<8}{show(parts.one)}")
            terminal.raw(console, f"  {other:<8}{show(parts.other)}")
    return 0 if found.last_good or found.first_good else 1
