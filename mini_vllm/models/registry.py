"""From the `model` argument of an engine to something that computes logits.

Promises: whatever it was (the shipped model, a folder, a hub id, "toy", an object), the engine gets
one record with the bounds it must hold its requests to. Mirrors
`vllm/model_executor/model_loader/__init__.py:133` `get_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mini_vllm.batch import Model
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_cache_interface import KVCacheSpec
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.moe import ExpertsFn, moe_forward_grouped
from mini_vllm.models.toy import ToyModel
from mini_vllm.models.transformer import AttentionFn, LinearFactory, Transformer
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


def load_model(
    model: str | Path | Model,
    tokenizer: Tokenizer | None,
    dtype: str,
    seed: int,
    attention: AttentionFn,
    linear: LinearFactory,
    experts: ExpertsFn = moe_forward_grouped,
) -> LoadedModel:
    """Resolve `model`; objects and "toy" speak bytes unless a tokenizer is given.

    Raises:
        ValueError: neither a name, nor a path, nor an object with `forward(batch)`; or a
            checkpoint that cannot be loaded.
    """
    if isinstance(model, str | Path) and str(model) != "toy":
        checkpoint = load_checkpoint(model)
        config = checkpoint.config
        transformer = Transformer(
            config, checkpoint.weights, dtype, attention=attention, linear=linear, experts=experts
        )
        return LoadedModel(
            transformer,
            tokenizer or checkpoint.tokenizer,
            checkpoint.eos_token_ids or eos_of(checkpoint.tokenizer),
            config.vocab_size,
            transformer.kv_specs,
            transformer.dtype,
            config.max_position_embeddings,
            checkpoint.chat_template,
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
            f"model={model!r}: need byte-llama, byte-moe, toy, a folder, a hub id, or an object "
            "with forward(batch)"
        )
    return LoadedModel(model, tokens, eos, vocab_size)


def eos_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's EOS as a tuple, empty when it has none."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
