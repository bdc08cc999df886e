"""What a model's layers keep per token, and where: one cache for all groups of layers.

Promises: layers that keep the same, and forget at the same time, share a group and its block table;
all groups take their blocks from one pool, so a block of any group has the same number of bytes.
Mirrors `vllm/v1/kv_cache_interface.py:95` `KVCacheSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One group of layers: K and V of `num_kv_heads` heads of `head_dim` for every token."""

    layers: tuple[int, ...]
    """Which layers of the model, in order."""
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    """A token attends to this many tokens, itself included; None: to all before it."""
    block_size: int | None = None
    """Tokens per block; None: that of the cache."""

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim] of the group's cache."""
        size = self.block_size or block_size
        return len(self.layers), 2, num_blocks, size, self.num_kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class MambaSpec(KVCacheSpec):
    """One group of layers that keep a state, of the same size however many tokens it has seen.

    Mirrors `vllm/v1/kv_cache_interface.py:563` `MambaSpec`.
    """

    num_kv_heads: int = 0
    head_dim: int = 0
    state_shapes: tuple[tuple[int, ...], ...] = ()
    """Of the arrays that make up one layer's state."""
    page_size_padded: int = 0
    """Numbers that a block takes per layer, at least those of the state, and as many as a block of
    the other groups."""

    mamba_cache_mode: str = "all"
    """"all": every full block keeps the state at its end. "align": only that of a step that ended
    there. "none": one block of `block_size` tokens holds a whole sequence."""

    @property
    def state_size(self) -> int:
        """Numbers in one layer's state."""
        return sum(math.prod(shape) for shape in self.state_shapes)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """[num_layers, 2, num_blocks, half a page]: a state lies in both halves, end to end."""
        return len(self.layers), 2, num_blocks, self.page_size_padded // 2


def allocate_caches(
    specs: Sequence[KVCacheSpec], num_blocks: int, block_size: int, dtype: np.dtype | type | str
) -> list[np.ndarray]:
    """The cache of each group, each with the shape of its spec, over the same bytes.

    A block belongs to one group at a time, so layer i of every group lies at the same place, as
    `vllm/v1/core/kv_cache_utils.py:1236` `get_kv_cache_config_from_groups` lays them out.

    Raises:
        ValueError: a block of one group has another number of bytes than that of another.
    """
    shapes = [spec.shape(num_blocks, block_size) for spec in specs]
    pages = {int(np.prod(shape[3:])) for shape in shapes}
    if len(pages) > 1:
        raise ValueError(
            f"kv_specs: blocks of {sorted(pages)} elements per layer: need one size for all groups"
        )
    buffer = np.zeros(max(shapes, key=lambda shape: shape[0], default=(0,)), dtype=dtype)
    return [buffer[: shape[0]].reshape(shape) for shape in shapes]
