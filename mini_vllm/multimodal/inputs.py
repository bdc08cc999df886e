"""Where a picture stands in a prompt, and what its blocks are told apart by.

Promises: a placeholder has a length in tokens and a number of embeddings, which differ where a mask
says so; a block's key names every picture in it and where that picture begins. Mirrors
`vllm/multimodal/inputs.py:119` `PlaceholderRange` and
`vllm/v1/core/kv_cache_utils.py:395` `_gen_mm_extra_hash_keys`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from mini_vllm.request import Request


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The tokens that stand for one picture: those from `offset` to `offset + length`."""

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None
    """Which of them take an embedding; None: all. The others keep that of their own token."""
    embeds_cumsum: tuple[int, ...] | None = field(init=False, repr=False, compare=False)
    """Embeddings up to and including each token, where there is a mask."""

    def __post_init__(self) -> None:
        """Raises ValueError: a bound below its least, or a mask of another length."""
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"{self}: need an offset of at least 0 and a length of at least 1")
        mask = self.is_embed
        if mask is not None and len(mask) != self.length:
            raise ValueError(f"is_embed has {len(mask)} entries: need length={self.length}")
        cumsum = None if mask is None else tuple(accumulate(map(int, mask)))
        object.__setattr__(self, "embeds_cumsum", cumsum)

    @property
    def end(self) -> int:
        """The token behind the last."""
        return self.offset + self.length

    def get_num_embeds(self) -> int:
        """How many rows its encoder must give."""
        return self.length if self.embeds_cumsum is None else self.embeds_cumsum[-1]

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """The rows that tokens `start_idx` to `end_idx` of the range take, as (first, behind last).

        Both count from the range's own beginning. With the mask 0 1 0 1 1 the tokens 3 to 5 take
        the rows 1 to 3.
        """
        cumsum = self.embeds_cumsum
        if cumsum is None:
            return start_idx, end_idx
        first = cumsum[start_idx - 1] if start_idx > 0 else 0
        return first, cumsum[end_idx - 1] if end_idx > 0 else 0


@dataclass(frozen=True, slots=True)
class MultiModalFeatureSpec:
    """One picture of one prompt: `vllm/multimodal/inputs.py:302` `MultiModalFeatureSpec`."""

    identifier: str
    """Equal for equal pictures: the key of the encoder cache."""
    mm_position: PlaceholderRange
    data: np.ndarray | None = field(default=None, repr=False, compare=False)
    """What the encoder takes, such as pixels [3, height, width]; None where nothing encodes."""
    modality: str = "image"


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """A request's `block_keys`, and so the place where its pictures are found."""

    mm_features: tuple[MultiModalFeatureSpec, ...]
    """Sorted by offset, not overlapping."""

    def __call__(self, start: int, stop: int) -> tuple[Hashable, ...]:
        """What tells the block of the tokens `start` to `stop` from another with equal tokens.

        Each picture in it, and where it begins relative to the block: the same picture shifted by
        some tokens has other rows at the same place.
        """
        return tuple(
            (feature.identifier, feature.mm_position.offset - start)
            for feature in self.mm_features
            if feature.mm_position.offset < stop and feature.mm_position.end > start
        )


def mm_features(request: Request) -> Sequence[MultiModalFeatureSpec]:
    """The pictures of a request, by offset; empty for a text."""
    return getattr(request.block_keys, "mm_features", ())
