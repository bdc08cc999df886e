"""What had changed by 0.27.1 in the free queue.

Places are those of the release's own archive; the pin has none of these lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mini_vllm.block_pool import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock


def prepend(queue: FreeKVCacheBlockQueue, blocks: Sequence[KVCacheBlock]) -> None:
    """Queue `blocks` at the front, the first of them next to be handed out. O(len(blocks))."""
    for block in reversed(blocks):
        head = queue._head
        first = head.next_free
        assert first is not None
        head.next_free, block.prev_free = block, head
        block.next_free, first.prev_free = first, block
        queue.num_free_blocks += 1


class UnhashedFirst(BlockPool):
    """With prefix caching, freed blocks that hold no prefix are reused before those that do.

    At the pin a freed block goes to the back of the queue whatever it holds, so a block that no
    prompt can hit outlives one that some could. `vllm/v1/core/block_pool.py`, lines 728-742 of
    0.27.1 `BlockPool.free_blocks`; PR 42656, restricted to prefix caching by PR 48017.
    """

    def is_worthless(self, block: KVCacheBlock) -> bool:
        """Whether a freed block goes to the front."""
        return self.enable_caching and block.block_hash is None

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Drop one reference each; what holds no prefix goes to the front, the rest to the back."""
        blocks = list(ordered_blocks)
        for block in blocks:
            block.ref_cnt -= 1
        freed = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        prepend(self.free_queue, [block for block in freed if self.is_worthless(block)])
        for block in freed:
            if not self.is_worthless(block):
                self.free_queue.append(block)
