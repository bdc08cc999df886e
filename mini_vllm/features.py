"""What the arguments of an engine ask for beyond the core: each opens its room, or none is opened.

Promises: a room whose argument is not given is not imported; combinations that do not work together
are refused by name before anything is loaded. Stands where `vllm/config/vllm.py:282` `VllmConfig`
checks its parts against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_vllm.batch import Model
from mini_vllm.config import EngineConfig
from mini_vllm.models.registry import LoadedModel, load_model
from mini_vllm.parts import EngineParts
from mini_vllm.plan import Gate
from mini_vllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from mini_vllm.distributed.executor import Ranks
    from mini_vllm.distributed.pipeline import BatchQueue
    from mini_vllm.lora.adapters import Adapters
    from mini_vllm.spec_decode.speculator import Speculator

OF_ADAPTERS = ("max_loras", "max_lora_rank", "max_cpu_loras")
OF_RANKS = (
    "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel",
    "decode_context_parallel_size", "rank_transport", "rank_timeout_s", "rank_pool",
)  # fmt: skip


@dataclass(slots=True)
class Features:
    """An engine's model and what works on it besides the scheduler."""

    config: EngineConfig
    loaded: LoadedModel
    parts: EngineParts
    gates: tuple[Gate, ...] = ()
    speculator: Speculator | None = None
    adapters: Adapters | None = None
    ranks: Ranks | None = None
    batches: BatchQueue | None = None
    """Plans in flight, where there may be several."""


def open_features(
    model: str | Path | Model,
    config: EngineConfig | None,
    knobs: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    parts: EngineParts,
    speculative_config: Mapping[str, Any] | None,
    enable_lora: bool,
) -> Features:
    """Load the model and open the rooms asked for; the arguments are those of `LLMEngine`.

    Raises:
        ValueError: an argument unknown or out of range, arguments that exclude each other, or a
            checkpoint that cannot be loaded.
    """
    of_adapters = {k: knobs[k] for k in OF_ADAPTERS if enable_lora and k in knobs}
    of_ranks = {k: knobs[k] for k in OF_RANKS if k in knobs}
    knobs = {k: v for k, v in knobs.items() if k not in of_adapters and k not in of_ranks}
    if config is not None and knobs:
        raise ValueError(f"config and {', '.join(knobs)}: give one or the other")
    config = EngineConfig.of(knobs) if config is None else config
    if drafts := config.scheduler.num_speculative_tokens:
        raise ValueError(f"num_speculative_tokens={drafts}: need it in speculative_config")
    if of_ranks:
        from mini_vllm.distributed.executor import open_ranks

        others = {"speculative_config": speculative_config is not None, "enable_lora": enable_lora}
        taken = [name for name, is_given in others.items() if is_given]
        if opened := open_ranks(of_ranks, model, tokenizer, config, parts, taken):
            config, loaded, parts, ranks, batches = opened
            return Features(config, loaded, parts, ranks=ranks, batches=batches)
    loaded = load_model(
        model, tokenizer, config.dtype, config.seed, parts.attention, parts.named_linear,
        parts.experts,
    )  # fmt: skip
    made = Features(config.with_max_model_len(loaded.max_model_len), loaded, parts)
    if speculative_config is not None:
        from mini_vllm.spec_decode.speculator import open_speculator

        made.speculator, made.config = open_speculator(
            speculative_config, made.config, loaded, parts.drafter, parts.verifier
        )
    if enable_lora:
        from mini_vllm.lora.adapters import Adapters

        made.adapters, made.loaded = Adapters.open(of_adapters, made.config, loaded, parts)
        made.gates = (made.adapters.gate,)
    return made
