"""What a room may do beside the core, and when: the moments of a request, of a step, of an engine.

Promises: the core calls these and nothing else of a room; a room that is not open costs nothing.
What a room asks of the scheduler is its `gate`, what it does to logits a `RowMask`; upstream writes
the same moments out in `vllm/v1/core/sched/scheduler.py:64` `Scheduler` and
`vllm/v1/worker/gpu_model_runner.py:415` `GPUModelRunner`, one branch per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_vllm.scheduler import Scheduler

Sampled = Mapping[str, Sequence[int]]
"""Per request that caught up, its tokens of a step."""


@dataclass(slots=True)
class Asked:
    """One call of `add_request` on its way to a request; a room checks and completes it."""

    params: SamplingParams
    make: Callable[..., Request]
    """What makes the request; a room may wrap it."""
    options: Mapping[str, Any]
    """Arguments that only a room understands, by name, such as `lora_request`; none is None."""
    extra_keys: list[Hashable] = field(default_factory=list)
    """What else the K and V depend on; part of every block hash."""
    served: set[str] = field(default_factory=set)
    """The options that a room has taken; one that is left is refused."""


class Feature:
    """A room as the engine sees it. Every moment does nothing; a room says those it needs."""

    name = ""
    """The knob that opens it."""
    gate: Gate | None = None
    """What it asks of the scheduler."""

    # ------------------------------------------------------------------ a request

    def prepare(self, params: SamplingParams) -> None:
        """In any thread, before the door: what of the door takes long. Raises as the door would."""

    def asked(self, asked: Asked) -> None:
        """At the door, before anything of the engine is touched. Raises ValueError to refuse."""

    def begin(self, request: Request) -> None:
        """It is being queued."""

    def again(self, request: Request) -> None:
        """It starts over in an empty cache, with the tokens it has."""

    def forget(self, request_id: str) -> None:
        """It is gone; an unknown id is a no-op."""

    # ------------------------------------------------------------------ a step, in this order

    def planned(self, plan: SchedulerOutput) -> None:
        """The plan is bound and nobody has seen it: complete it."""

    def load(self, plan: SchedulerOutput) -> Mapping[str, str]:
        """It is about to run: bring what the model needs. Called again if requests leave the plan.

        Returns:
            The requests for which that cannot be had, and why. Each of them leaves the plan and
            ends; all those of the plan that share its extra keys must be among them, since their
            blocks may be the ones it does not write.
        """
        return {}

    def ran(
        self, plan: SchedulerOutput, sampled: Sampled, in_flight: Mapping[str, Sequence[int]]
    ) -> None:
        """Its tokens are there; neither they nor those `in_flight` are known to the scheduler."""

    def updated(
        self, plan: SchedulerOutput, sampled: Sampled, ended: list[Request], scheduler: Scheduler
    ) -> None:
        """The scheduler knows them; `ended` are the requests that this ended, others may join."""

    # ------------------------------------------------------------------ the engine

    def restart(self) -> None:
        """Nothing of the cache, and nothing under way, is kept."""

    def close(self) -> None:
        """The engine serves no more."""
