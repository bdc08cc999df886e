"""Lab 02-05: share blocks between requests, and lose them in the right order.

First a driver that takes a prompt through a `KVCacheManager` by hand, as a scheduler does. Then the
manager itself, an empty class whose answers are recorded. The pool is mini_vllm's. Mirrors
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


class ManagerBase:
    """Given: what the scheduler asks, readers and hashes. It finds nothing and has no room.

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
        """The cached prefix of a request: its blocks, and how many tokens they hold. Here none."""
        return [], 0

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> int:
        """How many blocks leave the free queue until `num_tokens` tokens, the first one included,
        have a slot and the hits are adopted. Here none."""
        return 0

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
        """Give the request slots for `num_new_tokens` tokens. Here there is never room.

        Args:
            request: `num_computed_tokens` contains the hits; it has no table yet if there are any.
            num_new_tokens: after the computed ones; at least 1.
            new_computed_blocks: what `get_computed_blocks` found.

        Returns:
            The new blocks. `[]` is a success: the last block had room. None is a refusal.

        Raises:
            ValueError: `num_new_tokens` below 1.
        """
        return None

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Blocks that the first `num_tokens` tokens fill can be hit from now on. Here none can."""

    def free(self, request: Request) -> None:
        """The request's table and its references go. Here nothing goes."""

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


class KVCacheManager(ManagerBase):
    """Block tables of all running requests over one pool, as the engine has it.

    Recorded: 3,000 operations of v0.22.1's own manager in 60 cases. Of case 1, five blocks of 4,
    r3's table is 1, 2, 3, 5, 4, and blocks 1, 2, 3 and 5 are cached:

        free r3                       queue 4, 5, 3, 2, 1
        r2, hit [1], 1 token more     [4]      queue 5, 3, 2    table 1, 4
        r3, 16 tokens hit, 1 more     None     queue 5, 3, 2    no table
        r4, hit [1], 5 tokens more    [5, 3]   queue 2          table 1, 5, 3

    Must hold, besides every recorded state:

    - The last token of a request is never a hit: its logits are wanted. With caching off nothing
      is a hit, and nothing is hashed.
    - A lookup changes nothing in the pool. A refusal changes nothing at all.
    - A table begins with the hits and only grows, until `free` (I2). A hit is never handed out as
      a new block.
    - A block of known tokens alone can be hit; slots of drafts, which are not known yet, fill none
      (I3). `request.block_hashes` grows by `_extend_hashes`: a block is hashed once in the life of
      its request.
    - Whether a block is free is said by its `ref_cnt` (I1). No call lists the free queue or costs
      more when more is queued.
    - `free` forgets no hash, and a request without a table gives nothing back.
    """
