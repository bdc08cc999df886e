"""The blocks of one group of layers: of those that see everything, a window, or keep a state.

Promises: a table only grows; what no later token attends to is replaced by the null block and goes
back to the pool; a hit of a window needs the blocks inside it and none before, a hit of a state the
one block that ends with it. Mirrors `vllm/v1/core/single_type_kv_cache_manager.py:481`
`FullAttentionManager`, `vllm/v1/core/single_type_kv_cache_manager.py:542` `SlidingWindowManager`
and `vllm/v1/core/single_type_kv_cache_manager.py:842` `MambaManager`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mini_vllm.block_pool import BlockPool, KVCacheBlock
from mini_vllm.kv_cache_interface import KVCacheSpec
from mini_vllm.request import Request

Table = list[KVCacheBlock]


class CacheGroup:
    """Layers that attend to every token before; the base of those that do not."""

    def __init__(self, index: int, spec: KVCacheSpec, block_size: int, pool: BlockPool) -> None:
        """Empty tables.

        Args:
            index: of the group; part of what its blocks are found by.
            spec: what its layers keep.
            block_size: tokens per block of this group.
            pool: shared with the other groups.
        """
        self.index, self.spec, self.block_size, self.pool = index, spec, block_size, pool
        self.tables: dict[str, Table] = {}
        self.num_cached: dict[str, int] = {}
        """Leading blocks of each table that are in the index, or never will be."""

    def num_skipped_tokens(self, num_computed: int) -> int:
        """How many tokens nothing attends to once `num_computed` are there."""
        return 0

    def most_blocks(self, max_num_batched_tokens: int, max_model_len: int) -> int | None:
        """Blocks that one request holds at most at a time; None: as many as it has tokens for."""
        return None

    def num_needed(
        self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock], num_computed: int,
        most: int | None = None,
    ) -> int:  # fmt: skip
        """Free blocks it takes to hold `num_tokens`: new ones, and hits in the queue.

        As `vllm/v1/core/single_type_kv_cache_manager.py:89`
        `SingleTypeKVCacheManager.get_num_blocks_to_allocate`; `most` caps what the whole
        sequence asks for.
        """
        required = -(-num_tokens // self.block_size)
        if most is not None:
            required = min(required, most)
        held = len(self.tables.get(request_id, ()))
        if request_id in self.num_cached:
            return max(required - held, 0)
        skipped = self.num_skipped_tokens(num_computed) // self.block_size
        new = max(required - max(skipped, len(hits) + held), 0)
        behind = hits[max(0, skipped - held) :]
        return new + sum(b.ref_cnt == 0 and not b.is_null for b in behind)

    def adopt(
        self, request_id: str, hits: Sequence[KVCacheBlock], num_computed: int, num_external: int
    ) -> None:
        """Begin a table: null blocks, then hits, then new blocks for what comes from outside."""
        if request_id in self.num_cached:
            return
        table = self.tables.setdefault(request_id, [])
        skipped_tokens = self.num_skipped_tokens(num_computed)
        skipped = skipped_tokens // self.block_size
        kept = hits[skipped:]
        self.pool.touch(kept)
        table += [self.pool.null_block] * skipped
        table += kept
        self.num_cached[request_id] = len(table)
        if min(num_computed - skipped_tokens, num_external) > 0:
            table += self.pool.get_new_blocks(-(-num_computed // self.block_size) - len(table))

    def extend(self, request_id: str, num_tokens: int) -> Table:
        """Take new blocks up to `num_tokens`; the new ones."""
        table = self.tables.setdefault(request_id, [])
        missing = -(-num_tokens // self.block_size) - len(table)
        new = self.pool.get_new_blocks(missing) if missing > 0 else []
        table += new
        return new

    def remove_skipped_blocks(self, request_id: str, num_computed: int) -> None:
        """Free the blocks that no token after the first `num_computed` attends to."""
        table = self.tables.get(request_id)
        skipped = self.num_skipped_tokens(num_computed) // self.block_size
        if not table or not skipped:
            return
        removed = []
        for place in range(min(skipped, len(table)) - 1, -1, -1):
            if table[place].is_null:
                break  # those before it were freed earlier
            removed.append(table[place])
            table[place] = self.pool.null_block
        self.pool.free_blocks(removed)

    def cache_blocks(
        self, request: Request, num_tokens: int, hashes: Sequence[int], alignment: int
    ) -> None:
        """Index the full blocks among the first `num_tokens` tokens, those that a hit can use.

        Args:
            hashes: of every full block of this group's size.
            alignment: hits are multiples of this many tokens.
        """
        start, stop = self.num_cached.get(request.request_id, 0), num_tokens // self.block_size
        if stop <= start:
            return
        table = self.tables[request.request_id]
        wanted = [i for i in range(start, stop) if self._serves_a_hit(i, alignment)]
        keys = [self.key(hashes[i]) for i in wanted]
        self.pool.cache_full_blocks([table[i] for i in wanted], keys)
        self.num_cached[request.request_id] = stop

    def _serves_a_hit(self, index: int, alignment: int) -> bool:
        return True

    def free(self, request_id: str) -> None:
        """Free a request's table, tail first."""
        self.num_cached.pop(request_id, None)
        if table := self.tables.pop(request_id, None):
            self.pool.free_blocks(reversed(table))

    def key(self, block_hash: int) -> int:
        """What a block of this group with this hash is found by."""
        return hash((block_hash, self.index))

    def new_step_starts(self) -> None:
        """A step is being planned."""


class SlidingWindowGroup(CacheGroup):
    """Layers whose tokens attend to the last `spec.sliding_window` tokens, themselves included."""

    def num_skipped_tokens(self, num_computed: int) -> int:
        """`vllm/v1/core/single_type_kv_cache_manager.py:654`
        `SlidingWindowManager.get_num_skipped_tokens`."""
        return max(0, num_computed - self.window + 1)

    def most_blocks(self, max_num_batched_tokens: int, max_model_len: int) -> int | None:
        """`vllm/v1/kv_cache_interface.py:463`
        `SlidingWindowSpec.max_admission_blocks_per_request`."""
        longest = min(self.window - 1 + max_num_batched_tokens, max_model_len)
        return -(-longest // self.block_size) + 1

    @property
    def window(self) -> int:
        """Tokens that a token attends to."""
        assert self.spec.sliding_window is not None
        return self.spec.sliding_window

    @property
    def num_contiguous(self) -> int:
        """Blocks that a hit must end with, unless it begins at the first block."""
        return -(-(self.window - 1) // self.block_size)

    def _serves_a_hit(self, index: int, alignment: int) -> bool:
        """Whether it may be among the last blocks of a hit, which ends at a multiple of the
        alignment."""
        per_segment = alignment // self.block_size
        return per_segment == 1 or index % per_segment >= per_segment - self.num_contiguous


class MambaGroup(CacheGroup):
    """Layers that keep a state: only that of the last computed token is needed, and a block that
    was full holds the one at its end. Mirrors
    `vllm/v1/core/single_type_kv_cache_manager.py:842` `MambaManager`.

    A state is written when the step runs, so a request cannot begin from one that another request
    of the same step writes.
    """

    def __init__(self, index: int, spec: KVCacheSpec, block_size: int, pool: BlockPool) -> None:
        super().__init__(index, spec, block_size, pool)
        self.cached_this_step: set[int] = set()

    def num_skipped_tokens(self, num_computed: int) -> int:
        """`vllm/v1/core/single_type_kv_cache_manager.py:1092`
        `MambaManager.get_num_skipped_tokens`."""
        return max(0, num_computed - 1)

    def num_needed(
        self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock], num_computed: int,
        most: int | None = None,
    ) -> int:  # fmt: skip
        """More than there are, where the hit is a state that this step only writes."""
        if self.is_written_now(hits):
            return self.pool.num_blocks + 1
        return super().num_needed(request_id, num_tokens, hits, num_computed, most)

    def is_written_now(self, hits: Sequence[KVCacheBlock]) -> bool:
        """Whether the state that a request would begin from is there only after this step."""
        return bool(hits) and hits[-1].block_hash in self.cached_this_step

    def cache_blocks(
        self, request: Request, num_tokens: int, hashes: Sequence[int], alignment: int
    ) -> None:
        """Index the states at the ends of the full blocks, and note that they are to be written."""
        before = self.num_cached.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, hashes, alignment)
        after = self.num_cached.get(request.request_id, 0)
        new = self.tables.get(request.request_id, [])[before:after]
        self.cached_this_step |= {b.block_hash for b in new if b.block_hash is not None}

    def new_step_starts(self) -> None:
        """What was to be written is there."""
        self.cached_this_step.clear()


class AlignedMambaGroup(MambaGroup):
    """As `MambaGroup` in mode "align": of the blocks of a step only the last one is real.

    A table holds the block that the last step wrote, the one that this step writes, and null blocks
    elsewhere. What a later request can hit is where a step ended; see `ends_at_blocks`.
    """

    def __init__(self, index: int, spec: KVCacheSpec, block_size: int, pool: BlockPool) -> None:
        super().__init__(index, spec, block_size, pool)
        self.last_state: dict[str, int] = {}
        """Place of the block that held the state when the last block was taken."""

    def num_needed(
        self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock], num_computed: int,
        most: int | None = None,
    ) -> int:  # fmt: skip
        """One block at most, and the hit if it is in the queue.

        `vllm/v1/core/single_type_kv_cache_manager.py:941` `MambaManager.get_num_blocks_to_allocate`
        """
        if self.is_written_now(hits):
            return self.pool.num_blocks + 1
        held = len(hits) + len(self.tables.get(request_id, ()))
        new = min(-(-num_tokens // self.block_size) - held, 1)
        return new + sum(b.ref_cnt == 0 and not b.is_null for b in hits)

    def extend(self, request_id: str, num_tokens: int) -> Table:
        """Null blocks, then one for the state after this step.

        `vllm/v1/core/single_type_kv_cache_manager.py:1008` `MambaManager.allocate_new_blocks`
        """
        table = self.tables.setdefault(request_id, [])
        before, required = len(table), -(-num_tokens // self.block_size)
        if required <= before:
            return []
        if before:
            self.last_state[request_id] = before - 1
        table += [self.pool.null_block] * (required - 1 - before)
        table += self.pool.get_new_blocks(1)
        return table[before:]

    def remove_skipped_blocks(self, request_id: str, num_computed: int) -> None:
        """Also free the block that the step before the last one wrote, wherever it stands."""
        super().remove_skipped_blocks(request_id, num_computed)
        last = self.last_state.get(request_id)
        if last is None or last >= -(-num_computed // self.block_size) - 1:
            return
        table = self.tables[request_id]
        if not table[last].is_null:
            self.pool.free_blocks([table[last]])
            table[last] = self.pool.null_block

    def free(self, request_id: str) -> None:
        """Free a request's table, and forget where its state was."""
        self.last_state.pop(request_id, None)
        super().free(request_id)

    def ends_at_blocks(self, request: Request, start: int, num_new: int) -> int:
        """How many of `num_new` prompt tokens, so that the step ends where a state can be hit.

        `vllm/v1/core/sched/scheduler.py:279` `Scheduler._mamba_block_aligned_split`
        """
        if start >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return num_new
        last = request.num_tokens // self.block_size * self.block_size
        if start + num_new < last:
            return num_new // self.block_size * self.block_size
        return last - start if start < last else num_new


def full_hit(groups: Sequence[CacheGroup], hashes: Sequence[int], use_eagle: bool, alignment: int,
             max_length: int) -> list[Table]:  # fmt: skip
    """The tables of the longest prefix, of at most `max_length` tokens, that all `groups` have.

    Their specs are equal. `use_eagle`: the last block is left out.
    """
    tables: list[Table] = [[] for _ in groups]
    for block_hash in hashes[: max_length // groups[0].block_size]:
        found = _in_all(groups, block_hash)
        if found is None:
            break
        for table, block in zip(tables, found, strict=True):
            table.append(block)
    if use_eagle:
        _pop(tables)
    _align(tables, groups[0].block_size, alignment)
    return tables


def window_hit(groups: Sequence[CacheGroup], hashes: Sequence[int], use_eagle: bool,
               alignment: int, max_length: int) -> list[Table]:  # fmt: skip
    """The same for windows: from the right, the first run of cached blocks that fills one.

    Before it stand null blocks. Where no run is long enough, the one that begins at the first block
    counts.
    """
    first = groups[0]
    assert isinstance(first, SlidingWindowGroup)
    size, most = first.block_size, max_length // first.block_size
    wanted = first.num_contiguous + use_eagle
    tables: list[Table] = [[group.pool.null_block] * most for group in groups]
    run = 0
    for place in range(most - 1, -1, -1):
        found = _in_all(groups, hashes[place])
        if found is None:
            run = 0
            continue
        if run == 0 and (place + (not use_eagle)) * size % alignment:
            continue  # a hit that ended here would be no multiple of the alignment
        for table, block in zip(tables, found, strict=True):
            table[place] = block
        run += 1
        if run >= wanted:
            for table in tables:
                del table[place + run :]
            break
    else:
        for table in tables:
            del table[run:]
        _align(tables, size, alignment)
    if use_eagle:
        _pop(tables)
        _align(tables, size, alignment)
    return tables


def state_hit(groups: Sequence[CacheGroup], hashes: Sequence[int], use_eagle: bool, alignment: int,
              max_length: int) -> list[Table]:  # fmt: skip
    """The same for states: the last one that is cached, null blocks before it; drafts leave it."""
    size = groups[0].block_size
    for place in range(max_length // size - 1, -1, -1):
        found = _in_all(groups, hashes[place])
        if found is not None and (place + 1) * size % alignment == 0:
            return [[g.pool.null_block] * place + [b] for g, b in zip(groups, found, strict=True)]
    return [[] for _ in groups]


def _in_all(groups: Sequence[CacheGroup], block_hash: int) -> list[KVCacheBlock] | None:
    """The block of each group that holds this prefix; None if one has none."""
    found = []
    for group in groups:
        block = group.pool.get_cached_block(group.key(block_hash))
        if block is None:
            return None
        found.append(block)
    return found


def _pop(tables: Sequence[Table]) -> None:
    for table in tables if tables[0] else ():
        table.pop()


def _align(tables: Sequence[Table], block_size: int, alignment: int) -> None:
    """Shorten the tables until they hold a multiple of the alignment."""
    while len(tables[0]) * block_size % alignment:
        _pop(tables)
