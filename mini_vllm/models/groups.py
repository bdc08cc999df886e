"""Which layers share a block table, and how large a block must be to hold a state.

Promises: the pin's own arithmetic, without its byte counts: every group has as many layers as the
rarest kind, and a page of attention is at least a state. Mirrors
`vllm/v1/core/kv_cache_utils.py:1057` `_get_kv_cache_groups_uniform_page_size` and
`vllm/platforms/interface.py:509` `Platform._align_hybrid_block_size`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from mini_vllm.checks import whole


def layer_groups(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Layers by group, `kinds` being what each layer keeps.

    Kinds come in the order of their first layers. Every group has as many layers as the rarest kind
    has, and the last ones may have fewer. Where the commonest has less than half as many again, all
    have as many as that.

    >>> layer_groups("wwfwwf")
    [[0, 3], [1, 4], [2, 5]]

    Raises:
        ValueError: no layers, or a kind that cannot be hashed.
    """
    if not kinds:
        raise ValueError(f"kinds={kinds!r}: need at least one layer")
    layers: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        if not isinstance(kind, Hashable):
            raise ValueError(f"kinds[{index}]={kind!r}: need a hashable value")
        layers.setdefault(kind, []).append(index)
    counts = [len(same) for same in layers.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[list[int]] = []
    for same in layers.values():
        num_groups = -(-len(same) // size)
        groups += [same[first::num_groups] for first in range(num_groups)]
    return groups


def hybrid_block_size(state: int, per_token: int, block_size: int, chunk: int | None) -> int:
    """Tokens per block such that one layer's K and V take at least the room of a state.

    Args:
        state: what a state takes.
        per_token: what K and V of one token take in one layer, in the same unit.
        block_size: at least this, and a multiple of it.
        chunk: where prefixes of states are cached, also a multiple of this many tokens.

    Raises:
        ValueError: a number below 1.
    """
    for name, value in (("state", state), ("per_token", per_token), ("block_size", block_size)):
        whole(name, value, 1)
    if chunk is not None:
        whole("chunk", chunk, 1)
    step = block_size if chunk is None else math.lcm(chunk, block_size)
    needed = -(-state // per_token)
    return max(block_size, step * -(-needed // step))
