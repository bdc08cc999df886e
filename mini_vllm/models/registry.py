"""From the `model` argument of an engine to something that computes logits.

Promises: whatever it was (the shipped model, a folder, a hub id, "toy", an object), the engine gets
one record with the bounds it must hold its requests to. Mirrors
`vllm/model_executor/model_loader/__init__.py:133` `get_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.attention import paged_attention, paged_attention_reference
from mini_vllm.batch import Model
from mini_vllm.config import CacheConfig, EngineConfig, SchedulerConfig
from mini_vllm.feature import Feature
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec
from mini_vllm.models.block_fp8 import checkpoint_linear
from mini_vllm.models.hybrid import HybridTransformer
from mini_vllm.models.loader import SHIPPED, Checkpoint, load_checkpoint
from mini_vllm.models.moe import ExpertsFn, moe_forward_grouped
from mini_vllm.models.toy import ToyModel
from mini_vllm.models.transformer import (
    VOCAB_PADDING,
    AttentionFn,
    Linear,
    LinearFactory,
    Transformer,
)
from mini_vllm.tokenizer import ByteTokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine needs to know of whatever `model` was."""

    model: Model
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    """Token ids the model has an embedding for; the tokenizer may know fewer."""
    kv_specs: tuple[KVCacheSpec, ...] = ()
    """What each group of its layers keeps; empty for a model without K and V."""
    dtype: np.dtype | type | str = np.float32
    max_model_len: int | None = None
    chat_template: str | None = None
    kv_cache_manager: Callable[..., KVCacheManager] | None = None
    """What keeps the tables of its groups; None: `KVCacheManager`, which keeps one."""
    block_size: int | None = None
    """Tokens per block, where the model must have another size than was asked for."""
    num_blocks_of: Callable[..., int] | None = None
    """`num_blocks_of(num_tokens, block_size, max_num_batched_tokens, max_model_len)`: blocks that a
    request needs; None: as many as its tokens fill."""
    feature: Feature | None = None
    """What must join the engine for its caches."""
    excludes: tuple[str, ...] = ()
    """Arguments of rooms that it does not go with, by name."""
    num_prompt_ids: int | None = None
    """Token ids that a prompt may hold; None: `vocab_size`. One more where upstream lets through
    the id just behind the vocabulary, whose embedding is padding."""
    room: str | None = None
    """The room that the model needs, whatever the engine's arguments ask for."""


def load_model(
    model: str | Path | Model,
    tokenizer: Tokenizer | None,
    dtype: str,
    seed: int,
    attention: AttentionFn,
    linear: LinearFactory,
    experts: ExpertsFn = moe_forward_grouped,
    engine: EngineConfig | None = None,
    transformer: Callable[..., Transformer] = Transformer,
) -> LoadedModel:
    """Resolve `model`; objects and "toy" speak bytes unless a tokenizer is given.

    `transformer` builds Llama-family models in the place of `Transformer`.

    Raises:
        ValueError: neither a name, nor a path, nor an object with `forward(batch)`; or a
            checkpoint that cannot be loaded, or that another `transformer` does not build.
    """
    if isinstance(model, str | Path) and str(model) != "toy":
        checkpoint = load_checkpoint(model)
        config = checkpoint.config
        if transformer is not Transformer and (checkpoint.architecture or checkpoint.sees):
            raise ValueError(
                f"{transformer.__name__} with model={model!r}: the two were not compared "
                "together; need a checkpoint of text with one kind of KV cache, such as byte-llama"
            )
        if checkpoint.architecture is not None:
            return _built(checkpoint, tokenizer, dtype, attention, linear, engine or EngineConfig())
        if config.quant_config is not None:
            if transformer is not Transformer or linear is not Linear:
                part = transformer if transformer is not Transformer else linear
                raise ValueError(
                    f"model={model!r} with {part!r}: need the engine's own layers for a quantized "
                    "checkpoint"
                )
            linear = checkpoint_linear(config, checkpoint.weights)
        made = transformer(
            config, checkpoint.weights, dtype, attention=attention, linear=linear, experts=experts
        )
        return LoadedModel(
            made,
            tokenizer or checkpoint.tokenizer,
            checkpoint.eos_token_ids or eos_of(checkpoint.tokenizer),
            config.vocab_size,
            made.kv_specs,
            made.dtype,
            config.max_position_embeddings,
            checkpoint.chat_template,
            num_prompt_ids=None
            if checkpoint.sees
            else _num_prompt_ids(config.vocab_size, checkpoint.tokenizer),
            room="multimodal" if checkpoint.sees else None,
        )
    if transformer is not Transformer:
        raise ValueError(
            f"{transformer.__name__} with model={model!r}: need the name or folder of a "
            "checkpoint, such as byte-llama"
        )
    tokens = tokenizer or ByteTokenizer()
    eos, vocab_size = eos_of(tokens), tokens.vocab_size
    if isinstance(model, str | Path):
        return LoadedModel(ToyModel(vocab_size, seed), tokens, eos, vocab_size)
    if isinstance(model, Transformer):
        longest, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
        return LoadedModel(model, tokens, eos, vocab_size, model.kv_specs, model.dtype, longest)
    if not callable(getattr(model, "forward", None)):
        raise ValueError(
            f"model={model!r}: need {', '.join(SHIPPED)}, toy, a folder, a hub id, or an object "
            "with forward(batch)"
        )
    loaded = LoadedModel(model, tokens, eos, vocab_size)
    if isinstance(model, HybridTransformer):
        vocab_size, longest = model.config.vocab_size, model.max_model_len
        loaded = replace(loaded, vocab_size=vocab_size, max_model_len=longest)
    return with_caches(loaded, engine or EngineConfig())


def _num_prompt_ids(vocab_size: int, tokenizer: Tokenizer) -> int:
    """Ids that a prompt may hold: of a byte vocabulary one more than there are.

    `vllm/v1/engine/input_processor.py:426` `InputProcessor._validate_model_input` takes the
    tokenizer's number of ids for an id, and a padded embedding has a row of zeros for it.
    """
    is_bytes = type(tokenizer) is ByteTokenizer and tokenizer.vocab_size == vocab_size
    return vocab_size + (is_bytes and vocab_size % VOCAB_PADDING != 0)


def _built(
    checkpoint: Checkpoint, tokenizer: Tokenizer | None, dtype: str, attention: AttentionFn,
    linear: LinearFactory, engine: EngineConfig,
) -> LoadedModel:  # fmt: skip
    """The model of a registered architecture, with what its caches need."""
    config, architecture = checkpoint.config, checkpoint.architecture
    assert architecture is not None
    options: dict[str, Any] = {}
    longest = getattr(config, "max_position_embeddings", None)
    if architecture.takes_cache_options:
        asked = engine.with_max_model_len(longest).scheduler.max_model_len
        options = {
            "attention": attention, "linear": linear, "block_size": engine.cache.block_size,
            "max_model_len": asked, "mamba_cache_mode": mamba_cache_mode(engine.cache),
        }  # fmt: skip
    model = architecture.build(config, checkpoint.weights, dtype, **options)
    tokens = tokenizer or checkpoint.tokenizer
    eos = checkpoint.eos_token_ids or eos_of(checkpoint.tokenizer)
    loaded = LoadedModel(
        model, tokens, eos, config.vocab_size, chat_template=checkpoint.chat_template
    )
    return with_caches(replace(loaded, max_model_len=longest, dtype=dtype), engine)


def mamba_cache_mode(cache: CacheConfig) -> str:
    """What is kept of states: `vllm/model_executor/models/config.py:338`
    `MambaModelConfig.verify_and_update_config`, for models with the kernels of "all"."""
    if not cache.enable_prefix_caching:
        return "none"
    return "all" if cache.mamba_cache_mode == "none" else cache.mamba_cache_mode


def with_caches(loaded: LoadedModel, engine: EngineConfig) -> LoadedModel:
    """What follows from the `kv_specs` of a model that has some: manager, block size, exclusions.

    Raises:
        ValueError: windows, and an attention part that does not mind them; states in mode "align",
            and steps in which a block of tokens does not fit.
    """
    specs = tuple(getattr(loaded.model, "kv_specs", ()))
    if not specs:
        return loaded
    dtype = getattr(loaded.model, "dtype", loaded.dtype)
    loaded = replace(loaded, kv_specs=specs, dtype=dtype)
    has_states = any(isinstance(spec, MambaSpec) for spec in specs)
    has_windows = any(spec.sliding_window is not None for spec in specs)
    attention = getattr(loaded.model, "attention", paged_attention)
    knows = attention in (paged_attention, paged_attention_reference)
    if has_windows and not knows and not getattr(attention, "takes_sliding_window", False):
        raise ValueError(
            f"parts.attention={attention!r}: the model has sliding windows; need a function that "
            "applies batch.sliding_window, with the attribute takes_sliding_window = True"
        )
    if len(specs) == 1 and not has_states and not has_windows:
        return loaded
    for spec in specs:
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
            _check_aligned(engine.scheduler, spec.block_size or engine.cache.block_size)
    from mini_vllm.kv.coordinator import HybridKVCacheManager, StateCaches, num_blocks_of

    feature = StateCaches(specs) if has_states else None
    manager = partial(HybridKVCacheManager, kv_specs=specs) if feature is None else feature.build
    return replace(
        loaded, kv_cache_manager=manager, feature=feature,
        block_size=getattr(loaded.model, "block_size", None) if has_states else None,
        num_blocks_of=partial(num_blocks_of, specs),
        excludes=("enable_lora", "speculative_config"),
    )  # fmt: skip


def _check_aligned(scheduler: SchedulerConfig, block_size: int) -> None:
    """Refuse what would never let a step end at a block: `vllm/config/vllm.py:2069`
    `VllmConfig.validate_block_size`."""
    need = f"at least {block_size}, a block, with mamba_cache_mode='align'"
    if scheduler.max_num_batched_tokens < block_size:
        raise ValueError(f"max_num_batched_tokens={scheduler.max_num_batched_tokens}: need {need}")
    if 0 < scheduler.long_prefill_token_threshold < block_size:
        threshold = scheduler.long_prefill_token_threshold
        raise ValueError(f"long_prefill_token_threshold={threshold}: need 0, or {need}")
    if not scheduler.enable_chunked_prefill:
        raise ValueError("enable_chunked_prefill=False: need True with mamba_cache_mode='align'")


def eos_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's EOS as a tuple, empty when it has none."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
