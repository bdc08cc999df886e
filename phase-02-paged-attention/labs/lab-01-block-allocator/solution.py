"""Lab 02-01: a paged block allocator: blocks, the free queue, hashes, and the pool.

Everything here is bookkeeping about blocks; no key and no value is touched. Given are the block and
both constructors. Names follow `vllm/v1/core/block_pool.py:130` `BlockPool` and
`vllm/v1/core/kv_cache_utils.py:164` `FreeKVCacheBlockQueue`. The invariants of the phase:

- I1: a block is in the free queue exactly when its `ref_cnt` is 0 and it is not the null block.
- I2: a block id in a request's table never changes, so equal blocks are never merged.
- I3: only full blocks have a hash and stand in the index.
- I4: cached is not the same as in use: a free block may still be a hit, and `touch` revives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROOT_HASH = 0
"""Parent of a sequence's first block."""


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One physical block (given). `eq=False`: two blocks are equal only if they are the same.

    Attributes:
        block_id: place in the KV cache; never changes.
        ref_cnt: how many tables hold the block now.
        block_hash: hash of its content and of everything before it, or None.
        is_null: block 0, which stands in for "no block" and is never handed out.
        prev_free, next_free: neighbours in the free queue, both None while the block is not
            queued. Only `FreeKVCacheBlockQueue` writes them.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: int | None = None
    is_null: bool = False
    prev_free: KVCacheBlock | None = field(default=None, repr=False)
    next_free: KVCacheBlock | None = field(default=None, repr=False)

    def reset_hash(self) -> None:
        """Forget the content."""
        self.block_hash = None


class FreeKVCacheBlockQueue:
    """Free blocks as a doubly linked list whose links are the blocks' own fields.

    `_head` and `_tail` are sentinels with block id -1. They stand before the first block and after
    the last one, so every queued block has two neighbours and no operation needs a special case
    for an end. They never leave the queue, and no caller ever sees them.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Queue `blocks` in the given order (given)."""
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self.num_free_blocks = len(blocks)
        previous = self._head
        for block in blocks:
            previous.next_free, block.prev_free = block, previous
            previous = block
        previous.next_free, self._tail.prev_free = self._tail, previous

    def popleft(self) -> KVCacheBlock:
        """The block that has waited longest, queued no more; O(1).

        Raises:
            ValueError: the queue is empty.
        """
        block = self._head.next_free
        assert block is not None
        if block is self._tail:
            raise ValueError("popleft from an empty free queue")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """`block` is queued no more, wherever it stood; the others keep their order.

        No block but itself and its two neighbours is looked at. Afterwards both of its links are
        None.

        Raises:
            RuntimeError: the block is not queued (a link is None); nothing has changed.
        """
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise RuntimeError(f"remove: block {block.block_id} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """`block`, which is not queued, becomes the one handed out last; O(1)."""
        last = self._tail.prev_free
        assert last is not None
        last.next_free, block.prev_free = block, last
        block.next_free, self._tail.prev_free = self._tail, block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every queued block, front first, without the sentinels. O(n): for tests and traces."""
        blocks = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            blocks.append(block)
            block = block.next_free
        return blocks


def hash_block_tokens(parent_hash: int, token_ids: Sequence[int]) -> int:
    """Hash of one full block: Python's `hash` of the pair (parent hash, tuple of the tokens).

    Equal prefixes give equal hashes in any process, since ints and tuples of ints hash alike
    everywhere. Source: `vllm/v1/core/kv_cache_utils.py:541` `hash_block_tokens`.

    Args:
        parent_hash: hash of the block before it, `ROOT_HASH` for the first.
        token_ids: the block's tokens.
    """
    return hash((parent_hash, tuple(token_ids)))


class BlockPool:
    """Owner of all blocks: hands them out, counts references, remembers cached contents.

    Attributes:
        blocks: all of them; `blocks[i].block_id == i`.
        free_queue: those that nobody references.
        null_block: `blocks[0]`.
        cached_block_hash_to_block: hash -> {block id: block}. Several blocks may hold the same
            content (I2). A hash without blocks has no entry. A hash may be any int, 0 too.

    What an operation costs depends on the blocks it is given or hands out, never on how many are
    queued, cached or in the pool.

    A trace, six blocks: `get_new_blocks(3)` gives 1, 2, 3; 1 and 2 are cached as 111 and 222;
    freed in the order 3, 2, 1 they leave the queue as 4, 5, 3, 2, 1. `touch` of block 2 makes it
    4, 5, 3, 1. `get_new_blocks(4)` gives these four, and 222 can be found, 111 cannot.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        """All blocks free, in the order of their ids; block 0 becomes the null block (given)."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need at least 2 (block 0 is reserved)")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        self.cached_block_hash_to_block: dict[int, dict[int, KVCacheBlock]] = {}

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """The first `num_blocks` of the queue, in queue order; 0 gives `[]`.

        Their owner will overwrite them: each has `ref_cnt` 1 and no content that anybody could
        still find.

        Raises:
            ValueError: more are asked for than are free; the pool is as it was.
        """
        if num_blocks > self.free_queue.num_free_blocks:
            raise ValueError(
                f"num_blocks={num_blocks}: only {self.free_queue.num_free_blocks} are free"
            )
        blocks = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self.evict(block)
            block.ref_cnt = 1
        return blocks

    def evict(self, block: KVCacheBlock) -> bool:
        """`block`, free or in use, has no hash and is no hit any more.

        Other blocks with the same hash stay in the index; a hash that no block holds any more
        leaves it.

        Returns:
            True if the block had a hash, False if there was nothing to do.
        """
        if block.block_hash is None:
            return False
        holders = self.cached_block_hash_to_block[block.block_hash]
        del holders[block.block_id]
        if not holders:
            del self.cached_block_hash_to_block[block.block_hash]
        block.reset_hash()
        return True

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One reference more for each block; one that stands there twice gets two. I1 holds after.

        The null block is never in the queue, whatever its count.
        """
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One reference less for each block; those that reach 0 are queued last, in this order.

        A block that stands there twice loses two. The order is the caller's: what comes first is
        evicted first. Hashes stay: a free block is a cache entry until it is handed out again. The
        null block is never queued.

        Raises:
            AssertionError: a block (other than the null block) has no reference left to take:
                somebody frees it twice.
        """
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"block {block.block_id} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_queue.append(block)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[int]) -> None:
        """Note that `blocks[i]` is full and holds the content `hashes[i]`.

        From now on it can be found by that hash. Null blocks, and blocks that have a hash already,
        are passed over.

        Raises:
            ValueError: the two lengths differ, either way: a block that is not full has no hash
                (I3). The pool is as it was.
        """
        if len(blocks) != len(hashes):
            raise ValueError(f"{len(blocks)} blocks but {len(hashes)} hashes")
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.is_null or block.block_hash is not None:
                continue
            block.block_hash = block_hash
            self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block

    def get_cached_block(self, block_hash: int) -> KVCacheBlock | None:
        """A block that holds this content, or None; of several, the one cached first.

        Free or in use does not matter (I4). Changes nothing.
        """
        holders = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(holders.values())) if holders else None

    def get_num_free_blocks(self) -> int:
        """How many blocks can be handed out now, those with a cached content included."""
        return self.free_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks that could be handed out and are in use: 0.0 idle, 1.0 full.

        The null block counts neither way.
        """
        return 1.0 - self.free_queue.num_free_blocks / (self.num_blocks - 1)
