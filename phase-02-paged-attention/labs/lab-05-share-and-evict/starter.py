"""Lab 02-05: share blocks between requests, and lose them in the right order.

First a driver that takes a prompt through a `KVCacheManager` by hand, as a scheduler does. Then the
manager itself: lookup, allocation, freeing. The pool is mini_vllm's (lab 02-01 built one). Mirrors
`vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager` and, for a model whose layers all attend to
everything, `vllm/v1/core/single_type_kv_cache_manager.py:481` `FullAttentionManager`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from mini_vllm import BlockPool, KVCacheBlock, Request, SamplingParams, hash_block_tokens
from mini_vllm import KVCacheManager as EngineManager
from mini_vllm.block_pool import root_hash

_numbers = itertools.count()
"""`next(_numbers)` is a number nobody had before: good for request ids."""

PARAMS = SamplingParams(max_tokens=1000)
"""What every request of this lab asks for; only its tokens matter."""

# ------------------------------------------------------------------ part A: the driver


def prefill(kv: KVCacheManager, token_ids: Sequence[int]) -> tuple[Request, int]:
    """A new request whose whole prompt is computed, cached blocks adopted and not computed again.

    Its id is nobody else's, its parameters are `PARAMS`. The manager takes
    `request.num_computed_tokens` as true at any time: the cached tokens while it is asked for
    slots, the whole prompt in the end, 0 when there is no room.

    A trace, blocks of 4, 32 tokens that another request holds: 28 are cached, slots are asked for
    4 tokens with 7 hits, and the table has 8 blocks, the last of its own.

    Args:
        kv: this lab's manager or the engine's.
        token_ids: at least one token.

    Returns:
        The request, and how many of its tokens were cached.

    Raises:
        RuntimeError: the blocks do not fit; the manager is as it was.
    """
    raise NotImplementedError


def decode(kv: KVCacheManager, request: Request, token_id: int) -> list[KVCacheBlock]:
    """One more token of a request: known, with a slot, and counted as computed.

    A block that the token fills can be hit at once, by it and everything before it.

    Returns:
        The blocks that were added to the table: mostly none, now and then one.

    Raises:
        RuntimeError: there is no block for the token. It stays appended, and is not counted as
            computed.
    """
    raise NotImplementedError


def ref_counts(kv: KVCacheManager, request: Request) -> list[int]:
    """`ref_cnt` of each block of the request's table, in table order."""
    raise NotImplementedError


# ------------------------------------------------------------------ part B: the manager


def find_longest_cache_hit(
    pool: BlockPool, block_hashes: Sequence[int], max_length: int, block_size: int
) -> list[KVCacheBlock]:
    """The cached blocks of a sequence, from its front up to the first one that is not cached.

    Changes nothing. Source: `vllm/v1/core/single_type_kv_cache_manager.py:483`
    `FullAttentionManager.find_longest_cache_hit`.

    Args:
        pool: asked with `get_cached_block(hash)`.
        block_hashes: hash of each full block of the sequence, in order.
        max_length: the hit covers at most this many tokens.
        block_size: tokens per block; a hit is whole blocks.
    """
    raise NotImplementedError


class KVCacheManager:
    """Block tables of all running requests over one pool.

    Attributes:
        block_pool: owner of the blocks.
        req_to_blocks: request id -> its table, which only grows until `free` (I2).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        block_pool: Callable[[int, bool], BlockPool] = BlockPool,
    ) -> None:
        """An empty cache of `num_blocks` blocks, the null block included (given)."""
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: need at least 1")
        self.block_pool = block_pool(num_blocks, enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}

    @property
    def usage(self) -> float:
        """Share of the blocks in use (given)."""
        return self.block_pool.get_usage()

    def get_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's table, empty when it has none (given)."""
        return self.req_to_blocks.get(request_id, [])

    def get_block_ids(self, request_id: str) -> list[int]:
        """The ids in the request's table (given)."""
        return [block.block_id for block in self.get_blocks(request_id)]

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """The cached prefix of a request: its blocks, and how many tokens they hold.

        Never the last token: its logits are wanted, so it has to be computed, and the hit covers
        `num_tokens - 1` tokens at most. Changes nothing in the pool. `([], 0)` when caching is off,
        and nothing is hashed then. `request.block_hashes` is true up to the last call of
        `_extend_hashes`. It only grows: a block is hashed once in the life of its request.
        """
        raise NotImplementedError

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """How many blocks leave the free queue until the request has slots for `num_tokens` tokens.

        Blocks of its table leave nothing, and the adopted ones are not allocated, but one that
        nobody references leaves the queue all the same (I1). Never below 0. It costs as much as the
        hits are many, whatever is queued.

        A trace, blocks of 4, 35 tokens, no table: 8 hits, 5 of them free, cost 1 + 5. Source:
        `vllm/v1/core/single_type_kv_cache_manager.py:89`
        `SingleTypeKVCacheManager.get_num_blocks_to_allocate`.

        Args:
            request_id: whose table to look at; it may have none.
            num_tokens: all tokens that need a slot, from the first one on.
            new_computed_blocks: hits that the request is about to adopt.
        """
        raise NotImplementedError

    def full_sequence_fits(
        self, request: Request, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """Whether all tokens of the request would fit, which the scheduler asks first (given)."""
        needed = self.get_num_blocks_to_allocate(
            request.request_id, request.num_tokens, new_computed_blocks
        )
        return needed <= self.block_pool.get_num_free_blocks()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
    ) -> list[KVCacheBlock] | None:
        """Give the request slots for `num_new_tokens` tokens after its computed ones.

        `request.num_computed_tokens` contains the hits, so computed and new tokens together are all
        that need a slot. The table then begins with the hits, each with one reference more, and
        ends with the new blocks. A hit is never handed out as a new block. With caching on, every
        block that these tokens fill can be hit from now on.

        A trace, blocks of 4, a pool of 5 blocks besides the null block: 1 to 4 hold a prompt of 16
        tokens and are free, the queue is 4, 3, 2, 1, 5. The same prompt and one token more, with
        `num_computed_tokens` 16, `num_new_tokens` 1 and the four hits: the table is 1, 2, 3, 4, 5,
        and [block 5] is returned.

        Args:
            request: has no table yet if `new_computed_blocks` is given.
            num_new_tokens: at least 1.
            new_computed_blocks: what `get_computed_blocks` found.

        Returns:
            The new blocks. `[]` is a success: the last block had room. None: there are not enough
            free blocks, and *nothing* has changed, neither table nor count nor index.

        Raises:
            ValueError: `num_new_tokens` below 1.
        """
        raise NotImplementedError

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Each block that the first `num_tokens` tokens of the request fill can be hit.

        Slots may be allocated for tokens that are not known yet (drafts of speculative decoding); a
        block that holds one is not full (I3). The pool passes over blocks it has noted before.
        """
        raise NotImplementedError

    def free(self, request: Request) -> None:
        """The request has no table any more and no reference to a block; no hash is forgotten.

        What is freed first is evicted first, and a block can only be hit together with all blocks
        before it: a block is evicted before those in front of it. A request without a table is a
        no-op.
        """
        raise NotImplementedError

    def forget_uncomputed(self, request: Request) -> None:
        """What the engine does to a request that it withdraws from a step; lab 03-07 (given)."""
        EngineManager.forget_uncomputed(self, request)  # type: ignore[arg-type]

    def _extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to the full blocks of its tokens (given)."""
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else root_hash(request.extra_keys)
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hash_block_tokens(parent, request.all_token_ids[start : start + size])
            hashes.append(parent)
