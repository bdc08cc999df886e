"""Which class does what: the replaceable parts of an engine, and how each is built.

Promises: a learner's class serves the real model by being named here; a part that cannot do what a
configuration asks for is refused by name. Mirrors what `vllm/plugins/__init__.py:28`
`load_plugins_by_group` and `--scheduler-cls` do for the real engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mini_vllm.async_scheduler import AsyncScheduler
from mini_vllm.attention import paged_attention
from mini_vllm.block_pool import BlockPool
from mini_vllm.config import EngineConfig
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.models.moe import ExpertsFn, moe_forward_grouped
from mini_vllm.models.transformer import AttentionFn, Linear, LinearFactory
from mini_vllm.plan import Gate
from mini_vllm.request import Request
from mini_vllm.sampler import Sampler
from mini_vllm.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Replaceable parts, so that a learner's own class can serve the real model."""

    block_pool: Callable[[int, bool], BlockPool] = BlockPool
    kv_cache_manager: Callable[..., KVCacheManager] = KVCacheManager
    scheduler: Callable[..., Scheduler] = Scheduler
    async_scheduler: Callable[..., AsyncScheduler] = AsyncScheduler
    request: Callable[..., Request] = Request
    sampler: Callable[[], Sampler] = Sampler
    attention: AttentionFn = paged_attention
    linear: LinearFactory = Linear
    experts: ExpertsFn = moe_forward_grouped
    drafter: Callable[..., Sequence[int]] | None = None
    """`(context, n, k)`: at most k tokens that followed the context's last n tokens before."""
    verifier: Any = None
    """Something with `accept_prob`, `residual_distribution` and `speculative_token`."""
    adapter_slots: Callable[[int], Any] | None = None
    """By number of slots, something with `ensure`, `resident`, `slot_of` and `stats`."""
    adapter_delta: Callable[..., Any] | None = None
    """`(x, A, B, scaling)`: what an adapter adds to a projection's output."""
    token_masks: Callable[..., Iterable[int]] | None = None
    """`(table, state, texts)`: ids of the tokens whose text lives in a state of a grammar."""
    wait_gate: Callable[[], Any] | None = None
    """A gate with `rows`, which holds requests back until their grammar is compiled."""
    origin: str = ""
    """The argument that asked for these parts, such as "release='0.33.0'", for messages."""

    @property
    def named_linear(self) -> LinearFactory:
        """`linear`, also where it was written for (weight, bias) and takes no name."""
        factory = self.linear
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(factory).parameters.values()
        if any(p.kind == p.VAR_POSITIONAL for p in parameters):
            return factory
        if sum(p.kind in kinds for p in parameters) >= 3:
            return factory
        return lambda weight, bias, name: factory(weight, bias)  # type: ignore[call-arg]

    def build_scheduler(self, config: EngineConfig, gates: Sequence[Gate] = ()) -> Scheduler:
        """Pool, KV manager and scheduler, idle.

        Raises:
            ValueError: the scheduler part lacks a feature that is asked for.
        """
        cache = config.cache
        kv = self.kv_cache_manager(
            cache.num_blocks, cache.block_size, cache.enable_prefix_caching, self.block_pool
        )
        if config.scheduler.num_lookahead_tokens:
            _need_parameter(kv.allocate_slots, "num_lookahead_tokens", "kv_cache_manager")
        factory = self.scheduler
        if config.scheduler.async_scheduling:
            if factory is not Scheduler and self.async_scheduler is AsyncScheduler:
                raise ValueError(
                    "async_scheduling=True: the scheduler part plans one step at a time"
                )
            factory = self.async_scheduler
        if "max_num_seqs" in inspect.signature(factory).parameters:
            return _from_flat_arguments(factory, kv, config, gates)
        if not gates:
            return factory(kv, config.scheduler)
        if "gates" not in inspect.signature(factory).parameters:
            names = ", ".join(type(gate).__name__ for gate in gates)
            raise ValueError(f"scheduler part {_name(factory)}: takes no gates, needed for {names}")
        return factory(kv, config.scheduler, gates)


def _from_flat_arguments(
    factory: Callable[..., Any], kv: KVCacheManager, config: EngineConfig, gates: Sequence[Gate]
) -> Any:
    """A scheduler written for flat arguments and one token per request and step."""
    if gates:
        raise ValueError(f"scheduler part {_name(factory)}: takes no gates")
    c = config.scheduler
    if c.num_speculative_tokens:
        raise ValueError(f"scheduler part {_name(factory)}: plans no drafts")
    scheduler = factory(
        kv, c.max_num_seqs, c.max_num_batched_tokens, c.long_prefill_token_threshold,
        max_model_len=c.max_model_len, policy=c.policy,
        enable_chunked_prefill=c.enable_chunked_prefill,
        forget_withdrawn_blocks=c.forget_withdrawn_blocks,
    )  # fmt: skip
    update = scheduler.update_from_output

    def update_one_each(plan: Any, sampled: Mapping[str, Sequence[int]]) -> list[Request]:
        return update(plan, {request_id: tokens[0] for request_id, tokens in sampled.items()})

    scheduler.update_from_output = update_one_each
    return scheduler


def _need_parameter(method: Callable[..., Any], parameter: str, part: str) -> None:
    """Raises ValueError when a learner's method was written without a parameter asked for."""
    if parameter not in inspect.signature(method).parameters:
        raise ValueError(f"{part} part {_name(method)}: takes no {parameter}")


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
