"""Which blocks hold which request's tokens: block tables, prefix hits, allocation.

Promises B2, B3, B12-B15: tables only grow, hits are whole blocks and never the last token, a
refused allocation changes nothing. Mirrors `vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`
with one full-attention group (`vllm/v1/core/single_type_kv_cache_manager.py:481`
`FullAttentionManager`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mini_vllm.block_pool import ROOT_HASH, BlockPool, KVCacheBlock, hash_block_tokens
from mini_vllm.request import Request


class KVCacheManager:
    """Block tables of all running requests over one `BlockPool`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        block_pool: Callable[[int, bool], BlockPool] = BlockPool,
    ) -> None:
        """Create an empty cache.

        Args:
            num_blocks: physical blocks, the null block included.
            block_size: tokens per block.
            enable_caching: keep and look up full blocks by prefix hash.
            block_pool: the pool's class, called with `(num_blocks, enable_caching)`.

        Raises:
            ValueError: a size below its minimum.
        """
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: need at least 1")
        self.block_pool = block_pool(num_blocks, enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # Leading blocks of each table that are in the index already, adopted ones included.
        self._num_cached: dict[str, int] = {}

    @property
    def usage(self) -> float:
        """Share of allocatable blocks in use, 0.0 when idle."""
        return self.block_pool.get_usage()

    def get_blocks(self, request_id: str) -> list[KVCacheBlock]:
        """The request's block table, empty when it has none."""
        return self.req_to_blocks.get(request_id, [])

    def get_block_ids(self, request_id: str) -> list[int]:
        """Physical block ids of the request's table, in sequence order."""
        return [block.block_id for block in self.req_to_blocks.get(request_id, ())]

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Longest cached prefix of the request, in whole blocks. Touches nothing.

        At most `num_tokens - 1` tokens count, because the last one must be computed to give
        logits (B13): `vllm/v1/core/kv_cache_manager.py:194` `KVCacheManager.get_computed_blocks`.

        Returns:
            `(blocks, num_cached_tokens)`, the second being `len(blocks) * block_size`.
        """
        if not self.enable_caching:
            return [], 0
        self._extend_hashes(request)
        blocks = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def full_sequence_fits(
        self, request: Request, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """Whether the whole current sequence would fit, not only its first chunk (D4).

        The admission gate of `vllm/config/scheduler.py:140`
        `SchedulerConfig.scheduler_reserve_full_isl`.
        """
        needed = _blocks_for(request.num_tokens, self.block_size) - len(new_computed_blocks)
        needed += _num_evictable(new_computed_blocks)
        return needed <= self.block_pool.get_num_free_blocks()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
    ) -> list[KVCacheBlock] | None:
        """Grow the table to hold `num_new_tokens` beyond `request.num_computed_tokens`.

        The caller has already put the prefix hits into `num_computed_tokens`. Capacity is checked
        before anything is touched (D3, B14); adopted blocks that were free count as consumed.
        Blocks that become full with this step's tokens enter the index now (D8), since the step
        will fill them before anybody can read them.

        Args:
            request: must not hold blocks yet when `new_computed_blocks` is given.
            num_new_tokens: tokens to be computed in this step, at least 1.
            new_computed_blocks: the hits of `get_computed_blocks`, to adopt.

        Returns:
            The newly allocated blocks (often empty), or None when they do not fit.
        """
        request_id = request.request_id
        num_slots = request.num_computed_tokens + num_new_tokens
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = []
        num_held = len(table)
        if new_computed_blocks:
            num_held += len(new_computed_blocks)
        num_needed = -(-num_slots // self.block_size) - num_held
        new_blocks: list[KVCacheBlock] = []
        if num_needed > 0 or new_computed_blocks:
            adopted = new_computed_blocks or ()
            if num_needed + _num_evictable(adopted) > self.block_pool.get_num_free_blocks():
                return None
            if adopted:
                self.block_pool.touch(adopted)
                table.extend(adopted)
                self._num_cached[request_id] = len(table)
            if num_needed > 0:
                new_blocks = self.block_pool.get_new_blocks(num_needed)
                table.extend(new_blocks)
            self.req_to_blocks[request_id] = table
        if self.enable_caching:
            num_full = min(num_slots, request.num_tokens) // self.block_size
            if num_full > self._num_cached.get(request_id, 0):
                self._cache_full_blocks(request, table, num_full)
        return new_blocks

    def free(self, request: Request) -> None:
        """Release the table, tail first, so that a prefix outlives its extensions (D7).

        A request without blocks is a no-op.
        """
        table = self.req_to_blocks.pop(request.request_id, None)
        self._num_cached.pop(request.request_id, None)
        if table:
            self.block_pool.free_blocks(reversed(table))

    def forget_uncomputed(self, request: Request) -> None:
        """Take blocks that will not be computed after all out of the index.

        Used when a request is withdrawn from a step that has already allocated for it: its table
        was indexed on the promise that the step would fill it.
        """
        num_computed_blocks = request.num_computed_tokens // self.block_size
        for block in self.get_blocks(request.request_id)[num_computed_blocks:]:
            self.block_pool._maybe_evict(block)

    def _cache_full_blocks(
        self, request: Request, table: list[KVCacheBlock], num_full: int
    ) -> None:
        """Index `table[cached:num_full]` under the request's chained hashes (B3)."""
        self._extend_hashes(request)
        start = self._num_cached.get(request.request_id, 0)
        self.block_pool.cache_full_blocks(
            table[start:num_full], request.block_hashes[start:num_full]
        )
        self._num_cached[request.request_id] = num_full

    def _extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to the number of full blocks of its tokens (B9)."""
        hashes, token_ids, size = request.block_hashes, request.all_token_ids, self.block_size
        parent = hashes[-1] if hashes else ROOT_HASH
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            parent = hash_block_tokens(parent, token_ids[start : start + size])
            hashes.append(parent)


def _blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` (B15)."""
    return -(-num_tokens // block_size)


def _num_evictable(blocks: Sequence[KVCacheBlock]) -> int:
    """How many of these hits sit in the free queue, and so cost capacity when adopted."""
    return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)
