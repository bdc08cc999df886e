"""Block tables of several groups of layers over one pool, behind the manager's face.

Promises: a prefix is hit as far as every group has it, which is found by asking the groups in turn
until none shortens it; groups take and give blocks in their order; windows free what they have
passed before anything is taken. Mirrors `vllm/v1/core/kv_cache_coordinator.py:392`
`HybridKVCacheCoordinator`, and, of one group, `UnitaryKVCacheCoordinator`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mini_vllm.block_pool import BlockPool, KVCacheBlock
from mini_vllm.checks import whole
from mini_vllm.config import MAMBA_CACHE_MODES
from mini_vllm.feature import Feature
from mini_vllm.kv.groups import (
    AlignedMambaGroup,
    CacheGroup,
    MambaGroup,
    SlidingWindowGroup,
    Table,
    full_hit,
    state_hit,
    window_hit,
)
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec
from mini_vllm.plan import Gate, SchedulerOutput
from mini_vllm.request import Request

_LOOK_UP = {
    CacheGroup: full_hit, SlidingWindowGroup: window_hit, MambaGroup: state_hit,
    AlignedMambaGroup: state_hit,
}  # fmt: skip


class HybridKVCacheManager(KVCacheManager):
    """As `KVCacheManager`, with a table per request and group.

    Hits are a list of tables, one per group; everything else keeps its meaning.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        block_pool: Callable[[int, bool], BlockPool] = BlockPool,
        *,
        kv_specs: Sequence[KVCacheSpec],
    ) -> None:
        """Create an empty cache.

        Args:
            num_blocks: physical blocks of the pool, the null block included.
            block_size: tokens per block of the groups that say nothing else.
            enable_caching: keep and look up full blocks by prefix hash.
            block_pool: the pool's class, called with `(num_blocks, enable_caching)`.
            kv_specs: the groups, at least one.

        Raises:
            ValueError: no group, one that is not a `KVCacheSpec` or holds a size below its minimum,
                or an argument below its own.
        """
        whole("num_blocks", num_blocks, 2, need="at least 2 (block 0 is reserved)")
        whole("block_size", block_size, 1)
        check_specs(kv_specs)
        sizes = [spec.block_size or block_size for spec in kv_specs]
        # A prefix is hashed in the smallest steps in which any group needs it.
        super().__init__(num_blocks, math.gcd(*sizes), enable_caching, block_pool)
        pool = self.block_pool
        self.groups = [
            _kind_of(spec)(index, spec, size, pool)
            for index, (spec, size) in enumerate(zip(kv_specs, sizes, strict=True))
        ]
        self.alignment = math.lcm(*sizes)
        """Tokens; the length of every hit is a multiple."""
        equal: dict[tuple[type, int, int | None], list[CacheGroup]] = {}
        for group in self.groups:
            kind = type(group), group.block_size, group.spec.sliding_window
            equal.setdefault(kind, []).append(group)
        self._kinds = sorted(equal.values(), key=lambda groups: not _is_full(groups))

    def new_step_starts(self) -> None:
        """A step is being planned; see `MambaGroup`."""
        for group in self.groups:
            group.new_step_starts()

    def ends_at_blocks(self, request: Request, start: int, num_new: int) -> int:
        """How many of the tokens wanted may be planned; see `AlignedMambaGroup`."""
        for group in self.groups:
            if isinstance(group, AlignedMambaGroup):
                return group.ends_at_blocks(request, start, num_new)
        return num_new

    # ------------------------------------------------------------------ tables

    def get_blocks(self, request_id: str) -> Table:
        """The request's table in the first group."""
        return self.groups[0].tables.get(request_id, [])

    def get_block_ids(self, request_id: str, group: int = 0) -> list[int]:
        """Physical block ids of a group's table in sequence order, 0 where a window has passed."""
        return [block.block_id for block in self.groups[group].tables.get(request_id, ())]

    # ------------------------------------------------------------------ hits

    def get_computed_blocks(self, request: Request) -> tuple[Any, int]:
        """The tables of the longest cached prefix, one per group, and its length in tokens."""
        nothing: list[Table] = [[] for _ in self.groups]
        if not self.enable_caching or request.sampling_params.skip_reading_prefix_cache:
            return nothing, 0
        self._extend_hashes(request)
        hits, num_hits = self._find_longest_hit(request)
        self.stats.record(request.num_tokens, num_hits, request.num_preemptions > 0)
        return hits, num_hits

    def _find_longest_hit(self, request: Request) -> tuple[list[Table], int]:
        """Each kind of group accepts a length or shortens it, until none does.

        `vllm/v1/core/kv_cache_coordinator.py:503`
        `HybridKVCacheCoordinator.find_longest_cache_hit`. With drafts that read hidden states each
        kind leaves its last block out once per length.
        """
        most = length = request.num_tokens - 1
        found: dict[int, Table] = {}
        dropped: set[int] = set()
        while True:
            now = length
            for number, groups in enumerate(self._kinds):
                size = groups[0].block_size
                if _is_full(groups) and groups[0].index in found:
                    now = now // size * size  # a prefix of a prefix is there, too
                    continue
                drops = self.use_eagle and number not in dropped
                limit = now
                if drops and len(self._kinds) > 1:
                    limit = min(now + size, most)
                look_up = _LOOK_UP[type(groups[0])]
                hashes = self._hashes(request, size)
                tables = look_up(groups, hashes, drops, self.alignment, limit)
                came = len(tables[0]) * size
                if drops:
                    dropped.add(number)
                elif came < now:
                    dropped.clear()
                now = came
                found |= {g.index: t for g, t in zip(groups, tables, strict=True)}
            if now >= length or len(self._kinds) == 1 or self._is_simple:
                length = now
                break
            length = now
        first = self._kinds[0]  # as at the pin, where a second kind of full attention stays longer
        for group in first if _is_full(first) else ():
            del found[group.index][length // group.block_size :]
        return [found[group.index] for group in self.groups], length

    @property
    def _is_simple(self) -> bool:
        """One kind of full attention and one other: the second cannot shorten the first twice."""
        return len(self._kinds) == 2 and _is_full(self._kinds[0])

    def _hashes(self, request: Request, size: int) -> Sequence[int]:
        """Hash of every full block of this size: that of its last step, which all before is in."""
        step = size // self.block_size
        return request.block_hashes[step - 1 :: step] if step > 1 else request.block_hashes

    # ------------------------------------------------------------------ room

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Any = ()
    ) -> int:
        """Free blocks it takes to hold `num_tokens` in all groups, nothing computed yet."""
        return self.num_needed(request_id, num_tokens, new_computed_blocks, 0)

    def num_needed(
        self, request_id: str, num_tokens: int, hits: Sequence[Table], num_computed: int,
        is_capped: bool = False,
    ) -> int:  # fmt: skip
        """Free blocks it takes to hold `num_tokens` in all groups, `num_computed` of them computed;
        `is_capped`: of a window no more than it holds at a time."""
        needed = 0
        for group, blocks in zip(self.groups, hits or [[]] * len(self.groups), strict=True):
            most = None
            if is_capped:
                longest = self.max_model_len or num_tokens
                most = group.most_blocks(self.max_num_batched_tokens, longest)
            needed += group.num_needed(request_id, num_tokens, blocks, num_computed, most)
        return needed

    def full_sequence_fits(self, request: Request, new_computed_blocks: Any) -> bool:
        """Whether the whole current sequence would fit; of a window, what it holds at a time."""
        num_tokens = request.num_tokens
        if self.max_model_len is not None:
            num_tokens = min(num_tokens, self.max_model_len)
        needed = self.num_needed(
            request.request_id, num_tokens, new_computed_blocks, request.num_computed_tokens, True
        )
        return needed <= self.block_pool.get_num_free_blocks()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> list[KVCacheBlock] | None:
        """As `KVCacheManager.allocate_slots`, in every group or in none.

        What the windows have passed is freed first, and stays freed where the rest is refused, as
        `vllm/v1/core/kv_cache_manager.py:373` `KVCacheManager.allocate_slots` has it.
        """
        if num_new_tokens < (0 if num_external_computed_tokens else 1):
            raise ValueError(f"num_new_tokens={num_new_tokens}: need at least 1")
        request_id, computed = request.request_id, request.num_computed_tokens
        hits = new_computed_blocks or [[] for _ in self.groups]
        num_tokens = computed + num_new_tokens
        num_slots = num_tokens + num_lookahead_tokens
        if self.max_model_len is not None:
            num_slots = min(num_slots, self.max_model_len)
        for group in self.groups:
            group.remove_skipped_blocks(request_id, computed)
        needed = self.num_needed(request_id, num_slots, hits, computed)
        if needed > self.block_pool.get_num_free_blocks():
            return None
        if any(hits) or num_external_computed_tokens:
            for group, blocks in zip(self.groups, hits, strict=True):
                group.adopt(request_id, blocks, computed, num_external_computed_tokens)
        new = [block for group in self.groups for block in group.extend(request_id, num_slots)]
        if self.enable_caching and not delay_cache_blocks:
            self.cache_blocks(request, min(num_tokens, request.num_tokens))
        return new

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Index what a later hit can use of the first `num_tokens` tokens, in every group."""
        if not self.enable_caching:
            return
        self._extend_hashes(request)
        aligned = num_tokens // self.alignment * self.alignment
        for group in self.groups:
            hashes = self._hashes(request, group.block_size)
            group.cache_blocks(request, aligned, hashes, self.alignment)

    def free(self, request: Request) -> None:
        """Release the tables, group by group, tail first. Without blocks a no-op."""
        for group in self.groups:
            group.free(request.request_id)

    def forget_uncomputed(self, request: Request) -> None:
        """Take blocks that will not be computed after all out of the index, in every group."""
        for group in self.groups:
            computed = request.num_computed_tokens // group.block_size
            for block in group.tables.get(request.request_id, [])[computed:]:
                self.block_pool.evict(block)


def num_blocks_of(
    kv_specs: Sequence[KVCacheSpec], num_tokens: int, block_size: int, max_num_batched_tokens: int,
    max_model_len: int,
) -> int:  # fmt: skip
    """Blocks without which a request of `num_tokens` tokens is never admitted.

    Raises:
        ValueError: as `HybridKVCacheManager` for the groups; a number below 1.
    """
    check_specs(kv_specs)
    for name, value in (
        ("num_tokens", num_tokens), ("block_size", block_size),
        ("max_num_batched_tokens", max_num_batched_tokens), ("max_model_len", max_model_len),
    ):  # fmt: skip
        whole(name, value, 1)
    needed, pool = 0, BlockPool(2, False)
    for spec in kv_specs:
        size = spec.block_size or block_size
        blocks = -(-num_tokens // size)
        most = _kind_of(spec)(0, spec, size, pool).most_blocks(
            max_num_batched_tokens, max_model_len
        )
        needed += blocks if most is None else min(blocks, most)
    return needed


def check_specs(kv_specs: Sequence[KVCacheSpec]) -> None:
    """Refuse groups that no manager can keep.

    Raises:
        ValueError: none; what is not a `KVCacheSpec`; a window or a block below 1 token; an unknown
            mode.
    """
    if not kv_specs:
        raise ValueError("kv_specs is empty: need at least one group")
    for index, spec in enumerate(kv_specs):
        if not isinstance(spec, KVCacheSpec):
            raise ValueError(f"kv_specs[{index}]={spec!r}: need a KVCacheSpec")
        for name in ("block_size", "sliding_window"):
            if (value := getattr(spec, name)) is not None:
                whole(f"kv_specs[{index}].{name}", value, 1, need="at least 1, or None")
        if isinstance(spec, MambaSpec):
            if spec.mamba_cache_mode not in MAMBA_CACHE_MODES:
                raise ValueError(
                    f"kv_specs[{index}].mamba_cache_mode={spec.mamba_cache_mode!r}: need one of "
                    f"{', '.join(MAMBA_CACHE_MODES)}"
                )
            if spec.sliding_window is not None:
                window = spec.sliding_window
                raise ValueError(f"kv_specs[{index}].sliding_window={window}: need None for states")


def _kind_of(spec: KVCacheSpec) -> type[CacheGroup]:
    if isinstance(spec, MambaSpec):
        return AlignedMambaGroup if spec.mamba_cache_mode == "align" else MambaGroup
    return CacheGroup if spec.sliding_window is None else SlidingWindowGroup


def _is_full(groups: Sequence[CacheGroup]) -> bool:
    return type(groups[0]) is CacheGroup


class StateGate(Gate):
    """Has a manager whose groups keep states know when a step is being planned, and cuts prompts
    where a state can be kept.

    At the pin the scheduler does both: `vllm/v1/core/sched/scheduler.py:362` `Scheduler.schedule`.
    """

    def __init__(self, kv: HybridKVCacheManager | None = None) -> None:
        self.kv = kv
        """The manager in use, which a restart of the engine replaces."""

    def begins(self, plan: SchedulerOutput) -> None:
        """What the last step was to write is there."""
        assert self.kv is not None
        self.kv.new_step_starts()

    def limit(self, request: Request, start: int, num_new: int) -> int:
        """See `AlignedMambaGroup.ends_at_blocks`."""
        assert self.kv is not None
        return self.kv.ends_at_blocks(request, start, num_new)


class StateCaches(Feature):
    """Joins an engine whose model keeps states; builds its managers."""

    name = "kv"

    def __init__(self, kv_specs: Sequence[KVCacheSpec]) -> None:
        self.kv_specs = kv_specs
        self.gate = self._gate = StateGate()

    def build(self, *arguments: Any) -> HybridKVCacheManager:
        """A manager, which from now on is the one that the gate speaks to; as of `EngineParts`."""
        self._gate.kv = HybridKVCacheManager(*arguments, kv_specs=self.kv_specs)
        return self._gate.kv
