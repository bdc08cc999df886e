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
from mini_vllm.block_pool import ROOT_HASH

_numbers = itertools.count()
"""`next(_numbers)` is a number nobody had before: good for request ids."""

PARAMS = SamplingParams(max_tokens=1000)
"""What every request of this lab asks for; only its tokens matter."""

# ------------------------------------------------------------------ part A: the driver


def prefill(kv: KVCacheManager, token_ids: Sequence[int]) -> tuple[Request, int]:
    """Take a whole prompt through the manager in one step.

    1. Make a `Request` with an id of its own and `PARAMS`.
    2. Ask the manager which blocks are cached.
    3. Put the number of cached tokens into `request.num_computed_tokens`. Before step 4: the
       manager counts from there.
    4. Ask for slots for the rest of the prompt, handing the cached blocks over.
    5. Everything is computed now: the counter is the length of the prompt.

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
    """One more token of a request: append it, get a slot for it, and count it as computed.

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
        `num_tokens - 1` tokens at most. Changes nothing in the pool. `([], 0)` when caching is off.
        Call `self._extend_hashes(request)` before you read `request.block_hashes`.
        """
        raise NotImplementedError

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """How many free blocks it takes until the request has slots for `num_tokens` tokens.

        Blocks that its table has already cost nothing, and blocks it is about to adopt need not be
        allocated. But an adopted block that nobody references is in the free queue at the moment:
        adopting it makes one free block less, so it counts. Source:
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

        1. Tokens that need a slot: `request.num_computed_tokens` (which contains the hits) and the
           new ones.
        2. If that takes more free blocks than there are: None, and *nothing* has changed.
        3. Touch the hits, and put them at the front of the table.
        4. Take the blocks that are still missing from the pool, and append them.
        5. With caching on, `self.cache_blocks(request, ...)` for the tokens of 1.

        Step 3 comes before step 4: a hit may stand at the front of the free queue.

        Args:
            request: has no table yet if `new_computed_blocks` is given.
            num_new_tokens: at least 1.
            new_computed_blocks: what `get_computed_blocks` found.

        Returns:
            The blocks taken in step 4. `[]` is a success: the last block had room.

        Raises:
            ValueError: `num_new_tokens` below 1.
        """
        raise NotImplementedError

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Note the hash of each full block among the first `num_tokens` tokens of the request.

        Slots may be allocated for tokens that are not known yet (drafts of speculative decoding),
        so the full blocks are those of `min(num_tokens, request.num_tokens)` tokens. The pool
        passes over blocks that it has noted before. Call `self._extend_hashes(request)` first.
        """
        raise NotImplementedError

    def free(self, request: Request) -> None:
        """Give the request's blocks back, the last block of its table first.

        What is freed first is evicted first, and a block can only be hit together with all blocks
        before it. So the tail has to go before the head. A request without a table is a no-op.
        """
        raise NotImplementedError

    def forget_uncomputed(self, request: Request) -> None:
        """Take blocks out of the index that will not be computed after all (given).

        The engine calls it when it withdraws a request from a step.
        """
        num_computed_blocks = request.num_computed_tokens // self.block_size
        for block in self.get_blocks(request.request_id)[num_computed_blocks:]:
            self.block_pool.evict(block)

    def _extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to the full blocks of its tokens (given)."""
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hash_block_tokens(parent, request.all_token_ids[start : start + size])
            hashes.append(parent)
