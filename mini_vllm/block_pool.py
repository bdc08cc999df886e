"""Physical KV-cache blocks: who owns each, which are free, and which hold a known prefix.

Promises invariants B1, B4-B8 and B10: a block is queued exactly when no table references it, cached
blocks survive in the queue until they are reused, and every operation on the queue is O(1).
Mirrors `vllm/v1/core/block_pool.py:130` `BlockPool` and
`vllm/v1/core/kv_cache_utils.py:164` `FreeKVCacheBlockQueue`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

ROOT_HASH = 0
"""Parent of a sequence's first block. An int, not None, so hashes repeat across processes."""


@dataclass(frozen=True, slots=True)
class KVEvent:
    """One change of the prefix index. Mirrors `vllm/distributed/kv_events.py:49` `BlockStored`."""

    kind: str
    """"stored", "removed" or "cleared" (everything; the other fields are empty)."""
    block_hashes: tuple[int, ...] = ()
    parent_block_hash: int | None = None
    """Of "stored": what the first of them is chained to, None at the start of a sequence."""
    token_ids: tuple[int, ...] = ()
    """Of "stored": the tokens of these blocks."""


def root_hash(extra_keys: tuple[Hashable, ...]) -> int:
    """Parent of a sequence whose K and V depend on more than tokens: a salt, an adapter.

    Every block is chained to it, so prefixes under other keys never meet. Upstream puts an adapter
    into each block's keys and a salt into the first block's, which shares the same blocks:
    `vllm/v1/core/kv_cache_utils.py:503` `generate_block_hash_extra_keys`. Text keys make it differ
    between processes unless PYTHONHASHSEED is set.
    """
    return hash((ROOT_HASH, extra_keys)) if extra_keys else ROOT_HASH


def hash_block_tokens(
    parent_hash: int, token_ids: Sequence[int], extra_keys: tuple[Hashable, ...] = ()
) -> int:
    """Hash of a full block, chained to its whole prefix (B9).

    Args:
        parent_hash: hash of the block before it, `root_hash` of the request's keys for the first.
        token_ids: the block's tokens, exactly `block_size` of them.
        extra_keys: what this block's K and V depend on beside tokens and prefix, such as an image.

    Returns:
        A 64-bit int; equal prefixes give equal values. Upstream hashes with sha256:
        `vllm/v1/core/kv_cache_utils.py:541` `hash_block_tokens`.
    """
    if extra_keys:
        return hash((parent_hash, tuple(token_ids), extra_keys))
    return hash((parent_hash, tuple(token_ids)))


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """Metadata of one physical block; the K and V themselves live in the model runner.

    `prev_free` and `next_free` belong to `FreeKVCacheBlockQueue`: both are set while the block is
    queued and None otherwise. Mirrors `vllm/v1/core/kv_cache_utils.py:116` `KVCacheBlock`.
    """

    block_id: int
    ref_cnt: int = 0
    block_hash: int | None = None
    is_null: bool = False
    prev_free: KVCacheBlock | None = field(default=None, repr=False)
    next_free: KVCacheBlock | None = field(default=None, repr=False)

    def reset_hash(self) -> None:
        """Forget the content: the block is about to be overwritten."""
        self.block_hash = None


class FreeKVCacheBlockQueue:
    """Free blocks as a doubly linked list threaded through the blocks themselves.

    The front is evicted first. A deque would do for `popleft` and `append`; the links exist for
    `remove`, which takes a block out of the middle when a prefix hit revives it (B4).
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Queue `blocks` in the given order (upstream: by block id)."""
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self.num_free_blocks = len(blocks)
        previous = self._head
        for block in blocks:
            previous.next_free, block.prev_free = block, previous
            previous = block
        previous.next_free, self._tail.prev_free = self._tail, previous

    def popleft(self) -> KVCacheBlock:
        """Take the block at the front. Raises ValueError when the queue is empty."""
        if self.num_free_blocks == 0:
            raise ValueError("popleft from an empty free queue: no free blocks")
        block = self._head.next_free
        assert block is not None
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Unlink `block` wherever it is. Raises RuntimeError when it is not queued."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise RuntimeError(f"remove: block {block.block_id} is not in the free queue")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Queue `block` at the back: last to be evicted."""
        last, tail = self._tail.prev_free, self._tail
        assert last is not None
        last.next_free, block.prev_free = block, last
        block.next_free, tail.prev_free = tail, block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every queued block, front first. O(n): for tests and traces."""
        blocks = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            blocks.append(block)
            block = block.next_free
        return blocks


class BlockPool:
    """Hands out blocks, counts references, and remembers which blocks hold which prefix.

    `cached_block_hash_to_block` maps a hash to `{block_id: block}` in insertion order. Several
    blocks may hold the same content: tables are append-only (B2), so equal blocks are never
    merged (B11), and a lookup returns the earliest survivor.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        """Create `num_blocks` blocks; block 0 becomes the null block and is never handed out (B5).

        Raises:
            ValueError: `num_blocks` under 2, which would leave nothing to allocate.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need at least 2 (block 0 is reserved)")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block: dict[int, dict[int, KVCacheBlock]] = {}
        self.null_block = self.free_queue.popleft()
        self.null_block.is_null = True
        self.on_event: Callable[[KVEvent], None] | None = None
        """Told of every change of the index; for routers and traces."""

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` from the front of the queue, each with ref_cnt 1.

        A block that still held a cached prefix is evicted here and nowhere else (B10). Mirrors
        `vllm/v1/core/block_pool.py:333` `BlockPool.get_new_blocks`.

        Raises:
            ValueError: more blocks were asked for than are free; nothing has changed.
        """
        if num_blocks > self.free_queue.num_free_blocks:
            raise ValueError(
                f"num_blocks={num_blocks}: only {self.free_queue.num_free_blocks} blocks are free"
            )
        blocks = [self.free_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            if block.block_hash is not None:
                self.evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return blocks

    def evict(self, block: KVCacheBlock) -> bool:
        """Drop this block's own index entry and hash; True when it had one (B8)."""
        block_hash = block.block_hash
        if block_hash is None:
            return False
        holders = self.cached_block_hash_to_block[block_hash]
        del holders[block.block_id]
        if not holders:
            del self.cached_block_hash_to_block[block_hash]
        block.reset_hash()
        if self.on_event is not None:
            self.on_event(KVEvent("removed", (block_hash,)))
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing changed, while any block is in use.

        Mirrors `vllm/v1/core/block_pool.py:454` `BlockPool.reset_prefix_cache`.
        """
        if self.num_blocks - self.free_queue.num_free_blocks != 1:  # the null block
            return False
        self.cached_block_hash_to_block = {}
        for block in self.blocks:
            block.reset_hash()
        if self.on_event is not None:
            self.on_event(KVEvent("cleared"))
        return True

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Reference each block once more; one that was free leaves the queue (B1, B4)."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference each; blocks that no request references are queued in the given order.

        Their hash stays: a free block is still a cache entry until it is reused (B4).
        """
        blocks = list(ordered_blocks)
        for block in blocks:
            block.ref_cnt -= 1
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_queue.append(block)

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], hashes: Sequence[int]) -> None:
        """Record that `blocks[i]` holds the prefix `hashes[i]`; skips null or hashed blocks."""
        for block, block_hash in zip(blocks, hashes, strict=True):
            if block.is_null or block.block_hash is not None:
                continue
            block.block_hash = block_hash
            self.cached_block_hash_to_block.setdefault(block_hash, {})[block.block_id] = block

    def get_cached_block(self, block_hash: int) -> KVCacheBlock | None:
        """The earliest cached block that still holds this prefix, or None. Changes nothing."""
        holders = self.cached_block_hash_to_block.get(block_hash)
        return next(iter(holders.values())) if holders else None

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return self.free_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of allocatable blocks in use, 0.0 when idle; the null block does not count (B5)."""
        return 1.0 - self.free_queue.num_free_blocks / (self.num_blocks - 1)
