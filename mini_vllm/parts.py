"""Which class does what: the replaceable parts of an engine, and how each is built.

Promises: a learner's class serves the real model by being named here; a part that cannot do what a
configuration asks for is refused by name. Mirrors what `vllm/plugins/__init__.py:28`
`load_plugins_by_group` and `--scheduler-cls` do for the real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_vllm import part_signatures
from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.attention import paged_attention
from mini_vllm.block_pool import BlockPool
from mini_vllm.config import EngineConfig
from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.models.transformer import AttentionFn, Linear, LinearFactory
from mini_vllm.plan import Gate
from mini_vllm.request import Request
from mini_vllm.sampler import Sampler
from mini_vllm.scheduler import Scheduler
from mini_vllm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Replaceable parts, so that a learner's own class can serve the real model."""

    block_pool: Callable[[int, bool], BlockPool] = BlockPool
    kv_cache_manager: Callable[..., KVCacheManager] = KVCacheManager
    scheduler: Callable[..., Scheduler] = Scheduler
    async_scheduler: Callable[..., AsyncScheduler] = AsyncScheduler
    request: Callable[..., Request] = Request
    sampler: Callable[[], Sampler] = Sampler
    detokenizer: Callable[[Tokenizer], IncrementalDetokenizer] = IncrementalDetokenizer
    attention: AttentionFn = paged_attention
    linear: LinearFactory = Linear
    step: Callable[[Any], list[Request]] | None = None
    """What one step of an `LLMEngine` does with it; None: the engine's own."""
    rooms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The parts of rooms, by folder and name, such as `{"spec_decode": {"drafter": f}}`; what each
    must do is said where its room uses it."""
    origin: str = ""
    """The argument that asked for these parts, such as "release='0.33.0'", for messages."""

    def of_room(self, room: str, part: str, default: Any = None) -> Any:
        """A part of a room, or `default`."""
        return self.rooms.get(room, {}).get(part, default)

    def build_scheduler(self, config: EngineConfig, gates: Sequence[Gate] = ()) -> Scheduler:
        """Pool, KV manager and scheduler, idle.

        Raises:
            ValueError: the scheduler part lacks a feature that is asked for.
        """
        cache = config.cache
        kv = self.kv_cache_manager(
            cache.num_blocks, cache.block_size, cache.enable_prefix_caching, self.block_pool
        )
        factory = self.scheduler
        if config.scheduler.async_scheduling:
            if factory is not Scheduler and self.async_scheduler is AsyncScheduler:
                raise ValueError(
                    "async_scheduling=True: the scheduler part plans one step at a time"
                )
            factory = self.async_scheduler
        return part_signatures.build_scheduler(factory, kv, config, gates)
