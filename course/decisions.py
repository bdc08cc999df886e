"""vLLM's own scheduler at the terminal: beside ours, release beside release, and when it changed.

Promises: every answer comes from a release's own code, loaded from its archive without torch; what
is missing is named with the command that gets it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

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


def bisect(
    console: Console, name: str, fields: Sequence[str], good: str, bad: str, root: Path
) -> int:
    """Print between which releases a decision changed; 1 where it did not."""
    asked, here = workload(name), present(root)
    for version in (good, bad):
        if version:
            core(version)
    versions = [
        v
        for v in here
        if (not good or here.index(v) >= here.index(good))
        and (not bad or here.index(v) <= here.index(bad))
    ]
    try:
        change = decisions.bisect(asked, versions, fields or decisions.DECISIONS)
    except (ArchiveError, LoadError, ValueError) as error:
        raise CourseError(str(error)) from None
    if change is None:
        terminal.say(console, f"{versions[0]} and {versions[-1]} decide it alike.")
        return 1
    found = change.parting
    terminal.say(
        console,
        f"{change.before} is the last of {len(versions)} releases here that decides as "
        f"{versions[0]} does, {change.after} the first that does not "
        f"({len(change.asked)} asked).",
    )
    terminal.say(console, f"Step {found.step}, {found.field}:")
    terminal.raw(console, f"  {change.before:<8}{show(found.one)}")
    terminal.raw(console, f"  {change.after:<8}{show(found.other)}")
    return 0
