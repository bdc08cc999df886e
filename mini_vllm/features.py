"""The rooms that an engine's arguments open, and the arguments of each.

Promises: a room of which no argument is given is not imported; combinations that do not work
together are refused by name before anything is loaded. Stands where `vllm/config/vllm.py:282`
`VllmConfig` checks its parts against each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mini_vllm.batch import Model
from mini_vllm.config import EngineConfig
from mini_vllm.executor import Executor
from mini_vllm.feature import Feature, RequestInput, RowMask
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.models.registry import LoadedModel, load_model
from mini_vllm.part_signatures import build_linear
from mini_vllm.parts import EngineParts
from mini_vllm.row_sampler import ChooseTokens
from mini_vllm.sample.processors import LogitsProcessor
from mini_vllm.sampling_params import SamplingParams
from mini_vllm.tokenizer import Tokenizer

ONE_KIND = "a model with one kind of KV cache in all layers"
"""What the features that were compared with no other model need, as their refusals say it."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a caller writes to have a room: names of arguments, wishes and parts."""

    module: str
    """Its `open_room(arguments, setup)` gives the room, or None where they ask for nothing."""
    arguments: tuple[str, ...] = ()
    """Of the engine. The first that is given imports the room."""
    options: tuple[str, ...] = ()
    """Of `add_request`; they need the room's first argument to be given."""
    sampling_params: tuple[str, ...] = ()
    """The first request that has one opens the room."""
    parts: tuple[str, ...] = ()
    """What `EngineParts.rooms` may hold for it."""
    needs: str = ""
    """What opens it, in words, where that is not its first argument."""


ROOMS = {
    "models": Room("registry", parts=("experts", "transformer")),
    "distributed": Room(
        "executor",
        (
            "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel",
            "decode_context_parallel_size", "rank_transport", "rank_timeout_s", "rank_pool",
        ),
        parts=("shards",),
    ),
    "compilation": Room(
        "graphs", ("compilation_config",), parts=("dispatcher",),
    ),
    "spec_decode": Room(
        "speculator", ("speculative_config",), parts=("drafter", "verifier", "pads_admissions"),
    ),
    "lora": Room(
        "adapters",
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras"),
        options=("lora_request",), parts=("adapter_gate", "adapter_slots", "adapter_delta"),
    ),
    "multimodal": Room(
        "pictures",
        (
            "limit_mm_per_prompt", "disable_chunked_mm_input", "max_num_encoder_input_tokens",
            "encoder_cache_size", "ec_transfer_config",
        ),
        options=("multi_modal_data",),
        parts=("encoder_cache_manager", "encoder_gate", "synchronous_alone"),
        needs="a multimodal model, such as byte-sees",
    ),
    "kv_transfer": Room(
        "transfer", ("kv_transfer_config",), options=("kv_transfer_params",),
        needs="kv_transfer_config={...}",
    ),
    "structured_output": Room(
        "manager", ("structured_outputs_config",), sampling_params=("structured_outputs",),
        parts=("token_masks", "wait_gate"),
    ),
    "reasoning": Room(
        "thinking_budget", ("reasoning_config",), sampling_params=("thinking_token_budget",),
    ),
    "entrypoints": Room("engine_core", parts=("front_door",)),
}  # fmt: skip
"""By folder, in the order in which they are opened: what loads the model otherwise comes first."""


@dataclass(slots=True)
class EngineSetup:
    """An engine being built: a room that opens reads it and completes it."""

    model: str | Path | Model
    config: EngineConfig
    tokenizer: Tokenizer | None
    parts: EngineParts
    arguments: Mapping[str, Any]
    """All arguments that are a room's."""
    features: list[Feature] = field(default_factory=list)
    masks: list[RowMask] = field(default_factory=list)
    last_processors: list[LogitsProcessor] = field(default_factory=list)
    """What edits a row after everything else."""
    choose_tokens: ChooseTokens | None = None
    executor: Callable[..., Executor] | None = None
    loaded: LoadedModel | None = None
    join: Callable[[Feature], None] = field(init=False)
    """Takes in a room that has opened; once the engine is built, `LLMEngine.join`."""

    def __post_init__(self) -> None:
        self.join = self._add

    def _add(self, feature: Feature) -> None:
        self.features.append(feature)
        if feature.mask is not None:
            self.masks.append(feature.mask)

    def open(self, name: str) -> Feature | None:
        """Import a room and have it opened with its own arguments; it has not joined yet."""
        room = ROOMS[name]
        given = {n: self.arguments[n] for n in room.arguments if n in self.arguments}
        if self.parts.origin and name not in self.parts.rooms:
            wish = ", ".join(given or room.sampling_params) or room.needs
            raise ValueError(
                f"{self.parts.origin} with {wish}: need a release whose decisions were compared "
                f"with it, such as the pin's"
            )
        module = import_module(f"mini_vllm.{name}.{room.module}")
        feature: Feature | None = module.open_room(given, self)
        return feature

    def load(self) -> LoadedModel:
        """The model, loaded by the first that asks; the config has its length from then on."""
        if self.loaded is None:
            self.loaded = load_model(
                self.model, self.tokenizer, self.config.dtype, self.config.seed,
                self.parts.attention, build_linear(self.parts.linear), engine=self.config,
                **self.parts.rooms.get("models", {}),
            )  # fmt: skip
            self.config = self.config.with_max_model_len(self.loaded.max_model_len)
            if self.loaded.kv_cache_manager is not None:
                self._take_caches(self.loaded, self.loaded.kv_cache_manager)
        return self.loaded

    def _take_caches(
        self, loaded: LoadedModel, kv_cache_manager: Callable[..., KVCacheManager]
    ) -> None:
        """Build what the model's groups of layers need in the place of the engine's own."""
        for name in loaded.excludes:
            if value := self.arguments.get(name):
                raise ValueError(f"{name}={value!r}: need {ONE_KIND}")
        if self.parts.origin:
            raise ValueError(f"{self.parts.origin}: need {ONE_KIND}")
        if self.parts.kv_cache_manager is not KVCacheManager:
            part = self.parts.kv_cache_manager
            raise ValueError(
                f"parts.kv_cache_manager={part!r}: need none, this model brings its own manager"
            )
        self.parts = replace(self.parts, kv_cache_manager=kv_cache_manager)
        if loaded.block_size is not None:
            cache = replace(self.config.cache, block_size=loaded.block_size)
            self.config = replace(self.config, cache=cache)
        if loaded.feature is not None:
            self.join(loaded.feature)

    def build_executor(self, *arguments: Any) -> Executor:
        """What runs the plans; with `async_scheduling` the next runs before one is answered."""
        depth = 1 + self.config.scheduler.async_scheduling
        return (self.executor or partial(Executor, batch_queue_size=depth))(*arguments)


class OnDemand(Feature):
    """Opens a room with the first request that needs it; it joins at the door."""

    def __init__(self, setup: EngineSetup, names: Iterable[str]) -> None:
        """`names` are those of the rooms that are not open."""
        self.setup = setup
        self._closed = set(names)
        self._opened: dict[str, Feature] = {}
        self._lock = threading.Lock()

    def prepare(self, params: SamplingParams) -> None:
        """Open the rooms that are needed, and let them prepare."""
        for name in self._needed(params):
            self._open(name).prepare(params)

    def process_input(self, inputs: RequestInput) -> None:
        """Let the rooms that are needed join."""
        for name in self._needed(inputs.params):
            self.setup.join(self._open(name))
            self._closed.remove(name)

    def _needed(self, params: SamplingParams) -> list[str]:
        """The rooms not joined yet that these parameters need."""
        return [
            name for name in (*self._closed,)
            if any(getattr(params, wish) is not None for wish in ROOMS[name].sampling_params)
        ]  # fmt: skip

    def _open(self, name: str) -> Feature:
        """A room, opened once, whichever thread comes first."""
        with self._lock:
            if name not in self._opened:
                feature = self.setup.open(name)
                assert feature is not None
                self._opened[name] = feature
            return self._opened[name]


def needed_for(option: str) -> str:
    """What an option of a request needs of its engine, in words."""
    room = next((room for room in ROOMS.values() if option in room.options), None)
    if room is None:
        return "a room that takes it"
    return room.needs or f"{room.arguments[0]}=True"


def open_features(
    model: str | Path | Model,
    config: EngineConfig | None,
    knobs: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    parts: EngineParts,
) -> EngineSetup:
    """Load the model and open the rooms asked for; the arguments are those of `LLMEngine`.

    Raises:
        ValueError: an argument unknown or out of range, arguments that exclude each other, or a
            checkpoint that cannot be loaded.
    """
    of_rooms = {name for room in ROOMS.values() for name in room.arguments}
    arguments = {n: value for n, value in knobs.items() if n in of_rooms and value is not None}
    knobs = {name: value for name, value in knobs.items() if name not in of_rooms}
    if config is not None and knobs:
        raise ValueError(
            f"config and {', '.join(knobs)}: need one or the other; set these in the config"
        )
    config = EngineConfig.of(knobs) if config is None else config
    if not isinstance(config, EngineConfig):
        raise ValueError(f"config={config!r}: need an EngineConfig")
    for name in ("num_speculative_tokens", "num_lookahead_tokens", "use_eagle"):
        if value := getattr(config.scheduler, name):
            raise ValueError(
                f"{name}={value!r}: need speculative_config, which names the method of drafting "
                "and sets this value"
            )
    _check_parts_of_rooms(parts)
    setup = EngineSetup(model, config, tokenizer, parts, arguments)
    asked_for = [name for name, room in ROOMS.items() if arguments.keys() & set(room.arguments)]
    for name in asked_for:
        if (feature := setup.open(name)) is not None:
            setup.join(feature)
    needed = setup.load().room
    if needed and needed not in asked_for and (feature := setup.open(needed)) is not None:
        setup.join(feature)
    on_demand = (n for n, room in ROOMS.items() if room.sampling_params and n not in asked_for)
    setup.join(OnDemand(setup, on_demand))
    return setup


def _check_parts_of_rooms(parts: EngineParts) -> None:
    """Refuse a part that its room does not know, with a ValueError."""
    for name, supplied in parts.rooms.items():
        known = ROOMS[name].parts if name in ROOMS else ()
        for part in supplied:
            if part not in known:
                need = f"one of {', '.join(known)}" if known else "a room that has parts"
                raise ValueError(f"parts.rooms[{name!r}] holds {part!r}: need {need}")
