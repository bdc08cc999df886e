"""What the arguments of an engine ask for beyond the core: each opens its room, or none is opened.

Promises: a room whose argument is not given is not imported; combinations that do not work together
are refused by name before anything is loaded. Stands where `vllm/config/vllm.py:282` `VllmConfig`
checks its parts against each other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_vllm.batch import Model
from mini_vllm.checks import flag
from mini_vllm.config import EngineConfig
from mini_vllm.executor import Executor
from mini_vllm.feature import Asked, Feature
from mini_vllm.models.registry import LoadedModel, load_model
from mini_vllm.parts import EngineParts
from mini_vllm.row_sampler import Choose, RowMask
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.structured_output.manager import StructuredOutputManager

KNOBS = {
    "spec_decode": ("speculative_config",),
    "lora": ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
    "structured_output": ("structured_outputs_config",),
    "distributed": (
        "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel",
        "decode_context_parallel_size", "rank_transport", "rank_timeout_s", "rank_pool",
    ),
}  # fmt: skip
"""Which arguments are whose; the first one given opens the room."""


@dataclass(slots=True)
class Opened:
    """An engine's model, and the rooms that work on it."""

    config: EngineConfig
    loaded: LoadedModel
    parts: EngineParts
    on_demand: OnDemand
    features: list[Feature] = field(default_factory=list)
    masks: list[RowMask] = field(default_factory=list)
    choose: Choose | None = None
    executor: Callable[..., Executor] = Executor


class OnDemand(Feature):
    """Opens the room of constraints: with its own argument, or with the first request that has one.

    Whoever opens it asks `join` to take it in.
    """

    def __init__(self) -> None:
        self.join: Callable[[Feature], None]
        self.open: Callable[[], StructuredOutputManager] | None = None
        self.masks: list[RowMask] = []
        self._opened: StructuredOutputManager | None = None
        self._lock = threading.Lock()

    def prepare(self, params: SamplingParams) -> None:
        """Open it, if need be, and let it prepare; it joins at the door."""
        if params.structured_outputs is not None and (room := self._room()) is not None:
            room.prepare(params)

    def asked(self, asked: Asked) -> None:
        """The first that asks has it joined."""
        if asked.params.structured_outputs is not None and (room := self._room()) is not None:
            self.join(room)
            self.masks.append(room)
            self.open = None

    def _room(self) -> StructuredOutputManager | None:
        """The room, opened once, as long as it has not joined."""
        with self._lock:
            if self.open is not None and self._opened is None:
                self._opened = self.open()
            return self._opened if self.open is not None else None


def open_features(
    model: str | Path | Model,
    config: EngineConfig | None,
    knobs: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    parts: EngineParts,
) -> Opened:
    """Load the model and open the rooms asked for; the arguments are those of `LLMEngine`.

    Raises:
        ValueError: an argument unknown or out of range, arguments that exclude each other, or a
            checkpoint that cannot be loaded.
    """
    given = {room: {n: knobs[n] for n in names if n in knobs} for room, names in KNOBS.items()}
    drafts = given["spec_decode"].get("speculative_config")
    adapters = flag("enable_lora", given["lora"].pop("enable_lora", False))
    constraints = given["structured_output"].get("structured_outputs_config")
    taken = {n for names in given.values() for n in names} | {"enable_lora"}
    if not adapters:
        taken -= given["lora"].keys()
    knobs = {k: v for k, v in knobs.items() if k not in taken}
    if config is not None and knobs:
        raise ValueError(f"config and {', '.join(knobs)}: give one or the other")
    config = EngineConfig.of(knobs) if config is None else config
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config={config!r}: need an EngineConfig")
    for name in ("num_speculative_tokens", "num_lookahead_tokens", "use_eagle"):
        if value := getattr(config.scheduler, name):
            raise ValueError(f"{name}={value!r}: need speculative_config, which says who drafts")
    on_demand = OnDemand()
    if given["distributed"]:
        from mini_vllm.distributed.executor import open_ranks

        others = {"speculative_config": drafts is not None, "enable_lora": bool(adapters)}
        refused = [name for name, is_given in others.items() if is_given]
        if ranks := open_ranks(given["distributed"], model, tokenizer, config, parts, refused):
            made = Opened(*ranks[:3], on_demand, [ranks[3]])
            made.executor = ranks[4] or _in_process(made.config)
            return _with_constraints(made, constraints)
    loaded = load_model(
        model, tokenizer, config.dtype, config.seed, parts.attention, parts.named_linear,
        parts.experts,
    )  # fmt: skip
    if loaded.kv_cache_manager is not None:
        parts = replace(parts, kv_cache_manager=loaded.kv_cache_manager)
    made = Opened(config.with_max_model_len(loaded.max_model_len), loaded, parts, on_demand)
    if drafts is not None:
        from mini_vllm.spec_decode.speculator import open_speculator

        speculator, made.config = open_speculator(
            drafts, made.config, loaded, parts.drafter, parts.verifier, made.masks
        )
        made.choose = speculator.verify
        made.features.append(speculator)
    if adapters:
        from mini_vllm.lora.adapters import Adapters

        opened, made.loaded = Adapters.open(given["lora"], made.config, loaded, parts)
        made.features.append(opened)
    made.executor = _in_process(made.config)
    return _with_constraints(made, constraints)


def _in_process(config: EngineConfig) -> Callable[..., Executor]:
    """One plan at a time; with `async_scheduling` the next is run before one is told."""
    return functools.partial(Executor, depth=1 + config.scheduler.async_scheduling)


def _with_constraints(made: Opened, given: Mapping[str, Any] | None) -> Opened:
    """The room of constraints opened now, or kept for the first request that needs it."""

    def open_room() -> StructuredOutputManager:
        from mini_vllm.structured_output.manager import StructuredOutputManager

        return StructuredOutputManager(given or {}, made.config, made.loaded, made.parts)

    if given is not None:
        room = open_room()
        made.features.append(room)
        made.masks.append(room)
    else:
        made.on_demand.open, made.on_demand.masks = open_room, made.masks
        made.features.append(made.on_demand)
    return made
