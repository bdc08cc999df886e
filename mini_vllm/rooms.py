"""What a knob of the engine opens: drafts, adapters, constraints. Shut, a room is not imported.

Promises: a room is opened by a name of the real engine's own arguments and by nothing else; what it
brings along (a gate, a mask, another model) is handed over here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mini_vllm.config import EngineConfig
from mini_vllm.models.registry import LoadedModel
from mini_vllm.parts import EngineParts

if TYPE_CHECKING:
    from mini_vllm.engine import LLMEngine
    from mini_vllm.lora.adapters import Adapters
    from mini_vllm.spec_decode.speculator import Speculator
    from mini_vllm.structured_output.manager import StructuredOutputManager


def open_drafts(
    asked: Mapping[str, Any] | None, config: EngineConfig, loaded: LoadedModel, parts: EngineParts
) -> tuple[Speculator | None, EngineConfig]:
    """Who drafts, if `speculative_config` asks for it, and the configuration with it.

    Raises:
        ValueError: see `open_speculator`; or drafts asked for in the scheduler's knobs.
    """
    if drafts := config.scheduler.num_speculative_tokens:
        raise ValueError(f"num_speculative_tokens={drafts}: need it in speculative_config")
    if asked is None:
        return None, config
    from mini_vllm.spec_decode.speculator import open_speculator

    return open_speculator(asked, config, loaded, parts.drafter, parts.verifier)


def adapter_knobs(knobs: dict[str, Any]) -> dict[str, Any]:
    """Those of `enable_lora`, taken out of all knobs."""
    named = ("max_loras", "max_lora_rank", "max_cpu_loras")
    return {name: knobs.pop(name) for name in named if name in knobs}


def open_adapters(
    asked: Mapping[str, Any] | None, config: EngineConfig, loaded: LoadedModel, parts: EngineParts
) -> tuple[Adapters | None, LoadedModel]:
    """The adapters, if they are asked for, and the model that wears them.

    Raises:
        ValueError: see `Adapters.open`.
    """
    if asked is None:
        return None, loaded
    from mini_vllm.lora.adapters import Adapters

    return Adapters.open(asked, config, loaded, parts)


def constraints_of(
    engine: LLMEngine, asked: Mapping[str, Any] | None, loaded: LoadedModel
) -> Callable[[], StructuredOutputManager]:
    """What gives an engine's constraints; the first call opens them, see `open_constraints`."""
    return functools.cache(functools.partial(open_constraints, engine, asked, loaded))


def open_constraints(
    engine: LLMEngine, asked: Mapping[str, Any] | None, loaded: LoadedModel
) -> StructuredOutputManager:
    """What keeps outputs to their constraints: a gate of the scheduler, a mask of rows, a look at
    drafts.

    Raises:
        ValueError: a bad `structured_outputs_config`, or a scheduler part that takes no gates.
    """
    from mini_vllm.structured_output.manager import StructuredOutputManager

    made = StructuredOutputManager(asked or {}, engine.config, loaded, engine.parts)
    if not hasattr(engine.scheduler, "gates"):
        name = type(engine.scheduler).__name__
        raise ValueError(f"scheduler part {name}: takes no gates, needed for structured_outputs")
    engine.gates = (*engine.gates, made.gate)
    engine.scheduler.gates = engine.gates
    engine.rows.masks.append(made)
    if engine.speculator is not None:
        engine.speculator.vet = made.vet
    return made
