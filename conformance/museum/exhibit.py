"""What an exhibit is: a report, an invariant that breaks, and what shows it on a release's code.

Promises: nothing is shown that the release's own code did not do just now; a release that is not
here is named with the command that brings it.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import workload_file
from conformance.real_core import RealCore
from conformance.recorders.run import RefusedError, Run, Stalled
from conformance.workloads import Workload

INVARIANTS = {
    "ownership": "a block, a picture or a transfer is given up once, by who holds it",
    "progress": "what can run does run, and what cannot is refused",
    "identity": "what is found under a key is what was computed for it",
    "accounting": "what is counted is what happened",
    "order": "who comes first is served first, by the policy's own measure",
    "time": "what is decided now holds when it takes effect",
}
"""The rooms: which of them breaks is the first question of every exhibit."""

Steps = Sequence[Mapping[str, Any]]
RECORDED = Path(__file__).parent / "recordings" / "shown.json"
"""What `python -m conformance.museum.recorder` kept of each exhibit, by release."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a release did."""

    broken: bool
    lines: tuple[str, ...]
    """What there was to see, the deciding line last."""
    step: int | None = None
    """The step at which the invariant breaks; None where there are no steps, or it holds."""


def recorded(number: int) -> dict[str, Shown]:
    """What was recorded of an exhibit, the oldest release first."""
    return {
        version: Shown(kept["broken"], tuple(kept["lines"]), kept["step"])
        for version, kept in _kept()[str(number)].items()
    }


@functools.cache
def _kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One bug."""

    number: int
    """Of the issue or pull request at vllm-project/vllm."""
    title: str
    invariant: str
    """A key of `INVARIANTS`."""
    report: str
    """What users saw, in our words."""
    cause: str
    mend: str
    """What mended it, or that nothing has yet."""
    bad: str
    """A release that has it, and on which it is shown unless another is named."""
    good: str | None
    """The first release known not to have it; None: the newest asked has it."""
    show: Callable[[RealCore], Shown]
    also: tuple[int, ...] = ()
    workload: Workload | None = field(default=None, repr=False)
    """What the scheduler is given, where it is a workload; it is the smallest."""
    broken: Callable[[Steps], int | None] | None = field(default=None, repr=False)
    """Of a workload: the step at which the invariant breaks, in the steps of a run."""
    stalls: bool = False
    """Of a workload: what breaks is that nothing is planned any more."""
    prepare: Callable[[Run], None] | None = field(default=None, repr=False)
    """Of a workload: sets, before the first step, what a constructor would have read off a
    connector that is attached later."""

    @property
    def url(self) -> str:
        """Where it was reported."""
        return f"https://github.com/vllm-project/vllm/issues/{self.number}"


def scheduled(
    number: int, text: str, broken: Callable[[Steps], int | None], stalls: bool = False,
    change: Callable[[Workload], None] | None = None,
    prepare: Callable[[Run], None] | None = None, **about: Any,
) -> Exhibit:  # fmt: skip
    """An exhibit whose bug shows in what a scheduler plans.

    Args:
        number: as in `Exhibit`.
        text: the workload, as `workload_file` reads it.
        broken: the step at which the invariant breaks, in the steps of a run; None if it holds.
        stalls: the bug is that nothing is planned any more with work left.
        change: completes what the short form cannot say.
        prepare: as in `Exhibit`.
        about: the other fields.
    """
    workload = workload_file.parse(text)
    if change is not None:
        change(workload)

    def show(core: RealCore) -> Shown:
        return run(core, workload, broken, stalls, prepare)

    return Exhibit(
        number, show=show, workload=workload, broken=broken, stalls=stalls, prepare=prepare,
        **about,
    )  # fmt: skip


def run(
    core: RealCore, workload: Workload, broken: Callable[[Steps], int | None], stalls: bool,
    prepare: Callable[[Run], None] | None = None,
) -> Shown:  # fmt: skip
    """A workload on a release's scheduler."""
    made = Run(copy.deepcopy(workload), core, tells_tokens=False)
    if prepare is not None:
        prepare(made)
    died, stalled = "", False
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        made.recorded()
    except Stalled:
        stalled = True
    except RefusedError as error:
        died = str(error)
    finally:
        logging.disable(level)
    return judged(made.steps, broken, stalls, stalled, died)


def judged(
    steps: Steps, broken: Callable[[Steps], int | None], stalls: bool, stalled: bool,
    died: str = "",
) -> Shown:  # fmt: skip
    """What the steps of a run show.

    Args:
        steps: as a recording has them.
        broken, stalls: as in `Exhibit`.
        stalled: whether nothing was planned any more with work left.
        died: the scheduler's own error that ended the run.
    """
    planned = [i for i, each in enumerate(steps) if each["num_scheduled_tokens"]]
    behind = planned[-1] + 1 if planned else 0
    at = (behind if stalled else None) if stalls else broken(steps)
    lines = [line_of(number, each) for number, each in enumerate(steps[:MOST_LINES])]
    if len(steps) > MOST_LINES:
        lines.append(f"... {len(steps) - MOST_LINES} more steps")
    if died:
        lines.append(died)
    if stalled:
        lines.append("nothing is planned any more")
    return Shown(at is not None, tuple(lines), at)


MOST_LINES = 12


def line_of(number: int, step: Mapping[str, Any]) -> str:
    """One step in a line."""
    plan = ", ".join(f"{name} {count}" for name, count in step["num_scheduled_tokens"].items())
    said = [f"step {number}: {plan or 'nothing'}"]
    if step["preempted"]:
        said.append(f"preempted {', '.join(step['preempted'])}")
    idle = [name for name in step["running"] if name not in step["num_scheduled_tokens"]]
    if idle:
        said.append(f"running without a token {', '.join(idle)}")
    if step["waiting"]:
        said.append(f"waiting {', '.join(step['waiting'])}")
    return "; ".join([*said, f"{step['free_blocks']} blocks free"])
