"""Blocks, the free queue and the prefix index: invariants B1, B4-B6 and B8-B10."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from mini_vllm.block_pool import (
    ROOT_HASH,
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    hash_block_tokens,
)
from mini_vllm.config import SamplingParams
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request
from mini_vllm.tests.support import Scenario, for_all, for_scenarios
from mini_vllm.tests.watching import kv_state, watch_calls


def queue_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue.get_all_free_blocks()]


class PoolUnderTest:
    """A pool, random operations on it, and an oracle made of plain containers.

    The oracle's `free` is an OrderedDict from block id to the hash it still carries: the front is
    the next victim. `used` maps a block id to [references, hash].
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free: OrderedDict[int, int | None] = OrderedDict(
            (block_id, None) for block_id in range(1, num_blocks)
        )
        self.used: dict[int, list] = {}
        self.next_hash = 100

    def run(self, operation: str, number: int) -> None:
        """Apply one operation to both, choosing its blocks by `number`."""
        blocks = self.pool.blocks
        if operation == "take":
            count = number % 4
            if count > len(self.free):
                with pytest.raises(ValueError, match=f"num_blocks={count}"):
                    self.pool.get_new_blocks(count)
                return
            taken = self.pool.get_new_blocks(count)
            expected = [self.free.popitem(last=False)[0] for _ in range(count)]
            assert [block.block_id for block in taken] == expected
            self.used |= {block_id: [1, None] for block_id in expected}
        elif operation == "release" and self.used:
            block_id = sorted(self.used)[number % len(self.used)]
            self.pool.free_blocks([blocks[block_id]])
            self.used[block_id][0] -= 1
            if self.used[block_id][0] == 0:
                self.free[block_id] = self.used.pop(block_id)[1]
        elif operation == "touch":
            block_id = 1 + number % (len(blocks) - 1)
            self.pool.touch([blocks[block_id]])
            if block_id in self.free:
                self.used[block_id] = [0, self.free.pop(block_id)]
            self.used[block_id][0] += 1
        elif operation == "cache" and self.used:
            block_id = sorted(self.used)[number % len(self.used)]
            # Every third time an old hash again: several blocks may hold the same content.
            block_hash = 100 if number % 3 == 0 else self.next_hash
            self.next_hash += 1
            self.pool.cache_full_blocks([blocks[block_id]], [block_hash])
            if self.used[block_id][1] is None:
                self.used[block_id][1] = block_hash


def pool_operations(st):
    operation = st.sampled_from(["take", "take", "release", "release", "touch", "cache", "cache"])
    return st.lists(st.tuples(operation, st.integers(0, 1000)), max_size=60)


@pytest.mark.slow
@for_all(lambda st: st.integers(2, 12), pool_operations, max_examples=120)
def test_b1_a_block_is_queued_exactly_when_nobody_references_it(num_blocks, operations):
    under_test = PoolUnderTest(num_blocks)
    for operation in operations:
        under_test.run(*operation)
        pool = under_test.pool
        unreferenced = {b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null}
        queued = queue_ids(pool)
        assert set(queued) == unreferenced
        assert len(queued) == len(set(queued)), "a block is queued twice"


@pytest.mark.slow
@for_all(lambda st: st.integers(2, 12), pool_operations, max_examples=120)
def test_b4_a_freed_block_keeps_its_hash_and_revives_from_anywhere_in_the_queue(
    num_blocks, operations
):
    under_test = PoolUnderTest(num_blocks)
    for operation in operations:
        pool, before = under_test.pool, queue_ids(under_test.pool)
        hashes = [block.block_hash for block in pool.blocks]
        under_test.run(*operation)
        if operation[0] == "release":
            assert [block.block_hash for block in pool.blocks] == hashes, "freeing forgot a prefix"
        if operation[0] == "touch":
            touched = 1 + operation[1] % (num_blocks - 1)
            assert queue_ids(pool) == [i for i in before if i != touched]
            assert pool.blocks[touched].block_hash == hashes[touched]


@pytest.mark.slow
@for_all(lambda st: st.integers(2, 12), pool_operations, max_examples=120)
def test_b5_block_0_is_never_queued_handed_out_hashed_or_counted(num_blocks, operations):
    under_test = PoolUnderTest(num_blocks)
    for operation in operations:
        under_test.run(*operation)
        pool = under_test.pool
        assert pool.null_block is pool.blocks[0]
        assert pool.null_block.is_null
        assert pool.null_block.block_hash is None
        assert 0 not in queue_ids(pool)
        assert 0 not in under_test.used
        assert pool.get_usage() == pytest.approx(len(under_test.used) / (num_blocks - 1))


@pytest.mark.slow
@for_all(lambda st: st.integers(2, 12), pool_operations, max_examples=120)
def test_b6_the_free_counter_equals_a_walk_in_either_direction(num_blocks, operations):
    under_test = PoolUnderTest(num_blocks)
    for operation in operations:
        under_test.run(*operation)
        queue = under_test.pool.free_queue
        forward = queue.get_all_free_blocks()
        backward = []
        block = queue._tail.prev_free
        while block is not queue._head:
            backward.append(block)
            block = block.prev_free
        assert forward == backward[::-1]
        assert queue.num_free_blocks == len(forward) == under_test.pool.get_num_free_blocks()


@pytest.mark.slow
@for_all(lambda st: st.integers(2, 12), pool_operations, max_examples=120)
def test_b8_every_hashed_block_is_indexed_and_every_indexed_block_is_hashed(num_blocks, operations):
    under_test = PoolUnderTest(num_blocks)
    for operation in operations:
        under_test.run(*operation)
        pool = under_test.pool
        hashed = {(b.block_hash, b.block_id) for b in pool.blocks if b.block_hash is not None}
        indexed = {
            (block_hash, block_id)
            for block_hash, held in pool.cached_block_hash_to_block.items()
            for block_id in held
        }
        assert hashed == indexed
        assert all(pool.cached_block_hash_to_block.values()), "an empty entry stayed behind"


@pytest.mark.slow
@for_all(lambda st: st.integers(2, 12), pool_operations, max_examples=120)
def test_b10_blocks_are_evicted_front_first_and_only_when_taken(num_blocks, operations):
    """Queue order and surviving hashes equal those of an OrderedDict, after every operation."""
    under_test = PoolUnderTest(num_blocks)
    for operation in operations:
        under_test.run(*operation)
        pool = under_test.pool
        assert queue_ids(pool) == list(under_test.free)
        expected = dict(under_test.free) | {i: h for i, (_, h) in under_test.used.items()}
        assert {b.block_id: b.block_hash for b in pool.blocks[1:]} == expected
        references = {i: count for i, (count, _) in under_test.used.items()}
        assert {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt} == references


@pytest.mark.slow
@for_scenarios(150, policies=("fcfs",), caching=(True,))
def test_b10_in_an_engine_a_prefix_is_lost_only_from_a_newly_allocated_block(scenario: Scenario):
    def watch(call):
        after = kv_state(call.kv)
        lost = {
            block_id
            for block_id, (old, new) in enumerate(
                zip(call.before["blocks"], after["blocks"], strict=True)
            )
            if old[1] is not None and new[1] != old[1]
        }
        allocating = call.name == "allocate_slots"
        taken = [block.block_id for block in call.result or ()] if allocating else []
        adopted = {block.block_id for block in call.adopted}
        assert lost <= set(taken)
        assert taken == [i for i in call.before["queue"] if i not in adopted][: len(taken)]

    watch_calls(scenario, watch)


# ------------------------------------------------------------------ the hash (B9)


def chain(token_ids: list[int], block_size: int, manager: KVCacheManager) -> list[int]:
    """The engine's own chained hashes of a sequence's full blocks."""
    request = Request("r", token_ids, SamplingParams())
    manager.get_computed_blocks(request)
    return request.block_hashes


@pytest.mark.slow
@for_all(
    lambda st: st.lists(st.integers(0, 1), min_size=1, max_size=12),
    lambda st: st.lists(st.integers(0, 1), min_size=1, max_size=12),
    lambda st: st.integers(1, 4),
    max_examples=120,
)
def test_b9_hashes_are_equal_exactly_when_the_whole_prefixes_are(first, second, block_size):
    manager = KVCacheManager(2, block_size)
    hashes = chain(first, block_size, manager), chain(second, block_size, manager)
    assert [len(h) for h in hashes] == [len(first) // block_size, len(second) // block_size]
    for i in range(len(hashes[0])):
        for j in range(len(hashes[1])):
            same_prefix = first[: (i + 1) * block_size] == second[: (j + 1) * block_size]
            assert (hashes[0][i] == hashes[1][j]) == same_prefix


def test_prefix_hash_is_chained():
    """B9: the same four tokens under another parent are another prefix."""
    tokens = [1, 2, 3, 4]
    first = hash_block_tokens(ROOT_HASH, tokens)
    assert hash_block_tokens(ROOT_HASH, tokens) == first
    assert hash_block_tokens(first, tokens) != first


def test_the_hash_of_a_block_repeats_across_processes():
    """Tuples of ints do not use Python's per-process string seed, so traces can be compared."""
    assert hash_block_tokens(ROOT_HASH, [1, 2, 3, 4]) == hash((0, (1, 2, 3, 4)))


# ------------------------------------------------------------------ worked cases


def test_free_queue_o1_middle_removal():
    """Removing from the middle relinks two neighbours and reads no other block."""

    class Counting(KVCacheBlock):
        reads = 0

        def __getattribute__(self, name):
            if name in ("prev_free", "next_free"):
                Counting.reads += 1
            return super().__getattribute__(name)

    def reads_of_middle_removal(length: int) -> int:
        blocks = [Counting(i) for i in range(length)]
        queue = FreeKVCacheBlockQueue(blocks)
        Counting.reads = 0
        queue.remove(blocks[length // 2])
        reads = Counting.reads
        left = [b.block_id for b in queue.get_all_free_blocks()]
        assert left == [i for i in range(length) if i != length // 2]
        return reads

    assert reads_of_middle_removal(5) == reads_of_middle_removal(500)


def test_a_new_queue_is_ordered_by_block_id_and_a_freed_block_goes_to_the_back():
    pool = BlockPool(5)
    assert [b.block_id for b in pool.get_new_blocks(2)] == [1, 2]
    pool.free_blocks([pool.blocks[2], pool.blocks[1]])
    assert queue_ids(pool) == [3, 4, 2, 1]


def test_popleft_from_an_empty_queue_raises_and_changes_nothing():
    queue = FreeKVCacheBlockQueue([])
    with pytest.raises(ValueError, match="no free blocks"):
        queue.popleft()
    assert queue.num_free_blocks == 0


def test_removing_a_block_that_is_not_queued_raises():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(1)])
    block = queue.popleft()
    with pytest.raises(RuntimeError, match="block 1 is not in the free queue"):
        queue.remove(block)


def test_asking_for_more_blocks_than_are_free_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="num_blocks=4: only 3 blocks are free"):
        pool.get_new_blocks(4)
    assert queue_ids(pool) == [1, 2, 3]


def test_a_lookup_returns_the_earliest_surviving_block_of_a_hash():
    """D2: several blocks may hold one prefix; losing the first falls back to the second."""
    pool = BlockPool(4)
    first, second = pool.get_new_blocks(2)
    pool.cache_full_blocks([first, second], [77, 77])
    assert pool.get_cached_block(77) is first
    pool.free_blocks([first])
    pool.get_new_blocks(2)  # block 3, then block 1 again
    assert pool.get_cached_block(77) is second


def test_caching_a_hashed_or_null_block_again_is_ignored():
    pool = BlockPool(3)
    (block,) = pool.get_new_blocks(1)
    pool.cache_full_blocks([block, pool.null_block], [5, 6])
    pool.cache_full_blocks([block], [7])
    assert (block.block_hash, pool.null_block.block_hash) == (5, None)
    assert list(pool.cached_block_hash_to_block) == [5]


def test_usage_counts_allocatable_blocks_only():
    pool = BlockPool(5)
    assert pool.get_usage() == 0.0
    pool.get_new_blocks(3)
    assert pool.get_usage() == 0.75


def test_a_pool_of_one_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks=1: need at least 2"):
        BlockPool(1)
