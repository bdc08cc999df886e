"""One folder per feature: what is recorded of it, what occurs in it, what its recordings catch.

A folder is found by what it holds: `recorded.PARTS` for `python -m conformance.record`,
`replaying.FEATURE` for `replay`, `situations.COUNTED` and `mutants.CATALOGUES` for the commands
of these names. A feature that is added adds a folder.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent
RECORDINGS = FOLDER.parent / "recordings"
ROOT = FOLDER.parents[1]
"""Of the repository."""


@dataclass(frozen=True, slots=True)
class Part:
    """One recorded part of the real engine."""

    file: str
    """Below `recordings/`."""
    function: str
    """`module:function` of this package; it yields the lines. A module with `ABOUT` gets a header
    line `{"upstream", "part", "about"}` in front of them."""
    what: str
    by: str
    """What replays it."""
    unit: str = "cases"
    group: str = "parts"
    needs: str = "upstream"
    """"upstream" is the pinned tree, "engine" the real engine, "gpu" the same on a GPU."""
    options: Mapping[str, Any] = field(default_factory=dict)
    takes_seeds: bool = False


def cases(room: str, name: str, what: str, by: str, needs: str = "upstream") -> Part:
    """A part whose file and whose recorder have its name."""
    function = f"features.{room}.{name}:cases"
    return Part(f"parts/{name}.jsonl.gz", function, what, by, needs=needs)


def workloads(room: str, name: str, function: str, what: str, by: str = "`replay`") -> Part:
    """A file of workloads, driven by a function of the feature's recorder."""
    module = f"features.{room}.recorder:{function}"
    return Part(f"{name}.jsonl.gz", module, what, by, "workloads", "scheduler", takes_seeds=True)


def run(name: str, function: str, what: str, by: str, /, **options: Any) -> Part:
    """A run of the real engine; `options` are arguments of the function."""
    return Part(f"engine/{name}.jsonl.gz", function, what, by, "runs", "engine", "engine", options)


@dataclass(frozen=True, slots=True)
class Counted:
    """The situations of a feature, and where they are counted."""

    section: str
    """Of the feature's README."""
    files: tuple[str, ...]
    """Below `recordings/`, without their ending."""
    meanings: Mapping[str, str]
    """By name, in the order of the table."""
    situations_of: Callable[[dict[str, Any]], set[str]]
    """The names of those that one recorded workload holds."""


Find = Callable[[str, str], Any]
"""A class by the module of `mini_vllm` that holds it and its name."""


class Replayed:
    """What a feature adds to a replay: what a recording's keys open, and what is compared.

    Every answer is "nothing" until a feature says otherwise in its `replaying.py`.
    """

    name = ""
    fields: tuple[str, ...] = ()
    """Of a step, compared where a recording has them."""
    scheduler: tuple[str, str] | None = None
    """Module and class of the scheduler that takes the place of the plain one."""
    gate: tuple[str, str] | None = None
    """Module and class of its gate."""
    gate_takes: tuple[str, ...] = ()
    """The keys of `config` whose values the gate is made of."""
    fills_up = False
    """Whether an empty plan, too, waits in the queue until the queue is full."""

    def is_on(self, config: Mapping[str, Any]) -> bool:
        """Whether a recording with this configuration uses the feature."""
        return False

    def depth(self, config: Mapping[str, Any]) -> int:
        """How many plans are in flight at most."""
        return 1

    def knobs(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """More knobs for `SchedulerConfig`."""
        return {}

    def build_gate(self, make: Callable[..., Any], config: Mapping[str, Any], find: Find) -> Any:
        """Its gate, of whichever class."""
        return make(*(config[key] for key in self.gate_takes))

    def asked(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the requests of a workload add to its configuration."""
        return {}

    def manager(
        self, config: Mapping[str, Any], make: Callable[..., Any], find: Find
    ) -> Callable[..., Any]:
        """What makes the KV manager, given what makes a plain one, or a learner's."""
        return make

    def gates(self, kv: Any, find: Find) -> Sequence[Any]:
        """What the manager asks of the scheduler."""
        return ()

    def request(
        self, add: Mapping[str, Any], make: Callable[..., Any], find: Find
    ) -> Callable[..., Any]:
        """What makes the request of one arrival, given what makes a plain one."""
        return make

    def begin(self, requests: Mapping[str, Any], step: int) -> None:
        """A step begins."""

    def before(self, scheduler: Any) -> Mapping[str, Any]:
        """Fields that are noted before `schedule`."""
        return {}

    def observe(self, scheduler: Any, plan: Any) -> Mapping[str, Any]:
        """Fields that are noted between `schedule` and the update."""
        return {}

    def executed(self, scheduler: Any, plan: Any, sampled: dict[str, list[int]]) -> None:
        """The oldest plan has run; the scheduler takes its tokens next."""

    def updated(self, scheduler: Any, plan: Any) -> Sequence[Any] | None:
        """The scheduler has taken the tokens of a plan; the requests that end besides."""
        return None

    def is_busy(self, scheduler: Any) -> bool:
        """Whether steps must go on though no request is left."""
        return False


def nonempty(tokens: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The tokens of those requests that have any."""
    return {request_id: list(ids) for request_id, ids in tokens.items() if len(ids)}


@functools.cache
def holding(kind: str) -> dict[str, ModuleType]:
    """By the names of their folders, in order, the modules called `kind` that features have."""
    folders = sorted(path.parent.name for path in FOLDER.glob(f"*/{kind}.py"))
    return {room: importlib.import_module(f"{__name__}.{room}.{kind}") for room in folders}
