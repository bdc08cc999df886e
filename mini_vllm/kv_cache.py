"""Which blocks hold which request's tokens: block tables, prefix hits, allocation.

Promises B2, B3, B12-B15: tables only grow, hits are whole blocks and never the last token, a
refused allocation changes nothing. Mirrors `vllm/v1/core/kv_cache_manager.py:110` `KVCacheManager`
with one full-attention group (`vllm/v1/core/single_type_kv_cache_manager.py:481`
`FullAttentionManager`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mini_vllm.block_pool import BlockPool, KVCacheBlock, KVEvent, hash_block_tokens, root_hash
from mini_vllm.config import whole
from mini_vllm.request import Request


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups since the last reset. Mirrors `vllm/v1/metrics/stats.py:115` `PrefixCacheStats`.

    Requests that were preempted before are counted apart, so that a low hit rate is not hidden by
    requests that find their own blocks again.
    """

    requests: int = 0
    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one lookup of `num_tokens` tokens that found `num_hits`."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


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
        whole("block_size", block_size, 1)
        self.block_pool = block_pool(num_blocks, enable_caching)
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.max_model_len: int | None = None
        """Longest sequence: slots beyond it are never allocated. The scheduler sets it."""
        self.max_num_batched_tokens = 0
        """The budget of a step, which bounds what a window of tokens holds. The scheduler sets it.
        """
        self.use_eagle = False
        """Leave the last block of a hit out, because a drafter that reads the target's hidden
        states needs them computed again. The scheduler sets it."""
        self.stats = PrefixCacheStats()
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

    def get_block_ids(self, request_id: str, group: int = 0) -> list[int]:
        """Physical block ids of the request's table in sequence order; here there is one group."""
        return [block.block_id for block in self.req_to_blocks.get(request_id, ())]

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Longest cached prefix of the request, in whole blocks. Touches nothing.

        At most `num_tokens - 1` tokens count, because the last one must be computed to give
        logits (B13): `vllm/v1/core/kv_cache_manager.py:194` `KVCacheManager.get_computed_blocks`.

        Returns:
            `(blocks, num_cached_tokens)`, the second being `len(blocks) * block_size`.
        """
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return [], 0
        self._extend_hashes(request)
        blocks = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        if self.use_eagle and blocks:
            blocks.pop()
        num_hits = len(blocks) * self.block_size
        self.stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)
        return blocks, num_hits

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> int:
        """Free blocks it takes to hold `num_tokens` (B15): new ones, and hits in the queue."""
        num_held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        num_new = max(0, -(-num_tokens // self.block_size) - num_held)
        if not new_computed_blocks:
            return num_new
        return num_new + sum(b.ref_cnt == 0 and not b.is_null for b in new_computed_blocks)

    def full_sequence_fits(
        self, request: Request, new_computed_blocks: Sequence[KVCacheBlock]
    ) -> bool:
        """Whether the whole current sequence would fit, not only its first chunk.

        The admission gate of `vllm/config/scheduler.py:140`
        `SchedulerConfig.scheduler_reserve_full_isl`.
        """
        needed = self.get_num_blocks_to_allocate(
            request.request_id, request.num_tokens, new_computed_blocks
        )
        return needed <= self.block_pool.get_num_free_blocks()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> list[KVCacheBlock] | None:
        """Grow the table to hold `num_new_tokens` beyond `request.num_computed_tokens`.

        The caller has already put the prefix hits, and the tokens that come from outside, into
        `num_computed_tokens`. Capacity is checked
        before anything is touched (B14); adopted blocks that were free count as consumed. Blocks
        that become full with this step's tokens enter the index now, since the step will fill them
        before a request can read them; drafts, which may be rejected, do not count.

        Args:
            request: must not hold blocks yet when `new_computed_blocks` is given.
            num_new_tokens: tokens to be computed in this step, at least 1; 0 while what comes from
                outside is being loaded.
            new_computed_blocks: the hits of `get_computed_blocks`, to adopt.
            num_lookahead_tokens: further slots, for drafts made in this step.
            num_external_computed_tokens: how many computed tokens come from outside.
            delay_cache_blocks: index nothing yet, since what comes from outside is not there.

        Returns:
            The newly allocated blocks (often empty), or None when they do not fit.

        Raises:
            ValueError: `num_new_tokens` below 1, and nothing comes from outside.
        """
        if num_new_tokens < (0 if num_external_computed_tokens else 1):
            raise ValueError(f"num_new_tokens={num_new_tokens}: need at least 1")
        request_id, hits = request.request_id, new_computed_blocks or ()
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_slots = num_tokens + num_lookahead_tokens
        table, size = self.req_to_blocks.get(request_id, ()), self.block_size
        new_blocks: list[KVCacheBlock] = []
        if hits or num_slots > len(table) * size:  # else the last block has room: most decodes
            if self.max_model_len is not None and num_slots > self.max_model_len:
                num_slots = self.max_model_len
            needed = self.get_num_blocks_to_allocate(request_id, num_slots, hits)
            if needed > self.block_pool.get_num_free_blocks():
                return None
            new_blocks = self._extend_table(request_id, num_slots, hits)
        if self.enable_caching and not delay_cache_blocks:
            num_known = min(num_tokens, request.num_tokens)
            if num_known // size > self._num_cached.get(request_id, 0):
                self.cache_blocks(request, num_known)
        return new_blocks

    def _extend_table(
        self, request_id: str, num_slots: int, hits: Sequence[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Adopt the hits, then take new blocks up to `num_slots`; returns the new ones."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            table = self.req_to_blocks[request_id] = []
        if hits:
            self.block_pool.touch(hits)
            self._num_cached[request_id] = len(hits)
            table += hits
        num_missing = -(-num_slots // self.block_size) - len(table)
        new_blocks = self.block_pool.get_new_blocks(num_missing) if num_missing > 0 else []
        table += new_blocks
        return new_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Index the request's full blocks among its first `num_tokens` tokens (B3)."""
        start, num_full = self._num_cached.get(request.request_id, 0), num_tokens // self.block_size
        if num_full <= start or not self.enable_caching:
            return
        if len(request.block_hashes) < num_full:  # a prompt's are there since it was looked up
            self._extend_hashes(request)
        blocks = self.req_to_blocks[request.request_id][start:num_full]
        hashes = request.block_hashes[start:num_full]
        self.block_pool.cache_full_blocks(blocks, hashes)
        self._num_cached[request.request_id] = num_full
        tell = getattr(self.block_pool, "on_event", None)  # a learner's pool may have none
        if tell is not None:
            parent = request.block_hashes[start - 1] if start else None
            tokens = request.all_token_ids[start * self.block_size : num_full * self.block_size]
            tell(KVEvent("stored", tuple(hashes), parent, tuple(tokens)))

    def free(self, request: Request) -> None:
        """Release the table, tail first, so that a prefix outlives its extensions.

        A request without blocks is a no-op.
        """
        table = self.req_to_blocks.pop(request.request_id, None)
        self._num_cached.pop(request.request_id, None)
        if table:
            self.block_pool.free_blocks(reversed(table))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing changed, while any block is in use."""
        if not self.block_pool.reset_prefix_cache():
            return False
        self.stats = PrefixCacheStats()
        return True

    def forget_uncomputed(self, request: Request) -> None:
        """Take blocks that will not be computed after all out of the index.

        Used when a request is withdrawn from a step that has already allocated for it: its table
        was indexed on the promise that the step would fill it.
        """
        num_computed_blocks = request.num_computed_tokens // self.block_size
        for block in self.get_blocks(request.request_id)[num_computed_blocks:]:
            self.block_pool.evict(block)

    def _extend_hashes(self, request: Request) -> None:
        """Bring `request.block_hashes` up to the number of full blocks of its tokens (B9)."""
        hashes, token_ids, size = request.block_hashes, request.all_token_ids, self.block_size
        parent, keys = hashes[-1] if hashes else root_hash(request.extra_keys), request.block_keys
        for start in range(len(hashes) * size, request.num_tokens - size + 1, size):
            own = keys(start, start + size) if keys is not None else ()
            parent = hash_block_tokens(parent, token_ids[start : start + size], own)
            hashes.append(parent)
