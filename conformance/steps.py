"""One step of a recorded workload, and what stands around it, for those who count situations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from conformance import recording
from conformance.features import Counted


@dataclass(frozen=True, slots=True)
class Step:
    """One step, with what came before and after it and what is known of its requests."""

    entry: Mapping[str, Any]
    index: int
    adds: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Arrivals by request id, in order."""
    arrived: Mapping[str, int] = field(repr=False)
    """The step of each arrival."""

    @property
    def now(self) -> Mapping[str, Any]:
        return self.entry["steps"][self.index]

    @property
    def before(self) -> Mapping[str, Any]:
        """The step before it; an empty one before the first."""
        return self.entry["steps"][self.index - 1] if self.index else {}

    @property
    def next(self) -> Mapping[str, Any]:
        """The step after it; an empty one after the last."""
        steps = self.entry["steps"]
        return steps[self.index + 1] if self.index + 1 < len(steps) else {}

    @property
    def config(self) -> Mapping[str, Any]:
        return self.entry["config"]

    @property
    def is_fcfs(self) -> bool:
        return self.config["policy"] == "fcfs"

    @property
    def admitted(self) -> list[str]:
        """Ids admitted in this step, in order."""
        got = {*self.now["new"], *self.now["resumed"]}
        return [r for r in self.now["num_scheduled_tokens"] if r in got]

    @property
    def aborted(self) -> set[str]:
        """Ids that an event of this step ends."""
        events = [e for e in self.entry["events"] if e["step"] == self.index]
        return {request_id for event in events for request_id in event.get("abort", ())}

    def preempted_before(self, request_id: str) -> bool:
        """Whether it was a victim in this step or an earlier one."""
        steps = self.entry["steps"][: self.index + 1]
        return any(request_id in step["preempted"] for step in steps)


AStep = TypeVar("AStep", bound=Step)
Situations = Mapping[str, tuple[str, Callable[[AStep], object]]]
"""By name what each means, and the test of a step."""


def counted(
    section: str, files: tuple[str, ...], kind: type[AStep], situations: Situations[AStep]
) -> Counted:
    """Situations that a step alone shows; `kind` is the steps' class."""

    def situations_of(entry: recording.Recording) -> set[str]:
        adds, arrived = {}, {}
        for event in entry["events"]:
            for add in event.get("add", ()):
                adds[add["request_id"]], arrived[add["request_id"]] = add, event["step"]
        steps = [kind(entry, index, adds, arrived) for index in range(len(entry["steps"]))]
        return {name for name, (_, test) in situations.items() if any(map(test, steps))}

    meanings = {name: meaning for name, (meaning, _) in situations.items()}
    return Counted(section, files, meanings, situations_of)
