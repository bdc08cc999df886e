"""Parts that were written for earlier or smaller signatures: adapted where that can be done, and
refused by name where it cannot.

Promises: the core calls its parts in one way; a learner's class of any earlier form serves it, or
the message says what it lacks. Upstream has nothing of the kind: a `--scheduler-cls` must fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mini_vllm.config import EngineConfig, SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.models.transformer import LinearFactory
from mini_vllm.plan import Gate
from mini_vllm.request import Request


def build_linear(factory: Callable[..., Any]) -> LinearFactory:
    """A linear part, also where it was written for (weight, bias) and takes no name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return factory
    if sum(p.kind in kinds for p in parameters) >= 3:
        return factory
    return lambda weight, bias, name: factory(weight, bias)


def build_scheduler(
    factory: Callable[..., Any], kv: KVCacheManager, config: EngineConfig, gates: Sequence[Gate]
) -> Any:
    """A scheduler over `kv`; also one written for flat arguments, or without gates.

    Raises:
        ValueError: the part, or its KV manager, lacks a feature that is asked for.
    """
    if config.scheduler.num_lookahead_tokens:
        _need_parameter(kv.allocate_slots, "num_lookahead_tokens", "kv_cache_manager")
    parameters = inspect.signature(factory).parameters
    if gates and "gates" not in parameters:
        names = ", ".join(type(gate).__name__ for gate in gates)
        raise ValueError(f"scheduler part {_name(factory)}: takes no gates, needed for {names}")
    if "max_num_seqs" in parameters:
        return _from_flat_arguments(factory, kv, config)
    return factory(kv, config.scheduler, *([gates] if gates else []))


def check_extra_keys(
    request: Callable[..., Request], kv_cache_manager: Callable[..., KVCacheManager], pool: Any
) -> None:
    """Refuse a request part without extra keys, and a KV manager part that does not look at them.

    Such a manager would hand the blocks of one adapter to another.

    Raises:
        ValueError: the part is named.
    """
    _need_parameter(request, "extra_keys", "request")
    kv = kv_cache_manager(4, 1, True, pool)
    one, other = (
        request(key, [1, 2, 3], SamplingParams(), extra_keys=(key,)) for key in ("a", "b")
    )
    kv.allocate_slots(one, 3)
    if kv.get_computed_blocks(other)[1]:
        raise ValueError(
            f"kv_cache_manager part {type(kv).__name__}: ignores Request.extra_keys, so that one "
            "adapter would read another's blocks; hash them with each block's tokens"
        )


def check_block_keys(kv_cache_manager: Callable[..., KVCacheManager], pool: Any) -> None:
    """Refuse a KV manager part that does not look at `Request.block_keys`.

    Raises:
        ValueError: the part is named.
    """
    kv = kv_cache_manager(4, 1, True, pool)
    one, other = (Request(key, [1, 2, 3], SamplingParams()) for key in ("a", "b"))
    one.block_keys, other.block_keys = (lambda start, stop: ("a",)), (lambda start, stop: ("b",))
    kv.allocate_slots(one, 3)
    if kv.get_computed_blocks(other)[1]:
        raise ValueError(
            f"kv_cache_manager part {type(kv).__name__}: ignores Request.block_keys, so that one "
            "picture would read another's blocks; hash them with each block's tokens"
        )


def _from_flat_arguments(
    factory: Callable[..., Any], kv: KVCacheManager, config: EngineConfig
) -> Any:
    """A scheduler written for flat arguments and one token per request and step."""
    c = config.scheduler
    if c.num_speculative_tokens:
        raise ValueError(
            f"scheduler part {_name(factory)}: plans one token per request and step; need no "
            "speculative_config with it"
        )
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
        raise ValueError(f"{part} part {_name(method)}: need a parameter {parameter}")


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__name__", type(factory).__name__)
