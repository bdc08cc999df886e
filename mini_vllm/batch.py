"""What one forward pass needs: a ragged batch of tokens and where their K and V live.

Promises: names, shapes and meanings are upstream's, so `slot_mapping` here is `slot_mapping`
there. Mirrors the tensors that `vllm/v1/worker/gpu_model_runner.py:1863`
`GPUModelRunner._prepare_inputs` builds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass
class ForwardBatch:
    """Tokens of all scheduled requests, one request after the other.

    Integer arrays are int64. `kv_cache` is the runner's, passed in and written by the model:
    [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], K at index 0 and V at 1, the
    layout of `vllm/v1/attention/backends/flash_attn.py:140`
    `FlashAttentionBackend.get_kv_cache_shape` per layer. Models without a cache leave it None.
    """

    token_ids: np.ndarray
    """[num_tokens]"""
    positions: np.ndarray
    """[num_tokens] index of each token in its own sequence"""
    slot_mapping: np.ndarray
    """[num_tokens] block_id * block_size + offset: where each token's K and V are written"""
    query_start_loc: np.ndarray
    """[num_reqs + 1] request i owns tokens query_start_loc[i] to query_start_loc[i + 1]"""
    seq_lens: np.ndarray
    """[num_reqs] tokens whose K and V exist after this step's writes"""
    block_tables: np.ndarray
    """[num_reqs, max_blocks] physical block ids, 0 beyond a sequence's end"""
    logits_indices: np.ndarray
    """[num_rows] index of each request's last scheduled token, and of the ones before it that come
    before a draft: one row of logits each"""
    block_size: int = 16
    sliding_window: int | None = None
    """A token attends to this many, itself included; None: to all before it"""
    kv_cache: np.ndarray | None = field(default=None, repr=False)
    inputs_embeds: np.ndarray | None = field(default=None, repr=False)
    """[num_tokens, hidden_size] what the first layer gets in place of the tokens' own embeddings;
    None: those. The model may change it."""
    attn_metadata: Any = field(default=None, repr=False)
    """What the attention has worked out for this batch, once for all layers; its own type."""
    groups: tuple[ForwardBatch, ...] = field(default=(), repr=False)
    """The same tokens through the tables and caches of the further groups of layers, where there
    are several; see `of_group`."""
    tile: slice = field(default_factory=lambda: slice(0, None), repr=False)
    """Tokens that a layer's projections are at; a model that walks in tiles moves it."""

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens)

    def of_group(self, group: int) -> ForwardBatch:
        """The batch as the layers of a cache group see it; group 0 is the batch itself."""
        return self.groups[group - 1] if group else self


class Model(Protocol):
    """Anything that turns a batch into logits [num_rows, vocab_size]."""

    def forward(self, batch: ForwardBatch) -> np.ndarray: ...
