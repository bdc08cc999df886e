"""A server without a model: real requests, exact plans, and steps that take as long as predicted.

Promises: the engine schedules as it always does; each step then lasts what the cost says, on the
clock of the machine. What is said means nothing: a toy model says it. For trying a gateway, a
dashboard or a client without a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_vllm.engine import LLMEngine
from mini_vllm.feature import Feature, SampledTokenIds
from mini_vllm.llm import LLM
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import read_config, resolve
from mini_vllm.models.toy import ToyModel
from mini_vllm.plan import SchedulerOutput
from mini_vllm.simulate.cost import CostError, LinearCost, load_cost, work_of

logger = logging.getLogger(__name__)


class Paced(Feature):
    """Makes every step last as long as its cost says."""

    name = "simulate"

    def __init__(
        self,
        cost: LinearCost,
        is_async: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Before the first step.

        Args:
            cost: of a step. One outside of what it was fitted on lasts what the terms say, and the
                log says so once.
            is_async: a step begins when the one before it ends, since it was planned before that.
            clock: seconds.
            sleep: waits so many of them.
        """
        self.cost, self.is_async, self.clock, self.sleep = cost, is_async, clock, sleep
        self.free_at = 0.0
        """When the step before ends."""
        self._work: Any = None
        self._is_busy = False
        self._has_warned = False

    def after_schedule(self, plan: SchedulerOutput) -> None:
        """Note the work while the counters stand where they stood."""
        self._work = work_of(plan)

    def after_execute(
        self, plan: SchedulerOutput, sampled: SampledTokenIds,
        in_flight: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        """Wait until the step is over."""
        if not plan.scheduled_requests:
            self._is_busy = False
            return
        begins = self.clock() + self.cost.host
        if self.is_async and self._is_busy:
            begins = self.free_at
        self.free_at = begins + self._seconds()
        self._is_busy = True
        self.sleep(max(0.0, self.free_at - self.clock()))

    def restart(self) -> None:
        """Nothing is in flight any more."""
        self._is_busy = False

    def _seconds(self) -> float:
        try:
            return self.cost.seconds(self._work)
        except CostError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("simulate: %s; the terms are used beyond it from here on", error)
            return self.cost.price(self._work)


def make_paced_engine(
    model: str, lora_modules: Mapping[str, str], knobs: Mapping[str, Any]
) -> LLMEngine:
    """The engine of a simulated server: `model` gives tokenizer, template and length.

    Args:
        knobs: of the engine, and `step_cost`, as `load_cost` takes it.

    Raises:
        ValueError: adapters or drafts, what the engine refuses, or a cost that cannot be read.
    """
    knobs = dict(knobs)
    cost = load_cost(knobs.pop("step_cost"))
    refused = [
        name for name in ("speculative_config", "tensor_parallel_size", "pipeline_parallel_size",
                          "enable_lora") if knobs.get(name)
    ]  # fmt: skip
    if lora_modules or refused:
        raise ValueError(
            f"simulate with {', '.join(refused) or 'lora_modules'}: a step's cost was not "
            "compared with these; leave them out"
        )
    folder = resolve(model)
    config = read_config(folder / "config.json")
    if knobs.get("max_model_len") is None:
        knobs["max_model_len"] = config.max_position_embeddings
    engine = LLM(ToyModel(config.vocab_size), **knobs).llm_engine
    template = folder / "tokenizer_config.json"
    if template.exists():
        engine.chat_template = read_json(template).get("chat_template")
    engine.join(Paced(cost, bool(engine.config.scheduler.async_scheduling)))
    return engine
