"""What a room may do beside the core, and when: the moments of a request, of a step, of an engine.

Promises: the core calls these and nothing else of a room; a room that is not open costs nothing.
What a room asks of the scheduler is its `gate`, what it does to logits a `RowMask`; upstream writes
the same moments out in `vllm/v1/core/sched/scheduler.py:64` `Scheduler` and
`vllm/v1/worker/gpu_model_runner.py:415` `GPUModelRunner`, one branch per feature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mini_vllm.scheduler import Scheduler

SampledTokenIds = Mapping[str, Sequence[int]]
"""Per request that caught up, its tokens of a step."""


@dataclass(slots=True)
class RequestInput:
    """One call of `add_request` on its way to a request; a room checks and completes it."""

    params: SamplingParams
    token_ids: list[int]
    """The prompt; a room may put a longer one in its place."""
    make_request: Callable[..., Request]
    """What makes the request; a room may wrap it."""
    options: Mapping[str, Any]
    """Arguments that only a room understands, by name, such as `lora_request`; none is None."""
    extra_keys: list[Hashable] = field(default_factory=list)
    """What else the K and V depend on; part of every block hash."""
    accepted_options: set[str] = field(default_factory=set)
    """The options that a room serves; any other is refused."""


class RowMask(Protocol):
    """What makes tokens impossible before anything is noted of a row, logprobs included.

    As upstream, where the runner masks the logits before it calls the sampler:
    `vllm/v1/worker/gpu_model_runner.py:4359` `GPUModelRunner.sample_tokens`.
    """

    def validate_drafts(
        self, request: Request, in_flight: Sequence[int], drafts: Sequence[int]
    ) -> list[int]:
        """The drafts that are possible after the request's tokens and those in flight."""
        ...

    def failures(self) -> Mapping[str, str]:
        """Why requests that wait for their mask will never have one."""
        ...

    def __call__(self, request: Request, row: np.ndarray) -> np.ndarray:
        """The row [vocab_size] as given, or a new one with some entries -inf."""
        ...


class Feature:
    """A room as the engine sees it. Every moment does nothing; a room says those it needs."""

    name = ""
    """What `LLMEngine.feature` finds it by."""
    gate: Gate | None = None
    """What it asks of the scheduler."""
    mask: RowMask | None = None
    """What it does to rows of logits."""

    # ------------------------------------------------------------------ a request

    def prepare(self, params: SamplingParams) -> None:
        """In any thread, before the door: what of the door takes long. Raises as the door would."""

    def process_input(self, inputs: RequestInput) -> None:
        """At the door, before anything of the engine is touched. Raises ValueError to refuse."""

    def add_request(self, request: Request) -> None:
        """It is being queued."""

    def requeue_request(self, request: Request) -> None:
        """It starts over in an empty cache, with the tokens it has."""

    def remove_request(self, request_id: str) -> None:
        """It is gone; an unknown id is a no-op."""

    # ------------------------------------------------------------------ a step, in this order

    def after_schedule(self, plan: SchedulerOutput) -> None:
        """The plan is bound and not shown to any observer yet: complete it."""

    def before_execute(self, plan: SchedulerOutput) -> Mapping[str, str]:
        """Bring what the model needs for the plan. Called again if requests leave the plan.

        Returns:
            The requests for which that cannot be had, and why. Each of them leaves the plan and
            ends; all those of the plan that share its extra keys must be among them, since their
            blocks may be the ones it does not write.
        """
        return {}

    def after_execute(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        in_flight: Mapping[str, Sequence[int]],
    ) -> None:
        """Its tokens are there; the scheduler knows neither them nor those `in_flight`."""

    def after_update(
        self,
        plan: SchedulerOutput,
        sampled: SampledTokenIds,
        finished: list[Request],
        scheduler: Scheduler,
    ) -> None:
        """The scheduler knows them. `finished` are the requests that this ended; a room that ends
        another appends it."""

    # ------------------------------------------------------------------ the engine

    def is_busy(self) -> bool:
        """Whether steps must go on for it, though no request can be planned or none is left."""
        return False

    def restart(self) -> None:
        """Nothing of the cache, and nothing in flight, is kept."""

    def close(self) -> None:
        """The engine serves no more."""
