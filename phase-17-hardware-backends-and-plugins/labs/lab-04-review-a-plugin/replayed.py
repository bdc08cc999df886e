"""A release's scheduler as it was recorded, for an override to be mixed in front of.

`plans` and the state of requests are those of the release's own scheduler on a device without
fault. The device of a replay makes up tokens. As long as the override lets the right tokens
through, and no other, the recorded state is the true one; the first wrong frame ends the replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MADE_UP = 99
"""What the device hands back for a row that should have none."""


@dataclass
class Plan:
    """What `schedule` gives."""

    num_scheduled_tokens: dict[str, int]
    number: int


@dataclass
class Output:
    """What comes back for a plan."""

    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)


@dataclass
class Wrong:
    """A frame that was not treated as it should have been."""

    step: int
    frame: dict[str, Any]
    expected: list[int]
    came: list[int]

    def __str__(self) -> str:
        made = ", made up by the device" if self.expected == [] else ""
        stale = ", of before its preemption" if self.frame["is_stale"] else ""
        return (
            f"step {self.step}, {self.frame['id']}: a frame{made}{stale}; "
            f"num_output_placeholders {self.frame['num_output_placeholders']}\n"
            f"expected {self.expected} to reach the release's scheduler, came {self.came}"
        )


class Recorded:
    """Stands where a release's `AsyncScheduler` does."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.requests: dict[str, Any] = {}
        self.came: dict[str, list[int]] = {}
        self.planned = 0
        self.frames: list[dict[str, Any]] = []

    def schedule(self, throttle_prefills: bool = False) -> Plan:
        """The next recorded plan; the requests are as it leaves them."""
        takes = "throttle_prefills" in self.run["parameters"]["schedule"]
        assert throttle_prefills is takes, (
            f"the engine of {self.run['release']} calls schedule({'True' if takes else ''}): what "
            f"it passes must reach the release; came throttle_prefills={throttle_prefills}"
        )
        rows = self.run["plans"][self.planned]
        for name, row in rows.items():
            self.requests[name] = SimpleNamespace(request_id=name, **row)
        self.planned += 1
        return Plan(dict.fromkeys(rows, 1), self.planned - 1)

    def update_from_output(self, plan: Plan, output: Output) -> None:
        """Each frame goes through the override of the method that appends tokens, if it has any."""
        takes_stale = "is_stale" in self.run["parameters"]["_update_request_with_output"]
        for frame in self.frames:
            request = self.requests[frame["id"]]
            request.num_output_placeholders = frame["num_output_placeholders"]
            tokens = output.sampled_token_ids[output.req_id_to_index[frame["id"]]]
            if tokens:
                stale = {"is_stale": frame["is_stale"]} if takes_stale else {}
                self._update_request_with_output(request, list(tokens), **stale)

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        self.came[request.request_id] = new_token_ids
        return new_token_ids, False


def plan_of(scheduler: Any) -> Plan:
    """What an engine of the recorded release calls."""
    takes = "throttle_prefills" in scheduler.run["parameters"]["schedule"]
    plan: Plan = scheduler.schedule(True) if takes else scheduler.schedule()
    return plan


def replay(mixin: type, run: dict[str, Any], device: str) -> Wrong | None:
    """The first frame that an override treats wrongly, of one recorded run; None: all right."""
    scheduler: Any = type("Mixed", (mixin, Recorded), {})(run)
    plans: list[Plan] = []
    for number, frames in run["arrived"]:
        while len(plans) < len(run["plans"]) and len(plans) <= number + 1:
            plans.append(plan_of(scheduler))
        rows = run["plans"][number]
        output = Output({name: place for place, name in enumerate(rows)}, [[] for _ in rows])
        for frame in frames:
            made = [MADE_UP] if device in rows[frame["id"]]["made_up"] else frame["tokens"]
            output.sampled_token_ids[output.req_id_to_index[frame["id"]]] = list(made)
        before = [list(tokens) for tokens in output.sampled_token_ids]
        scheduler.frames, scheduler.came = frames, {}
        scheduler.update_from_output(plans[number], output)
        assert output.sampled_token_ids == before, (
            "the runner's output is not the scheduler's to change: others read it.\n"
            f"expected {before}\ncame     {output.sampled_token_ids}"
        )
        for frame in frames:
            came = scheduler.came.get(frame["id"], [])
            if came != frame["tokens"]:
                return Wrong(number, frame, frame["tokens"], came)
    return None
